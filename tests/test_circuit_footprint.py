"""What edges, paths and circuits hold at once is what was estimated before; what takes hours is said before."""

import warnings
from functools import cache

import numpy as np
import pytest
import torch
import transformers as tf
from benchmarks.live_bytes import live_bytes

import headwater as hw
from headwater.circuits import cost, greedy
from headwater.circuits.footprint import Footprint
from headwater.circuits.measuring import Outcome
from headwater.errors import InputError
from tests import chance

OPTIONS = {"metric": hw.logit_difference(5, 9), "progress": False}
SENDERS, RECEIVERS = ["head", "mlp 0"], ["mlp 1", "v 1"]
SOME = ["embed -> mlp 0", "mlp -> logits", "embed -> v", "head -> mlp", "mlp -> q"]


@cache
def loaded(shape: str) -> hw.HookedModel:
    torch.manual_seed(chance.seed_of(shape))
    sizes = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
    if shape == "GPT-2":
        made = tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=3, n_head=8, n_embd=64, n_positions=64, **sizes))
    else:
        made = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                hidden_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=192,
                num_hidden_layers=3,
                max_position_embeddings=64,
                **sizes,
            )
        )
    return hw.load(made.eval())


def pair(length: int, start: int) -> tuple[list[list[int]], list[list[int]]]:
    """Two prompts that are equal up to a position."""
    clean, other = torch.randint(10, 290, (2, length)).tolist()
    other[start] = clean[start] + 1
    return [clean], [clean[:start] + other[start:]]


@pytest.mark.diagonal
@pytest.mark.parametrize(("length", "start"), [(12, 4), (40, 0)])
@pytest.mark.parametrize("shape", ["GPT-2", "Llama"])
def test_what_tensors_hold_is_within_the_estimate(shape, length, start):
    model = loaded(shape)
    texts = pair(length, start)
    hw.edges(model, *texts, receivers="logits", **OPTIONS)  # what is checked once is checked
    footprint = Footprint(model, length, length - start)
    circuit = hw.Circuit.of(SOME, model)
    several = [circuit, *circuit.placebos(11)]
    every = np.arange(circuit.graph.n_edges)
    nearly = [~hw.Circuit.of([name], model) for name in (~circuit).names[:16]]
    n_senders = model.shape.n_layers * model.shape.n_heads + 1
    taken = {
        "edges": (lambda: hw.edges(model, *texts, **OPTIONS), footprint.edges(every)),
        "paths": (
            lambda: hw.path_patch(model, *texts, senders=SENDERS, receivers=RECEIVERS, **OPTIONS),
            footprint.paths(n_senders, 2 * model.shape.n_heads + 1, 1, 1),
        ),
        "circuits": (
            lambda: hw.run_circuits(model, *texts, several, **OPTIONS),
            footprint.circuits([one.edges for one in several], len(several)),
        ),
        "the circuit of all edges": (
            lambda: hw.run_circuits(model, *texts, [circuit | ~circuit], **OPTIONS),
            footprint.circuits([every], 1),
        ),
        "many of nearly all edges": (
            lambda: hw.run_circuits(model, *texts, nearly, batch_size=16, **OPTIONS),
            footprint.circuits([one.edges for one in nearly], 16, 16),
        ),
    }
    ratios = {name: live_bytes(model, work) / estimate for name, (work, estimate) in taken.items()}
    assert all(0.7 <= ratio <= 1.5 for ratio in ratios.values()), ratios


@pytest.mark.diagonal
@pytest.mark.parametrize("n_pairs", [1, 5])
@pytest.mark.parametrize("shape", ["GPT-2", "Llama"])
def test_what_a_search_holds_is_within_the_estimate(shape, n_pairs):
    model, batch = loaded(shape), 8
    clean, corrupted = (
        [text for texts in side for text in texts] for side in zip(*(pair(40, 0) for _ in range(n_pairs)), strict=True)
    )
    hw.edges(model, clean[:1], corrupted[:1], receivers="logits", **OPTIONS)  # what is checked once is checked
    footprint = Footprint(model, 40, 40)
    full = ~hw.Circuit.of([], model)
    estimate = footprint.circuits([full.edges], greedy.MOST, batch) + (n_pairs - 1) * footprint.walk()
    options = {"threshold": 0.02, "budget": 40, "start": full, "placebos": 0, "batch_size": batch, **OPTIONS}
    held = live_bytes(model, lambda: hw.find_circuit(model, clean, corrupted, **options))
    assert 0.7 <= held / estimate <= 1.5, held / estimate


