"""Figures of likelihood results: tokens by rank and entropy, scores against K, and members against non-members."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headwater.calls import checked_call
from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.errors import InputError, did_you_mean
from headwater.figures.style import (
    cell_ticks,
    checked_place,
    columns,
    drawable,
    figure_of,
    label,
    legend_above,
    model_title,
    one_panel,
    others,
    whole_numbers,
)
from headwater.likelihood.files import ScoredTexts
from headwater.likelihood.formulas import SCORES
from headwater.likelihood.members import BASELINE, Membership
from headwater.likelihood.scores import MemorizationScores
from headwater.likelihood.statistics import TextStatistics
from headwater.runs.result import DRAWINGS, Size, apply_title_and_size

if TYPE_CHECKING:
    from headwater.likelihood.profile import DepthProfile


QUARTILES = np.array([0.25, 0.5, 0.75])


@DRAWINGS.add(TextStatistics)
def plot_statistics(stats: TextStatistics, ax: Axes | None = None) -> Axes:
    """Draw how the log-probabilities of tokens are distributed; with several layers, their quartiles by layer."""
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
            greedy = float((table["rank"] == 0).mean()) if len(table) else float("nan")
            ax.set_title(model_title(stats.run, f"{len(values):,} tokens, {greedy:.0%} its first choice"))
            ax.set(xlabel="log p of a token (nats)", ylabel="Share of tokens at or below", ylim=(0, 1))
    return ax


@DRAWINGS.add(MemorizationScores)
def plot_scores(scores: MemorizationScores, ax: Axes | None = None) -> Axes:
    """Draw the median over texts, and the quartiles, of Min-K%, Min-K%++ and Gap-K% against K, at the last layer."""
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
    """Draw the AUC of each score, at its K, with its interval, beside the baseline that never sees the model.

    Of several layers the last is drawn.
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
        ax.set_title(model_title(membership.run, "telling texts seen in training"))
        ax.tick_params(axis="y", colors=INK, length=0)
    return ax


@DRAWINGS.add(ScoredTexts)
def plot_scored_texts(scored: ScoredTexts, ax: Axes | None = None) -> Axes:
    """Draw how the texts of a file are distributed over Min-K% (its K nearest 20 %), as a histogram."""
    shares = [float(str(name).removeprefix("min_k_")) for name in scored.table if str(name).startswith("min_k_")]
    share = min(shares, key=lambda one: abs(one - 0.2))
    values = scored.table[f"min_k_{share:g}"].dropna()
    with one_panel(ax, 3.6, 2.4) as ax:
        ax.hist(values, bins=min(40, max(5, int(len(values) ** 0.5))), color=BLUE, alpha=0.85)
        ax.set(xlabel=f"Min-K% at K = {share:g} (higher = more likely seen)", ylabel="Texts")
        ax.set_title(model_title(scored.run, f"Min-K% of {len(values):,} texts"))
        whole_numbers(ax.yaxis)
    return ax


# A heat map of the tokens of texts: which are likely, and which are the lowest K % that Min-K% is made of.
#
# As a figure, and as HTML for notebooks, where a token shows its numbers under the pointer. A token's colour is its
# log-probability, from white (certain) to dark (unlikely); the lowest K % are framed.


COLORS = "YlOrBr"
UNLIKELY = -10.0
"""The log-probability, in nats, from which on the colour is the darkest."""
FRAME = "#2b6cb8"
WIDTH = 88
"""Characters in a line."""
SHOWN = 6
SEEN = "how likely each token is"


