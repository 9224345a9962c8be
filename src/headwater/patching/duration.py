"""How long work takes, roughly, said before anything that takes over a minute.

    seconds = 2 · parameters of the blocks · tokens / rate

of so many tokens as whole runs of the model would have; a gradient counts as a run. The rate is that of one product of
the size of an MLP's, measured on the model's device. What is left to do is measured by the progress bar.
"""

from __future__ import annotations

import time

import torch

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.progress import say, spelled_time

PATIENCE = 60.0
"""Seconds from which on it is said how long a run takes."""
WORTH_TIMING = 1e11
"""Fewer operations than these are not timed: no device takes a minute for them."""
ROWS = 1024


def say_how_long(
    model: HookedModel, what: str, tokens: float, advice: str, *, hours: float | None = None, progress: bool = True
) -> None:
    """Say how long work takes, if it is over a minute, or refuse what takes longer than the caller allows.

    Args:
        model: on whose device.
        what: what is requested, such as "32,491 edges of 3 pairs".
        tokens: so many as whole runs of the model have that compute as much.
        advice: what would be less.
        hours: what the caller allows.
        progress: whether anything is said.
    """
    # Blocks alone: embeddings are looked up, and sweeps unembed few positions.
    work = 2.0 * tokens * sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    if hours is None and (work < WORTH_TIMING or not progress):
        return
    needed = work / rate(model)
    if hours is not None and needed > 3600 * hours:
        raise InputError(f"{what} would take about {spelled_time(needed)}; hours={hours:g} were allowed. {advice}")
    if needed > PATIENCE:
        say(progress, f"{what} take about {spelled_time(needed)}. {advice}")


def rate(model: HookedModel) -> float:
    """Return the multiplications and additions a second of a product of matrices on the model's device."""
    width, inner = model.shape.d_model, model.shape.d_mlp
    a, b = (torch.zeros(*size, dtype=model.dtype, device=model.device) for size in ((ROWS, width), (width, inner)))
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        # Read back: a GPU returns from the product before it is done.
        float((a @ b)[0, 0])
        # The best of three: the first includes loading the kernel.
        best = max(best, 2.0 * ROWS * width * inner / (time.perf_counter() - begun))
    return best
