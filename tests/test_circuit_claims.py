"""A circuit's claim is judged on prompts that did not choose it; planted circuits hold, chance seldom does."""

from functools import cache

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.circuits.graph import Graph
from headwater.circuits.graph_files import read_graph_file, write_graph_file
from headwater.errors import InputError
from headwater.planted import circuits
from tests import chance
from tests.tiny import WORDS, tiny_model, tiny_tokenizer

NAMES = [
    ("Anna", "Boris", "Clara"),
    ("David", "Emma", "Frank"),
    ("Grace", "Henry", "Irene"),
    ("Jacob", "Karen", "Louis"),
]
WIRED = [
    "embed -> q 0.2", "head 0.2 -> k 1.1", "head 0.2 -> v 1.1", "head 1.1 -> q 2.3", "embed -> k 2.3",
    "head 2.3 -> logits",
]  # fmt: skip


@cache
def planted() -> hw.HookedModel:
    made = circuits.name_mover()
    return hw.load(made.model, tokenizer=made.tokenizer)


def pairs_of(names: list[tuple[str, str, str]]) -> tuple[list[str], list[str], hw.Metric]:
    clean = [f"When {a} and {b} went to the store {b} gave a drink to" for a, b, _ in names]
    corrupted = [f"When {a} and {b} went to the store {c} gave a drink to" for a, b, c in names]
    return clean, corrupted, hw.logit_difference([f" {a}" for a, _, _ in names], [f" {b}" for _, b, _ in names])


@pytest.mark.planted
@pytest.mark.parametrize("method", ["exact", "screened"])
def test_the_planted_edges_are_the_strongest_and_hold_on_other_prompts(method):
    clean, corrupted, metric = pairs_of(NAMES[:1])
    options = {"metric": metric, "progress": False}
    edges = hw.edges(planted(), clean, corrupted, method=method, verify=262, **options)
    circuit = edges.circuit(6)
    assert sorted(circuit.names) == sorted(WIRED)
    held_out = pairs_of(NAMES[1:])
    claim = circuit.claim(planted(), *held_out[:2], metric=held_out[2], other="zero", placebos=20, progress=False)
    row = claim.table.iloc[0]
    assert row["p_value"] == pytest.approx(1 / 21)
    assert row["held_out"] == pytest.approx(row["effect"])
    assert row["effect"] > row["placebo_high"]
    assert "share on average" in claim.sentence
    again = circuit.claim(planted(), clean, corrupted, metric=metric, other=None, placebos=20, progress=False)
    assert "1 of the prompts chose the circuit" in again.sentence
    assert not again.holds
    by_hand = hw.Circuit.of(WIRED, planted())
    assert np.isnan(
        by_hand.claim(planted(), *held_out[:2], metric=held_out[2], placebos=20, progress=False)
        .table["held_out"]
        .item()
    )


def held_on_shuffled_answers(times: int) -> int:
    """How many claims hold of circuits that were chosen on some prompts, on others; answers are drawn by lot."""
    model, rng = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer()), chance.rng()

    def drawn() -> tuple[list[str], list[str], hw.Metric]:
        words = [" " + word for word in rng.permutation(WORDS)]
        clean, corrupted = (
            [f" the{a} of{b}" for a, b in zip(words, words[i:] + words[:i], strict=True)][:10] for i in (3, 7)
        )
        right, wrong = rng.integers(5, 60, 10), rng.integers(60, 120, 10)
        return clean, corrupted, hw.logit_difference(right.tolist(), wrong.tolist())

    held = []
    for _ in range(times):
        clean, corrupted, metric = drawn()
        edges = hw.edges(model, clean, corrupted, metric=metric, method="eap", progress=False)
        test = drawn()
        claim = edges.circuit(25).claim(model, *test[:2], metric=test[2], other=None, placebos=20, progress=False)
        held.append(claim.holds)
    return sum(held)


def test_on_shuffled_answers_hardly_any_claim_holds():
    assert held_on_shuffled_answers(4) <= 1


@pytest.mark.slow
def test_on_shuffled_answers_at_most_one_claim_in_twenty_holds():
    assert held_on_shuffled_answers(40) <= 2


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
@pytest.mark.parametrize("ending", ["json", "pt"])
def test_graph_files_of_other_tools_are_written_and_read_back(family, ending, tmp_path):
    model = hw.load(tiny_model(family), tokenizer=tiny_tokenizer())
    edges = hw.edges(
        model,
        " the capital of France is",
        " the capital of Italy is",
        metric=hw.logit_difference(5, 9),
        method="eap",
        progress=False,
    )
    circuit = edges.circuit(40)
    file = write_graph_file(circuit, tmp_path / f"graph.{ending}", model.shape.d_model)
    again = read_graph_file(file, model)
    assert again == circuit
    assert again.effects == pytest.approx(circuit.effects, rel=1e-5)
    with pytest.raises(InputError, match="is the graph of 3 layers"):
        read_graph_file(file, Graph(2, 4, 4, False))


def test_a_graph_file_whose_heads_disagree_on_a_shared_key_is_refused(tmp_path):
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    file = write_graph_file(hw.Circuit.of(["embed -> k 1.0"], model), tmp_path / "graph.pt", 32)
    held = torch.load(file, weights_only=True)
    held["edges_in_graph"][0, held["dst_nodes"].index("a1.h0<k>")] = False
    torch.save(held, file)
    with pytest.raises(InputError, match=r"embed -> k 1\.0 for some of the 2 query heads"):
        read_graph_file(file, model)
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(InputError, match="no graph that EAP-IG wrote"):
        read_graph_file(tmp_path / "text.json", model)


def test_a_claim_needs_one_circuit_and_one_metric():
    clean, corrupted, metric = pairs_of(NAMES[:2])
    two = {"a": hw.Circuit.of(WIRED, planted()), "b": hw.Circuit.of(WIRED[:3], planted())}
    runs = hw.run_circuits(planted(), clean, corrupted, two, metric=metric, placebos=2, progress=False)
    with pytest.raises(InputError, match="choose one with circuit='a'"):
        runs.claim()
    with pytest.raises(InputError, match="circuit='c' is not one of"):
        runs.claim("c")
    assert "only 2 random circuits, so p is at least 0.33" in runs.claim("a").sentence
