"""Edges as a map: senders across, receivers down, in the order of the layers; what is not an edge is left blank.

The colour scale diverges from 0 and reaches equally far both ways; it is of the square root of the size, because a few
edges carry far more than all others. Layers are parted by thin lines.

Paths as a map: senders across, receivers down, in the order they were named; where no path leads is left blank.

The colour scale diverges from 0, reaches equally far both ways, and is of the square root of the size.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure

from headwater.circuits.graph import Nodes
from headwater.circuits.path_patching import PathEffects
from headwater.circuits.result import EdgeEffects
from headwater.figures.style import WAYS, cell_ticks, inches, label, model_title, new_figure, style, ticks
from headwater.runs.result import DRAWINGS

DIVERGING = "RdBu_r"
LINE = "#d0d0d0"
MOST_TICKS = 16


@DRAWINGS.add(EdgeEffects)
def plot_edge_effects(edges: EdgeEffects, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw edges: what `EdgeEffects.plot` says."""
    matrix, graph = edges.matrix(metric), edges.graph
    down = ~np.isnan(matrix).all(1)
    across = ~np.isnan(matrix).all(0)
    shown = matrix[np.ix_(down, across)]
    top = float(np.nanmax(np.abs(shown))) if shown.size else 1.0
    with style(ax):
        if ax is None:
            ax = new_figure(4.6, 4.6).add_subplot()
        norm = FuncNorm((root, square), vmin=-(top or 1.0), vmax=top or 1.0)
        image = ax.imshow(shown, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
        _ticks(ax, "x", graph.senders, np.flatnonzero(across))
        _ticks(ax, "y", graph.receivers, np.flatnonzero(down))
        ax.set_xlabel("Sender")
        ax.set_ylabel("Receiver")
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
    kept = [float(i) for i in range(len(names))]
    if len(names) > MOST_TICKS:
        ends = [*begins[1:], len(present)]
        kept = [(begin + end - 1) / 2 for begin, end in zip(begins, ends, strict=True)]
        names = [names[begin] if layers[begin] < 0 else f"layer {layers[begin]}" for begin in begins]
    cell_ticks(ax.xaxis if is_x else ax.yaxis, kept, names, rotation=90 if is_x else 0)


LONGEST = 28
"""Characters of a name that are drawn."""


@DRAWINGS.add(PathEffects)
def plot_path_effects(paths: PathEffects, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw paths: what `PathEffects.plot` says."""
    matrix = paths.matrix(metric)
    top = float(np.nanmax(np.abs(matrix.to_numpy()))) or 1.0
    with style(ax):
        if ax is None:
            ax = new_figure(4.6, 3.6).add_subplot()
        norm = FuncNorm((root, square), vmin=-top, vmax=top)
        image = ax.imshow(matrix, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
        for names, axis in ((matrix.columns, ax.xaxis), (matrix.index, ax.yaxis)):
            cell_ticks(axis, range(len(names)), ticks(names, LONGEST), rotation=90 if axis is ax.xaxis else 0)
        ax.set_xlabel("Sender")
        ax.set_ylabel("Receiver")
        name = paths.metrics[0] if metric is None else metric
        ax.figure.colorbar(image, ax=ax, pad=0.02).set_label(label(f"Effect on {name.replace('_', ' ')}"))
        n = paths.table["example"].nunique()
        way = "effect of direct paths" if paths.through == "direct" else "effect of paths through MLPs"
        seen = f"{way}, {WAYS[paths.run.options['direction']]}" + f" (n = {n})" * (n > 1)
        ax.set_title(model_title(paths.run, seen))
    return ax
