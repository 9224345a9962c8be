"""Figures of likelihood results: memorization by question depth, tokens, scores against K, members and non-members.

Memorization by question depth has boxes of Min-K% by depth, and densities of the score gap by quartile. The published
form (Ko et al., EMNLP 2024): a panel of boxes per model, blue, orange and green for depth 1, 2 and 3, and below it the
densities of the score gap of the deepest questions, green for those whose Min-K% is in the lowest quartile, orange for
the highest. Min-K% is drawn with the published sign, opposite to the tables: higher = less likely seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy import ndarray
from scipy.stats import gaussian_kde

import headwater.figures.style as st
from headwater.calls import checked_call
from headwater.colors import BLUE, FAINT, GREEN, INK, ORANGE
from headwater.errors import InputError
from headwater.figure_options import Size, apply_title_and_size
from headwater.figures.published import StyleName, model_name, with_letter
from headwater.likelihood.files import ScoredTexts
from headwater.likelihood.formulas import SCORES
from headwater.likelihood.framed import DATA
from headwater.likelihood.members import BASELINE, Membership
from headwater.likelihood.profile import DepthProfile
from headwater.likelihood.scores import MemorizationScores
from headwater.likelihood.statistics import TextStatistics
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS

DEPTH_COLORS = (BLUE, ORANGE, GREEN, "#8c5fb0", "#7a7a7a")
DEPTH_MARKS = ("o", "s", "^", "D", "v")
ENDS: dict[int, tuple[str, Any, str, str]] = {
    25: (GREEN, "-", "", "lowest quartile"),
    75: (ORANGE, st.DASHED, "////", "highest quartile"),
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
    *,
    style: StyleName = "headwater",
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw boxes above densities for several models side by side; for one model, boxes beside densities.

    Args:
        profiles: results of `memorization`.
        style: "headwater", or "published": lettered panels, with the score gaps in separate rows, only for models that
            have scores; models and axes by their published names, without counts. No letter on `ax`.
        ax: axes for the boxes of a single profile, without the densities; default: a new figure.
        title: above all panels; for boxes on `ax`, replaces the model's name.
        figsize: width and height of a new figure, in inches.
    """
    size, as_published = st.checked_place(ax, len(profiles), figsize), style == "published"
    if not profiles:
        raise InputError("depth_profiles needs a list of results of memorization; the list is empty.")
    labels = [st.short_name(one.run.model) for one in profiles]
    labels = list(map(model_name, labels)) if as_published else labels
    with st.style(ax):
        if ax is None:
            return apply_title_and_size(_panels(profiles, labels, as_published), title, size)
        plot_boxes(profiles[0], ax, as_published)
        ax.set_title(labels[0] if as_published else f"{labels[0]}: {BY_DEPTH}")
    return apply_title_and_size(ax, title, None)


def title_of(profile: DepthProfile) -> str:
    """Return the title of a profile's boxes as plain text."""
    return st.plain_title(profile.run.model, BY_DEPTH)


