"""Faithfulness by size: how few edges do what the model does, on prompts that did not choose them.

Circuits of the strongest edges at several sizes (shares of all edges), each run alone beside random circuits of its own
shape. Four numbers sum a curve f(x) up, x from the least size to the largest (Mueller et al. 2025, MIB):

    cpr         ∫ f dx             how much the circuits do (rank edges `by="signed"`)
    cmd         ∫ |1 - f| dx       how far they are from the model (rank edges `by="size"`)
    log_area    ∫ f d log x, as a mean over log x
    least_size  the least size at which f is 0.9 or more

Areas over x hide the start: half of them is the step from half of the edges to all, and random edges get a CPR of 0.28.
So all four are beside each other, and beside the placebos' own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.calls import checked_call
from headwater.circuits.circuit import describe_graph, graph_of
from headwater.circuits.circuit_runs import (
    MOST_PLACEBOS,
    Lineup,
    discovery_sentences,
    gap_sentence,
    measured,
    tabulated,
)
from headwater.circuits.faithfulness import ratio_of_means, summarized
from headwater.circuits.measuring import Outcome
from headwater.circuits.result import RANKED_BY, ByMetric, EdgeEffects, RankName
from headwater.errors import InputError
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
from headwater.runs.findings import with_interval
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, table_html
from headwater.stats.resample import interval

SIZES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
AREAS = ("cpr", "cmd", "log_area", "least_size")
ENOUGH = 0.9
"""The faithfulness that `least_size` asks for."""


@dataclass(frozen=True, repr=False, eq=False)
class CircuitCurve(ByMetric, Result):
    """What `hw.circuit_curve` found."""

    table: pd.DataFrame
    """A row per example, size, circuit or placebo, and metric: the columns of `hw.run_circuits`, and `size`, the part
    of all edges."""
    run: RunRecord
    shapes: pd.DataFrame
    """A row per circuit and placebo: `circuit, placebo, overlap` (the part of its edges that a placebo has)."""

    def summary(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Summarize each size over prompts.

        Args:
            level: of the interval.
            seed: of the bootstrap.

        Returns:
            A row per size and metric: `size`, and the columns of the summary of `hw.run_circuits`.
        """
        found = summarized(self.table, self.shapes, level, seed)
        sizes = self.table.drop_duplicates("circuit").set_index("circuit")["size"]
        found.insert(0, "size", found["circuit"].map(sizes))
        return found

    def areas(self, *, level: float = 0.95, seed: int = 0) -> pd.DataFrame:
        """Sum the curve up in four numbers, with the placebos' own.

        Args:
            level: of the interval.
            seed: of the bootstrap.

        Returns:
            A row per metric and number: `metric, area` (`cpr`, `cmd`, `log_area`, `least_size`: see the first lines of
            `headwater.circuits.curve`), `value`, `low, high` (bootstrap over prompts), `placebo` (the mean over random
            curves), `placebo_low, placebo_high` (their 5 % and 95 % quantiles). A least size is NaN where f does not
            come to 0.9, and placebos that do not count with the whole model.
        """
        level, seed = checked_number("level", level, above=0.0, below=1.0), checked_seed(seed)
        rows = []
        for metric, part in self.table.groupby("metric", sort=False):
            sizes, drawn, placebos = _curves(part, seed)
            # Of each draw's own curve: the least size of a mean curve is not the mean of least sizes.
            of_circuit = _areas(sizes, drawn)
            random = _areas(sizes, placebos)
            for name in AREAS:
                value, low, high = interval(of_circuit[name], level)
                # A random curve that never comes to 0.9 needs the whole model.
                of_random = random[name] if name != "least_size" else np.nan_to_num(random[name], nan=1.0)
                chance = [of_random.mean(), *np.quantile(of_random, [0.05, 0.95])] if len(of_random) else [np.nan] * 3
                rows.append([metric, name, value, low, high, *chance])
        columns = ["metric", "area", "value", "low", "high", "placebo", "placebo_low", "placebo_high"]
        return pd.DataFrame(rows, columns=columns)

    def report(self) -> list[str]:
        """Return the four numbers of each metric beside their placebos, and what cannot be told."""
        sentences, by = [], self.run.options["by"]
        words = {"cpr": "CPR", "cmd": "CMD", "log_area": "mean over log size", "least_size": "least size for 0.9"}
        for metric, part in self.areas().groupby("metric", sort=False):
            parts = [
                f"{words[row['area']]} {with_interval(row['value'], row['low'], row['high'], 3)}"
                + (f", of random curves {row['placebo']:.3f}" if np.isfinite(row["placebo"]) else "")
                for row in part.to_dict("records")
            ]
            sentences.append(f"Edges ranked by {by}, faithfulness on {metric}: {'; '.join(parts)}.".replace("_", " "))
        if left := gap_sentence(self.table):
            sentences.append(left)
        return [*sentences, *discovery_sentences(self.run)]

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
    """Run the circuits of the strongest edges at several sizes, on prompts that did not choose them.

    Args:
        model: the model; it is left as it was.
        edges: what `hw.edges` found of all edges, on other prompts. Its first metric ranks them.
        clean: the held-out prompts, or a table of pairs; see `hw.run_circuits`.
        corrupted: the other prompt of each pair.
        metric: as in `hw.run_circuits`; answers are those of the held-out prompts.
        sizes: parts of all edges, above 0 and up to 1.
        by: how edges are ranked, `size` or `signed`; see `EdgeEffects.circuit`.
        values: what the other edges carry; see `hw.run_circuits`.
        dataset: the prompts of `mean` and `resample`.
        placebos: how many random circuits of the same shape are run at each size.
        seed: of the random circuits and of `resample`.
        batch_size: circuits at once.
        progress: show a progress bar.
        out: a folder; an interrupted run goes on where it stopped.

    Raises:
        InputError: an option or prompt cannot be used, or the edges are of another model or not all of its edges.

    Warns:
        UserWarning: held-out prompts are among those that chose the edges, or have no gap.
    """
    graph, shares = graph_of(model), checked_sizes(sizes)
    checked_kind("edges", edges, EdgeEffects, "hw.edges(...)")
    if edges.graph != graph:
        raise InputError(f"The edges are of {describe_graph(edges.graph)}; this model has {describe_graph(graph)}.")
    if len(edges.chosen) < graph.n_edges:
        raise InputError(
            f"The edges are {len(edges.chosen):,} of {graph.n_edges:,}: sizes are parts of all. Run hw.edges without "
            "senders= and receivers=."
        )
    checked_name("by", by, RANKED_BY)
    seed = checked_seed(seed)
    placebos = checked_count("placebos", placebos, least=0, most=MOST_PLACEBOS)
    named = {f"{x:g}": edges.circuit(max(1, round(x * graph.n_edges)), by=by) for x in shares}
    outcome = Outcome.of(
        model, clean, corrupted, metric=metric, values=values, dataset=dataset, seed=seed, batch_size=batch_size
    )
    seen = [list(ids) for ids in next(iter(named.values())).seen]
    options = {
        "edges": edges.digest(),
        "sizes": shares,
        "by": by,
        "placebos": placebos,
        "discovery": {"edges": seen},
        **outcome.options,
    }

    outcome.say_how_long((1 + placebos) * len(named), progress)

    def work(run: Run) -> CircuitCurve:
        lineup = Lineup.of(named, placebos, seed)
        table = tabulated(outcome.metrics, lineup, *measured(outcome, [one.edges for one in lineup.all], run))
        table.insert(1, "size", table["circuit"].map({f"{x:g}": x for x in shares}).astype(float))
        return CircuitCurve(table, run.record, lineup.shapes)

    result = run_or_resume(CircuitCurve, "circuit_curve", model, options, work, out=out, seed=seed, progress=progress)
    for left in [gap_sentence(result.table), *discovery_sentences(result.run)]:
        if left:
            warnings.warn(left, stacklevel=2)
    return result


