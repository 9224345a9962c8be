"""How long edges, paths and circuits take, before they are computed: N edges, so many TFLOP, so many hours.

    one edge to a receiver of layer l    t · [m_l + f_(l+1) + ... + f_(L-2) + 4 d_model K d_head] + r · f_(L-1)
    f of a layer                         2 · its parameters + 4 · T · H · d_head    operations a token
    m of its MLP                         2 · its parameters                         (0 where blocks are parallel)

t tokens from the first that differs, r of them read: the last layer makes only keys and values of the others. An edge
to the last layer takes r · m, one to the logits none of the layers; what heads make of the senders before them (as for
`sublayer` below) is made once for all edges. A path is an edge to the first of its receivers. A circuit takes, of the
layers in which it has a head or an MLP in use, 2 · the parameters of these, and 2 · d_model a receiver and a sender to
say what each receiver reads. Estimates of all edges take, of a pair of prompts of T tokens,

    each         T · [f_0 + ... + f_(L-1)] for either run, and as much again for the gradient of each metric
    eap          2 t d_model · [L d_head (H + 2 K) + N] to bring the gradient to each receiver and from there to N edges
    eap-ig       as eap, with `steps` runs, gradients, and ways to the receivers instead of one
    sublayer     n_l t · [2 d_model d_head (H + 2 K) + 12 T H d_head + 2 · the MLP's parameters] in each layer, for what
                 n_l senders before it make of its heads and of its MLP

and `screened` the last, eap, and its share of exact effects. The rate is that of one product of the size of an MLP's,
measured on the model's device; a run reaches somewhat less. Only where there is something to warn of is the rate
measured.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from headwater.circuits.graph import KINDS, SENDERS, Graph, Indices
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
    rows = joining_operations(plan, source, np.bincount(graph.stage[edges], minlength=graph.n_layers + 1))
    into_heads = edges[graph.receivers.kind[graph.receiver[edges]] < len(KINDS)]
    made = sum(tokens * _written_operations(plan.model, into_heads, stop) for tokens, stop in _tokens(plan, source))
    return (rows + made) * n_places


def _tokens(plan: Plan, source: Source) -> Iterator[tuple[int, int]]:
    """Yield of each pair how many tokens are run from the first that differs, and up to which."""
    for example, kept in enumerate(plan.positions):
        stop = kept[-1] + 1
        yield max(0, stop - min(source.since(example), kept[0])), stop


def joining_operations(plan: Plan, source: Source, joining: Indices) -> float:
    """Return how many operations rows take over all pairs, so many of which join at each layer (last: the logits)."""
    shape, total = plan.model.shape, 0.0
    blocks, last = list(plan.model.raw.blocks), shape.n_layers - 1
    mlp = np.array([_mlp(block) for block in blocks])
    whole, mlps = mlp + _attention(plan.model), np.zeros(len(blocks)) if shape.parallel_blocks else mlp
    keys = 2 * shape.d_model * 2 * shape.n_kv_heads * shape.d_head
    for kept, (tokens, stop) in zip(plan.positions, _tokens(plan, source), strict=True):
        a_token = 2 * whole + 4 * stop * shape.n_heads * shape.d_head
        above = np.concatenate([np.cumsum(a_token[last - 1 : 0 : -1])[::-1], [0.0]])  # of each layer but the last
        rows = tokens * (2 * mlps[:last] + above[:last] + keys) + len(kept) * a_token[last]
        total += float((joining[:last] * rows).sum() + joining[last] * len(kept) * 2 * mlps[last])
    return total


def estimate_operations(
    plan: Plan, source: Source, edges: Indices, n_places: int = 1, *, method: str, steps: int = 1
) -> float:
    """Return how many multiplications and additions the estimates of edges take, over all pairs and places.

    Args:
        plan: the pairs.
        source: what senders are exchanged for.
        edges: which are asked for.
        n_places: at how many places each.
        method: `eap`, `eap-ig`, `sublayer`, or `screened` (of which these are all but the effects).
        steps: the runs of `eap-ig`.
    """
    model, n_metrics = plan.model, len(plan.metrics)
    runs, gradients = (2 + steps, steps * n_metrics) if method == "eap-ig" else (2, n_metrics)
    own = [_mlp(block) + _attention(model) for block in model.raw.blocks]
    total = 0.0
    for prompt, (tokens, stop) in zip(plan.base, _tokens(plan, source), strict=True):
        length = len(prompt)
        a_run = length * sum(2 * count + 4 * length * model.shape.n_heads * model.shape.d_head for count in own)
        total += (runs + gradients) * a_run
        if method in ("sublayer", "screened"):
            total += n_places * tokens * _written_operations(model, edges, stop)
        if method != "sublayer":
            total += tokens * n_metrics * _attributed_operations(model, steps, n_places)
    return total


def _attributed_operations(model: HookedModel, steps: int, n_places: int) -> float:
    """Count, a token and metric, what brings gradients to receivers and from there to all edges."""
    shape = model.shape
    heads = shape.n_heads + 2 * shape.n_kv_heads
    pulled = shape.n_layers * shape.d_head * heads * steps
    return 2.0 * shape.d_model * (pulled + Graph.of(shape).n_edges * n_places)


def _written_operations(model: HookedModel, edges: Indices, length: int) -> float:
    """Count, a token, what the heads and MLPs that edges lead to write of every sender before them."""
    shape, graph = model.shape, Graph.of(model.shape)
    projected = 2 * shape.d_model * shape.d_head * (shape.n_heads + 2 * shape.n_kv_heads)
    attended = len(KINDS) * 4 * length * shape.n_heads * shape.d_head
    kind, total = graph.receivers.kind[graph.receiver[edges]], 0.0
    for layer, block in enumerate(model.raw.blocks):
        here = graph.stage[edges] == layer
        into_heads, into_mlp = (edges[here & which] for which in (kind < len(KINDS), kind == len(KINDS)))
        if len(into_heads):
            total += int(graph.reach[graph.receiver[into_heads]].max()) * (projected + attended)
        if len(into_mlp):
            total += (int(graph.sender[into_mlp].max()) + 1) * 2 * _mlp(block)
    return total


def circuit_operations(model: HookedModel, circuits: Sequence[Indices], tokens: int) -> float:
    """Return how many operations circuits take, given as edges, that run from some tokens on."""
    graph = Graph.of(model.shape)
    mlps = [_mlp(block) for block in model.raw.blocks]
    heads = [_attention(model)] * len(mlps)
    total = 0.0
    for edges in circuits:
        used = np.unique(graph.sender[edges])
        layer, kind = graph.senders.layer[used], graph.senders.kind[used]
        in_use = [np.unique(layer[kind == SENDERS.index(one)]) for one in ("head", "mlp")]
        weights = sum(float(np.take(own, at).sum()) for own, at in zip((heads, mlps), in_use, strict=True))
        mixed = len(np.unique(graph.receiver[edges])) * len(used) * model.shape.d_model
        total += 2 * (weights + mixed)
    return total * tokens


def _attention(model: HookedModel) -> int:
    """Count the weights of a layer's attention: modules of joined q, k and v hold theirs twice."""
    shape = model.shape
    return 2 * shape.d_model * shape.d_head * (shape.n_heads + shape.n_kv_heads)


def _mlp(block: nn.Module) -> int:
    """Count the parameters of a layer's MLP, and of its norms: all but those of its attention, if it has one."""

    def count(module: nn.Module) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    return count(block) - sum(count(part) for name, part in block.named_children() if name == "attn")


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
