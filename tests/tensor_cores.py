"""Products as tensor cores sum them: sixteen terms at a time, and every sum so far cut off at 24 bits."""

import torch

STEP = 16


def cut_off(numbers):
    """Float64 numbers cut off, not rounded, to the 24 bits of a float32."""
    fraction, exponent = torch.frexp(numbers)
    return torch.ldexp((fraction * 2**24).trunc(), exponent - 24)


def product(a, b, before=None):
    """a @ b in float32, added to what was summed before."""
    total = torch.zeros(len(a), b.shape[1], dtype=torch.float64) if before is None else before.double()
    for start in range(0, a.shape[1], STEP):
        total = cut_off(total + a[:, start : start + STEP].double() @ b[start : start + STEP].double())
    return total.float()
