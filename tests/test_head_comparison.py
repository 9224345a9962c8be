"""Heads compared between models: planted changes are found, nothing else is, and counts are those of the formula."""

import copy
import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from scipy.stats import binomtest

import headwater as hw
from headwater.errors import InputError, RunFolderError
from headwater.heads import scores, scoring
from headwater.heads.classify import classify_heads
from headwater.heads.relations import shared_relations, tokenize_relations
from headwater.stats.significance import mcnemar_p, q_values
from tests.planted_heads import ignores_source, implements, plant_relations, suppresses
from tests.planted_relations import CAPITALS, CHOSEN, OPPOSITES, SUITE, WORDS
from tests.tiny import embedded

QUIET = {"progress": False}


def planted(heads):
    made = plant_relations(heads, n_layers=2, n_heads=3, words=WORDS, reads="raw")
    return hw.load(made.model, tokenizer=made.tokenizer)


def compared(*models, **options):
    named = dict(zip("abcd", models, strict=False))
    return hw.compare_heads(named, relations=CHOSEN, embedding="raw", **QUIET, **options)


@pytest.fixture(scope="module")
def changed():
    """A relation moved from head 0.1 to 1.2, one that grew a second half, one left alone; a habit came and went."""
    halves = OPPOSITES.pairs[::2]
    before = {
        (0, 0): [implements(OPPOSITES.pairs)],
        (0, 1): [implements(CAPITALS.pairs)],
        (1, 0): [implements(halves)],
        (1, 1): [ignores_source(CAPITALS.pairs)],
        (0, 2): [suppresses(OPPOSITES.pairs)],
    }
    after = {
        (0, 0): [implements(OPPOSITES.pairs)],
        (1, 2): [implements(CAPITALS.pairs)],
        (1, 0): [implements(OPPOSITES.pairs)],
        (0, 2): [suppresses(halves)],
    }
    return planted(before), planted(after)


@pytest.fixture(scope="module")
def comparison(changed):
    return compared(*changed)


def test_a_relation_moved_from_head_to_head_is_found_and_nothing_else(comparison):
    found = comparison.changed
    said = {(r.layer, r.head, r.relation, r.sign): r.change for r in found.itertuples()}
    assert said == {
        (0, 1, CAPITALS.name, "score"): "lost",
        (1, 2, CAPITALS.name, "score"): "gained",
        (1, 0, OPPOSITES.name, "score"): "stronger",
        (0, 2, OPPOSITES.name, "suppression"): "weaker",
    }
    whole = found.set_index(["layer", "head"]).loc[(1, 2)]
    assert (whole["gained"], whole["lost"]) == (whole["sources"], 0)
    assert whole["difference"] == pytest.approx(1.0)


def test_a_model_beside_itself_has_not_changed(changed):
    same = compared(changed[0], changed[0])
    assert same.changed.empty
    assert (same.table.dropna(subset=["p_value"])["p_value"] == 1).all()
    assert (same.table["difference"].dropna() == 0).all()


def test_the_counts_are_those_of_items_counted_one_by_one():
    """On random models, whose heads hit some items: by naive top-k of the whole map, source by source."""
    own = embedded()
    config = copy.deepcopy(own.config)
    config.num_hidden_layers = 2
    countries, cities = zip(*((source, targets[0]) for source, targets in CAPITALS.pairs), strict=True)
    pairs = [(countries[i % 33], (cities[(7 * i + 3) % 40], cities[(5 * i + 1) % 40])) for i in range(40)]
    relation = hw.Relation("made up", "knowledge", tuple(pairs))
    models = []
    for _ in range(2):
        hf = transformers.AutoModelForCausalLM.from_config(config)
        models.append(hw.load(hf, tokenizer=own.tokenizer))
    result = hw.compare_heads({"a": models[0], "b": models[1]}, relations=relation, embedding="raw", k=300, **QUIET)
    (tokens,) = tokenize_relations([relation], own.tokenizer)
    hits = [naive_hits(model, tokens, 300) for model in models]
    for sign, name in enumerate(("score", "suppression")):
        rows = result.table[(result.table["model"] == "b") & (result.table["sign"] == name)]
        for row in rows.itertuples():
            net = pd.Series(
                hits[1][sign][row.layer, row.head].astype(int) - hits[0][sign][row.layer, row.head].astype(int)
            )
            by_source = net.groupby(tokens.source.numpy()).sum()
            assert (row.gained, row.lost) == ((by_source > 0).sum(), (by_source < 0).sum())
            n = int(row.gained + row.lost)
            assert row.p_value == pytest.approx(binomtest(int(row.gained), n).pvalue if n else 1.0)
    assert (result.table["gained"] > 0).any()
    assert (result.table["lost"] > 0).any()
    tested = result.table[result.table["model"] == "b"]
    assert np.allclose(tested["q_value"], q_values(tested["p_value"].to_numpy()))


