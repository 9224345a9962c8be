"""Measured against published numbers, a panel per quantity; on the diagonal the two are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.colors import FAINT, INK
from headwater.errors import InputError
from headwater.figures.style import entitle, label, model_title, new_figure, style
from headwater.reference.published import Reproduction
from headwater.runs.result import DRAWINGS

COLUMNS = 3


@DRAWINGS.add(Reproduction)
def plot_reproduction(reproduction: Reproduction, ax: Axes | None = None) -> Figure:
    """Draw every number that was published and measured."""
    table = reproduction.table.dropna(subset=["difference"])
    if ax is not None:
        raise InputError("This figure has several panels and makes its own: call plot() without ax.")
    if table.empty:
        raise InputError(f"Nothing to draw: no number of {reproduction.run.model} was both published and measured.")
    panels = list(table.groupby("quantity", sort=False))
    columns, rows = min(COLUMNS, len(panels)), -(-len(panels) // COLUMNS)
    with style(ax):
        figure = new_figure(2.3 * columns, 2.4 * rows)
        for place, panel in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
            if place < len(panels):
                _panel(panel, *panels[place])
            else:
                panel.set_axis_off()
        entitle(figure, model_title(reproduction.run, "measured and published"))
    return figure


def _panel(ax: Any, quantity: object, rows: pd.DataFrame) -> None:
    numbers = rows[["published", "measured"]].to_numpy()
    low, high = float(np.min(numbers)), float(np.max(numbers))
    room = 0.06 * (high - low or abs(high) or 1.0)
    limits = (low - room, high + room)
    ax.plot(limits, limits, color=FAINT, linewidth=0.8)
    ax.plot(rows["published"], rows["measured"], "o", color=INK, markersize=3.5, markerfacecolor="none")
    ax.set(xlim=limits, ylim=limits, xlabel="published", ylabel="measured")
    ax.set_aspect("equal")
    name = ",\n".join(label(part) for part in str(quantity).split(", "))
    ax.set_title(f"{name} (n = {len(rows):,})", fontsize=8)
