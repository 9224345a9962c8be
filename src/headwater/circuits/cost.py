"""How long edges, paths and circuits take, before they are computed: N edges, so many TFLOP, so many hours.

    one edge to a receiver of layer l    t · [f_l + f_(l+1) + ... + f_(L-1)]        t tokens from the first that differs
    f of a layer                         2 · its parameters + 4 · T · H · d_head    operations a token

An edge to the logits takes none of the layers; a path is an edge to the first of its receivers. A circuit takes, of the
layers in which it has a head or an MLP in use, 2 · the parameters of these, and 2 · d_model a receiver and a sender to
say what each receiver reads. The rate is that of one product of the size of an MLP's, measured on the
model's device; a run reaches somewhat less. Only where there is something to warn of is the rate measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from headwater.circuits.graph import SENDERS, Graph, Indices
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.patching.plan import Plan
from headwater.patching.values import Source

LARGE = 1_000_000_000
"""From so many parameters on, edges are screened by default."""
PATIENCE = 1.0
"""Hours from which on a run is warned of."""
WORTH_TIMING = 5e12
"""Fewer operations than these are not timed: no device takes an hour for them."""
ROWS = 1024


def default_method(model: HookedModel) -> str:
    """Return `exact`, or `screened` for a model of a billion parameters or more."""
    total = sum(parameter.numel() for parameter in model.raw.parameters())
    return "screened" if total >= LARGE else "exact"


def operations(plan: Plan, source: Source, edges: Indices, n_places: int = 1) -> float:
    """Return how many multiplications and additions the exact effects of edges take, over all pairs and places."""
    graph = Graph.of(plan.model.shape)
    return joining_operations(plan, source, np.bincount(graph.stage[edges], minlength=graph.n_layers + 1)) * n_places


def joining_operations(plan: Plan, source: Source, joining: Indices) -> float:
    """Return how many operations rows take over all pairs, so many of which join at each layer (last: the logits)."""
    shape = plan.model.shape
    own = [sum(parameter.numel() for parameter in block.parameters()) for block in plan.model.raw.blocks]
    total = 0.0
    for example, kept in enumerate(plan.positions):
        stop = kept[-1] + 1
        tokens = max(0, stop - min(source.since(example), kept[0]))
        a_token = [2 * count + 4 * stop * shape.n_heads * shape.d_head for count in own]
        left = np.cumsum(a_token[::-1])[::-1]
        total += tokens * float((joining[: shape.n_layers] * left).sum())
    return total


def circuit_operations(model: HookedModel, circuits: Sequence[Indices], tokens: int) -> float:
    """Return how many operations circuits take, given as edges, that run from some tokens on."""
    graph = Graph.of(model.shape)
    heads = [sum(p.numel() for p in block.attn.parameters()) for block in model.raw.blocks]
    whole = [sum(p.numel() for p in block.parameters()) for block in model.raw.blocks]
    mlps = np.subtract(whole, heads)
    total = 0.0
    for edges in circuits:
        used = np.unique(graph.sender[edges])
        layer, kind = graph.senders.layer[used], graph.senders.kind[used]
        in_use = [np.unique(layer[kind == SENDERS.index(one)]) for one in ("head", "mlp")]
        weights = sum(float(np.take(own, at).sum()) for own, at in zip((heads, mlps), in_use, strict=True))
        mixed = len(np.unique(graph.receiver[edges])) * len(used) * model.shape.d_model
        total += 2 * (weights + mixed)
    return total * tokens


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


def refuse_what_takes_too_long(
    plan: Plan, source: Source, edges: Indices, n_places: int, exact: int, hours: float | None
) -> None:
    """Warn of what takes more than an hour, or refuse what takes more than the caller allows.

    Args:
        plan: the pairs.
        source: what senders are exchanged for.
        edges: which are asked for.
        n_places: at how many places each.
        exact: how many of them are computed exactly.
        hours: what the caller allows.

    Raises:
        InputError: it takes longer; the message has the number of edges, the operations, the rate and the hours.

    Warns:
        UserWarning: it takes more than an hour, and nothing was said.
    """
    if not exact:
        return
    work = operations(plan, source, edges, n_places) * exact / len(edges)
    advice = "Use method='screened', or" if exact == len(edges) else "Verify fewer (verify=), or"
    what = f"{exact:,} edges of {len(plan.base):,} pairs"
    warn_of_hours(plan.model, what, work, f"{advice} choose senders= or receivers=.", hours)


def warn_of_hours(model: HookedModel, what: str, work: float, advice: str, hours: float | None = None) -> None:
    """Warn of work that takes more than an hour, or refuse what takes more than the caller allows.

    Args:
        model: on whose device.
        what: what is asked for, such as "32,491 edges of 3 pairs".
        work: its operations.
        advice: what would be less.
        hours: what the caller allows.

    Raises:
        InputError: it takes longer.

    Warns:
        UserWarning: it takes more than an hour, and nothing was said.
    """
    if work < WORTH_TIMING and hours is None:
        return
    measured = rate(model)
    needed = work / measured / 3600
    if needed <= (PATIENCE if hours is None else hours):
        return
    said = (
        f"{what}, {work / 1e12:,.3g} TFLOP, at the measured rate of {measured / 1e9:,.3g} GFLOP/s "
        f"{needed:,.2g} hours. {advice}"
    )
    if hours is not None:
        raise InputError(f"{said} hours={hours:g} were allowed.")
    warnings.warn(said, stacklevel=4)
