"""The result of `hw.edges`: effects and estimates of edges by example and metric, and the methods that summarize them.

The numbers are stored in tensors, one column per edge; tables are computed on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headwater.circuits.circuit import Circuit, circuit_from_edges, strength_order
from headwater.circuits.graph import RECEIVERS, Graph, present
from headwater.errors import InputError
from headwater.kernels.devices import refuse_too_large
from headwater.options import checked_count, checked_name, checked_repeats
from headwater.patching.edits import Indices
from headwater.patching.summaries import edited_run, refuse_other_run, summarize
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, table_html, whole_summary
from headwater.stats.claims import means_of
from headwater.stats.discrimination import pearson, spearman
from headwater.stats.significance import most_of_a_share, q_values, sign_flip_p_values

Numbers = NDArray[np.float64]


def beside_baselines(
    effect: Float[np.ndarray, " row"], baselines: Float[np.ndarray, "row 3"], direction: str
) -> dict[str, Any]:
    """Return the columns after `effect`: the effect relative to the gap of the two runs (NaN if 0), and baselines."""
    clean, corrupted, floor = baselines.T
    gap = clean - corrupted if direction == "denoise" else corrupted - clean
    normalized = np.divide(effect, gap, out=np.full_like(effect, np.nan), where=np.abs(gap) > 1e-9)
    return {"normalized_effect": normalized, "clean": clean, "corrupted": corrupted, "floor": floor}


def q_of_all(effects: Float[np.ndarray, "example cell"]) -> Float[np.ndarray, " cell"]:
    """Return the q-value of each cell's mean over examples (sign-flip p, Benjamini and Hochberg over all cells).

    A cell without any number was left out because its estimate is small: it counts as a hypothesis with p = 1.
    """
    known = ~np.isnan(effects)
    p_values = np.where(known.any(0) | (len(effects) < 2), np.nan, 1.0)
    # Cells with numbers for the same examples together.
    patterns, which = np.unique(known, axis=1, return_inverse=True)
    for number, examples in enumerate(patterns.T):
        mine = which.reshape(-1) == number
        if examples.any():
            p_values[mine] = sign_flip_p_values(effects[examples][:, mine])
    return q_values(p_values)


GLANCE = 20
"""Number of edges in a summary."""
ROW_BYTES = 260
"""Bytes per row of the table."""
TOP = 50
RankName: TypeAlias = Literal["size", "signed"]


@dataclass(frozen=True, repr=False, eq=False)
class EdgeEffects(Result):
    """The result of `hw.edges`."""

    returned_by = "hw.edges(...)"

    run: RunRecord
    effects: Float[Tensor, "example position edge metric"]
    """Exact effects; NaN where not computed. A single position if all positions were changed together."""
    estimates: Float[Tensor, "example position edge metric"]
    """The method's estimates; NaN where it gives none."""
    baselines: Float[Tensor, "example metric 3"]
    """The metric of the clean run, of the corrupted run, and its rounding error."""
    chosen: Int[Tensor, " edge"]
    """Indices of these edges in `graph`, ascending."""
    sampled: Bool[Tensor, " edge"]
    """Which edges were recomputed because they were drawn at random, and not for their rank."""
    metrics: tuple[str, ...]
    """The names of the metrics."""
    sizes: tuple[int, ...]
    """Number of layers, query heads, key-value heads, and 1 if blocks are parallel."""
    by_position: tuple[int, ...]
    """The positions at which outputs were replaced separately; empty if they were replaced together."""
    roles: tuple[str, ...] = ()
    """The names of the roles, if outputs were replaced by role."""

    @cached_property
    def graph(self) -> Graph:
        """The graph whose edges these are."""
        return Graph.of_sizes(self.sizes)

    @cached_property
    def table(self) -> pd.DataFrame:  # type: ignore[override]
        """A row per example, edge and metric, and per position if these were separate.

        Its columns: `example, sender, sender_layer, sender_head, receiver, receiver_layer, receiver_head, position,
        metric, effect, estimate, normalized_effect, clean, corrupted, floor`. With roles, `role` replaces `position`.
        `receiver_head` counts key-value heads for k and v; numbers that do not apply are `<NA>`. `normalized_effect` is
        the effect relative to the gap between the two runs, and `floor` the rounding error of the metric.
        """
        numbers = ~(self.effects.isnan() & self.estimates.isnan())
        example, cell, m = (column.numpy() for column in numbers.flatten(1, 2).nonzero().T)
        what = f"The table of {len(cell):,} edges, examples and metrics"
        advice = "Use .top(n), or the tensors .effects and .estimates."
        refuse_too_large(what, len(cell) * ROW_BYTES, torch.device("cpu"), advice)
        effect, estimate = (self._flat(name)[example, cell, m] for name in ("effects", "estimates"))
        columns: dict[str, Any] = {"example": example, **self._named(cell)}
        columns |= {"metric": np.array(self.metrics, dtype=object)[m], "effect": effect, "estimate": estimate}
        direction = str(self.run.options["direction"])
        return pd.DataFrame(columns | beside_baselines(effect, self.baselines.numpy()[example, m], direction))

    def top(self, n: int = GLANCE, *, metric: str | None = None) -> pd.DataFrame:
        """Return the n edges with the largest absolute mean effect (or estimate) on a metric (default: the first).

        A row per edge, the largest first: the columns of the table that name it, `edge` (its name), and the means of
        `effect` and `estimate` over examples.
        """
        m, cells = self._metric(metric), checked_count("n", n)
        order = self._ranked(m)[:cells]
        effect, estimate = (self._means[name][order, m] for name in ("effects", "estimates"))
        names = [self.graph.name(int(edge)) for edge in self._edges(order)]
        return pd.DataFrame(self._named(order) | {"edge": names, "effect": effect, "estimate": estimate})

    def summary(self) -> pd.DataFrame:
        """Summarize the 20 largest edges of each metric over examples: mean, bootstrap interval, sign-flip p of 0.

        A row per metric and edge, the largest first: the columns that name it, `examples, mean, low, high, p_value,
        q_value`. Effects are averaged, or estimates if the method has no effects; one example has no interval or p.
        `q_value` is adjusted for all edges of the metric, and not for these 20 (Benjamini and Hochberg); edges that a
        screened run did not recompute count with p = 1.
        """
        parts, q, values = [], [], self._values
        for m, metric in enumerate(self.metrics):
            order = self._ranked(m)[:GLANCE]
            q.append(q_of_all(values[..., m])[order])
            cells = np.repeat(order, len(values))
            named = self._named(cells) | {"metric": metric, "value": values[:, order, m].T.flatten()}
            parts.append(pd.DataFrame(named))
        table = pd.concat(parts, ignore_index=True)
        found = summarize(table, [name for name in table.columns if name != "value"], "value")
        return found.assign(q_value=np.concatenate(q))

    def report(self) -> list[str]:
        """Return the strongest edge of each metric, how many exceed rounding, and what the method leaves open."""
        sentences, summary = [], whole_summary(self)
        what = "effect" if self.is_exact else "estimate"
        for m, metric in enumerate(self.metrics):
            means = self._means[self._measured][:, m]
            floor = float(self.baselines[:, m, 2].mean())
            row = summary[summary["metric"] == metric].iloc[0]
            edge = self.graph.name(int(self._edges(self._ranked(m)[:1])[0]))
            n, beyond = int(row["examples"]), int((np.abs(np.nan_to_num(means)) > floor).sum())
            sentence = (
                f"Of {int((~np.isnan(means)).sum()):,} edges, {edge} has the largest {what} on {metric}: "
                f"{interval_text(row, 'mean')}, over {n} pair{'s' * (n != 1)}; "
                f"{beyond:,} exceed the rounding error ({floor:.1e})."
            )
            sentences.append(sentence.replace("_", " "))
            sentences += self._sentences_on_the_rest(m, metric)
        if not self.is_exact:
            sentences.append(f"These are estimates ({self.method}), not runs with the edge changed.")
        sentences += edited_run(self.run.options)
        sentences.append("Edges in series count the same path more than once, so effects do not add up to the total.")
        return sentences

    def circuit(self, n: int, *, by: RankName = "size", metric: str | None = None) -> Circuit:
        """Return the circuit of the strongest edges, by their means over examples.

        Args:
            n: number of edges.
            by: `size` takes the largest absolute means, also of edges that work against the answer; `signed` takes the
                edges that move the metric most toward its clean value (without them it moves to the corrupted value).
            metric: name of the metric; default: the first.

        Returns:
            The circuit. It stores the prompts on which it was chosen, so that a claim can tell them from held-out
            prompts. Edges that a screened run did not recompute are ranked by their estimates.
        """
        m = self._metric(metric)
        if self.by_position or {"positions", "through"} & set(self.run.options):
            raise InputError(
                "Edges of single positions, or through MLPs, form no circuit; run hw.edges without over='position', "
                "positions= or through='mlps'."
            )
        n = checked_count("n", n, most=len(self.chosen))
        effects, estimates = (self._means[name][:, m] for name in ("effects", "estimates"))
        means = np.where(np.isnan(effects), estimates, effects)
        for_the_answer = means if self.run.options["direction"] == "denoise" else -means
        if by == "signed":
            gap = float((self.baselines[:, m, 0] - self.baselines[:, m, 1]).mean())
            for_the_answer = for_the_answer * (-1.0 if gap < 0 else 1.0)
        order = np.argsort(-(np.abs(means) if by == "size" else for_the_answer), kind="stable")[:n]
        edges = self.chosen.numpy()[order]
        seen = tuple(tuple(ids) for ids in (self.run.options.get("prompts") or [[]])[0])
        return circuit_from_edges(self.graph, edges, means[order], seen, self.run.model)

    def agreement(self, exact: EdgeEffects) -> pd.DataFrame:
        """Compare these estimates (effects if `method="exact"`) with exact effects, edge by edge: means over examples.

        A row per metric and kind of receiver, and one for all: `metric, receiver, edges, pearson, spearman,
        sign_agreement` (where the exact effect exceeds 1 % of the largest), `top_overlap` (of the 50 largest).
        """
        if not exact.is_exact:
            raise InputError(f"exact= has only estimates ({exact.method}): give a result of method='exact'.")
        same = torch.equal(self.chosen, exact.chosen) and self.by_position == exact.by_position
        if not same or self.metrics != exact.metrics or self.sizes != exact.sizes:
            raise InputError("The two do not have the same edges and metrics: run both with the same options.")
        refuse_other_run("exact", exact.run, self.run, "direction", "through", "positions", "values")
        ours = self._flat("effects" if self.method == "exact" else "estimates")
        theirs = exact._flat("effects")
        shared = ours + theirs  # NaN where one is missing
        ours, theirs = (means_of(np.where(np.isnan(shared), np.nan, values)) for values in (ours, theirs))
        kinds = self.graph.receivers.kind[self.graph.receiver[self._edges(np.arange(len(ours)))]]
        rows = []
        for m, metric in enumerate(self.metrics):
            for number, kind in [(None, "all"), *enumerate(RECEIVERS)]:
                mine = slice(None) if number is None else kinds == number
                rows.append([metric, kind, *_compared(ours[mine, m], theirs[mine, m])])
        named = ["metric", "receiver", "edges", "pearson", "spearman", "sign_agreement", "top_overlap"]
        table = pd.DataFrame(rows, columns=named)
        return table[table["edges"] > 0].reset_index(drop=True)

    def stability(self, splits: int = 100, *, n: int = TOP, seed: int = 0) -> pd.DataFrame:
        """Compare the means of random halves of the examples, over several splits.

        A row per metric: `metric, examples, overlap` (mean over splits of the overlap of the n largest edges of two
        halves), `low, high` (2.5th and 97.5th percentile of the overlap over splits), `spearman` (of sizes).
        """
        splits, n, values = checked_repeats("splits", splits), checked_count("n", n), self._values
        if len(values) < 2:
            raise InputError("Halves need at least two examples: give several pairs of prompts.")
        generator = np.random.default_rng(seed)
        rows = []
        for m, metric in enumerate(self.metrics):
            overlaps, ranks = [], []
            for _ in range(splits):
                order = generator.permutation(len(values))
                a, b = (means_of(values[half])[:, m] for half in np.array_split(order, 2))
                overlaps.append(_overlap(a, b, n))
                ranks.append(float(spearman(np.abs(a), np.abs(b))))
            low, high = np.percentile(overlaps, [2.5, 97.5])
            rows.append([metric, len(values), float(np.mean(overlaps)), low, high, float(np.mean(ranks))])
        return pd.DataFrame(rows, columns=["metric", "examples", "overlap", "low", "high", "spearman"])

    @property
    def method(self) -> str:
        """Name of the method that computed the numbers."""
        return str(self.run.options["method"])

    @property
    def is_exact(self) -> bool:
        """Whether the method gives exact effects, and not only estimates."""
        return self.method in ("exact", "screened")

    def matrix(self, metric: str | None = None) -> Float[np.ndarray, "receiver sender"]:
        """Return the mean over examples by receiver and sender; NaN without an edge or a number.

        Separate positions are summed.
        """
        means = self._means[self._measured][:, self._metric(metric)].reshape(-1, len(self.chosen))
        summed = np.where(np.isnan(means).all(0), np.nan, np.nansum(means, 0))
        found = np.full((len(self.graph.receivers), len(self.graph.senders)), np.nan)
        edges = self.chosen.numpy()
        found[self.graph.receiver[edges], self.graph.sender[edges]] = summed
        return found

    def __repr__(self) -> str:
        n_edges, n_examples = len(self.chosen), len(self.baselines)
        pairs = f"{n_examples:,} pair{'s' * (n_examples != 1)}"
        return f"EdgeEffects({self.run.model}: {n_edges:,} edges, {pairs}, {self.method})"

    def _repr_html_(self) -> str:
        return table_html(self, self.top(8))

    def _metric(self, name: str | None) -> int:
        return 0 if name is None else self.metrics.index(checked_name("metric", name, self.metrics))

    def _flat(self, name: str) -> Numbers:
        """Return effects or estimates, `example cell metric`; a cell is an edge (at one position, if separate)."""
        values: Tensor = getattr(self, name)
        return values.flatten(1, 2).double().numpy()

    @cached_property
    def _means(self) -> dict[str, Numbers]:
        """The means of effects and of estimates over examples, `cell metric`."""
        return {name: means_of(self._flat(name)) for name in ("effects", "estimates")}

    @property
    def _measured(self) -> str:
        """Which numbers are ranked and summarized: effects, or estimates if the method gives no effects."""
        return "effects" if self.is_exact else "estimates"

    @property
    def _values(self) -> Numbers:
        return self._flat(self._measured)

    def _ranked(self, m: int) -> Indices:
        """Return the cells that have a number, the largest absolute mean first."""
        means = self._means[self._measured][:, m]
        order = strength_order(means)
        return order[~np.isnan(means[order])]

    def _edges(self, cells: Indices) -> Indices:
        """Return the edges of cells, as indices in the graph."""
        return np.asarray(self.chosen.numpy()[cells % len(self.chosen)])

    def _named(self, cells: Indices) -> dict[str, Any]:
        columns, places = self.graph.columns(self._edges(cells)), cells // len(self.chosen)
        if self.roles:
            return columns | {"role": np.array(self.roles, dtype=object)[places]}
        return columns | {"position": present(np.array(self.by_position or (-1,))[places])}

    def _sentences_on_the_rest(self, m: int, metric: str) -> list[str]:
        """Return, for a screened run, the error of its estimates, and the bound from the random sample of the rest."""
        if self.method != "screened":
            return []
        exact, estimates = (self._means[name][:, m] for name in ("effects", "estimates"))
        means = np.abs(exact)
        sampled = np.tile(self.sampled.numpy(), len(means) // len(self.chosen))
        ranked = np.sort(means[~np.isnan(means) & ~sampled])
        drawn, rest = means[sampled], int(np.isnan(means).sum()) + int(sampled.sum())
        if not len(drawn) or not len(ranked):
            return []
        hits, bar = int((drawn > ranked[0]).sum()), ranked[0]
        most = hits if len(drawn) == rest else int(most_of_a_share(hits, len(drawn)) * rest)
        on_the_rest = (
            f"The {len(ranked):,} edges with the largest estimates on {metric} were computed exactly; their smallest "
            f"effect is {bar:.3g}. Of {len(drawn):,} of the {rest:,} others, drawn at random, {hits} exceed it "
            f"(largest: {drawn.max():.3g}); at 95 % confidence, at most {most / rest:.1%} of the others ({most:,} "
            "edges) do."
        )
        count, _, ranks, _, _ = _compared(estimates, exact)
        best = int(np.nanargmax(np.abs(exact)))
        rank = 1 + int((np.abs(estimates) > abs(estimates[best])).sum())
        wrong = np.sum(np.sign(exact) * np.sign(estimates) < 0, where=np.abs(exact) > 0.01 * np.nanmax(np.abs(exact)))
        edge = self.graph.name(int(self._edges(np.array([best]))[0]))
        on_estimates = (
            f"For {count:,} exact edges, estimates and effects on {metric} have rank correlation {ranks:.2f}; the sign "
            f"is wrong for {int(wrong):,} of the effects above 1 % of the largest. The strongest, {edge}, has effect "
            f"{exact[best]:.3g}; its estimate is {estimates[best]:.3g}, rank {rank:,} of {len(estimates):,}."
        )
        return [sentence.replace("_", " ") for sentence in (on_estimates, on_the_rest)]


def _overlap(a: Numbers, b: Numbers, n: int) -> float:
    """Return the fraction of the n largest in `a` that are also among the n largest in `b`."""
    tops = [set(strength_order(x)[:n].tolist()) for x in (a, b)]
    return len(tops[0] & tops[1]) / max(1, len(tops[0]))


def _compared(ours: Numbers, theirs: Numbers) -> list[object]:
    both = ~np.isnan(ours) & ~np.isnan(theirs)
    ours, theirs = ours[both], theirs[both]
    if not len(ours):
        return [0, np.nan, np.nan, np.nan, np.nan]
    sizeable = np.abs(theirs) > 0.01 * np.abs(theirs).max()
    same = float((np.sign(ours) == np.sign(theirs))[sizeable].mean()) if sizeable.any() else np.nan
    return [len(ours), float(pearson(ours, theirs)), float(spearman(ours, theirs)), same, _overlap(ours, theirs, TOP)]
