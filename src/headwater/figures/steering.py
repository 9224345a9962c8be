"""Dose–response of steering: the mean effect of a direction on a metric against how much of it was added.

A sweep per dose, `hw.patch(model, prompts, over="layer", values=hw.add(dose * direction), ...)`; a line per layer, its
95 % bootstrap interval over prompts a band. What the doses are times is said by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from headwater.calls import checked_call
from headwater.colors import FAINT, SETS
from headwater.errors import InputError
from headwater.figures.style import checked_place, legend_above, model_title, new_figure, style
from headwater.figures.sweep import metric_label, panel_axes
from headwater.options import checked_kind, checked_number
from headwater.patching.summaries import summarize
from headwater.patching.sweep import Sweep
from headwater.runs.figure_options import Size, apply_title_and_size

MOST = len(SETS)
"""Layers that have a line."""


@checked_call
def dose_response(
    sweeps: Mapping[float, Sweep],
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes:
    """Draw what steering does to a metric, by dose.

    Args:
        sweeps: by dose, what `hw.patch(..., over="layer", values=hw.add(dose * direction))` gave; of one site and
            metric, and of the same prompts.
        ax: where to draw; default: a new figure.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there are no sweeps, they are of several sites or metrics, or run over more than layers.
    """
    size = checked_place(ax, 1, figsize)
    if not isinstance(sweeps, Mapping) or not sweeps:
        raise InputError("sweeps must map doses to what hw.patch gave for each: {0: sweep, 4: sweep}.")
    doses = [
        checked_kind("a value of sweeps", sweep, Sweep, "hw.patch").table.assign(
            dose=checked_number("a dose", dose, -math.inf)
        )
        for dose, sweep in sweeps.items()
    ]
    table, run = pd.concat(doses), next(iter(sweeps.values())).run
    cells = table[["site", "metric"]].drop_duplicates()
    if len(cells) > 1 or set(panel_axes(table, {})) > {"layer"}:
        raise InputError("A dose–response is of one site and metric: measure with sites='...', over='layer'.")
    ((site, metric),) = cells.to_numpy()
    summary = summarize(table, ["layer", "dose"], "effect", 0.95, 0).sort_values("dose")
    layers = sorted(summary["layer"].unique())
    if len(layers) > MOST:
        raise InputError(
            f"These sweeps are of {len(layers)} layers, and {MOST} can be distinguished: choose with layers=."
        )
    with style(ax):
        ax = new_figure(3.6, 2.6).add_subplot() if ax is None else ax
        ax.axhline(0, color=FAINT, linewidth=0.6)
        for layer, (color, mark) in zip(layers, SETS, strict=False):
            rows = summary[summary["layer"] == layer]
            ax.fill_between(rows["dose"], rows["low"], rows["high"], color=color, alpha=0.18, linewidth=0)
            ax.plot(rows["dose"], rows["mean"], color=color, marker=mark, markersize=2.6, label=f"layer {layer}")
        ax.set(xlabel="Dose", ylabel=metric_label(metric, "effect"))
        n = table["example"].nunique()
        seen = f"{site} steered (n = {n:,}" + "; bands: 95 %" * (n > 1) + ")"
        legend_above(ax, 4, model_title(run, seen))
    apply_title_and_size(ax, title, size)
    return ax
