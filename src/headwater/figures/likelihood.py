"""Figures of likelihood results: memorization by question depth, tokens, scores against K, members and non-members.

Memorization by question depth has boxes of Min-K% by depth, and densities of the score gap by quartile. The published
form (Ko et al., EMNLP 2024): a panel of boxes per model, blue, orange and green for depth 1, 2 and 3, and below it the
densities of the score gap of the deepest questions, green for those whose Min-K% is in the lowest quartile, orange for
the highest. Min-K% is drawn with the published sign, opposite to the tables: higher = less likely seen.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy import ndarray
from scipy.stats import gaussian_kde

from headwater.calls import checked_call
from headwater.colors import BLUE, FAINT, GREEN, INK, ORANGE
from headwater.errors import InputError, did_you_mean
from headwater.figure_options import Size, apply_title_and_size
from headwater.figures.published import StyleName, is_published, model_name, with_letter
from headwater.figures.style import (
    BANDS_ARE,
    DASHED,
    cell_ticks,
    checked_place,
    columns,
    drawable,
    figure_of,
    label,
    legend_above,
    model_title,
    new_figure,
    one_panel,
    others,
    plain_title,
    set_figure_title,
    short_name,
    whole_numbers,
)
from headwater.figures.style import style as shared_look
from headwater.likelihood.files import ScoredTexts
from headwater.likelihood.formulas import SCORES
from headwater.likelihood.framed import DATA
from headwater.likelihood.members import BASELINE, Membership
from headwater.likelihood.profile import DepthProfile
from headwater.likelihood.scores import MemorizationScores
from headwater.likelihood.statistics import TextStatistics
from headwater.options import checked_kind, checked_name
from headwater.runs.result import DRAWINGS

DEPTH_COLORS = (BLUE, ORANGE, GREEN, "#8c5fb0", "#7a7a7a")
DEPTH_MARKS = ("o", "s", "^", "D", "v")
ENDS: dict[int, tuple[str, Any, str, str]] = {
    25: (GREEN, "-", "", "lowest quartile"),
    75: (ORANGE, DASHED, "////", "highest quartile"),
}
"""Colour, dash, hatch and name of the lowest and the highest quartile of Min-K%."""
BY_DEPTH = "Min-K% by question depth"
BOTH = "Min-K% by depth, score gap by quartile of Min-K%"
GAP_RANGE = 1.5
COLUMNS = 4
ALONE, PANEL_WIDTH, PANEL_HEIGHT = (5.6, 2.8), 1.9, 2.2
"""Inches of the figure of a single model, and of a panel among several."""
AVERAGE = "Depthwise Average\nMIN-K% (nats)"
LONG, LONG_TITLE, TITLE_WIDTH = 16, 6.5, 175.0
"""Length in characters above which a title among several panels is long, its font size, and the largest product of
length and font size that fits above a panel."""


@DRAWINGS.add(DepthProfile)
def plot_depth_profile(profile: DepthProfile, ax: Axes | None = None) -> Axes | Figure:
    """Draw one profile: boxes and densities, or on a given `ax` only the boxes."""
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
    """Draw boxes above densities for several models side by side; for one model, boxes beside densities.

    Args:
        profiles: results of `memorization`.
        labels: a title per model. Default: the models' names, without parent folders.
        style: "headwater", or "published": lettered panels, with the score gaps in separate rows, only for models that
            have scores; models and axes by their published names, without counts. No letter on `ax`.
        ax: axes for the boxes of a single profile, without the densities; default: a new figure.
        title: above all panels; for boxes on `ax`, replaces the model's name.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there are no profiles, or not as many labels; an unknown style; or `ax` was passed for several.
    """
    size, as_published = checked_place(ax, len(profiles), figsize), is_published(style)
    if labels is None:
        names = [short_name(one.run.model) for one in profiles]
        labels = list(map(model_name, names)) if as_published else names
    else:
        labels = [label(one) for one in labels]
    if not profiles or len(labels) != len(profiles):
        raise InputError(
            f"Found {len(labels)} labels for {len(profiles)} profiles; pass at least one profile, and a label for each."
        )
    if ax is not None:
        with shared_look(ax):
            (_published_boxes if as_published else plot_boxes)(profiles[0], ax)
            ax.set_title(labels[0] if as_published else f"{labels[0]}: {BY_DEPTH}")
        return apply_title_and_size(ax, title, None)
    with shared_look(ax):
        figure = (_published_panels if as_published else _panels)(profiles, labels)
    return apply_title_and_size(figure, title, size)


def title_of(profile: DepthProfile) -> str:
    """Return the title of a profile's boxes as plain text."""
    return plain_title(profile.run.model, BY_DEPTH)


