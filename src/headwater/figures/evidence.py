"""From weights to a cause: of one relation five panels, of several a line each.

The maps of one relation share their layers and heads, and a ring marks the head that weights and attention name. A
share of 1 is the largest effect of a head there; lines are 95 % intervals over sources.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.causes.naming import BASELINES, NAMED, WAYS
from headwater.causes.results import Evidence, EvidenceSuite
from headwater.colors import BLUE, FAINT, GREEN, INK, ORANGE, PINK, PURPLE
from headwater.errors import InputError
from headwater.figures.style import (
    LINES_ARE,
    cell_ticks,
    color_bar,
    entitle,
    legend_beside,
    model_title,
    new_figure,
    one_panel,
    style,
    ticks,
    whole_numbers,
)
from headwater.runs.result import DRAWINGS

LOOKS: dict[str, tuple[str, str]] = {
    NAMED: (BLUE, "o"),
    "attention": (ORANGE, "s"),
    "other relations' weights": (GREEN, "^"),
    "other relations' effect": (PINK, "D"),
    "effect": (INK, "|"),
    "weights": (PURPLE, "v"),
    "shuffled targets": (FAINT, "x"),
}
MAPS = {
    "margin": "weights write: margin (logits)",
    "attention": "who looks: attention",
    "effect": "who moves it: share of gap",
}
ROLE_LOOKS = {"source": (ORANGE, "s"), "last": (BLUE, "o")}
OURS = "named", "named together"
WIDTH, HEIGHT = 10.0, 5.2
LINE = 0.17
"""Inches of a relation's line."""


@DRAWINGS.add(EvidenceSuite)
def plot_suite(suite: EvidenceSuite, ax: Axes | None = None) -> Axes:
    """Draw relation by relation the named head's share of the largest effect, the baselines beside it."""
    order = suite.measured.sort_values(["family", "share"], ascending=[True, True])["relation"].tolist()
    if not order:
        raise InputError(f"{suite.run.model} can do none of these relations: there is nothing to draw.")
    with one_panel(ax, 6.5, 1.2 + LINE * len(order)) as ax:
        place = {relation: number for number, relation in enumerate(order)}
        for way in (*BASELINES, NAMED):
            rows = suite.ways[(suite.ways["way"] == way) & suite.ways["share"].notna()]
            _shares(ax, rows["relation"].map(place), rows, way, with_lines=way == NAMED)
        families = suite.table.set_index("relation")["family"]
        cell_ticks(ax.yaxis, range(len(order)), [f"{relation}  ({families[relation]})" for relation in order])
        ax.set(ylim=(-0.7, len(order) - 0.3), xlim=(min(-0.05, ax.get_xlim()[0]), 1.05))
        ax.set_xlabel(f"Share of the largest effect ({LINES_ARE.removeprefix('lines: ')} of weights and attention)")
        ax.set_title(model_title(suite.run, "do weights name the cause?"))
        legend_beside(ax, title="head named by")
    return ax


@DRAWINGS.add(Evidence)
def plot_evidence(result: Evidence, ax: Axes | None = None) -> Axes | Figure:
    """Draw five panels; on axes of one's own the last: the share of the head that each way names."""
    if not result.is_measured:
        raise InputError(result.verdict)
    with style(ax):
        if ax is not None:
            rows = result.ways.dropna(subset=["share"]).set_index("way")
            names = [way for way in reversed(WAYS) if way in rows.index]
            for number, way in enumerate(names):
                _shares(ax, [number], rows.loc[[way]], way, with_lines=True)
            ax.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.6, len(names) - 0.4))
            ax.set(xlabel=f"Share of the largest effect ({LINES_ARE})", title=model_title(result.run, result.relation))
            return ax
        figure = new_figure(WIDTH, HEIGHT)
        # Each row is laid out by itself: the names of costs are long.
        above, below = figure.subfigures(2, 1)  # type: ignore[misc]
        axes = [*above.subplots(1, 3), *below.subplots(1, 2)]
        named = result.way(NAMED)
        for (column, title), place in zip(MAPS.items(), axes, strict=False):
            _map(result.table, column, place)
            place.set_title(title)
            for color, width in (("white", 2.6), (INK, 1.2)):  # seen on dark cells and on light ones
                place.plot(named["layer"], named["head"], "o", ms=9, mfc="none", mec=color, mew=width)
        _when(result.when, axes[3])
        _cost(result.cost, axes[4])
        entitle(figure, evidence_title(result))
    return figure


def evidence_title(found: Evidence) -> str:
    """Return the title of figure and view."""
    return model_title(found.run, f"{found.relation}, from weights to a cause")


def _shares(ax: Axes, y: Any, rows: pd.DataFrame, way: str, *, with_lines: bool) -> None:
    color, mark = LOOKS[way]
    if with_lines:
        ax.hlines(y, rows["low"], rows["high"], color=color, lw=1.0)
    # Baselines are larger and hollow: one that is level is seen around the mark of what is compared with it.
    size, edge = (6.5, 1.1) if way in BASELINES else (4.0, 1.2 if mark in "|x" else 0)
    face = "none" if way in BASELINES else color
    ax.plot(rows["share"], y, mark, color=color, mfc=face, ms=size, mew=edge, label=way, ls="none")


def _map(table: pd.DataFrame, column: str, ax: Axes) -> None:
    grid = table.pivot(index="head", columns="layer", values=column).to_numpy(dtype=float)
    largest = np.nanmax(np.abs(grid))
    edges = [np.arange(n + 1) - 0.5 for n in grid.shape]
    ax.set_facecolor("#f4f4f4")
    mesh = ax.pcolormesh(
        *edges[::-1], np.ma.masked_invalid(grid), cmap="RdBu_r", vmin=-largest, vmax=largest, rasterized=True
    )
    ax.set(xlabel="Layer", ylabel="Head")
    for axis in (ax.xaxis, ax.yaxis):
        whole_numbers(axis)
    color_bar(mesh, ax)


def _when(when: pd.DataFrame, ax: Axes) -> None:
    for role, rows in when.groupby("role", sort=False):
        color, mark = ROLE_LOOKS[str(role)]
        ax.fill_between(rows["layer"], rows["low"], rows["high"], color=color, alpha=0.2, lw=0)
        ax.plot(rows["layer"], rows["share"], color=color, marker=mark, ms=2.5, label=f"at the {role} token")
    ax.set(xlabel="Before layer", ylabel="Share of gap", title="when: residual stream patched")
    whole_numbers(ax.xaxis)
    ax.legend()


def _cost(cost: pd.DataFrame, ax: Axes) -> None:
    rows, y = cost.iloc[::-1], range(len(cost))
    both = list(zip(rows["what"], rows["heads"], strict=True))
    # Heads ablated together are named line by line above.
    names = [what if not heads or "," in heads else f"{what} {heads}" for what, heads in both]
    colors = [FAINT if what.startswith("random") else BLUE if what in OURS else ORANGE for what, _ in both]
    ax.hlines(y, rows["low"], rows["high"], color=colors, lw=1.2)
    ax.scatter(rows["cost"], y, c=colors, s=14)
    ax.axvline(0, color=FAINT, lw=0.6)
    cell_ticks(ax.yaxis, y, ticks(names))
    ax.set(xlabel="Logits lost", title="what ablation costs")
