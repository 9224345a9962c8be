"""Activation patching: replace an activation, run on, see what becomes of a metric.

Of a clean and a corrupted run (Vig et al. 2020; Meng et al. 2022; Heimersheim and Nanda 2024), one run's activation at
a site is written into the other.

    denoise   clean activations into the corrupted run: what suffices to bring the answer back
    noise     corrupted activations into the clean run: what is needed to keep it

    effect            = metric of the edited run - metric of the run that was edited
    normalized_effect = effect / (metric of the other run - metric of the run that was edited)

so that 0 means no effect and 1 is all the way to the other run. The corrupted run is that of another prompt, or that of
the clean one with noise at its embeddings (causal tracing). Values may also be zero, a mean over prompts (ablation), or
another prompt's (resampling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.families import ModelShape
from headwater.models.hooked import HookedModel
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Where, is_all
from headwater.models.sites import Site, SiteName, kv_site_of, sites_named
from headwater.options import checked_flag, checked_name, checked_seed, resolve_indices, shown
from headwater.patching.attribution import AttributionRunner
from headwater.patching.axes import (
    AxisName,
    AxisStep,
    SpansName,
    SweepSpec,
    Window,
    covered,
    materialize,
    seen_positions,
)
from headwater.patching.components import ActivationNode, read_nodes, read_sets, set_name
from headwater.patching.edits import CellTable, CellTemplate, ReplacementSpec, refuse_too_many_cells
from headwater.patching.measure import ENGINES, run_sweep
from headwater.patching.metrics import Measures, Metric, as_metrics
from headwater.patching.plan import Plan, check_call, recorded_roles
from headwater.patching.prompts import DIRECTIONS, AlignedSpan, DirectionName, PromptPair, Prompts, read_prompt_pair
from headwater.patching.replacements import Replacement, TensorLike, ValueName, build_replacement
from headwater.patching.sweep import Sweep

METHODS = ("exact", "attribution")
MOST_FEATURES = 4096
"""A dictionary of more features is swept exactly over those that were chosen only."""
Steps: TypeAlias = Mapping[str, list[AxisStep]]
"""By axis."""


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
        direction: `denoise` edits the corrupted run, `noise` (the default of `hw.edges` and `hw.path_patch`) the clean
            one.
        values: `other run`, `zero`, `mean` (over `dataset`: at each position where all prompts are of one length, else
            over all tokens but the first, as the column `values` says) or `resample` (another prompt of `dataset`);
            `hw.mean(prompts)`, `hw.resample(prompts)`; `hw.add(direction)`, `hw.scale(factor)`, `hw.noise(...)`; a
            tensor with the axes `d`, `head d_head`, `example (head) d` or `example position (head) d` of the site (one
            example may represent all; of a pattern `example head query key`); or a function `(activation, other,
            place) -> activation` of rows, `row width`: what is there, what the other run has there (None without
            one) and which rows they are (`place.layer`, `.example`, `.position`, `.head`, ...). It must treat each row
            by itself.
        layers: which take part.
        positions: which take part; query positions for `pattern`. A mapping names them by role, each prompt resolved by
            itself: `{"subject": [" France", " Italy"], "end": "last"}`. The sweep runs over roles, which are in a
            column `role`, and prompts may be of any lengths, also the two of a pair. See `headwater.models.positions`.
        heads: which take part, by number (key-value heads for `k` and `v`) or by names of heads of one layer, as "9.2"
            or (9, 2).
        keys: of `pattern`, which attended tokens take part, named as positions are. By role they run too and are in a
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
    checked_name("engine", engine, list(ENGINES))
    if method == "attribution" and engine != "auto":
        raise InputError(f"engine={engine!r} was given, but method='attribution' measures no cell: leave it out.")
    batch_size, seed, metrics = check_call(model, batch_size), checked_seed(seed), as_metrics(metric)
    if together is not None:
        where: dict[str, object] = {"sites": sites, "over": over, "layers": layers, "heads": heads, "window": window}
        where |= {"from_layer": from_layer, "positions": None if is_all(positions) else positions}
        _refuse_beside_together(where | {"keys": None if is_all(keys) else keys}, method)
        return patch_together(
            model, clean, corrupted, together, metrics=metrics, direction=direction, values=values,
            dataset=dataset, seed=seed, batch_size=batch_size, engine=engine, progress=progress, out=out,
        )  # fmt: skip
    if sites is None:
        raise InputError("Nothing was requested: name sites=, or nodes that are patched at once as together=.")

    # An iterator would be empty at the second look.
    over, from_layer, chosen_sites = materialize(over), materialize(from_layer), sites_named(sites, model)
    layers, head_numbers = layers_and_heads(
        materialize(layers), materialize(heads), model.shape, kv_site_of(chosen_sites)
    )
    spec = SweepSpec(over, layers, positions, head_numbers, window, spans, from_layer, keys)
    by_role = None if over == () else spec.by_role
    pair = read_prompt_pair(model, clean, corrupted, direction, positions=positions, by_role=by_role)
    _refuse_unused(chosen_sites, heads, keys)

    # What is edited of each prompt, and what that is in the other prompt of its pair.
    edited, attended = pair.spans(positions), pair.spans(keys, in_base=is_all(keys))
    matched = pair.matched(edited, chosen_sites, attended if spec.keys_by_role else None)
    replacement = build_replacement(model, values, dataset, pair, chosen_sites, seed, positions=positions)
    if from_layer is not None and not replacement.takes_other_run:
        kind = replacement.inputs.kind
        raise InputError(f"from_layer={shown(from_layer)} was given, but values={kind!r} come from no layer.")

    steps = _steps(spec, model, chosen_sites, pair, edited, attended)
    if method == "exact":
        _refuse_whole_dictionaries(chosen_sites, steps, model.shape)
    # Counted before the cells are made: their list alone can be more than the memory.
    n_places = sum(math.prod(map(len, one.values())) for of_prompt in steps for one in of_prompt)
    n_each = len(metrics) * (replacement.samples or 1) * len(spec.source_layers(model)) * pair.draws
    refuse_too_many_cells(n_places * n_each)
    cells = _cells(spec, model, chosen_sites, pair, steps, replacement, matched)
    plan = Plan(model, pair, cells, metrics, replacement, batch_size, matched=matched)

    at = [covered(of_prompt[0]["position"], len(prompt)) for of_prompt, prompt in zip(steps, pair.prompts, strict=True)]
    of_heads = [site for site in chosen_sites if site.has_heads]
    options: dict[str, Any] = {
        "sites": [site.described for site in chosen_sites],
        "over": {site.name: spec.axes(site) for site in chosen_sites},
        "window": {site.name: spec.windows(site) for site in chosen_sites},
        "layers": resolve_indices(layers, model.shape.n_layers, "layer"),
        "positions": at,
        "heads": {site.name: resolve_indices(head_numbers, site.n_heads(model.shape), "head") for site in of_heads},
        "from_layer": spec.source_layers(model) if from_layer is not None else None,
        "method": method,
    }
    options |= {"roles": recorded_roles(edited), "spans": spans} if spec.by_role else {}
    options |= {} if is_all(keys) else {"keys": recorded_roles(attended), "spans": spans}
    runner = AttributionRunner if method == "attribution" else None  # None: that of the engine
    return run_sweep("patch", plan, options, runner=runner, engine=engine, seed=seed, progress=progress, out=out)


def _refuse_beside_together(where: Mapping[str, object], method: str) -> None:
    """Refuse options that say where to patch, beside nodes that say it themselves."""
    if given := [name for name, value in where.items() if value is not None]:
        raise InputError(f"together= and {given[0]}= were both given: a node says its site, layer and place itself.")
    if method != METHODS[0]:
        raise InputError(f"together= is measured by method='exact' alone, not {method!r}: estimates of nodes add up.")


def _refuse_unused(sites: Sequence[Site], heads: Heads, keys: Where) -> None:
    """Refuse heads or keys where no site has any."""
    names = ", ".join(site.name for site in sites)
    if heads is not None and not any(site.has_heads for site in sites):
        raise InputError(f"heads={shown(heads)} was given, but {names} has no heads.")
    if not (is_all(keys) or any(site.has_keys for site in sites)):
        raise InputError(f"keys={shown(keys)} was given, but {names} has no keys.")


def _refuse_whole_dictionaries(sites: Sequence[Site], steps: Sequence[Sequence[Steps]], shape: ModelShape) -> None:
    """Refuse to sweep exactly over all features of a large dictionary: a run for each, of which most do nothing."""
    for number, site in enumerate(sites):
        count = site.width(shape, 1) if site.has_units else 0
        if count <= MOST_FEATURES or len(steps[0][number]["feature"]) != count:
            continue
        n_cells = sum(math.prod(map(len, of_prompt[number].values())) for of_prompt in steps)
        # A run begins at the dictionary's layer: what is below it is recorded.
        above = shape.n_layers - min(site.layers(shape))
        raise InputError(
            f"Sweeping all {count:,} features of {site.name} exactly would be {n_cells:,} runs of up to {above} "
            f"layers; at most {MOST_FEATURES:,} features are swept unless they are chosen. Choose them by number, "
            "sites=features.only([...]), for instance the strongest of method='attribution', which takes one "
            "forward and one backward for all."
        )


def _steps(
    spec: SweepSpec,
    model: HookedModel,
    sites: Sequence[Site],
    pair: PromptPair,
    edited: Sequence[Mapping[str, AlignedSpan]],
    attended: Sequence[Mapping[str, AlignedSpan]],
) -> list[list[Steps]]:
    """Return by prompt and site the steps of each axis.

    Steps depend on a prompt through its length and spans alone: prompts that share these share one object.
    """
    known: dict[Hashable, Steps] = {}

    def steps(i: int, site: Site) -> Steps:
        prompt = pair.prompts[i]
        same = (site.name, len(prompt), id(edited[i]), id(attended[i]), site.left_out(prompt.ids))
        if same not in known:
            known[same] = spec.steps(model, site, prompt, edited[i], attended[i])
        return known[same]

    return [[steps(i, site) for site in sites] for i in range(len(pair.prompts))]


def _cells(
    spec: SweepSpec,
    model: HookedModel,
    sites: Sequence[Site],
    pair: PromptPair,
    steps: Sequence[Sequence[Steps]],
    replacement: Replacement,
    matched: Sequence[Mapping[int, int] | None],
) -> CellTable:
    """Return the cells of every example. Prompts that share their steps share one list of templates."""
    known: dict[tuple[int, int], list[CellTemplate]] = {}

    def templates(example: int, site: Site, of_site: Steps) -> list[CellTemplate]:
        # Tokens before the first difference are known to be equal only where they are at the same positions.
        since = replacement.since(example) if matched[example // pair.draws] is None else 0
        if (id(of_site), since) not in known:
            known[id(of_site), since] = list(spec.templates(site, of_site, replacement, since, model))
        return known[id(of_site), since]

    return CellTable.of(
        (example, templates(example, site, of_site))
        for i, of_prompt in enumerate(steps)
        for example, (site, of_site) in product(
            range(i * pair.draws, (i + 1) * pair.draws), zip(sites, of_prompt, strict=True)
        )
    )


# Edits of several components at once, as one cell: ablation of sets, and nodes patched together.
#
# Effects do not add up: what two heads do together is measured together. Knockout of whole circuits (Wang et al. 2023;
# Chan et al. 2022, resampling; Li and Janson 2024, on which values to take): for each set and prompt, one run in which
# every component of the set is replaced at once, in all layers where it has some. `complement` replaces everything else
# instead: what is left is what the set does alone.
#
# effect = metric of the edited run - metric of the run as it is
#
# All sets go down the layers together, in the walk of `headwater.patching.walk`; what a run computes after the first
# replaced component is computed anew from there, so that later components of the set are replaced in the run as it then
# is.


@checked_call
def ablate(
    model: HookedModel,
    prompts: Prompts,
    corrupted: Prompts | ReplacementSpec | None = None,
    *,
    metric: Measures,
    heads: object = None,
    mlps: object = None,
    neurons: object = None,
    features: object = None,
    sets: Mapping[str, Any] | Any = None,
    complement: bool = False,
    values: ValueName | ReplacementSpec | TensorLike | Callable[..., Any] = "zero",
    dataset: Prompts | None = None,
    positions: Where = "all",
    seed: int = 0,
    batch_size: int | None = None,
    engine: Literal["auto", "whole runs"] = "auto",
    progress: bool = True,
    out: str | Path | None = None,
) -> Sweep:
    """Ablate sets of components, each set as one.

    effect = metric of the ablated run - metric of the plain run, in units of the metric.

    Args:
        model: the model; it is left as it was.
        prompts: one prompt, several, or token ids: those whose runs are ablated.
        corrupted: the other prompt of each pair, for values from the other run; or noise at its embeddings, see
            `hw.patch`.
        metric: see `hw.patch`.
        heads: of one set, the attention heads, as pairs (layer, head). Query heads are counted, also where they share
            keys and values.
        mlps: its MLPs, as layers.
        neurons: its neurons, as pairs (layer, neuron): what the output projection of the MLP reads.
        features: its features, as `hw.features(...)` or `hw.load_sae(...)` with `.only([...])`, one or several.
        sets: several sets in place of one: a mapping from names to sets, or a list of sets. A set is a mapping with
            `heads`, `mlps`, `neurons`, `features`, or a list of heads.
        complement: replace everything but the set, of the kinds that are named: with `heads` and `mlps` (which may be
            an empty list) all other heads and all other MLPs.
        values: what replaces them: see `hw.patch`.
        dataset: the prompts of `mean` and `resample`; default: the prompts themselves.
        positions: where; with roles (see `hw.patch`) each set is ablated at each role by itself.
        seed: of `resample`.
        batch_size: see `hw.patch`.
        engine: see `hw.patch`.
        progress: show a progress bar.
        out: a folder that keeps finished cells, see `hw.patch`.

    Returns:
        A sweep whose table has a row per example, set and metric; `set` is the set's name, or what it holds.

    Raises:
        InputError: there is no such component, one is named twice, a set is empty, or another option cannot be used.
    """
    checked_name("engine", engine, list(ENGINES))
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    complement, metrics = checked_flag("complement", complement), as_metrics(metric)
    # What is ablated is the clean run.
    pair = read_prompt_pair(model, prompts, corrupted, "noise", positions=positions)
    one = {"heads": heads, "mlps": mlps, "neurons": neurons, "features": features}
    chosen = read_sets(model, one, sets, complement)
    sites = tuple(dict.fromkeys(part.site for component_set in chosen for part in component_set.parts))
    edited = pair.spans(positions)
    replacement = build_replacement(model, values, dataset, pair, sites, seed, positions=positions)
    matched = pair.matched(edited, sites)
    refuse_too_many_cells(sum(map(len, edited)) * len(chosen) * len(metrics) * (replacement.samples or 1) * pair.draws)

    site_label = {"site": "complement" if complement else "ablation"}
    values_label = {"values": replacement.label} if replacement.label else {}
    by_role = isinstance(positions, Mapping)
    rows = []
    for example, prompt in enumerate(pair.base):
        i = example // pair.draws
        # Tokens before the first difference are equal only where both prompts have them at the same positions.
        since = replacement.since(example) if matched[i] is None else 0
        for role, span in edited[i].items():
            seen = {site.name: seen_positions(site, prompt, span.base) for site in sites}
            at = {name: None if len(found) == len(prompt) else found for name, found in seen.items()}
            for component_set, sample in product(chosen, range(replacement.samples or 1)):
                labels: dict[str, Any] = site_label | values_label | ({"role": role} if by_role else {})
                labels |= {"set": component_set.name}
                labels |= {} if replacement.samples is None else {"sample": sample}
                edits = [part.edit(at[part.site.name], since, sample) for part in component_set.parts]
                # A list per cell, unlike a sweep's: sets and roles make few cells of each prompt.
                rows.append((example, [CellTemplate(labels, tuple(edits))]))
    plan = Plan(model, pair, CellTable.of(rows), metrics, replacement, batch_size, matched=matched)
    options = {
        "sets": [component_set.described() for component_set in chosen],
        "complement": complement,
        "positions": recorded_roles(edited),
    }
    return run_sweep("ablate", plan, options, engine=engine, seed=seed, progress=progress, out=out)


def joint_template(
    nodes: Sequence[ActivationNode], example: int, replacement: Replacement, sample: int = 0
) -> CellTemplate:
    """Return what is edited where nodes of one example are replaced together."""
    labels: dict[str, Any] = {"site": "together", "set": set_name(nodes)}
    labels |= {"values": replacement.label} if replacement.label else {}
    labels |= {} if replacement.samples is None else {"sample": sample}
    since = replacement.since(example)
    return CellTemplate(labels, tuple(node.edit(since, sample) for node in nodes))


def patch_together(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    nodes: object,
    *,
    metrics: tuple[Metric, ...],
    direction: str,
    values: Any,
    dataset: Prompts | None,
    seed: int,
    batch_size: int | None,
    engine: str,
    progress: bool,
    out: str | Path | None,
) -> Sweep:
    """Patch several nodes at once: what `hw.patch(..., together=)` does, whose options these are, checked."""
    pair = read_prompt_pair(model, clean, corrupted, direction)
    read = read_nodes(model, nodes, pair.prompts)
    sites = sites_named(list(dict.fromkeys(node.site for node in read)), model)
    replacement = build_replacement(model, values, dataset, pair, sites, seed)
    draws = range(replacement.samples or 1)
    examples = range(len(pair.base))
    cells = CellTable.of((i, [joint_template(read, i, replacement, sample) for sample in draws]) for i in examples)
    plan = Plan(model, pair, cells, metrics, replacement, batch_size)
    options = {"together": [node.described() for node in read]}
    return run_sweep("patch", plan, options, engine=engine, seed=seed, progress=progress, out=out)
