"""A search of many edges at once leaves the circuit that one edge at a time would leave."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.circuits.circuit_walk import CircuitRunner, CircuitWalk
from headwater.circuits.graph import Graph, leads_to_logits
from headwater.circuits.pairs import Pairs
from headwater.circuits.search import DECISIONS, decide_edges
from headwater.errors import InputError, RunFolderError
from headwater.planted import circuits
from tests import chance
from tests.circuit_reference import CircuitReference
from tests.tiny import tiny_model, tiny_tokenizer

CLEAN, CORRUPTED = " the capital of France is in A", " the capital of Italy is of A"
QUIET = {"metric": hw.logit_difference(5, 9), "progress": False}
NEAR = 2e-5
"""Rounding may decide of an edge whose effect is as near as that to the threshold."""


@cache
def loaded(family: str) -> hw.HookedModel:
    return hw.load(tiny_model(family), tokenizer=tiny_tokenizer())


def difference(logits: torch.Tensor) -> float:
    return float(logits[-1, 5] - logits[-1, 9])


def one_at_a_time(edges, value, threshold, sign=0, tries=10**9):
    """ACDC's order, a run per edge, the last edge first: what is left, and the effects."""
    left, now, effects = list(edges), value(list(edges)), {}
    for edge in list(edges)[::-1][:tries]:
        without = [one for one in left if one != edge]
        effects[edge] = value(without) - now
        if (-sign * effects[edge] if sign else abs(effects[edge])) < threshold:
            left, now = without, now + effects[edge]
    return left, effects


def nothing_is_near(effects, threshold: float) -> bool:
    return min(abs(abs(effect) - threshold) for effect in effects) > NEAR


@pytest.mark.parametrize("sign", [0, 1, -1])
@pytest.mark.parametrize("parallel", [False, True])
def test_any_function_of_circuits_is_searched_as_by_one_edge_at_a_time(parallel, sign):
    graph, rng = Graph(3, 4, 2, parallel), chance.rng()
    weight = rng.standard_normal((2, graph.n_edges)) * (rng.random((2, graph.n_edges)) < 0.3)

    def value(edges) -> float:
        mine = np.asarray(edges, dtype=np.int64)
        live = mine[leads_to_logits(graph, mine)]
        inside = np.zeros(graph.n_edges)
        inside[live] = 1
        return float(weight[0] @ inside + np.tanh(weight[1] @ inside))

    left, effects = one_at_a_time(range(graph.n_edges), value, 0.4, sign)
    batches = []

    def evaluate(some) -> np.ndarray:
        batches.append(len(some))
        return np.array([value(edges) for edges in some])

    trace = decide_edges(graph, evaluate, 0.4, sign)
    assert trace.inside.tolist() == left
    assert trace.effect == pytest.approx([effects[edge] for edge in range(graph.n_edges)], abs=1e-12)
    nowhere = trace.decision == DECISIONS.index("leads nowhere")
    assert trace.runs == sum(batches) <= 3 * (graph.n_edges - nowhere.sum()) + 1
    assert len(batches) < trace.runs / 3
    few = decide_edges(graph, evaluate, 0.4, sign, budget=20)
    assert (few.decision != DECISIONS.index("not tried")).sum() == 20 + (
        few.decision == DECISIONS.index("leads nowhere")
    ).sum()


@pytest.mark.parametrize("sign", [0, 1])
def test_an_edge_whose_effect_is_nan_stays(sign):
    graph = Graph(1, 1, 1, parallel=False)
    trace = decide_edges(graph, lambda some: np.full(len(some), np.nan), 0.4, sign)
    assert trace.inside.tolist() == list(range(graph.n_edges))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox", "qwen3"])
def test_it_leaves_what_hugging_face_runs_of_one_edge_at_a_time_leave(family):
    model, tries = loaded(family), 30
    ids = [model.tokenize(text).tokens[0].tolist() for text in (CLEAN, CORRUPTED)]
    naive = CircuitReference(tiny_model(family), *ids)
    threshold = 0.02
    names = (~hw.Circuit.of([], model)).names
    left, effects = one_at_a_time(names, lambda some: difference(naive.alone(some)), threshold, tries=tries)
    assert nothing_is_near(effects.values(), threshold)
    start = ~hw.Circuit.of([], model)
    found = hw.find_circuit(
        model, CLEAN, CORRUPTED, threshold=threshold, budget=tries, start=start, placebos=0, **QUIET
    )
    table = found.table.set_index("edge")
    assert table.index[:tries].tolist() == list(effects)
    assert table["effect"][:tries].to_numpy() == pytest.approx(list(effects.values()), abs=1e-5)
    inside = [name for name in found.circuit.names if name in left or name in effects]
    assert set(effects) & set(left) == set(effects) & set(inside)
    assert 0 < len(set(effects) & set(left)) < tries