def test_a_search_that_takes_hours_or_does_not_fit_is_said_before_any_run(monkeypatch):
    model, texts = loaded("Llama"), pair(12, 4)
    n_edges = hw.Circuit.of([], model).graph.n_edges
    work = cost.circuit_operations(model, [np.arange(n_edges)], 8)
    monkeypatch.setattr(cost, "WORTH_TIMING", 0.0)
    monkeypatch.setattr(cost, "rate", lambda model: work * n_edges / 3600 / 3)  # all edges take three hours
    monkeypatch.setattr("headwater.circuits.measuring.CircuitRunner.measure", None)
    options = {"threshold": 0.1, **OPTIONS}
    said = rf"^{n_edges} edges, each tried on 1 pairs, .* TFLOP, at the measured rate of .* 3 hours\. Give budget="
    with pytest.raises(InputError, match=said + r".* hours=2 were allowed"):
        hw.find_circuit(model, *texts, hours=2, **options)
    with pytest.warns(UserWarning, match=said), pytest.raises(TypeError):
        hw.find_circuit(model, *texts, **options)
    with warnings.catch_warnings(), pytest.raises(TypeError):  # a run, which is None
        hw.find_circuit(model, *texts, budget=n_edges // 4, **options)
    monkeypatch.setattr("headwater.models.memory.available_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"the circuits of a search hold .* would take .* MiB; cpu has .* free"):
        hw.find_circuit(model, *texts, budget=1, **options)


def test_the_runs_of_as_many_pairs_are_kept_as_memory_allows(monkeypatch):
    model = loaded("Llama")
    clean, corrupted = zip(*(pair(12, 4) for _ in range(6)), strict=True)
    outcome = Outcome.of(
        model, [one for (one,) in clean], [one for (one,) in corrupted], metric=hw.logit_difference(5, 9)
    )
    a_pair = Footprint(model, 12, 8).walk()
    for free, kept in ((0, 1), (4 * 3 * a_pair, 3), (4 * 100 * a_pair, 6)):
        monkeypatch.setattr("headwater.circuits.measuring.available_memory", lambda device, free=free: free)
        assert outcome.pairs_to_keep(256) == kept


def test_what_lives_is_counted_and_what_is_gone_is_not():
    model = loaded("GPT-2")

    def work() -> None:
        for _ in range(5):
            first = torch.ones(1000)
            second = first + 1
            del first
            (second.view(10, 100) * 2).sum()

    assert live_bytes(model, work) == pytest.approx(
        3 * 4000, abs=16
    )  # the last round's is there until another has its name
    assert live_bytes(model, lambda: model.raw.unembed.W_U.T * 1) == 4 * 300 * 64


@pytest.mark.parametrize("hours", [0.5, 3.0])
def test_paths_and_circuits_that_take_hours_are_said_to_with_the_figures(hours, monkeypatch, recwarn):
    model, texts = loaded("Llama"), pair(12, 4)
    circuit = hw.Circuit.of(SOME, model)
    calls = {
        "paths": lambda: hw.path_patch(model, *texts, senders=SENDERS, receivers=RECEIVERS, **OPTIONS),
        "circuits": lambda: hw.run_circuits(model, *texts, [circuit], placebos=2, **OPTIONS),
    }
    monkeypatch.setattr(cost, "WORTH_TIMING", 0.0)
    work = cost.circuit_operations(model, [circuit.edges], 8) * 3
    monkeypatch.setattr(cost, "rate", lambda model: work / 3600 / hours)
    if hours < 1:
        calls["circuits"]()
        assert not [one for one in recwarn if "hours" in str(one.message)]
        return
    with pytest.warns(
        UserWarning, match=r"^3 circuits of 1 pairs, .* TFLOP, at the measured rate of .* 3 hours\. Give"
    ):
        calls["circuits"]()
    monkeypatch.setattr(cost, "rate", lambda model: 1.0)
    with pytest.warns(UserWarning, match=r"^19 paths of 1 pairs, .* TFLOP, at the measured rate of .* hours\. Give"):
        calls["paths"]()


@pytest.mark.parametrize("what", ["paths", "circuits"])
def test_paths_and_circuits_that_do_not_fit_are_refused_before_any_run(what, monkeypatch):
    model, texts = loaded("Llama"), pair(12, 4)
    ends = {"senders": SENDERS, "receivers": RECEIVERS}
    calls = {
        "paths": lambda: hw.path_patch(model, *texts, **ends, **OPTIONS),
        "circuits": lambda: hw.run_circuits(model, *texts, [hw.Circuit.of(SOME, model)], **OPTIONS),
    }
    monkeypatch.setattr("headwater.models.memory.available_memory", lambda device: 1000)
    monkeypatch.setattr(hw.HookedModel, "run", None)
    with pytest.raises(InputError, match=f"the {what} of a pair .* would take .* MiB; cpu has .* MiB free"):
        calls[what]()


def test_the_operations_of_a_circuit_are_those_of_what_is_in_use():
    model = loaded("GPT-2")
    graph = hw.Circuit.of([], model).graph
    one = hw.Circuit.of(["embed -> q 1.0", "head 1.0 -> logits"], model)
    attention = 4 * 64 * 64  # W_Q, W_K, W_V and W_O, each once: the module of the joined three holds them twice
    assert cost.circuit_operations(model, [one.edges], 5) == 5 * 2 * (attention + 2 * 2 * 64)
    assert cost.circuit_operations(model, [np.arange(graph.n_edges)], 5) > 4 * 5 * 2 * attention
