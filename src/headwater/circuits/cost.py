"""How long edges, paths and circuits take, roughly, said before anything that takes over a minute.

    seconds = 2 · parameters of the blocks · tokens / rate

of so many tokens as whole runs of the model would have: an edge counts for half its receiver's layer and those after
it, a circuit for all layers, a gradient as a run. The rate is that of one product of the size of an MLP's, measured on
the model's device. It is half to twice of what is computed, and more of circuits that leave layers out. What is left to
do is measured by the progress bar.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from headwater.circuits.graph import Graph, Indices
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.patching.plan import Plan
from headwater.progress import say

LARGE = 1_000_000_000
"""From so many parameters on, edges are screened by default."""
PATIENCE = 60.0
"""Seconds from which on it is said how long a run takes."""
WORTH_TIMING = 1e11
"""Fewer operations than these are not timed: no device takes a minute for them."""
ROWS = 1024


def default_method(model: HookedModel) -> str:
    """Return `exact`, or `screened` for a model of a billion parameters or more."""
    total = sum(parameter.numel() for parameter in model.raw.parameters())
    return "screened" if total >= LARGE else "exact"


def changed_tokens(plan: Plan, since: Callable[[int], int]) -> Indices:
    """Count by pair the tokens that are run: from the first that differs, as `since` says, to the last that is read."""
    return np.array([kept[-1] + 1 - min(since(i), kept[0]) for i, kept in enumerate(plan.positions)])


def runs_of(graph: Graph, stages: Indices) -> float:
    """Return how many whole runs rows are that join at some layers (last: the logits) and run from its middle on."""
    return float(np.maximum(graph.n_layers - 0.5 - stages, 0).sum()) / graph.n_layers


def runs_of_senders(graph: Graph, edges: Indices) -> float:
    """Return how many whole runs are all senders sent through each later layer in which an edge ends."""
    stage, sender = graph.stage[edges], graph.sender[edges]
    return sum(float(sender[stage == layer].max()) + 1 for layer in np.unique(stage) if layer < graph.n_layers) / (
        graph.n_layers
    )


def say_how_long(
    model: HookedModel, what: str, tokens: float, advice: str, *, hours: float | None = None, progress: bool = True
) -> None:
    """Say how long work takes, if it is over a minute, or refuse what takes longer than the caller allows.

    Args:
        model: on whose device.
        what: what is asked for, such as "32,491 edges of 3 pairs".
        tokens: so many as whole runs of the model have that compute as much.
        advice: what would be less.
        hours: what the caller allows.
        progress: whether anything is said.

    Raises:
        InputError: it takes longer.
    """
    work = 2.0 * tokens * sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    if hours is None and (work < WORTH_TIMING or not progress):
        return
    needed = work / rate(model)
    if hours is not None and needed > 3600 * hours:
        raise InputError(f"{what} would take about {_said(needed)}; hours={hours:g} were allowed. {advice}")
    if needed > PATIENCE:
        say(progress, f"{what} take about {_said(needed)}. {advice}")


def rate(model: HookedModel) -> float:
    """Return the multiplications and additions a second of a product of matrices on the model's device."""
    width, inner = model.shape.d_model, model.shape.d_mlp
    a, b = (torch.zeros(*size, dtype=model.dtype, device=model.device) for size in ((ROWS, width), (width, inner)))
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        float((a @ b)[0, 0])
        best = max(best, 2.0 * ROWS * width * inner / (time.perf_counter() - begun))
    return best


def _said(needed: float) -> str:
    return f"{needed / 3600:,.2g} hours" if needed > 3600 else f"{needed / 60:.2g} minutes"
