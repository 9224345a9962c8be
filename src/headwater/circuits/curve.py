"""Faithfulness by size: how few edges reproduce the model, on prompts on which they were not chosen.

Circuits of the strongest edges at several sizes (fractions of all edges) each run alone, beside random circuits of the
same shape. Four numbers summarize a curve f(x), x from the smallest size to the largest (Mueller et al. 2025, MIB):

    cpr         ∫ f dx             how much of the effect the circuits reproduce (rank edges `by="signed"`)
    cmd         ∫ |1 - f| dx       how far they are from the model (rank edges `by="size"`)
    log_area    ∫ f d log x, as a mean over log x
    least_size  the smallest size at which f is 0.9 or more

Areas over x hide small sizes: half of the area is the step from half of the edges to all, and random edges get a CPR of
0.28. So all four numbers are reported together, each with the value of the placebos.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from headwater.calls import checked_call
from headwater.circuits import circuit_runs
from headwater.circuits.circuit import Circuit, circuit_from_edges, graph_of
from headwater.circuits.pairs import Pairs
from headwater.circuits.result import EdgeEffects, RankName
from headwater.errors import InputError, callers_level
from headwater.models.hooked import HookedModel
from headwater.options import (
    checked_count,
    checked_number,
    one_or_several,
    shown,
)
from headwater.patching.metrics import Metric
from headwater.patching.prompts import Prompts
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, table_html
from headwater.stats.claims import PLACEBO_QUANTILE
from headwater.stats.resample import interval

SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
AREAS = ("cpr", "cmd", "log_area", "least_size")
ENOUGH = 0.9
"""The faithfulness that `least_size` requires."""


@dataclass(frozen=True, repr=False, eq=False)
class CircuitCurve(Result):
    """The result of `hw.circuit_curve`."""

    table: pd.DataFrame
    """A row per example, size, circuit or placebo, and metric: the columns of `hw.run_circuits`, and `size`, the
    fraction of all edges."""
    run: RunRecord
    shapes: pd.DataFrame
    """A row per circuit and placebo: `circuit, placebo, overlap` (fraction of the circuit's edges in the placebo)."""

    def summary(self) -> pd.DataFrame:
        """Summarize each size over prompts: a row per size and metric, with `size` and the columns of `CircuitRuns`."""
        found = circuit_runs.summarized(self.table, self.shapes)
        sizes = self.table.drop_duplicates("circuit").set_index("circuit")["size"]
        found.insert(0, "size", found["circuit"].map(sizes))
        return found

    def areas(self) -> pd.DataFrame:
        """Summarize the curve in four numbers, with those of the placebos.

        A row per metric and number: `metric, area` (`cpr`, `cmd`, `log_area`, `least_size`: see the docstring of
        `headwater.circuits.curve`), `value`, `low, high` (bootstrap over prompts), `placebo` (the mean over random
        curves), `placebo_low, placebo_high` (their 5 % and 95 % quantiles). A least size is NaN where f never reaches
        0.9; a placebo that never does counts as needing the whole model.
        """
        rows = []
        for metric, part in self.table.groupby("metric", sort=False):
            sizes, drawn, placebos = _curves(part)
            # Computed for each draw's curve: the least size of a mean curve is not the mean of least sizes.
            of_circuit, random = _areas(sizes, drawn), _areas(sizes, placebos)
            for name in AREAS:
                value, low, high = interval(of_circuit[name])
                # A random curve that never reaches 0.9 needs the whole model.
                of_random = random[name] if name != "least_size" else np.nan_to_num(random[name], nan=1.0)
                chance = [of_random.mean(), *np.quantile(of_random, [0.05, 0.95])] if len(of_random) else [np.nan] * 3
                rows.append([metric, name, value, low, high, *chance])
        columns = ["metric", "area", "value", "low", "high", "placebo", "placebo_low", "placebo_high"]
        return pd.DataFrame(rows, columns=columns)

    def report(self) -> list[str]:
        """Return the four numbers of each metric beside their placebos, and the limits of the result."""
        sentences, by = [], self.run.options["by"]
        words = {"cpr": "CPR, its area over sizes,", "cmd": "CMD, the area of its distance from 1,"}
        words |= {"log_area": "its mean over log size", "least_size": f"the smallest size that reaches {ENOUGH}:"}
        for metric, part in self.areas().groupby("metric", sort=False):
            found = []
            for row in part.to_dict("records"):
                size = interval_text(row, "value", ".3f") if np.isfinite(row["value"]) else "none"
                chance = f" (random circuits: {row['placebo']:.3f})" if np.isfinite(row["placebo"]) else ""
                found.append(f"{words[row['area']]} {size}{chance}")
            sentences.append(f"Edges ranked by {by}, faithfulness on {metric}: {'; '.join(found)}.".replace("_", " "))
        return [*sentences, *circuit_runs.gap_sentences(self.table), *circuit_runs.discovery_sentences(self.run)]

    def _repr_html_(self) -> str:
        return table_html(self, self.summary())


@checked_call
def circuit_curve(
    model: HookedModel,
    edges: EdgeEffects,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None = None,
    *,
    metric: Metric | Any,
    sizes: Sequence[float | int] = SIZES,
    by: RankName = "size",
    values: object = "other run",
    dataset: Prompts | None = None,
    placebos: int = 10,
    seed: int = 0,
    batch_size: int | None = None,
    progress: bool = True,
    out: str | Path | None = None,
) -> CircuitCurve:
    """Run the circuits of the strongest edges at several sizes, on prompts on which they were not chosen.

    Args:
        model: the model; it is not changed.
        edges: the result of `hw.edges` for all edges, on other prompts. Its first metric ranks them.
        clean: the held-out prompts, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        metric: as in `hw.run_circuits`; answers are those of the held-out prompts.
        sizes: two or more fractions of all edges, above 0 and at most 1.
        by: how edges are ranked, `size` or `signed`; see `EdgeEffects.circuit`.
        placebos: number of random circuits of the same shape to run at each size.
        values: what the other edges carry; see `hw.run_circuits`.
        dataset: the prompts for `mean` and `resample`.
        seed: seed of the random circuits and of `resample`.
        batch_size: number of circuits per batch.

    Warns:
        UserWarning: held-out prompts are among those on which the edges were chosen, or have no gap.
    """
    graph, listed = graph_of(model), [] if isinstance(sizes, str) else one_or_several(sizes)
    shares = sorted({checked_number("sizes", one, above=0.0, below=1.0, up_to=True) for one in listed})
    if len(shares) < 2:
        raise InputError(f"sizes={shown(sizes)} must be two or more fractions of all edges, such as (0.01, 0.1, 1).")
    graph.refuse_other("The result edges=", edges.graph)
    if len(edges.chosen) < graph.n_edges:
        raise InputError(
            f"Only {len(edges.chosen):,} of {graph.n_edges:,} edges were measured, and sizes are fractions of all: run "
            "hw.edges without senders= and receivers=."
        )
    placebos = checked_count("placebos", placebos, least=0, most=circuit_runs.MOST_PLACEBOS)
    named = {f"{x:g}": edges.circuit(max(1, round(x * graph.n_edges)), by=by) for x in shares}
    pairs = Pairs(
        model, clean, corrupted, metric, values=values, dataset=dataset, seed=seed, batch_size=batch_size,
        pair_with_donors=True,
    )  # fmt: skip
    discovery = {"edges": [list(ids) for ids in next(iter(named.values())).seen]}
    options = {"edges": edges.digest(), "sizes": shares, "by": by, "placebos": placebos, "discovery": discovery}
    options |= pairs.options
    circuit_runs.say_how_many(pairs, (1 + placebos) * len(named), progress)

    def work(run: Run) -> CircuitCurve:
        table, shapes = circuit_runs.measured(pairs, named, placebos, run)
        table.insert(1, "size", table["circuit"].map({f"{x:g}": x for x in shares}).astype(float))
        return CircuitCurve(table, run.record, shapes)

    result = run_or_resume(CircuitCurve, "circuit_curve", model, options, work, out=out, seed=seed, progress=progress)
    for left in [*circuit_runs.gap_sentences(result.table), *circuit_runs.discovery_sentences(result.run)]:
        warnings.warn(left, stacklevel=callers_level())
    return result


def _curves(
    part: pd.DataFrame,
) -> tuple[Float[ndarray, " size"], Float[ndarray, "draw size"], Float[ndarray, "placebo size"]]:
    """Return the sizes, f at each size in bootstrap draws (row 0: the prompts themselves), and f of each placebo."""
    of_circuits = part[part["placebo"].isna()]
    values = of_circuits.pivot_table(index="example", columns="size", values="value")
    ends = of_circuits.drop_duplicates("example").set_index("example").loc[values.index]
    clean, corrupted = ends["clean"].to_numpy(), ends["corrupted"].to_numpy()
    # All sizes are resampled together, so each draw is a curve.
    drawn = circuit_runs.ratio_of_means(values.to_numpy(), clean, corrupted)
    placebos = []
    for _, others in part[part["placebo"].notna()].groupby("placebo"):
        rows = others.pivot_table(index="example", columns="size", values="value").loc[values.index]
        placebos.append(circuit_runs.ratio_of_means(rows.to_numpy(), clean, corrupted)[0])
    return values.columns.to_numpy(), drawn, np.array(placebos).reshape(-1, values.shape[1])


def _areas(sizes: Float[ndarray, " size"], f: Float[ndarray, "draw size"]) -> dict[str, Float[ndarray, " draw"]]:
    logs, enough = np.log(sizes), f >= ENOUGH
    return {
        "cpr": np.trapezoid(f, sizes, axis=1),
        "cmd": np.trapezoid(np.abs(1 - f), sizes, axis=1),
        "log_area": np.trapezoid(f, logs, axis=1) / (logs[-1] - logs[0]),
        "least_size": np.where(enough.any(1), sizes[enough.argmax(1)], np.nan),
    }


# Two criteria of a circuit: does it do all of the work, and is each of its edges needed (Wang et al. 2022)?
#
# incompleteness(K) = |m(C - K) - m(M - K)|             for sets K of edges of the circuit C; M has all edges
# effect(e)         = m(C - K - e) - m(C - K)           the largest in size over K, for each edge e of C
#
# m is the mean of the metric over prompts when the circuit runs alone (`hw.run_circuits`). The first K is empty; the
# others have each edge of C with probability 1/2. A complete circuit behaves like the model whichever edges are removed
# from both; in a minimal circuit every edge matters once some others are removed.
#
# Each criterion has a control. Completeness: random circuits of the circuit's shape (`Circuit.placebos`), each without
# equally many of its edges. Minimality (Shi et al. 2024): edges drawn from outside and added to the circuit, with the
# kinds and layers of the circuit's edges; an edge is needed only if its effect exceeds the effects of these.

MOST = 1000
"""Largest number of sets and of random circuits."""


@checked_call
def completeness(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None,
    circuit: Circuit,
    *,
    metric: Metric | Any,
    sets: int = 10,
    placebos: int = 20,
    seed: int = 0,
    **run: Any,
) -> pd.DataFrame:
    """Compare a circuit with the model when the same edges are removed from both.

    Args:
        model: the model.
        clean: the prompts, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        circuit: the circuit.
        metric: one or more; see `hw.run_circuits`.
        sets: number of random sets to remove, besides the empty set.
        placebos: number of random circuits of the same shape to test in the same way.
        seed: seed of the sets and the random circuits.
        run: `values`, `dataset`, `batch_size`, `progress`, `out`, as in `hw.run_circuits`.

    Returns:
        A row per metric and set: `metric, set` (0 is the empty set), `removed` (number of edges), `circuit` and `model`
        (the metric of each without these edges), `incompleteness`, `part` (its fraction of the gap between the clean
        run and the empty circuit), `placebo` (the mean of random circuits), `placebo_low` (their 5 % quantile),
        `p_value` (the rank of the circuit: small where random circuits are less complete).
    """
    generator, removed, placebos = _draws(circuit, sets, placebos, seed)
    full = ~circuit_from_edges(circuit.graph, [])
    tested = []
    for draw, each in enumerate([circuit, *(circuit.placebos(placebos, seed) if placebos else [])]):
        for which in removed:
            # A random circuit loses as many edges as the circuit, drawn separately: its edges have no counterparts.
            taken = each._kept(which if draw == 0 else generator.permutation(which))
            tested += [each - taken, full - taken]
    rows = []
    for name, values, gap in _means(model, clean, corrupted, tested, metric, run):
        alone, whole = np.moveaxis(values.reshape(placebos + 1, len(removed), 2), -1, 0)
        found = np.abs(alone - whole)
        for number, which in enumerate(removed):
            lacking, others = found[0, number], found[1:, number]
            chance = [np.nan] * 3
            if placebos:
                # The circuit counts among the random circuits, so p is never 0.
                p = (1 + int((others <= lacking).sum())) / (1 + placebos)
                chance = [float(others.mean()), float(np.quantile(others, 1 - PLACEBO_QUANTILE)), p]
            part = lacking / gap if gap else np.nan
            rows.append([name, number, int(which.sum()), alone[0, number], whole[0, number], lacking, part, *chance])
    columns = ["metric", "set", "removed", "circuit", "model", "incompleteness", "part"]
    return pd.DataFrame(rows, columns=[*columns, "placebo", "placebo_low", "p_value"])


@checked_call
def minimality(
    model: HookedModel,
    clean: Prompts | pd.DataFrame | Path,
    corrupted: Prompts | None,
    circuit: Circuit,
    *,
    metric: Metric | Any,
    sets: int = 3,
    placebos: int = 20,
    seed: int = 0,
    **run: Any,
) -> pd.DataFrame:
    """Return the largest effect of removing each edge of a circuit, over some sets of other edges already removed.

    Args:
        model: the model.
        clean: the prompts, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        circuit: the circuit.
        metric: one or more; see `hw.run_circuits`.
        sets: number of random sets to remove, besides the empty set.
        placebos: number of random edges from outside to test in the same way, each added to the circuit.
        seed: seed of the sets and the random edges.
        run: `values`, `dataset`, `batch_size`, `progress`, `out`, as in `hw.run_circuits`.

    Returns:
        A row per metric and edge: `metric`, the columns of `Circuit.table` that name the edge, `effect` (the metric
        without the edge minus the metric with it, in the set where its size is largest), `set` (index of that set),
        `placebo` (the mean size of random edges), `placebo_high` (their 95 % quantile), `p_value` (the rank of the edge
        among them), `needed` (whether its size exceeds `placebo_high`, or 0 if there are no random edges).
    """
    generator, removed, placebos = _draws(circuit, sets, placebos, seed)
    graph, strata = circuit.graph, circuit.graph.stratum
    # Edges from outside, each with the kinds and layers of one of the circuit's edges, if any such edges exist.
    outside = (~circuit).edges
    alike = outside[np.isin(strata[outside], strata[circuit.edges])]
    draws = []
    for like in generator.choice(strata[circuit.edges], placebos if len(outside) else 0):
        same_stratum = outside[strata[outside] == like]
        pool = next(edges for edges in (same_stratum, alike, outside) if len(edges))
        draws.append(int(generator.choice(pool)))
    # An edge that was drawn several times is run once.
    drawn, of_draw = np.unique(np.array(draws, dtype=np.int64), return_inverse=True)
    sets_left = [~which for which in removed]
    reduced = [circuit._kept(left) for left in sets_left]
    less = [one - circuit_from_edges(graph, [edge]) for one in reduced for edge in one.edges]
    more = [one | circuit_from_edges(graph, [edge]) for one in reduced for edge in drawn]
    tables = []
    for name, values, _ in _means(model, clean, corrupted, [*reduced, *less, *more], metric, run):
        before, without, added = np.split(values, [len(reduced), len(reduced) + len(less)])
        # By set and edge; an edge that is not in a set has no effect there.
        effects = np.zeros((len(reduced), len(circuit)))
        effects[np.array(sets_left)] = without - np.repeat(before, [len(one) for one in reduced])
        where = np.abs(effects).argmax(0)
        sizes = np.abs(effects).max(0)
        # The size of an added edge's effect, in the set where it is largest.
        others = np.abs(added.reshape(len(reduced), len(drawn)) - before[:, None]).max(0)[of_draw]
        high = float(np.quantile(others, PLACEBO_QUANTILE)) if len(others) else 0.0
        largest = effects[where, np.arange(len(circuit))]
        table = circuit.table.drop(columns="effect").assign(effect=largest, set=where)
        table["placebo"], table["placebo_high"] = (others.mean(), high) if len(others) else (np.nan, np.nan)
        table["p_value"] = [(1 + int((others >= size).sum())) / (1 + len(others)) for size in sizes]
        tables.append(table.assign(needed=sizes > high))
        tables[-1].insert(0, "metric", name)
    return pd.concat(tables, ignore_index=True)


def _draws(
    circuit: Circuit, sets: int, placebos: int, seed: int
) -> tuple[np.random.Generator, Sequence[Bool[np.ndarray, " edge"]], int]:
    """Check the options; return a generator, masks of the edges to remove (the first of none), and the placebos."""
    if not len(circuit):
        raise InputError("The circuit has no edges: there is nothing to remove.")
    sets, generator = checked_count("sets", sets, least=0, most=MOST), np.random.default_rng(seed)
    removed = [np.zeros(len(circuit), dtype=bool), *(generator.random(len(circuit)) < 0.5 for _ in range(sets))]
    return generator, removed, checked_count("placebos", placebos, least=0, most=MOST)


def _means(
    model: HookedModel, clean: Any, corrupted: Any, circuits: Sequence[Circuit], metric: Any, run: Mapping[str, Any]
) -> list[tuple[str, Float[ndarray, " circuit"], float]]:
    """Return for each metric: its name, its mean over prompts for each circuit alone, and the gap of the model."""
    means = []
    table = circuit_runs.run_circuits(model, clean, corrupted, circuits, metric=metric, **run).table
    for name, part in table.groupby("metric", sort=False):
        gap = abs(float((part["clean"] - part["corrupted"]).mean()))
        means.append((str(name), part.groupby("circuit", sort=False)["value"].mean().to_numpy(), gap))
    return means
