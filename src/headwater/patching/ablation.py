"""Ablation of sets: heads, MLPs, neurons, features, together, replaced by values that say nothing of the prompt.

Knockout of whole circuits (Wang et al. 2023; Chan et al. 2022, resampling; Li and Janson 2024, on which values to
take): for each set and prompt, one run in which every component of the set is replaced at once, in all layers where it
has some. `complement` replaces everything else instead: what is left is what the set does alone.

    effect = metric of the ablated run - metric of the run as it is

All sets go down the layers together, in the walk of `headwater.patching.walk`; what a run computes after the first
replaced component is computed anew from there, so that later components of the set are replaced in the run as it then
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from headwater.calls import checked_call
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.options import checked_flag, checked_name, checked_seed
from headwater.patching.call import check_call, engine_option, metric_options, recorded_roles
from headwater.patching.cells import Cells, Kind, refuse_too_many_cells
from headwater.patching.components import read_sets
from headwater.patching.measure import measure
from headwater.patching.metrics import Measures, as_metrics
from headwater.patching.prompts import Prompts
from headwater.patching.runners import ENGINES
from headwater.patching.sides import plan_of, read_sides
from headwater.patching.sweep import Sweep, sweep_of
from headwater.patching.sweep_axes import Asked, seen_positions
from headwater.patching.values import Recipe, TensorLike, ValueName, recorded
from headwater.runs.analysis import Run, run_or_resume


@checked_call
def ablate(
    model: HookedModel,
    prompts: Prompts,
    corrupted: Prompts | Recipe | None = None,
    *,
    metric: Measures,
    heads: object = None,
    mlps: object = None,
    neurons: object = None,
    features: object = None,
    sets: Mapping[str, Any] | Any = None,
    complement: bool = False,
    values: ValueName | Recipe | TensorLike | Callable[..., Any] = "zero",
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
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    complement = checked_flag("complement", complement)
    runner = ENGINES[checked_name("engine", engine, list(ENGINES))]
    ask = Asked((), None, positions, None, None)
    sides = read_sides(model, prompts, corrupted, ask, "noise")
    chosen = read_sets(
        model, {"heads": heads, "mlps": mlps, "neurons": neurons, "features": features}, sets, complement
    )
    metrics = as_metrics(metric)
    named = tuple(dict.fromkeys(part.site for one in chosen for part in one.parts))
    spots = sides.spots(ask)
    source = sides.source(model, values, dataset, named, seed, sides.roles(ask, spots))
    matched = sides.matched(spots, named)
    refuse_too_many_cells(sum(map(len, spots)) * len(chosen) * len(metrics) * (source.samples or 1) * sides.draws)
    common = {"site": "complement" if complement else "ablation"} | ({"values": source.label} if source.label else {})
    rows = []
    for example, prompt in enumerate(sides.base):
        i = example // sides.draws
        since = source.since(example) if matched[i] is None else 0
        for role, spot in spots[i].items():
            labels = common | ({"role": role} if ask.by_role else {})
            places = {site.name: seen_positions(site, prompt, spot.base) for site in named}
            at = {name: None if len(own) == len(prompt) else own for name, own in places.items()}
            for one, sample in product(chosen, range(source.samples or 1)):
                own = {"set": one.name} | ({"sample": sample} if source.samples is not None else {})
                edits = tuple(replace(part.edit(at[part.site.name], since), sample=sample) for part in one.parts)
                rows.append((example, [Kind(labels | own, edits)]))
    plan = plan_of(model, sides, Cells.of(rows), metrics, source, matched=matched, batch_size=batch_size)
    options = {
        "sets": [one.described() for one in chosen],
        "complement": complement,
        "positions": recorded_roles(spots),
        "direction": "noise",
        "values": recorded(source),
        "mean_over": source.mean_over,
        **sides.described(source.given.dataset),
        "metrics": metric_options(plan),
    } | engine_option(engine)

    def work(run: Run) -> Sweep:
        return sweep_of(plan, measure(plan, run, runner), run)

    return run_or_resume(Sweep, "ablate", model, options, work, out=out, seed=seed, progress=progress)
