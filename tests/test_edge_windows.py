"""Where prompts are longer than a layer's window, edges, paths and circuits are still those of hooked plain runs."""

from functools import cache

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.circuits.circuit import circuit_from_edges
from headwater.circuits.graph import Graph
from tests import chance
from tests.circuit_reference import CircuitReference
from tests.edge_pairs import DIFFERENCE, QUIET, by_three_forwards, difference, pair_of
from tests.tiny import tiny_model, tiny_tokenizer

CLEAN = " the capital of France is in A one two three of the big cat"
CORRUPTED = CLEAN.replace("France", "Italy").replace("two", "six")
ASKED = {"metric": DIFFERENCE, **QUIET}
WINDOWED = {
    "mistral": {},
    "gemma2": {},
    "gemma3": {},
    "qwen2": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
}
"""Families some of whose layers look back over 8 tokens, and what their configuration needs for it."""


@cache
def model_of(family: str, **changes) -> hw.HookedModel:
    return hw.load(tiny_model(family, **(WINDOWED[family] | changes)), tokenizer=tiny_tokenizer())


@cache
def naive_of(family: str) -> CircuitReference:
    """The hooked plain runs, of every edge, path and circuit."""
    clean, corrupted = pair_of(model_of(family), CLEAN, CORRUPTED)
    assert len(clean) == len(corrupted) >= 14
    assert [a == b for a, b in zip(clean, corrupted, strict=True)].index(False) <= 4
    return CircuitReference(tiny_model(family, **WINDOWED[family]), clean, corrupted)


@cache
def edges_of(family: str) -> hw.EdgeEffects:
    return hw.edges(model_of(family), CLEAN, CORRUPTED, **ASKED)


@pytest.mark.parametrize("family", WINDOWED)
def test_edges_equal_hooked_runs(family):
    naive, names = naive_of(family), list(naive_of(family).edges())
    some = range(int(chance.rng().integers(6)), len(names), 6)
    expected = torch.stack([difference(naive.logits(*names[edge])) for edge in some]) - difference(naive.base_logits)
    assert float(expected.abs().max()) > 0.05
    torch.testing.assert_close(edges_of(family).effects[0, 0, list(some), 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", WINDOWED)
def test_the_prompts_reach_past_the_window(family):
    """The same weights without a window have other effects, so the comparisons here would see one that is left out."""
    without = hw.edges(model_of(family, sliding_window=64), CLEAN, CORRUPTED, **ASKED)
    assert float((without.effects - edges_of(family).effects).abs().max()) > 0.02


@pytest.mark.diagonal
@pytest.mark.parametrize("through", ["direct", "mlps"])
@pytest.mark.parametrize("family", WINDOWED)
def test_paths_equal_three_hooked_runs(family, through):
    senders = {"embed": "embed", "head 0.1": "head 0.1", "two": ["head 0.0", "mlp 0"]}
    receivers = {"v 2.0": "v 2.0", "several": ["k 1.0", "q 2.3", "mlp 2"], "logits": "logits"}
    given = {"senders": list(senders.values()), "receivers": list(receivers.values())}
    found = hw.path_patch(model_of(family), CLEAN, CORRUPTED, through=through, **given, **ASKED)
    expected = []
    for sent in senders.values():
        for received in receivers.values():
            both = ([one] if isinstance(one, str) else one for one in (sent, received))
            expected.append(float(by_three_forwards(naive_of(family), *both, through)))
    assert found.table["effect"].to_numpy() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.abs(expected).max() > 0.02


@pytest.mark.parametrize("family", WINDOWED)
def test_circuits_equal_runs_put_together_by_hand(family):
    graph, rng, naive = Graph.of(model_of(family).shape), chance.rng(), naive_of(family)
    circuits = {f"{x}": circuit_from_edges(graph, np.flatnonzero(rng.random(graph.n_edges) < x)) for x in (0.9, 0.4)}
    circuits |= {"full": ~hw.Circuit.of([], graph)}
    runs = hw.run_circuits(model_of(family), CLEAN, CORRUPTED, circuits, **ASKED)
    expected = {name: float(difference(naive.alone(circuit.names))) for name, circuit in circuits.items()}
    found = dict(zip(runs.table["circuit"], runs.table["value"], strict=True))
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected["full"] == pytest.approx(float(difference(naive.clean)), abs=1e-5)
