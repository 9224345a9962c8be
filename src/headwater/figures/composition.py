"""Composition of heads: earlier heads upwards, later heads to the right, a map for the queries, keys and values.

The colour is the score above what matrices turned at random would have, from white; lines part the layers. Pairs that
cannot be (the later head is not later) are left grey.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.errors import InputError
from headwater.figures.style import entitle, figure_of, model_title, new_figure, style
from headwater.figures.sweep import UNSEEN
from headwater.heads.composition import LONG, Composition
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS

COLORS = "Blues"


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
            axes = list(np.atleast_1d(figure.subplots(1, len(kinds), squeeze=False)[0]))
        for one, name in zip(axes, kinds, strict=True):
            part = result.table[result.table["kind"] == name]
            mesh = _map(one, part, above[part.index], limit)
            by = LONG[str(name)]
            one.set_title(by if len(kinds) > 1 else model_title(result.run, f"composition of heads by {by}"))
        axes[0].set_ylabel("Earlier head, by layer")
        bar = axes[0].figure.colorbar(mesh, ax=axes, fraction=0.04, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(f"Score above chance ({result.table['expected'].iloc[0]:.2f})")
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
    mesh = ax.pcolormesh(np.ma.masked_invalid(grid), cmap=COLORS, vmin=0, vmax=limit, rasterized=True)
    step = -(-layers // 12)
    for edge in range(1, layers - 1):
        ax.axhline(edge * heads, color="white", linewidth=0.6)
        ax.axvline(edge * heads, color="white", linewidth=0.6)
    places = np.arange(0, layers - 1, step)
    ax.set_yticks((places + 0.5) * heads, [str(one) for one in places])
    ax.set_xticks((places + 0.5) * heads, [str(one + 1) for one in places])
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    ax.set_xlabel("Later head, by layer")
    return mesh