def checked_sizes(sizes: object) -> list[float]:
    """Return sizes ascending, each once."""
    listed = one_or_several(sizes) if not isinstance(sizes, str) else []
    if not listed:
        raise InputError(f"sizes={shown(sizes)} must be parts of all edges, such as (0.01, 0.1, 1).")
    return sorted({checked_number("sizes", one, above=0.0, below=1.0, up_to=True) for one in listed})


def _curves(
    part: pd.DataFrame, seed: int
) -> tuple[Float[ndarray, " size"], Float[ndarray, "draw size"], Float[ndarray, "placebo size"]]:
    """Return the sizes, f at each in draws of prompts (the first: the prompts themselves), and that of placebos."""
    of_circuits = part[part["placebo"].isna()]
    values = of_circuits.pivot_table(index="example", columns="size", values="value")
    ends = of_circuits.drop_duplicates("example").set_index("example").loc[values.index]
    clean, corrupted = ends["clean"].to_numpy(), ends["corrupted"].to_numpy()
    # All sizes are resampled together: a draw is a curve.
    drawn = ratio_of_means(values.to_numpy(), clean, corrupted, seed=seed)
    placebos = []
    for _, others in part[part["placebo"].notna()].groupby("placebo"):
        rows = others.pivot_table(index="example", columns="size", values="value").loc[values.index]
        placebos.append(ratio_of_means(rows.to_numpy(), clean, corrupted)[0])
    return values.columns.to_numpy(), drawn, np.array(placebos).reshape(-1, values.shape[1])


def _areas(sizes: Float[ndarray, " size"], f: Float[ndarray, "draw size"]) -> dict[str, Float[ndarray, " draw"]]:
    """Return the four numbers of curves."""
    logs, enough = np.log(sizes), f >= ENOUGH
    width = logs[-1] - logs[0]
    return {
        "cpr": np.trapezoid(f, sizes, axis=1),
        "cmd": np.trapezoid(np.abs(1 - f), sizes, axis=1),
        "log_area": np.trapezoid(f, logs, axis=1) / width if width > 0 else f[:, 0],
        "least_size": np.where(enough.any(1), sizes[enough.argmax(1)], np.nan),
    }
