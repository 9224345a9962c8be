"""Pathways: how a truthfulness probe changes when answers cannot attend to the question's exact words, and controls.

ΔP against the layer: a panel per model; ΔP in percentage points against the layer of the probe. Each question set has a
colour and marker; Q-anchored examples are solid, A-anchored ones dashed with open markers. 95 % bands over examples;
one legend below all panels, with the number of examples in each mode at l*, and a dagger if the probe is not above
chance. The published form (Luo et al., ACL 2026, Figure 2) has no markers, and draws A-anchored examples in separate
colours: orange, red, brown and grey; the number of examples and the probe's AUC are below its legend. A curve of fewer
than ten examples is thin, with open markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from headwater.calls import checked_call
from headwater.colors import BLUE, BROWN, FAINT, GREEN, ORANGE, PURPLE, RED, SETS, looks_of_sets, places_of_sets
from headwater.errors import InputError
from headwater.figure_options import Size, apply_title_and_size
from headwater.figures.published import StyleName, in_order, is_published, model_name, set_name, set_names
from headwater.figures.style import (
    BANDS_ARE,
    DAGGER,
    DAGGER_IS,
    DASHED,
    LINES_ARE,
    checked_place,
    label,
    legend_above,
    model_title,
    new_figure,
    one_panel,
    panel_grid,
    plain_title,
    set_figure_title,
    short_name,
    ticks,
    whole_numbers,
)
from headwater.figures.style import style as shared_look
from headwater.options import checked_name
from headwater.pathways.interventions import ANSWER_ONLY, EXACT, EXACT_ON_RANDOM_ROWS, RANDOM, RANDOM_SWAP, SWAP
from headwater.pathways.modes import ALL, BEST_LAYER, CROSSED, FEWEST, MODES, PER_LAYER, RANDOM_SPLIT, WITHIN, SplitName
from headwater.pathways.refusal_rates import Refusals
from headwater.pathways.report import SetAtBest, share_of
from headwater.pathways.tables import ANY_MODE, AWARE, BY_LOGIT, MARGIN, PROBE, RELATION, RELATION_ANSWER, SPANS
from headwater.pathways.tables import WRONG_ANSWER as WRONG
from headwater.pathways.trace import Pathways
from headwater.runs.result import DRAWINGS, whole_summary, with_interval

PUBLISHED = (ORANGE, RED, BROWN, FAINT)
"""The published colours of A-anchored examples, by question set."""
DASHES: dict[str, Any] = {"Q-anchored": "-", "A-anchored": DASHED}
HOLLOW: dict[str, Any] = {"linewidth": 0.5, "markerfacecolor": "white", "markersize": 3.2}
SHORT = {"delta_p": "ΔP", "delta_logit": "change of the probe's logit"}
VALUES = {"delta_p": "ΔP (percentage points)", "delta_logit": "Change of the probe's logit"}
SPLIT_BY = {
    PER_LAYER: "modes at each layer",
    BEST_LAYER: "modes at l*",
    CROSSED: "modes by another probe",
    RANDOM_SPLIT: "modes by random tokens (control)",
}
"""How modes are distinguished, as in titles."""
COUNTED = "examples in this mode at l*, the probe's best layer"
SPELLED = f"ΔP: the question's exact words severed; {BANDS_ARE}"
MOST_SETS = 4
PANEL = (2.9, 2.3)
LINE = 0.17
ROOMY: dict[str, Any] = {"handlelength": 2.6, "columnspacing": 2.0, "title_fontsize": 7, "borderpad": 0.1}


@checked_call
def delta_p(
    pathways: Sequence[Pathways],
    *,
    split_by: SplitName | None = None,
    value: str = "delta_p",
    titles: Sequence[str] | None = None,
    columns: int | None = None,
    style: StyleName = "headwater",
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw ΔP against the layer, a panel per model, with one legend for all.

    Args:
        pathways: results of `hw.trace_pathways`.
        split_by: how the modes are defined: "per layer" (published), "best layer", "cross-fitted" or "random tokens".
        value: `delta_p` or `delta_logit`.
        titles: of the panels; by default the models' names.
        columns: panels in a row; up to three by default.
        style: "headwater", or "published": models, series and axes by their published names, without counts.
        ax: axes for a single model, with the legend below; default: a new figure.
        title: above all panels; for a single panel, replaces its title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there is nothing to draw, an option has an unknown value, or `ax` was passed for several models.
    """
    shown, as_published = list(pathways), is_published(style)
    size = checked_place(ax, len(shown), figsize)
    if not shown:
        raise InputError("delta_p needs a list of results of trace_pathways; the list is empty.")
    checked_name("value", value, tuple(VALUES))
    splits = [_split(result, split_by) for result in shown]
    titles = _titles(shown, splits, value, as_published) if titles is None else [label(one) for one in titles]
    if len(titles) != len(shown):
        raise InputError(f"Found {len(titles)} titles for {len(shown)} panels; pass one for each.")
    columns = columns or min(len(shown), 3)
    rows = -(-len(shown) // columns)
    names = _names(shown)
    names = in_order(names) if as_published else names
    axis_name = VALUES[value].partition(" (")[0] if as_published else VALUES[value]
    with shared_look(ax):
        handles, labels = _published_legend(names) if as_published else _legend(shown, names, split_by)
        look: dict[str, Any] = {"loc": "upper center", "ncols": 2, "title": None if as_published else _counted(shown)}
        if ax is not None:
            _draw(ax, shown[0], names, splits[0], value, as_published)
            ax.set(ylabel=axis_name, title=titles[0])
            ax.legend(handles, labels, bbox_to_anchor=(0.5, -0.2), **look, **ROOMY)
            return apply_title_and_size(ax, title, None)
        entries = 1 + len(shown) * len(names) if as_published else 4 + bool(chance_note(shown))
        below = LINE * (len(names) + entries) + 0.1
        figure = new_figure(max(PANEL[0] * columns, 3.6), PANEL[1] * rows + below)
        height = (size or figure.get_size_inches())[1]
        halves: Any = figure.subfigures(2, 1, height_ratios=(max(height - below, below), below))
        above, legend = halves
        axes = panel_grid(above, len(shown), columns)
        for panel, result, split, name in zip(axes, shown, splits, titles, strict=True):
            _draw(panel, result, names, split, value, as_published)
            panel.set_title(name)
        for panel in axes[::columns]:
            panel.set_ylabel(axis_name)
        legend.legend(handles, labels, **look, **ROOMY)
        if as_published:
            legend.text(0.5, 0.0, _counts_note(shown), ha="center", va="bottom", fontsize=6)
        elif len(shown) > 1:
            set_figure_title(figure, f"{SHORT[value]} without the question's exact words")
    return apply_title_and_size(figure, title, size)


def _titles(shown: Sequence[Pathways], splits: Sequence[str], value: str, as_published: bool) -> list[str]:
    """Return the default titles of the panels."""
    if as_published:
        return [model_name(short_name(result.run.model)) for result in shown]
    if len(shown) == 1:
        return [label(title_of(shown[0], splits[0], value))]
    return [model_title(result.run, SPLIT_BY[split]) for result, split in zip(shown, splits, strict=True)]


@DRAWINGS.add(Pathways)
def plot_delta_p(
    pathways: Pathways, ax: Axes | None = None, *, split_by: SplitName | None = None, value: str = "delta_p"
) -> Axes | Figure:
    """Draw one model's ΔP against the layer: on `ax` with a small legend below, or as a separate figure."""
    return delta_p([pathways], split_by=split_by, value=value, ax=ax)


def default_split(pathways: Pathways) -> str:
    """Return the default way to distinguish modes: as published if the trace has it, else at l*."""
    return PER_LAYER if (pathways.curves["split_by"] == PER_LAYER).any() else BEST_LAYER


def _split(pathways: Pathways, split_by: str | None) -> str:
    splits = list(dict.fromkeys(pathways.curves["split_by"]))
    if split_by is None:
        return default_split(pathways)
    return checked_name("split_by", split_by, splits)


def _names(shown: Sequence[Pathways]) -> list[str]:
    """Return the question sets of all panels, in order; raise if there are more than `MOST_SETS`."""
    names = list(dict.fromkeys(name for one in shown for name in one.datasets))
    if len(names) > MOST_SETS:
        raise InputError(f"A figure shows at most {MOST_SETS} question sets; these results have {len(names)}.")
    return names


def title_of(pathways: Pathways, split_by: str, value: str = "delta_p") -> str:
    """Return the title of one model's curves as plain text: the value drawn and how the examples were split."""
    return plain_title(pathways.run.model, f"{SHORT[value]}, {SPLIT_BY[split_by]}")


def _draw(ax: Axes, pathways: Pathways, names: Sequence[str], split_by: str, value: str, as_published: bool) -> None:
    curves = pathways.curves[pathways.curves["split_by"] == split_by]
    ax.axhline(0, color=FAINT, linewidth=0.6)
    for mode in MODES:
        for name in pathways.datasets:
            line = curves[(curves["dataset"] == name) & (curves["mode"] == mode)].sort_values("layer")
            look = look_of(name, mode, names, as_published)
            if 0 < line["examples"].max() < FEWEST:
                look |= HOLLOW | {"marker": SETS[places_of_sets(names)[name]][1]}
            bounds = line[f"{value}_low"], line[f"{value}_high"]
            ax.fill_between(line["layer"], *bounds, color=look["color"], alpha=0.15, linewidth=0)
            ax.plot(line["layer"], line[value], **look)
    ax.set_xlabel(layer_label(pathways))
    whole_numbers(ax.xaxis)
    ax.margins(x=0.04)


def layer_label(pathways: Pathways) -> str:
    """Return the label of the axis of layers."""
    return "Layer" if pathways.run.options["window"] is None else "Layer around which edges are severed"


def look_of(name: str, mode: str, names: Sequence[str], as_published: bool = False) -> dict[str, Any]:
    """Return the line style of a question set and mode in a figure with the sets `names`."""
    place = places_of_sets(names)[name]
    color, mark = SETS[place]
    mark = "" if as_published else mark
    look: dict[str, Any] = {"color": color, "linestyle": DASHES[mode], "marker": mark, "markersize": 2.6}
    if mode == MODES[0]:
        return look
    return look | ({"color": PUBLISHED[place]} if as_published else {"markerfacecolor": "white", "markersize": 3.2})


def _legend(shown: Sequence[Pathways], names: Sequence[str], split_by: str | None) -> tuple[list[Line2D], list[str]]:
    """Return the entries of the legend, a column per mode: its name, then its question sets."""
    handles, labels = [], []
    for mode in MODES:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(mode)
        for name in names:
            counts = ", ".join(_count(one, name, mode, split_by) + DAGGER * _at_chance(one, name) for one in shown)
            handles.append(Line2D([], [], **look_of(name, mode, names)))
            labels.append(f"{label(name)} ({counts})")
    return handles, labels


def _published_legend(names: Sequence[str]) -> tuple[list[Line2D], list[str]]:
    """Return the published legend, a column per mode."""
    found = [(mode, name) for mode in MODES for name in names]
    handles = [Line2D([], [], **look_of(name, mode, names, as_published=True)) for mode, name in found]
    called = set_names(names)
    return handles, [f"{mode.replace('anchored', 'Anchored')} ({called[name]})" for mode, name in found]


def _counts_note(shown: Sequence[Pathways]) -> str:
    """Return a line per panel and question set: the number of examples in each mode at l*, and the probe's AUC."""
    lines = []
    for result in shown:
        for name in result.datasets:
            view, counts = SetAtBest(result, name), [_count(result, name, mode, BEST_LAYER) for mode in MODES]
            auc = with_interval(*view.baseline(WRONG, PROBE))
            note = f"n = {counts[0]} Q-anchored + {counts[1]} A-anchored; probe's AUC {auc}"
            lines.append(label(f"{model_name(short_name(result.run.model))}, {set_name(name)}: {note}"))
    return "\n".join(lines)


def chance_note(shown: Sequence[Pathways]) -> str:
    """Name the runs and question sets whose probe is not above chance, so their curves mean nothing; "" if none."""
    found = [f"{short_name(one.run.model)}, {name}" for one in shown for name in one.datasets if _at_chance(one, name)]
    return f"The probe is not above chance, so its curves are not informative: {'; '.join(found)}." if found else ""


def _at_chance(pathways: Pathways, name: str) -> bool:
    """Whether the probe of a question set is not above chance."""
    return name in pathways.datasets and not SetAtBest(pathways, name).baseline(WRONG, PROBE)[1] > 0.5


def _counted(shown: Sequence[Pathways]) -> str:
    marked = f"\n{DAGGER_IS}" if chance_note(shown) else ""
    return f"In brackets{', panel by panel' if len(shown) > 1 else ''}: {COUNTED}\n{SPELLED}{marked}"


def _count(pathways: Pathways, name: str, mode: str, split_by: str | None) -> str:
    """Return the mean number over seeds of a set's examples in a mode at l* (the same for crossed modes)."""
    modes = pathways.modes[pathways.modes["dataset"] == name]
    if modes.empty:
        return "–"
    if split_by == RANDOM_SPLIT:
        curves = pathways.curves[(pathways.curves["dataset"] == name) & (pathways.curves["split_by"] == split_by)]
        at_best = curves[(curves["mode"] == mode) & (curves["layer"] == SetAtBest(pathways, name).layer)]
        return f"{at_best['share'].sum() * modes['example'].nunique():,.0f}"
    return f"{(modes['mode'] == mode).sum() / modes['seed'].nunique():,.0f}"


# The controls: how often predictions flip, by layer and intervention, and ΔP at l* by mode.
#
# A knockout of E_Q is informative only beside the same knockout of equally many random question tokens, on the rows
# that have enough of them: titles count these. A mode is informative only if it comes from another probe than the one
# whose ΔP is shown. What would overturn the finding: the probe's AUC compared with relation, answer words, span length,
# and the margin.

LOOKS: dict[str, dict[str, Any]] = {
    EXACT: {"color": BLUE, "linestyle": "-", "marker": "o"},
    EXACT_ON_RANDOM_ROWS: {"color": BLUE, "linestyle": DASHED, "marker": "D"},
    RANDOM: {"color": FAINT, "linestyle": DASHED, "marker": "o"},
    SWAP: {"color": RED, "linestyle": "-", "marker": "s"},
    RANDOM_SWAP: {"color": ORANGE, "linestyle": DASHED, "marker": "s"},
    ANSWER_ONLY: {"color": PURPLE, "linestyle": (0, (1, 1.2)), "marker": "^"},
}
MODE_LOOKS = {"Q-anchored": (BLUE, "o"), "A-anchored": (ORANGE, "s")}
CONTROLS_PANEL = (2.5, 1.9)
RANDOM_ARE = "random: examples with as many random tokens"


@checked_call
def flip_rates(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw how often the probe's prediction flips, by layer, for every intervention: a panel per question set.

    Args:
        pathways: a result of `hw.trace_pathways`. The dotted line is at the layer chosen most often as l*.
        ax: axes for a single question set; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was passed for several question sets.
    """
    table = pathways.controls[pathways.controls["group"] == ALL]
    with shared_look(ax):
        figure, axes = panels(pathways, ax, figsize)
        for ax, name in zip(axes, pathways.datasets, strict=True):
            for intervention, look in LOOKS.items():
                line = table[(table["dataset"] == name) & (table["intervention"] == intervention)]
                line = line[line["examples"] > 0].sort_values("layer")
                if len(line):
                    bounds = 100 * line["flip_rate_low"], 100 * line["flip_rate_high"]
                    ax.fill_between(line["layer"], *bounds, color=look["color"], alpha=0.15, linewidth=0)
                    ax.plot(line["layer"], 100 * line["flip_rate"], markersize=2.6, label=intervention, **look)
            ax.axvline(SetAtBest(pathways, name).layer, color=FAINT, linewidth=0.7, linestyle=":")
            ax.set(title=_titled(pathways, name, len(axes)), xlabel="Layer", ylim=(0, None))
            whole_numbers(ax.xaxis)
        shared_label(axes, "Predictions that flip (%)")
        _legend_below(figure, axes, f"{BANDS_ARE}; dotted: l*, the probe's best layer\n{RANDOM_ARE}")
        return with_title(figure, axes, pathways, "predictions that flip", title)


@checked_call
def controls(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw ΔP at l* after every intervention, for examples of each mode: a panel per question set.

    Modes come from another seed's probe (if any).

    Args:
        pathways: a result of `hw.trace_pathways`.
        ax: axes for a single question set; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was passed for several question sets.
    """
    table = pathways.controls_at_best
    shown = [name for name in LOOKS if (table["intervention"] == name).any()]
    with shared_look(ax):
        figure, axes = panels(pathways, ax, figsize, sharey=True, names=1.7)
        for ax, dataset in zip(axes, pathways.datasets, strict=True):
            ax.axvline(0, color=FAINT, linewidth=0.6)
            for shift, mode in zip((-0.14, 0.14), MODES, strict=True):
                own = table[(table["dataset"] == dataset) & (table["group"] == mode)].set_index("intervention")
                rows = own.reindex(shown)
                color, marker = MODE_LOOKS[mode]
                y = np.arange(len(shown)) + shift
                ax.hlines(y, rows["delta_p_low"], rows["delta_p_high"], colors=color, linewidths=1.2)
                ax.plot(rows["delta_p"], y, marker, color=color, markersize=3.6, linestyle="none", label=mode)
            ax.set(title=_titled(pathways, dataset, len(axes)), xlabel="ΔP at l* (percentage points)")
            ax.set(yticks=range(len(shown)), yticklabels=shown, ylim=(len(shown) - 0.5, -0.5))
            ax.xaxis.set_major_locator(MaxNLocator(4))
        _legend_below(figure, axes, f"{LINES_ARE}; l*: the probe's best layer\n{RANDOM_ARE}")
        return with_title(figure, axes, pathways, "ΔP and controls", title)


def panels(
    pathways: Pathways, ax: Axes | None, figsize: Size | None, *, sharey: bool = False, names: float = 0.0
) -> tuple[Figure | None, list[Axes]]:
    """Make a figure with a panel per question set, and `names` inches for names at the left; or use `ax` for one."""
    n = len(pathways.datasets)
    requested_size = checked_place(ax, n, figsize)
    if ax is not None:
        return None, [ax]
    across = 2 if n == 4 else min(n, 4)
    size = max(CONTROLS_PANEL[0] * across, 3.4) + names, CONTROLS_PANEL[1] * -(-n // across) + 0.4
    figure = new_figure(*(requested_size or size))
    return figure, panel_grid(figure, n, across, sharey=sharey)


def with_title(
    figure: Figure | None, axes: list[Axes], pathways: Pathways, subject: str, title: str | None
) -> Axes | Figure:
    """Put the model and the subject above the panels; for a single panel, above its title."""
    if len(axes) == 1:
        axes[0].set_title(f"{model_title(pathways.run, subject)}\n{axes[0].get_title(loc='left')}")
    elif figure is not None:
        set_figure_title(figure, model_title(pathways.run, subject))
    return apply_title_and_size(axes[0] if figure is None else figure, title, None)


def shared_label(axes: list[Axes], text: str) -> None:
    """Label the y axes of the leftmost panels."""
    for ax in axes:
        if ax.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            ax.set_ylabel(text)


def _titled(pathways: Pathways, dataset: str, n_panels: int) -> str:
    """Return a title: the question set, its number of examples, and the number with as many random tokens as E_Q.

    With several panels, the counts are on a second line, so that the titles do not meet.
    """
    view = SetAtBest(pathways, dataset)
    beside = f"; random: {view.controlled:,}" if view.controlled else ""
    between = " " if n_panels == 1 else "\n"
    return f"{label(dataset)}{between}(n = {view.n_examples:,}{beside})"


def _legend_below(figure: Figure | None, axes: list[Axes], title: str) -> None:
    marks = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    across = 3 if len(marks) > 2 else 2
    look: dict[str, Any] = {"handlelength": 2.6, "title": title, "title_fontsize": 7}
    if figure is None:
        look |= {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
        is_narrow = axes[0].get_window_extent().width / axes[0].figure.dpi < 2.4
        axes[0].legend(list(marks.values()), list(marks), ncols=1 if is_narrow else min(across, 2), fontsize=6, **look)
        return
    figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=across, **look)


@DRAWINGS.add(Refusals)
def plot_refusals(refusals: Refusals, ax: Axes | None = None) -> Axes:
    """Draw a row per question set and way to split the modes, a marker and interval per mode."""
    rows = whole_summary(refusals)
    names = [f"{name}, {by}" for name, by in zip(ticks(rows["dataset"]), rows["split_by"], strict=True)]
    with one_panel(ax, 4.2, 0.9 + 0.28 * len(rows)) as ax:
        for shift, mode, column in zip((-0.12, 0.12), MODES, ("q_refused", "a_refused"), strict=True):
            color, marker = MODE_LOOKS[mode]
            y = [place + shift for place in range(len(rows))]
            ax.hlines(y, 100 * rows[f"{column}_low"], 100 * rows[f"{column}_high"], colors=color, linewidths=1.2)
            ax.plot(100 * rows[column], y, marker, color=color, markersize=3.6, linestyle="none", label=mode)
        left = min(0.0, ax.get_xlim()[0])
        ax.set(yticks=range(len(rows)), yticklabels=names, ylim=(max(len(rows), 1) - 0.5, -0.5), xlim=(left, None))
        ax.set_xlabel(f"Refusals when asked again (%)\n({LINES_ARE})")
        legend_above(ax, 2, model_title(refusals.run, "refusals by mode"))
    return ax


SHOWN = {WRONG: (PROBE, RELATION, RELATION_ANSWER, SPANS), ANY_MODE: (AWARE, MARGIN, BY_LOGIT)}
"""By question: the measured score, then its baselines."""


@checked_call
def baselines(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the AUC of the probe and of the probe of the mode beside their baselines: a column per question set.

    Args:
        pathways: a result of `hw.trace_pathways` with its controls.
        ax: not supported, since there are two panels for each question set.
        title: replaces the figure's title.
        figsize: width and height, in inches.

    Raises:
        InputError: no baseline was measured, or `ax` was passed.
    """
    size = checked_place(ax, 2 * len(pathways.datasets), figsize)
    table = pathways.baselines[~pathways.baselines["difference"] & pathways.baselines["value"].notna()]
    if not table["score"].isin([*SHOWN[WRONG][1:], *SHOWN[ANY_MODE][1:]]).any():
        raise InputError("This trace measured no baseline: there is nothing to draw.")
    sets = pathways.datasets
    with shared_look(ax):
        figure = new_figure(1.9 * len(sets) + 1.8, 2.9)
        axes = figure.subplots(2, len(sets), squeeze=False, sharex=True, sharey="row", height_ratios=(4, 3))
        for row, (question, scores) in zip(axes, SHOWN.items(), strict=True):
            for ax, name in zip(row, sets, strict=True):
                _baseline_panel(ax, table[(table["dataset"] == name) & (table["question"] == question)], scores)
        for ax, name in zip(axes[0], sets, strict=True):
            examples = pathways.modes.loc[pathways.modes["dataset"] == name, "example"].nunique()
            ax.set_title(f"{label(name)} (n = {examples:,})", fontsize=8)
        for ax in axes[1]:
            ax.set_xlabel("AUC")
        axes[0][0].set_ylabel("wrong answers")
        axes[1][0].set_ylabel("Q-anchored")
        set_figure_title(figure, f"{model_title(pathways.run, 'probes and baselines')} ({LINES_ARE})")
    return apply_title_and_size(figure, title, size)


def _baseline_panel(ax: Axes, rows: pd.DataFrame, scores: tuple[str, ...]) -> None:
    table = rows.set_index("score").reindex(scores)
    colors = [BLUE, *[ORANGE] * (len(scores) - 1)]
    y = range(len(scores))
    ax.axvline(0.5, color=FAINT, linewidth=0.7, linestyle=(0, (3, 2)))
    ax.hlines(y, table["low"], table["high"], colors=colors, linewidths=1.2)
    for place, value, color in zip(y, table["value"], colors, strict=True):
        ax.plot([value], [place], "o", color=color, markersize=3.4)
    ax.set(yticks=y, yticklabels=scores, ylim=(len(scores) - 0.5, -0.5))


# Differences between the modes, if any: the density of logit changes, and accuracy and popularity by mode.
#
# Two mechanisms would show as two peaks of the logit change, even among the questions of one relation with one
# prediction; two peaks over all changes may be two relations, or two predictions. Each panel states the verdicts of the
# tests.

SIDES: dict[str, tuple[str, Any, str]] = {"predicted right": (GREEN, "-", ""), "predicted wrong": (RED, DASHED, "////")}
"""Colour, dashes and hatch."""
GROUPS = 5
"""Groups of equal size, from the rarest subjects to the most popular."""


@checked_call
def logit_changes(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the density of the change of the probe's logit at l*, by prediction, with the verdicts on peaks and modes.

    Args:
        pathways: a result of `hw.trace_pathways`. Changes are in standard deviations of the probe's logit, averaged
            over seeds; negative is away from the original prediction.
        ax: axes for a single question set; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was passed for several question sets.
    """
    with shared_look(ax):
        figure, axes = panels(pathways, ax, figsize)
        for ax, name in zip(axes, pathways.datasets, strict=True):
            # A row per example: its mean change in standard deviations of the logit, and the prediction.
            own = pathways.modes[pathways.modes["dataset"] == name]
            spread = own.groupby(["seed", "split"])["logit"].transform(lambda logit: logit.std(ddof=0) or 1.0)
            scaled = own.assign(change=own["delta_logit"] / spread).groupby("example")
            changes = pd.DataFrame({"change": scaled["change"].mean(), "predicted_wrong": scaled["logit"].mean() > 0})
            components = pathways.components
            tested = components[(components["dataset"] == name) & (components["intervention"] == EXACT)]
            verdicts = tested.set_index("population")["verdict"]
            ax.axvline(0, 0, 0.6, color=FAINT, linewidth=0.6)
            grid = np.linspace(changes["change"].min() - 0.4, changes["change"].max() + 0.4, 300)
            for side, (color, dash, hatch) in SIDES.items():
                part = changes.loc[changes["predicted_wrong"] == (side == "predicted wrong"), "change"].to_numpy()
                curve = _density(part, grid) * len(part) / len(changes)
                ax.fill_between(grid, curve, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.3, linewidth=0)
                named = f"{side} ({len(part):,}): {verdicts[side]}"
                ax.plot(grid, curve, color=color, linestyle=dash, label=named)
            ax.plot([], [], linestyle="none", label=f"all ({len(changes):,}): {verdicts['all']}")
            if WITHIN in verdicts:
                ax.plot([], [], linestyle="none", label=f"{WITHIN}: {verdicts[WITHIN]}")
            ax.set(title=label(name), xlabel="Change of the probe's logit (SD)", yticks=[])
            ax.set_ylim(0, ax.get_ylim()[1] * 1.95)
            ax.legend(loc="upper left", fontsize=6.2, handlelength=1.6, borderaxespad=0.2, labelspacing=0.3)
        shared_label(axes, "Density")
        return with_title(figure, axes, pathways, "modes of the logit changes", title)


@checked_call
def mode_properties(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the share of right answers by mode, and the Q-anchored share against popularity.

    Args:
        pathways: a result of `hw.trace_pathways`; the second panel needs a column `popularity` of the questions.
        ax: axes for a result without a second panel; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was passed for two panels.
    """
    modes = pathways.modes
    has_popularity = "popularity" in modes and bool(modes["popularity"].notna().any())
    size = checked_place(ax, 1 + has_popularity, figsize)
    with shared_look(ax):
        drawn = ax or new_figure(6.4 if has_popularity else 3.2, 2.7)
        axes = [drawn] if isinstance(drawn, Axes) else drawn.subplots(1, 1 + has_popularity, squeeze=False)[0]
        _accuracy(axes[0], pathways)
        if has_popularity:
            _popularity(axes[1], pathways)
    return apply_title_and_size(drawn, title, size)


def _density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a kernel density; a narrow peak if all values are nearly equal."""
    if len(values) < 2:
        return np.zeros_like(grid)
    # Scott's rule, but at least one grid step: a narrower peak would fall between the grid points.
    width = max(float(values.std()) * len(values) ** -0.2, float(grid[1] - grid[0]))
    if values.std() > 1e-9:
        return gaussian_kde(values, bw_method=width / values.std(ddof=1))(grid)
    return np.exp(-0.5 * ((grid - values.mean()) / width) ** 2) / (width * np.sqrt(2 * np.pi))


def _accuracy(ax: Axes, pathways: Pathways) -> None:
    for shift, mode in zip((-0.12, 0.12), MODES, strict=True):
        color, marker = MODE_LOOKS[mode]
        for row, name in enumerate(pathways.datasets):
            own = pathways.modes[(pathways.modes["dataset"] == name) & (pathways.modes["mode"] == mode)]
            if own.empty:
                continue
            share = share_of(own, "correct")
            named = None if mode in ax.get_legend_handles_labels()[1] else mode
            ax.hlines(row + shift, 100 * share.low, 100 * share.high, colors=color, linewidths=1.2)
            ax.plot(100 * share.value, row + shift, marker, color=color, markersize=3.6, linestyle="none", label=named)
    n, names = len(pathways.datasets), ticks(pathways.datasets)
    ax.set(yticks=range(n), yticklabels=names, ylim=(n - 0.5, -0.5), xlabel=f"Right answers (%; {LINES_ARE})")
    legend_above(ax, 2, model_title(pathways.run, "right answers by mode"))


def _popularity(ax: Axes, pathways: Pathways) -> None:
    for name, (color, mark) in looks_of_sets(pathways.datasets).items():
        modes = pathways.modes[pathways.modes["dataset"] == name].dropna(subset="popularity")
        if modes.empty:
            continue
        group = np.ceil(modes["popularity"].rank(method="average", pct=True) * GROUPS).astype(int)
        x = sorted(set(group))
        shares = 100 * np.array([share_of(modes.assign(q=modes["mode"] == MODES[0])[group == g], "q") for g in x])
        ax.fill_between(x, shares[:, 1], shares[:, 2], color=color, alpha=0.15, linewidth=0)
        named = f"{label(name)} ({modes['example'].nunique():,})"
        ax.plot(x, shares[:, 0], f"{mark}-", color=color, markersize=2.8, label=named)
    ax.set_xticks(range(1, GROUPS + 1), ["rarest", *("" for _ in range(GROUPS - 2)), "most\npopular"])
    ax.set(xlabel=f"Subject's popularity, in fifths ({BANDS_ARE})", ylabel="Q-anchored (%)", ylim=(0, None))
    legend_above(ax, 2, "")
