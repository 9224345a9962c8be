"""Activation patching: replace an activation, continue the forward pass, and measure the change of a metric.

An activation of the clean or the corrupted run replaces the other run's activation at the same site (Vig et al. 2020;
Meng et al. 2022; Heimersheim and Nanda 2024).

    denoise   clean activations into the corrupted run: what suffices to restore the answer
    noise     corrupted activations into the clean run: what is needed to keep the answer

    effect            = metric of the edited run - metric of the run that was edited
    normalized_effect = effect / (metric of the other run - metric of the run that was edited)

so that 0 means no effect and 1 means the metric of the other run.

A sweep runs over axes (layers, positions, heads, keys, features), one by one or in windows; each cell covers all other
axes whole. If positions (or keys) are named by role, a step on that axis is a whole role (all its tokens edited
together) or one of its tokens. A window of size w around i covers i - w//2 ... i - w//2 + w - 1, cut at the ends; a
cumulative window covers everything up to i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar, cast

import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.families import known_family, text_config
from headwater.models.hooked import HookedModel
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Prompt, Where, is_all
from headwater.models.sites import Site, SiteName, Stage, kv_site_of, main_site, sites_named
from headwater.options import checked_count, checked_name, one_or_several, resolve_indices, shown
from headwater.patching.components import joint_template, read_nodes
from headwater.patching.edits import (
    AXES,
    AxisName,
    CellTable,
    CellTemplate,
    Edit,
    ReplacementSpec,
    refuse_too_many_cells,
)
from headwater.patching.metrics import Measures, as_metrics
from headwater.patching.plan import Plan, recorded_roles
from headwater.patching.prompts import (
    AlignedSpan,
    DirectionName,
    PromptPair,
    Prompts,
    read_prompt_pair,
    refuse_columns_as_answers,
    seen_positions,
)
from headwater.patching.replacements import Replacement, TensorLike, ValueName, build_replacement
from headwater.patching.runners import AttributionRunner
from headwater.patching.summaries import ROLES
from headwater.patching.sweep import Sweep, run_sweep

T = TypeVar("T")
SpansName: TypeAlias = Literal["together", "token by token"]
Window: TypeAlias = SupportsIndex | str | Mapping[str, SupportsIndex | str] | None
"""A size, "cumulative", or a mapping from axis to these; without a mapping it applies to the layers."""
MOST_FEATURES = 4096
"""An exact sweep of a dictionary with more features than this covers chosen features only."""


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

        pair = "The capital of France is", "The capital of Italy is"
        metric = hw.logit_difference(" Paris", " Rome")
        hw.patch(model, *pair, sites="resid_pre", metric=metric)  # each layer and position
        hw.patch(model, *pair, sites="z", layers=[9], heads=[3], values="mean", dataset=prompts, metric=metric)
        hw.patch(model, *pair, together=[{"site": "z", "layer": 3, "head": 2}], metric=metric)  # one cell
        hw.patch(model, *pair, sites="resid_pre", positions={"subject": [" France", " Italy"]}, metric=metric,
                 spans="token by token", from_layer=[0, 6])

    1. Resolve sites, axes, layers, positions and heads, and align the two prompts of each pair.
    2. Choose the values to write: the other run's activation, or `values`.
    3. List the cells: for each prompt, every step on every axis, as an `Edit`.
    4. Measure the cells, many at once in one pass through the layers, and return a row per cell.

    effect = metric of the edited run - metric of the run that was edited, in units of the metric;
    `normalized_effect` is its fraction of the gap between the two runs (Vig et al. 2020; Meng et al. 2022; Heimersheim
    and Nanda 2024).

    Args:
        model: the model; it is left unchanged.
        clean: one prompt, several, token ids, or a table of pairs with columns `clean` and `corrupted` (a data frame,
            or the path of a CSV or JSON Lines file).
        corrupted: the other prompt of each pair. Or `hw.noise(3, samples=10, positions=...)`: the clean prompt with
            noise at the embeddings of these tokens, drawn anew for each sample (causal tracing, Meng et al. 2022); each
            draw is a separate pair, in the column `sample`. Optional when `values` does not use the other run.
        sites: one or more of resid_pre, resid_mid, resid_post, attn_out, mlp_post, mlp_out, z, q, k, v, pattern, or
            features of a dictionary, as `hw.features` and `hw.load_sae` return them.
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function that takes the logits
            `row kept d_vocab` at the last position and returns a number per row.
        together: instead of `sites`, nodes to patch at once, as one cell: a list of mappings such as `{"site": "z",
            "layer": 3, "head": 2}` or `{"site": "resid_pre", "layer": 2, "position": 5}`; an attention edge is
            `{"site": "pattern", "layer": 3, "head": 2, "position": 5, "key": 2}`. Unnamed axes are covered whole.
        over: the axes to sweep over: `layer`, `position`, `head`, for `pattern` also `key`, and for a dictionary
            `feature`. Default: layer and head for a site with heads, layer and feature for a dictionary, layer and
            position otherwise. The axes that are not swept over are patched whole.
        direction: `denoise` edits the corrupted run, `noise` (the default of `hw.edges` and `hw.path_patch`) the clean
            one; neither adds random noise, which `hw.noise(...)` does.
        values: `other run`, `zero`, `mean` (over `dataset`: at each position if all prompts have the same length, else
            over all tokens except the first, as the column `values` says) or `resample` (another prompt of `dataset`);
            `hw.mean(prompts)`, `hw.resample(prompts)`; `hw.add(direction)`, `hw.scale(factor)`, `hw.noise(...)`; a
            tensor with the axes `d`, `head d_head`, `example (head) d` or `example position (head) d` of the site (one
            example may represent all; for a pattern `example head query key`); or a function `(activation, other,
            place) -> activation` of rows, `row width`: the current activation, the other run's activation (None without
            one), and which rows they are (`place.layer`, `.example`, `.position`, `.head`, ...). The function must
            treat each row independently.
        layers: the layers to patch; with a window, the layers that it is around.
        positions: the positions to patch; query positions for `pattern`: a number, a range, a set, a word, a span
            (start, stop) without its end, or a list with one of these per prompt ([[3], [5]]). A mapping names them by
            role and is resolved in each prompt separately: `{"subject": [" France", " Italy"], "end": "last"}`. The
            sweep then runs over roles, in the column `role`, and prompts may differ in length, also within a pair. See
            `headwater.models.positions`.
        heads: the heads to patch, by number (key-value heads for `k` and `v`) or by names of heads of one layer, as
            "9.2" or (9, 2).
        keys: the key positions of `pattern` to patch, specified like `positions`. Named by role, they are swept over
            too, in the column `key_role`, and the two prompts of a pair may then differ in length here as well.
        spans: whether the tokens of a role are patched `together` (one cell) or `token by token`.
        window: patch this many layers around each at once, or `"cumulative"`; a mapping gives it by axis.
        from_layer: write the other run's activation from this layer, whichever layer is edited (Ghandeharioun et al.
            2024); several layers are tried in turn, in the column `from_layer`. Default: the edited layer.
        dataset: the prompts for `mean` and `resample`; default: the prompts that are edited.
        method: `exact`, or `attribution`: effect ≈ (value - activation) · gradient, from two forwards and one backward.
        seed: of `resample`.
        batch_size: rows per call of a sublayer; by default as many as suit the device. Halved when memory runs out.
        engine: `auto` takes all cells through the layers at once; `whole runs` runs whole prompts through the model
            with its ordinary hooks: simpler, and slower. The numbers are the same.

    Raises:
        InterventionError: an edit did not take effect.
    """
    if method == "attribution" and engine != "auto":
        raise InputError(f"engine={engine!r} was given, but method='attribution' has no engine: leave it out.")
    metrics = as_metrics(metric)
    refuse_columns_as_answers(clean, metrics)
    measured = partial(run_sweep, "patch", engine=engine, seed=seed, progress=progress, out=out)
    if together is not None:
        swept: dict[str, object] = {"sites": sites, "over": over, "layers": layers, "heads": heads, "window": window}
        swept |= {"from_layer": from_layer, "positions": None if is_all(positions) else positions}
        swept |= {"keys": None if is_all(keys) else keys, "spans": None if spans == "together" else spans}
        swept |= {"method": None if method == "exact" else method}
        if given := [name for name, value in swept.items() if value is not None]:
            raise InputError(
                f"together= and {given[0]}= were both given: a node specifies its own site, layer and place, and is "
                "patched exactly."
            )
        pair = read_prompt_pair(model, clean, corrupted, direction)
        nodes = read_nodes(model, together, pair.prompts)
        of_nodes = sites_named(list(dict.fromkeys(node.site for node in nodes)), model)
        replacement = build_replacement(model, values, dataset, pair, of_nodes, seed)
        draws = range(replacement.samples or 1)
        cells = CellTable.of(
            (i, [joint_template(nodes, i, replacement, sample) for sample in draws]) for i in range(len(pair.base))
        )
        plan = Plan(model, pair, cells, metrics, replacement, batch_size)
        return measured(plan, {"together": [node.described() for node in nodes]})
    if sites is None:
        raise InputError("Nothing was requested: give sites=, or together= for nodes to patch at once.")

    chosen_sites = sites_named(sites, model)
    spec = SweepSpec(model, chosen_sites, over, layers, positions, heads, keys, window, spans, from_layer)
    pair = read_prompt_pair(model, clean, corrupted, direction, positions=positions, by_role=spec.by_role["position"])
    # The positions to edit in each prompt, and the matching positions in the other prompt of its pair.
    edited, attended = pair.spans(positions), pair.spans(keys, in_base=is_all(keys))
    matched = pair.matched(edited, chosen_sites, attended if spec.by_role["key"] else None)

    replacement = build_replacement(model, values, dataset, pair, chosen_sites, seed, positions=positions)
    if spec.from_layer is not None and not replacement.takes_other_run:
        kind = replacement.inputs.kind
        raise InputError(
            f"from_layer={shown(spec.from_layer)} was given, but values={kind!r} do not come from a layer."
        )

    steps = spec.steps(pair, edited, attended)
    n_places = [sum(math.prod(map(len, one.values())) for one in of_site) for of_site in zip(*steps, strict=True)]
    for site, of_site, n_runs in zip(chosen_sites, steps[0], n_places, strict=True):
        n_features = len(of_site.get("feature", ()))
        # Most features of a large dictionary do nothing, and each would be a run.
        if method == "exact" and n_features > MOST_FEATURES and n_features == site.width(model.shape, 1):
            raise InputError(
                f"Sweeping all {n_features:,} features of {site.name} exactly would be {n_runs:,} runs; at most "
                f"{MOST_FEATURES:,} features are swept unless you choose them by number, sites=features.only([...]), "
                "for instance the strongest by method='attribution', which takes one forward and one backward pass."
            )
    # Counted before the cells are made, because the list of cells alone may not fit in memory.
    n_cells = sum(n_places) * len(metrics) * (replacement.samples or 1) * len(spec.source_layers) * pair.draws
    refuse_too_many_cells(n_cells)
    cells = spec.cells(pair, steps, replacement, matched)

    plan = Plan(model, pair, cells, metrics, replacement, batch_size, matched=matched)
    options = spec.described(pair, steps) | {"method": method}
    options |= {"roles": recorded_roles(edited), "spans": spans} if spec.by_role["position"] else {}
    options |= {} if is_all(keys) else {"keys": recorded_roles(attended), "spans": spans}
    return measured(plan, options, runner=AttributionRunner if method == "attribution" else None)


