"""How many whole runs of the model edges, paths and circuits compute as much as, for `patching.duration`.

An edge counts for half its receiver's layer and those after it, a circuit for all layers. It is half to twice of what
is computed, and more of circuits that leave layers out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headwater.circuits.graph import Graph, Indices
from headwater.models.hooked import HookedModel
from headwater.patching.plan import Plan

LARGE = 1_000_000_000
"""From so many parameters on, edges are screened by default."""


def default_method(model: HookedModel) -> str:
    """Return `exact`, or `screened` for a model of a billion parameters or more."""
    total = sum(parameter.numel() for parameter in model.raw.parameters())
    return "screened" if total >= LARGE else "exact"


def changed_tokens(plan: Plan, since: Callable[[int], int]) -> Indices:
    """Count by pair the tokens that are run: from the first that differs, as `since` says, to the last that is read."""
    return np.array([kept[-1] + 1 - min(since(i), kept[0]) for i, kept in enumerate(plan.positions)])


def runs_of(graph: Graph, stages: Indices) -> float:
    """Return how many whole runs rows are that join at some layers (last: the logits) and run from its middle on."""
    return float(np.maximum(graph.n_layers - 0.5 - stages, 0).sum()) / graph.n_layers


def runs_of_senders(graph: Graph, edges: Indices) -> float:
    """Return how many whole runs are all senders sent through each later layer in which an edge ends."""
    stage, sender = graph.stage[edges], graph.sender[edges]
    return sum(float(sender[stage == layer].max()) + 1 for layer in np.unique(stage) if layer < graph.n_layers) / (
        graph.n_layers
    )
