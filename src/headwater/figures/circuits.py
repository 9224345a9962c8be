"""Circuits run alone: the faithfulness of each beside its placebos, and the curve over sizes with theirs as a band.

Both axes of faithfulness show 0 (the empty circuit) and 1 (the model). The band of placebos reaches from their 5 % to
their 95 % quantile, that of the circuits is the bootstrap interval over prompts.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.curve import CircuitCurve
from headwater.circuits.search import DECISIONS, KEPT, LEFT_OUT, NOT_TRIED, CircuitSearch
from headwater.figures.style import label, legend_above, model_title, new_figure, style, ticks
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS, whole_summary

CIRCUIT, PLACEBO, LINE = "#0b5394", "#9a9a9a", "#d0d0d0"


@DRAWINGS.add(CircuitRuns)
def plot_circuit_runs(runs: CircuitRuns, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw circuits: what `CircuitRuns.plot` says."""
    table, name = _of_metric(runs.table, metric)
    summary = whole_summary(runs)
    summary = summary[summary["metric"] == name].reset_index(drop=True)
    with style(ax):
        if ax is None:
            ax = new_figure(4.6, 0.8 + 0.4 * len(summary)).add_subplot()
        for x in (0.0, 1.0):
            ax.axvline(x, color=LINE, linewidth=0.8)
        for place, (_, row) in enumerate(summary.iterrows()):
            others = _placebos(table[table["circuit"] == row["circuit"]])
            ax.plot(others, np.full(len(others), place), "|", color=PLACEBO, markersize=9)
            if np.isfinite(row["low"]):
                ax.plot([row["low"], row["high"]], [place, place], color=CIRCUIT, linewidth=1.2)
            ax.plot(row["faithfulness"], place, "o", color=CIRCUIT, markersize=5)
        names = zip(ticks(summary["circuit"].map(str)), summary["edges"], strict=True)
        ax.set_yticks(range(len(summary)), [f"{name} ({edges:,})" for name, edges in names])
        ax.invert_yaxis()
        ax.set_xlabel(label(f"Faithfulness on {name.replace('_', ' ')}"))
        ax.set_title(model_title(runs.run, "circuits run alone (bars: random ones)"))
    return ax


@DRAWINGS.add(CircuitCurve)
def plot_circuit_curve(curve: CircuitCurve, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw a curve: what `CircuitCurve.plot` says."""
    table, name = _of_metric(curve.table, metric)
    summary = whole_summary(curve)
    summary = summary[summary["metric"] == name].sort_values("size")
    with style(ax):
        if ax is None:
            ax = new_figure(4.6, 3.2).add_subplot()
        for y in (0.0, 1.0):
            ax.axhline(y, color=LINE, linewidth=0.8)
        others = [_placebos(table[table["circuit"] == circuit]) for circuit in summary["circuit"]]
        if all(len(one) for one in others):
            low, middle, high = (np.array([np.quantile(one, q) for one in others]) for q in (0.05, 0.5, 0.95))
            ax.fill_between(summary["size"], low, high, color=PLACEBO, alpha=0.3, linewidth=0)
            ax.plot(summary["size"], middle, color=PLACEBO, linewidth=1.0, label="random ones of the same shape")
        ax.fill_between(summary["size"], summary["low"], summary["high"], color=CIRCUIT, alpha=0.2, linewidth=0)
        ax.plot(summary["size"], summary["faithfulness"], "o-", color=CIRCUIT, markersize=3.5, label="strongest edges")
        ax.set_xscale("log")
        ax.set_xlabel("Part of all edges")
        ax.set_ylabel(label(f"Faithfulness on {name.replace('_', ' ')}"))
        n = curve.table["example"].nunique()
        legend_above(ax, 2, model_title(curve.run, "circuits by size, run alone" + f" (n = {n})" * (n > 1)))
    return ax


@DRAWINGS.add(CircuitSearch)
def plot_circuit_search(search: CircuitSearch, ax: Axes | None = None) -> Axes | Figure:
    """Draw a search: what `CircuitSearch.plot` says."""
    begun = search.table[search.table["decision"] != DECISIONS[LEFT_OUT]]
    tried = begun[begun["decision"] != DECISIONS[NOT_TRIED]]
    kept = (tried["decision"] == DECISIONS[KEPT]).to_numpy()
    left = len(begun) - np.cumsum(~kept)
    own = search.alone[search.alone["placebo"].isna()]
    with style(ax):
        if ax is None:
            ax = new_figure(4.6, 3.2).add_subplot()
        for name in ("clean", "corrupted"):
            ax.axhline(own[name].mean(), color=LINE, linewidth=0.8)
            ax.annotate(
                name,
                (1.0, own[name].mean()),
                xycoords=("axes fraction", "data"),
                fontsize="small",
                va="bottom",
                ha="right",
            )
        ax.plot(left, tried["value"], color=PLACEBO, linewidth=1.2, label="left")
        ax.plot(left[kept], tried["value"][kept], "|", color=CIRCUIT, markersize=9, label="an edge is kept")
        ax.invert_xaxis()
        ax.set_xlabel("Edges left")
        ax.set_ylabel(label(str(own["metric"].iloc[0]).replace("_", " ")))
        ax.legend(frameon=False, loc="lower left")
        edges = f"{len(search.circuit):,} of {len(search.table):,} edges kept"
        ax.set_title(model_title(search.run, f"search for a circuit ({edges})"))
    return ax


def _of_metric(table: pd.DataFrame, metric: str | None) -> tuple[pd.DataFrame, str]:
    names = tuple(table["metric"].unique())
    name = names[0] if metric is None else checked_name("metric", metric, names)
    return table[table["metric"] == name], name


def _placebos(part: pd.DataFrame) -> np.ndarray:
    """The faithfulness of each placebo over prompts, the ratio of the means."""
    means = part[part["placebo"].notna()].groupby("placebo")[["value", "clean", "corrupted"]].mean()
    gap = (means["clean"] - means["corrupted"]).to_numpy()
    return ((means["value"] - means["corrupted"]).to_numpy() / np.where(gap == 0, np.nan, gap)).astype(float)
