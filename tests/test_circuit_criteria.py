"""Completeness and minimality are differences of circuits that were run one by one, beside random ones."""

from functools import cache

import pytest

import headwater as hw
from headwater.circuits import completeness, minimality
from headwater.circuits.circuit import circuit_from_edges
from headwater.errors import InputError
from headwater.planted import circuits
from tests import chance
from tests.tiny import tiny_model, tiny_tokenizer

CLEAN = [" the capital of France is in A", " the capital of Italy is of A"]
CORRUPTED = [" the capital of Italy is of A", " the capital of Spain is of B"]
QUIET = {"metric": hw.logit_difference(5, 9), "progress": False}
STORY = "When Anna and Boris went to the store Boris gave a drink to"
ASKED = {"metric": hw.logit_difference(" Anna", " Boris"), "progress": False}
WIRED = [
    "embed -> q 0.2", "head 0.2 -> k 1.1", "head 0.2 -> v 1.1", "head 1.1 -> q 2.3", "embed -> k 2.3",
    "head 2.3 -> logits",
]  # fmt: skip


@cache
def loaded(family: str) -> hw.HookedModel:
    return hw.load(tiny_model(family), tokenizer=tiny_tokenizer())


@cache
def planted() -> hw.HookedModel:
    made = circuits.name_mover()
    return hw.load(made.model, tokenizer=made.tokenizer)


def drawn(model: hw.HookedModel, n: int) -> hw.Circuit:
    full = ~hw.Circuit.of([], model)
    return circuit_from_edges(full.graph, chance.rng().choice(full.edges, n, replace=False))


def alone(model: hw.HookedModel, circuit: hw.Circuit, **options) -> float:
    return float(hw.run_circuits(model, CLEAN, circuits=circuit, **options, **QUIET).table["value"].mean())


@pytest.mark.parametrize(("family", "values"), [("llama", "other run"), ("gpt2", "zero")])
def test_both_are_differences_of_circuits_run_one_by_one(family, values):
    model = loaded(family)
    circuit, other = drawn(model, 12), {"corrupted": CORRUPTED} if values == "other run" else {}
    run = {"values": values, **other}
    found = completeness(model, CLEAN, other.get("corrupted"), circuit, sets=1, placebos=0, values=values, **QUIET)
    full, first = ~hw.Circuit.of([], model), found.iloc[0]
    assert found["removed"].tolist()[0] == 0
    assert first["circuit"] == pytest.approx(alone(model, circuit, **run), abs=1e-5)
    assert first["model"] == pytest.approx(alone(model, full, **run), abs=1e-5)
    assert found["incompleteness"].to_numpy() == pytest.approx((found["circuit"] - found["model"]).abs().to_numpy())
    least = minimality(model, CLEAN, other.get("corrupted"), circuit, sets=0, placebos=1, values=values, **QUIET)
    for row in least.head(2).itertuples():
        without = circuit - hw.Circuit.of([row.edge], model)
        assert row.effect == pytest.approx(alone(model, without, **run) - alone(model, circuit, **run), abs=1e-5)
    assert least["edge"].tolist() == circuit.names
    assert (least["needed"] == (least["effect"].abs() > least["placebo_high"])).all()


@pytest.mark.planted
def test_an_edge_that_matters_once_others_are_gone_is_missed_by_faithfulness_and_found_by_both():
    pair = STORY, STORY.replace("Boris gave", "Clara gave")
    strongest = hw.Circuit.of(WIRED, planted())
    assert hw.run_circuits(planted(), *pair, strongest, **ASKED).table["faithfulness"].item() == pytest.approx(1)
    missed = completeness(planted(), *pair, strongest, sets=6, placebos=0, **ASKED)
    assert missed["incompleteness"].iloc[0] < 0.02  # the empty set: as faithful as the model
    assert missed["incompleteness"].max() == pytest.approx(10 / 3, abs=0.02)
    # without what tells Boris apart the model reads three names, of which one is not that of the clean prompt
    whole = strongest | hw.Circuit.of(["embed -> v 2.3"], planted())
    found = completeness(planted(), *pair, whole, sets=6, placebos=20, **ASKED)
    assert found["incompleteness"].max() < 0.02 < found["placebo"].iloc[0]
    assert found["p_value"].iloc[0] == pytest.approx(1 / 21)
    alone, least = (
        minimality(planted(), *pair, whole, sets=sets, placebos=20, **ASKED).set_index("edge") for sets in (0, 6)
    )
    assert alone.loc["embed -> v 2.3", "effect"] == pytest.approx(0, abs=0.01)
    assert abs(least.loc["embed -> v 2.3", "effect"]) == pytest.approx(10 / 3, abs=0.02)
    assert least["needed"].all()
    assert least["placebo_high"].max() < 0.02
    assert least["p_value"].max() == pytest.approx(1 / 21)


@pytest.mark.planted
def test_what_was_left_out_and_what_is_not_needed_shows():
    pair = STORY, STORY.replace("Boris gave", "Clara gave")
    missing = hw.Circuit.of(WIRED[1:], planted())
    found = completeness(planted(), *pair, missing, sets=0, placebos=0, **ASKED).iloc[0]
    assert found["part"] > 0.5
    more = hw.Circuit.of([*WIRED, "embed -> q 0.1"], planted())
    least = minimality(planted(), *pair, more, placebos=10, **ASKED).set_index("edge")
    assert not least.loc["embed -> q 0.1", "needed"]
    assert least.loc[WIRED, "needed"].all()


def test_what_cannot_be_judged_is_refused():
    model = loaded("gpt2")
    empty = hw.Circuit.of([], model)
    for judge in (completeness, minimality):
        with pytest.raises(InputError, match="has no edges"):
            judge(model, CLEAN, CORRUPTED, empty, **QUIET)
        with pytest.raises(InputError, match="sets=-1"):
            judge(model, CLEAN, CORRUPTED, ~empty, sets=-1, **QUIET)
