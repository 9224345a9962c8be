"""Pairs of prompts as every analysis of edges uses them: the two runs of each pair, and their metrics.

Pairs align token by token. The base run is the one whose receivers get other inputs: the clean run for `noise`, the
corrupted run for `denoise`.

Senders' outputs are replaced at all positions together, at each position separately, at some positions, or by role.

Roles are named as everywhere (`models.positions`): each prompt of a pair is resolved separately. What a sender adds at
a position is replaced by what it adds at the same position of the other run; a role must therefore be at the same
positions in both prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.circuits.both_runs import BothRuns, Exchanged, Place, refuse_other_kinds
from headwater.circuits.exact import Exact, refuse_heads_that_meet
from headwater.circuits.graph import Graph
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where, refuse_two_meanings
from headwater.models.weights import LoadedWeights
from headwater.options import checked_name
from headwater.patching.edits import LOGITS, CellTable, Indices
from headwater.patching.metrics import Metric, as_metrics
from headwater.patching.plan import Plan
from headwater.patching.prompts import (
    DIRECTIONS,
    PromptPair,
    Prompts,
    prompt_options,
    read_pairs,
    refuse_columns_as_answers,
    side_by_side,
)
from headwater.patching.replacements import Replacement, build_replacement
from headwater.runs.analysis import Run


@dataclass(frozen=True)
class Places:
    """Where senders' outputs are replaced in each example."""

    by_example: tuple[tuple[tuple[int, ...] | None, ...], ...]
    """For each example and place, the positions that are replaced together; None for all."""
    roles: tuple[str, ...] = ()
    """The names of the places, if they are roles."""
    apart: bool = False
    """Whether each place is the position with the same index."""
    chosen: bool = False
    """Whether the caller passed positions."""

    def __len__(self) -> int:
        return max(map(len, self.by_example))

    def of(self, runs: BothRuns) -> Iterator[tuple[int, Place]]:
        """Yield the places of an example at which a change can have an effect, each with its index."""
        if runs.first >= runs.stop:
            return  # no sender can affect a position that is read
        for number, positions in enumerate(self.by_example[runs.example]):
            if positions is None:
                yield number, Place(runs.start)
            elif at := tuple(position for position in positions if runs.start <= position < runs.stop):
                yield number, Place(min(*at, runs.kept[0]), at)

    def zeros(self, example: int, *size: int) -> Tensor:
        """Return a table with 0 at the places of an example and NaN beyond, where its prompt is shorter than others."""
        table = torch.zeros(len(self), *size, dtype=torch.float64)
        table[len(self.by_example[example]) :] = torch.nan
        return table

    @property
    def options(self) -> dict[str, Any]:
        """The options that determine a result."""
        named = [[at for at in one if at is not None] for one in self.by_example]
        return {"positions": named, "roles": list(self.roles)} if self.chosen else {}


def places_in(plan: Plan, over: str | None, where: Where | None) -> Places:
    """Resolve `over=` (None or `position`) and `positions=` (a mapping for roles) for the prompts of a plan."""
    if over is not None:
        checked_name("over", over, ("position",))
    if isinstance(where, Mapping):
        if over is not None:
            raise InputError("over='position' and positions by role were both given: give one of them.")
        by_role = plan.pair.spans(where)
        for i, spans in enumerate(by_role):
            for role, span in spans.items():
                if span.base != span.other:
                    assert plan.pair.other is not None
                    both = side_by_side(plan.pair.base[i], plan.pair.other[i])
                    raise InputError(
                        f"The role {role!r} is tokens {list(span.base)} of one prompt of pair {i} and "
                        f"{list(span.other)} of the other. What senders add is exchanged position by position: give "
                        f"pairs in which roles have the same positions.\n{both}"
                    )
        return Places(tuple(tuple(s.base for s in spans.values()) for spans in by_role), tuple(where), chosen=True)
    chosen: list[tuple[int, ...] | None] = [None] * len(plan.pair.base)
    if where is not None:
        refuse_two_meanings(where, len(chosen), of_pairs=plan.pair.other is not None)
        chosen = [spans[""].base for spans in plan.pair.spans(where)]
    if over is None:
        return Places(tuple((places,) for places in chosen), chosen=where is not None)
    by_position = [
        tuple((at,) if places is None or at in places else () for at in range(kept[-1] + 1))
        for places, kept in zip(chosen, plan.positions, strict=True)
    ]
    return Places(tuple(by_position), apart=True, chosen=where is not None)


LARGE = 1_000_000_000
"""Models with at least this many parameters use `screened` by default."""


