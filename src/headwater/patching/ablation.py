"""Edits of several components at once, as one cell: ablation of sets, and nodes patched together.

Effects do not add up: what two heads do together is measured together. Knockout of whole circuits (Wang et al. 2023;
Chan et al. 2022, resampling; Li and Janson 2024, on which values to take): for each set and prompt, one run in which
every component of the set is replaced at once, in all layers where it has some. `complement` replaces everything else
instead: what is left is what the set does alone.

    effect = metric of the edited run - metric of the run as it is

All sets go down the layers together, in the walk of `headwater.patching.walk`; what a run computes after the first
replaced component is computed anew from there, so that later components of the set are replaced in the run as it then
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from headwater.calls import checked_call
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.models.sites import sites_named
from headwater.options import checked_flag, checked_name, checked_seed
from headwater.patching.axes import SweepSpec, seen_positions
from headwater.patching.components import Node, read_nodes, read_sets, set_name
from headwater.patching.edits import CellTable, CellTemplate, refuse_too_many_cells
from headwater.patching.measure import measure
from headwater.patching.metrics import Measures, Metric, as_metrics
from headwater.patching.plan import Plan, check_call, engine_option, metric_options, plan_of, recorded_roles
from headwater.patching.prompt_pair import PromptPair, read_prompt_pair
from headwater.patching.prompts import Prompts
from headwater.patching.replacements import Replacement, ReplacementSpec, TensorLike, ValueName, described_replacement
from headwater.patching.sweep import Sweep, sweep_of
from headwater.patching.walk_runner import ENGINES
from headwater.runs.analysis import Run, run_or_resume


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
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    complement = checked_flag("complement", complement)
    runner = ENGINES[checked_name("engine", engine, list(ENGINES))]
    ask = SweepSpec((), None, positions, None, None)
    sides = read_prompt_pair(model, prompts, corrupted, ask, "noise")
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
                rows.append((example, [CellTemplate(labels | own, edits)]))
    plan = plan_of(model, sides, CellTable.of(rows), metrics, source, matched=matched, batch_size=batch_size)
    options = {
        "sets": [one.described() for one in chosen],
        "complement": complement,
        "positions": recorded_roles(spots),
        "direction": "noise",
        "values": described_replacement(source),
        "mean_over": source.mean_over,
        **sides.described(source.given.dataset),
        "metrics": metric_options(plan),
    } | engine_option(engine)

    def work(run: Run) -> Sweep:
        return sweep_of(plan, measure(plan, run, runner), run)

    return run_or_resume(Sweep, "ablate", model, options, work, out=out, seed=seed, progress=progress)


WHOLE_PROMPTS = SweepSpec((), None, "all", None, None)
"""What is asked for of prompts where nodes name positions themselves."""


def joint_template(nodes: Sequence[Node], example: int, source: Replacement, sample: int = 0) -> CellTemplate:
    """Return what is edited where nodes of one example are replaced together."""
    labels: dict[str, Any] = {"site": "together", "set": set_name(nodes)}
    labels |= {"values": source.label} if source.label else {}
    labels |= {} if source.samples is None else {"sample": sample}
    since = source.since(example)
    return CellTemplate(labels, tuple(replace(node.edit(since), sample=sample) for node in nodes))


def joint_plan(
    model: HookedModel,
    sides: PromptPair,
    source: Replacement,
    metrics: tuple[Metric, ...],
    sets: Sequence[Sequence[Node]],
    batch_size: int | None = None,
) -> Plan:
    """Return the plan of a cell for each set of nodes, draw and example."""
    draws = range(source.samples or 1)
    cells = CellTable.of(
        (example, [joint_template(nodes, example, source, sample) for nodes in sets for sample in draws])
        for example in range(len(sides.base))
    )
    return plan_of(model, sides, cells, metrics, source, matched=[None] * len(sides.prompts), batch_size=batch_size)


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
    """Patch several nodes at once: what `hw.patch(..., together=)` does, whose options these are, checked.

    Returns:
        A sweep with a row per example, metric and draw; `set` names the nodes.

    Raises:
        InputError: see `read_nodes`; or a prompt or kind of values cannot be used.
    """
    sides = read_prompt_pair(model, clean, corrupted, WHOLE_PROMPTS, direction)
    read = read_nodes(model, nodes, sides.prompts)
    named = sites_named(list(dict.fromkeys(node.site for node in read)), model)
    source = sides.source(model, values, dataset, named, seed)
    plan = joint_plan(model, sides, source, metrics, [read], batch_size)
    options = {
        "together": [node.described() for node in read],
        "direction": direction,
        "values": described_replacement(source),
        "mean_over": source.mean_over,
        **sides.described(source.given.dataset),
        "metrics": metric_options(plan),
    } | engine_option(engine)

    def work(run: Run) -> Sweep:
        return sweep_of(plan, measure(plan, run, ENGINES[engine]), run)

    return run_or_resume(Sweep, "patch", model, options, work, out=out, seed=seed, progress=progress)
