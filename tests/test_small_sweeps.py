"""What a sweep of a small model costs beside its arithmetic: what is done for each pair is little, and done once."""

import sys
from pathlib import Path

import pytest
import torch

import headwater as hw
from tests.own_models import D_VOCAB, own_model

CALLS_PER_PAIR = 80
"""Of headwater's functions, at most. What looked at each of a pair's cells would come to hundreds."""
HERE = str(Path(hw.__file__).parent)


def calls(work) -> int:
    """Count the calls of headwater's own functions in this thread; a step of a comprehension is not a call."""
    counted: list[int] = []

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HERE) and not code.co_name.startswith("<"):
            counted.append(1)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(counted)


@pytest.mark.parametrize("site", ["z", "resid_pre"])
def test_a_further_pair_of_prompts_takes_few_calls_of_python(site):
    model = own_model("plain")
    clean = torch.randint(3, D_VOCAB - 3, (40, 8))
    corrupted = clean + 1

    def sweep(n):
        metric = hw.logit_difference(4, 6)
        return hw.patch(model, clean[:n], corrupted[:n], sites=site, metric=metric, progress=False)

    for _ in range(2):  # what is found out once, of the model and in each library, some of it at the second call
        sweep(40)
    few, many = (calls(lambda n=n: sweep(n)) for n in (20, 40))
    assert (many - few) / 20 < CALLS_PER_PAIR
