"""The figure of memorization by question depth: boxes of Min-K% by depth, and densities of the score gap by quartile.

The published form (Ko et al., EMNLP 2024): a panel of boxes per model, blue, orange and green for depth 1, 2 and 3, and
below it the densities of the score gap of the deepest questions, green for those whose Min-K% is in the lowest quarter,
orange for the highest. Min-K% is drawn as published, minus the score of the tables: higher = less likely seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray
from scipy.stats import gaussian_kde

from headwater.calls import checked_call
from headwater.colors import BLUE, FAINT, GREEN, INK, ORANGE
from headwater.errors import InputError, did_you_mean
from headwater.figures.published import StyleName, is_published, lettered, model_name
from headwater.figures.style import (
    BANDS_ARE,
    DASHED,
    checked_place,
    entitle,
    legend_above,
    model_title,
    new_figure,
    one_panel,
    plain_title,
    short_name,
    whole_numbers,
)
from headwater.figures.style import label as drawn_label
from headwater.figures.style import style as shared_look
from headwater.likelihood.framed import DATA
from headwater.likelihood.profile import DepthProfile
from headwater.runs.result import DRAWINGS, Size, apply_title_and_size

DEPTH_COLORS = (BLUE, ORANGE, GREEN, "#8c5fb0", "#7a7a7a")
DEPTH_MARKS = ("o", "s", "^", "D", "v")
QUARTILES: dict[int, tuple[str, Any, str, str]] = {
    25: (GREEN, "-", "", "lowest quarter"),
    75: (ORANGE, DASHED, "////", "highest quarter"),
}
"""Colour, dash, hatch and name of the lowest and the highest quarter of Min-K%."""
SEEN = "Min-K% by question depth"
BOTH = "Min-K% by depth, score gap by quarter of Min-K%"
GAP_RANGE = 1.5
COLUMNS = 4
ALONE, WIDTH, HEIGHT = (5.6, 2.8), 1.9, 2.2
"""Inches: of the figure of a single model, and of a panel beside others."""
AVERAGE = "Depthwise Average\nMIN-K% (nats)"
LONG, LONG_TITLE, TITLE_WIDTH = 16, 6.5, 175.0
"""Characters from which on a title is long, beside other panels, and its font size; characters times font size that fit
above a panel."""


@DRAWINGS.add(DepthProfile)
def plot_depth_profile(profile: DepthProfile, ax: Axes | None = None) -> Axes | Figure:
    """Draw one profile: boxes and densities, or on a given `ax` the boxes alone."""
    return depth_profiles([profile], ax=ax)


@checked_call
def depth_profiles(
    profiles: Sequence[DepthProfile],
    labels: Sequence[str] | None = None,
    *,
    style: StyleName = "headwater",
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw boxes and densities of several models side by side; of one, next to each other.

    Args:
        profiles: results of `memorization`.
        labels: a title per model. Default: the models' names, without the folders in front.
        style: "headwater", or "published": lettered panels, those of the score gap in rows of their own and for models
            that have scores alone; models and axes by their published names, without counts. On `ax` without a letter.
        ax: where to draw the boxes of a single profile, without the densities; default: a new figure.
        title: above all panels; of the boxes on `ax`, in place of the model's name.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there are no profiles, or not as many labels, or no such style; or `ax` was given for several.
    """
    size, as_published = checked_place(ax, len(profiles), figsize), is_published(style)
    if labels is None:
        names = [short_name(one.run.model) for one in profiles]
        labels = list(map(model_name, names)) if as_published else names
    else:
        labels = [drawn_label(one) for one in labels]
    if not profiles or len(labels) != len(profiles):
        raise InputError(f"{len(labels)} labels were given for {len(profiles)} profiles; give one of each, at least.")
    if ax is not None:
        with shared_look(ax):
            (_published_boxes if as_published else plot_boxes)(profiles[0], ax)
            ax.set_title(labels[0] if as_published else f"{labels[0]}: {SEEN}")
        return apply_title_and_size(ax, title, None)
    with shared_look(ax):
        figure = (_published_panels if as_published else _panels)(profiles, labels)
    return apply_title_and_size(figure, title, size)


def title_of(profile: DepthProfile) -> str:
    """Return the title of a profile's boxes as plain text."""
    return plain_title(profile.run.model, SEEN)