@pytest.mark.parametrize(("family", "values"), [("llama", "other run"), ("gemma2", "zero")])
def test_the_whole_search_is_that_of_one_circuit_at_a_time_on_all_pairs(family, values):
    model, threshold = loaded(family), 0.05
    clean, corrupted = [CLEAN, " Paris is in A"], [CORRUPTED, " Rome is in A"] if values == "other run" else None
    runner = CircuitRunner(Pairs(model, clean, corrupted, QUIET["metric"], values=values), keep=2)

    def value(names) -> float:
        circuit = hw.Circuit.of(names, model) | rest
        return np.mean([runner.measure(pair, [circuit.edges])["values"].item() for pair in range(2)])

    full = ~hw.Circuit.of([], model)
    tried = [name for name in full.names if name.endswith("logits")]
    rest = full - hw.Circuit.of(tried, model)
    left, effects = one_at_a_time(tried, value, threshold)
    assert nothing_is_near(effects.values(), threshold)
    found = hw.find_circuit(
        model, clean, corrupted, threshold=threshold, values=values, budget=len(tried), start=full, placebos=0, **QUIET
    )
    table = found.table.set_index("edge").loc[tried[::-1]]
    assert table["effect"].to_numpy() == pytest.approx(list(effects.values()), abs=1e-5)
    assert table.index[table["decision"] == "kept"].tolist() == [name for name in effects if name in left]


@pytest.mark.planted
@pytest.mark.parametrize("by", ["size", "signed"])
def test_a_planted_circuit_is_found(by):
    made = circuits.name_mover()
    model = hw.load(made.model, tokenizer=made.tokenizer)
    clean = "When Anna and Boris went to the store Boris gave a drink to"
    found = hw.find_circuit(
        model, clean, clean.replace("Boris gave", "Clara gave"),
        metric=hw.logit_difference(" Anna", " Boris"), threshold=0.1, by=by, placebos=5, progress=False,
    )  # fmt: skip
    wired = {
        "embed -> q 0.2", "head 0.2 -> k 1.1", "head 0.2 -> v 1.1", "head 1.1 -> q 2.3", "embed -> k 2.3",
        "head 2.3 -> logits",
    }  # fmt: skip
    assert set(found.circuit.names) >= wired - {"head 0.2 -> v 1.1", "head 0.2 -> k 1.1"}
    assert len(found.circuit.on_a_path) <= 7
    assert set(found.circuit.on_a_path.names) <= wired | {"embed -> v 2.3"}
    row = found.summary().iloc[0]
    assert row["faithfulness"] == pytest.approx(1, abs=0.02)
    assert row["faithfulness"] > row["placebo_high"]
    assert row["edges"] == len(found.circuit) == 262 - row["removed"] - row["nowhere"]
    assert "of 262 edges are left" in found.report()[0]
    assert hw.run_circuits(
        model, clean, clean.replace("Boris gave", "Clara gave"), found.circuit,
        metric=hw.logit_difference(" Anna", " Boris"), progress=False,
    ).table["value"].item() == pytest.approx(found.table["value"].iloc[-1], abs=1e-5)  # fmt: skip


def test_what_a_budget_leaves_untried_stays_in_and_is_said():
    asked = {"threshold": 0.05, "budget": 30, "start": ~hw.Circuit.of([], loaded("gpt2")), "placebos": 0, **QUIET}
    found = hw.find_circuit(loaded("gpt2"), CLEAN, CORRUPTED, **asked)
    counts = found.table["decision"].value_counts()
    assert counts["kept"] + counts["removed"] == 30
    assert len(found.circuit) == counts["kept"] + counts["not tried"]
    assert found.report()[0].startswith(
        f"This is not a circuit yet: {counts['not tried']:,} of {len(found.table):,} edges"
    )
    assert f"{counts['not tried']:,} not tried" in repr(found)
    all_at_once, few_at_once = (
        hw.find_circuit(loaded("gpt2"), CLEAN, CORRUPTED, batch_size=size, **asked) for size in (50, 1)
    )
    assert all_at_once.circuit == few_at_once.circuit == found.circuit


