"""How often a model declines what it answered in either mode, with 95 % intervals."""

from __future__ import annotations

from matplotlib.axes import Axes

from headwater.figures.fonts import ticks
from headwater.figures.pathway_controls import MODE_LOOKS
from headwater.figures.style import LINES_ARE, legend_above, model_title, new_figure, style
from headwater.pathways.declined import Refusals
from headwater.pathways.modes import MODES
from headwater.runs.result import DRAWINGS


@DRAWINGS.add(Refusals)
def plot_refusals(found: Refusals, ax: Axes | None = None) -> Axes:
    """Draw a row per question set and way to tell the modes, a mark and interval per mode.

    Args:
        found: what `refusals` gave.
        ax: where to draw; default: a new figure.
    """
    rows = found.summary()
    names = [f"{name}, {by}" for name, by in zip(ticks(rows["dataset"]), rows["split_by"], strict=True)]
    with style(ax):
        if ax is None:
            ax = new_figure(4.2, 0.9 + 0.28 * len(rows)).add_subplot()
        for shift, mode, column in zip((-0.12, 0.12), MODES, ("q_refused", "a_refused"), strict=True):
            color, marker = MODE_LOOKS[mode]
            y = [place + shift for place in range(len(rows))]
            ax.hlines(y, 100 * rows[f"{column}_low"], 100 * rows[f"{column}_high"], colors=color, linewidths=1.2)
            ax.plot(100 * rows[column], y, marker, color=color, markersize=3.6, linestyle="none", label=mode)
        ax.set_yticks(range(len(rows)), names)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(left=min(0.0, ax.get_xlim()[0]))
        ax.set_xlabel(f"Questions declined when asked again (%)\n({LINES_ARE})")
        legend_above(ax, 2, model_title(found.run, "refusals by mode"))
    return ax
