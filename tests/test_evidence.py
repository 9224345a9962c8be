"""From weights to a cause, on planted models whose movers are known, and against plain hooks and shuffled targets."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import headwater as hw
from headwater.causes import weights_to_cause
from headwater.causes.naming import BASELINES, NAMED, Choice, attention_to_source, head_effects, judged, names_of
from headwater.causes.prompts import relation_prompts
from headwater.causes.weights_to_cause import unrelated
from headwater.errors import InputError
from headwater.heads.classify import head_margins, layer_margins
from headwater.heads.relations import Relation, load_relations, tokenize_relations
from headwater.models.loading import weights_of
from headwater.patching import sweep as sweep_module
from headwater.planted.circuits import CERTAIN, Head, Layout, build_tokenizer, gpt2, word_token
from tests.planted_relations import relation

N = 32
TEMPLATE = "give {source} now"
RELATIONS = tuple(relation(name, "knowledge", N) for name in "abc")
QUIET = {"template": TEMPLATE, "embedding": "raw", "progress": False, "draws": 50}
LOOKS, HABIT, NEVER_LOOKS = (0, 0), (1, 3), (1, 4)


def plant(movers: dict[tuple[int, int], str], *, apart: bool = False, generic: bool = False) -> hw.HookedModel:
    """Three relations of one-hot codes; a head that looks and writes nothing, a habit, one that writes and never looks.

    Args:
        movers: heads at the last token that move a relation's answer from its source, by relation.
        apart: the mover of "a" hands its code to head 2.0, which writes the answer.
        generic: head 1.5 moves the answer of every relation, twice as strongly as any mover.
    """
    words = [word for one in RELATIONS for source, targets in one.pairs for word in (source, *targets)]
    tokenizer = build_tokenizer((), always=["give", "now", *words])
    layout = Layout(**{f"{kind}{name}": N for name in "abc" for kind in ("from", "to")}, mid=N, end=1, position=32)
    position, end = layout["position"], layout["end"]
    embedding, unembedding = torch.zeros(2, len(tokenizer), layout.size)
    embedding[word_token(tokenizer, "now")] = end[0]
    for one in RELATIONS:
        for place, (source, targets) in enumerate(one.pairs):
            embedding[word_token(tokenizer, source)] = layout[f"from{one.name}"][place]
            unembedding[word_token(tokenizer, targets[0])] = layout[f"to{one.name}"][place]
    sources = torch.cat([layout[f"from{name}"] for name in "abc"])
    rest = 0.5 * position[:1]
    anywhere = layout.total("position")

    def looking(names: str, read: torch.Tensor, write: torch.Tensor) -> Head:
        keys = sum(layout.total(f"from{name}") for name in names)
        return Head(query=CERTAIN * anywhere, key=keys + rest, read=read, write=write)

    def moves(name: str, strength: float) -> Head:
        return looking(name, layout[f"from{name}"], strength * layout[f"to{name}"])

    heads = {LOOKS: looking("abc", sources[:1], torch.zeros(1, layout.size))}
    heads[HABIT] = looking("abc", sum(layout.total(f"from{name}") for name in "abc"), 30 * layout["toa"][:1])
    heads[NEVER_LOOKS] = Head(CERTAIN * anywhere, rest, layout["froma"], 30 * layout["toa"])
    heads |= {head: moves(name, 5.0) for head, name in movers.items()}
    if apart:
        heads[1, 0] = looking("a", layout["froma"], layout["mid"])
        heads[2, 0] = Head(CERTAIN * end, 2 * end + rest, layout["mid"], 5 * layout["toa"])
    if generic:
        write = 10 * torch.cat([layout[f"to{name}"] for name in "abc"])
        heads[1, 5] = looking("abc", sources, write)
    planted = gpt2(
        tokenizer, embedding=embedding, positions=position, unembedding=unembedding, heads=heads, n_layers=3, n_heads=6
    )
    return hw.load(planted.model, tokenizer=planted.tokenizer)


@pytest.fixture(scope="module")
def three_movers():
    return plant({(1, 0): "a", (1, 1): "b", (1, 2): "c"})


@pytest.fixture(scope="module")
def suite(three_movers):
    return hw.evidence(three_movers, list(RELATIONS), **QUIET)


def test_each_mover_is_named_by_weights_and_attention_and_by_no_baseline(suite):
    assert suite.table["can"].all()
    assert suite.table["holds"].all()
    assert suite.table[["layer", "head", "rank"]].to_numpy().tolist() == [[1, 0, 1], [1, 1, 1], [1, 2, 1]]
    assert suite.table["family"].tolist() == ["1.0", "1.1", "1.2"]
    assert np.allclose(suite.table["share"].astype(float), 1.0)
    beside = suite.ways[suite.ways["way"].isin(BASELINES)]
    assert np.allclose(beside["share"].astype(float), 0.0, atol=1e-4)
    assert "3 of 3 relations individually exceed every baseline" in " ".join(suite.report())


def test_a_family_keeps_its_p_value_in_whatever_order_the_relations_are(suite):
    one_by_chance = replace(suite, strength=suite.strength.assign(b=0.0))
    p = one_by_chance.summary().set_index("family")["p_value"]
    assert sorted(p) == pytest.approx([1 / 51, 1 / 51, 1])
    for table in (one_by_chance.table[::-1], one_by_chance.table[1:]):
        again = replace(one_by_chance, table=table).summary().set_index("family")["p_value"]
        assert again.equals(p[again.index])


def test_a_baseline_that_is_level_is_seen_around_the_mark_of_weights_and_attention(suite):
    ax = suite.plot()
    marks = {line.get_label(): line for line in ax.lines}
    plt.close(ax.figure)
    for way in BASELINES:
        assert marks[way].get_markerfacecolor() == "none"
        assert marks[way].get_markersize() > marks[NAMED].get_markersize() + 2


def test_a_head_that_could_write_the_answer_and_never_looks_is_named_by_weights_alone(suite):
    rows = suite.ways.set_index(["relation", "way"])
    assert rows.loc[("a", "weights"), ["layer", "head"]].tolist() == list(NEVER_LOOKS)
    assert abs(rows.loc[("a", "weights"), "share"]) < 1e-4
    assert rows.loc[("a", "attention"), ["layer", "head"]].tolist() == list(LOOKS)


def test_one_relation_has_all_parts_and_says_who_moves_it(three_movers):
    found = hw.evidence(three_movers, RELATIONS[0], **QUIET)
    best = found.table.iloc[0]
    assert (best["layer"], best["head"]) == (1, 0)
    assert best["effect"] == pytest.approx(1.0, abs=1e-3)
    assert best["direct"] == pytest.approx(1.0, abs=1e-3)
    last = found.when[found.when["role"] == "last"].set_index("layer")["share"]
    assert last[1] == pytest.approx(0.0, abs=1e-4)
    assert last[2] == pytest.approx(1.0, abs=1e-4)
    assert found.passes == 2
    cost = found.cost.set_index("what")
    assert cost.loc["named"].iloc[0]["heads"] == "1.0"
    assert cost.loc["named"].iloc[0]["share"] == pytest.approx(1, abs=1e-3)
    habit = found.table[(found.table["layer"] == HABIT[0]) & (found.table["head"] == HABIT[1])].iloc[0]
    assert abs(habit["margin"]) < 1e-4
    assert habit["attention"] > 0.9


def test_two_redundant_movers_each_carry_half():
    model = plant({(1, 0): "a", (2, 4): "a", (1, 1): "b", (1, 2): "c"})
    found = hw.evidence(model, list(RELATIONS), **QUIET)
    of_a = found.table.iloc[0]
    assert (of_a["layer"], of_a["head"]) in {(1, 0), (2, 4)}
    assert of_a["share"] == pytest.approx(1.0, abs=1e-3)
    alone = hw.evidence(model, RELATIONS[0], **QUIET).table.set_index(["layer", "head"])["effect"]
    assert alone[1, 0] == pytest.approx(0.5, abs=1e-3)
    assert alone[2, 4] == pytest.approx(0.5, abs=1e-3)


def test_a_head_that_moves_everything_makes_one_family_and_no_claim():
    found = hw.evidence(plant({(1, 0): "a", (1, 1): "b"}, generic=True), list(RELATIONS), **QUIET)
    assert set(found.table["family"]) == {"1.5"}
    assert len(found.summary()) == 1
    assert not found.table["holds"].any()


def test_a_mover_that_a_second_head_reads_is_found_as_a_cause_and_not_by_its_weights():
    model = plant({(1, 1): "b", (1, 2): "c"}, apart=True)
    found = hw.evidence(model, list(RELATIONS), **QUIET)
    of_a = found.table.iloc[0]
    assert of_a["family"] == "1.0"
    assert not of_a["holds"]
    one = hw.evidence(model, RELATIONS[0], **QUIET)
    heads = one.table.set_index(["layer", "head"])
    assert heads.loc[(1, 0), "effect"] == pytest.approx(1.0, abs=1e-3)
    assert heads.loc[(1, 0), "direct"] == pytest.approx(0.0, abs=1e-3)
    assert heads.loc[(2, 0), "direct"] == pytest.approx(1.0, abs=1e-3)
    assert "not shown" in one.verdict


def test_what_a_model_cannot_do_is_a_sentence_and_not_a_number(three_movers):
    pairs = RELATIONS[0].pairs
    shuffled = Relation("shuffled", None, tuple((pairs[i][0], pairs[i - 7][1]) for i in range(N)))
    found = hw.evidence(three_movers, [shuffled, RELATIONS[1]], **QUIET)
    row = found.table.iloc[0]
    assert not row["can"]
    assert not row["holds"]
    assert np.isnan(row["share"])
    assert "includes 0" in row["reason"]
    one = hw.evidence(three_movers, shuffled, **QUIET)
    assert not one.is_measured
    assert one.table.empty
    assert "was not measured" in one.report()[0]
    with pytest.raises(InputError, match="was not measured"):
        one.plot()


def test_a_relation_whose_words_are_no_tokens_is_a_sentence_with_the_counts(three_movers):
    spelled = Relation("spelled", None, tuple((f"word{i}", f"other{i}") for i in range(40)))
    found = hw.evidence(three_movers, spelled, **QUIET)
    assert "0 of its 40 pairs are single tokens" in found.verdict
    assert len(found.report()) == 1
    with pytest.raises(InputError, match=r"'capital' must hold \{source\} once"):
        hw.evidence(three_movers, RELATIONS[0], **QUIET | {"template": "capital"})
    with pytest.raises(InputError, match="There is no relation or folder country_to_capitol"):
        hw.evidence(three_movers, "country_to_capitol", **QUIET)


def test_halves_share_no_source_and_pairs_differ_in_the_source_alone():
    prompts = relation_prompts(hw.load(), "country_to_capital", pairs=8)
    halves = dict(tuple(prompts.table.groupby("half")))
    assert not set(halves["first"]["source"]) & set(halves["second"]["source"])
    assert not set(halves["first"]["other_source"]) & set(halves["second"]["source"])
    for pairs in (prompts.first, prompts.second):
        assert ((pairs.clean != pairs.corrupted).sum(1) == 1).all()
        assert (pairs.clean != pairs.corrupted)[:, pairs.source].all()
        assert (pairs.answer != pairs.foil).all()
    examples = {
        source for source, _ in load_relations("country_to_capital")[0].pairs if f" {source} " in prompts.template
    }
    assert not examples & set(prompts.table["source"])
    assert prompts.templates["chosen"].sum() == 1
    assert prompts.templates["difference"].idxmax() == prompts.templates["chosen"].idxmax()


def test_effects_and_attention_are_those_of_plain_hooks():
    model = hw.load()
    pairs = relation_prompts(model, "country_to_capital", pairs=6).second
    heads = [(0, 14), (3, 2)]
    rows = torch.arange(len(pairs))

    def lead(logits):
        return (logits[rows, -1, pairs.answer] - logits[rows, -1, pairs.foil]).double()

    raw, expected = model.raw, []
    with torch.inference_mode():
        plain, cache = raw.run_with_cache(pairs.clean)
        swapped, other = raw.run_with_cache(pairs.corrupted)
        gap = lead(plain) - lead(swapped)
        for layer, head in heads:
            name = f"blocks.{layer}.attn.hook_z"

            def write(z, hook, name=name, head=head):
                z = z.clone()
                z[:, -1, head] = other[name][:, -1, head]
                return z

            expected.append(lead(plain) - lead(raw.run_with_hooks(pairs.clean, fwd_hooks=[(name, write)])))
    effects, found_gap = head_effects(model, pairs)
    found = np.stack([effects[:, layer, head] for layer, head in heads], 1)
    assert np.allclose(found, torch.stack(expected, 1).numpy(), atol=2e-4)
    assert np.allclose(found_gap, gap.numpy(), atol=2e-4)
    pattern = cache["blocks.2.attn.hook_pattern"][:, :, -1, pairs.source].mean(0)
    assert np.allclose(attention_to_source(model, pairs)[2], pattern, atol=1e-5)


def test_margins_are_those_of_classify_heads_and_of_shuffled_relations():
    model = hw.load()
    (given,) = load_relations("country_to_capital")
    table = hw.classify_heads(model, relations=given, embedding="mlp0", progress=False).table
    margins = head_margins(model, given, embedding="mlp0")
    both = table.merge(margins, on=["layer", "head", "relation"])
    assert len(both) == len(table)
    assert np.allclose(both["margin_x"], both["margin_y"], atol=2e-5)
    (tokens,) = tokenize_relations([given], model.tokenizer)
    order = torch.randperm(len(tokens.targets), generator=torch.Generator().manual_seed(0))
    words = [tokens.words[i] for i in order.tolist()]
    shuffled = Relation(given.name, None, tuple((s, w) for (s, _), (_, w) in zip(tokens.words, words, strict=True)))
    options = {"embedding": "mlp0", "norm_gain": False}
    drawn = torch.stack(list(layer_margins(weights_of(model, None), [tokens], options, [order[None]])))
    again = head_margins(model, shuffled, embedding="mlp0")["margin"].to_numpy()
    assert np.allclose(drawn[:, 1, :, 0].flatten(), again, atol=2e-5)


def test_a_relation_shuffled_in_its_weights_is_hardly_ever_called():
    """The targets' margins of one draw in place of the relation's own: p is 5 % or less in about one of twenty."""
    rng = np.random.default_rng(0)
    effects, sources = rng.exponential(size=(12, 40)) * (np.arange(40) == 3) + 0.01, np.arange(12)
    called = 0
    for _ in range(100):
        margins = rng.normal(size=(200, 1, 40))
        choice = Choice("a", margins, np.full((1, 40), 0.5), np.eye(1, 40, 3))
        frame, _ = judged(choice, names_of(choice, []), effects[:, None], sources, 0)
        called += bool(frame.loc[frame["way"] == NAMED, "p_value"].iloc[0] <= 0.05)
    assert called <= 11  # of 100 at 5 %: more than that come in one of a hundred tests


def test_relations_beside_one_share_hardly_a_word_with_it():
    tokenized = tokenize_relations(load_relations(), hw.load().tokenizer)
    (capital,) = [one for one in tokenized if one.relation.name == "country_to_capital"]
    beside = unrelated(capital, tokenized, 0)
    names = {one.relation.name for one in beside}
    assert len(beside) == 8
    assert not names & {"country_to_capital", "country_to_language", "city_to_country"}


def test_how_long_it_takes_is_said_before_where_that_is_over_a_minute(three_movers, monkeypatch):
    seen, asked, said = [], [], []

    blocks = three_movers.raw.blocks
    kind, plain = type(blocks[1]), type(blocks[1]).forward

    def counted(block, residual, *arguments, **options):
        if block is blocks[1]:
            seen.append(residual.shape[0] * residual.shape[1])
        return plain(block, residual, *arguments, **options)

    def work(model, what, tokens, advice, **how):
        asked.append(tokens)
        sweep_module.say_how_long(model, what, tokens, advice, **how)

    monkeypatch.setattr(weights_to_cause, "say_how_long", work)
    monkeypatch.setattr(sweep_module, "WORTH_TIMING", 0.0)
    monkeypatch.setattr(sweep_module, "say", lambda progress, text: said.append(text))
    monkeypatch.setattr(sweep_module, "rate", lambda model: 1e15)
    # Before loading, and not a hook of torch: a model that was changed after loading is swept with whole runs.
    monkeypatch.setattr(kind, "forward", counted)
    three_movers = hw.load(three_movers.raw, tokenizer=three_movers.tokenizer)
    hw.evidence(three_movers, list(RELATIONS), **QUIET | {"progress": True})
    assert said == []
    assert sum(seen) / 2 <= asked[0] <= 2 * sum(seen)
    monkeypatch.setattr(sweep_module, "rate", lambda model: 1.0)
    hw.evidence(three_movers, RELATIONS[0], **QUIET | {"progress": True})
    assert said[0].startswith("a and the relations it is compared with take about ")
    assert said[0].endswith("Fewer relations, or fewer pairs than 12, take less time.")


def test_an_interrupted_suite_goes_on_and_another_run_is_refused(three_movers, suite, tmp_path, monkeypatch):
    out, calls = tmp_path / "run", []
    measure = weights_to_cause._of_relation

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(weights_to_cause, "_of_relation", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hw.evidence(three_movers, list(RELATIONS), out=out, **QUIET)
    assert len(list((out / "pieces").iterdir())) == 1
    monkeypatch.setattr(weights_to_cause, "_of_relation", measure)
    again = hw.evidence(three_movers, list(RELATIONS), out=out, **QUIET)
    assert again.ways.equals(suite.ways)
    assert again.table.equals(suite.table)
    assert type(again).load(out).table.equals(suite.table)
    with pytest.raises(hw.RunFolderError):
        hw.evidence(three_movers, list(RELATIONS), out=out, **QUIET | {"draws": 40})


def test_random_heads_that_are_also_from_the_nearest_layers_are_named_so():
    model = hw.load()
    pairs = relation_prompts(model, "country_to_capital", pairs=6).second
    for named, where in (([(1, 0)], "of 1, same and nearest layers"), ([(1, 0), (2, 0)], "of 2, same layers")):
        cost = weights_to_cause._cost(model, pairs, named, named[0], 30, 0)
        assert cost[-1]["what"] == f"random heads (30 sets {where})"
