"""What heads attend to: sums are those of naive loops, planted heads are called and nothing else, p holds its rate."""

import dataclasses
import functools
import itertools
import string

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import t as student
from scipy.stats import ttest_1samp

import headwater as hw
from headwater.errors import InputError
from headwater.figures.style import figure_of
from headwater.heads import behaviour as behaviours
from headwater.heads import patterns
from headwater.heads.patterns import BEHAVIOURS, Behaviour, attention_on, pattern_sums, position_share, token_kinds
from headwater.planted import induction, name_mover
from headwater.planted.circuits import (
    DUPLICATE_NAME_HEAD,
    INDUCTION_HEAD,
    INHIBITION_HEAD,
    NAME_MOVER_HEAD,
    PREVIOUS_TOKEN_HEAD,
    WORDS,
)
from headwater.stats.significance import excess_p
from tests import chance
from tests.own_models import own_model
from tests.random_models import random_model
from tests.tiny import embedded, tiny_hooked, tiny_model, tiny_tokenizer

QUIET = {"progress": False, "copying": False}
NAMES = list(BEHAVIOURS)
TEXTS = [" Paris is . the , capital six five four", " A B C cat , dog cat B A\n one two", " the the of"]


def tiny(family, seed=5):
    return tiny_hooked(family, seed)


@functools.cache
def planted(build=induction):
    made = build()
    return hw.load(made.model, tokenizer=made.tokenizer)


def naive_keys(words, tokens, query, name):
    """The keys of a query, from the definitions alone."""
    order = ["one", "two", "three", "four", "five", "six"]
    series = set(itertools.pairwise(order)) | set(itertools.pairwise("ABC"))
    earlier = range(query)
    said = [word.strip(" ") for word in words]
    return {
        "current_token": [query] if query else [],
        "first_token": [0] if query else [],
        "previous_token": [query - 1] if query else [],
        "delimiter": [k for k in earlier if said[k] == "\n" or (said[k] and set(said[k]) <= set(string.punctuation))],
        "duplicate_token": [k for k in earlier if tokens[k] == tokens[query]],
        "induction": [k + 1 for k in earlier if tokens[k] == tokens[query]],
        "successor": [k for k in earlier if (said[query], said[k]) in series],
    }[name]


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox", "qwen2"])
def test_sums_equal_naive_loops_over_the_patterns_of_padded_texts(family):
    model = tiny(family)
    (found,) = pattern_sums(model, model.tokenize(TEXTS), token_kinds(model))
    for example, text in enumerate(TEXTS):
        tokens = model.tokenize(text).tokens
        words = model.token_strings(tokens[0].tolist())
        if model.bos:
            words = ("", *words[1:])  # the beginning is no punctuation
        _, cache = model.raw.run_with_cache(tokens)
        for place, name in enumerate(NAMES):
            keys = [naive_keys(words, tokens[0], query, name) for query in range(len(words))]
            assert int(found["queries"][example, place]) == sum(map(bool, keys)), name
            assert int(found["keys"][example, place]) == sum(map(len, keys)), name
            for layer in range(model.shape.n_layers):
                pattern = cache["pattern", layer][0]
                expected = torch.stack([pattern[:, q, k].sum(-1) for q, k in enumerate(keys) if k] or [torch.zeros(4)])
                by_chance = sum(len(k) / (q + 1) for q, k in enumerate(keys))
                torch.testing.assert_close(found["on"][example, place, layer], expected.sum(0), rtol=1e-5, atol=1e-5)
                shares = torch.full((model.shape.n_heads,), by_chance)
                torch.testing.assert_close(found["expected"][example, place, layer], shares, rtol=1e-5, atol=1e-5)


@pytest.mark.oracle
def test_expected_and_variance_are_those_of_every_choice_of_as_many_keys():
    pattern = torch.rand(1, 3, 6, 6).tril()
    keys = (torch.rand(1, 1, 6, 6) < 0.4).tril()
    found = attention_on(pattern, keys, torch.ones(1, 6, 6, dtype=torch.bool).tril())
    mean, variance = torch.zeros(3), torch.zeros(3)
    for query in range(6):
        count = int(keys[0, 0, query].sum())
        choices = itertools.combinations(range(query + 1), count)
        sums = torch.stack([pattern[0, :, query, list(choice)].sum(-1) for choice in choices])
        mean, variance = mean + sums.mean(0), variance + sums.var(0, correction=0)
    torch.testing.assert_close(found["expected"][0, 0], mean)
    torch.testing.assert_close(found["variance"][0, 0], variance, rtol=1e-4, atol=1e-5)


