"""Knockout sweeps: sever attention edges, continue the forward pass, and measure the change of a metric.

    mask   the severed scores are minus infinity before the softmax: the others are renormalised (Geva et al. 2023)
    zero   the severed weights are 0 after the softmax: exactly A(i, j) = 0; the other weights are unchanged

Edges go from a query (the token that reads) to a key (the token that is read). They are severed in one layer at a time,
in a window of layers around each, or in all layers up to each (`window="cumulative"`). A layer's output depends only on
the layers before it, so the cumulative sweep shares one walk: the state after layers 0..k of the fully severed run is
the state of the run severed in 0..k, for every k.

A key that a sliding-window layer cannot see anyway is not severed there: `edges` counts the edges that were severed,
and a cell that severs none has no effect to report (NaN), not a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.calls import checked_call, checked_calls
from headwater.errors import InputError
from headwater.kernels.devices import to_device
from headwater.models.hooked import HookedModel
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Prompt, Where, positions_of
from headwater.models.sites import STATES, SiteName, sites_named
from headwater.options import resolve_indices, shown
from headwater.patching.activation_patching import (
    Window,
    axes_of,
    axis_steps,
    grid,
    labels_of,
    layer_runs,
    materialize,
    windows_of,
)
from headwater.patching.edits import AxisName, CellTable, CellTemplate, Edit
from headwater.patching.metrics import Measures, as_metrics
from headwater.patching.plan import Plan
from headwater.patching.prompts import PromptPair, Prompts, read_prompts
from headwater.patching.sweep import Sweep, collect_states, run_sweep

VariantName: TypeAlias = Literal["mask", "zero"]
EDGES = {"site": "edges"}
"""The labels of edges without a name."""


@checked_calls
@dataclass(frozen=True)
class Edges:
    """The attention edges to sever: from each named query to each named key at or before it.

    `query="after"` is every position after a key that is not itself one of the keys.
    """

    query: Where
    key: Where
    heads: Heads = None
    """Query heads, by number or by names of heads of one layer, as "9.2"; None means all."""

    def matrix(
        self, prompt: Prompt, example: int = 0, n_examples: int = 1, *, ahead: bool = False
    ) -> Bool[Tensor, "query key"]:
        """Return True at each severed edge of a prompt; with non-causal attention (`ahead`) also to later keys."""
        keys = torch.zeros(len(prompt), dtype=torch.bool)
        keys[list(positions_of(self.key, prompt, example, n_examples))] = True
        queries = ~keys
        if not (isinstance(self.query, str) and self.query == "after"):
            queries = torch.zeros_like(keys)
            queries[list(positions_of(self.query, prompt, example, n_examples))] = True
        edges = queries[:, None] & keys[None]
        # The diagonal is included: a token may be kept from reading itself.
        edges = edges if ahead else edges.tril()
        if not bool(edges.any()):
            raise InputError(
                f"No edge to sever in prompt {example}: no query {self.query!r} comes at or after a key {self.key!r}."
            )
        return edges


States: TypeAlias = dict[str, Float[Tensor, "layer example d_model"]]
"""By site."""
Blocked: TypeAlias = Edges | tuple[Where, Where] | Mapping[str, Any]


@checked_call
def knockout(
    model: HookedModel,
    prompts: Prompts,
    *,
    block: Blocked | Any,
    metric: Measures,
    window: Window = None,
    variant: VariantName = "mask",
    over: AxisName | Iterable[AxisName] | None = None,
    layers: Iterable[int] | int | None = None,
    batch_size: int | None = None,
    engine: Literal["auto", "whole runs"] = "auto",
    progress: bool = True,
    out: str | Path | None = None,
) -> Sweep:
    """Sweep attention knockouts over layers (and heads).

        hw.knockout(model, "The capital of France is", block=hw.Edges("last", " France"), window=5,
                    metric=hw.log_probability(" Paris"))

    effect = metric of the severed run - metric of the unedited run, in units of the metric (Geva et al. 2023).

    Args:
        model: the model; it is left unchanged.
        prompts: one prompt, several, or token ids.
        block: the edges to sever: `hw.Edges(query, key, heads)`, the pair (query, key), or a mapping with these names;
            or a mapping from names of your choice to several of them, which are then in the column `site`. Positions
            are a number, a span (start, stop), a set, a text, "last", "first", "all", a function of the tokens, or a
            list with one of these per prompt; the query may be "after". Queries, keys, or both may be named by role, as
            in `hw.Edges({"end": "last"}, {"subject": [" France", " Italy"]})`: the edges of each role, or pair of
            roles, are severed separately, and the table's column `role` names it ("end ← subject").
        metric: see `hw.patch`. A metric that reads the residual stream with `layer=None` reads the last severed layer.
        window: sever in this many layers around each; "cumulative": in every layer up to each; None: in each alone.
        variant: `mask` (before the softmax, the rest renormalises) or `zero` (after it).
        over: `layer` (default), `head`, both, or () for everything at once.
        layers: the layers to sever edges in; with a window, the layers that it is around.
        batch_size: see `hw.patch`.
        engine: see `hw.patch`.

    Raises:
        InterventionError: a query is left without any key (`mask`), or no layer can see the edges.
    """
    layers = _layers_with_attention(layers, model)
    base, metrics = read_prompts(model, prompts), as_metrics(metric)
    axes = axes_of(materialize(over), ("layer",), ("layer", "head"), "A knockout")
    windows = windows_of(window, axes)
    named = edges_by_role(named_edges(block))
    rows, matrices = _templates(model, base, named, axes, windows, layers, variant)
    plan = Plan(model, PromptPair(base), CellTable.of(rows), metrics, batch_size=batch_size)
    where = [layers_and_heads(layers, edges.heads, model.shape) for _, edges in named]
    of_layers = [tuple(numbers) for numbers, _ in where]
    options = {
        "block": [" ".join(labels.values()) for labels, _ in named],
        # The edges themselves, not their description: different words can name the same tokens, and vice versa.
        "matrices": [torch.nonzero(matrix).tolist() for matrix in matrices],
        "heads": [resolve_indices(heads, model.shape.n_heads, "head") for _, heads in where],
        "layers": of_layers[0] if len(set(of_layers)) == 1 else of_layers,
        "window": windows,
        "variant": variant,
        "over": axes,
    }
    return run_sweep("knockout", plan, options, engine=engine, progress=progress, out=out)


def named_edges(block: Blocked | Any) -> dict[str, Edges]:
    """Read each form in which edges can be specified."""
    if isinstance(block, Edges):
        return {"edges": block}
    if isinstance(block, tuple) and len(block) == 2:
        return {"edges": Edges(*block)}
    if isinstance(block, Mapping) and {"query", "key"} <= set(block) <= {"query", "key", "heads"}:
        return {"edges": Edges(**block)}
    if isinstance(block, Mapping) and block and not {"query", "key"} & set(block):
        return {name: next(iter(named_edges(one).values())) for name, one in block.items()}
    raise InputError(
        f"block={shown(block)} does not name edges. Give hw.Edges(query=..., key=...), a pair (query, key), or a "
        "mapping from names to these."
    )


def edges_by_role(named: Mapping[str, Edges]) -> list[tuple[dict[str, str], Edges]]:
    """Split edges by role, or by pair of roles ("end ← subject": query ← key), each with its labels."""
    labelled: list[tuple[dict[str, str], Edges]] = []
    for name, edges in named.items():
        queries, keys = (
            [(role, {role: place}) for role, place in where.items()] if isinstance(where, Mapping) else [("", where)]
            for where in (edges.query, edges.key)
        )
        for (reading, query), (read, key) in product(queries, keys):
            role = " ← ".join(part for part in (reading, read) if part)
            labelled.append(({"site": name} | ({"role": role} if role else {}), Edges(query, key, edges.heads)))
    if not labelled:
        raise InputError(f"block={shown(dict(named))} has roles without positions; give at least one role.")
    return labelled


def _templates(
    model: HookedModel,
    base: Sequence[Prompt],
    named: Sequence[tuple[Mapping[str, str], Edges]],
    axes: tuple[str, ...],
    windows: Mapping[str, int | str],
    layers: Sequence[int],
    variant: str,
) -> tuple[list[tuple[int, list[CellTemplate]]], list[Bool[Tensor, "query key"]]]:
    """List the templates of each prompt and entry of `named` in turn, and the edges that they sever."""
    (pattern,), shape = sites_named("pattern", model), model.shape
    having = [layer for layer in range(shape.n_layers) if not pattern.lacks(model, layer)]
    rows: list[tuple[int, list[CellTemplate]]] = []
    matrices: list[Tensor] = []
    for (example, prompt), (labels, edges) in product(enumerate(base), named):
        matrices.append(matrix := edges.matrix(prompt, example, len(base), ahead=model.is_bidirectional))
        around, _ = layers_and_heads(having, edges.heads, shape)
        chosen, head_numbers = layers_and_heads(layers, edges.heads, shape)
        heads = resolve_indices(head_numbers, shape.n_heads, "head")
        steps = {
            "head": axis_steps(heads, "head" in axes, windows.get("head"), len(heads) == shape.n_heads, heads),
            "layer": axis_steps(chosen, "layer" in axes, windows.get("layer"), False, around),
        }
        # No state before the first query that loses a key can change: rows begin there.
        first_query, severed = int(matrix.any(-1).int().argmax()), to_device(matrix, model.device)
        cut = partial(Edit, pattern, since=first_query, severed=severed, after_softmax=variant == "zero")
        templates = []
        for step in grid(steps):
            edits = tuple(cut(run, heads=step["head"].covers) for run in layer_runs(step["layer"].covers or ()))
            # Only layers without a gap begin as the longer window does; others need separate runs.
            in_nest = "layer" in windows and len(edits) == 1
            nest = (*labels.values(), step["head"].label, edits[0].layers.start) if in_nest else None
            templates.append(CellTemplate(dict(labels) | labels_of(step, windows), edits, nest))
        rows.append((example, templates))
    return rows, matrices


def _layers_with_attention(layers: Iterable[int] | int | None, model: HookedModel) -> tuple[int, ...]:
    """Return the requested layers that have attention."""
    (pattern,) = sites_named("pattern", model)
    return pattern.among(resolve_indices(layers, model.shape.n_layers, "layer"), model)


@checked_call
def knocked_out_states(
    model: HookedModel,
    prompts: Prompts,
    *,
    block: Blocked,
    sites: SiteName | Sequence[SiteName] = "mlp_out",
    at: Where = "last",
    variant: VariantName = "mask",
    layers: Iterable[int] | int | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> tuple[States, States]:
    """Return the residual-stream states of every layer, before and after a cumulative knockout, from one pass.

    The state of layer k of the fully severed run is that of the run severed in layers 0..k only.

    Args:
        model: the model; it is left unchanged.
        prompts: as for `knockout`.
        block: one set of edges.
        sites: sites with the residual stream's width, such as resid_pre or mlp_out.
        at: one position per prompt.
        variant: `mask` or `zero`.
        layers: sever in these layers only; default all.
        batch_size: see `hw.patch`.

    Returns:
        By site, the states before and after, `layer example d_model` in float32 on the CPU.
    """
    shape, names = model.shape, [site.name for site in sites_named(sites, model)]
    layers = _layers_with_attention(layers, model)
    plan = _states_plan(model, prompts, block, names, range(shape.n_layers), at, variant, layers, batch_size)
    n = len(plan.pair.base)
    before, after = ({name: torch.empty(shape.n_layers, n, shape.d_model) for name in names} for _ in range(2))
    for examples, measured in collect_states(plan, progress):
        for name, (kept, states) in product(names, ((before, measured.before), (after, measured.after))):
            by_layer = [states[name, layer][:, 0].float() for layer in range(shape.n_layers)]
            kept[name][:, examples.start : examples.stop] = torch.stack([one.to(by_layer[0]) for one in by_layer]).cpu()
    return before, after


def windowed_states(
    model: HookedModel,
    prompts: Prompts,
    *,
    block: Blocked,
    window: int,
    read: Sequence[int],
    site: str = "mlp_out",
    at: Where = "last",
    variant: VariantName = "mask",
    batch_size: int | None = None,
) -> Float[Tensor, "window read example d_model"]:
    """Return states of the layers `read` after a knockout in a window around each layer, from one walk for all windows.

    The arguments are those of `knocked_out_states`; `window` is the number of layers to sever in.
    """
    n_layers = model.shape.n_layers
    plan = _states_plan(model, prompts, block, [site], read, at, variant, range(n_layers), batch_size, window)
    cells, n = plan.cells, len(plan.pair.base)
    above = sorted(set(range(n_layers)) - {template.labels["layer"] for _, template in cells})
    states = torch.empty(n_layers, len(read), n, model.shape.d_model)
    for done, measured in collect_states(plan, progress=False):
        part = cells.part(done)
        centers, examples = [template.labels["layer"] for _, template in part], part.example.tolist()
        for place, read_layer in enumerate(read):
            states[centers, place, examples] = measured.after[site, read_layer][:, 0].float().cpu()
            for layer in above:
                states[layer, place, examples] = measured.before[site, read_layer][:, 0].float().cpu()
    return states


def _states_plan(
    model: HookedModel,
    prompts: Prompts,
    block: Blocked,
    sites: Sequence[str],
    read: Sequence[int],
    at: Where,
    variant: VariantName,
    layers: Sequence[int],
    batch_size: int | None,
    window: int | None = None,
) -> Plan:
    """Return the plan that reads states of some layers after a knockout in all layers, or in windows around each."""
    if other := [site for site in sites if site not in STATES]:
        raise InputError(f"{other[0]} is not a state of the residual stream. Valid: {', '.join(STATES)}.")
    # Called only for its error: every layer must have these sites and attention.
    for site, layer in product(sites_named(["pattern", *sites], model), range(model.shape.n_layers)):
        site.among([layer], model)
    base, named = read_prompts(model, prompts), named_edges(block)
    if len(named) > 1:
        raise InputError(f"block= names {len(named)} sets of edges ({', '.join(named)}): give one of them.")
    axes, windows = ((), {}) if window is None else (("layer",), {"layer": window})
    (edges,) = named.values()
    rows, _ = _templates(model, base, [(EDGES, edges)], axes, windows, layers, variant)
    # A knockout that begins after every layer that is read changes nothing there.
    rows = [(i, [one for one in some if min(edit.layers.start for edit in one.edits) <= max(read)]) for i, some in rows]
    readings = tuple(product(sites, read))
    plan = Plan(model, PromptPair(base), CellTable.of(rows), (), batch_size=batch_size, states=readings, states_at=at)
    if several := [i for i, positions in enumerate(plan.positions) if len(positions) > 1]:
        raise InputError(
            f"at={shown(at)} names {len(plan.positions[several[0]])} positions of prompt {several[0]}: states are "
            "returned for one, such as at=-1 or hw.last_token_of(' Rome')."
        )
    return plan
