"""Head maps compared: from model to model, against the threshold, and with what heads do when they run."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.errors import InputError
from headwater.figures.head_map import LARGEST, extent, frame
from headwater.figures.style import (
    DASHED,
    LINES_ARE,
    MARKS_ONLY,
    cell_ticks,
    entitle,
    label,
    legend_above,
    legend_beside,
    model_title,
    new_figure,
    one_panel,
    style,
    ticks,
    whole_numbers,
)
from headwater.heads.ablation import HeadAblation
from headwater.heads.categories import CATEGORIES
from headwater.heads.comparison import HeadComparison
from headwater.heads.dynamic import DynamicScores
from headwater.heads.scoring import Sensitivity
from headwater.runs.result import DRAWINGS, whole_summary

# What changed in the heads from one model to another: layer by head, or model by model.
#
# Two models: a mark where a head gained (triangle up), lost (triangle down), strengthened or weakened (plus, minus) a
# relation, in the colour of the relation's category; the largest change of a head is drawn. Grey discs are heads that
# are classified in the first model and did not change. More than two: how many heads each category has, model by model,
# and below, how many heads gained and lost a relation against the first.


MARKS = {"gained": "^", "lost": "v", "stronger": "+", "weaker": "_"}
UNCHANGED = "#cfcfcf"
CELL = 0.24
"""Inches between heads."""


@DRAWINGS.add(HeadComparison)
def plot_comparison(comparison: HeadComparison, ax: Axes | None = None) -> Axes | Figure:
    """Draw the changes of heads, or of more than two models the curves over models.

    A given `ax` takes the changes from the first model to one other.
    """
    if ax is not None and len(comparison.models) != 2:
        raise InputError("The figure of more than two models has two panels: leave ax= out, or compare two models.")
    with style(ax):
        return _draw_changes(comparison, ax) if len(comparison.models) == 2 else _draw_curves(comparison)


def _draw_changes(comparison: HeadComparison, ax: Axes | None) -> Axes:
    table = comparison.table
    n_layers, n_heads = extent(table)
    is_alone = ax is None
    if ax is None:
        cell = min(CELL, LARGEST[0] / n_layers, LARGEST[1] / n_heads)
        size = (max(n_layers * cell, 1.4) + 2.6, max(n_heads * cell, 1.6) + 0.9)
        ax = new_figure(*size).add_subplot()
    first, other = comparison.models
    frame(ax, table)
    ax.set_title(label(f"{first} → {other}: heads that changed"))
    largest = comparison.changed.drop_duplicates(["layer", "head"])
    classified = table[(table["model"] == first) & table["found"] & table["category"].notna()]
    heads, drawn = (one[["layer", "head"]].drop_duplicates() for one in (classified, largest))
    same = heads[~pd.MultiIndex.from_frame(heads).isin(pd.MultiIndex.from_frame(drawn))]
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


def _draw_curves(comparison: HeadComparison) -> Figure:
    models, summary = comparison.models, whole_summary(comparison)
    figure = new_figure(max(3.6, 0.5 * len(models) + 2.2), 4.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    at = range(len(models))
    for name, category in CATEGORIES.items():
        heads = summary[summary["category"] == name]["heads"]
        upper.plot(at, heads, marker=category.mark, color=category.color, markersize=4, clip_on=False, label=name)
    upper.set(ylabel="Heads", ylim=(0, None), title="Heads by category")
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


# How many heads are classified, against the threshold: a line per category, a panel per rule.
#
# The black line counts heads in any category; a head of several counts in the line of each. The dashed upright line is
# the threshold of the head map itself, in the panel of its rule. Where other settings were scored, a last panel has the
# heads that each calls, and how many of them the map calls alike.


PANEL = (2.7, 2.8)
ANY = "any category"


@DRAWINGS.add(Sensitivity)
def plot_sensitivity(sensitivity: Sensitivity, ax: Axes | None = None) -> Axes | Figure:
    """Draw what `HeadMap.sensitivity` returns.

    A given `ax` takes that of a map without a null model, which has one panel.
    """
    rules = list(dict.fromkeys(sensitivity.table["rule"]))
    n_settings = sensitivity.table["setting"].nunique()
    n_panels = len(rules) + (n_settings > 1)
    if ax is not None and n_panels > 1:
        raise InputError("The figure has several panels, a panel per rule and one of other settings: leave ax= out.")
    with style(ax):
        if ax is not None:
            _draw(sensitivity, rules[0], ax)
            ax.set_title(model_title(sensitivity.run, f"heads classified, {rules[0]} rule"))
            ax.legend(loc="upper right")
            return ax
        figure = new_figure(max(n_panels * PANEL[0], 3.6), max(PANEL[1], 1.4 + 0.2 * n_settings))
        panels = figure.subplots(1, n_panels, squeeze=False)[0]
        for panel, rule in zip(panels, rules, strict=False):
            _draw(sensitivity, rule, panel)
        for panel in panels[1 : len(rules)]:
            panel.sharey(panels[0])
            panel.set_ylabel("")
        handles, names = panels[0].get_legend_handles_labels()
        if n_panels > len(rules):
            rows, last = sensitivity.at_own_threshold, panels[-1]
            handles.append(last.barh(range(len(rows)), rows["heads"], color=FAINT, height=0.7))
            handles.append(last.scatter(rows["kept"], range(len(rows)), color=INK, s=12, zorder=2))
            names += ["called", "of these, in the map"]
            last.set(yticks=[*range(len(rows))], yticklabels=rows["setting"], ylim=(len(rows) - 0.5, -0.5))
            last.set(xlabel="Heads", title="other settings")
            whole_numbers(last.xaxis)
        columns = max(2, int(figure.bbox_inches.width))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, title="dashed: the map's")
        entitle(figure, model_title(sensitivity.run, "heads classified, by threshold"))
    return figure


def _draw(sensitivity: Sensitivity, rule: str, ax: Axes) -> None:
    rows = sensitivity.as_mapped[sensitivity.as_mapped["rule"] == rule]
    ax.plot(rows["threshold"], rows["heads"], color=INK, marker="o", markersize=3, clip_on=False, label=ANY)
    for name, category in CATEGORIES.items():
        if name in rows:
            ax.plot(
                rows["threshold"], rows[name], color=category.color, marker=category.mark, markersize=3, linewidth=0.9,
                clip_on=False, label=label(name),
            )  # fmt: skip
    if rule == sensitivity.run.options["rule"]:
        ax.axvline(sensitivity.run.options["threshold"], color=FAINT, linewidth=0.8, linestyle=DASHED, zorder=0)
    most = max(1, int(sensitivity.table["heads"].max()))
    what = "excess\n(score beyond chance)" if rule == "controlled" else "score"
    ax.set(xlabel=f"Threshold of the {what}", ylabel="Heads", ylim=(0, 1.05 * most), title=f"{rule} rule")
    cell_ticks(ax.xaxis, rows["threshold"], [f"{one:g}" for one in rows["threshold"]])
    whole_numbers(ax.yaxis)


# Figures of head validation: static–dynamic correlations per relation, and accuracy as heads are removed.


CONTEXT_LOOKS = {"without": (BLUE, "o"), "with": (ORANGE, "s")}


@DRAWINGS.add(DynamicScores)
def plot_correlations(scores: DynamicScores, ax: Axes | None = None) -> Axes:
    """Draw the correlation of static and dynamic scores with its interval, a line per relation and context."""
    rows = scores.correlations[scores.correlations["sign"] == "score"]
    names = list(dict.fromkeys(rows["relation"]))
    heads = f"{int(rows['heads'].max()):,}"
    with one_panel(ax, 4.5, 0.95 + 0.22 * len(names)) as ax:
        for shift, (context, (color, mark)) in zip((-0.15, 0.15), CONTEXT_LOOKS.items(), strict=True):
            found = rows[rows["context"] == context].set_index("relation").loc[names]
            y = [place + shift for place in range(len(names))]
            ax.hlines(y, found["low"], found["high"], colors=color, linewidths=1)
            ax.plot(found["pearson"], y, mark, color=color, markersize=4, label=f"{context} context")
        ax.set_yticks(range(len(names)), ticks(name.replace("_", " ") for name in names))
        ax.set(
            xlim=(min(0.0, rows["low"].min(skipna=True) or 0.0), 1.02),
            xlabel=f"Pearson correlation over {heads} heads ({LINES_ARE})",
        )
        ax.set_ylim(len(names) - 0.4, -0.6)
        legend_above(ax, 2, model_title(scores.run, "scores of heads, static and dynamic"), **MARKS_ONLY)
    return ax


@DRAWINGS.add(HeadAblation)
def plot_ablation(ablation: HeadAblation, ax: Axes | None = None) -> Axes:
    """Draw accuracy against the number of heads removed."""
    table = ablation.table
    base = table[(table["role"] == "relation") & (table["removed"] == "none")]
    with one_panel(ax, 3.6, 3.0) as ax:
        for removed, color, look in (("relation heads", BLUE, "o-"), ("random heads", FAINT, "s--")):
            rows = table[(table["role"] == "relation") & (table["removed"] == removed)]
            if rows.empty:
                continue
            means = rows.groupby("n_heads")["accuracy"].agg(["mean", "min", "max"])
            x = [0, *means.index]
            start = base["accuracy"].iloc[0]
            ax.fill_between(x, [start, *means["min"]], [start, *means["max"]], color=color, alpha=0.2, linewidth=0)
            draws = rows["draw"].nunique()
            name = f"{removed} ({draws} draws, band: all)" if draws > 1 else removed
            ax.plot(x, [start, *means["mean"]], look, color=color, markersize=3, label=name)
        controls = table[(table["role"] == "control") & (table["removed"] == "relation heads")]
        if len(controls):
            ax.plot(
                controls["n_heads"], controls["accuracy"], "x", color=INK, markersize=5, label="on control relations"
            )
        ax.set(ylim=(-0.03, 1.03), xlabel="Heads removed", ylabel="Accuracy")
        whole_numbers(ax.xaxis)
        items = base["items"].iloc[0]
        seen = f"{label(ablation.relation.replace('_', ' '))} ({items:,} items)"
        legend_above(ax, 1, model_title(ablation.run, f"heads removed,\n{seen}"))
    return ax
