"""Measures circuits on pairs of prompts: what every analysis that runs circuits has in common.

The edited prompt is the clean one; what lies outside of a circuit comes from the other prompt of its pair, or from
`values=` (`headwater.circuits.circuit_walk`). Of each example three numbers of a metric go with those of the circuits:

    clean       of the clean run, which is that of the full circuit
    corrupted   of the empty circuit: of the other prompt's run, or of the values alone
    floor       what rounding can make of the metric: a gap below it is none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.both_runs import BothRuns, Exchanged, HeadShares, refuse_other_kinds
from headwater.circuits.circuit_walk import CircuitWalk, of_other_run, of_values
from headwater.circuits.exact import EdgeRows, refuse_heads_that_meet
from headwater.circuits.graph import Graph, Indices
from headwater.circuits.pairs import changed_tokens, metrics_at_logits
from headwater.errors import InputError, ModelError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.sites import SITES
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.options import checked_seed
from headwater.patching.duration import say_how_long
from headwater.patching.edits import CellTable
from headwater.patching.metrics import Metric
from headwater.patching.plan import Plan, check_call
from headwater.patching.prompt_pair import PromptPair
from headwater.patching.prompts import Prompts, first_difference, prompt_options, read_pairs
from headwater.patching.replacements import Replacement, Resample, build_replacement

KEPT_FLOATS = 1 << 29
"""About how many numbers the runs of pairs may hold that are kept between batches."""
ROUNDING = 32
"""Rounding makes at most so many times the type's precision of the largest logit: what is below is not a gap."""
TOLERANCE = 1e-3
"""How far the full circuit may be from the clean run, as a part of the largest logit that is read."""


