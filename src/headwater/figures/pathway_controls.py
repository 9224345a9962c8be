"""The controls of anchored pathways: how often predictions flip, by layer and intervention, and ΔP at l* by mode.

A knockout of E_Q says something only beside the same knockout of as many random question tokens, on the rows that have
as many: these are counted in the titles. A mode says something only where another probe gave it than the one whose ΔP
is shown.

How often a model declines what it answered in either mode, with 95 % intervals.

What would overturn the finding: the probe's AUC beside relation, answer words, span length, and the margin. Above,
which answers are wrong; below, which examples are Q-anchored: a mark and 95 % interval per score.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from headwater.calls import checked_call
from headwater.colors import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED, looks_of_sets
from headwater.errors import InputError
from headwater.figures.style import (
    BANDS_ARE,
    DASHED,
    LINES_ARE,
    checked_place,
    entitle,
    label,
    legend_above,
    model_title,
    new_figure,
    one_panel,
    style,
    ticks,
    whole_numbers,
)
from headwater.pathways.interventions import ANSWER_ONLY, EXACT, EXACT_ON_RANDOM_ROWS, RANDOM, RANDOM_SWAP, SWAP
from headwater.pathways.modes import ALL, MODES, WITHIN
from headwater.pathways.refusal_rates import Refusals
from headwater.pathways.tables import ANY_MODE, AWARE, BY_LOGIT, MARGIN, PROBE, RELATION, RELATION_ANSWER, SPANS
from headwater.pathways.tables import WRONG_ANSWER as WRONG
from headwater.pathways.trace import Pathways
from headwater.runs.result import DRAWINGS, Size, apply_title_and_size, whole_summary
from headwater.stats.resample import Bootstrap, interval

LOOKS: dict[str, dict[str, Any]] = {
    EXACT: {"color": BLUE, "linestyle": "-", "marker": "o"},
    EXACT_ON_RANDOM_ROWS: {"color": BLUE, "linestyle": DASHED, "marker": "D"},
    RANDOM: {"color": FAINT, "linestyle": DASHED, "marker": "o"},
    SWAP: {"color": RED, "linestyle": "-", "marker": "s"},
    RANDOM_SWAP: {"color": ORANGE, "linestyle": DASHED, "marker": "s"},
    ANSWER_ONLY: {"color": PURPLE, "linestyle": (0, (1, 1.2)), "marker": "^"},
}
MODE_LOOKS = {"Q-anchored": (BLUE, "o"), "A-anchored": (ORANGE, "s")}
PANEL = (2.5, 1.9)
NARROW = 2.4
"""Inches of a panel below which a legend is in one column."""
MOST_ACROSS = 4
RANDOM_ARE = "random: examples with as many random tokens"


@checked_call
def flip_rates(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw how often the probe's prediction flips, by layer, for every intervention: a panel per question set.

    Args:
        pathways: a result of `hw.trace_pathways`. The dotted line is at the layer chosen most often as l*.
        ax: where to draw a single question set; default: a new figure.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was given for several question sets.
    """
    table = pathways.controls[pathways.controls["group"] == ALL]
    with style(ax):
        figure, axes = panels(pathways, ax, figsize)
        for ax, name in zip(axes, pathways.datasets, strict=True):
            for intervention, look in LOOKS.items():
                line = table[(table["dataset"] == name) & (table["intervention"] == intervention)]
                line = line[line["examples"] > 0].sort_values("layer")
                if len(line):
                    bounds = 100 * line["flip_rate_low"], 100 * line["flip_rate_high"]
                    ax.fill_between(line["layer"], *bounds, color=look["color"], alpha=0.15, linewidth=0)
                    ax.plot(line["layer"], 100 * line["flip_rate"], markersize=2.6, label=intervention, **look)
            ax.axvline(main_layer(pathways, name), color=FAINT, linewidth=0.7, linestyle=":")
            ax.set(title=_titled(pathways, name, len(axes)), xlabel="Layer", ylim=(0, None))
            whole_numbers(ax.xaxis)
        shared_label(axes, "Predictions that flip (%)")
        _legend_below(figure, axes, f"{BANDS_ARE}; dotted: l*, the probe's best layer\n{RANDOM_ARE}")
        return entitled(figure, axes, pathways, "predictions that flip", title)


