"""Circuits, claims and edges: how much each does, beside what it is compared with."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure

from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.curve import CircuitCurve
from headwater.circuits.graph import Nodes
from headwater.circuits.path_patching import PathEffects
from headwater.circuits.result import EdgeEffects
from headwater.circuits.search import DECISIONS, KEPT, LEFT_OUT, NOT_TRIED, CircuitSearch
from headwater.colors import BLUE, FAINT, INK
from headwater.figures.style import (
    DASHED,
    MOST_TICKS,
    WAYS,
    cell_ticks,
    inches,
    label,
    legend_above,
    model_title,
    one_panel,
    ticks,
)
from headwater.options import checked_name
from headwater.runs.claim import Claim
from headwater.runs.result import DRAWINGS, Result, whole_summary

# Circuits run alone: the faithfulness of each beside its placebos, and the curve over sizes with theirs as a band.
#
# Both axes of faithfulness show 0 (the empty circuit) and 1 (the model). The band of placebos reaches from their 5 % to
# their 95 % quantile, that of the circuits is the bootstrap interval over prompts.


CIRCUIT, PLACEBO, LINE = "#0b5394", "#9a9a9a", "#d0d0d0"


@DRAWINGS.add(CircuitRuns)
def plot_circuit_runs(runs: CircuitRuns, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw circuits: what `CircuitRuns.plot` says."""
    name, table, summary = _of_metric(runs, metric)
    with one_panel(ax, 4.6, 0.8 + 0.4 * len(summary)) as ax:
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
    name, table, summary = _of_metric(curve, metric)
    summary = summary.sort_values("size")
    with one_panel(ax, 4.6, 3.2) as ax:
        for y in (0.0, 1.0):
            ax.axhline(y, color=LINE, linewidth=0.8)
        others = [_placebos(table[table["circuit"] == circuit]) for circuit in summary["circuit"]]
        if all(len(one) for one in others):
            low, middle, high = (np.array([np.quantile(one, q) for one in others]) for q in (0.05, 0.5, 0.95))
            ax.fill_between(summary["size"], low, high, color=PLACEBO, alpha=0.3, linewidth=0)
            ax.plot(summary["size"], middle, color=PLACEBO, linewidth=1.0, label="random ones of the same shape")
        ax.fill_between(summary["size"], summary["low"], summary["high"], color=CIRCUIT, alpha=0.2, linewidth=0)
        ax.plot(summary["size"], summary["faithfulness"], "o-", color=CIRCUIT, markersize=3.5, label="strongest edges")
        ax.set(xscale="log", xlabel="Part of all edges", ylabel=label(f"Faithfulness on {name.replace('_', ' ')}"))
        n = curve.table["example"].nunique()
        legend_above(ax, 2, model_title(curve.run, "circuits by size, run alone" + f" (n = {n})" * (n > 1)))
    return ax


@DRAWINGS.add(CircuitSearch)
def plot_circuit_search(search: CircuitSearch, ax: Axes | None = None) -> Axes | Figure:
    """Draw a search: what `CircuitSearch.plot` says."""
    begun = search.table[search.table["decision"] != DECISIONS[LEFT_OUT]]
    tried = begun[begun["decision"] != DECISIONS[NOT_TRIED]]
    is_kept = (tried["decision"] == DECISIONS[KEPT]).to_numpy()
    remaining = len(begun) - np.cumsum(~is_kept)
    circuit_rows = search.alone[search.alone["placebo"].isna()]
    with one_panel(ax, 4.6, 3.2) as ax:
        for name in ("clean", "corrupted"):
            ax.axhline(circuit_rows[name].mean(), color=LINE, linewidth=0.8)
            at = ("axes fraction", "data")
            ax.annotate(name, (1.0, circuit_rows[name].mean()), xycoords=at, fontsize="small", va="bottom", ha="right")
        ax.plot(remaining, tried["value"], color=PLACEBO, linewidth=1.2, label="left")
        ax.plot(remaining[is_kept], tried["value"][is_kept], "|", color=CIRCUIT, markersize=9, label="an edge is kept")
        ax.invert_xaxis()
        ax.set(xlabel="Edges left", ylabel=label(str(circuit_rows["metric"].iloc[0]).replace("_", " ")))
        ax.legend(frameon=False, loc="lower left")
        edges = f"{len(search.circuit):,} of {len(search.table):,} edges kept"
        ax.set_title(model_title(search.run, f"search for a circuit ({edges})"))
    return ax


