"""Public calls give the numbers that are kept in `tests/golden`; `python -m tests.golden_calls` writes them anew."""

import functools

import pandas as pd
import pytest

from tests.golden_calls import MODELS, calls, changed, fingerprints, kept_of, same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of few prompts: the numbers are what is compared
HERE = tuple(name for name in MODELS if name != "smollm2")


@functools.cache
def calls_of(model):
    return calls(MODELS[model]())


@pytest.mark.parametrize(("model", "call"), [(model, call) for model in HERE for call in kept_of(model)])
def test_a_call_gives_the_numbers_that_are_kept(model, call):
    assert not list(changed(kept_of(model)[call], fingerprints(calls_of(model)[call]())))


@pytest.mark.real
@pytest.mark.parametrize("call", kept_of("smollm2"))
def test_a_call_on_smollm2_gives_the_numbers_that_are_kept(call):
    assert not list(changed(kept_of("smollm2")[call], fingerprints(calls_of("smollm2")[call]())))


@pytest.mark.parametrize("model", HERE)
def test_every_call_is_kept(model):
    assert set(calls_of(model)) == set(kept_of(model))


def test_a_swap_of_rows_a_nan_and_another_word_change_what_is_kept():
    table = pd.DataFrame({"x": [1.0, 2.0, 3.0], "word": ["a", "b", "c"]})
    kept = fingerprints(table)
    assert not list(changed(kept, fingerprints(table * 1)))
    for other in (table.iloc[[1, 0, 2]], table.assign(x=[1.0, 2.0, float("nan")]), table.assign(word=["a", "b", "d"])):
        assert list(changed(kept, fingerprints(other)))
    assert same([2, 0, 1.0, 0.5], [2, 0, 1.0001, 0.5])
    assert not same([2, 0, 1.0, 0.5], [2, 0, 1.001, 0.5])
