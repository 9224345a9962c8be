"""Find a circuit by removing edges one after the other, by their exact effects in the remaining circuit.

The circuits are run as in `hw.run_circuits`, on all pairs, and the mean over pairs decides. If not all edges can be
tried, the search starts from the strongest, as `hw.edges(..., method="screened")` finds them. Each batch of edges is a
stage whose pieces are the pairs: an interrupted search resumes where it stopped, and processes share the pairs.

The order is that of ACDC (Conmy et al. 2023): receivers from the logits down, and for each receiver the last sender
first. An edge is tried in the circuit C that remains when its turn comes:

    effect(e) = m(C - e) - m(C)          e stays out if |effect| < threshold (or: if the answer loses less than that)

so that each effect includes all earlier decisions. An edge into a receiver from which no edge of C leads to the logits
changes nothing: it is removed without a run. C starts with all edges, or with those that are given.

Many edges are tried in one batch: each in the circuit that remains if all guesses before it are right, where the guess
is that an edge is removed, as most are, unless an earlier batch says that it stays. The batch decides the edges up to
the first wrong guess; its later runs were made in another circuit, and only provide guesses for the next batch. So each
decision is the same as if single edges were tried one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int8
from torch import Tensor

from headwater.calls import checked_call
from headwater.circuits.circuit import Circuit, checked_circuits, circuit_from_edges, graph_of
from headwater.circuits.circuit_runs import MOST_PLACEBOS, beside_placebos, measured, summarized
from headwater.circuits.circuit_walk import CircuitRunner, pairs_to_keep
from headwater.circuits.edge_effects import edges as effects_of_edges
from headwater.circuits.graph import Graph
from headwater.circuits.pairs import Pairs
from headwater.circuits.result import RankName
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.options import checked_count, checked_number
from headwater.patching.edits import Indices
from headwater.patching.metrics import Metric
from headwater.patching.prompts import Prompts
from headwater.patching.sweep import say_how_long
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, table_html, whole_summary

DECISIONS = ("kept", "removed", "leads nowhere", "not tried", "left out")
KEPT, REMOVED, NOWHERE, NOT_TRIED, LEFT_OUT = range(5)
FIRST, LEAST, MOST = 8, 4, 128
"""Number of edges in the first batch, and the limits for any batch."""


@dataclass(frozen=True)
class Decisions:
    """The outcome of a search, by edge."""

    decision: Int8[np.ndarray, " edge"]
    """Indices into `DECISIONS`."""
    effect: Float[np.ndarray, " edge"]
    value: Float[np.ndarray, " edge"]
    """The metric after the decision."""
    runs: int
    """Number of circuits that were run, including those that only provided guesses."""

    @property
    def inside(self) -> Indices:
        """The remaining edges, ascending."""
        return np.flatnonzero(np.isin(self.decision, (KEPT, NOT_TRIED)))


def decide_edges(
    graph: Graph,
    evaluate: Callable[[Sequence[Indices]], Float[np.ndarray, " circuit"]],
    threshold: float,
    sign: int = 0,
    budget: int | None = None,
    together: bool = False,
    start: Indices | None = None,
    report: Callable[[int], object] = lambda number: None,
) -> Decisions:
    """Try all edges, or those of `start`, or as many as the budget allows.

    `evaluate` returns the metric of circuits, given as ascending edge indices. An edge stays out if its effect is below
    `threshold`; with `sign` 1 or -1 only a loss (a fall or a rise of the metric) counts, with 0 any change. `together`:
    each receiver drives all heads of its layer, see `headwater.circuits.graph`. `report` takes the number of edges that
    are decided.
    """
    start = np.arange(graph.n_edges) if start is None else start
    decision = np.where(np.isin(np.arange(graph.n_edges), start), NOT_TRIED, LEFT_OUT).astype(np.int8)
    effect, values = np.full((2, graph.n_edges), np.nan)
    # Edges are numbered by receiver, then sender, so descending order is ACDC's order.
    order, decided, tried, runs, width = start[::-1].tolist(), 0, 0, 1, FIRST
    stays_as_guessed = np.zeros(graph.n_edges, dtype=bool)
    now = float(evaluate([start])[0])
    while decided < len(order):
        # As guessed: the circuit, and the senders with an edge that stays. All edges out of a node come before those
        # into it.
        inside, reaches_output = np.isin(decision, (KEPT, NOT_TRIED)), np.zeros(len(graph.senders), dtype=bool)
        reaches_output[graph.sender[decision == KEPT]] = True
        batch, trials, leads_by_receiver = list[tuple[int, bool]](), list[Indices](), dict[int, bool]()
        most = width if budget is None else min(width, budget - tried)
        for edge in order[decided:]:
            if (receiver := int(graph.receiver[edge])) not in leads_by_receiver:
                driven = graph.driven(receiver, together)
                # The logits are the target; they drive no sender.
                leads_by_receiver[receiver] = not len(driven) or bool(reaches_output[driven].any())
            leads = leads_by_receiver[receiver]
            # An edge that leads nowhere needs no run, so those at the end of a batch are included.
            if leads and len(trials) == most:
                break
            batch.append((edge, leads))
            inside[edge] = False
            if leads:
                trials.append(np.flatnonzero(inside))
                inside[edge] = stays_as_guessed[edge]
                reaches_output[graph.sender[edge]] |= inside[edge]
        if not batch:  # the budget is spent
            break
        results = iter(evaluate(trials).tolist() if trials else ())
        is_right, tried_before, value_before = True, tried, now
        for edge, leads in batch:
            value = next(results) if leads else value_before
            change = value - value_before
            loss = -sign * change if sign else abs(change)
            # Written so that an edge whose effect is NaN stays, too.
            stays, guess = leads and not loss < threshold, leads and bool(stays_as_guessed[edge])
            if is_right:
                now = value if leads and not stays else now
                decision[edge] = KEPT if stays else REMOVED if leads else NOWHERE
                effect[edge], values[edge], decided, tried = change, now, decided + 1, tried + leads
            is_right = is_right and stays == guess
            if leads:
                # Also after a wrong guess, because an effect measured in another circuit still predicts the decision.
                stays_as_guessed[edge] = stays
            # The next trial was made in the circuit of this guess.
            value_before = value_before if guess else value
        # Twice the number decided: right guesses make larger batches, wrong guesses smaller ones.
        runs, width = runs + len(trials), min(MOST, max(LEAST, 2 * (tried - tried_before)))
        report(decided)
    return Decisions(decision, effect, values, runs)


FOUND = "found"
"""Name of the circuit among its placebos."""
ENOUGH = 0.5
"""Below this faithfulness the result is not a circuit."""
WALKS = 256
"""Runs are kept between batches for at most this many pairs; those of other pairs are recomputed."""


@dataclass(frozen=True, repr=False, eq=False)
class CircuitSearch(Result):
    """The result of `hw.find_circuit`; `plot` draws the metric of the circuit by its number of edges."""

    table: pd.DataFrame
    """A row per edge, in the order in which they were tried: `edge` (its name), `sender, sender_layer, sender_head,
    receiver, receiver_layer, receiver_head`; `decision`: `kept`, `removed`, `leads nowhere` (removed without a run),
    `not tried` (the budget was spent: it stays in), or `left out` (not in the circuit at the start); `effect`, the mean
    over pairs of the remaining circuit's metric without this edge minus the metric with it; `value`, the metric after
    the decision."""
    run: RunRecord
    alone: pd.DataFrame
    """The remaining circuit and its placebos on each pair: the table of `hw.run_circuits`."""
    shapes: pd.DataFrame
    """A row per circuit and placebo: `circuit, placebo, overlap` (fraction of the circuit's edges in the placebo)."""
    sizes: tuple[int, ...]
    """Number of layers, query heads, key-value heads, and 1 if blocks are parallel."""
    runs: int
    """Number of circuits that the search ran on each pair."""

    @property
    def circuit(self) -> Circuit:
        """The remaining edges, with the effects that decided them and the prompts of the search."""
        graph = Graph.of_sizes(self.sizes)
        in_order = self.table.iloc[::-1]  # edges are tried from the last to the first
        left = np.flatnonzero(in_order["decision"].isin([DECISIONS[KEPT], DECISIONS[NOT_TRIED]]).to_numpy())
        seen = tuple(tuple(ids) for ids in self.run.options["prompts"][0])
        return circuit_from_edges(graph, left, in_order["effect"].to_numpy()[left], seen, self.run.model)

    def summary(self) -> pd.DataFrame:
        """Summarize the search in one row.

        It has the columns of `CircuitRuns.summary` for the remaining circuit, on the pairs of the search; the number of
        edges that were `removed`, led `nowhere`, were `not_tried` or were `left_out`; and `runs`.
        """
        found = summarized(self.alone, self.shapes)
        counts = self.table["decision"].value_counts()
        removed, nowhere, left, out = (int(counts.get(name, 0)) for name in DECISIONS[1:])
        return found.assign(removed=removed, nowhere=nowhere, not_tried=left, left_out=out, runs=self.runs)

    @property
    def faithfulness_at_first(self) -> float:
        """Faithfulness of the circuit from which the search started."""
        first = self.table[self.table["decision"].isin([DECISIONS[d] for d in (KEPT, REMOVED, NOWHERE)])].iloc[0]
        value = first["value"] - (first["effect"] if first["decision"] == DECISIONS[REMOVED] else 0.0)
        clean, corrupted = self.alone[self.alone["placebo"].isna()][["clean", "corrupted"]].mean()
        return float((value - corrupted) / (clean - corrupted)) if clean != corrupted else np.nan

    def report(self) -> list[str]:
        """Return what remains, its faithfulness beside random circuits, and what was not tried."""
        row, options = whole_summary(self).to_dict("records")[0], self.run.options
        metric, n = str(row["metric"]).replace("_", " "), len(self.table)
        change = "cost the answer" if options["by"] == "signed" else "made a difference of"
        faithfulness = interval_text(row, "faithfulness")
        sentences = []
        if row["not_tried"]:
            sentences.append(
                f"This is not a circuit yet: {row['not_tried']:,} of {n:,} edges were not tried, because the budget of "
                f"{options['budget']:,} was spent, and stay in. Give a larger budget=, or a smaller start=: "
                "hw.edges(...).circuit(n)."
            )
        if row["left_out"]:
            which = "given" if options["start"] else "strongest in the whole model, screened by hw.edges"
            sentences.append(
                f"The search started from {n - row['left_out']:,} edges ({which}), with faithfulness "
                f"{self.faithfulness_at_first:.2f}; the other {row['left_out']:,} were left out from the start."
            )
        sentences += [
            f"{row['edges']:,} of {n:,} edges are left ({row['edges_on_a_path']:,} on a path), those whose removal, "
            f"when they were tried, {change} {options['threshold']:g} of {metric} or more. {row['removed']:,} were "
            f"removed and {row['nowhere']:,} led nowhere (on no path), in {row['runs']:,} runs of a pair.",
            f"The circuit alone has faithfulness {faithfulness} over {row['examples']} "
            f"pair{'s' * (row['examples'] != 1)}{beside_placebos(row)}.",
        ]
        if not row["faithfulness"] >= ENOUGH:
            advice = "a smaller threshold= or a larger budget=" if row["left_out"] else "a smaller threshold="
            sentences.append(f"This is not a circuit: it has less than half of the effect of all edges. Give {advice}.")
        sentences.append(
            "Another order of edges leaves another circuit. This one was chosen on these pairs: test it on others with "
            "Circuit.claim."
        )
        return sentences

    def __repr__(self) -> str:
        left, untried = len(self.circuit), int((self.table["decision"] == DECISIONS[NOT_TRIED]).sum())
        rest = f", {untried:,} not tried" if untried else ""
        return f"CircuitSearch({self.run.model}: {left:,} of {len(self.table):,} edges left{rest}, {self.runs:,} runs)"

    def _repr_html_(self) -> str:
        kept = self.table[self.table["decision"] == DECISIONS[KEPT]]
        return table_html(self, kept.iloc[np.argsort(-kept["effect"].abs().to_numpy(), kind="stable")])


@checked_call
def find_circuit(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    *,
    metric: Metric | Any,
    threshold: float | int,
    by: RankName = "size",
    budget: int | None = None,
    start: Circuit | None = None,
    values: Any = "other run",
    dataset: Prompts | None = None,
    placebos: int = 10,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> CircuitSearch:
    """Find a circuit greedily, by exact effects: an edge stays out if little is lost without it.

        hw.find_circuit(model, "The capital of France is", "The capital of Italy is",
                        metric=hw.logit_difference(" Paris", " Rome"), threshold=0.05, by="signed")  # 0.05 logits

    Receivers are taken from the logits down, as in ACDC (Conmy et al. 2023); the effect of an edge e is m(C - e) -
    m(C), with C the circuit that remains when e is tried.

    Args:
        model: the model; it is not changed.
        clean: one prompt, several, token ids, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        metric: one of `hw.logit_difference(...)` and its relatives, or a function; see `hw.run_circuits`.
        threshold: an edge stays out if the mean of the metric over pairs changes by less than this.
        by: with `size` any change counts; with `signed` only a loss of the answer, so edges against it are removed.
        budget: largest number of edges to try, each with one run of every pair; edges that lead nowhere do not count.
            If there are more edges, the search starts from this many of the strongest, which `method="screened"` of
            `hw.edges` finds at about the same cost, and leaves out the others. Default: no limit.
        start: the circuit to start from; all other edges are left out. Edges of it that a budget leaves untried stay
            in.
        values: what removed edges carry; see `hw.run_circuits`.
        dataset: the prompts for `mean` and `resample`.
        placebos: number of random circuits of the same shape to run beside the result.
        seed: seed of the random circuits and of `resample`.
        batch_size: number of circuits per batch.
    """
    graph = graph_of(model)
    threshold = checked_number("threshold", threshold, above=0.0)
    budget = None if budget is None else checked_count("budget", budget)
    placebos = checked_count("placebos", placebos, least=0, most=MOST_PLACEBOS)
    pairs = Pairs(
        model, clean, corrupted, metric, values=values, dataset=dataset, seed=seed, batch_size=batch_size,
        pair_with_donors=True,
    )  # fmt: skip
    if len(pairs.metrics) > 1:
        raise InputError(f"One metric decides which edges stay; {len(pairs.metrics)} were given.")
    tries = graph.n_edges if budget is None else min(budget, graph.n_edges)
    begun = None if start is None else next(iter(checked_circuits(start, graph).values()))
    if begun is not None and not len(begun):
        raise InputError("start= has no edges: there is nothing to search.")
    screens = begun is None and tries < graph.n_edges
    # Reported before the screen, which costs as much as a search.
    what = f"{tries:,} edges, each tried on {len(pairs):,} pairs,"
    advice = "A smaller budget= or fewer pairs take less time."
    say_how_long(model, what, tries * pairs.tokens.sum(), advice, progress=progress)
    options = {"threshold": threshold, "by": by, "budget": budget, "placebos": placebos, **pairs.options}
    options |= {"discovery": {FOUND: []}, "start": None if begun is None else digest(begun.names)}

    def strongest(_: object) -> dict[str, Tensor]:
        asked = {"metric": metric, "values": values, "dataset": dataset, "seed": seed, "batch_size": batch_size}
        found = effects_of_edges(model, clean, corrupted, **asked, method="screened", verify=tries, progress=progress)
        return {"edges": torch.from_numpy(found.circuit(tries, by=by).edges)}

    def work(run: Run) -> CircuitSearch:
        first = None if begun is None else begun.edges
        if screens:
            first = next(iter(run.pieces("start", [0], strongest)))["edges"].numpy()
        done = searched(pairs, run, first)
        # Rows in the order in which edges were tried.
        order = np.arange(graph.n_edges)[::-1]
        table = pd.DataFrame({"edge": graph.names(order)} | graph.columns(order))
        table["decision"] = np.array(DECISIONS, dtype=object)[done.decision[order]]
        table["effect"], table["value"] = done.effect[order], done.value[order]
        found = {FOUND: circuit_from_edges(graph, done.inside)}
        alone, shapes = measured(pairs, found, placebos, run.part("alone"))
        return CircuitSearch(table, run.record, alone, shapes, graph.sizes, done.runs)

    return run_or_resume(CircuitSearch, "find_circuit", model, options, work, out=out, seed=seed, progress=progress)


def searched(pairs: Pairs, run: Run, start: Indices | None = None) -> Decisions:
    """Search with the options in the record of a run, from all edges or from some."""
    options, graph, steps = run.record.options, pairs.graph, count()
    runner = CircuitRunner(pairs, run.record.fingerprint, pairs_to_keep(pairs, WALKS))

    def means(stage: str, circuits: Sequence[Indices], name: str) -> Tensor:
        pieces = run.pieces(stage, range(len(pairs)), partial(runner.measure, circuits=circuits))
        return torch.stack([piece[name] for piece in pieces]).mean(0)

    def evaluate(circuits: Sequence[Indices]) -> Any:
        return means(f"batch-{next(steps)}", circuits, "values")[:, 0].numpy()

    clean, corrupted, _ = means("baselines", (), "baselines")[0].tolist()
    # The direction of a loss: a metric may be larger in the corrupted run.
    sign = (1 if clean >= corrupted else -1) if options["by"] == "signed" else 0
    together = any(shares.norm is not None for shares in pairs.shares)
    with run.bar("edges decided", "edge", graph.n_edges if start is None else len(start)) as bar:
        return decide_edges(
            graph,
            evaluate,
            threshold=float(options["threshold"]),
            sign=sign,
            budget=options["budget"],
            together=together,
            start=start,
            report=lambda number: bar.update(number - bar.n),
        )
