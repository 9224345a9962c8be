"""Paths as a map: senders across, receivers down, in the order they were named; where no path leads is left blank.

The colour scale diverges from 0, reaches equally far both ways, and is of the square root of the size.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure

from headwater.circuits.path_patching import PathEffects
from headwater.figures.edge_effects import DIVERGING, root, square
from headwater.figures.fonts import label, ticks
from headwater.figures.style import WAYS, cell_ticks, model_title, new_figure, style
from headwater.runs.result import DRAWINGS

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
