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
from itertools import product
from pathlib import Path
from typing import Any, Literal

from headwater.calls import checked_call
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.models.sites import sites_named
from headwater.options import checked_flag, checked_name, checked_seed
from headwater.patching.axes import seen_positions
from headwater.patching.components import ActivationNode, read_nodes, read_sets, set_name
from headwater.patching.edits import CellTable, CellTemplate, ReplacementSpec, refuse_too_many_cells
from headwater.patching.measure import ENGINES, run_sweep
from headwater.patching.metrics import Measures, Metric, as_metrics
from headwater.patching.plan import Plan, check_call, recorded_roles
from headwater.patching.prompt_pair import read_prompt_pair
from headwater.patching.prompts import Prompts
from headwater.patching.replacements import Replacement, TensorLike, ValueName, build_replacement
from headwater.patching.sweep import Sweep


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