@pytest.mark.parametrize("values", ["other run", "zero"])
def test_a_budget_below_the_number_of_edges_begins_from_the_strongest_and_tries_them_all(values):
    model, threshold, budget = loaded("llama"), 0.02, 25
    clean, corrupted = [CLEAN, " Paris is in A"], [CORRUPTED, " Rome is in A"] if values == "other run" else None
    exact = hw.edges(model, clean, corrupted, values=values, method="exact", **QUIET)
    strongest = exact.circuit(budget)
    asked = {"threshold": threshold, "values": values, "placebos": 2, **QUIET}
    found = hw.find_circuit(model, clean, corrupted, budget=budget, **asked)
    begun = found.table[found.table["decision"] != "left out"]
    assert len(begun) == budget
    assert not (begun["decision"] == "not tried").any()
    assert len(set(begun["edge"]) & set(strongest.names)) >= 0.8 * budget  # the rest the screen ranked otherwise
    runner = CircuitRunner(Pairs(model, clean, corrupted, QUIET["metric"], values=values), keep=2)

    def value(names) -> float:
        edges = hw.Circuit.of(list(names), model).edges
        return np.mean([runner.measure(pair, [edges])["values"].item() for pair in range(2)])

    names = begun["edge"].tolist()[::-1]
    left, effects = one_at_a_time(names, value, threshold)
    assert nothing_is_near([effect for effect in effects.values() if effect], threshold)
    assert set(found.circuit.names) == {name for name in left if abs(effects[name]) >= threshold}
    baselines = found.alone[found.alone["placebo"].isna()][["clean", "corrupted"]].mean()
    gap = baselines["clean"] - baselines["corrupted"]
    first = (value(names) - baselines["corrupted"]) / gap
    assert found.faithfulness_at_first == pytest.approx(first, abs=1e-4)
    said = found.report()
    assert said[0].startswith(f"The search started from {budget} edges (strongest in the whole model")
    assert f"faithfulness {first:.2f}" in said[0]
    faithfulness = found.summary()["faithfulness"].item()
    assert any(one.startswith("This is not a circuit:") for one in said) == (faithfulness < 0.5)
    given = hw.find_circuit(model, clean, corrupted, start=hw.Circuit.of(names, model), **asked)
    assert given.circuit == found.circuit
    assert "(given)" in given.report()[0]
    with pytest.raises(InputError, match="start= has no edges"):
        hw.find_circuit(model, clean, corrupted, start=hw.Circuit.of([], model), **asked)


def test_a_stopped_search_goes_on_where_it_stopped(tmp_path, monkeypatch):
    model = loaded("gpt2")
    options = {"threshold": 0.05, "placebos": 0, "budget": 60, **QUIET}
    walked, walk = set(), CircuitWalk.measure

    def seen(self, circuits):
        walked.add(tuple(one.tobytes() for one in circuits))
        return walk(self, circuits)

    monkeypatch.setattr(CircuitWalk, "measure", seen)
    whole = hw.find_circuit(model, CLEAN, CORRUPTED, **options)
    at_first, walked = walked, set()
    batches = []

    def stops(runner, example, circuits):
        batches.append(len(circuits))
        if len(batches) == 4:
            raise KeyboardInterrupt
        return measure(runner, example, circuits)

    measure = hw.circuits.circuit_walk.CircuitRunner.measure
    monkeypatch.setattr("headwater.circuits.circuit_walk.CircuitRunner.measure", stops)
    with pytest.raises(KeyboardInterrupt):
        hw.find_circuit(model, CLEAN, CORRUPTED, out=tmp_path, **options)
    hw.find_circuit(model, CLEAN, CORRUPTED, out=tmp_path, **options)
    monkeypatch.undo()
    again = hw.find_circuit(model, CLEAN, CORRUPTED, out=tmp_path, **options)
    assert sum(batches[:3] + batches[4:]) == whole.runs + 1  # of what was done nothing again; one run of what is left
    assert again.circuit == whole.circuit
    assert walked <= at_first  # circuits that run beside others have other last digits than alone
    pd.testing.assert_frame_equal(again.table, whole.table, check_exact=True)
    with pytest.raises(RunFolderError, match="threshold"):
        hw.find_circuit(model, CLEAN, CORRUPTED, out=tmp_path, **options | {"threshold": 0.1})


def test_a_search_with_a_budget_accepts_means_of_other_prompts_and_positions_by_text():
    model, others = loaded("llama"), [" cat saw dog A", " the capital of Italy is of A"]
    options = {"metric": hw.log_probability(5, at=" is"), "threshold": 0.02, "placebos": 0, "progress": False}
    of_a_pair = hw.find_circuit(model, CLEAN, CORRUPTED, budget=20, **options)
    assert len(of_a_pair.circuit)
    of_mean = hw.find_circuit(model, CLEAN, budget=20, values=hw.mean(others), **options)
    as_dataset = hw.find_circuit(model, CLEAN, budget=20, values="mean", dataset=others, **options)
    assert len(of_mean.circuit)
    assert of_mean.circuit == as_dataset.circuit


def test_what_cannot_be_searched_is_refused_before_any_run():
    model = loaded("gpt2")
    two = {"metric": [hw.logit_difference(5, 9), hw.log_probability(5)], "progress": False}
    with pytest.raises(InputError, match="One metric decides which edges stay; 2 were given"):
        hw.find_circuit(model, CLEAN, CORRUPTED, threshold=0.1, **two)
    with pytest.raises(InputError, match="threshold=0"):
        hw.find_circuit(model, CLEAN, CORRUPTED, threshold=0, **QUIET)
    with pytest.raises(InputError, match="by='sign'"):
        hw.find_circuit(model, CLEAN, CORRUPTED, threshold=0.1, by="sign", **QUIET)
    with pytest.raises(InputError, match="there are no corrupted prompts"):
        hw.find_circuit(model, CLEAN, threshold=0.1, **QUIET)