@dataclass(frozen=True, eq=False)
class Outcome:
    """What was requested, resolved: pairs, metrics, and what lies outside of circuits."""

    plan: Plan
    source: Replacement | None
    """What gives the values outside of circuits; None where it is the other prompt's run."""
    options: dict[str, Any]
    """What of it decides a result."""
    given: dict[str, Any]
    """The prompts as ids, and the values, as `hw.edges` takes them."""

    @classmethod
    def of(
        cls,
        model: HookedModel,
        clean: Prompts | pd.DataFrame | Path,
        corrupted: Prompts | None,
        *,
        metric: Metric | Any,
        values: object = "other run",
        dataset: Prompts | None = None,
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Outcome:
        """Resolve prompts and options."""
        batch_size, seed = check_call(model, batch_size), checked_seed(seed)
        first, second = read_pairs(model, clean, corrupted)
        metrics = metrics_at_logits(metric, "circuits are read")
        options = {**prompt_options(first, second), "values": "other run"}
        given: dict[str, Any] = {"clean": _ids(first), "corrupted": None if second is None else _ids(second)}
        source: Replacement | None = None
        if isinstance(values, str) and values == "other run":
            if second is None:
                raise InputError(
                    "Circuits need pairs of prompts: give corrupted=, or a table with the columns clean, corrupted; or "
                    "values='zero', 'mean' or 'resample'."
                )
            if dataset is not None:
                raise InputError("dataset= was given, but values='other run' takes nothing from it; use 'mean'.")
        else:
            sites = tuple(SITES[name] for name in ("resid_pre", "z", "mlp_out"))
            source = build_replacement(model, values, dataset, PromptPair(first), sites, seed)
            if source.changes or source.samples:
                raise InputError(
                    "Outside of a circuit values cannot depend on what they replace: use 'zero', 'mean', ..."
                )
            refuse_other_kinds(source)
            pool = source.inputs.dataset
            given |= {"values": values, "dataset": None if pool is None else _ids(pool)}
            options |= prompt_options(first, pool) | {"values": source.described, "seed": seed}
        # Another prompt's run is a run like the other prompt's: from here on it is one.
        if isinstance(source, Resample):
            second, source = tuple(source.pool[donor] for donor in source.donors), None
        # A plan has two sides; where values are of no run the second is the first, and is not read.
        second = first if source is not None or second is None else second
        cells = CellTable.unedited(len(first))
        plan = Plan(model, PromptPair(first, second), cells, metrics, batch_size=batch_size)
        return cls(plan, source, options | {"metrics": plan.metric_options}, given)

    def say_how_long(self, n_circuits: int, progress: bool) -> None:
        """Say how long circuits take, if it is over a minute."""
        what = f"{n_circuits:,} circuits of {len(self):,} pairs"
        tokens, advice = n_circuits * self._changed.sum(), "Fewer circuits, placebos= or pairs take less."
        say_how_long(self.plan.model, what, tokens, advice, progress=progress)

    def say_how_long_a_search(self, tries: int, hours: float | None, progress: bool) -> None:
        """Say how long a search takes, if it is over a minute: an edge that is tried is a circuit of its own."""
        what = f"{tries:,} edges, each tried on {len(self):,} pairs,"
        tokens, advice = tries * self._changed.sum(), "With budget= or fewer pairs it takes less."
        say_how_long(self.plan.model, what, tokens, advice, hours=hours, progress=progress)

    def pairs_to_keep(self, most: int) -> int:
        """Return the runs of how many pairs are kept between batches: mostly the changes that each sender makes."""
        shape = self.plan.model.shape
        a_pair = 3 * len(Graph.of(shape).senders) * int(self._changed.max()) * shape.d_model
        return max(1, min(most, len(self), KEPT_FLOATS // a_pair))

    @property
    def _changed(self) -> Indices:
        """By pair, how many tokens are run from the first on that differs from what lies outside."""
        base, other = self.plan.base, self.plan.other
        assert other is not None
        exchanged = self.source is not None
        return changed_tokens(self.plan, lambda i: 0 if exchanged else first_difference(base[i], other[i]))

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(metric.name for metric in self.plan.metrics)

    def __len__(self) -> int:
        return len(self.plan.base)


class CircuitRunner:
    """Runs circuits on the examples of an outcome, one after the other.

    Args:
        outcome: the pairs.
        fingerprint: of the model's weights as they are, where it is known.
        keep: the runs of how many examples are kept, for what comes back to them.
    """

    def __init__(self, outcome: Outcome, fingerprint: str | None = None, keep: int = 1):
        self.outcome, self.plan, self.keep = outcome, outcome.plan, keep
        self.graph = Graph.of(self.plan.model.shape)
        self._weights = LoadedWeights(self.plan.model, fingerprint)
        source = outcome.source
        self._exchanged = None if source is None else Exchanged(self.plan.model, source, self._weights)
        self._shares: list[HeadShares] = []
        self._walks: dict[int, tuple[CircuitWalk, Tensor]] = {}
        self._is_checked = False

    def measure(self, example: int, circuits: Sequence[Indices]) -> dict[str, Tensor]:
        """Return the metrics of circuits on an example, `circuit metric`, and its `baselines`, `metric 3`."""
        with torch.no_grad(), self.plan.model.lock:
            walk, baselines = self._walk(example)
            if example == 0 and not self._is_checked:
                # By itself: beside other circuits it would change their last digits, and a resumed search with them.
                full = walk.measure([np.arange(self.graph.n_edges)], self.plan.batch_size)[0]
                self._refuse_another_model(walk, full, baselines[:, 0])
            values = walk.measure(circuits, self.plan.batch_size)
        return {"values": values, "baselines": baselines}

    def _walk(self, example: int) -> tuple[CircuitWalk, Float[Tensor, "metric 3"]]:
        """Return what runs circuits on an example, made now unless it is kept, and its baselines."""
        if example not in self._walks:
            if len(self._walks) >= self.keep:
                self._walks.popitem()  # the last one, so that the first ones serve every round
            runs = BothRuns(self.plan, example, self._weights)
            if not self._shares:
                layers = range(self.graph.n_layers)
                self._shares = [HeadShares(self.plan.model, layer, self._weights) for layer in layers]
            shares = self._shares
            outside = (
                of_other_run(runs, shares) if self._exchanged is None else of_values(runs, shares, self._exchanged)
            )
            walk = CircuitWalk(EdgeRows(runs, outside.start), outside, shares, self._weights)
            if example == 0:
                refuse_heads_that_meet(walk.rows)
            self._walks[example] = walk, self._baselines(walk)
        return self._walks[example]

    def _baselines(self, walk: CircuitWalk) -> Float[Tensor, "metric 3"]:
        runs, example = walk.runs, walk.runs.example
        unedited = runs.wave.readout.unedited(range(example, example + 1))
        clean, corrupted = unedited.unedited[0], unedited.other[0]
        if self.outcome.source is not None:
            # Values are of no run: the empty circuit has to be run to know its metric.
            corrupted = walk.measure([np.zeros(0, dtype=np.int64)])[0]
        # A share of a gap of rounding would be anything: faithfulness is NaN below this.
        floor = ROUNDING * torch.finfo(self.plan.model.dtype).eps * _largest_logit(walk)
        return torch.stack([clean, corrupted, torch.full_like(clean, floor)], -1)

    def _refuse_another_model(
        self, walk: CircuitWalk, full: Float[Tensor, " metric"], clean: Float[Tensor, " metric"]
    ) -> None:
        """Check once that all edges together are the clean run."""
        self._is_checked = True
        allowed = max(TOLERANCE, 64 * torch.finfo(self.plan.model.dtype).eps) * _largest_logit(walk)
        # Written so that NaN is refused, too.
        if not float((full - clean).abs().max()) <= allowed:
            raise ModelError(
                f"The circuit of all edges of {self.plan.model.name} is not its clean run: {float(full[0]):.4g} "
                f"against {float(clean[0]):.4g} on {self.outcome.metrics[0]}. Its circuits have no meaning."
            )


def _ids(prompts: Sequence[Prompt]) -> list[list[int]]:
    return [list(prompt.ids) for prompt in prompts]


def _largest_logit(walk: CircuitWalk) -> float:
    """The size of the clean run's logits, at least 1: what rounding is relative to."""
    last = walk.rows.base("resid_post", walk.graph.n_layers - 1)[walk.rows.kept]
    return max(1.0, float(walk.runs.wave.logits(last, 0).abs().max()))