def _panels(profiles: Sequence[DepthProfile], labels: Sequence[str]) -> Figure:
    """Draw boxes of each model, and its densities below; for a single model, beside them."""
    across = min(len(profiles), COLUMNS)
    bands = math.ceil(len(profiles) / across)
    if len(profiles) == 1:
        figure = new_figure(*ALONE)
        pairs = [tuple(figure.subplots(1, 2))]
    else:
        figure = new_figure(PANEL_WIDTH * across + 0.4, 2 * PANEL_HEIGHT * bands)
        grid = figure.subplots(2 * bands, across, squeeze=False)
        places = [divmod(number, across) for number in range(len(profiles))]
        pairs = [(grid[2 * band, column], grid[2 * band + 1, column]) for band, column in places]
        for ax in set(grid.flat) - {ax for pair in pairs for ax in pair}:
            ax.remove()
    for number, (profile, name, (boxes, densities)) in enumerate(zip(profiles, labels, pairs, strict=True)):
        plot_boxes(profile, boxes)
        plot_gaps(profile, densities, narrow=len(profiles) > 1)
        boxes.set_title(name if len(profiles) > 1 else "", **_title_look(labels))
        if number % across:
            boxes.set_ylabel("")
            densities.set_ylabel("")
    ends = np.array([boxes.get_ylim() for boxes, _ in pairs])
    for boxes, _ in pairs:
        boxes.set_ylim(ends.min(), ends.max())
    set_figure_title(figure, BOTH if len(profiles) > 1 else f"{labels[0]}: {BOTH}")
    return figure


def _published_panels(profiles: Sequence[DepthProfile], labels: Sequence[str]) -> Figure:
    """Draw lettered boxes of all models, then in separate rows lettered densities of the models that have scores."""
    named = list(zip(profiles, labels, strict=True))
    scored = [one for one in named if any(len(_gaps(one[0], quartile)) for quartile in ENDS)]
    is_alone = len(named) == 1
    across = len(named) + len(scored) if is_alone else min(len(named), COLUMNS)
    first_gap = len(named) if is_alone else across * math.ceil(len(named) / across)
    places = [*range(len(named)), *range(first_gap, first_gap + len(scored))]
    rows = places[-1] // across + 1
    titles = [with_letter(number, name) for number, (_, name) in enumerate([*named, *scored])]
    figure = new_figure(*(ALONE if is_alone else (PANEL_WIDTH * across + 0.4, PANEL_HEIGHT * rows)))
    grid = figure.add_gridspec(rows, across)
    axes = [figure.add_subplot(grid[divmod(place, across)]) for place in places]
    for number, (ax, (profile, _)) in enumerate(zip(axes, [*named, *scored], strict=True)):
        (_published_boxes if number < len(named) else _published_gaps)(profile, ax)
        ax.set_title(titles[number], **_title_look(titles))
        if places[number] % across and not is_alone:
            ax.set_ylabel("")
    return figure


def _published_boxes(profile: DepthProfile, ax: Axes) -> None:
    plot_boxes(profile, ax)
    ax.set_xticks(ax.get_xticks(), [f"Depth {depth}" for depth in profile.depths])
    ax.set_ylabel(AVERAGE.removesuffix(" (nats)"))


