"""Path patching: what an answer owes to what some senders tell some receivers, and to no other way between them.

Wang et al. 2022; Goldowsky-Dill et al. 2023. Of a clean and a corrupted prompt that align token by token, senders'
outputs are exchanged for the other run's while every other head gives what it gave; what then reaches the receivers is
what they read, and they and everything after them are recomputed:

    direct   receivers read x_r + Σ (s(other run) - s(run)): the paths without anything between
    mlps     the MLPs between sender and receiver are recomputed too

    effect(S → R) = metric(run in which every r in R gives what it gives of what reaches it) - metric(run)

All is exact (`headwater.circuits.paths`). One sender to one receiver directly is the edge of `hw.edges`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.circuits.carried import THROUGH, ThroughName
from headwater.circuits.cost import changed_tokens, runs_of
from headwater.circuits.endpoints import ends_named
from headwater.circuits.graph import Graph, Indices
from headwater.circuits.pairs import OTHER_RUN, Pairs, options_of, places_in, plan_of, source_in
from headwater.circuits.path_effects import PathEffects, tabulated
from headwater.circuits.paths import Paths, first_layer, has_path
from headwater.circuits.places import Places
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.options import checked_name, checked_seed
from headwater.patching.call import check_call
from headwater.patching.duration import say_how_long
from headwater.patching.metrics import Measures
from headwater.patching.plan import Plan
from headwater.patching.prompts import Prompts
from headwater.patching.sides import DirectionName
from headwater.patching.values import Recipe, Source, ValueName
from headwater.runs.analysis import Run, run_or_resume

Ends: TypeAlias = str | Iterable[str | Iterable[str]] | Mapping[str, str | Iterable[str]]
"""Senders or receivers, one by one or together (`headwater.circuits.endpoints`)."""


@checked_call
def path_patch(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    *,
    senders: Ends,
    receivers: Ends,
    metric: Measures,
    through: ThroughName = "direct",
    direction: DirectionName = "noise",
    values: ValueName | Recipe | Any = OTHER_RUN,
    dataset: Prompts | None = None,
    over: str | None = None,
    positions: Where | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> PathEffects:
    """Measure what an answer owes to the paths from each sender to each receiver.

    effect = metric of the run in which receivers read senders' other outputs - metric of the run, in units of the
    metric (Wang et al. 2022).

    Args:
        model: the model; it is left as it was.
        clean: one prompt, several, token ids, or a table of pairs with columns `clean` and `corrupted` (a data frame,
            or the path of a CSV or JSON Lines file).
        corrupted: the other prompt of each pair, which aligns with it token by token.
        senders: names such as "embed", "head 9.9", "mlp 8"; a kind ("head") or a layer ("head 9") is each of its nodes
            by itself. A list within the list is exchanged together, and so is what a mapping has under a name:
            `{"inhibition": ["head 7.3", "head 8.6"]}`.
        receivers: in the same way: "q 10.7", "k 10.3", "v 10.3" (k and v of key-value heads), "mlp 8", "logits".
        metric: one or more of `hw.logit_difference(...)` and its relatives, or a function of the logits.
        through: `direct`: what senders write reaches receivers unchanged; `mlps`: also by way of the MLPs between them,
            which are recomputed. All other heads give what they gave in either case.
        direction: `noise` edits the clean run, `denoise` the corrupted one.
        values: what senders' outputs are exchanged for: those of the `other run`, `zero`, the `mean` of what they add
            over `dataset`, or `resample`: what they add for another prompt of `dataset`. All but the first do without
            `corrupted`.
        dataset: the prompts of `mean` and `resample`; default: the prompts that are edited.
        over: `position` exchanges senders at each position by itself; default: at all positions together.
        positions: where senders are exchanged: one of the names of `headwater.models.positions`, or a mapping from
            roles to these, such as `{"subject": [" France", " Spain"], "end": "last"}`: then each role by itself.
        seed: of `resample`.
        batch_size: rows given to a sublayer at once; by default as many as suit the device. Halved when memory runs
            out.
        progress: show a progress bar.
        out: a folder: finished layers are written as they come, an interrupted run goes on where it stopped.

    Returns:
        The effects, a row for each example, sender and receiver between which a path leads, and metric.

    Raises:
        InputError: an option or prompt cannot be used, or no sender comes before a receiver.
        ModelError: the model's blocks cannot be called one by one, or its heads do not add up to what attention adds.
        NumericsError: a run gives NaN or infinity.
    """
    checked_name("through", through, THROUGH)
    batch_size, seed = check_call(model, batch_size), checked_seed(seed)
    graph = Graph.of(model.shape)
    sent = ends_named(graph, graph.senders, "senders", senders)
    received = ends_named(graph, graph.receivers, "receivers", receivers)
    if not any(has_path(graph, s, r) for s in sent.values() for r in received.values()):
        graph.refuse_order(next(iter(sent)), next(iter(received)))
    plan = plan_of(model, clean, corrupted, metric, direction, batch_size, values)
    source = source_in(plan, values, dataset, seed)
    asked = Asked(plan, source, graph, sent, received, through, places_in(plan, over, positions))
    _say_how_long(asked, progress)
    options = {
        "senders": {name: [graph.senders.name(i) for i in one] for name, one in sent.items()},
        "receivers": {name: [graph.receivers.name(i) for i in one] for name, one in received.items()},
        "through": through,
        "over": over,
        **asked.places.options,
        **options_of(plan, source),
    }

    def work(run: Run) -> PathEffects:
        return _Measuring(asked, run).result()

    return run_or_resume(PathEffects, "path_patch", model, options, work, out=out, progress=progress)


@dataclass(frozen=True, eq=False)
class Asked:
    """Which paths of which pairs, resolved to tokens and numbers."""

    plan: Plan
    source: Source
    graph: Graph
    senders: Mapping[str, Indices]
    receivers: Mapping[str, Indices]
    through: str
    places: Places


def _say_how_long(asked: Asked, progress: bool) -> None:
    """Say how long paths take, if it is over a minute."""
    plan, graph = asked.plan, asked.graph
    ends = [
        first_layer(graph, received)
        for received in asked.receivers.values()
        for sent in asked.senders.values()
        if has_path(graph, sent, received)
    ]
    tokens = runs_of(graph, np.array(ends)) * len(asked.places) * changed_tokens(plan, asked.source.since).sum()
    what, advice = f"{len(ends):,} paths of {len(plan.base):,} pairs", "Fewer senders=, receivers= or pairs take less."
    say_how_long(plan.model, what, tokens, advice, progress=progress)


class _Measuring:
    """Measures paths, those of a pair whose first receiver lies in one layer in a piece."""

    def __init__(self, asked: Asked, run: Run):
        self.asked, self.run = asked, run
        self.pairs = Pairs(asked.plan, asked.source, run.record.fingerprint)
        layers = [first_layer(asked.graph, one) for one in asked.receivers.values()]
        self.stages = [[i for i, own in enumerate(layers) if own == layer] for layer in sorted(set(layers))]

    def result(self) -> PathEffects:
        """Measure all, and lay it out."""
        asked = self.asked
        baselines = torch.stack([piece["baselines"] for piece in self.pairs.baselines(self.run)])
        items = [(example, stage) for example in range(len(self.pairs)) for stage in self.stages]
        size = (len(self.pairs), len(asked.places), len(asked.senders), len(asked.receivers), len(asked.plan.metrics))
        effects = torch.full(size, torch.nan, dtype=torch.float64)

        def count(item: tuple[int, list[int]]) -> int:
            return len(item[1]) * len(asked.senders)

        with self.run.bar("paths", "path", sum(map(count, items))) as bar:
            pieces = self.run.pieces("layer", items, self._stage, bar, count)
            for (example, stage), piece in zip(items, pieces, strict=True):
                effects[example][:, :, stage] = piece["effects"]
        table = tabulated(
            effects,
            baselines,
            (tuple(asked.senders), tuple(asked.receivers)),
            tuple(metric.name for metric in asked.plan.metrics),
            asked.places,
            self.run.record.options,
        )
        return PathEffects(table, self.run.record)

    def _stage(self, item: tuple[int, list[int]]) -> dict[str, Tensor]:
        """Return the effects of all senders by way of some receivers, `position sender receiver metric`."""
        example, stage = item
        asked = self.asked
        senders, receivers = list(asked.senders.values()), [list(asked.receivers.values())[i] for i in stage]
        with torch.no_grad(), asked.plan.model.lock:
            runs = self.pairs.runs(example)
            found = self._nothing(example, senders, receivers)
            for number, place in asked.places.of(runs):
                paths = Paths(runs, place, asked.through, self.pairs.tile(runs, place))
                found[number] = paths.effects(senders, receivers)
        return {"effects": found}

    def _nothing(self, example: int, senders: list[Indices], receivers: list[Indices]) -> Tensor:
        """Return 0 where a path leads at a place of the example, NaN elsewhere."""
        leads = torch.tensor([[has_path(self.asked.graph, s, r) for r in receivers] for s in senders])
        found = torch.zeros(len(self.asked.places), *leads.shape, len(self.asked.plan.metrics), dtype=torch.float64)
        found[:, ~leads] = torch.nan
        found[self.asked.places.missing(example)] = torch.nan
        return found