def _of_metric(result: Result, metric: str | None) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """The metric to draw, the first by default, and its rows of a table and of its summary."""
    names = tuple(result.table["metric"].unique())
    name = names[0] if metric is None else checked_name("metric", metric, names)
    table, summary = (rows[rows["metric"] == name] for rows in (result.table, whole_summary(result)))
    return name, table, summary


def _placebos(part: pd.DataFrame) -> np.ndarray:
    """The faithfulness of each placebo over prompts, the ratio of the means."""
    means = part[part["placebo"].notna()].groupby("placebo")[["value", "clean", "corrupted"]].mean()
    gap = (means["clean"] - means["corrupted"]).to_numpy()
    return ((means["value"] - means["corrupted"]).to_numpy() / np.where(gap == 0, np.nan, gap)).astype(float)


# A claim: the effect of the set with its interval, above what it is compared with, from top to bottom.
#
# Of random sets the line ends at the 95 % quantile of their sizes, on the side of the effect, and the mark is their
# mean size. The dashed line is the margin, beyond which the whole interval must lie.


SIZE = (4.8, 2.0)
TITLE = 52
"""Characters of a line of the title."""


@DRAWINGS.add(Claim)
def plot_claim(claim: Claim, ax: Axes | None = None) -> Axes | Figure:
    """Draw a claim: what `Claim.plot` says."""
    row = claim.table.iloc[0]
    side = 1.0 if row["effect"] >= 0 else -1.0
    level = 100 * float(claim.run.options["claim"]["level"])
    name = "the set, of one prompt" if np.isnan(row["low"]) else f"the set, with its\n{level:g} % interval"
    rows: list[tuple[str, float, tuple[float, float] | None, str, str]]
    rows = [(name, row["effect"], (row["low"], row["high"]), BLUE, "o")]
    if not np.isnan(row["placebo"]):
        to = (0.0, side * row["placebo_high"])
        rows.append(("random sets like it:\nmean, 95 % quantile", side * row["placebo"], to, FAINT, "s"))
    if not np.isnan(row["other_ablation"]):
        rows.append(("under another ablation", row["other_ablation"], None, INK, "D"))
    if not np.isnan(row["held_out"]):
        rows.append(("on held-out prompts", row["held_out"], None, INK, "^"))
    with one_panel(ax, *SIZE) as ax:
        ax.axvline(0, color=FAINT, linewidth=0.6, zorder=0)
        if not np.isnan(row["margin"]):
            ax.axvline(side * row["margin"], color=INK, linewidth=0.8, linestyle=DASHED, zorder=0, label="margin")
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for place, (_, value, ends, color, mark) in enumerate(rows):
            if ends is not None:
                ax.hlines(place, *ends, colors=color, linewidths=1.4)
            ax.plot(value, place, mark, color=color, markersize=5)
        ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
        ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel="Effect")
        what = claim.what[:1].lower() + claim.what[1:]
        seen = f"the claim about {what} {'holds' if claim.holds else 'does not hold'}"
        ax.set_title("\n".join(textwrap.wrap(label(model_title(claim.run, seen)), TITLE)))
    return ax


# Edges as a map: senders across, receivers down, in the order of the layers; what is not an edge is left blank.
#
# The colour scale diverges from 0 and reaches equally far both ways; it is of the square root of the size, because a
# few edges carry far more than all others. Layers are parted by thin lines.
#
# Paths as a map: senders across, receivers down, in the order they were named; where no path leads is left blank.
#
# The colour scale diverges from 0, reaches equally far both ways, and is of the square root of the size.


DIVERGING = "RdBu_r"


