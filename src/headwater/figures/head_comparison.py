"""What changed in the heads from one model to another: layer by head, or model by model.

Two models: a mark where a head gained (triangle up), lost (triangle down), strengthened or weakened (plus, minus) a
relation, in the colour of the relation's category; the largest change of a head is drawn. Grey discs are heads that are
classified in the first model and did not change. More than two: how many heads each category has, model by model, and
below, how many heads gained and lost a relation against the first.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.errors import InputError
from headwater.figures.style import label, legend_beside, new_figure, style, ticks, whole_numbers
from headwater.heads.categories import CATEGORIES
from headwater.heads.comparison import HeadComparison
from headwater.runs.result import DRAWINGS, whole_summary

MARKS = {"gained": "^", "lost": "v", "stronger": "+", "weaker": "_"}
UNCHANGED = "#cfcfcf"
CELL = 0.24
"""Inches between heads."""
LARGEST = (6.0, 4.2)


@DRAWINGS.add(HeadComparison)
def plot_comparison(comparison: HeadComparison, ax: Axes | None = None) -> Axes | Figure:
    """Draw the changes of heads, or of more than two models the curves over models.

    A given `ax` takes the changes from the first model to one other.
    """
    if len(comparison.models) == 2:
        with style(ax):
            return _draw_changes(comparison, ax)
    if ax is not None:
        raise InputError("The figure of more than two models has two panels: leave ax= out, or compare two models.")
    with style(ax):
        return _draw_curves(comparison)


def _draw_changes(comparison: HeadComparison, ax: Axes | None) -> Axes:
    table = comparison.table
    n_layers, n_heads = int(table["layer"].max()) + 1, int(table["head"].max()) + 1
    is_alone = ax is None
    if ax is None:
        cell = min(CELL, LARGEST[0] / n_layers, LARGEST[1] / n_heads)
        size = (max(n_layers * cell, 1.4) + 2.6, max(n_heads * cell, 1.6) + 0.9)
        ax = new_figure(*size).add_subplot()
    first, other = comparison.models
    ax.set(xlim=(-0.7, n_layers - 0.3), ylim=(-0.7, n_heads - 0.3), xlabel="Layer", ylabel="Head")
    ax.set_title(label(f"{first} → {other}: heads that changed"))
    for axis in (ax.xaxis, ax.yaxis):
        whole_numbers(axis)
    largest = comparison.changed.drop_duplicates(["layer", "head"])
    same = _unchanged(table, first, largest)
    ax.scatter(same["layer"], same["head"], s=14, c=UNCHANGED, linewidths=0)
    for (change, category), rows in largest.groupby(["change", largest["category"].fillna("")]):
        color = CATEGORIES[str(category)].color if category else INK
        ax.scatter(rows["layer"], rows["head"], s=30, c=color, marker=MARKS[str(change)], linewidths=1.2)
    handles = [_mark("o", UNCHANGED, f"classified, unchanged ({len(same):,})")]
    counts = largest["change"].value_counts()
    handles += [_mark(mark, INK, f"{name} ({counts.get(name, 0):,})") for name, mark in MARKS.items()]
    present = [name for name in CATEGORIES if name in set(largest["category"])]
    handles += [_mark("s", CATEGORIES[name].color, name) for name in present]
    legend_beside(ax, is_alone, handles=handles, title="mark: change, colour: category")
    return ax


def _unchanged(table: pd.DataFrame, first: str, changed: pd.DataFrame) -> pd.DataFrame:
    """The heads that are classified in the first model and have no named change."""
    classified = table[(table["model"] == first) & table["found"] & table["category"].notna()]
    heads = classified[["layer", "head"]].drop_duplicates()
    drawn = pd.MultiIndex.from_frame(changed[["layer", "head"]])
    return heads[~pd.MultiIndex.from_frame(heads).isin(drawn)]


def _draw_curves(comparison: HeadComparison) -> Figure:
    models, summary = comparison.models, whole_summary(comparison)
    figure = new_figure(max(3.6, 0.5 * len(models) + 2.2), 4.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at = range(len(models))
    for name, category in CATEGORIES.items():
        heads = summary[summary["category"] == name]["heads"]
        upper.plot(at, heads, marker=category.mark, color=category.color, markersize=4, clip_on=False, label=name)
    upper.set(ylabel="Heads", ylim=(0, None))
    upper.set_title("Heads by category")
    upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    every = summary[summary["category"] == "any"]
    lower.bar(at, every["gained"], width=0.6, color=BLUE, label="gained")
    lower.bar(at, -every["lost"], width=0.6, color=ORANGE, hatch="///", edgecolor="white", label="lost")
    lower.axhline(0, color=FAINT, linewidth=0.6)
    most = max(1, int(every[["gained", "lost"]].to_numpy().max()))
    lower.set(ylabel="Heads", ylim=(-1.15 * most, 1.15 * most))
    lower.set_title(label(f"Gained or lost a relation since {models[0]}"))
    lower.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    lower.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    lower.set_xticks(at, ticks(models, 24), rotation=30 if len(models) > 4 else 0)
    for axes in (upper, lower):
        whole_numbers(axes.yaxis)
    return figure


def _mark(shape: str, color: str, name: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker=shape, color=color, markersize=5, label=name)
