"""The suite of edges agrees with its peers on a model of three small layers, and counts the least arithmetic."""

import pytest
import torch
from benchmarks import __main__ as command
from benchmarks import circuits, edges
from benchmarks.edge_task import Task, model_with_gradients
from benchmarks.machine import Machine
from benchmarks.patching import random_gpt2

MACHINE = Machine("test", 1, 1e11, 1e10)


def test_every_row_of_the_suite_agrees_with_its_peer(monkeypatch):
    monkeypatch.setattr(edges, "in_fresh_process", lambda work, *given: None)
    monkeypatch.setattr(edges, "SAMPLED", 6)
    with torch.inference_mode():
        rows = list(edges.quick(MACHINE, "cpu"))
    assert [row.agrees for row in rows] == [True] * 5 + [None] + [True]
    assert all(row.headwater_s > 0 for row in rows)
    assert rows[0].floor_s < rows[1].floor_s


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
    assert [row.work is None for row in rows] == [False, False, True]
    # three layers of width 64, 10 changed tokens: two whole blocks, of the last keys and values and one token's rest
    assert rows[0].floor_s == 2 * 64**2 * (2 * 12 * 10 + 2 * 10 + 10) / MACHINE.matrix_rate
    assert command.QUICK["circuits"] is circuits.quick
