"""GELU's tanh form, and the softmax of short rows: a few passes over a few rows, which suits a processor's cache."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# The tanh form of GELU, as GPT-2 and Phi have it, in five passes over a few rows at a time.
#
# gelu(x) = x / 2 · (1 + tanh(√(2/π) (x + 0.044715 x³))) = x · sigmoid(2 √(2/π) (1 + 0.044715 x²) x)
#
# torch's own kernel computes tanh without the CPU's vector library; sigmoid uses it, and takes half the time. A few
# rows at a time stay in the cache from the first pass to the last.


SLOPE = 2 * math.sqrt(2 / math.pi)
CUBIC = 0.044715
AT_ONCE = 1 << 18
"""Numbers per processor core that go through all passes before the next block starts."""


def tanh_gelu(x: Float[Tensor, "*row d"]) -> Float[Tensor, "*row d"]:
    """Return GELU of x in its tanh form; on other devices, in other dtypes and with gradients by torch's kernel."""
    # With gradients the passes below cannot be used: autograd refuses out=.
    if x.device.type != "cpu" or x.dtype != torch.float32 or (x.requires_grad and torch.is_grad_enabled()):
        return torch.nn.functional.gelu(x, approximate="tanh")
    # view(-1) below needs contiguous memory; this copies only slices.
    x = x.contiguous()
    # addcmul takes a tensor, not a number, as its first summand; one without axes broadcasts.
    out, slope = torch.empty_like(x), torch.tensor(SLOPE)
    at_once = AT_ONCE * torch.get_num_threads()
    for x_part, out_part in zip(x.view(-1).split(at_once), out.view(-1).split(at_once), strict=True):
        # The argument of the sigmoid without its factor x, which the next pass multiplies in.
        torch.addcmul(slope, x_part, x_part, value=SLOPE * CUBIC, out=out_part)
        out_part.mul_(x_part).sigmoid_().mul_(x_part)
    return out


# Softmax over rows shorter than a vector register, such as the attention of a prompt of twelve tokens.
#
# softmax(x) = softmax(x, -inf, ..., -inf) without its last numbers
#
# torch processes a row of at least `VECTOR` numbers one vector at a time, and a shorter one number by number: twelve
# numbers take ten times as long as sixteen.


VECTOR = 16
"""Numbers in the widest vector of a processor."""


def softmax(x: Float[Tensor, "*row key"]) -> Float[Tensor, "*row key"]:
    """Return the softmax over the last axis; a row of nothing but -inf becomes NaN, as in torch."""
    width = x.shape[-1]
    if x.device.type != "cpu" or width >= VECTOR:
        return x.softmax(-1)
    # Even with the copies eight times as fast as torch at 12 keys (benchmarks/NOTES.md).
    return torch.nn.functional.pad(x, (0, VECTOR - width), value=-torch.inf).softmax(-1)[..., :width]
