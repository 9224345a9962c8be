"""Heads beside one another: what they attend to, which of them compose, and the singular vectors of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.colors import BLUE, FAINT, INK
from headwater.errors import InputError
from headwater.figures.head_map import AREAS, CELL, LARGEST, NO_EXCESS_AREA, NONE, extent, frame, mark_heads
from headwater.figures.style import (
    color_bar,
    columns,
    entitle,
    figure_of,
    inches,
    legend_below,
    legend_beside,
    model_title,
    new_figure,
    one_panel,
    others,
    style,
)
from headwater.figures.sweep import UNSEEN, shown
from headwater.heads.behaviour import NONE as NOT_CALLED
from headwater.heads.behaviour import AttentionBehaviour, named, words
from headwater.heads.patterns import BEHAVIOURS
from headwater.heads.weight_maps import CIRCUITS, LONG, SIGNS, Composition, SingularVectors
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS

# What heads attend to, on random tokens and on text, and what their parameters say: maps of layer by head.
#
# The colour and shape of a mark say the behaviour that names the head there; its area grows with the excess. Heads that
# are called by none are small grey discs. The legend counts heads, on random tokens and on text. Below: the share of OV
# eigenvalues, from brown (suppresses) to violet (copies), with a dot where it lies beyond 95 % of random heads; and how
# much of the scores before the softmax the positions decide. What has no value is grey.


SEEN = {"random": "random tokens", "text": "text"}
SHADES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "copying": ("Σλ / Σ|λ|, eigenvalues of OV", "PuOr", (-1.0, -0.5, 0.0, 0.5, 1.0)),
    "position": ("its share of the scores' variance", "Blues", (0.0, 0.5, 1.0)),
}
"""By column of `AttentionBehaviour.heads`: what its bar says, its colours, and the ticks of the bar."""
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
        axes, labelled = [ax] if ax is not None else _axes(result, shown), dict[str, pd.DataFrame]()
        for name, place in zip(shown, axes, strict=True):
            frame(place, result.heads)
            title = SEEN.get(name, name)
            alone = f"attention on {title}" if name in SEEN else f"{title} by head"
            place.set_title(title if len(shown) > 1 else model_title(result.run, alone))
            if name in SHADES:
                _shade(result.heads, name, place)
            else:
                labelled[name] = _mark_heads(result.table[result.table["on"] == name], place)
        if labelled:
            _legend(labelled, axes, ax is None)
        if len(shown) > 1:
            entitle(figure_of(axes[0]), model_title(result.run, "what heads attend to"))
    return axes[0] if len(shown) == 1 else figure_of(axes[0])


def _legend(labelled: dict[str, pd.DataFrame], axes: Sequence[Axes], is_alone: bool) -> None:
    """Say beside a map or below several what marks mean, and how many heads each names, map by map."""
    counts = [one["label"].value_counts() for one in labelled.values()]
    texts = {name: " / ".join(f"{count.get(name, 0):,}" for count in counts) for name in (*BEHAVIOURS, NOT_CALLED)}
    maps = f"heads ({' / '.join(labelled)}), " if len(labelled) > 1 else ""
    handles = [_mark(name, text) for name, text in texts.items()]
    look: dict[str, Any] = {"handles": handles, "title": f"{maps}area: excess over chance"}
    if len(axes) == 1:
        legend_beside(axes[0], is_alone, **look)
    else:
        legend_below(figure_of(axes[0]), len(look["handles"]), **look)


def _axes(result: AttentionBehaviour, shown: Sequence[str]) -> list[Axes]:
    """Make a figure of fitting size with axes for each map, those with marks above, and room for the legend."""
    (n_layers, n_heads), maps = extent(result.heads), len(shown)
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


def _mark_heads(table: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """Mark each head; return a row per head: what names it, and the excess of that."""
    excess = table.rename(columns={"behaviour": "label"})[["layer", "head", "label", "excess"]]
    heads = named(table).merge(excess, on=["layer", "head", "label"], how="left")
    for name, rows in heads.groupby("label"):
        color, shape, area = _look(str(name))
        grown = NO_EXCESS_AREA + (1 - NO_EXCESS_AREA) * rows["excess"].clip(0, 1).fillna(1)
        mark_heads(ax, rows, area * 0.8**2 * grown.to_numpy(), c=color, marker=shape, linewidths=0, label=str(name))
    return heads


def _shade(heads: pd.DataFrame, name: str, ax: Axes) -> None:
    """Colour each head by a number of its own, with a bar that says which."""
    bar, colors, ticks = SHADES[name]
    values = heads.pivot_table(index="head", columns="layer", values=name, dropna=False)
    ax.set_facecolor(UNSEEN)
    grid = np.ma.masked_invalid(values.reindex(columns=range(int(heads["layer"].max()) + 1)).to_numpy())
    edges = [np.arange(n + 1) - 0.5 for n in grid.shape]
    mesh = ax.pcolormesh(*edges[::-1], grid, cmap=colors, vmin=ticks[0], vmax=1.0, rasterized=True)
    ax.set(xlim=(edges[1][0], edges[1][-1]), ylim=(edges[0][0], edges[0][-1]))
    if name == "copying":
        beyond = heads[(heads[name] > heads[f"{name}_high"]) | (heads[name] < heads[f"{name}_low"])]
        mark_heads(ax, beyond, np.full(len(beyond), 0.35**2), c="white", edgecolors=INK, linewidths=0.5)
        ax.set_xlabel("Layer (dot: beyond random heads)")
    color_bar(mesh, ax, bar, ticks=ticks)


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


# Composition of heads: earlier heads upwards, later heads to the right, a map for the queries, keys and values.
#
# The colour is the score above what matrices turned at random would have, from white; lines part the layers. Pairs that
# cannot be (the later head is not later) are left grey.


@DRAWINGS.add(Composition)
def plot_composition(result: Composition, ax: Axes | None = None, *, kind: str | None = None) -> Axes | Figure:
    """Draw the scores: what `Composition.plot` says."""
    present = list(result.table["kind"].unique())
    kinds = present if kind is None else [checked_name("kind", kind, present)]
    if ax is not None and len(kinds) > 1:
        raise InputError("This figure has several panels: name one with kind=, or leave ax= out.")
    above = (result.table["score"] - result.table["expected"]).clip(lower=0)
    limit = float(above.max()) or 1.0
    with style(ax):
        if ax is not None:
            axes = [ax]
        else:
            figure = new_figure(0.6 + 2.5 * len(kinds), 2.8)
            axes = list(figure.subplots(1, len(kinds), squeeze=False)[0])
        for panel, name in zip(axes, kinds, strict=True):
            part = result.table[result.table["kind"] == name]
            mesh = _map(panel, part, above[part.index], limit)
            by = LONG[str(name)]
            panel.set_title(by if len(kinds) > 1 else model_title(result.run, f"composition of heads by {by}"))
        axes[0].set_ylabel("Earlier head, by layer")
        color_bar(mesh, axes, f"Score above chance ({result.table['expected'].iloc[0]:.2f})", fraction=0.04)
        if len(kinds) > 1:
            entitle(figure_of(axes[0]), model_title(result.run, "composition of heads, by parameters"))
    return axes[0] if len(kinds) == 1 else figure_of(axes[0])


def _map(ax: Axes, part: pd.DataFrame, above: pd.Series, limit: float) -> Any:
    heads = max(part["writer_head"].max(), part["reader_head"].max()) + 1
    layers = int(part["reader_layer"].max()) + 1
    grid = np.full((heads * (layers - 1), heads * (layers - 1)), np.nan)
    rows = part["writer_layer"].to_numpy() * heads + part["writer_head"].to_numpy()
    columns = (part["reader_layer"].to_numpy() - 1) * heads + part["reader_head"].to_numpy()
    grid[rows, columns] = above
    ax.set_facecolor(UNSEEN)
    mesh = ax.pcolormesh(np.ma.masked_invalid(grid), cmap="Blues", vmin=0, vmax=limit, rasterized=True)
    step = -(-layers // 12)
    for edge in range(1, layers - 1):
        ax.axhline(edge * heads, color="white", linewidth=0.6)
        ax.axvline(edge * heads, color="white", linewidth=0.6)
    places = np.arange(0, layers - 1, step)
    ax.set_yticks((places + 0.5) * heads, [str(one) for one in places])
    ax.set_xticks((places + 0.5) * heads, [str(one + 1) for one in places])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("Later head, by layer")
    return mesh


# Singular vectors of a head: the share of each of the first ones beside random factors, and the tokens along them.


TOKENS = 4
"""Listed of each side and sign, where there is room."""
SIZE = 6
"""Of their type, in points."""


@DRAWINGS.add(SingularVectors)
def plot_singular_vectors(result: SingularVectors, ax: Axes | None = None) -> Axes:
    """Draw the vectors that have tokens as bars, with their tokens written beside them."""
    table = result.table
    vectors = table["vector"].unique().tolist()
    values = result.values.set_index("vector").loc[vectors]
    first = table.iloc[0]
    with one_panel(ax, 7.2, 0.9 + 0.42 * len(vectors)) as ax:
        ax.barh(vectors, values["share"], height=0.55, color=BLUE, label="share of the circuit")
        ax.plot(values["random_share"], vectors, "|", color=INK, markersize=9, label="of random factors")
        # Beside the bars: two thirds of the width, in letters of their size.
        room = 72 * 0.64 * inches(ax)[0] / (0.55 * SIZE)
        widest = float(max(values["share"].max(), values["random_share"].max()))
        for vector in vectors:
            for sign, offset in zip(SIGNS, (-0.19, 0.19), strict=True):
                part = table[(table["vector"] == vector) & (table["sign"] == sign)]
                sides = [part.loc[part["side"] == side, "token"] for side in CIRCUITS[str(first["circuit"])]]
                lines = (_line(sign, sides, n) for n in range(TOKENS, 0, -1))
                line = next((line for line in lines if columns(line) <= room), _line(sign, sides, 1))
                ax.text(
                    widest * 1.06, vector + offset, line, size=SIZE, va="center", in_layout=False,
                    family=["sans-serif", *others()], color=INK if sign == "+" else FAINT,
                )  # fmt: skip
        ax.set_yticks(vectors, [str(vector) for vector in vectors])
        ax.set(xlim=(0, widest * 3.2), ylim=(max(vectors) + 0.6, 0.4))
        ticks = [tick for tick in ax.get_xticks() if 0 <= tick <= widest * 1.01]
        ax.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
        ax.set(ylabel="Singular vector")
        ax.set_xlabel("Share of the circuit (bar; tick: random factors)", loc="left")
        circuit = f"what {str(first['circuit']).upper()} of layer {first['layer']}, head {first['head']} does to tokens"
        ax.set_title(model_title(result.run, circuit))
    return ax


def _line(sign: str, sides: Iterable[Iterable[str]], n: int) -> str:
    """The first tokens of both sides."""
    first = (" ".join(map(shown, islice(side, n))) for side in sides)
    return f"{sign.replace('-', '−')}  {'  →  '.join(first)}"
