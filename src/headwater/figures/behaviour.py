"""What heads attend to, on random tokens and on text, and what their parameters say: maps of layer by head.

The colour and shape of a mark say the behaviour that names the head there; its area grows with the excess. Heads that
are called by none are small grey discs. The legend counts heads, on random tokens and on text. Below: the share of OV
eigenvalues, from brown (suppresses) to violet (copies), with a dot where it lies beyond 95 % of random heads; and how
much of the scores before the softmax the positions decide. What has no value is grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.colors import INK
from headwater.errors import InputError
from headwater.figures.head_map import AREAS, CELL, LARGEST, NO_EXCESS_AREA, NONE, mark_heads
from headwater.figures.style import (
    entitle,
    figure_of,
    legend_below,
    legend_beside,
    model_title,
    new_figure,
    style,
    whole_numbers,
)
from headwater.figures.sweep import UNSEEN
from headwater.heads.attended_keys import BEHAVIOURS
from headwater.heads.behaviour import NONE as NOT_CALLED
from headwater.heads.behaviour import AttentionBehaviour, named, words
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS


class Shade(NamedTuple):
    """How a column of `AttentionBehaviour.heads` is coloured."""

    title: str
    bar: str
    colors: str
    ticks: tuple[float, ...]


SEEN = {"random": "random tokens", "text": "text"}
SHADES = {
    "copying": Shade("copying", "Σλ / Σ|λ|, eigenvalues of OV", "PuOr", (-1.0, -0.5, 0.0, 0.5, 1.0)),
    "position": Shade("position", "its share of the scores' variance", "Blues", (0.0, 0.5, 1.0)),
}
UNCALLED_AREA = 0.12
LEFT, BOTTOM, TITLE, LEGEND, LINES = 1.0, 0.75, 0.8, 1.6, 1.7
"""Inches: beside a map and below it, above and below all of them, beside a single one, the least height of a map."""


@DRAWINGS.add(AttentionBehaviour)
def plot_behaviour(result: AttentionBehaviour, ax: Axes | None = None, *, on: str | None = None) -> Axes | Figure:
    """Draw the maps: what `AttentionBehaviour.plot` says."""
    run_on = list(result.table["on"].unique())
    present = [*run_on, *(name for name in SHADES if result.heads[name].notna().any())]
    shown = present if on is None else [checked_name("on", on, present)]
    if ax is not None and len(shown) > 1:
        raise InputError("This figure has several panels: name one with on=, or leave ax= out.")
    with style(ax):
        axes = [ax] if ax is not None else _axes(result, shown)
        for name, place in zip(shown, axes, strict=True):
            _frame(result, place)
            title = SEEN[name] if name in SEEN else SHADES[name].title
            place.set_title(
                title
                if len(shown) > 1
                else model_title(result.run, f"attention on {title}" if name in SEEN else f"{title} by head")
            )
            if name in SHADES:
                _shade(result.heads, name, place)
        marked = {name: (place, _labelled(result.table[result.table["on"] == name]))
                  for name, place in zip(shown, axes, strict=True) if name in SEEN}  # fmt: skip
        for place, labelled in marked.values():
            _mark_heads(labelled, place)
        if marked:
            _legend({name: labelled for name, (_, labelled) in marked.items()}, axes, ax is None)
        if len(shown) > 1:
            entitle(
                figure_of(axes[0]),
                model_title(result.run, "what heads attend to"),
            )
    return axes[0] if len(shown) == 1 else figure_of(axes[0])


def _legend(labelled: dict[str, pd.DataFrame], axes: Sequence[Axes], is_alone: bool) -> None:
    """Say beside a map or below several what marks mean, and how many heads each names, map by map."""
    counts = [one["label"].value_counts() for one in labelled.values()]
    look: dict[str, Any] = {
        "handles": [
            _mark(name, " / ".join(f"{count.get(name, 0):,}" for count in counts)) for name in (*BEHAVIOURS, NOT_CALLED)
        ],
        "title": "area: excess over chance",
    }
    if len(labelled) > 1:
        look["title"] = f"heads ({' / '.join(labelled)}), area: excess over chance"
    if len(axes) == 1:
        legend_beside(axes[0], is_alone, **look)
    else:
        legend_below(figure_of(axes[0]), len(look["handles"]), **look)


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per head: what names it, and the excess of that."""
    excess = table.rename(columns={"behaviour": "label"})[["layer", "head", "label", "excess"]]
    return named(table).merge(excess, on=["layer", "head", "label"], how="left")