@pytest.mark.oracle
@pytest.mark.parametrize("name", ["looks ahead", "looks ahead, rotary"])
def test_where_attention_looks_ahead_keys_are_drawn_from_all_positions(name):
    model = own_model(name)
    tokens = torch.tensor([[3, 5, 3, 9, 5, 3], [4, 4, 8, 2, 1, 8]])
    (found,) = pattern_sums(model, model.tokenize(tokens), token_kinds(model))
    _, cache = model.raw.run_with_cache(tokens)
    place = NAMES.index("duplicate_token")
    counts = torch.tensor([[0, 0, 1, 0, 1, 2], [0, 1, 0, 0, 0, 1]]).float()
    expected = (counts.sum(1) / 6)[:, None, None].expand(-1, *found["on"].shape[2:])
    torch.testing.assert_close(found["expected"][:, place], expected)
    by_hand = cache["pattern", 0][0, :, [2, 4, 5, 5], [0, 1, 0, 2]].sum(-1)
    torch.testing.assert_close(found["on"][0, place, 0], by_hand)


# --- what is called


def calls(result):
    return {(r.layer, r.head, r.behaviour) for r in result.table[result.table["called"]].itertuples()}


@pytest.mark.planted
def test_planted_previous_token_and_induction_heads_are_called_and_nothing_else():
    result = hw.attention_behaviour(planted(), **QUIET)
    resting = (*INDUCTION_HEAD, "first_token")  # where it finds nothing it rests on the first position
    assert calls(result) == {(*PREVIOUS_TOKEN_HEAD, "previous_token"), (*INDUCTION_HEAD, "induction"), resting}
    labels = result.heads.set_index(["layer", "head"])["label"]
    assert labels[labels != "none"].to_dict() == {
        PREVIOUS_TOKEN_HEAD: "previous_token",
        INDUCTION_HEAD: "induction",
    }
    best = result.table.set_index(["layer", "head", "behaviour"])
    assert best.loc[(*INDUCTION_HEAD, "induction"), "score"] > 0.99
    assert best.loc[(*INDUCTION_HEAD, "first_token"), "score"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.planted
def test_planted_heads_are_called_on_text_too_and_where_they_rest_otherwise():
    words = [WORDS[start : start + length] for start, length in ((0, 4), (3, 5), (6, 6), (9, 5), (12, 4), (15, 5))]
    texts = ["".join(f" {word}" for word in (*once, *once)) for once in words]
    result = hw.attention_behaviour(planted(), texts, **QUIET)
    on_text = result.table[result.table["on"] == "text"].set_index(["layer", "head", "behaviour"])
    assert on_text.loc[(*PREVIOUS_TOKEN_HEAD, "previous_token"), "called"]
    assert on_text.loc[(*INDUCTION_HEAD, "induction"), ["score", "called"]].tolist() == [
        pytest.approx(1, abs=1e-3),
        True,
    ]
    assert set(on_text["sequences"]) == {0, 6}


@pytest.mark.planted
def test_heads_of_another_circuit_are_only_said_to_rest():
    result = hw.attention_behaviour(planted(name_mover), **QUIET)
    rest = {DUPLICATE_NAME_HEAD, INHIBITION_HEAD, NAME_MOVER_HEAD}
    assert {name for *_, name in calls(result)} == {"first_token"}
    assert {(layer, head) for layer, head, _ in calls(result)} <= rest


def test_of_random_models_no_more_than_the_nominal_rate_is_called():
    found = []
    for seed in range(3):
        for family in ("gpt2", "llama"):
            model = hw.load(tiny_model(family, seed=chance.seed_of(family, seed)), tokenizer=tiny_tokenizer())
            found.append(hw.attention_behaviour(model, sequences=8, length=12, **QUIET).table["called"].mean())
    assert np.mean(found) <= 0.05


@pytest.mark.parametrize("liked", [False, True])
def test_p_holds_its_rate_for_attention_that_knows_nothing_also_where_all_queries_like_one_key(liked):
    sequences, length, trials = 12, 20, 1500
    n = sequences * trials
    keys = torch.rand(1, n, 1, length).lt(0.2).expand(-1, -1, length, -1)
    visible = torch.ones(n, length, length, dtype=torch.bool).tril()
    scores = (2 * torch.randn(n, 1, 1 if liked else length, length)).expand(-1, -1, length, -1)
    pattern = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
    sums = attention_on(pattern, keys & visible, visible)
    found, expected, variance = (sums[name].reshape(sequences, trials).double().numpy() for name in patterns.SUMS)
    p = excess_p(found - expected, variance, np.full(sequences, float(length)))
    for level in (0.05, 0.01):
        assert (p <= level).mean() <= level + 5 * (level * (1 - level) / trials) ** 0.5


def test_p_is_that_of_student_s_test_where_units_differ_more_than_the_null_lets_them():
    differences = np.array([[0.2, 1.0, 0.0], [0.4, 1.0, 0.0], [0.1, 1.0, 0.0]])
    variance, once = np.array([[0.0, 0.3, 0.0]] * 3), np.ones(3)
    p = excess_p(differences, variance, once)
    assert p[0] == pytest.approx(ttest_1samp(differences[:, 0], 0, alternative="greater").pvalue)
    assert p[1] == pytest.approx(student.sf(3 / 0.9**0.5, 2))
    assert p[2] == 1.0
    assert np.isnan(excess_p(differences[:1], variance[:1], once[:1])).all()


def test_units_of_different_sizes_are_alike_where_their_parts_are():
    sizes = np.array([3.0, 10.0, 40.0])
    p = excess_p(0.5 * sizes[:, None], 0.01 * sizes[:, None], sizes)
    assert p[0] == pytest.approx(student.sf(0.5 * 53 / 0.53**0.5, 2))


# --- the table


def test_scores_are_ratios_over_all_queries_with_intervals_over_sequences():
    model = tiny("llama")
    result = hw.attention_behaviour(model, TEXTS, sequences=4, length=8, **QUIET)
    (sums,) = pattern_sums(model, model.tokenize(TEXTS), token_kinds(model))
    on_text = result.table[result.table["on"] == "text"]
    for row in on_text.itertuples():
        place = NAMES.index(row.behaviour)
        queries = sums["queries"][:, place].sum()
        expected = sums["on"][:, place, row.layer, row.head].sum() / queries
        assert row.score == pytest.approx(float(expected), abs=1e-6)
        by_chance = float(sums["expected"][:, place, row.layer, row.head].sum() / queries)
        assert row.excess == pytest.approx((row.score - by_chance) / (1 - by_chance), abs=1e-5)
        single = sums["on"][:, place, row.layer, row.head] / sums["queries"][:, place]
        single = single[sums["queries"][:, place] > 0]
        assert float(single.min()) - 1e-6 <= row.low <= row.score + 1e-6
        assert row.score - 1e-6 <= row.high <= float(single.max()) + 1e-6
    assert set(on_text["behaviour"]) == set(NAMES)
    assert (result.table.groupby("on", sort=False).size() == 7 * len(result.heads)).all()


def test_batches_do_not_change_a_number():
    model = tiny("gemma2")
    whole, alone = (
        hw.attention_behaviour(model, TEXTS, sequences=5, length=8, batch_size=size, **QUIET) for size in (16, 1)
    )
    pd.testing.assert_frame_equal(whole.table, alone.table, rtol=1e-4, atol=1e-5)
    pd.testing.assert_frame_equal(whole.heads, alone.heads, rtol=1e-3, atol=1e-5)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    model = tiny("llama")
    asked = {"sequences": 6, "length": 6, **QUIET}
    whole = hw.attention_behaviour(model, TEXTS, **asked)
    monkeypatch.setattr(behaviours, "SEQUENCES_PER_PIECE", 2)
    run, counts = type(model).run, [0]

    def interrupted(self, *args, **options):
        counts[0] += 1
        if counts[0] == 3:
            raise KeyboardInterrupt
        return run(self, *args, **options)

    monkeypatch.setattr(type(model), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hw.attention_behaviour(model, TEXTS, out=tmp_path / "run", **asked)
    again = hw.attention_behaviour(model, TEXTS, out=tmp_path / "run", **asked)
    assert counts[0] == 3 + 3  # the third piece, and two of texts
    pd.testing.assert_frame_equal(again.table, whole.table, rtol=1e-5, atol=1e-6)


def test_without_a_tokenizer_tokens_of_a_kind_are_not_seen_and_the_rest_is():
    result = hw.attention_behaviour(own_model("plain"), sequences=4, length=6, **QUIET)
    unknown = result.table[result.table["behaviour"].isin(["delimiter", "successor"])]
    assert unknown[["score", "p_value", "q_value"]].isna().all(axis=None)
    assert not unknown["called"].any()
    assert result.table.loc[result.table["behaviour"] == "induction", "score"].notna().all()
    assert "On random tokens, delimiter, successor cannot be measured." in result.report()


def test_a_single_text_has_scores_and_nothing_is_called_on_it():
    result = hw.attention_behaviour(planted(), " ant bat cow dog ant bat cow dog", **QUIET)
    on_text = result.table[result.table["on"] == "text"]
    assert on_text["score"].max() == pytest.approx(1, abs=1e-3)
    assert on_text[["low", "high", "p_value"]].isna().all(axis=None)
    assert not on_text["called"].any()
    assert any("single sequence" in said for said in result.report())


def test_the_embedded_model_is_read_on_texts_of_its_world():
    result = hw.attention_behaviour(embedded(), sequences=4, **QUIET)
    assert list(result.table["on"].unique()) == ["random", "text"]
    assert isinstance(result.plot(), plt.Figure)
    ax = result.plot(on="text")
    assert isinstance(ax, plt.Axes)
    assert ax.get_title(loc="left") == "embedded: attention on text"
    with pytest.raises(InputError, match="on='texts' is not one of random, text, position"):
        result.plot(on="texts")


def test_the_maps_of_numbers_show_every_head_and_dots_where_chance_does_not_reach():
    result = hw.attention_behaviour(tiny("llama"), sequences=4, length=6, progress=False)
    heads = result.heads
    beyond = ((heads["copying"] > heads["copying_high"]) | (heads["copying"] < heads["copying_low"])).sum()
    ax = result.plot(on="copying")
    mesh, dots = ax.collections
    np.testing.assert_allclose(mesh.get_array().T.ravel(), heads["copying"], rtol=1e-6)
    assert len(dots.get_offsets()) == beyond
    figure = result.plot()
    titles = [one.get_title(loc="left") for one in figure.axes if one.get_title(loc="left")]
    assert titles == ["random tokens", "copying", "position"]
    assert result.plot(figure.axes[0], on="position") is figure.axes[0]


def two_before(tokens, kinds):
    found = torch.eye(tokens.shape[1], dtype=torch.bool).roll(2, 0).tril(-2)
    return found.expand(len(tokens), -1, -1)


def test_a_behaviour_from_outside_is_scored_called_and_drawn():
    with BEHAVIOURS.with_row("two_before", Behaviour("two positions before", two_before, "#8c5a3c", "X")):
        result = hw.attention_behaviour(tiny("llama"), sequences=4, length=8, **QUIET)
        rows = result.table[result.table["behaviour"] == "two_before"]
        assert rows["score"].between(0, 1).all()
        (legend,) = figure_of(result.plot(on="random")).legends
        assert any(text.get_text().startswith("two before (") for text in legend.get_texts())
    # Where the result is loaded, the behaviour need not be known.
    is_own = result.table["behaviour"] == "two_before"
    strongest = result.table.assign(called=is_own, excess=is_own * 1.0)
    assert "of its attention is on two before, " in " ".join(dataclasses.replace(result, table=strongest).report())


# --- positions


@pytest.mark.planted
def test_the_part_of_positions_is_all_for_a_head_that_reads_positions_and_none_for_one_that_reads_tokens():
    heads = hw.attention_behaviour(planted(), **QUIET).heads.set_index(["layer", "head"])["position"]
    assert heads[PREVIOUS_TOKEN_HEAD] > 0.999
    assert heads[INDUCTION_HEAD] < 0.01
    assert heads.drop([PREVIOUS_TOKEN_HEAD, INDUCTION_HEAD]).isna().all()  # they look everywhere alike


@pytest.mark.oracle
def test_the_part_of_positions_in_layer_0_is_what_position_embeddings_say_when_tokens_are_averaged():
    model = tiny("gpt2")
    result = hw.attention_behaviour(model, sequences=400, length=8, **QUIET)
    raw = model.raw.original_model
    block, wte, wpe = raw.transformer.h[0], raw.transformer.wte.weight, raw.transformer.wpe.weight
    ordinary = token_kinds(model).ordinary.nonzero()[:, 0]
    with torch.no_grad():
        x = block.ln_1(wte[ordinary][:, None] + wpe[1:9])
        q, k = (part.unflatten(-1, (4, 8)) for part in block.attn.c_attn(x).split(32, dim=-1)[:2])
        by_position = torch.einsum("p h d, r h d -> h p r", q.mean(0), k.mean(0)) / 8**0.5
        drawn = torch.randint(len(ordinary), (4000, 8))
        places = torch.arange(8)
        scores = torch.einsum("n p h d, n r h d -> n h p r", q[drawn, places], k[drawn, places]) / 8**0.5
    earlier = torch.ones(8, 8, dtype=torch.bool).tril()

    def centred(scores):
        mean = (scores * earlier).sum(-1, keepdim=True) / earlier.sum(-1, keepdim=True)
        return (scores - mean) * earlier

    expected = centred(scores.mean(0)).square().sum((-1, -2)) / centred(scores).square().sum((-1, -2)).mean(0)
    found = result.heads.loc[result.heads["layer"] == 0, "position"].to_numpy()
    assert np.abs(found - expected.numpy()).max() < 0.05
    # off the diagonal, where two tokens differ, the mean score is that of the averaged query and key
    torch.testing.assert_close(
        scores.mean(0)[:, earlier & ~torch.eye(8, dtype=torch.bool)],
        by_position[:, earlier & ~torch.eye(8, dtype=torch.bool)],
        atol=0.25,
        rtol=0,
    )


def test_the_part_of_positions_is_estimated_without_bias():
    n, cells = 6, torch.ones(1, 200, 5, 5).tril()
    noise = torch.randn(n, 200, 5, 5).tril()
    count = n * cells
    shares = position_share(count, noise.sum(0)[None], noise.square().sum(0)[None])
    assert float(shares.mean()) < 0.06  # 1/6 without the correction; cut off at 0
    both = noise + torch.randn(200, 5, 5).tril()
    assert float(position_share(count, both.sum(0)[None], both.square().sum(0)[None]).mean()) == pytest.approx(
        0.5, abs=0.1
    )


# --- what cannot be used


def test_texts_that_would_not_fit_in_the_context_are_refused_before_they_run():
    model = tiny("llama")
    with pytest.raises(InputError, match="A sequence has 81 tokens; the model reads at most 64"):
        hw.attention_behaviour(model, " cat" * 80, **QUIET)


def test_of_long_sequences_fewer_are_run_at_once(monkeypatch):
    model, sizes = tiny("llama"), []
    run = type(model).run

    def watched(self, tokens, *args, **options):
        sizes.append(len(tokens))
        return run(self, tokens, *args, **options)

    monkeypatch.setattr(type(model), "run", watched)
    a_row = 3 * (model.shape.n_heads + len(BEHAVIOURS)) * 13**2
    monkeypatch.setattr(patterns, "PATTERN_FLOATS", 2 * a_row)
    hw.attention_behaviour(model, sequences=5, length=6, **QUIET)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"texts": {"a": 1}}, "A dict was given"),
        ({"texts": []}, "give a text"),
        ({"sequences": 0}, "sequences=0 must be"),
        ({"length": 1}, "length=1 must be"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"batch_size": 0}, "batch_size=0 must be"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(given, message):
    with pytest.raises(InputError, match=message):
        hw.attention_behaviour(**({"model": tiny("llama"), **QUIET} | given))


def test_of_a_hybrid_the_layers_with_attention_are_read_and_the_others_named():
    model = hw.load(random_model("jamba"), tokenizer=tiny_tokenizer())
    with pytest.warns(UserWarning, match=r"^Layer 0 is left out: pattern of Jamba"):
        found = hw.attention_behaviour(model, embedding="raw", sequences=2, progress=False)
    assert found.heads["layer"].tolist() == [1] * 4
    assert found.heads["copying"].between(-1, 1).all()
    assert found.plot() is not None
