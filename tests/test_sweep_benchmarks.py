"""The sweep suites agree with their peers and report what they compare, on a model of two small layers."""

import pytest
import torch
from benchmarks import experiments, knockout, patching, toys
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
    model = patching.random_gpt2("cpu", **SIZES)
    with torch.inference_mode():
        rows = [*patching.run(MACHINE, "cpu", model), *knockout.run(MACHINE, "cpu", model)]
    assert len(rows) == 4 + 2 + 3
    assert all(row.agrees for row in rows)
    assert all("engine: whole runs" not in row.note for row in rows)


@pytest.mark.slow
def test_what_a_person_brings_goes_through_the_wavefront_beside_the_built_in_values(monkeypatch):
    monkeypatch.setattr(patching, "ROUNDS", 1)
    monkeypatch.setattr(experiments, "WRITTEN", 2)
    model = patching.random_gpt2("cpu", **SIZES)
    with torch.inference_mode():
        rows = list(experiments.run(MACHINE, "cpu", model))
    assert len(rows) == 7
    assert all(row.agrees for row in rows[:-1])


def test_the_floor_of_a_sweep_is_less_than_the_peer_and_grows_with_the_prompt():
    model = patching.random_gpt2("cpu", **SIZES)
    shape, block = model.shape, 12 * model.shape.d_model**2
    for site, cells in (("resid_pre", 16 * shape.n_layers), ("z", shape.n_heads * shape.n_layers)):
        floors = [patching._least_operations(model, site, length) for length in (16, 32)]
        assert 2 * 2 * 16 * block * shape.n_layers < floors[0] < 2 * cells * 16 * block * shape.n_layers
        assert floors[1] > 1.9 * floors[0]


def test_sweeps_of_toys_agree_with_a_loop_of_hooks_in_one_walk(monkeypatch):
    monkeypatch.setattr(toys, "in_turns", lambda ours, theirs, device: (1.0, 1.0))
    with torch.inference_mode():
        rows = list(toys.run(MACHINE, "cpu", prompts=3))
    assert [row.agrees for row in rows] == [True, True]
    assert all("engine: wavefront" in row.note for row in rows)


def test_plain_hooks_with_a_batch_of_positions_give_the_sweep(monkeypatch):
    monkeypatch.setattr(patching, "in_turns", lambda ours, theirs, device: (1.0, 1.0))
    monkeypatch.setattr(patching, "ANSWERS", (1001, 1002))
    with torch.inference_mode():
        assert patching._beside_plain_hooks(MACHINE, "cpu", patching.random_gpt2("cpu", **SIZES), "").agrees