def _panels(profiles: Sequence[DepthProfile], labels: Sequence[str]) -> Figure:
    """Boxes of each model, and below them its densities; of a single model, beside them."""
    columns = min(len(profiles), COLUMNS)
    bands = math.ceil(len(profiles) / columns)
    if len(profiles) == 1:
        figure, grid = plt.subplots(1, 2, figsize=ALONE, layout="constrained", squeeze=False)
        pairs = [(grid[0, 0], grid[0, 1])]
    else:
        usual = (WIDTH * columns + 0.4, 2 * HEIGHT * bands)
        figure, grid = plt.subplots(2 * bands, columns, figsize=usual, layout="constrained", squeeze=False)
        places = [divmod(number, columns) for number in range(len(profiles))]
        pairs = [(grid[2 * band, column], grid[2 * band + 1, column]) for band, column in places]
        for ax in set(grid.flat) - {ax for pair in pairs for ax in pair}:
            ax.remove()
    for number, (profile, name, (boxes, densities)) in enumerate(zip(profiles, labels, pairs, strict=True)):
        plot_boxes(profile, boxes)
        plot_gaps(profile, densities, narrow=len(profiles) > 1)
        boxes.set_title(name if len(profiles) > 1 else "", **_title_look(labels))
        if number % columns:
            boxes.set_ylabel("")
            densities.set_ylabel("")
    ends = np.array([boxes.get_ylim() for boxes, _ in pairs])
    for boxes, _ in pairs:
        boxes.set_ylim(ends.min(), ends.max())
    entitle(figure, BOTH if len(profiles) > 1 else f"{labels[0]}: {BOTH}")
    return figure


def _published_panels(profiles: Sequence[DepthProfile], labels: Sequence[str]) -> Figure:
    """Lettered boxes of all models, then in rows of their own lettered densities of those that have scores."""
    named = list(zip(profiles, labels, strict=True))
    scored = [one for one in named if any(len(_gaps(one[0], quartile)) for quartile in QUARTILES)]
    is_alone = len(named) == 1
    columns = len(named) + len(scored) if is_alone else min(len(named), COLUMNS)
    first_gap = len(named) if is_alone else columns * math.ceil(len(named) / columns)
    places = [*range(len(named)), *range(first_gap, first_gap + len(scored))]
    rows = places[-1] // columns + 1
    titles = [lettered(number, name) for number, (_, name) in enumerate([*named, *scored])]
    figure = new_figure(*(ALONE if is_alone else (WIDTH * columns + 0.4, HEIGHT * rows)))
    grid = figure.add_gridspec(rows, columns)
    axes = [figure.add_subplot(grid[divmod(place, columns)]) for place in places]
    for number, (ax, (profile, _)) in enumerate(zip(axes, [*named, *scored], strict=True)):
        (_published_boxes if number < len(named) else _published_gaps)(profile, ax)
        ax.set_title(titles[number], **_title_look(titles))
        if places[number] % columns and not is_alone:
            ax.set_ylabel("")
    return figure


def _published_boxes(profile: DepthProfile, ax: Axes) -> None:
    plot_boxes(profile, ax)
    ax.set_xticks(ax.get_xticks(), [f"Depth {depth}" for depth in profile.depths])
    ax.set_ylabel(AVERAGE.removesuffix(" (nats)"))


def _published_gaps(profile: DepthProfile, ax: Axes) -> None:
    plot_gaps(profile, ax)
    handles, series = ax.get_legend_handles_labels()
    quarters = [f"{one}%" for one, (*_, named) in QUARTILES.items() if any(named in words for words in series)]
    ax.set_xticks(np.arange(-GAP_RANGE, GAP_RANGE + 0.1, 0.5))
    ax.tick_params(axis="x", labelsize=6)
    ax.legend(handles, quarters, loc="upper right", handlelength=1.6)


def answers_note(profiles: Sequence[DepthProfile]) -> str:
    """Name the models whose gap panel judges answers that lay in the data; "" without one."""
    given = [one for one in profiles if any(len(_gaps(one, quartile)) for quartile in QUARTILES)]
    named = ", ".join(short_name(one.run.model) for one in given if one.run.options["answers"] == DATA)
    hint = "judges the answers in the data, whichever model wrote them; answers='model' lets the model answer itself"
    return f"The score gap of {named} {hint}." if named else ""


def _title_look(titles: Sequence[str]) -> dict[str, Any]:
    """What titles need to end before the next panel's begins, one size for all; nothing where all are short."""
    longest = max(map(len, titles))
    return {"fontsize": min(LONG_TITLE, TITLE_WIDTH / longest)} if longest > LONG and len(titles) > 1 else {}


def looks_of_depths(profile: DepthProfile) -> dict[int, tuple[str, str]]:
    """Return the colour and mark of each depth."""
    n = len(DEPTH_COLORS)
    return {depth: (DEPTH_COLORS[i % n], DEPTH_MARKS[i % n]) for i, depth in enumerate(profile.depths)}