def _extent(result: AttentionBehaviour) -> tuple[int, int]:
    return int(result.heads["layer"].max()) + 1, int(result.heads["head"].max()) + 1


def _axes(result: AttentionBehaviour, shown: Sequence[str]) -> list[Axes]:
    """Make a figure of fitting size with axes for each map, those with marks above, and room for the legend."""
    (n_layers, n_heads), maps = _extent(result), len(shown)
    rows = [row for row in ([n for n in shown if n in SEEN], [n for n in shown if n in SHADES]) if row]
    cell = min(CELL, LARGEST[0] / n_layers / maps**0.5, LARGEST[1] / n_heads)
    width, height = max(n_layers * cell, 1.3), max(n_heads * cell, LINES)
    columns = max(map(len, rows))
    figure = new_figure(
        columns * (LEFT + width) + LEGEND * (maps == 1), len(rows) * (BOTTOM + height) + TITLE * (maps > 1)
    )
    panels = figure.subplots(len(rows), columns, squeeze=False)
    for spare in (one for line, row in zip(panels, rows, strict=True) for one in line[len(row) :]):
        spare.remove()
    return [one for line, row in zip(panels, rows, strict=True) for one in line[: len(row)]]


def _frame(result: AttentionBehaviour, ax: Axes) -> None:
    n_layers, n_heads = _extent(result)
    ax.set(xlim=(-0.7, n_layers - 0.3), ylim=(-0.7, n_heads - 0.3), xlabel="Layer", ylabel="Head")
    for axis in (ax.xaxis, ax.yaxis):
        whole_numbers(axis)


def _mark_heads(heads: pd.DataFrame, ax: Axes) -> None:
    for name, rows in heads.groupby("label"):
        color, shape, area = _look(str(name))
        grown = NO_EXCESS_AREA + (1 - NO_EXCESS_AREA) * rows["excess"].clip(0, 1).fillna(1)
        mark_heads(ax, rows, area * 0.8**2 * grown.to_numpy(), c=color, marker=shape, linewidths=0, label=str(name))


def _shade(heads: pd.DataFrame, name: str, ax: Axes) -> None:
    """Colour each head by a number of its own, with a bar that says which."""
    shade, values = SHADES[name], heads.pivot_table(index="head", columns="layer", values=name, dropna=False)
    ax.set_facecolor(UNSEEN)
    grid = np.ma.masked_invalid(values.reindex(columns=range(int(heads["layer"].max()) + 1)).to_numpy())
    edges = [np.arange(n + 1) - 0.5 for n in grid.shape]
    mesh = ax.pcolormesh(*edges[::-1], grid, cmap=shade.colors, vmin=shade.ticks[0], vmax=1.0, rasterized=True)
    ax.set(xlim=(edges[1][0], edges[1][-1]), ylim=(edges[0][0], edges[0][-1]))
    if name == "copying":
        beyond = heads[(heads[name] > heads[f"{name}_high"]) | (heads[name] < heads[f"{name}_low"])]
        mark_heads(ax, beyond, np.full(len(beyond), 0.35**2), c="white", edgecolors=INK, linewidths=0.5)
        ax.set_xlabel("Layer (dot: beyond random heads)")
    bar = ax.figure.colorbar(mesh, ax=ax, fraction=0.05, pad=0.02, ticks=shade.ticks)
    bar.outline.set_visible(False)
    bar.set_label(shade.bar)


def _look(name: str) -> tuple[str, str, float]:
    """Return the colour, shape and relative area of a behaviour's marks."""
    if name not in BEHAVIOURS:
        return *NONE, UNCALLED_AREA
    row = BEHAVIOURS[name]
    return row.color, row.mark, AREAS.get(row.mark, 1.0)


def _mark(name: str, count: str) -> Line2D:
    color, shape, area = _look(name)
    size = 6.5 * area**0.5
    label = f"{words(name)} ({count})"
    return Line2D([], [], linestyle="none", marker=shape, color=color, markersize=size, markeredgewidth=0, label=label)