def _panels(profiles: Sequence[DepthProfile], labels: Sequence[str], as_published: bool) -> Figure:
    """Draw each model's boxes with its density below; for a single model, beside them.

    In the published style, rows of boxes precede rows of densities, panels have letters, and only the models with
    scores have densities.
    """
    named = list(zip(profiles, labels, strict=True))
    scored = [one for one in named if not as_published or any(len(_gaps(one[0], quartile)) for quartile in ENDS)]
    n, is_alone = len(named), len(named) == 1
    across = 1 + len(scored) if is_alone else min(n, COLUMNS)
    if as_published or is_alone:
        first_density = 1 if is_alone else across * math.ceil(n / across)
        places = [*range(n), *range(first_density, first_density + len(scored))]
    else:
        boxes = [number + across * (number // across) for number in range(n)]
        places = boxes + [place + across for place in boxes]
    rows = max(places) // across + 1
    figure = st.new_figure(*(ALONE if is_alone else (PANEL_WIDTH * across + 0.4, PANEL_HEIGHT * rows)))
    grid = figure.add_gridspec(rows, across)
    axes = [figure.add_subplot(grid[divmod(place, across)]) for place in places]
    titles = [name for _, name in named] + [""] * len(scored)
    if as_published:
        titles = [with_letter(number, name) for number, (_, name) in enumerate([*named, *scored])]
    elif is_alone:
        titles = ["", ""]
    for number, (ax, (profile, _)) in enumerate(zip(axes, [*named, *scored], strict=True)):
        if number < n:
            plot_boxes(profile, ax, as_published)
        else:
            plot_gaps(profile, ax, narrow=not is_alone, as_published=as_published)
        ax.set_title(titles[number], **_title_look(titles))
        if places[number] % across and not is_alone:
            ax.set_ylabel("")
    if not as_published:
        ends = np.array([ax.get_ylim() for ax in axes[:n]])
        for ax in axes[:n]:
            ax.set_ylim(ends.min(), ends.max())
        st.set_figure_title(figure, f"{labels[0]}: {BOTH}" if is_alone else BOTH)
    return figure


def _title_look(titles: Sequence[str]) -> dict[str, Any]:
    """Return the font size at which every title ends before the next panel; empty if all titles are short."""
    longest = max(map(len, titles))
    return {"fontsize": min(LONG_TITLE, TITLE_WIDTH / longest)} if longest > LONG and len(titles) > 1 else {}


def looks_of_depths(profile: DepthProfile) -> dict[int, tuple[str, str]]:
    """Return the colour and marker of each depth."""
    n = len(DEPTH_COLORS)
    return {depth: (DEPTH_COLORS[i % n], DEPTH_MARKS[i % n]) for i, depth in enumerate(profile.depths)}


def plot_boxes(profile: DepthProfile, ax: Axes, as_published: bool = False) -> None:
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
    counts = ["" if as_published else f"\nn = {len(sample):,}" for sample in values]
    names = [f"Depth {depth}{count}" for depth, count in zip(profile.depths, counts, strict=True)]
    ax.set_xticks(range(1, len(values) + 1), names)
    ax.set_ylabel(AVERAGE.removesuffix(" (nats)") if as_published else depth_label(profile))
    if any(len(sample) for sample in values):
        ax.set_ylim(bottom=min(0.0, min(sample.min() for sample in values if len(sample))))


def depth_label(profile: DepthProfile) -> str:
    """Return the label of the axis of Min-K% by depth."""
    return AVERAGE if profile.run.options["aggregate"] == "group" else "MIN-K% of a Question\n(nats)"


def plot_gaps(profile: DepthProfile, ax: Axes, narrow: bool = False, as_published: bool = False) -> Axes:
    """Draw the density of the score gap of the deepest questions in the lowest and highest quartile of Min-K%."""
    drawn = [quartile for quartile in ENDS if _density(ax, _gaps(profile, quartile), quartile)]
    ax.set(xlim=(-GAP_RANGE, GAP_RANGE), ylabel="Density")
    ax.set_xticks(np.linspace(-GAP_RANGE, GAP_RANGE, 7)[:: 3 if narrow else 1])
    shallower = profile.depths[-2] if len(profile.depths) > 1 else "?"
    whose = "\nof the answers in the data" if drawn and profile.run.options["answers"] == DATA else ""
    ax.set_xlabel(f"Score Gap (D{profile.depths[-1]} − D{shallower}){whose}")
    ax.set_ylim(bottom=0)
    if drawn and as_published:
        ax.set_xticks(np.arange(-GAP_RANGE, GAP_RANGE + 0.1, 0.5))
        ax.tick_params(axis="x", labelsize=6)
        ax.legend(ax.get_legend_handles_labels()[0], [f"{one}%" for one in drawn], loc="upper right", handlelength=1.6)
    elif drawn:
        st.legend_above(ax, 1, "", handlelength=2.2)
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
    """
    size = st.checked_place(ax, 1, figsize)
    score = checked_name("score", score or profile.main, list(profile.by_layer["score"].unique()))
    named = "Min-K%" if score == profile.main else score
    rows = profile.by_layer[profile.by_layer["score"] == score]
    with st.one_panel(ax, 3.6, 2.9) as ax:
        for depth, (color, mark) in looks_of_depths(profile).items():
            line = rows[rows["depth"] == depth]
            values = (-line[name] for name in ("value", "high", "low"))
            st.draw_line(ax, line["layer"], *values, color=color, marker=mark, markersize=3, label=f"Depth {depth}")
        ax.set(xlabel=f"Layer ({st.BANDS_ARE})", ylabel=AVERAGE if score == profile.main else f"minus {score}")
        st.whole_numbers(ax.xaxis)
        st.legend_above(ax, min(3, len(profile.depths)), st.model_title(profile.run, f"{named} by layer"))
    return apply_title_and_size(ax, title, size)


def _gaps(profile: DepthProfile, quartile: int) -> Float[ndarray, " node"]:
    """Return the score gaps of the deepest questions in one quartile of Min-K%."""
    rows = profile.table[(profile.table["depth"] == profile.depths[-1]) & (profile.table["quartile"] == quartile)]
    return rows["gap"].dropna().to_numpy(float)


def _density(ax: Axes, gaps: Float[ndarray, " node"], quartile: int) -> bool:
    """Draw a density, or a line if all values are equal; return whether there is anything to draw."""
    if not len(gaps):
        return False
    color, dash, hatch, named = ENDS[quartile]
    look: dict[str, Any] = {"color": color, "linestyle": dash}
    if np.ptp(gaps) == 0:
        ax.axvline(gaps[0], label=f"{named} (n = {len(gaps):,}, all {gaps[0]:.2g})", **look)
        return True
    x = np.linspace(-GAP_RANGE, GAP_RANGE, 301)
    y = gaussian_kde(gaps)(x)
    ax.fill_between(x, y, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.3, linewidth=0)
    ax.plot(x, y, label=f"{named} (n = {len(gaps):,})", **look)
    return True


# Tokens and scores of texts.

QUARTILES = np.array([0.25, 0.5, 0.75])


@DRAWINGS.add(TextStatistics)
def plot_statistics(stats: TextStatistics, ax: Axes | None = None) -> Axes:
    """Draw the distribution of the tokens' log-probabilities; with several layers, their quartiles by layer."""
    table = stats.table
    with st.one_panel(ax, 3.6, 2.4) as ax:
        if "layer" in table and table["layer"].nunique() > 1:
            found = table.groupby("layer")["log_probability"].quantile(QUARTILES).unstack()
            st.draw_line(ax, found.index, found[0.5], found[0.25], found[0.75], color=BLUE, marker="o", markersize=3)
            ax.set(xlabel="Layer (band: quartiles of tokens)", ylabel="log p of a token (nats)")
            tokens = len(table) // table["layer"].nunique()
            ax.set_title(st.model_title(stats.run, f"log-probability of {tokens:,} tokens"))
            st.whole_numbers(ax.xaxis)
        else:
            values = np.sort(table["log_probability"].to_numpy(float))
            ax.plot(values, np.arange(1, len(values) + 1) / max(1, len(values)), color=BLUE)
            share = f", {(table['rank'] == 0).mean():.0%} ranked first" if len(table) else ""
            ax.set_title(st.model_title(stats.run, f"{len(values):,} tokens{share}"))
            ax.set(xlabel="log p of a token (nats)", ylabel="Share of tokens at or below", ylim=(0, 1))
    return ax


@DRAWINGS.add(MemorizationScores)
def plot_scores(scores: MemorizationScores, ax: Axes | None = None) -> Axes:
    """Draw the median and quartiles over texts of Min-K%, Min-K%++ and Gap-K% against K, at the last layer."""
    table = scores.table
    if "layer" in table:
        table = table[table["layer"] == table["layer"].max()]
    with st.one_panel(ax, 3.6, 2.9) as ax:
        texts = table["text"].nunique()
        drawn = {name: SCORES[name] for name in SCORES if SCORES[name].takes_k and (table["score"] == name).any()}
        for name, score in drawn.items():
            found = table[table["score"] == name].groupby("k")["value"].quantile(QUARTILES).unstack()
            look: dict[str, Any] = {"color": score.color, "marker": score.mark, "markersize": 3, "label": score.title}
            st.draw_line(ax, found.index, found[0.5], found[0.25], found[0.75], **look)
        ax.set(xlabel="K, share of lowest tokens (bands: quartiles of texts)", xlim=(0, 1.02))
        ax.set_ylabel("Score (higher = more likely seen)")
        st.legend_above(ax, 3, st.model_title(scores.run, f"scores of {texts:,} texts by K"))
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
    with st.one_panel(ax, 4.2, 0.9 + 0.17 * len(names)) as ax:
        y = np.arange(len(names))
        is_baseline = (table["score"] == BASELINE).to_numpy()
        for where, color, mark in ((~is_baseline, BLUE, "o"), (is_baseline, ORANGE, "s")):
            ends = table["auc_low"][where], table["auc_high"][where]
            st.draw_points(ax, table["auc"][where], y[where], *ends, color, mark)
        ax.axvline(0.5, color=FAINT, linewidth=0.7, linestyle="--")
        st.name_rows(ax, [f"{name}, no model" if name == BASELINE else name for name in names], 0.6)
        most = table[["members", "nonmembers"]].max()
        ax.set_xlabel(f"AUC, {most['members']:,} members against {most['nonmembers']:,} others (lines: 95%)")
        ax.set_title(st.model_title(membership.run, "membership in training data"))
    return ax


@DRAWINGS.add(ScoredTexts)
def plot_scored_texts(scored: ScoredTexts, ax: Axes | None = None) -> Axes:
    """Draw a histogram of the texts of a file over Min-K% (with K closest to 20 %)."""
    shares = [float(str(name).removeprefix("min_k_")) for name in scored.table if str(name).startswith("min_k_")]
    share = min(shares, key=lambda one: abs(one - 0.2))
    values = scored.table[f"min_k_{share:g}"].dropna()
    with st.one_panel(ax, 3.6, 2.4) as ax:
        ax.hist(values, bins=min(40, max(5, int(len(values) ** 0.5))), color=BLUE, alpha=0.85)
        ax.set(xlabel=f"Min-K% at K = {share:g} (higher = more likely seen)", ylabel="Texts")
        ax.set_title(st.model_title(scored.run, f"Min-K% of {len(values):,} texts"))
        st.whole_numbers(ax.yaxis)
    return ax
