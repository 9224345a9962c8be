"""Activation patching: replace an activation, run on, see what becomes of a metric.

Of a clean and a corrupted run (Vig et al. 2020; Meng et al. 2022; Heimersheim and Nanda 2024), one run's activation at
a site is written into the other.

    denoise   clean activations into the corrupted run: what suffices to bring the answer back
    noise     corrupted activations into the clean run: what is needed to keep it

    effect            = metric of the edited run - metric of the run that was edited
    normalized_effect = effect / (metric of the other run - metric of the run that was edited)

so that 0 is no effect and 1 is all the way to the other run. The corrupted run is that of another prompt, or that of
the clean one with noise at its embeddings (causal tracing). Values may also be zero, a mean over prompts (ablation), or
another prompt's (resampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Prompt, Where, is_all
from headwater.models.shape import ModelShape
from headwater.models.sites import Site, SiteName, kv_site_of, sites_named
from headwater.options import checked_name, checked_seed, resolve_indices, shown
from headwater.patching.ablation import patch_together
from headwater.patching.attribution import AttributionRunner
from headwater.patching.axes import AxisName, AxisStep, SpansName, SweepSpec, Window, covered, materialize, templates_of
from headwater.patching.edits import CellTable, CellTemplate, refuse_too_many_cells
from headwater.patching.measure import measure
from headwater.patching.metrics import Measures, as_metrics
from headwater.patching.plan import check_call, engine_option, metric_options, plan_of, recorded_roles
from headwater.patching.prompt_pair import DIRECTIONS, DirectionName, read_prompt_pair
from headwater.patching.prompts import AlignedSpan, Prompts
from headwater.patching.replacements import ReplacementSpec, TensorLike, ValueName, described_replacement
from headwater.patching.sweep import Sweep, sweep_of
from headwater.patching.walk_runner import ENGINES
from headwater.runs.analysis import Run, run_or_resume

METHODS = ("exact", "attribution")
MOST_FEATURES = 4096
"""A dictionary of more features is swept exactly over those that were chosen only."""


@checked_call
def patch(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | ReplacementSpec | None = None,
    *,
    sites: SiteName | Site | Iterable[SiteName | Site] | None = None,
    metric: Measures,
    together: Any = None,
    over: AxisName | Iterable[AxisName] | None = None,
    direction: DirectionName = "denoise",
    values: ValueName | ReplacementSpec | TensorLike | Callable[..., Any] = "other run",
    layers: Iterable[int] | int | None = None,
    positions: Where = "all",
    heads: Heads = None,
    keys: Where = "all",
    spans: SpansName = "together",
    window: Window = None,
    from_layer: Iterable[int] | int | None = None,
    dataset: Prompts | None = None,
    method: Literal["exact", "attribution"] = "exact",
    seed: int = 0,
    batch_size: int | None = None,
    engine: Literal["auto", "whole runs"] = "auto",
    progress: bool = True,
    out: str | Path | None = None,
) -> Sweep:
    """Sweep patches over layers, positions and heads.

    effect = metric of the edited run - metric of the run that was edited, in units of the metric;
    `normalized_effect` is its share of the gap between the two runs (Vig et al. 2020; Meng et al. 2022; Heimersheim
    and Nanda 2024).

    Args:
        model: the model; it is left as it was.
        clean: one prompt, several, token ids, or a table of pairs with columns `clean` and `corrupted` (a data frame,
            or the path of a CSV or JSON Lines file).
        corrupted: the other prompt of each pair. Or `hw.noise(3, samples=10, positions=...)`: the clean prompt with
            noise at the embeddings of these tokens, drawn anew for each sample (causal tracing, Meng et al. 2022);
            every draw is a pair of its own, in the column `sample`. May be absent when values come from elsewhere.
        sites: one or more of resid_pre, resid_mid, resid_post, attn_out, mlp_post, mlp_out, z, q, k, v, pattern, or
            features of a dictionary, as `hw.features` and `hw.load_sae` give them.
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function of the logits
            `row kept d_vocab` at the last position that gives a number per row.
        together: in place of `sites`, nodes that are patched at once, as one cell: a list of mappings such as `{"site":
            "z", "layer": 3, "head": 2}` or `{"site": "resid_pre", "layer": 2, "position": 5}`; an attention edge is
            `{"site": "pattern", "layer": 3, "head": 2, "position": 5, "key": 2}`. What is not named is covered whole.
        over: the axes to run over, of `layer`, `position`, `head`, for `pattern` `key`, and for a dictionary `feature`.
            Default: layer and head where a site has heads, layer and feature of a dictionary, layer and position
            otherwise. What is not run over is patched all at once.
        direction: `denoise` edits the corrupted run, `noise` the clean one.
        values: `other run`, `zero`, `mean` (over `dataset`: at each position where all prompts are of one length, else
            over all tokens but the first, as the column `values` says) or `resample` (another prompt of `dataset`);
            `hw.mean(prompts)`, `hw.resample(prompts)`; `hw.add(direction)`, `hw.scale(factor)`, `hw.noise(...)`; a
            tensor with the axes `d`, `head d_head`, `example (head) d` or `example position (head) d` of the site (one
            example may stand for all; of a pattern `example head query key`); or a function `(activation, other,
            place) -> activation` of rows, `row width`: what stands there, what the other run has there (None without
            one) and which rows they are (`place.layer`, `.example`, `.position`, `.head`, ...). It must treat each row
            by itself.
        layers: which take part.
        positions: which take part; query positions for `pattern`. A mapping names them by role, each prompt resolved by
            itself: `{"subject": [" France", " Italy"], "end": "last"}`. The sweep runs over roles, which stand in a
            column `role`, and prompts may be of any lengths, also the two of a pair. See `headwater.models.positions`.
        heads: which take part, by number (key-value heads for `k` and `v`) or by names of heads of one layer, as "9.2"
            or (9, 2).
        keys: of `pattern`, which attended tokens take part, named as positions are. By role they run too and stand in a
            column `key_role`; then the two prompts of a pair may be of any lengths here as well.
        spans: whether the tokens of a role are patched `together` (one cell) or `token by token`.
        window: patch this many layers around each at once, or `"cumulative"`; a mapping gives it by axis.
        from_layer: write what the other run has at this layer, whatever layer is written (Ghandeharioun et al. 2024);
            several are tried in turn, in the column `from_layer`. Default: the layer that is written.
        dataset: the prompts of `mean` and `resample`; default: the prompts that are edited.
        method: `exact`, or `attribution`: effect ≈ (value - activation) · gradient, from two forwards and one backward.
        seed: of `resample`.
        batch_size: rows given to a sublayer at once; by default as many as suit the device. Halved when memory runs
            out.
        engine: `auto` walks down the layers with all cells at once; `whole runs` runs whole prompts through the model
            as its hooks see it: plain, and slower. The numbers are the same.
        progress: show a progress bar.
        out: a folder: finished cells are written as they come, an interrupted sweep goes on where it stopped.

    Raises:
        InputError: an option or prompt cannot be used; pairs that do not align are shown side by side.
        InterventionError: an edit did not take effect.
    """
    checked_name("direction", direction, DIRECTIONS)
    checked_name("method", method, METHODS)
    runner = ENGINES[checked_name("engine", engine, list(ENGINES))]
    if method == "attribution":
        if engine != "auto":
            raise InputError(f"engine={engine!r} was given, but method='attribution' measures no cell: leave it out.")
        runner = AttributionRunner
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    if together is not None:
        where: dict[str, object] = {"sites": sites, "over": over, "layers": layers, "heads": heads, "window": window}
        where |= {"from_layer": from_layer, "positions": None if is_all(positions) else positions}
        _refuse_beside_together(where | {"keys": None if is_all(keys) else keys}, method)
        return patch_together(
            model, clean, corrupted, together, metrics=as_metrics(metric), direction=direction, values=values,
            dataset=dataset, seed=seed, batch_size=batch_size, engine=engine, progress=progress, out=out,
        )  # fmt: skip
    if sites is None:
        raise InputError("Nothing was asked for: name sites=, or nodes that are patched at once as together=.")
    over, layers, heads, from_layer = (
        materialize(over),
        materialize(layers),
        materialize(heads),
        materialize(from_layer),
    )
    named, metrics = sites_named(sites, model), as_metrics(metric)
    layers_asked, heads_asked = layers_and_heads(layers, heads, model.shape, kv_site_of(named))
    ask = SweepSpec(over, layers_asked, positions, heads_asked, window, spans, from_layer, keys)
    sides = read_prompt_pair(model, clean, corrupted, ask, direction)
    if heads is not None and not any(site.has_heads for site in named):
        raise InputError(f"heads={shown(heads)} was given, but {', '.join(site.name for site in named)} has no heads.")
    if not (is_all(keys) or any(site.has_keys for site in named)):
        raise InputError(f"keys={shown(keys)} was given, but {', '.join(site.name for site in named)} has no keys.")
    spots, attended = sides.spots(ask), sides.keys(ask)
    source = sides.source(model, values, dataset, named, seed, sides.roles(ask, spots))
    if from_layer is not None and not source.takes_other_run:
        kind = source.given.kind
        raise InputError(f"from_layer={shown(from_layer)} was given, but values={kind!r} come from no layer.")
    base, draws = sides.prompts, sides.draws
    matched = sides.matched(spots, named, attended if ask.keys_by_role else None)
    planned = _planned(ask, model, named, base, spots, attended)
    if method == "exact":
        _refuse_whole_dictionaries([(site, steps) for _, site, steps in planned], model.shape)
    n_each = len(metrics) * (source.samples or 1) * len(ask.sources(model)) * draws
    refuse_too_many_cells(sum(math.prod(map(len, steps.values())) for _, _, steps in planned) * n_each)
    sizes, sources = {site.name: ask.sizes(site) for site in named}, ask.sources(model)
    made: dict[tuple[int, int], list[CellTemplate]] = {}
    rows: list[tuple[int, Sequence[CellTemplate]]] = []
    for i, own in groupby(planned, key=lambda one: one[0]):
        in_line = matched[i] is None
        for example, (_, site, steps) in product(range(i * draws, (i + 1) * draws), list(own)):
            first = source.since(example) if in_line else 0
            if (kinds := made.get((id(steps), first))) is None:
                kinds = made[id(steps), first] = list(
                    templates_of(site, steps, sizes[site.name], source, first, sources)
                )
            rows.append((example, kinds))
    cells = CellTable.of(rows)
    plan = plan_of(model, sides, cells, metrics, source, matched=matched, batch_size=batch_size)
    options = {
        "sites": [site.described for site in named],
        "over": {site.name: ask.axes(site) for site in named},
        "window": {site.name: ask.sizes(site) for site in named},
        "layers": resolve_indices(layers_asked, model.shape.n_layers, "layer"),
        "positions": _covered(planned[:: len(named)], base),
        "heads": {s.name: resolve_indices(heads_asked, s.n_heads(model.shape), "head") for s in named if s.has_heads},
        "direction": direction,
        "from_layer": ask.sources(model) if from_layer is not None else None,
        "values": described_replacement(source),
        "mean_over": source.mean_over,
        "method": method,
        **sides.described(source.given.dataset),
        "metrics": metric_options(plan),
    }
    options |= {"roles": recorded_roles(spots), "spans": spans} if ask.by_role else {}
    options |= engine_option(engine)
    options |= {} if is_all(keys) else {"keys": recorded_roles(attended), "spans": spans}

    def work(run: Run) -> Sweep:
        return sweep_of(plan, measure(plan, run, runner), run)

    return run_or_resume(Sweep, "patch", model, options, work, out=out, seed=seed, progress=progress)


def _refuse_beside_together(where: Mapping[str, object], method: str) -> None:
    """Refuse what says elsewhere where nodes are that say it themselves.

    Raises:
        InputError: one of these was given.
    """
    if given := [name for name, value in where.items() if value is not None]:
        raise InputError(f"together= and {given[0]}= were both given: a node says its site, layer and place itself.")
    if method != METHODS[0]:
        raise InputError(f"together= is measured by method='exact' alone, not {method!r}: estimates of nodes add up.")


def _refuse_whole_dictionaries(
    planned: Sequence[tuple[Site, Mapping[str, Sequence[object]]]], shape: ModelShape
) -> None:
    """Refuse to sweep exactly over all features of a large dictionary: a run for each, of which most do nothing.

    Args:
        planned: for each example and site, the places on each axis.
        shape: of the model.

    Raises:
        InputError: with how many runs these would be, and of how many layers.
    """
    cells: dict[Site, int] = {}
    for site, steps in planned:
        if site.has_units and len(steps["feature"]) == site.width(shape, 1):
            cells[site] = cells.get(site, 0) + math.prod(map(len, steps.values()))
    for site, n_cells in cells.items():
        if (count := site.width(shape, 1)) > MOST_FEATURES:
            above = shape.n_layers - min(site.layers(shape))
            raise InputError(
                f"Sweeping all {count:,} features of {site.name} exactly would be {n_cells:,} runs of up to {above} "
                f"layers; at most {MOST_FEATURES:,} features are swept unless they are chosen. Choose them by number, "
                "sites=features.only([...]), for instance the strongest of method='attribution', which takes one "
                "forward and one backward for all."
            )


def _covered(
    planned: Sequence[tuple[int, Site, dict[str, list[AxisStep]]]], base: Sequence[Prompt]
) -> list[tuple[int, ...] | str]:
    """Return by example the positions that the steps of one site cover."""
    found = {(id(listed), len(base[i])): (listed, len(base[i])) for i, _, listed in planned}
    alike = {one: covered(listed["position"], length) for one, (listed, length) in found.items()}
    return [alike[id(listed), len(base[i])] for i, _, listed in planned]


def _planned(
    ask: SweepSpec,
    model: HookedModel,
    sites: Sequence[Site],
    base: Sequence[Prompt],
    spots: Sequence[Mapping[str, AlignedSpan]],
    keys: Sequence[Mapping[str, AlignedSpan]],
) -> list[tuple[int, Site, dict[str, list[AxisStep]]]]:
    """List by example and site the places on each axis; those of examples that share their spots are one object."""
    listed: dict[Hashable, dict[str, list[AxisStep]]] = {}
    planned = []
    for (i, prompt), site in product(enumerate(base), sites):
        same = (site.name, len(prompt), id(spots[i]), id(keys[i]), site.left_out(prompt.ids))
        if same not in listed:
            listed[same] = ask.steps(model, site, prompt, spots[i], keys[i])
        planned.append((i, site, listed[same]))
    return planned
