"""What every analysis of edges has of its pairs of prompts: the two runs of each, and their metrics.

Pairs align token by token. The base run is the one whose receivers are given other inputs: the clean one where noise is
brought in, the corrupted one where something is brought back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.circuits.both_runs import BothRuns, Place
from headwater.circuits.carried import Carried
from headwater.circuits.exact import Exact, refuse_heads_that_meet
from headwater.circuits.graph import Graph
from headwater.circuits.places import Places, places_of
from headwater.circuits.senders import Exchanged, refuse_other_kinds
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.options import checked_name
from headwater.patching.edits import LOGITS, CellTable
from headwater.patching.metrics import Metric, as_metrics
from headwater.patching.plan import Plan
from headwater.patching.prompt_pair import DIRECTIONS, PromptPair
from headwater.patching.prompts import Prompts, prompt_options, read_pairs
from headwater.patching.replacements import Replacement, build_replacement
from headwater.runs.analysis import Run

OTHER_RUN = "other run"


def plan_of(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None,
    metric: Metric | Any,
    direction: str,
    batch_size: int | None,
    values: object = OTHER_RUN,
) -> Plan:
    """Resolve pairs of prompts, metrics and a direction; with values of their own, prompts need no other.

    Raises:
        InputError: there are no pairs, they do not align, or a metric reads something else than the logits.
    """
    checked_name("direction", direction, DIRECTIONS)
    first, second = read_pairs(model, clean, corrupted)
    if second is None and isinstance(values, str) and values == OTHER_RUN:
        raise InputError("Edges need pairs of prompts: give corrupted=, or a table with the columns clean, corrupted.")
    metrics = as_metrics(metric)
    if elsewhere := [one.name for one in metrics if one.site != LOGITS]:
        raise InputError(f"The metric {elsewhere[0]!r} reads the residual stream; edges are measured at the logits.")
    pair = PromptPair(first, second, direction)
    return Plan(model, pair, CellTable.unedited(len(first)), metrics, batch_size=batch_size)


def source_in(plan: Plan, values: object, dataset: Prompts | None, seed: int) -> Replacement:
    """Resolve what senders' outputs are exchanged for.

    Raises:
        InputError: there is no such kind, it is not defined for senders, or the prompts do not allow it.
    """
    source = build_replacement(plan.model, values, dataset, plan.pair, (), seed)
    refuse_other_kinds(source)
    return source


def places_in(plan: Plan, over: str | None, positions: Where | None) -> Places:
    """Resolve where senders are exchanged, of a plan's prompts."""
    stops = tuple(kept[-1] + 1 for kept in plan.positions)
    return places_of(over, positions, plan.base, plan.other, stops, 0 if plan.pair.base_is_clean else 1)


def options_of(plan: Plan, source: Replacement) -> dict[str, object]:
    """What of the pairs decides a result."""
    inputs = source.inputs
    named: dict[str, Any] = {"direction": "noise" if plan.pair.base_is_clean else "denoise"}
    if inputs.kind != OTHER_RUN:
        named |= {"values": inputs.kind, "mean_over": source.mean_over, "seed": inputs.seed}
    pool = [] if inputs.dataset is None else [inputs.dataset]
    return named | prompt_options(plan.pair.clean, plan.pair.corrupted, *pool) | {"metrics": plan.metric_options}


class Pairs:
    """The two runs of one pair after the other.

    Args:
        plan: the pairs.
        source: what senders' outputs are exchanged for.
        fingerprint: of the model's weights as they are.
        sloped: whether gradients in the base runs will be taken.
    """

    def __init__(self, plan: Plan, source: Replacement, fingerprint: str, sloped: bool = False):
        self._sloped = sloped
        self._weights = LoadedWeights(plan.model, fingerprint)
        self._exchanged = None if source.takes_other_run else Exchanged(plan.model, source, self._weights)
        self.plan, self.graph = plan, Graph.of(plan.model.shape)
        self._runs: BothRuns | None = None

    def __len__(self) -> int:
        return len(self.plan.base)

    def runs(self, example: int) -> BothRuns:
        """Return the two runs of a pair, made now unless they are the last ones."""
        if self._runs is None or self._runs.example != example:
            self._runs = None
            self._runs = BothRuns(self.plan, example, self._weights, self._exchanged, self._sloped)
        return self._runs

    def tile(self, runs: BothRuns, place: Place) -> int | None:
        """Return how many tokens go through a sublayer at once, where the caller said how many rows."""
        return self.plan.batch_size * (runs.stop - place.start) if self.plan.batch_size else None

    def exact(self, runs: BothRuns, place: Place, through: str = "direct") -> Exact:
        """Return what computes exact effects at a place."""
        exact = Exact(runs, place, self.tile(runs, place))
        if through != "direct":
            each = [np.array([sender]) for sender in range(len(self.graph.senders))]
            exact.reaching = Carried(exact.rows, exact.changes, each, through).at
        return exact

    def baselines(self, run: Run, recomputed: bool = True) -> Sequence[dict[str, Tensor]]:
        """Return by pair the metrics of its clean and corrupted run, and what rounding makes of them.

        Args:
            run: the analysis.
            recomputed: whether runs are changed and made again: rounding is what rows without a change show then, else
                the precision of the two metrics.
        """
        return list(run.pieces("baselines", range(len(self)), partial(self._baselines, recomputed=recomputed)))

    def _baselines(self, example: int, recomputed: bool) -> dict[str, Tensor]:
        with torch.no_grad(), self.plan.model.lock:
            runs = self.runs(example)
            exact = self.exact(runs, Place(runs.start))
            refuse_heads_that_meet(exact.rows)
            found = runs.wave.readout.unedited(range(example, example + 1))
            base, other = found.unedited[0], found.other[0]
            floor = torch.finfo(self.plan.model.dtype).eps * torch.maximum(base.abs(), other.nan_to_num().abs())
            if recomputed:
                floor = torch.maximum(exact.rounding(), floor)
            clean, corrupted = (base, other) if self.plan.pair.base_is_clean else (other, base)
        return {"baselines": torch.stack([clean, corrupted, floor], -1)}
