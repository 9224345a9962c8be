"""A circuit's claim is judged on prompts that did not choose it; planted circuits hold, chance seldom does."""

from functools import cache

import numpy as np
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.planted import circuits
from tests import chance
from tests.tiny import WORDS, embedded, tiny_model, tiny_tokenizer

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


def test_a_claim_about_texts_may_name_positions_by_a_text():
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    pair, options = (
        (" the capital of France is in A", " the capital of Italy is of A"),
        {"other": "zero", "placebos": 3},
    )
    by_text, by_number = (
        hw.Circuit.of("embed -> logits", model).claim(
            model, *pair, metric=hw.log_probability(5, at=at), **options, progress=False
        )
        for at in (" is", model.token_strings(model.tokenize(pair[0]).tokens[0]).index(" is"))
    )
    assert by_text.table.equals(by_number.table)


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
    assert "of them on average)" in claim.sentence
    again = circuit.claim(planted(), clean, corrupted, metric=metric, other=None, placebos=20, progress=False)
    assert "1 prompt used to select the circuit" in again.sentence
    assert not again.holds
    by_hand = hw.Circuit.of(WIRED, planted())
    assert np.isnan(
        by_hand.claim(planted(), *held_out[:2], metric=held_out[2], placebos=20, progress=False)
        .table["held_out"]
        .item()
    )


def test_a_claim_leaves_out_the_prompts_that_chose_its_own_circuit_and_no_others():
    model, capitals = embedded(), {"France": "Paris", "Spain": "Madrid", "Germany": "Berlin", "Italy": "Rome"}
    clean = [f"The capital of {country} is" for country in capitals]
    answers = [f" {city}" for city in capitals.values()]

    def pairs(at: slice) -> dict[str, object]:
        difference = hw.logit_difference(answers[at], [*answers[1:], answers[0]][at])
        return {"clean": clean[at], "corrupted": [*clean[1:], clean[0]][at], "metric": difference, "progress": False}

    chosen_on = {"first": [0], "second": [1, 2]}
    chosen = {
        name: hw.edges(model, **pairs(slice(seen[0], seen[-1] + 1)), method="sublayer").circuit(40)
        for name, seen in chosen_on.items()
    }
    runs = hw.run_circuits(model, circuits=chosen, placebos=5, **pairs(slice(None)))
    for name, seen in chosen_on.items():
        own = runs.table[(runs.table["circuit"] == name) & runs.table["placebo"].isna()]
        effect = (own["value"] - own["corrupted"]).to_numpy()
        assert runs.claim(name).table["held_out"].item() == pytest.approx(np.delete(effect, seen).mean(), rel=1e-4)


@pytest.mark.planted
def test_the_same_circuit_holds_on_its_answers_and_hardly_ever_on_answers_swapped_by_lot():
    """Its effect on each prompt is far beyond every random circuit's, so that the signs alone decide."""
    rng, n, n_swaps = chance.rng(), 8, 30
    names = [rng.choice(NAMES[0] + NAMES[1] + NAMES[2] + NAMES[3], 3, replace=False).tolist() for _ in range(n)]
    clean, corrupted, metric = pairs_of(names)
    right, wrong = ([f" {one[i]}" for one in names] for i in (0, 1))

    def swapped(i: int) -> hw.Metric:
        turned = rng.random(n) < 0.5
        ends = np.where(turned, [wrong, right], [right, wrong]).tolist()
        drawn = hw.logit_difference(*ends)
        return hw.Metric(f"swapped {i}", drawn.function, answers=drawn.answers, needs_all=False)

    metrics = [metric, *map(swapped, range(n_swaps))]
    circuit = {"wired": hw.Circuit.of(WIRED, planted())}
    runs = hw.run_circuits(planted(), clean, corrupted, circuit, metric=metrics, placebos=20, progress=False)
    assert runs.claim(metric=metric.name).holds
    claims = [runs.claim(metric=one.name) for one in metrics[1:]]
    assert all(claim.table["p_value"].item() <= 0.05 for claim in claims if abs(claim.table["effect"].item()) > 1)
    assert sum(claim.holds for claim in claims) <= 0.05 * n_swaps


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


def test_a_claim_needs_one_circuit_and_one_metric():
    clean, corrupted, metric = pairs_of(NAMES[:2])
    two = {"a": hw.Circuit.of(WIRED, planted()), "b": hw.Circuit.of(WIRED[:3], planted())}
    runs = hw.run_circuits(planted(), clean, corrupted, two, metric=metric, placebos=2, progress=False)
    with pytest.raises(InputError, match="choose one with circuit='a'"):
        runs.claim()
    with pytest.raises(InputError, match="circuit='c' is not one of"):
        runs.claim("c")
    assert "only 2 random circuits, so p is at least 0.33" in runs.claim("a").sentence


def test_a_claim_on_two_metrics_is_refused_before_anything_runs(monkeypatch):
    model = hw.load(tiny_model("llama"), tokenizer=tiny_tokenizer())
    circuit = hw.Circuit.of(["embed -> logits"], model)
    monkeypatch.setattr("headwater.circuits.circuit_runs.run_circuits", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(InputError, match="A claim is on one metric; 2 were given"):
        circuit.claim(model, [[5, 6]], [[5, 7]], metric=[hw.log_probability(5), hw.kl_divergence()])
