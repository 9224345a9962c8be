"""The sweep suites agree with their peers and report what they compare, on a model of two small layers."""

import importlib.util

import pytest
import torch
from benchmarks import experiments, knockout, models, patching, toys
from benchmarks.machine import Machine

MACHINE = Machine("test", 1, 1e11, 1e10)
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 1200}


@pytest.mark.slow
def test_every_sweep_of_the_suites_agrees_with_its_peer(monkeypatch):
    monkeypatch.setattr(patching, "ROUNDS", 1)
    monkeypatch.setattr(patching, "ANSWERS", (1001, 1002))
    monkeypatch.setattr(knockout, "ANSWERS", (1001, 1002))
    for suite in (patching, knockout):
        monkeypatch.setattr(suite, "in_fresh_process", lambda work, *given: None)
    model = models.random_gpt2("cpu", **SIZES)
    with torch.inference_mode():
        rows = [*patching.run(MACHINE, "cpu", model), *knockout.run(MACHINE, "cpu", model)]
    others = sum(2 * 2 for library in ("nnsight", "pyvene") if importlib.util.find_spec(library))
    assert len(rows) == 4 + 2 + others + 3
    assert all(row.agrees for row in rows)
    assert all("engine: whole runs" not in row.note for row in rows)


@pytest.mark.slow
def test_what_a_person_brings_goes_through_the_wavefront_beside_the_built_in_values(monkeypatch):
    monkeypatch.setattr(patching, "ROUNDS", 1)
    monkeypatch.setattr(experiments, "WRITTEN", 2)
    model = models.random_gpt2("cpu", **SIZES)
    with torch.inference_mode():
        rows = list(experiments.run(MACHINE, "cpu", model))
    assert len(rows) == 7
    assert all(row.agrees for row in rows[:-1])
    assert all(0 < row.floor_s < row.headwater_s and row.use_of(MACHINE)["matrix_share"] > 0 for row in rows)


def test_the_floor_of_a_sweep_is_less_than_the_peer_and_grows_with_the_prompt():
    model = models.random_gpt2("cpu", **SIZES)
    shape, block = model.shape, 12 * model.shape.d_model**2
    for site, cells in (("resid_pre", 16 * shape.n_layers), ("z", shape.n_heads * shape.n_layers)):
        floors = [patching.least_operations(model, site, length) for length in (16, 32)]
        assert 2 * 2 * 16 * block * shape.n_layers < floors[0] < 2 * cells * 16 * block * shape.n_layers
        assert floors[1] > 1.9 * floors[0]


def test_the_least_arithmetic_of_a_sweep_is_what_was_counted_by_hand():
    """Two layers, two heads, 16 tokens that differ from the fourth on; of 12 d² weights of a block."""
    model = models.random_gpt2("cpu", **SIZES)
    unit = 2 * model.shape.d_model**2
    both = (12 + 2) * 16 + 10 + (12 + 2) * 13 + 10  # of the last layer keys, values, one token more
    at_5 = 9 * 11 + 3 + 2 * 11 + 10
    assert patching.least_operations(model, "resid_pre", 16, {0: [5]}, start=3) == unit * (both + at_5)
    assert patching.least_operations(model, "resid_pre", 16, {1: [5, 15]}, start=3) == unit * (both + 2 * 12)
    assert patching.least_operations(model, "resid_pre", 16, {2: [5]}, start=3) == unit * both
    assert patching.least_operations(model, "resid_pre", 16, {0: [5]}, draws=4, start=3) == unit * (both + 4 * at_5)
    heads = 2 * (8 * 13 + 2 * 13 + 10) + 2 * 8
    assert patching.least_operations(model, "z", 16, start=3) == unit * (both + heads)


def test_sweeps_of_toys_agree_with_a_loop_of_hooks_in_one_walk(monkeypatch):
    monkeypatch.setattr(toys, "in_turns", lambda ours, theirs, device: (1.0, 1.0))
    with torch.inference_mode():
        rows = list(toys.run(MACHINE, "cpu", prompts=3))
    assert [row.agrees for row in rows] == [True, True]
    assert all("engine: wavefront" in row.note for row in rows)
    assert all(row.floor_s > 0 and row.work.done == 3 * cells for row, cells in zip(rows, (4, 2 * 12), strict=True))


@pytest.fixture
def beside_peers(monkeypatch):
    """The rows beside other ways of patching on a small model, at no time measured."""
    monkeypatch.setattr(patching, "in_turns", lambda ours, theirs, device: (1.0, 1.0))
    monkeypatch.setattr(patching, "ANSWERS", (1001, 1002))

    def rows():
        with torch.inference_mode():
            model = models.random_gpt2("cpu", **SIZES)
            return {row.peer: row.agrees for row in patching.beside_peers(MACHINE, "cpu", model, "", "")}

    return rows


def test_plain_hooks_give_the_sweep_and_libraries_that_are_not_installed_are_said_to_be_missing(
    beside_peers, monkeypatch, capsys
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "transformers" else None)
    assert beside_peers() == {"plain Hugging Face hooks, all positions of a layer in one batch": True}
    said = capsys.readouterr().out
    assert "nnsight is not installed" in said
    assert "pyvene is not installed" in said


@pytest.mark.parametrize("library", ["nnsight", "pyvene"])
def test_a_library_for_interventions_gives_the_sweep_cell_by_cell_and_in_batches(beside_peers, library):
    pytest.importorskip(library)
    agree = [agrees for peer, agrees in beside_peers().items() if peer.startswith(library)]
    assert agree == [True, True]