@checked_call
def controls(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw ΔP at l* after every intervention, for examples of either mode: a panel per question set.

    Modes are given by another seed's probe, where there is one.

    Args:
        pathways: a result of `hw.trace_pathways`.
        ax: where to draw a single question set; default: a new figure.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was given for several question sets.
    """
    table = pathways.controls_at_best
    shown = [name for name in LOOKS if (table["intervention"] == name).any()]
    with style(ax):
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
        return entitled(figure, axes, pathways, "ΔP and controls", title)


def panels(
    pathways: Pathways, ax: Axes | None, figsize: Size | None, *, sharey: bool = False, names: float = 0.0
) -> tuple[Figure | None, list[Axes]]:
    """Make a figure with a panel per question set, and inches for names at the left; or take `ax` for a single one."""
    n = len(pathways.datasets)
    requested_size = checked_place(ax, n, figsize)
    if ax is not None:
        return None, [ax]
    across = n if n <= MOST_ACROSS and n != 4 else 2 if n == 4 else MOST_ACROSS
    rows = -(-n // across)
    size = max(PANEL[0] * across, 3.4) + names, PANEL[1] * rows + 0.4
    figure = new_figure(*(requested_size or size))
    axes = figure.subplots(rows, across, squeeze=False, sharey=sharey).ravel().tolist()
    for spare in axes[n:]:
        spare.remove()
    return figure, axes[:n]


def entitled(
    figure: Figure | None, axes: list[Axes], pathways: Pathways, subject: str, title: str | None
) -> Axes | Figure:
    """Put the model and what is seen of it above the panels; of a single one, above its title."""
    if len(axes) == 1:
        axes[0].set_title(f"{model_title(pathways.run, subject)}\n{axes[0].get_title(loc='left')}")
    elif figure is not None:
        entitle(figure, model_title(pathways.run, subject))
    return apply_title_and_size(axes[0] if figure is None else figure, title, None)


def main_layer(pathways: Pathways, dataset: str) -> int:
    """Return the layer that most fits of a question set chose as l*."""
    chosen = pathways.auc[(pathways.auc["dataset"] == dataset) & pathways.auc["best"]]
    return int(chosen["layer"].mode().iloc[0])


def shared_label(axes: list[Axes], text: str) -> None:
    """Label the panels at the left."""
    for ax in axes:
        if ax.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            ax.set_ylabel(text)


def _titled(pathways: Pathways, dataset: str, n_panels: int) -> str:
    """A question set, how many of its examples were intervened upon, and how many have as many random tokens as E_Q.

    On a line of their own where there are several panels, so that their titles do not meet.
    """
    examples = pathways.modes.loc[pathways.modes["dataset"] == dataset, "example"].nunique()
    at_best = pathways.controls_at_best[pathways.controls_at_best["dataset"] == dataset]
    random = at_best.loc[(at_best["intervention"] == RANDOM) & (at_best["group"] == ALL), "examples"].sum()
    beside = f"; random: {random:,}" if random else ""
    between = " " if n_panels == 1 else "\n"
    return f"{label(dataset)}{between}(n = {examples:,}{beside})"


def _legend_below(figure: Figure | None, axes: list[Axes], title: str) -> None:
    marks = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    across = 3 if len(marks) > 2 else 2
    look: dict[str, Any] = {"handlelength": 2.6, "title": title, "title_fontsize": 7}
    if figure is None:
        look |= {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
        is_narrow = axes[0].get_window_extent().width / axes[0].figure.dpi < NARROW
        axes[0].legend(list(marks.values()), list(marks), ncols=1 if is_narrow else min(across, 2), fontsize=6, **look)
        return
    figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=across, **look)


@DRAWINGS.add(Refusals)
def plot_refusals(refusals: Refusals, ax: Axes | None = None) -> Axes:
    """Draw a row per question set and way to tell the modes, a mark and interval per mode."""
    rows = whole_summary(refusals)
    names = [f"{name}, {by}" for name, by in zip(ticks(rows["dataset"]), rows["split_by"], strict=True)]
    with one_panel(ax, 4.2, 0.9 + 0.28 * len(rows)) as ax:
        for shift, mode, column in zip((-0.12, 0.12), MODES, ("q_refused", "a_refused"), strict=True):
            color, marker = MODE_LOOKS[mode]
            y = [place + shift for place in range(len(rows))]
            ax.hlines(y, 100 * rows[f"{column}_low"], 100 * rows[f"{column}_high"], colors=color, linewidths=1.2)
            ax.plot(100 * rows[column], y, marker, color=color, markersize=3.6, linestyle="none", label=mode)
        left = min(0.0, ax.get_xlim()[0])
        ax.set(yticks=range(len(rows)), yticklabels=names, ylim=(len(rows) - 0.5, -0.5), xlim=(left, None))
        ax.set_xlabel(f"Questions declined when asked again (%)\n({LINES_ARE})")
        legend_above(ax, 2, model_title(refusals.run, "refusals by mode"))
    return ax


SHOWN = {WRONG: (PROBE, RELATION, RELATION_ANSWER, SPANS), ANY_MODE: (AWARE, MARGIN, BY_LOGIT)}
"""By question: what is measured, and what it is compared with."""


@checked_call
def baselines(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the AUC of the probe and of the probe of the mode beside their baselines: a column per question set.

    Args:
        pathways: a result of `hw.trace_pathways` with its controls.
        ax: refused, as there are two panels for each question set.
        title: in place of the figure's own.
        figsize: width and height, in inches.

    Raises:
        InputError: no baseline was measured, or `ax` was given.
    """
    size = checked_place(ax, 2 * len(pathways.datasets), figsize)
    table = pathways.baselines[~pathways.baselines["difference"] & pathways.baselines["value"].notna()]
    if not table["score"].isin([*SHOWN[WRONG][1:], *SHOWN[ANY_MODE][1:]]).any():
        raise InputError("This trace measured no baseline: there is nothing to draw.")
    sets = pathways.datasets
    with style(ax):
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
        entitle(figure, f"{model_title(pathways.run, 'probes and baselines')} ({LINES_ARE})")
    return apply_title_and_size(figure, title, size)


def _baseline_panel(ax: Axes, rows: object, scores: tuple[str, ...]) -> None:
    table = rows.set_index("score").reindex(scores)  # type: ignore[attr-defined]
    colors = [BLUE, *[ORANGE] * (len(scores) - 1)]
    y = range(len(scores))
    ax.axvline(0.5, color=FAINT, linewidth=0.7, linestyle=(0, (3, 2)))
    ax.hlines(y, table["low"], table["high"], colors=colors, linewidths=1.2)
    for place, value, color in zip(y, table["value"], colors, strict=True):
        ax.plot([value], [place], "o", color=color, markersize=3.4)
    ax.set(yticks=y, yticklabels=scores, ylim=(len(scores) - 0.5, -0.5))


# What sets the modes apart, if anything: the density of logit changes, and accuracy and popularity by mode.
#
# Two mechanisms would show as two peaks of the logit change, also among the questions of one relation with one
# prediction: two peaks of all changes may be two relations, or two predictions. What the tests say is written into each
# panel.


SIDES: dict[str, tuple[str, Any, str]] = {"predicted right": (GREEN, "-", ""), "predicted wrong": (RED, DASHED, "////")}
"""Colour, dash and hatch."""
GROUPS = 5
"""Groups of equal size, from the rarest subjects to the most popular."""


@checked_call
def logit_changes(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the density of the change of the probe's logit at l*, by prediction: its peaks, and the modes in relations.

    Args:
        pathways: a result of `hw.trace_pathways`. Changes are in standard deviations of the probe's logit, averaged
            over seeds; negative is away from the original prediction.
        ax: where to draw a single question set; default: a new figure.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was given for several question sets.
    """
    with style(ax):
        figure, axes = panels(pathways, ax, figsize)
        for ax, name in zip(axes, pathways.datasets, strict=True):
            changes = _changes(pathways, name)
            verdicts = pathways.components[
                (pathways.components["dataset"] == name) & (pathways.components["intervention"] == EXACT)
            ].set_index("population")["verdict"]
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
        return entitled(figure, axes, pathways, "one mode of logit changes, or two?", title)


@checked_call
def mode_properties(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw how often the answers of either mode are right, and the share that is Q-anchored against popularity.

    Args:
        pathways: a result of `hw.trace_pathways`; the second panel needs a column popularity in the questions.
        ax: where to draw what has no second panel; default: a new figure.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: `ax` was given for two panels.
    """
    modes = pathways.modes
    has_popularity = "popularity" in modes and bool(modes["popularity"].notna().any())
    size = checked_place(ax, 1 + has_popularity, figsize)
    with style(ax):
        drawn = ax or new_figure(6.4 if has_popularity else 3.2, 2.7)
        axes = [drawn] if isinstance(drawn, Axes) else drawn.subplots(1, 1 + has_popularity, squeeze=False)[0]
        _accuracy(axes[0], pathways)
        if has_popularity:
            _popularity(axes[1], pathways)
    return apply_title_and_size(drawn, title, size)


def _changes(pathways: Pathways, dataset: str) -> pd.DataFrame:
    """A row per example: its mean change in standard deviations of the logit, and what was predicted."""
    own = pathways.modes[pathways.modes["dataset"] == dataset]
    spread = own.groupby(["seed", "split"])["logit"].transform(lambda logit: logit.std(ddof=0) or 1.0)
    scaled = own.assign(change=own["delta_logit"] / spread).groupby("example")
    return pd.DataFrame({"change": scaled["change"].mean(), "predicted_wrong": scaled["logit"].mean() > 0})


def _density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """A kernel density; a narrow peak where all values are nearly one."""
    if len(values) < 2:
        return np.zeros_like(grid)
    # Scott's rule; narrower than a step of the grid a peak would fall between its points.
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
            value, low, high = _share(own, "correct")
            named = None if mode in ax.get_legend_handles_labels()[1] else mode
            ax.hlines(row + shift, low, high, colors=color, linewidths=1.2)
            ax.plot(value, row + shift, marker, color=color, markersize=3.6, linestyle="none", label=named)
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
        shares = np.array([_share(modes.assign(q=modes["mode"] == MODES[0])[group == g], "q") for g in x])
        ax.fill_between(x, shares[:, 1], shares[:, 2], color=color, alpha=0.15, linewidth=0)
        named = f"{label(name)} ({modes['example'].nunique():,})"
        ax.plot(x, shares[:, 0], f"{mark}-", color=color, markersize=2.8, label=named)
    ax.set_xticks(range(1, GROUPS + 1), ["rarest", *("" for _ in range(GROUPS - 2)), "most\npopular"])
    ax.set(xlabel=f"Subject's popularity, in fifths ({BANDS_ARE})", ylabel="Q-anchored (%)", ylim=(0, None))
    legend_above(ax, 2, "")


def _share(rows: pd.DataFrame, column: str) -> tuple[float, float, float]:
    """Per cent of rows that are so, with an interval over examples."""
    by_example = rows.groupby("example")[column].agg(["sum", "size"]).to_numpy(dtype=float)
    return interval(100 * Bootstrap.of(range(len(by_example))).ratio(*by_example.T))
