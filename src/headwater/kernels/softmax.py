"""Softmax over rows shorter than a vector of the processor, such as the attention of a prompt of twelve tokens.

    softmax(x) = softmax(x, -inf, ..., -inf) without its last numbers

torch takes a row of at least `VECTOR` numbers a vector at a time, and a shorter one number by number: twelve take ten
times as long as sixteen.
"""

import torch
from jaxtyping import Float
from torch import Tensor

VECTOR = 16
"""Numbers in the widest vector of a processor."""


def softmax(x: Float[Tensor, "*row key"]) -> Float[Tensor, "*row key"]:
    """Return the softmax over the last axis; a row all of whose numbers are -inf becomes NaN, as with torch's."""
    width = x.shape[-1]
    if x.device.type != "cpu" or width >= VECTOR:
        return x.softmax(-1)
    # With the copies still eight times as fast as torch at 12 keys (benchmarks/NOTES.md).
    return torch.nn.functional.pad(x, (0, VECTOR - width), value=-torch.inf).softmax(-1)[..., :width]