def _published_gaps(profile: DepthProfile, ax: Axes) -> None:
    plot_gaps(profile, ax)
    handles, series = ax.get_legend_handles_labels()
    quartiles = [f"{one}%" for one, (*_, named) in ENDS.items() if any(named in words for words in series)]
    ax.set_xticks(np.arange(-GAP_RANGE, GAP_RANGE + 0.1, 0.5))
    ax.tick_params(axis="x", labelsize=6)
    ax.legend(handles, quartiles, loc="upper right", handlelength=1.6)


def answers_note(profiles: Sequence[DepthProfile]) -> str:
    """Name the models whose score gap is of answers from the data, not the model's; "" if there is none."""
    given = [one for one in profiles if any(len(_gaps(one, quartile)) for quartile in ENDS)]
    named = ", ".join(short_name(one.run.model) for one in given if one.run.options["answers"] == DATA)
    hint = "is of the answers in the data, whichever model wrote them; with answers='model', the model answers itself"
    return f"The score gap of {named} {hint}." if named else ""


def _title_look(titles: Sequence[str]) -> dict[str, Any]:
    """Return the font size at which every title ends before the next panel; empty if all titles are short."""
    longest = max(map(len, titles))
    return {"fontsize": min(LONG_TITLE, TITLE_WIDTH / longest)} if longest > LONG and len(titles) > 1 else {}


def looks_of_depths(profile: DepthProfile) -> dict[int, tuple[str, str]]:
    """Return the colour and marker of each depth."""
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
    ax.set_ylabel(depth_label(profile))
    if any(len(sample) for sample in values):
        ax.set_ylim(bottom=min(0.0, min(sample.min() for sample in values if len(sample))))


def depth_label(profile: DepthProfile) -> str:
    """Return the label of the axis of Min-K% by depth."""
    return AVERAGE if profile.run.options["aggregate"] == "group" else "MIN-K% of a Question\n(nats)"


def plot_gaps(profile: DepthProfile, ax: Axes, narrow: bool = False) -> Axes:
    """Draw the density of the score gap of the deepest questions in the lowest and highest quartile of Min-K%."""
    drawn = sum(_density(ax, _gaps(profile, quartile), quartile) for quartile in ENDS)
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
    """Draw a score against the layer it is computed at, a line per depth with its 95 % interval.

    Args:
        profile: a result of `memorization` with several layers.
        score: a column of scores, such as "min_k++_0.2". Default: the figure's Min-K%. Drawn with the figure's sign.
        ax: axes to draw on; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: the score is unknown.
    """
    size = checked_place(ax, 1, figsize)
    score = checked_name("score", score or profile.main, list(profile.by_layer["score"].unique()))
    named = "Min-K%" if score == profile.main else score
    rows = profile.by_layer[profile.by_layer["score"] == score]
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
    """Return the score gaps of the deepest questions in one quartile of Min-K%."""
    rows = profile.table[(profile.table["depth"] == profile.depths[-1]) & (profile.table["quartile"] == quartile)]
    return rows["gap"].dropna().to_numpy(float)


def _density(ax: Axes, gaps: Float[ndarray, " node"], quartile: int) -> int:
    """Draw a density, or a line if all values are equal; return 1, or 0 if there is nothing to draw."""
    if not len(gaps):
        return 0
    color, dash, hatch, named = ENDS[quartile]
    look: dict[str, Any] = {"color": color, "linestyle": dash}
    if np.ptp(gaps) == 0:
        ax.axvline(gaps[0], label=f"{named} (n = {len(gaps):,}, all {gaps[0]:.2g})", **look)
        return 1
    x = np.linspace(-GAP_RANGE, GAP_RANGE, 301)
    y = gaussian_kde(gaps)(x)
    ax.fill_between(x, y, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.3, linewidth=0)
    ax.plot(x, y, label=f"{named} (n = {len(gaps):,})", **look)
    return 1


