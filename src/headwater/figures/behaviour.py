"""What heads attend to: layer to the right, head upwards, a map for random tokens and one for text.

The colour and shape of a mark say the behaviour that names the head there; its area grows with the excess. Heads that
are called by none are small grey discs. The legend counts heads, on random tokens and on text.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.errors import InputError
from headwater.figures.head_map import AREAS, CELL, LARGEST, NO_EXCESS_AREA, NONE
from headwater.figures.style import figure_of, model_title, style, whole_numbers
from headwater.heads.attended_keys import BEHAVIOURS
from headwater.heads.behaviour import NONE as NOT_CALLED
from headwater.heads.behaviour import AttentionBehaviour, named, words
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS

SEEN = {"random": "random tokens", "text": "text"}
UNCALLED_AREA = 0.12
LEFT, BOTTOM, TOP, TITLE, GAP, LEGEND, LINES = 0.5, 0.45, 0.3, 0.2, 0.3, 1.5, 1.7
"""Inches: around the maps, between them, beside them, and the height of the legend."""


@DRAWINGS.add(AttentionBehaviour)
def plot_behaviour(result: AttentionBehaviour, ax: Axes | None = None, *, on: str | None = None) -> Axes | Figure:
    """Draw the maps: what `AttentionBehaviour.plot` says."""
    present = list(result.table["on"].unique())
    shown = present if on is None else [checked_name("on", on, present)]
    if ax is not None and len(shown) > 1:
        raise InputError("This figure has several panels: name one with on=, or leave ax= out.")
    labels = {one: _labelled(result.table[result.table["on"] == one]) for one in shown}
    with style():
        axes = [ax] if ax is not None else _axes(result, len(shown))
        for one, place in zip(shown, axes, strict=True):
            _draw(labels[one], place)
            place.set_title(SEEN[one] if len(shown) > 1 else model_title(result.run, SEEN[one]))
        axes[0].set_ylabel("Head")
        if len(shown) > 1:
            figure_of(axes[0]).suptitle(
                model_title(result.run, "what heads attend to"), x=0.01, ha="left", size=9, weight="bold"
            )
        counts = {one: labels[one]["label"].value_counts() for one in shown}
        axes[-1].legend(
            handles=[
                _mark(name, " / ".join(f"{counts[one].get(name, 0):,}" for one in shown))
                for name in (*BEHAVIOURS, NOT_CALLED)
            ],
            title=f"heads ({' / '.join(shown)})\narea: excess" if len(shown) > 1 else "area: excess",
            alignment="left",
            loc="upper left",
            bbox_to_anchor=(1.02, 1.0),
            borderaxespad=0.0,
            handletextpad=0.2,
        )
    return axes[0] if len(shown) == 1 else figure_of(axes[0])


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per head: what names it, and the excess of that."""
    excess = table.rename(columns={"behaviour": "label"})[["layer", "head", "label", "excess"]]
    return named(table).merge(excess, on=["layer", "head", "label"], how="left")


def _axes(result: AttentionBehaviour, maps: int) -> list[Axes]:
    """Make a figure of fitting size with axes for each map, and room for the legend."""
    n_layers, n_heads = int(result.heads["layer"].max()) + 1, int(result.heads["head"].max()) + 1
    cell = min(CELL, LARGEST[0] / n_layers / maps**0.5, LARGEST[1] / n_heads)
    width, height = max(n_layers * cell, 1.2), max(n_heads * cell, LINES)
    top = TOP + (TITLE if maps > 1 else 0.0)
    x, y = LEFT + maps * (width + GAP) + LEGEND, BOTTOM + height + top
    figure = plt.figure(figsize=(x, y))
    lefts = [LEFT + number * (width + GAP) for number in range(maps)]
    return [figure.add_axes((left / x, BOTTOM / y, width / x, height / y)) for left in lefts]


def _draw(heads: pd.DataFrame, ax: Axes) -> None:
    n_layers, n_heads = int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1
    ax.set(xlim=(-0.7, n_layers - 0.3), ylim=(-0.7, n_heads - 0.3), xlabel="Layer")
    for axis in (ax.xaxis, ax.yaxis):
        whole_numbers(axis)
    box = ax.get_window_extent()
    points = min(72 / ax.figure.dpi * min(box.width / (n_layers + 0.4), box.height / (n_heads + 0.4)), 72 * CELL)
    for name, rows in heads.groupby("label"):
        color, shape, area = _look(str(name))
        grown = NO_EXCESS_AREA + (1 - NO_EXCESS_AREA) * rows["excess"].clip(0, 1).fillna(1)
        sizes = area * (0.8 * points) ** 2 * grown
        ax.scatter(rows["layer"], rows["head"], s=sizes, c=color, marker=shape, linewidths=0, label=str(name))


def _look(name: str) -> tuple[str, str, float]:
    """Return the colour, shape and relative area of a behaviour's marks."""
    if name not in BEHAVIOURS:
        return *NONE, UNCALLED_AREA
    row = BEHAVIOURS[name]
    return row.color, row.mark, AREAS.get(row.mark, 1.0)


def _mark(name: str, count: str) -> Line2D:
    color, shape, area = _look(name)
    size = 6.5 * area**0.5
    said = f"{words(name)} ({count})"
    return Line2D([], [], linestyle="none", marker=shape, color=color, markersize=size, markeredgewidth=0, label=said)