@dataclass(frozen=True)
class AxisStep:
    """One step on an axis: its label in the table and the indices it covers (None: all)."""

    label: int | None
    covers: tuple[int, ...] | None
    role: str | None = None
    """The role of the positions in their prompt."""


Steps: TypeAlias = Mapping[str, list[AxisStep]]
"""By axis."""


class SweepSpec:
    """The requested cells: the axes that each site runs over, their windows, and the source layers of the values.

    The arguments are those of `patch`.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Site],
        over: str | Iterable[str] | None,
        layers: Iterable[int] | int | None,
        positions: Where,
        heads: Heads,
        keys: Where,
        window: Window,
        spans: SpansName,
        from_layer: Iterable[int] | int | None,
    ):
        # Materialized, because an iterator would be empty when read a second time.
        self.model, self.sites, self.from_layer = model, sites, materialize(from_layer)
        over, heads, n_layers, kv_site = materialize(over), materialize(heads), model.shape.n_layers, kv_site_of(sites)
        chosen, self.heads = layers_and_heads(materialize(layers), heads, model.shape, kv_site)
        self.layers = resolve_indices(chosen, n_layers, "layer")
        # The window around a chosen layer reaches into layers that were not chosen, but not beyond a named head's.
        self.around = resolve_indices(layers_and_heads(None, heads, model.shape, kv_site)[0], n_layers, "layer")
        names = ", ".join(site.name for site in sites)
        if heads is not None and not any(site.has_heads for site in sites):
            raise InputError(f"heads={shown(heads)} was given, but {names} has no heads.")
        if not (is_all(keys) or any(site.has_keys for site in sites)):
            raise InputError(f"keys={shown(keys)} was given, but {names} has no keys.")
        self.spans = spans
        self.by_role = {"position": isinstance(positions, Mapping), "key": isinstance(keys, Mapping)}
        """Whether positions, and keys, are named by role."""
        if spans != "together" and not any(self.by_role.values()):
            raise InputError(f"spans={spans!r} is for positions by role, as in positions={{'subject': ' Rome'}}.")
        self.source_layers: tuple[int | None, ...] = (None,)
        """The layers that values come from, in turn; None is the edited layer."""
        if self.from_layer is not None:
            self.source_layers = resolve_indices(self.from_layer, n_layers, "layer", "from_layer")
        self.axes: dict[str, tuple[str, ...]] = {}
        """By site: the axes to sweep over; roles are distinguished unless `over` omits positions."""
        self.windows: dict[str, dict[str, int | str]] = {}
        """By site: the window of each axis that has a window."""
        for site in sites:
            named = [axis for axis, is_named in self.by_role.items() if is_named and axis in site.swept_axes]
            default = (*site.default_axes, *(axis for axis in named if axis not in site.default_axes))
            self.axes[site.name] = axes_of(over, default, site.swept_axes, f"The site {site.name}")
            self.windows[site.name] = windows_of(window, self.axes[site.name])
            # Positions and keys by role have no order.
            if axis := next((axis for axis in named if axis in self.windows[site.name]), None):
                raise InputError(
                    f"A window of {axis}s needs consecutive {axis}s; roles have none. Name a span as a role."
                )

    def steps(
        self,
        pair: PromptPair,
        edited: Sequence[Mapping[str, AlignedSpan]],
        attended: Sequence[Mapping[str, AlignedSpan]],
    ) -> list[list[Steps]]:
        """Return by prompt and site the steps of each axis; `edited` and `attended` are resolved positions and keys."""
        # Steps depend only on a prompt's length and spans: prompts that share these share one object.
        cache: dict[Hashable, Steps] = {}
        by_prompt = []
        for prompt, spans, keys in zip(pair.prompts, edited, attended, strict=True):
            same = [(site.name, len(prompt), id(spans), id(keys), site.left_out(prompt.ids)) for site in self.sites]
            for site, one in zip(self.sites, same, strict=True):
                if one not in cache:
                    cache[one] = self._steps_in(prompt, site, spans, keys)
            by_prompt.append([cache[one] for one in same])
        return by_prompt

    def described(self, pair: PromptPair, steps: Sequence[Sequence[Steps]]) -> dict[str, Any]:
        """Return the swept axes and the indices that they cover, for the record of the run."""
        covered: list[tuple[int, ...] | str] = []
        for of_prompt, prompt in zip(steps, pair.prompts, strict=True):
            covers = [step.covers for step in of_prompt[0]["position"]]
            at = {position for one in covers for position in (range(len(prompt)) if one is None else one)}
            covered.append("all" if len(at) == len(prompt) else tuple(sorted(at)))
        shape, of_heads = self.model.shape, [site for site in self.sites if site.has_heads]
        return {
            "sites": [site.described for site in self.sites],
            "over": self.axes,
            "window": self.windows,
            "layers": self.layers,
            "positions": covered,
            "heads": {site.name: resolve_indices(self.heads, site.n_heads(shape), "head") for site in of_heads},
            "from_layer": self.source_layers if self.from_layer is not None else None,
        }

    def _steps_in(
        self, prompt: Prompt, site: Site, spans: Mapping[str, AlignedSpan], keys: Mapping[str, AlignedSpan]
    ) -> Steps:
        axes, windows, shape = self.axes[site.name], self.windows[site.name], self.model.shape
        has, n_heads, units = site.layers(shape), site.n_heads(shape) if site.has_heads else 0, site.units or ()
        if not (layers := [layer for layer in self.layers if layer in has]):
            raise InputError(
                f"layers={shown(list(self.layers))}, but {site.name} is in layer {', '.join(map(str, has))}."
            )
        around = [one for one in self.around if one in has and not site.lacks(self.model, one, edited=True)]
        # A dictionary may leave out tokens on which it was not trained, such as the first.
        at = seen_positions(site, prompt, sorted({p for span in spans.values() for p in span.base}))
        # By axis: the indices, and whether these are all.
        chosen: dict[str, tuple[Sequence[int], bool]] = {
            "layer": (site.among(layers, self.model, edited=True), False),
            "position": (at, len(at) == len(prompt)),
            "feature": (units, bool(units) and len(units) == site.width(shape, len(prompt))),
        }
        if site.has_heads:
            heads = resolve_indices(self.heads, n_heads, "head")
            chosen["head"] = heads, len(heads) == n_heads
        if site.has_keys:
            read = sorted({p for span in keys.values() for p in span.base})
            chosen["key"] = read, len(read) == len(prompt)
        by_axis = {}
        for axis in site.swept_axes:
            indices, is_all = chosen[axis]
            reached = around if axis == "layer" else indices
            by_axis[axis] = axis_steps(indices, axis in axes, windows.get(axis), is_all, reached)
        if self.by_role["position"]:
            seen = {role: tuple(p for p in span.base if p in at) for role, span in spans.items()}
            by_axis["position"] = role_steps({r: p for r, p in seen.items() if p}, "position" in axes, self.spans)
        if self.by_role["key"] and site.has_keys:
            by_axis["key"] = role_steps({r: span.base for r, span in keys.items()}, "key" in axes, self.spans)
        return by_axis

    def cells(
        self,
        pair: PromptPair,
        steps: Sequence[Sequence[Steps]],
        replacement: Replacement,
        matched: Sequence[Mapping[int, int] | None],
    ) -> CellTable:
        """Return the cells of every example. Prompts that share their steps share one list of templates."""
        cache: dict[Hashable, list[CellTemplate]] = {}
        rows, config = [], self.model.config
        # Hooks of the caller, and other architectures than those known and TransformerLens's own, may mix tokens before
        # the first layer.
        embeds_each = known_family(config) is not None or not hasattr(text_config(config), "model_type")
        embeds_each = embeds_each and not self.model.interventions
        for example in range(len(pair.base)):
            i = example // pair.draws
            # Tokens are known to be equal only if they are at the same positions.
            changed = replacement.changed_tokens(example) if matched[i] is None else None
            since = min(changed or (0,))
            for site, of_site in zip(self.sites, steps[i], strict=True):
                if (same := (id(of_site), since)) not in cache:
                    cache[same] = list(self._templates(site, of_site, replacement, since))
                templates = cache[same]
                if changed and embeds_each and site is main_site(Stage.BLOCK_INPUT):
                    # At all other tokens both runs enter the first layer alike: these cells need no run.
                    if (alike := (id(of_site), changed)) not in cache:
                        cache[alike] = [one.noop if one.writes_inputs_outside(changed) else one for one in templates]
                    templates = cache[alike]
                rows.append((example, templates))
        return CellTable.of(rows)

    def _templates(self, site: Site, steps: Steps, replacement: Replacement, since: int) -> Iterator[CellTemplate]:
        """Yield the templates of one site, for each source layer and each draw.

        Before the position `since` the values of a layer equal those of the edited run.
        """
        windows, draws = self.windows[site.name], range(replacement.samples or 1)
        for from_layer, sample, step in product(self.source_layers, draws, grid(steps)):
            covers = {axis: step[axis].covers if axis in step else None for axis in AXES}
            runs = layer_runs(covers["layer"] or ())
            at, of, to, units = (covers[axis] for axis in ("position", "head", "key", "feature"))
            # Before the first difference both runs are equal layer by layer; another layer's values differ everywhere.
            first = since if from_layer is None else 0
            edits = tuple(Edit(site, run, at, of, to, units, first, from_layer, sample) for run in runs)
            labels: dict[str, Any] = {"site": site.name} | labels_of(step, windows) | replacement.labels(sample)
            if from_layer is not None:
                labels["from_layer"] = from_layer
            token_at = (labels["position"],) if "position" in labels else (at or ()) if "role" in labels else None
            if "head" in labels:
                labels[site.head_column] = labels.pop("head")
            nest = None
            if "layer" in windows and len(runs) == 1:
                others = tuple((step[axis].label, step[axis].role) for axis in steps if axis != "layer")
                nest = (site.name, *others, runs[0].start, from_layer, sample)
            yield CellTemplate(labels, edits, nest, token_at)


def axes_of(
    over: str | Iterable[str] | None, default: tuple[str, ...], allowed: Sequence[str], what: str
) -> tuple[str, ...]:
    """Return the axes that a sweep runs over; refuse an unknown axis, and one that the site does not have."""
    if over is None:
        return default
    names = one_or_several(over)
    for name in names:
        if checked_name("over", name, AXES) not in allowed:
            raise InputError(f"{what} has no {name} axis; it has {', '.join(allowed)}.")
    return tuple(axis for axis in AXES if axis in names)


def windows_of(window: Window, over: Iterable[str]) -> dict[str, int | str]:
    """Return the window of each axis that has one, a size or "cumulative"; refuse windows of axes not swept over."""
    sizes = dict(window) if isinstance(window, Mapping) else {"layer": window} if window is not None else {}
    by_axis: dict[str, int | str] = {}
    for axis, size in sizes.items():
        if axis not in over:
            raise InputError(f"window={shown(window)} is for the {axis} axis, which this sweep does not run over.")
        try:
            is_named = isinstance(size, str) and size == "cumulative"
            by_axis[axis] = "cumulative" if is_named else checked_count("window", size)
        except InputError:
            raise InputError(f"window={shown(size)} is neither a number of {axis}s nor 'cumulative'.") from None
    return by_axis


def materialize(value: T) -> T:
    """Turn an iterator into a tuple, so that it can be read twice."""
    return cast("T", tuple(value)) if isinstance(value, Iterator) else value


def axis_steps(
    indices: Sequence[int], swept: bool, window: int | str | None, is_all: bool, around: Sequence[int]
) -> list[AxisStep]:
    """Return the steps on one axis, of which windows cover `around`.

    Without a sweep over it, one step for all indices (covering None if `is_all`).
    """
    if not swept:
        return [AxisStep(None, None if is_all else tuple(indices))]
    if window is None:
        return [AxisStep(i, (i,)) for i in indices]
    if window == "cumulative":
        return [AxisStep(i, tuple(j for j in around if j <= i)) for i in indices]
    size = int(window)
    return [AxisStep(i, tuple(j for j in around if i - size // 2 <= j < i - size // 2 + size)) for i in indices]


def role_steps(roles: Mapping[str, tuple[int, ...]], swept: bool, spans: str) -> list[AxisStep]:
    """Return the roles of a prompt as steps on the position axis, or as one step if that axis is not swept over."""
    if not swept:
        return [AxisStep(None, tuple(sorted({p for at in roles.values() for p in at})), " + ".join(roles))]
    if spans == "together":
        return [AxisStep(at[0] if len(at) == 1 else None, at, role) for role, at in roles.items()]
    # Token by token, a token of a role with several is labelled by the role and its number: `subject[0]`.
    return [
        AxisStep(position, (position,), f"{role}[{i}]" if len(at) > 1 else role)
        for role, at in roles.items()
        for i, position in enumerate(at)
    ]


def grid(axes: Mapping[str, list[AxisStep]]) -> list[dict[str, AxisStep]]:
    """Combine the steps on each axis; layers vary fastest, so that the cells of a nest are adjacent."""
    order = [axis for axis in ("position", "key", "head", "feature", "layer") if axis in axes]
    return [dict(zip(order, combination, strict=True)) for combination in product(*(axes[axis] for axis in order))]


def layer_runs(covered: Sequence[int]) -> list[range]:
    """Group layers into ranges without gaps."""
    runs: list[range] = []
    for layer in covered:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs


def labels_of(step: Mapping[str, AxisStep], windows: Mapping[str, int | str]) -> dict[str, Any]:
    """Return the coordinates of a cell as the table shows them."""
    labels: dict[str, Any] = {axis: step[axis].label for axis in AXES if axis in step and step[axis].label is not None}
    roles = {column: step[axis].role for column, axis in ROLES.items() if axis in step}
    labels |= {column: role for column, role in roles.items() if role is not None}
    if windows:
        sizes = [str(size) if axis == "layer" else f"{axis} {size}" for axis, size in windows.items()]
        labels["window"] = ", ".join(sizes)
    return labels