# Tokens and scores of texts.

QUARTILES = np.array([0.25, 0.5, 0.75])


@DRAWINGS.add(TextStatistics)
def plot_statistics(stats: TextStatistics, ax: Axes | None = None) -> Axes:
    """Draw the distribution of the tokens' log-probabilities; with several layers, their quartiles by layer."""
    table = stats.table
    with one_panel(ax, 3.6, 2.4) as ax:
        if "layer" in table and table["layer"].nunique() > 1:
            found = table.groupby("layer")["log_probability"].quantile(QUARTILES).unstack()
            ax.fill_between(found.index, found[0.25], found[0.75], color=BLUE, alpha=0.25, linewidth=0)
            ax.plot(found.index, found[0.5], "o-", color=BLUE, markersize=3)
            ax.set(xlabel="Layer (band: quartiles of tokens)", ylabel="log p of a token (nats)")
            tokens = len(table) // table["layer"].nunique()
            ax.set_title(model_title(stats.run, f"log-probability of {tokens:,} tokens"))
            whole_numbers(ax.xaxis)
        else:
            values = np.sort(table["log_probability"].to_numpy(float))
            ax.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), color=BLUE)
            share = f", {(table['rank'] == 0).mean():.0%} ranked first" if len(table) else ""
            ax.set_title(model_title(stats.run, f"{len(values):,} tokens{share}"))
            ax.set(xlabel="log p of a token (nats)", ylabel="Share of tokens at or below", ylim=(0, 1))
    return ax


@DRAWINGS.add(MemorizationScores)
def plot_scores(scores: MemorizationScores, ax: Axes | None = None) -> Axes:
    """Draw the median and quartiles over texts of Min-K%, Min-K%++ and Gap-K% against K, at the last layer."""
    table = scores.table
    if "layer" in table:
        table = table[table["layer"] == table["layer"].max()]
    with one_panel(ax, 3.6, 2.9) as ax:
        texts = table["text"].nunique()
        drawn = {name: SCORES[name] for name in SCORES if SCORES[name].takes_k and (table["score"] == name).any()}
        for name, score in drawn.items():
            found = table[table["score"] == name].groupby("k")["value"].quantile(QUARTILES).unstack()
            ax.fill_between(found.index, found[0.25], found[0.75], color=score.color, alpha=0.15, linewidth=0)
            ax.plot(found.index, found[0.5], marker=score.mark, color=score.color, markersize=3, label=score.title)
        ax.set(xlabel="K, share of lowest tokens (bands: quartiles of texts)", xlim=(0, 1.02))
        ax.set_ylabel("Score (higher = more likely seen)")
        legend_above(ax, 3, model_title(scores.run, f"scores of {texts:,} texts by K"))
    return ax


@DRAWINGS.add(Membership)
def plot_membership(membership: Membership, ax: Axes | None = None) -> Axes:
    """Draw the AUC of each score, at its K, with its interval, beside the baseline that does not use the model.

    With several layers, the last is drawn.
    """
    table = membership.table
    if "layer" in table:
        table = table[table["layer"].isna() | (table["layer"] == table["layer"].max())]
    names = [
        row["score"] if np.isnan(row["k"]) else f"{SCORES[row['score']].title}, K = {row['k']:g}"
        for row in table.to_dict("records")
    ]
    with one_panel(ax, 4.2, 0.9 + 0.17 * len(names)) as ax:
        y = np.arange(len(names))
        is_baseline = (table["score"] == BASELINE).to_numpy()
        for where, color, mark in ((~is_baseline, BLUE, "o"), (is_baseline, ORANGE, "s")):
            ax.hlines(y[where], table["auc_low"][where], table["auc_high"][where], colors=color, linewidths=1)
            ax.plot(table["auc"][where], y[where], mark, color=color, markersize=3.5)
        ax.axvline(0.5, color=FAINT, linewidth=0.7, linestyle="--")
        cell_ticks(ax.yaxis, y, [f"{name}, no model" if name == BASELINE else name for name in names])
        ax.set_ylim(len(names) - 0.4, -0.6)
        most = table[["members", "nonmembers"]].max()
        level = membership.run.options["level"]
        ax.set_xlabel(f"AUC, {most['members']:,} members against {most['nonmembers']:,} others (lines: {level:.0%})")
        ax.set_title(model_title(membership.run, "membership in training data"))
        ax.tick_params(axis="y", colors=INK, length=0)
    return ax


