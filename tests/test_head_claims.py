"""A claim of heads is judged beside other heads of their layers, on prompts that did not choose them."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import headwater as hw
from headwater.errors import InputError
from headwater.heads import claim
from headwater.heads.causal import matched_sets
from headwater.planted import circuits
from tests import chance
from tests.tiny import WORDS, tiny_hooked

NAMES = [("Anna", "Boris"), ("Clara", "David"), ("Emma", "Frank"), ("Grace", "Henry"), ("Irene", "Jacob")]
CIRCUIT = [circuits.DUPLICATE_NAME_HEAD, circuits.INHIBITION_HEAD, circuits.NAME_MOVER_HEAD]
PROMPTS = [" the capital of France is", " the capital of Italy is", " the dog of France in", " Paris is in A"]
QUIET = {"metric": hw.logit_difference(5, 9), "progress": False}


@cache
def planted() -> hw.HookedModel:
    made = circuits.name_mover()
    return hw.load(made.model, tokenizer=made.tokenizer)


def stories() -> tuple[list[str], hw.Metric]:
    told = [f"When {a} and {b} went to the store {b} gave a drink to" for a, b in NAMES]
    return told, hw.logit_difference([f" {a}" for a, _ in NAMES], [f" {b}" for _, b in NAMES])


@pytest.mark.planted
def test_the_heads_that_were_wired_matter_and_others_of_their_layers_do_not():
    told, metric = stories()
    asked = {"metric": metric, "progress": False, "placebos": 24, "chosen_on": told[:2]}
    found = claim(planted(), told, CIRCUIT, **asked)
    row = found.table.iloc[0]
    assert found.holds
    assert row["effect"] == pytest.approx(-10, abs=0.01)
    assert row["held_out"] == pytest.approx(-10, abs=0.01)
    assert row["p_value"] == pytest.approx(1 / 25)
    assert "2 prompts used to select the heads, so not held out (0, 1)" in found.sentence
    idle = [(0, 0), (1, 2), (2, 1)]
    assert not claim(planted(), told, idle, **asked).holds


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_numbers_are_those_of_ablating_the_heads(family):
    model, heads = tiny_hooked(family), [(0, 1), (2, 3)]
    found = claim(model, PROMPTS, heads, placebos=5, seed=3, **QUIET).table.iloc[0]
    swept = hw.ablate(model, PROMPTS, heads=heads, **QUIET).table["effect"]
    mean = hw.ablate(model, PROMPTS, heads=heads, values="mean", **QUIET).table["effect"]
    assert found["effect"] == pytest.approx(swept.mean(), abs=1e-6)
    assert found["other_ablation"] == pytest.approx(mean.mean(), abs=1e-6)
    assert np.isnan(found["held_out"])
    rows = pd.DataFrame({"layer": [0, 2, 2], "head": [1, 3, 3], "relation": ["a", "a", "b"]})
    same = claim(model, PROMPTS, rows, placebos=5, seed=3, chosen_on=[], **QUIET).table.iloc[0]
    assert same["held_out"] == same["effect"] == found["effect"]
    assert same["placebo_high"] == found["placebo_high"]
    # Eleven other heads in the model, three of them in the layer.
    few = claim(model, PROMPTS, [(1, 0)], other=None, **QUIET)
    assert few.table["p_value"].item() >= 1 / 12
    assert "only 11 comparable random sets, so p is at least 0.083; there are no others" in few.sentence
    assert "random sets are also from the nearest layers" in few.sentence
    assert "nearest" not in claim(model, PROMPTS, heads, placebos=5, seed=3, **QUIET).sentence


def held_on_shuffled_answers(times: int) -> int:
    """How many claims hold of the head that does most on some prompts, on others; answers are drawn by lot."""
    model, rng, held = tiny_hooked("llama", seed=1), chance.rng(), 0

    def drawn() -> tuple[list[str], hw.Metric]:
        prompts = [f" the{a} of{b}" for a, b in rng.choice([" " + word for word in WORDS], (10, 2))]
        right, wrong = rng.integers(5, 60, 10), rng.integers(60, 120, 10)
        return prompts, hw.logit_difference(right.tolist(), wrong.tolist())

    for _ in range(times):
        prompts, metric = drawn()
        swept = hw.patch(model, prompts, values="zero", sites="z", metric=metric, progress=False).table
        sizes = swept.groupby(["layer", "head"])["effect"].mean().abs().sort_values()
        strongest = [(int(layer), int(head)) for layer, head in sizes.index[-2:]]
        others, judged = drawn()
        found = claim(
            model, others, strongest, metric=judged, other=None, placebos=40, chosen_on=prompts, progress=False
        )
        held += found.holds
    return held


def test_on_shuffled_answers_hardly_any_claim_holds():
    assert held_on_shuffled_answers(4) <= 1


@pytest.mark.slow
def test_on_shuffled_answers_at_most_one_claim_in_twenty_holds():
    assert held_on_shuffled_answers(100) <= 5


def test_what_is_no_set_of_heads_is_refused():
    model = tiny_hooked("gpt2")
    with pytest.raises(InputError, match="layer"):
        claim(model, PROMPTS, [(7, 0)], **QUIET)
    with pytest.raises(InputError, match="no column 'head'"):
        claim(model, PROMPTS, pd.DataFrame({"layer": [0]}), **QUIET)
    with pytest.raises(InputError, match="one metric; 2 were given"):
        claim(model, PROMPTS, [(0, 0)], metric=[hw.log_probability(5), hw.logit_difference(5, 9)])
    with pytest.raises(InputError, match="8 heads need 8 others as controls"):
        claim(model, PROMPTS, [(layer, head) for layer in range(2) for head in range(4)], **QUIET)


def test_random_sets_have_as_many_other_heads_of_each_layer_and_no_set_twice():
    def model(n_layers, n_heads):
        return SimpleNamespace(shape=SimpleNamespace(n_layers=n_layers, n_heads=n_heads))

    named = [(3, 0), (3, 2), (5, 1)]
    sets = matched_sets(model(6, 6), named, 20, 0)
    assert len(sets) == len({tuple(sorted(one)) for one in sets}) == 20
    for one in sets:
        assert sorted(layer for layer, _ in one) == [3, 3, 5]
        assert not set(one) & set(named)
    assert len(matched_sets(model(1, 5), [(0, 0), (0, 1)], 20, 0)) == 3
    # One head has eight others in its layer, too few for a p of 5 %: the next layers have enough.
    near = {head for (head,) in matched_sets(model(6, 9), [(3, 0)], 100, 0)}
    assert near == {(layer, head) for layer in (2, 3, 4) for head in range(9)} - {(3, 0)}
    assert {layer for ((layer, _),) in matched_sets(model(6, 9), [(3, 0)], 8, 0)} == {3}
    with pytest.raises(InputError, match="2 heads need 2 others as controls"):
        matched_sets(model(1, 3), [(0, 0), (0, 1)], 20, 0)
