"""Greedy search for a circuit: edges are taken out one after the other, and stay out where little is lost.

The order is that of ACDC (Conmy et al. 2023): receivers from the logits down, of each receiver the last sender first.
An edge is tried in the circuit C that is left when its turn comes:

    effect(e) = m(C - e) - m(C)          e stays out if |effect| < threshold (or: if the answer loses less than that)

so that what was decided before is in every later effect. An edge into a receiver from which no edge of C leads to the
logits changes nothing: it goes without a run. C is all edges at first, or those that are given.

Many edges are tried in one batch: those that come next, each in the circuit that is left if all before it turn out as
guessed. What is measured decides them one by one up to the first wrong guess, whose own run was the right one; the
later runs of the batch were made in another circuit, and only say what to guess next time. So each decision is the one
that trying a single edge at a time would make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int8

from headwater.circuits.graph import Graph, Indices
from headwater.circuits.reach import driven

DECISIONS = ("kept", "removed", "leads nowhere", "not tried", "left out")
KEPT, REMOVED, NOWHERE, NOT_TRIED, LEFT_OUT = range(5)
FIRST, LEAST, MOST = 8, 4, 128
"""How many edges are tried in the first batch, and in any."""
Evaluate = Callable[[Sequence[Indices]], Float[np.ndarray, " circuit"]]
"""Returns the metric of circuits, given as edges, ascending."""


@dataclass(frozen=True)
class Rule:
    """When an edge stays out."""

    threshold: float
    """In units of the metric."""
    sign: int = 0
    """1 or -1 where only a loss counts: a fall or a rise of the metric; 0 where any change does."""
    budget: int | None = None
    """How many edges are tried with a run at most; the others stay in."""
    together: bool = False
    """Whether what one head of a layer reads comes out at all of them; see `headwater.circuits.reach`."""

    def drops(self, effect: float) -> bool:
        """Whether an edge of this effect stays out."""
        return (-self.sign * effect if self.sign else abs(effect)) < self.threshold


@dataclass(frozen=True, eq=False)
class Trace:
    """What a search did, by edge."""

    decision: Int8[np.ndarray, " edge"]
    """Which of `DECISIONS`."""
    effect: Float[np.ndarray, " edge"]
    """The effect that decided it; NaN where none was measured, 0 where an edge leads nowhere."""
    value: Float[np.ndarray, " edge"]
    """The metric of the circuit that was left then; NaN where an edge was not tried."""
    runs: int
    """How many circuits were run, the first guesses that came out wrong included."""

    @property
    def inside(self) -> Indices:
        """The edges that are left, ascending."""
        return np.flatnonzero((self.decision == KEPT) | (self.decision == NOT_TRIED))


class _Left:
    """The circuit that is left, and which senders have an edge in it that leads to the logits."""

    def __init__(self, graph: Graph, together: bool, inside: Bool[np.ndarray, " edge"]):
        self.graph, self.together, self.inside = graph, together, inside.copy()
        self.heard: Bool[np.ndarray, " sender"] = np.zeros(len(graph.senders), dtype=bool)

    def copy(self) -> _Left:
        other = _Left(self.graph, self.together, self.inside)
        other.heard[:] = self.heard
        return other

    def leads(self, receiver: int) -> bool:
        """Whether a receiver leads to the logits, all edges out of its node being decided."""
        nodes = self.graph.receivers
        if nodes.kind[receiver] == nodes.kinds.index("logits"):
            return True
        return bool(self.heard[driven(self.graph, receiver, self.together)].any())

    def decide(self, edge: int, stays: bool) -> None:
        """Keep an edge that leads to the logits, or take it out."""
        self.inside[edge] = stays
        self.heard[self.graph.sender[edge]] |= stays

    def without(self, edge: int) -> Indices:
        """Return the edges that are left when one more is taken out."""
        left = self.inside.copy()
        left[edge] = False
        return np.flatnonzero(left)


class Greedy:
    """One search.

    Args:
        graph: whose edges.
        rule: when an edge stays out.
        evaluate: runs circuits.
        decided: is told how many edges are decided.
        start: the edges that it begins from; default: all.
    """

    def __init__(
        self,
        graph: Graph,
        rule: Rule,
        evaluate: Evaluate,
        decided: Callable[[int], object],
        start: Indices | None = None,
    ):
        self.graph, self.rule, self.evaluate, self.decided = graph, rule, evaluate, decided
        self.start = np.arange(graph.n_edges) if start is None else start
        inside = np.isin(np.arange(graph.n_edges), self.start)
        self.left = _Left(graph, rule.together, inside)
        self.guessed_in: Bool[np.ndarray, " edge"] = np.zeros(graph.n_edges, dtype=bool)
        self.decision = np.where(inside, NOT_TRIED, LEFT_OUT).astype(np.int8)
        self.effect, self.value = np.full((2, graph.n_edges), np.nan)
        self.next, self.runs, self.tried = graph.n_edges - 1, 0, 0

    def search(self) -> Trace:
        """Try all edges, or as many as the budget allows."""
        self.now = float(self.evaluate([self.start])[0])
        self.runs, width = 1, FIRST
        while self.next >= 0 and (batch := self._ahead(width)):
            trials = [left for _, left in batch if left is not None]
            values = self.evaluate(trials) if trials else np.zeros(0)
            self.runs += len(trials)
            width = min(MOST, max(LEAST, 2 * self._settle(batch, values)))
            self.decided(self.graph.n_edges - 1 - self.next)
        return Trace(self.decision, self.effect, self.value, self.runs)

    def _ahead(self, width: int) -> list[tuple[int, Indices | None]]:
        """Return the next edges, each with the circuit without it if all guesses are right; None: it leads nowhere."""
        left, found, trials = self.left.copy(), [], 0
        if self.rule.budget is not None:
            width = min(width, self.rule.budget - self.tried)
        leads: dict[int, bool] = {}
        for edge in self.start[self.start <= self.next][::-1].tolist():
            receiver = int(self.graph.receiver[edge])
            if receiver not in leads:
                leads[receiver] = left.leads(receiver)
            if leads[receiver] and trials >= width:
                break
            found.append((edge, left.without(edge) if leads[receiver] else None))
            trials += leads[receiver]
            left.decide(edge, leads[receiver] and bool(self.guessed_in[edge]))
        return found

    def _settle(self, batch: Sequence[tuple[int, Indices | None]], values: Float[np.ndarray, " circuit"]) -> int:
        """Decide edges up to the first wrong guess, and guess those after it; return how many trials decided."""
        number, decided, right, guessed = 0, 0, True, self.now
        for edge, trial in batch:
            if trial is None:
                if right:
                    self._decide(edge, NOWHERE, 0.0)
                continue
            value = float(values[number])
            number, effect, guess = number + 1, value - guessed, bool(self.guessed_in[edge])
            stays = not self.rule.drops(effect)
            if right:
                self.now = self.now if stays else value
                self._decide(edge, KEPT if stays else REMOVED, effect)
                decided += 1
            right, self.guessed_in[edge] = right and stays == guess, stays
            guessed = guessed if guess else value
        self.tried += decided
        return decided

    def _decide(self, edge: int, decision: int, effect: float) -> None:
        self.decision[edge], self.effect[edge], self.value[edge] = decision, effect, self.now
        self.left.decide(edge, decision == KEPT)
        self.next = edge - 1