@DRAWINGS.add(ScoredTexts)
def plot_scored_texts(scored: ScoredTexts, ax: Axes | None = None) -> Axes:
    """Draw a histogram of the texts of a file over Min-K% (with K closest to 20 %)."""
    shares = [float(str(name).removeprefix("min_k_")) for name in scored.table if str(name).startswith("min_k_")]
    share = min(shares, key=lambda one: abs(one - 0.2))
    values = scored.table[f"min_k_{share:g}"].dropna()
    with one_panel(ax, 3.6, 2.4) as ax:
        ax.hist(values, bins=min(40, max(5, int(len(values) ** 0.5))), color=BLUE, alpha=0.85)
        ax.set(xlabel=f"Min-K% at K = {share:g} (higher = more likely seen)", ylabel="Texts")
        ax.set_title(model_title(scored.run, f"Min-K% of {len(values):,} texts"))
        whole_numbers(ax.yaxis)
    return ax


# A heat map of the tokens of texts: their likelihood, and the lowest K % that Min-K% averages.
#
# As a figure, and as HTML for notebooks, where hovering over a token shows its numbers. A token's colour is its
# log-probability, from white (certain) to dark (unlikely); the lowest K % are framed.

COLORS = "YlOrBr"
UNLIKELY = -10.0
"""The log-probability, in nats, at and below which the colour is the darkest."""
FRAME = "#2b6cb8"
WIDTH = 88
"""Characters per line."""
SHOWN = 6
SEEN = "how likely each token is"


class Placed(NamedTuple):
    """A token and its place."""

    text: str
    line: int
    column: int
    log_probability: float
    lowest: bool