def default_method(model: HookedModel) -> str:
    """Return `exact`, or `screened` for a model of a billion parameters or more."""
    total = sum(parameter.numel() for parameter in model.raw.parameters())
    return "screened" if total >= LARGE else "exact"


def changed_tokens(plan: Plan, since: Callable[[int], int]) -> Indices:
    """Return the number of tokens that are run for each pair: from the first changed one (`since`) to the last read."""
    return np.array([kept[-1] + 1 - min(since(i), kept[0]) for i, kept in enumerate(plan.positions)])


def runs_of(graph: Graph, stages: Indices) -> float:
    """Return how many whole runs cost as much as one row per entry of `stages`.

    A row starts in the middle of that layer (`n_layers`: at the logits).
    """
    return float(np.maximum(graph.n_layers - 0.5 - stages, 0).sum()) / graph.n_layers


OTHER_RUN = "other run"


def plan_of(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None,
    metric: Metric | Any,
    direction: str,
    batch_size: int | None,
    values: object = OTHER_RUN,
    dataset: Prompts | None = None,
    seed: int = 0,
) -> tuple[Plan, Replacement]:
    """Resolve pairs of prompts, metrics, a direction, and the replacements of senders' outputs."""
    checked_name("direction", direction, DIRECTIONS)
    pair, metrics = PromptPair(*read_pairs(model, clean, corrupted), direction), as_metrics(metric)
    if elsewhere := [one.name for one in metrics if one.site != LOGITS]:
        raise InputError(
            f"The metric {elsewhere[0]!r} reads the residual stream; edges and circuits are measured at the logits."
        )
    refuse_columns_as_answers(clean, metrics)
    plan = Plan(model, pair, CellTable.unedited(len(pair.base)), metrics, batch_size=batch_size)
    source = build_replacement(model, values, dataset, pair, (), seed)
    refuse_other_kinds(source)
    return plan, source


def options_of(plan: Plan, source: Replacement) -> dict[str, object]:
    """Return the options of the pairs that determine a result."""
    inputs = source.inputs
    named: dict[str, Any] = {"direction": "noise" if plan.pair.base_is_clean else "denoise"}
    if inputs.kind != OTHER_RUN:
        named |= {"values": inputs.kind, "mean_over": source.mean_over, "seed": inputs.seed}
    pool = [] if inputs.dataset is None else [inputs.dataset]
    return named | prompt_options(plan.pair.clean, plan.pair.corrupted, *pool) | {"metrics": plan.metric_options}


class Pairs:
    """The two runs of one pair after the other; `sloped` if gradients in the base runs will be taken."""

    def __init__(self, plan: Plan, graph: Graph, source: Replacement, fingerprint: str | None, sloped: bool = False):
        self._sloped = sloped
        self.weights = LoadedWeights(plan.model, fingerprint)
        self._exchanged = None if source.takes_other_run else Exchanged(plan.model, graph, source, self.weights)
        self.plan, self.graph = plan, graph
        self._runs: BothRuns | None = None

    def runs(self, example: int) -> BothRuns:
        """Return the two runs of a pair; they are reused if it is the last pair, otherwise computed."""
        if self._runs is None or self._runs.example != example:
            # Freed before the next pair's runs are computed: both at once would take twice the memory.
            self._runs = None
            self._runs = BothRuns(self.plan, self.graph, example, self.weights, self._exchanged, self._sloped)
        return self._runs

    def baselines(self, run: Run, recomputed: bool = True) -> Float[Tensor, "example metric 3"]:
        """Return for each pair the metrics of its clean and corrupted run, and the metrics' rounding error (floor).

        The floor is the precision of the metrics; with `recomputed`, at least the error of rows without a change.
        """
        examples = range(len(self.plan.pair.base))
        pieces = run.pieces("baselines", examples, partial(self._baselines, recomputed=recomputed))
        return torch.stack([piece["baselines"] for piece in pieces])

    def _baselines(self, example: int, recomputed: bool) -> dict[str, Tensor]:
        with torch.no_grad(), self.plan.model.lock:
            runs = self.runs(example)
            exact = Exact(runs, Place(runs.start))
            refuse_heads_that_meet(exact.rows)
            unedited = runs.wave.readout.unedited(range(example, example + 1))
            base, other = unedited.unedited[0], unedited.other[0]
            # At least the metrics' own precision, because rows without a change may agree by chance.
            floor = torch.finfo(self.plan.model.dtype).eps * torch.maximum(base.abs(), other.nan_to_num().abs())
            if recomputed:
                floor = torch.maximum(exact.rounding(), floor)
            clean, corrupted = (base, other) if self.plan.pair.base_is_clean else (other, base)
        return {"baselines": torch.stack([clean, corrupted, floor], -1)}
