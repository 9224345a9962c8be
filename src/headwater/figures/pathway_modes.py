"""What sets the modes apart, if anything: the density of logit changes, and accuracy and popularity by mode.

Two mechanisms would show as two peaks of the logit change, also among the questions of one relation with one
prediction: two peaks of all changes may be two relations, or two predictions. What the tests say is written into each
panel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

from headwater.calls import checked_call
from headwater.colors import FAINT, GREEN, RED, looks_of_sets
from headwater.errors import InputError
from headwater.figures.pathway_controls import MODE_LOOKS, entitled, panels, shared_label
from headwater.figures.style import (
    BANDS_ARE,
    DASHED,
    LINES_ARE,
    checked_place,
    label,
    legend_above,
    model_title,
    new_figure,
    style,
    ticks,
)
from headwater.pathways.interventions import EXACT
from headwater.pathways.modes import MODES, WITHIN
from headwater.runs.figure_options import Size, apply_title_and_size
from headwater.stats.resample import Bootstrap, interval

if TYPE_CHECKING:
    from headwater.pathways.trace import Pathways

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
            own = _changes(pathways, name)
            verdicts = pathways.components[
                (pathways.components["dataset"] == name) & (pathways.components["intervention"] == EXACT)
            ].set_index("population")["verdict"]
            ax.axvline(0, 0, 0.6, color=FAINT, linewidth=0.6)
            grid = np.linspace(own["change"].min() - 0.4, own["change"].max() + 0.4, 300)
            for side, (color, dash, hatch) in SIDES.items():
                part = own.loc[own["predicted_wrong"] == (side == "predicted wrong"), "change"].to_numpy()
                curve = _density(part, grid) * len(part) / len(own)
                ax.fill_between(grid, curve, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.3, linewidth=0)
                named = f"{side} ({len(part):,}): {verdicts[side]}"
                ax.plot(grid, curve, color=color, linestyle=dash, label=named)
            ax.plot([], [], linestyle="none", label=f"all ({len(own):,}): {verdicts['all']}")
            if WITHIN in verdicts:
                ax.plot([], [], linestyle="none", label=f"{WITHIN}: {verdicts[WITHIN]}")
            ax.set_title(label(name))
            ax.set_xlabel("Change of the probe's logit (SD)")
            ax.set_yticks([])
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
        if ax is not None:
            _accuracy(ax, pathways)
            return apply_title_and_size(ax, title, None)
        figure = new_figure(6.4 if has_popularity else 3.2, 2.7)
        axes = figure.subplots(1, 2 if has_popularity else 1, squeeze=False)[0]
        _accuracy(axes[0], pathways)
        if has_popularity:
            _popularity(axes[1], pathways)
    return apply_title_and_size(figure, title, size)


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
    ax.set_yticks(range(len(pathways.datasets)), ticks(pathways.datasets))
    ax.set_ylim(len(pathways.datasets) - 0.5, -0.5)
    ax.set_xlabel(f"Right answers (%; {LINES_ARE})")
    legend_above(ax, 2, model_title(pathways.run, "right answers by mode"))


def _popularity(ax: Axes, pathways: Pathways) -> None:
    for name, (color, mark) in looks_of_sets(pathways.datasets).items():
        own = pathways.modes[pathways.modes["dataset"] == name].dropna(subset="popularity")
        if own.empty:
            continue
        group = np.ceil(own["popularity"].rank(method="average", pct=True) * GROUPS).astype(int)
        shares = np.array([_share(own.assign(q=own["mode"] == MODES[0])[group == g], "q") for g in sorted(set(group))])
        x = sorted(set(group))
        ax.fill_between(x, shares[:, 1], shares[:, 2], color=color, alpha=0.15, linewidth=0)
        ax.plot(
            x,
            shares[:, 0],
            f"{mark}-",
            color=color,
            markersize=2.8,
            label=f"{label(name)} ({own['example'].nunique():,})",
        )
    ax.set_xticks(range(1, GROUPS + 1), ["rarest", *("" for _ in range(GROUPS - 2)), "most\npopular"])
    ax.set_xlabel(f"Subject's popularity, in fifths ({BANDS_ARE})")
    ax.set_ylabel("Q-anchored (%)")
    ax.set_ylim(bottom=0)
    legend_above(ax, 2, "")


def _share(rows: pd.DataFrame, column: str) -> tuple[float, float, float]:
    """Per cent of rows that are so, with an interval over examples."""
    if rows.empty:
        raise InputError("There are no examples to average.")
    by_example = rows.groupby("example")[column].agg(["sum", "size"]).to_numpy(dtype=float)
    return interval(100 * Bootstrap.of(range(len(by_example))).ratio(*by_example.T))