@checked_call
def token_heat_map(
    profile: DepthProfile,
    nodes: Sequence[str] | None = None,
    *,
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw the scored tokens of questions, a block of lines per question.

    Args:
        profile: a result of `memorization`.
        nodes: ids of questions. Default: the first of the first graphs.
        ax: axes to draw on; default: a new figure, sized for the tokens' font.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: a node is unknown, or has no scored tokens.
    """
    size = checked_place(ax, 1, figsize)
    chosen = _tokens_of(profile, nodes)
    placed, headings, line = [], [], 0
    for name, rows in chosen.items():
        headings.append((line, name))
        line, column = line + 1, 0
        for token, value, lowest in zip(rows["token"], rows["log_probability"], rows["lowest"], strict=True):
            text = _shown(str(token))[:WIDTH]  # a token longer than a line is cut
            if column + columns(text) > WIDTH:
                line, column = line + 1, 0
            placed.append(Placed(text, line, column, float(value), bool(lowest)))
            column += columns(text)
        line += 2
    width = max(40, *(one.column + columns(one.text) for one in placed))
    is_new = ax is None
    with one_panel(ax, 0.7 + 0.058 * width, 0.6 + 0.16 * line) as ax:
        for start, name in headings:
            depth = int(profile.table.loc[profile.table["id"] == name, "depth"].iloc[0])
            ax.text(0, start + 0.5, label(f"{name}, depth {depth}"), va="center", color=FAINT, size=6.5)
        for one in placed:
            _draw(ax, one)
        ax.set(xlim=(0, width), ylim=(line - 0.5, -0.2))
        ax.axis("off")
        scale = mpl.cm.ScalarMappable(Normalize(UNLIKELY, 0), mpl.colormaps[COLORS].reversed())
        bar = ax.figure.colorbar(scale, ax=ax, fraction=0.02, pad=0.01, aspect=12, extend="min", shrink=0.9)
        bar.set_label("log p (nats);\nframed: lowest K%")
        ax.set_title(model_title(profile.run, SEEN))
    apply_title_and_size(ax, title, size)
    return figure_of(ax) if is_new else ax


@checked_call
def token_html(profile: DepthProfile, nodes: Sequence[str] | None = None) -> str:
    """Return the token heat map as HTML, for `IPython.display.HTML`; all text in it is escaped."""
    blocks = []
    for name, rows in _tokens_of(profile, nodes).items():
        spans = ""
        for token, value, lowest in zip(rows["token"], rows["log_probability"], rows["lowest"], strict=True):
            frame = f";outline:2px solid {FRAME};outline-offset:-2px" if lowest else ""
            tooltip = f"log p = {value:.2f}{', among the lowest' if lowest else ''}"
            colors = f"background:{_color(value)};color:{_ink(value)}"
            spans += f'<span title="{tooltip}" style="{colors}{frame}">{html.escape(_shown(str(token)))}</span>'
        blocks.append(
            f'<p style="margin:0.4em 0"><small style="color:{FAINT}">{html.escape(name)}</small><br>'
            f'<span style="font-family:monospace;line-height:1.9;white-space:pre-wrap">{spans}</span></p>'
        )
    return f'<div style="background:white;color:{INK};padding:0.4em">{"".join(blocks)}</div>'


def _tokens_of(profile: DepthProfile, nodes: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    """Find the tokens of each node; nodes with the same text share the tokens of the first."""
    checked_kind("profile", profile, DepthProfile, "hw.memorization(...)")
    by_id = dict(list(profile.tokens.groupby("id", sort=False)))
    table = profile.table.set_index("id")
    if nodes is None:
        nodes = [name for name in table.index if name in by_id][:SHOWN]
    tokens = {}
    for name in nodes:
        if name not in table.index:  # `checked_name` would list all nodes
            raise InputError(f"There is no node {name!r}.{did_you_mean(name, table.index)}")
        same = table.index[(table[["question", "answer"]] == table.loc[name, ["question", "answer"]]).all(axis=1)]
        owner = next((other for other in same if other in by_id), None)
        if owner is None:
            raise InputError(f"The node {name!r} has no scored tokens: {table.at[name, 'note']!s}.")
        tokens[name] = by_id[owner].sort_values("position")
    return tokens


def _shown(token: str) -> str:
    return token.replace("\n", "↵").replace("\t", "→") or "∅"


def _draw(ax: Axes, token: Placed) -> None:
    wide = columns(token.text)
    box = Rectangle((token.column + 0.05, token.line + 0.06), wide - 0.1, 0.88)
    # All boxes lie within the axes, so the layout need not measure hundreds of them one by one.
    box.set(facecolor=_color(token.log_probability), linewidth=0, in_layout=False)
    ax.add_patch(box)
    if token.lowest:
        frame = Rectangle((token.column + 0.08, token.line + 0.08), wide - 0.16, 0.84)
        ax.add_patch(frame)
        frame.set(fill=False, edgecolor=FRAME, linewidth=1.1, in_layout=False)
    middle = token.column + wide / 2
    text = ax.text(middle, token.line + 0.52, drawable(token.text, "monospace"), ha="center", va="center", size=6.2)
    # parse_math=False, since a token may contain "$".
    text.set(color=_ink(token.log_probability), family=["monospace", *others()], parse_math=False, in_layout=False)


def _color(log_probability: float) -> str:
    share = min(1.0, max(0.0, log_probability / UNLIKELY))
    return to_hex(mpl.colormaps[COLORS](share))


def _ink(log_probability: float) -> str:
    return "#ffffff" if log_probability < 0.65 * UNLIKELY else INK
