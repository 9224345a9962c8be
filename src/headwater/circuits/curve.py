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
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from numpy import ndarray

from headwater.calls import checked_call
from headwater.circuits import circuit_runs
from headwater.circuits.circuit import Circuit, circuit_from_edges, describe_graph, graph_of
from headwater.circuits.circuit_walk import CircuitRequest
from headwater.circuits.result import RANKED_BY, ByMetric, EdgeEffects, RankName
from headwater.errors import InputError, callers_level
from headwater.models.hooked import HookedModel
from headwater.options import (
    checked_count,
    checked_kind,
    checked_name,
    checked_number,
    checked_seed,
    one_or_several,
    shown,
)
from headwater.patching.metrics import Metric
from headwater.patching.prompts import Prompts
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import table_html, with_interval
from headwater.stats.claims import PLACEBO_QUANTILE
from headwater.stats.resample import interval

SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
AREAS = ("cpr", "cmd", "log_area", "least_size")
ENOUGH = 0.9
"""The faithfulness that `least_size` requires."""


@dataclass(frozen=True, repr=False, eq=False)
class CircuitCurve(ByMetric):
    """The result of `hw.circuit_curve`."""

    table: pd.DataFrame
    """A row per example, size, circuit or placebo, and metric: the columns of `hw.run_circuits`, and `size`, the
    fraction of all edges."""
    run: RunRecord
    shapes: pd.DataFrame
    """A row per circuit and placebo: `circuit, placebo, overlap` (fraction of the circuit's edges in the placebo)."""

    def summary(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Summarize each size over prompts.

        Args:
            level: level of the interval.
            seed: seed of the bootstrap.

        Returns:
            A row per size and metric: `size`, and the columns of the summary of `hw.run_circuits`.
        """
        found = circuit_runs.summarized(self.table, self.shapes, level, seed)
        sizes = self.table.drop_duplicates("circuit").set_index("circuit")["size"]
        found.insert(0, "size", found["circuit"].map(sizes))
        return found

    def areas(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Summarize the curve in four numbers, with those of the placebos.

        Args:
            level: level of the interval.
            seed: seed of the bootstrap.

        Returns:
            A row per metric and number: `metric, area` (`cpr`, `cmd`, `log_area`, `least_size`: see the docstring of
            `headwater.circuits.curve`), `value`, `low, high` (bootstrap over prompts), `placebo` (the mean over random
            curves), `placebo_low, placebo_high` (their 5 % and 95 % quantiles). A least size is NaN where f never
            reaches 0.9; a placebo that never does counts as needing the whole model.
        """
        level, seed = checked_number("level", level, above=0.0, below=1.0), checked_seed(seed)
        rows = []
        for metric, part in self.table.groupby("metric", sort=False):
            sizes, drawn, placebos = _curves(part, seed)
            # Computed for each draw's curve: the least size of a mean curve is not the mean of least sizes.
            of_circuit, random = _areas(sizes, drawn), _areas(sizes, placebos)
            for name in AREAS:
                value, low, high = interval(of_circuit[name], level)
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
        words |= {"log_area": "its mean over log size"}
        for metric, part in self.areas().groupby("metric", sort=False):
            *areas, least = part.to_dict("records")
            parts = [
                f"{words[row['area']]} {with_interval(row['value'], row['low'], row['high'], '.3f')}"
                + (f" (random circuits: {row['placebo']:.3f})" if np.isfinite(row["placebo"]) else "")
                for row in areas
            ]
            sentences.append(f"Edges ranked by {by}, faithfulness on {metric}: {'; '.join(parts)}.".replace("_", " "))
            chance = f" (random circuits: {least['placebo']:.1%})" if np.isfinite(least["placebo"]) else ""
            value, low, high = (100 * float(least[name]) for name in ("value", "low", "high"))
            size = with_interval(value, low, high, ".1f", " % of the edges")
            if np.isfinite(value):
                sentences.append(f"{size} reach faithfulness 0.9{chance}.".replace("%)", " %)"))
            else:
                sentences.append("No circuit of some edges reaches faithfulness 0.9.")
        return [*sentences, *circuit_runs.gap_sentences(self.table), *circuit_runs.discovery_sentences(self.run)]

    def __repr__(self) -> str:
        sizes, examples = self.table["size"].nunique(), self.table["example"].nunique()
        return f"CircuitCurve({self.run.model}: {sizes} sizes, {examples:,} prompt{'s' * (examples != 1)})"

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
        values: what the other edges carry; see `hw.run_circuits`.
        dataset: the prompts for `mean` and `resample`.
        placebos: number of random circuits of the same shape to run at each size.
        seed: seed of the random circuits and of `resample`.
        batch_size: number of circuits per batch.
        progress: show a progress bar.
        out: a folder; an interrupted run resumes where it stopped.

    Raises:
        InputError: an option or prompt cannot be used, or the edges are of another model or not all of its edges.

    Warns:
        UserWarning: held-out prompts are among those on which the edges were chosen, or have no gap.
    """
    graph, listed = graph_of(model), [] if isinstance(sizes, str) else one_or_several(sizes)
    shares = sorted({checked_number("sizes", one, above=0.0, below=1.0, up_to=True) for one in listed})
    if len(shares) < 2:
        raise InputError(f"sizes={shown(sizes)} must be two or more fractions of all edges, such as (0.01, 0.1, 1).")
    checked_kind("edges", edges, EdgeEffects, "hw.edges(...)")
    if edges.graph != graph:
        raise InputError(
            f"The edges are from a model of {describe_graph(edges.graph)}; this model has {describe_graph(graph)}."
        )
    if len(edges.chosen) < graph.n_edges:
        raise InputError(
            f"Only {len(edges.chosen):,} of {graph.n_edges:,} edges were measured, and sizes are fractions of all: run "
            "hw.edges without senders= and receivers=."
        )
    checked_name("by", by, RANKED_BY)
    seed = checked_seed(seed)
    placebos = checked_count("placebos", placebos, least=0, most=circuit_runs.MOST_PLACEBOS)
    named = {f"{x:g}": edges.circuit(max(1, round(x * graph.n_edges)), by=by) for x in shares}
    request = CircuitRequest.of(
        model, clean, corrupted, metric=metric, values=values, dataset=dataset, seed=seed, batch_size=batch_size
    )
    discovery = {"edges": [list(ids) for ids in next(iter(named.values())).seen]}
    options = {"edges": edges.digest(), "sizes": shares, "by": by, "placebos": placebos, "discovery": discovery}
    options |= request.options
    request.say_how_long((1 + placebos) * len(named), progress)

    def work(run: Run) -> CircuitCurve:
        tested = circuit_runs.CircuitsAndPlacebos.of(named, placebos, seed)
        table = circuit_runs.measured(request, tested, run)
        table.insert(1, "size", table["circuit"].map({f"{x:g}": x for x in shares}).astype(float))
        return CircuitCurve(table, run.record, tested.shapes)

    result = run_or_resume(CircuitCurve, "circuit_curve", model, options, work, out=out, seed=seed, progress=progress)
    for left in [*circuit_runs.gap_sentences(result.table), *circuit_runs.discovery_sentences(result.run)]:
        warnings.warn(left, stacklevel=callers_level())
    return result


def _curves(
    part: pd.DataFrame, seed: int
) -> tuple[Float[ndarray, " size"], Float[ndarray, "draw size"], Float[ndarray, "placebo size"]]:
    """Return the sizes, f at each size in bootstrap draws (row 0: the prompts themselves), and f of each placebo."""
    of_circuits = part[part["placebo"].isna()]
    values = of_circuits.pivot_table(index="example", columns="size", values="value")
    ends = of_circuits.drop_duplicates("example").set_index("example").loc[values.index]
    clean, corrupted = ends["clean"].to_numpy(), ends["corrupted"].to_numpy()
    # All sizes are resampled together, so each draw is a curve.
    drawn = circuit_runs.ratio_of_means(values.to_numpy(), clean, corrupted, seed=seed)
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
ByCircuit: TypeAlias = Mapping[str, float]
"""The mean of a metric over prompts, by circuit."""


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

    Raises:
        InputError: an option, prompt or circuit cannot be used, or the circuit has no edges.
    """
    circuit, sets, placebos, seed = _checked(circuit, sets, placebos, seed)
    generator = np.random.default_rng(seed)
    removed = _sets(len(circuit), sets, generator)
    full = ~circuit_from_edges(circuit.graph, [])
    named: dict[str, Circuit] = {}
    for draw, each in enumerate([circuit, *(circuit.placebos(placebos, seed) if placebos else [])]):
        for number, which in enumerate(removed):
            # A random circuit loses as many edges as the circuit, drawn separately: its edges have no counterparts.
            taken = each._kept(which if draw == 0 else generator.permutation(which))
            named |= {f"{draw} {number} circuit": each - taken, f"{draw} {number} model": full - taken}
    rows = []
    for name, values, gap in _means(model, clean, corrupted, named, metric, run):
        for number, which in enumerate(removed):
            draws = range(placebos + 1)
            alone, whole = ([values[f"{draw} {number} {what}"] for draw in draws] for what in ("circuit", "model"))
            found = np.abs(np.subtract(alone, whole))
            lacking, others = found[0], found[1:]
            chance = [np.nan] * 3
            if placebos:
                # The circuit counts among the random circuits, so p is never 0.
                p = (1 + int((others <= lacking).sum())) / (1 + placebos)
                chance = [float(others.mean()), float(np.quantile(others, 1 - PLACEBO_QUANTILE)), p]
            part = lacking / gap if gap else np.nan
            rows.append([name, number, int(which.sum()), alone[0], whole[0], lacking, part, *chance])
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

    Raises:
        InputError: an option, prompt or circuit cannot be used, or the circuit has no edges.
    """
    circuit, sets, placebos, seed = _checked(circuit, sets, placebos, seed)
    generator, graph = np.random.default_rng(seed), circuit.graph
    reduced = [circuit._kept(~which) for which in _sets(len(circuit), sets, generator)]
    # Edges from outside, each with the kinds and layers of one of the circuit's edges, if any such edges exist.
    outside, strata = (~circuit).edges, graph.stratum
    alike = outside[np.isin(strata[outside], strata[circuit.edges])]
    drawn = []
    for like in generator.choice(strata[circuit.edges], placebos if len(outside) else 0):
        pool = outside[strata[outside] == like]
        drawn.append(int(generator.choice(pool if len(pool) else alike if len(alike) else outside)))
    named = {f"{number}": one for number, one in enumerate(reduced)}
    for number, one in enumerate(reduced):
        named |= {f"{number} less {edge}": one - circuit_from_edges(graph, [edge]) for edge in one.edges.tolist()}
        named |= {f"{number} and {edge}": one | circuit_from_edges(graph, [edge]) for edge in drawn}
    tables = []
    for name, values, _ in _means(model, clean, corrupted, named, metric, run):
        largest = [_largest(values, " less ", len(reduced), edge) for edge in circuit.edges.tolist()]
        effects, where = zip(*largest, strict=True)
        others = np.abs([_largest(values, " and ", len(reduced), edge)[0] for edge in drawn])
        sizes = np.abs(effects)
        high = float(np.quantile(others, PLACEBO_QUANTILE)) if len(others) else 0.0
        table = circuit.table.drop(columns="effect").assign(effect=effects, set=where)
        table["placebo"], table["placebo_high"] = (others.mean(), high) if len(others) else (np.nan, np.nan)
        table["p_value"] = [(1 + int((others >= size).sum())) / (1 + len(others)) for size in sizes]
        tables.append(table.assign(needed=sizes > high))
        tables[-1].insert(0, "metric", name)
    return pd.concat(tables, ignore_index=True)


def _checked(circuit: object, sets: object, placebos: object, seed: object) -> tuple[Circuit, int, int, int]:
    circuit = checked_kind("circuit", circuit, Circuit, "edges.circuit(...) or hw.Circuit.of(...)")
    if not len(circuit):
        raise InputError("The circuit has no edges: there is nothing to remove.")
    sets = checked_count("sets", sets, least=0, most=MOST)
    return circuit, sets, checked_count("placebos", placebos, least=0, most=MOST), checked_seed(seed)


def _sets(n: int, sets: int, generator: np.random.Generator) -> Sequence[Bool[np.ndarray, " edge"]]:
    """Return masks of the edges to remove: first none, then each with probability 1/2."""
    return [np.zeros(n, dtype=bool), *(generator.random(n) < 0.5 for _ in range(sets))]


def _means(
    model: HookedModel,
    clean: Any,
    corrupted: Any,
    circuits: Mapping[str, Circuit],
    metric: Metric | Any,
    run: Mapping[str, Any],
) -> list[tuple[str, ByCircuit, float]]:
    """Return for each metric: its name, its mean over prompts for each circuit alone, and the gap of the model."""
    means: list[tuple[str, ByCircuit, float]] = []
    table = circuit_runs.run_circuits(model, clean, corrupted, circuits, metric=metric, **run).table
    for name, part in table.groupby("metric", sort=False):
        values = part.groupby("circuit", sort=False)["value"].mean()
        gap = abs(float((part["clean"] - part["corrupted"]).mean()))
        means.append((str(name), dict(zip(values.index, values.tolist(), strict=True)), gap))
    return means


def _largest(values: ByCircuit, how: str, sets: int, edge: int) -> tuple[float, int]:
    """Return an edge's largest effect and its set; `how` is ` less ` for a removed edge, ` and ` for an added one."""
    effects = []
    for number in range(sets):
        changed = values.get(f"{number}{how}{edge}")
        # For an added edge, the effect of removal is minus the change by adding it.
        sign = 1 if how == " less " else -1
        effects.append(0.0 if changed is None else sign * (changed - values[f"{number}"]))
    where = int(np.argmax(np.abs(effects)))
    return effects[where], where
