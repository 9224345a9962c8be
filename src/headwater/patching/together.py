"""Several nodes at once: one run in which all of them have other values, as one cell of a sweep.

Effects do not add up: what two heads do together is measured together. Nodes may lie in any layers, at any sites; a
later one is replaced in the run as it is by then.

    effect = metric of the run with all of them replaced - metric of the run as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.models.hooked import HookedModel
from headwater.models.sites import sites_named
from headwater.patching.call import engine_option, metric_options
from headwater.patching.cells import Cells, Kind
from headwater.patching.measure import measure
from headwater.patching.metrics import Metric
from headwater.patching.nodes import Node, read_nodes, set_name
from headwater.patching.plan import Plan
from headwater.patching.prompts import Prompts
from headwater.patching.runners import ENGINES
from headwater.patching.sides import Sides, plan_of, read_sides
from headwater.patching.sweep import Sweep, sweep_of
from headwater.patching.sweep_axes import Asked
from headwater.patching.values import Source, recorded
from headwater.runs.analysis import Run, run_or_resume

WHOLE = Asked((), None, "all", None, None)
"""What is asked for of prompts where nodes name positions themselves."""


def joint_kind(nodes: Sequence[Node], example: int, source: Source, sample: int = 0) -> Kind:
    """Return what is edited where nodes of one example are replaced together."""
    labels: dict[str, Any] = {"site": "together", "set": set_name(nodes)}
    labels |= {"values": source.label} if source.label else {}
    labels |= {} if source.samples is None else {"sample": sample}
    since = source.since(example)
    return Kind(labels, tuple(replace(node.edit(since), sample=sample) for node in nodes))


def joint_plan(
    model: HookedModel,
    sides: Sides,
    source: Source,
    metrics: tuple[Metric, ...],
    sets: Sequence[Sequence[Node]],
    batch_size: int | None = None,
) -> Plan:
    """Return the plan of a cell for each set of nodes, draw and example."""
    draws = range(source.samples or 1)
    cells = Cells.of(
        (example, [joint_kind(nodes, example, source, sample) for nodes in sets for sample in draws])
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
    sides = read_sides(model, clean, corrupted, WHOLE, direction)
    read = read_nodes(model, nodes, sides.prompts)
    named = sites_named(list(dict.fromkeys(node.site for node in read)), model)
    source = sides.source(model, values, dataset, named, seed)
    plan = joint_plan(model, sides, source, metrics, [read], batch_size)
    options = {
        "together": [node.described() for node in read],
        "direction": direction,
        "values": recorded(source),
        "mean_over": source.mean_over,
        **sides.described(source.given.dataset),
        "metrics": metric_options(plan),
    } | engine_option(engine)

    def work(run: Run) -> Sweep:
        return sweep_of(plan, measure(plan, run, ENGINES[engine]), run)

    return run_or_resume(Sweep, "patch", model, options, work, out=out, seed=seed, progress=progress)