def plot_boxes(profile: DepthProfile, ax: Axes) -> None:
    """Draw a box per depth: median, quartiles, whiskers to the last value within 1.5 interquartile ranges."""
    averages = profile.depthwise
    values = [-averages.loc[averages["depth"] == depth, profile.main].dropna().to_numpy() for depth in profile.depths]
    drawn = ax.boxplot(
        values,
        widths=0.55,
        patch_artist=True,
        medianprops={"color": INK, "linewidth": 1.2},
        flierprops={"marker": "o", "markersize": 2, "markerfacecolor": FAINT, "markeredgewidth": 0},
        whiskerprops={"linewidth": 0.7},
        capprops={"linewidth": 0.7},
        boxprops={"linewidth": 0.7},
    )
    for box, (color, _) in zip(drawn["boxes"], looks_of_depths(profile).values(), strict=True):
        box.set_facecolor(color)
        box.set_alpha(0.85)
    names = [f"Depth {depth}\nn = {len(sample):,}" for depth, sample in zip(profile.depths, values, strict=True)]
    ax.set_xticks(range(1, len(values) + 1), names)
    is_group = profile.run.options["aggregate"] == "group"
    ax.set_ylabel(AVERAGE if is_group else "MIN-K% of a Question\n(nats)")
    if any(len(sample) for sample in values):
        ax.set_ylim(bottom=min(0.0, min(sample.min() for sample in values if len(sample))))


def plot_gaps(profile: DepthProfile, ax: Axes, narrow: bool = False) -> Axes:
    """Draw the density of the score gap of the deepest questions in the lowest and in the highest quarter of Min-K%."""
    drawn = sum(_density(ax, _gaps(profile, quartile), quartile) for quartile in QUARTILES)
    ax.set(xlim=(-GAP_RANGE, GAP_RANGE), ylabel="Density")
    ax.set_xticks(np.linspace(-GAP_RANGE, GAP_RANGE, 7)[:: 3 if narrow else 1])
    shallower = profile.depths[-2] if len(profile.depths) > 1 else "?"
    whose = "\nof the answers in the data" if drawn and profile.run.options["answers"] == DATA else ""
    ax.set_xlabel(f"Score Gap (D{profile.depths[-1]} − D{shallower}){whose}")
    ax.set_ylim(bottom=0)
    if drawn:
        legend_above(ax, 1, "", handlelength=2.2)
    else:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "no judge scores", color=FAINT, ha="center", va="center", transform=ax.transAxes)
    return ax


@checked_call
def layer_curves(
    profile: DepthProfile,
    score: str | None = None,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw a score against the layer it is read at, a line per depth with its 95 % interval.

    Args:
        profile: a result of `memorization` with several layers.
        score: a column of scores, such as "min_k++_0.2". Default: the figure's Min-K%. Drawn with the figure's sign.
        ax: where to draw; default: a new figure.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there is no such score.
    """
    size = checked_place(ax, 1, figsize)
    score = score or profile.main
    named = "Min-K%" if score == profile.main else score
    rows = profile.by_layer[profile.by_layer["score"] == score]
    if rows.empty:
        raise InputError(f"There is no score {score!r}.{did_you_mean(score, set(profile.by_layer['score']))}")
    with one_panel(ax, 3.6, 2.9) as ax:
        for depth, (color, mark) in looks_of_depths(profile).items():
            line = rows[rows["depth"] == depth]
            ax.fill_between(line["layer"], -line["high"], -line["low"], color=color, alpha=0.2, linewidth=0)
            ax.plot(line["layer"], -line["value"], f"{mark}-", markersize=3, color=color, label=f"Depth {depth}")
        ax.set(xlabel=f"Layer ({BANDS_ARE})", ylabel=AVERAGE if score == profile.main else f"minus {score}")
        whole_numbers(ax.xaxis)
        legend_above(ax, min(3, len(profile.depths)), model_title(profile.run, f"{named} by layer"))
    return apply_title_and_size(ax, title, size)


def _gaps(profile: DepthProfile, quartile: int) -> Float[ndarray, " node"]:
    """The score gaps of the deepest questions in one quarter of Min-K%."""
    rows = profile.table[(profile.table["depth"] == profile.depths[-1]) & (profile.table["quartile"] == quartile)]
    return rows["gap"].dropna().to_numpy(float)


def _density(ax: Axes, gaps: Float[ndarray, " node"], quartile: int) -> int:
    """Draw a density, or a line where all values are the same; return whether there was anything to draw."""
    if not len(gaps):
        return 0
    color, dash, hatch, named = QUARTILES[quartile]
    look: dict[str, Any] = {"color": color, "linestyle": dash}
    if np.ptp(gaps) == 0:
        ax.axvline(gaps[0], label=f"{named} (n = {len(gaps):,}, all {gaps[0]:.2g})", **look)
        return 1
    x = np.linspace(-GAP_RANGE, GAP_RANGE, 301)
    y = gaussian_kde(gaps)(x)
    ax.fill_between(x, y, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.3, linewidth=0)
    ax.plot(x, y, label=f"{named} (n = {len(gaps):,})", **look)
    return 1
