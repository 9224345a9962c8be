"""The suite of edges agrees with its peers on a model of three small layers, and counts the least arithmetic."""

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import circuits, edges
from benchmarks.edge_task import Task, model_with_gradients
from benchmarks.machine import Machine
from benchmarks.models import random_gpt2

from headwater.circuits.circuit import circuit_from_edges

MACHINE = Machine("test", 1, 1e11, 1e10)


def test_every_row_of_the_suite_agrees_with_its_peer(monkeypatch):
    monkeypatch.setattr(edges, "SAMPLED", 6)
    with torch.inference_mode():
        rows = list(edges.quick(MACHINE, "cpu"))
    assert [row.agrees for row in rows] == [True] * 5 + [None]
    assert all(row.headwater_s > 0 for row in rows)
    assert rows[0].floor_s < rows[1].floor_s
    assert all(0 < row.floor_s < row.headwater_s and row.work.done > 0 for row in rows)
    direct, screened, eap, averaged = rows[2:6]
    assert direct.floor_s < rows[0].floor_s
    assert eap.floor_s < screened.floor_s < rows[0].floor_s
    assert 2 * eap.floor_s < averaged.floor_s < 5 * eap.floor_s


def test_a_hooked_run_that_changes_another_sender_does_not_agree(monkeypatch):
    task = Task.of(model_with_gradients("cpu", **edges.QUICK), 6, "cpu")
    changes = edges._changes(task)
    with torch.inference_mode():
        found = task.edges()
        monkeypatch.setattr(edges, "_changes", lambda task: changes | {"embed": 2 * changes["embed"]})
        monkeypatch.setattr(edges, "_sample", lambda task, among: [task.graph.edge_named("embed -> q 1.1")])
        assert not edges._agrees_with_hooked_runs(task, found)


def test_the_least_arithmetic_of_gpt2_is_what_was_counted_by_hand():
    """A head's edge into layer l of L: 8 + 1/H of 12 d² at 10 positions, 12 a layer above, the last trimmed."""
    task = Task.of(random_gpt2("cpu", n_layer=2, n_head=2, n_embd=16, vocab_size=1200), 6, "cpu")
    heads, mlps = 1 * 6 + 4 * 6, 3 + 6  # by layer: q, k, v of 1 and 4 senders; the MLP of 3 and 6
    own = 6 * 8.5 * 10 + 24 * 8.5 + 3 * 8 * 10 + 6 * 8
    above = (6 + 3) * (2 * 10 + 10)
    assert (heads, mlps) == (30, 9)
    assert edges.least_operations(task) == pytest.approx(2 * 16**2 * (own + above))


def test_the_least_arithmetic_of_estimates_and_of_some_edges_is_what_was_counted_by_hand():
    """Two layers of width 16: runs of 16 and 10 tokens, a gradient of 10, of which 3 d² are each layer's receivers'."""
    task = Task.of(random_gpt2("cpu", n_layer=2, n_head=2, n_embd=16, vocab_size=1200), 6, "cpu")
    n_edges = 6 * (1 + 4) + (3 + 6) + 7
    assert task.graph.n_edges == n_edges
    ten, sixteen = 12 * 10 + 2 * 10 + 10, 12 * 16 + 2 * 16 + 10
    products = 2 * 10 * 16 * n_edges
    assert edges.least_of_estimates(task) == 2 * 16**2 * (sixteen + ten + ten + 2 * 3 * 10) + products
    assert edges.least_of_estimates(task, 5) == 2 * 16**2 * (sixteen + 6 * ten + 5 * (ten + 2 * 3 * 10)) + products
    into_mlp = [task.graph.edge_named(f"{sender} -> mlp 1") for sender in ("embed", "head 0.1")]
    assert edges.least_operations(task, into_mlp) == 2 * 16**2 * 2 * 8
    names = ["embed -> q 0.1", "head 0.1 -> mlp 1", "mlp 1 -> logits"]
    circuit = circuit_from_edges(task.graph, [task.graph.edge_named(name) for name in names])
    assert circuits.least_of_nodes(task, circuit).operations == 2 * 16**2 * (4 / 2 * 10 + 8 * 1)


def test_a_circuit_that_is_not_the_peers_does_not_agree(monkeypatch):
    task = Task.of(model_with_gradients("cpu", **edges.QUICK), 6, "cpu")
    with torch.inference_mode():
        assert circuits.faithfulness_row(MACHINE, task, 1).agrees
        nodes = circuits.nodes
        monkeypatch.setattr(circuits, "nodes", lambda name, shape: nodes(name, shape)[:-1])
        assert not circuits.faithfulness_row(MACHINE, task, 1).agrees


def test_circuits_are_a_suite_whose_rows_agree_and_say_what_share_of_the_matrix_rate_they_reach():
    with torch.inference_mode():
        rows = list(command.SUITES["circuits"](MACHINE, "cpu", model_with_gradients("cpu", **edges.QUICK), rounds=1))
    assert [row.agrees for row in rows] == [True] * 3
    assert all(row.floor_s < row.headwater_s and row.use_of(MACHINE)["unit"] == "circuits/s" for row in rows)
    assert 0 < rows[2].floor_s < rows[0].floor_s
    # three layers of width 64, 10 changed tokens: two whole blocks, of the last keys and values and one token's rest
    assert rows[0].floor_s == 2 * 64**2 * (2 * 12 * 10 + 2 * 10 + 10) / MACHINE.matrix_rate
    assert command.QUICK["circuits"] is circuits.quick
