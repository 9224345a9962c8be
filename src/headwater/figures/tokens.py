"""A heat map of the tokens of texts: which are likely, and which are the lowest K % that Min-K% is made of.

As a figure, and as HTML for notebooks, where a token shows its numbers under the pointer. A token's colour is its
log-probability, from white (certain) to dark (unlikely); the lowest K % are framed.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headwater.calls import checked_call
from headwater.colors import FAINT, INK
from headwater.errors import InputError, did_you_mean
from headwater.figures.style import checked_place, columns, drawable, label, model_title, new_figure, others, style
from headwater.runs.figure_options import Size, apply_title_and_size

if TYPE_CHECKING:
    from headwater.likelihood.profile import DepthProfile

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
    with style(ax):
        figure = None
        if ax is None:
            figure = new_figure(0.7 + 0.058 * width, 0.6 + 0.16 * line)
            ax = figure.add_subplot()
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
    return ax if figure is None else figure


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
    found = {}
    for name in nodes:
        if name not in table.index:
            raise InputError(f"There is no node {name!r}.{did_you_mean(name, table.index)}")
        same = table.index[(table[["question", "answer"]] == table.loc[name, ["question", "answer"]]).all(axis=1)]
        owner = next((other for other in same if other in by_id), None)
        if owner is None:
            raise InputError(f"The node {name!r} has no scored tokens: {table.at[name, 'note']!s}.")
        found[name] = by_id[owner].sort_values("position")
    return found


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