@DRAWINGS.add(EdgeEffects)
def plot_edge_effects(edges: EdgeEffects, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw edges: what `EdgeEffects.plot` says."""
    matrix, graph = edges.matrix(metric), edges.graph
    down = ~np.isnan(matrix).all(1)
    across = ~np.isnan(matrix).all(0)
    shown = matrix[np.ix_(down, across)]
    top = float(np.nanmax(np.abs(shown))) if shown.size else 1.0
    with one_panel(ax, 4.6, 4.6) as ax:
        norm = FuncNorm((root, square), vmin=-(top or 1.0), vmax=top or 1.0)
        image = ax.imshow(shown, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
        _ticks(ax, "x", graph.senders, np.flatnonzero(across))
        _ticks(ax, "y", graph.receivers, np.flatnonzero(down))
        ax.set(xlabel="Sender", ylabel="Receiver")
        name = edges.metrics[0] if metric is None else metric
        what = "Effect" if edges.is_exact else "Estimate"
        bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
        bar.set_label(label(f"{what} on {name.replace('_', ' ')}"))
        n = len(edges.baselines)
        seen = f"effect of edges, {WAYS[edges.run.options['direction']]}" + f" (n = {n})" * (n > 1)
        ax.set_title(model_title(edges.run, seen))
    return ax


def root(x: np.ndarray) -> np.ndarray:
    """Return the square root of sizes, signs kept."""
    return np.sign(x) * np.sqrt(np.abs(x))


def square(x: np.ndarray) -> np.ndarray:
    """Return the squares, signs kept."""
    return np.sign(x) * np.square(x)


def _ticks(ax: Axes, axis: str, nodes: Nodes, present: np.ndarray) -> None:
    """Name every node where there are few; otherwise the middle of each layer, as far as there is room."""
    names = [nodes.name(int(index)) for index in present]
    layers = nodes.layer[present]
    begins = [i for i in range(len(present)) if i == 0 or layers[i] != layers[i - 1]]
    is_x = axis == "x"
    line = ax.axvline if is_x else ax.axhline
    # Of many layers as thin as leaves the cells between them to be seen.
    width = min(0.4, 2.4 * inches(ax)[0 if is_x else 1] / len(begins))
    for i in begins[1:]:
        line(i - 0.5, color=LINE, linewidth=width)
    positions = [float(i) for i in range(len(names))]
    if len(names) > MOST_TICKS:
        ends = [*begins[1:], len(present)]
        positions = [(begin + end - 1) / 2 for begin, end in zip(begins, ends, strict=True)]
        names = [names[begin] if layers[begin] < 0 else f"layer {layers[begin]}" for begin in begins]
    cell_ticks(ax.xaxis if is_x else ax.yaxis, positions, names, rotation=90 if is_x else 0)


LONGEST = 28
"""Characters of a name that are drawn."""


@DRAWINGS.add(PathEffects)
def plot_path_effects(paths: PathEffects, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw paths: what `PathEffects.plot` says."""
    matrix = paths.matrix(metric)
    top = float(np.nanmax(np.abs(matrix.to_numpy()))) or 1.0
    with one_panel(ax, 4.6, 3.6) as ax:
        norm = FuncNorm((root, square), vmin=-top, vmax=top)
        image = ax.imshow(matrix, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
        for names, axis in ((matrix.columns, ax.xaxis), (matrix.index, ax.yaxis)):
            cell_ticks(axis, range(len(names)), ticks(names, LONGEST), rotation=90 if axis is ax.xaxis else 0)
        ax.set(xlabel="Sender", ylabel="Receiver")
        name = paths.metrics[0] if metric is None else metric
        ax.figure.colorbar(image, ax=ax, pad=0.02).set_label(label(f"Effect on {name.replace('_', ' ')}"))
        n = paths.table["example"].nunique()
        way = "effect of direct paths" if paths.through == "direct" else "effect of paths through MLPs"
        seen = f"{way}, {WAYS[paths.run.options['direction']]}" + f" (n = {n})" * (n > 1)
        ax.set_title(model_title(paths.run, seen))
    return ax