class Placed(NamedTuple):
    """A token and where it is."""

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
    """Draw the scored tokens of questions, a block of lines each.

    Args:
        profile: a result of `memorization`.
        nodes: ids of questions. Default: the first of the first graphs.
        ax: where to draw; default: a new figure, whose size fits the type of the tokens.
        title: in place of the figure's own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: a node is unknown, or has no scored tokens.
    """
    size = checked_place(ax, 1, figsize)
    chosen = _tokens_of(profile, nodes)
    placed, headings, line = [], [], 0
    for name, rows in chosen.items():
        headings.append((line, name))
        block = _placed(rows, line + 1)
        placed += block
        line = block[-1].line + 2
    width = max(40, *(token.column + columns(token.text) for token in placed))
    is_new = ax is None
    with one_panel(ax, 0.7 + 0.058 * width, 0.6 + 0.16 * line) as ax:
        for start, name in headings:
            depth = int(profile.table.loc[profile.table["id"] == name, "depth"].iloc[0])
            ax.text(0, start + 0.5, label(f"{name}, depth {depth}"), va="center", color=FAINT, size=6.5)
        for token in placed:
            _draw(ax, token)
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
    """Return the same as HTML, for `IPython.display.HTML`; every text in it is escaped."""
    blocks = []
    for name, rows in _tokens_of(profile, nodes).items():
        spans = "".join(
            _span(str(token), float(value), bool(lowest))
            for token, value, lowest in zip(rows["token"], rows["log_probability"], rows["lowest"], strict=True)
        )
        blocks.append(
            f'<p style="margin:0.4em 0"><small style="color:{FAINT}">{html.escape(name)}</small><br>'
            f'<span style="font-family:monospace;line-height:1.9;white-space:pre-wrap">{spans}</span></p>'
        )
    return f'<div style="background:white;color:{INK};padding:0.4em">{"".join(blocks)}</div>'


def _tokens_of(profile: DepthProfile, nodes: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    """Find the tokens of each node; nodes with the same text share those of the first."""
    if not hasattr(profile, "tokens"):
        raise InputError(f"profile must be what hw.memorization returns, found a {type(profile).__name__}.")
    by_id = dict(list(profile.tokens.groupby("id", sort=False)))
    table = profile.table.set_index("id")
    if nodes is None:
        nodes = [name for name in table.index if name in by_id][:SHOWN]
    tokens = {}
    for name in nodes:
        if name not in table.index:
            raise InputError(f"There is no node {name!r}.{did_you_mean(name, table.index)}")
        same = table.index[(table[["question", "answer"]] == table.loc[name, ["question", "answer"]]).all(axis=1)]
        owner = next((other for other in same if other in by_id), None)
        if owner is None:
            raise InputError(f"The node {name!r} has no scored tokens: {table.at[name, 'note']!s}.")
        tokens[name] = by_id[owner].sort_values("position")
    return tokens


def _shown(token: str) -> str:
    return token.replace("\n", "↵").replace("\t", "→") or "∅"


def _placed(rows: pd.DataFrame, line: int) -> list[Placed]:
    """Put tokens one after the other, in lines of at most `WIDTH` characters; a token longer than that is cut."""
    placed, column = [], 0
    for token, value, lowest in zip(rows["token"], rows["log_probability"], rows["lowest"], strict=True):
        text = _shown(str(token))[:WIDTH]
        if column + columns(text) > WIDTH:
            line, column = line + 1, 0
        placed.append(Placed(text, line, column, float(value), bool(lowest)))
        column += columns(text)
    return placed


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
    # parse_math=False: a token may hold "$".
    text.set(color=_ink(token.log_probability), family=["monospace", *others()], parse_math=False, in_layout=False)


def _span(token: str, log_probability: float, lowest: bool) -> str:
    frame = f";outline:2px solid {FRAME};outline-offset:-2px" if lowest else ""
    text = f"log p = {log_probability:.2f}{', among the lowest' if lowest else ''}"
    colors = f"background:{_color(log_probability)};color:{_ink(log_probability)}"
    return f'<span title="{text}" style="{colors}{frame}">{html.escape(_shown(token))}</span>'


def _color(log_probability: float) -> str:
    share = min(1.0, max(0.0, log_probability / UNLIKELY))
    return to_hex(mpl.colormaps[COLORS](share))


def _ink(log_probability: float) -> str:
    return "#ffffff" if log_probability < 0.65 * UNLIKELY else INK