def naive_hits(model, tokens, k):
    """Whether each item's target is among the k largest (smallest) of x W_V W_O W_U: [sign][layer, head, item]."""
    hf, shape = model.raw.original_model, model.shape
    d = hf.model.layers[0].self_attn.head_dim
    x, W_U = hf.model.embed_tokens.weight[tokens.source].double(), hf.lm_head.weight.double().T
    found = np.zeros((2, shape.n_layers, shape.n_heads, len(tokens.source)), dtype=bool)
    for layer, block in enumerate(hf.model.layers):
        W_V, W_O = block.self_attn.v_proj.weight.double(), block.self_attn.o_proj.weight.double()
        for head in range(shape.n_heads):
            group = head * (W_V.shape[0] // d) // shape.n_heads
            logits = x @ W_V[group * d : (group + 1) * d].T @ W_O[:, head * d : (head + 1) * d].T @ W_U
            for sign, order in enumerate((logits, -logits)):
                top = order.topk(k, dim=-1).indices
                found[sign, layer, head] = [
                    bool(set(row.tolist()) & set(targets)) for row, targets in zip(top, tokens.targets, strict=True)
                ]
    return found


def test_mcnemar_is_the_sign_test_of_what_changed():
    gained, lost = np.array([0.0, 3, 10, 25, 7]), np.array([0.0, 3, 1, 4, 0])
    expected = [1.0, *(binomtest(int(g), int(g + n)).pvalue for g, n in zip(gained[1:], lost[1:], strict=True))]
    assert mcnemar_p(gained, lost) == pytest.approx(expected)


def test_scores_are_those_of_each_model_classified_by_itself(changed, comparison):
    table = comparison.table
    for name, model in zip("ab", changed, strict=True):
        alone = classify_heads(model, relations=CHOSEN, embedding="raw", **QUIET).table
        rows = table[(table["model"] == name) & (table["sign"] == "score")].reset_index(drop=True)
        assert rows["share"].tolist() == alone["score"].tolist()
        hit = alone["score"] > 0
        assert hit.any()
        assert rows["excess"][hit].tolist() == alone["excess"][hit].tolist()
        assert rows["found"].tolist() == alone["implemented"].tolist()


def test_where_a_model_could_be_called_the_table_is_that_of_chance_computed_everywhere(monkeypatch):
    """Of the embedded model and one with noise in its weights, so that heads score in one of them alone."""
    model, other, few = embedded(), hw.load(), [SUITE[name] for name in ("country_to_nationality", "name_copying")]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in (weight for name, weight in other.raw.named_parameters() if ".o_proj." in name):
            weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
    swept, sweep = [], scores._sweep

    def counted(maps, suite, wanted, *rest):
        swept.append(int(wanted.sum()))
        return sweep(maps, suite, wanted, *rest)

    monkeypatch.setattr(scores, "_sweep", counted)
    asked = {"models": {"a": model, "b": other}, "relations": few, **QUIET}
    found, cells = hw.compare_heads(**asked).table, sum(swept)
    swept.clear()
    monkeypatch.setattr(scoring, "callable_from", lambda threshold: 0.0)
    everywhere = hw.compare_heads(**asked).table
    assert cells < sum(swept) / 4
    key = ["layer", "head", "relation", "sign"]
    called = found.groupby(key)["share"].transform("max") >= 0.10
    one_alone = called & (found["share"] < 0.10)
    assert one_alone.any()
    assert found.loc[~called & (found["share"] > 0), ["expected", "excess"]].isna().all(axis=None)
    chance = ["expected", "excess", "difference"]
    pd.testing.assert_frame_equal(found.loc[called, chance], everywhere.loc[called, chance], check_exact=True)
    rest = [name for name in found.columns if name not in chance]
    pd.testing.assert_frame_equal(found[rest], everywhere[rest], check_exact=True)
    assert found["found"].any()


def test_a_long_run_goes_on_where_it_was_interrupted(changed, comparison, tmp_path, monkeypatch):
    calls = []
    score = scores.LayerScorer.__call__

    def counted(self, layer):
        calls.append(layer)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(self, layer)

    monkeypatch.setattr(scores.LayerScorer, "__call__", counted)
    with pytest.raises(KeyboardInterrupt):
        compared(*changed, out=tmp_path / "run")
    resumed = compared(*changed, out=tmp_path / "run")
    assert calls == [0, 1, 0, 1, 1]
    pd.testing.assert_frame_equal(resumed.table, comparison.table)
    assert hw.HeadComparison.load(tmp_path / "run").models == ["a", "b"]
    with pytest.raises(RunFolderError, match="models"):
        compared(*reversed(changed), out=tmp_path / "run")


def test_models_with_different_vocabularies_are_compared_on_the_words_both_have():
    own = plant_relations({(0, 0): [implements(CAPITALS.pairs)]}, n_layers=1, n_heads=2, reads="raw")
    pairs = CAPITALS.pairs[:35]
    words = [word for source, targets in pairs for word in (source, *targets)]
    fewer = plant_relations({(0, 0): [implements(pairs)]}, n_layers=1, n_heads=2, words=words, reads="raw")
    shared = shared_relations([CAPITALS], [own.tokenizer, fewer.tokenizer])
    assert {source for source, _ in shared[0].pairs} == {source for source, _ in pairs}
    models = {name: hw.load(one.model, tokenizer=one.tokenizer) for name, one in (("own", own), ("fewer", fewer))}
    result = hw.compare_heads(models, relations=CAPITALS, embedding="raw", **QUIET)
    (row,) = result.relations.to_dict("records")
    assert (row["pairs"], row["shared"], row["used"]) == (len(CAPITALS.pairs), len(shared[0].pairs), True)
    assert result.changed.empty
    assert result.table["found"].sum() == 2
    said = f"compared on {len(shared[0].pairs)} of {len(CAPITALS.pairs)} pairs, kept for every tokenizer"
    assert said in " ".join(result.report())
    same = hw.compare_heads({"a": models["own"], "b": models["own"]}, relations=CAPITALS, embedding="raw", **QUIET)
    assert "kept for every tokenizer" not in " ".join(same.report())


def test_what_cannot_be_compared_is_said_in_one_line(changed):
    other = embedded()
    for models, message in [
        ([changed[0]], "needs two models or more, and 1"),
        ([changed[0], changed[0]], r"Several of the models are named .* give each once, or name them"),
        (["x/a", "x/b", "x/b"], "Several of the models are named 'x/b'"),
        ({"a": changed[0], "b": other}, r"b has 6 layers × 16 heads, a has 2 layers × 3 heads"),
        ("embedded", "A str was given as models: give a list"),
    ]:
        with pytest.raises(InputError, match=message) as raised:
            hw.compare_heads(models, relations=CHOSEN, **QUIET)
        assert "\n" not in str(raised.value)


def test_three_models_are_drawn_as_curves_and_two_as_a_map(changed, comparison):
    two, three = comparison, compared(*changed, changed[0])
    assert two.plot().get_title(loc="left") == "a → b: heads that changed"
    drawn = two.plot()
    texts = [text.get_text() for text in (drawn.get_legend() or drawn.figure.legends[0]).get_texts()]
    assert texts[0].startswith("classified, unchanged")
    assert {"gained (1)", "lost (1)", "stronger (1)", "weaker (1)"} <= set(texts)
    upper, lower = three.plot().axes
    assert [line.get_label() for line in upper.lines] == ["algorithmic", "knowledge", "linguistic", "translation"]
    assert [bar.get_height() for bar in lower.containers[0]] == [0, 1, 0]
    with pytest.raises(InputError, match="compare two models"):
        three.plot(upper)


def test_a_head_that_only_changed_its_habit_is_no_change(comparison):
    table = comparison.table
    habit = table[(table["model"] == "b") & (table["layer"] == 1) & (table["head"] == 1)]
    row = habit[(habit["relation"] == CAPITALS.name) & (habit["sign"] == "score")].iloc[0]
    assert row["lost"] > 0
    assert row["change"] == ""
    assert abs(row["difference"]) < 1e-9


def test_the_report_counts_the_changes(comparison):
    said = " ".join(comparison.report())
    assert "From a to b" in said
    assert "gained a relation: 1; lost one: 1; have a stronger one: 1; have a weaker one: 1" in said
    fields = {field.name for field in dataclasses.fields(hw.HeadComparison)}
    assert fields == {"table", "relations", "run"}
