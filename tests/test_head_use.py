"""Whether the running model uses its heads: each ablated beside others, on planted models and written out plainly."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest

import headwater as hw
from headwater.errors import InputError, ModelError
from headwater.heads import causal
from headwater.heads.causal import COLUMNS, head_use, other_heads
from headwater.heads.head_map import relations_of
from headwater.heads.relations import TaskPrompts, task_prompts
from headwater.stats.resample import Bootstrap
from headwater.stats.significance import sign_flip_p
from tests import chance
from tests.planted_heads import implements, plant_relations
from tests.planted_relations import TEMPLATES, random_words, relation
from tests.tiny import tiny_model

CAPITAL = relation("capital", "knowledge", 32)
PAST = relation("past", "linguistic", 30, accepted=2)
SPANISH = relation("spanish", "translation", 30)
SUITE = [CAPITAL, PAST, SPANISH]
ASK = {"relations": SUITE, "template": TEMPLATES[0], "shots": 0, "progress": False}


def classified(heads) -> tuple[hw.HookedModel, hw.HeadMap]:
    words = [word for one in SUITE for source, targets in one.pairs for word in (source, *targets)]
    built = plant_relations(heads, words=words, n_layers=3, n_kv_heads=2)
    model = hw.load(built.model, tokenizer=built.tokenizer)
    return model, hw.classify_heads(model, relations=SUITE, embedding="raw", progress=False)


@pytest.fixture(scope="module")
def planted():
    """A head that the model needs, one of two that each suffice, and nothing for Spanish."""
    return classified(
        {(0, 1): [implements(PAST.pairs)], (2, 3): [implements(PAST.pairs)], (1, 2): [implements(CAPITAL.pairs)]}
    )


@pytest.mark.planted
def test_the_head_that_the_model_needs_is_used_and_two_that_stand_in_for_each_other_are_not(planted):
    model, heads = planted
    found = heads.validate(model, **ASK)
    called = found.table[found.table["implemented"]].set_index(["layer", "head", "relation"])
    assert set(called.index) == {(0, 1, "past"), (2, 3, "past"), (1, 2, "capital")}
    assert called["used"].to_dict() == {(0, 1, "past"): False, (2, 3, "past"): False, (1, 2, "capital"): True}
    needed = called.loc[(1, 2, "capital")]
    assert (needed["accuracy"], needed["others"]) == (1.0, 1.0)
    assert needed["without"] <= 1 / 30
    assert needed["loss"] == pytest.approx(1 - needed["without"])
    assert needed["loss_low"] > 0.8
    assert needed["without_low"] <= needed["without"] <= needed["without_high"]
    assert called.loc[(0, 1, "past"), "loss"] == 0
    rest = found.table[~found.table["implemented"]]
    assert rest[[*COLUMNS]].isna().all(axis=None)
    assert "Of 3 head-relation pairs ablated in the running model, 1 are used" in " ".join(found.report())


@pytest.mark.planted
@pytest.mark.parametrize("multi_token", ["distinguishing", "first"])
def test_targets_of_several_tokens_are_asked_for_by_the_token_that_stands_for_them(multi_token):
    """Told apart, they are "same X", and the model is asked for X behind " same"; by first tokens they are "X same"."""
    said = {"distinguishing": "same {}", "first": "{} same"}[multi_token]
    longer = dataclasses.replace(CAPITAL, pairs=tuple((s, (said.format(t[0]),)) for s, t in CAPITAL.pairs))
    words = ["same", *(word for source, targets in CAPITAL.pairs for word in (source, *targets))]
    built = plant_relations({(1, 2): [implements(CAPITAL.pairs)]}, words=words, n_layers=2)
    model = hw.load(built.model, tokenizer=built.tokenizer)
    asked = {"relations": [longer], "progress": False}
    heads = hw.classify_heads(model, embedding="raw", multi_token=multi_token, **asked)
    found = heads.validate(model, template=TEMPLATES[0], shots=0, **asked).table
    (row,) = found[found["implemented"]].to_dict("records")
    assert (row["layer"], row["head"], row["accuracy"], row["others"], row["used"]) == (1, 2, 1.0, 1.0, True)
    tokens, _ = relations_of(model, heads, [longer], multi_token)["capital"]
    task = task_prompts(model, tokens, TEMPLATES[0], 1, 0)
    ends = [row[length - 1] for row, length in zip(task.batch.tokens, task.batch.lengths.tolist(), strict=True)]
    same = model.tokenizer.encode(" same", add_special_tokens=False)[-1]
    assert {int(token) == same for token in ends} == {multi_token == "distinguishing"}
    assert task.accepted == tokens.targets
    example = model.tokenizer.decode(task.batch.tokens[0]).split("\n")[0]
    assert "same" in example


def test_a_validated_map_keeps_what_it_was_and_is_another_run(planted, tmp_path):
    model, heads = planted
    found = heads.validate(model, **ASK)
    pd.testing.assert_frame_equal(found.table[heads.table.columns], heads.table)
    assert heads.run.differences(found.run)
    assert not heads.is_validated
    again = hw.HeadMap.load(found.save(tmp_path / "heads"))
    pd.testing.assert_frame_equal(again.table, found.table)
    assert again.report() == found.report()
    twice = found.validate(model, **ASK)
    pd.testing.assert_frame_equal(twice.table, found.table)


def test_a_relation_that_the_model_does_not_answer_is_said_and_its_heads_are_not_judged(planted):
    model, heads = planted
    asked = {"capital": "The notes on {source} say: nothing of", "past": TEMPLATES[0]}
    silent = dataclasses.replace(CAPITAL, pairs=tuple((source, (CAPITAL.pairs[0][0],)) for source, _ in CAPITAL.pairs))
    called = heads.table.assign(
        implemented=heads.table["relation"].isin(["capital", "past"]) & (heads.table["head"] < 1)
    )
    tokens = {name: one for name, (one, _) in relations_of(model, heads, SUITE).items()}
    words = tokens["capital"].words
    tokens["capital"] = dataclasses.replace(
        tokens["capital"],
        relation=silent,
        targets=tuple((int(one),) for one in tokens["capital"].source.roll(1)),
        words=tuple((source, (before,)) for (source, _), (before, _) in zip(words, (words[-1], *words), strict=False)),
    )
    found = called.join(head_use(model, called, tokens, asked, shots=0, draws=2, seed=0, progress=False))
    of_capital = found[found["implemented"] & (found["relation"] == "capital")]
    assert (of_capital["accuracy"] == 0).all()
    assert of_capital[["without", "others", "loss", "loss_q_value", "used"]].isna().all(axis=None)
    of_past = found[found["implemented"] & (found["relation"] == "past")]
    assert of_past[[*COLUMNS]].notna().all(axis=None)
    said = dataclasses.replace(heads, table=found).report()
    assert any("the whole model answers no item: capital." in sentence for sentence in said)


def test_relations_that_are_not_asked_for_and_maps_without_called_heads_are_said(planted):
    model, heads = planted
    found = heads.validate(model, **ASK | {"template": {"capital": TEMPLATES[1]}})
    some = heads.validate(model, **ASK | {"template": TEMPLATES[1], "relations": [CAPITAL]})
    pd.testing.assert_frame_equal(some.table, found.table)
    assert found.table.loc[found.table["accuracy"].notna(), "relation"].unique().tolist() == ["capital"]
    assert found.report()[-1] == "Relations with heads that were not tested: 1."
    nothing = dataclasses.replace(heads, table=heads.table.assign(implemented=False, suppressed=False))
    found = nothing.validate(model, **ASK)
    assert found.table[[*COLUMNS]].isna().all(axis=None)
    assert "there was no head to ablate" in found.report()[-1]
    assert "used (0)" in [text.get_text() for text in found.plot().figure.legends[0].get_texts()]


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox"])
def test_what_is_answered_without_a_head_is_what_a_run_with_its_output_at_zero_answers(family):
    shuffled, tokenizer = random_words()
    model = hw.load(tiny_model(family, d_vocab=len(tokenizer), seed=chance.seed_of(family)), tokenizer=tokenizer)
    heads = hw.classify_heads(model, relations=[shuffled], rule="published", progress=False)
    tokens, _ = relations_of(model, heads, [shuffled])["random"]
    batch = task_prompts(model, tokens, TEMPLATES[0], 1, 0).batch
    best = model.run(batch, keep="last")[:, 0].topk(2).indices.tolist()
    accepted = tuple((first, second) if row % 2 else (second,) for row, (first, second) in enumerate(best))
    task = TaskPrompts(batch, accepted, torch.zeros(len(batch), dtype=torch.long))
    chosen = [(layer, head) for layer in range(model.shape.n_layers) for head in (0, model.shape.n_heads - 1)]
    assert causal.whole(model, task)[0].tolist() == [row % 2 for row in range(len(batch))]
    right = causal.without(model, task, {str(head): [head] for head in chosen})
    rows, last = torch.arange(len(batch)), batch.lengths - 1
    for layer, head in chosen:

        def ablate(z, hook, head=head):
            z = z.clone()
            z[rows, last, head] = 0
            return z

        logits = model.run(batch, [(f"blocks.{layer}.attn.hook_z", ablate)], keep="last")[:, 0]
        top = logits.topk(2)
        expected = [token in of_row for token, of_row in zip(top.indices[:, 0].tolist(), accepted, strict=True)]
        is_clear = (top.values[:, 0] - top.values[:, 1] > 1e-4).numpy()
        assert is_clear.mean() > 0.8
        assert (right[str((layer, head))][0] == np.array(expected))[is_clear].all()


def test_the_numbers_are_the_plain_ones_and_p_is_the_larger_of_two():
    rng = chance.rng()
    source = np.repeat(np.arange(30), 2)
    whole = rng.random(60) < 0.8
    without = whole & (rng.random(60) < 0.4)
    others = np.stack([whole & (rng.random(60) < 0.9) for _ in range(3)])
    found = dict(
        zip(causal.MEASURED, causal._measured(whole, without, others, Bootstrap.of(source.tolist())), strict=True)
    )
    assert found["accuracy"] == pytest.approx(whole.mean())
    assert found["without"] == pytest.approx(without.mean())
    assert found["others"] == pytest.approx(others.mean())
    assert found["loss"] == pytest.approx(others.mean() - without.mean())
    for name in ("without", "others", "loss"):
        assert found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    net = np.array([(whole.astype(int) - without)[source == one].sum() for one in range(30)])
    beside = np.array([(others.mean(0) - without)[source == one].sum() for one in range(30)])
    lost, gained = int((net > 0).sum()), int((net < 0).sum())
    mcnemar = binomtest(lost, lost + gained, 0.5).pvalue
    assert found["loss_p_value"] == pytest.approx(max(mcnemar, sign_flip_p(beside, 0)))


def test_a_head_that_differs_from_the_others_in_the_other_direction_than_from_the_whole_model_is_not_told():
    whole = np.arange(40) < 20
    without = np.arange(40) < 24
    others = np.array([np.arange(40) < 40])
    found = dict(zip(causal.MEASURED, causal._measured(whole, without, others, Bootstrap.of(range(40))), strict=True))
    assert found["loss"] == pytest.approx(0.4)
    assert found["loss_p_value"] == 1.0


@pytest.mark.parametrize(("flag", "is_used"), [("implemented", False), ("suppressed", True)])
def test_a_head_without_which_the_answers_get_better_is_used_if_it_suppresses_and_opposed_if_it_implements(
    planted, monkeypatch, flag, is_used
):
    model, heads = planted
    whole = np.arange(32) < 16
    monkeypatch.setattr(causal, "whole", lambda model, task: whole[None].astype(float))
    answered = {name: whole | (name == "1.2") for name in ("1.2", *(f"1.{head}" for head in range(4)))}
    answered["none"] = whole
    monkeypatch.setattr(
        causal,
        "without",
        lambda model, task, sets: {name: answered[name][None].astype(float) for name in ("none", *sets)},
    )
    is_it = (heads.table["relation"] == "capital") & (heads.table["layer"] == 1) & (heads.table["head"] == 2)
    table = heads.table.assign(implemented=False, suppressed=False).assign(**{flag: is_it})
    found = dataclasses.replace(heads, table=table).validate(model, **ASK)
    row = found.table[is_it].iloc[0]
    assert row["loss"] == pytest.approx(-0.5)
    assert row["loss_q_value"] < 0.01
    assert bool(row["used"]) is is_used
    assert ("Ablation has the opposite effect for 1.2 on capital." in found.report()) is not is_used


def test_other_heads_come_from_the_layer_while_it_has_some_and_are_never_called_ones():
    rng = chance.rng()
    for _ in range(30):
        taken = [(int(layer), int(head)) for layer, head in {tuple(rng.integers(0, (3, 4))) for _ in range(6)}]
        drawn = other_heads(taken[0], taken, 3, 4, 3, rng)
        assert len(set(drawn)) == len(drawn)
        assert not set(drawn) & set(taken)
        free = [head for head in range(4) if (taken[0][0], head) not in taken]
        if free:
            assert {layer for layer, _ in drawn} == {taken[0][0]}
            assert len(drawn) == min(3, len(free))
    everything = [(layer, head) for layer in range(2) for head in range(2)]
    assert other_heads((0, 0), everything, 2, 2, 3, rng) == []
    assert {layer for layer, _ in other_heads((0, 0), everything[:2], 2, 2, 3, rng)} == {1}


def test_where_every_head_is_called_there_is_no_control_and_nothing_is_said_to_be_used():
    whole, nothing = np.arange(40) < 20, np.zeros((1, 40), dtype=bool)
    measured = causal._measured(whole, nothing[0], nothing[:0], Bootstrap.of(range(40)))
    found = dict(zip(causal.MEASURED, measured, strict=True))
    assert found["without"] == 0
    assert np.isnan([found[name] for name in ("others", "loss", "loss_p_value")]).all()


def test_what_cannot_be_validated_is_refused_in_one_line(planted):
    model, heads = planted
    with pytest.raises(InputError, match="Did you mean 'capital'"):
        heads.validate(model, **ASK | {"template": {"capitol": TEMPLATES[0]}})
    with pytest.raises(InputError, match="must hold"):
        heads.validate(model, **ASK | {"template": "no place"})
    with pytest.raises(InputError, match="draws=0"):
        heads.validate(model, draws=0, **ASK)
    with pytest.raises(InputError, match="give the relations="):
        heads.validate(model, **ASK | {"relations": None})
    other, _ = classified({(0, 0): [implements(PAST.pairs)]})
    with pytest.raises(ModelError, match="is not the model of this head map"):
        heads.validate(other, **ASK)
