"""The contents of a cache: size of activations by layer on a logarithmic scale; attention patterns if nothing else.

Before anything is fitted, the figure shows which sites grow through the layers (a residual stream), which layer differs
(with values a hundred times its neighbours'), and which sites are zero. Sites outside the layers are dashed lines. The
size is the root mean square of a site's values. Patterns are of one text, query by key, one panel per selected head or
layer; with many heads, their mean in one panel per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

import headwater.figures.style as st
from headwater.colors import BLUE, FAINT, GREEN, ORANGE, PURPLE
from headwater.errors import InputError
from headwater.figures.sweep import shown as written
from headwater.models.cache import Cache
from headwater.models.part_names import read_part
from headwater.options import checked_count, checked_several, shown
from headwater.runs.result import DRAWINGS, whole_summary

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, FAINT)
MARKS = ("o", "s", "^", "D", "v")
MOST_ROWS, MOST_COLUMNS, MOST_TOKENS = 6, 8, 20
"""For patterns: most layers and heads with separate panels, and most tokens written along the axes."""


@DRAWINGS.add(Cache)
def plot_cache(
    cache: Cache,
    ax: Axes | None = None,
    *,
    heads: Sequence[tuple[int, int] | str] | str | None = None,
    example: int = 0,
) -> Axes | Figure:
    """Draw the size of activations by layer; or attention patterns, if heads are chosen or only patterns are kept.

    Args:
        cache: the cache.
        ax: where to draw; default: a new figure. Without `heads`, an `ax` shows the mean of all patterns.
        heads: at most 48 pairs (layer, head), or names such as "9.2", a panel each. Default: all heads kept, or if
            there are many, the mean of each layer.
        example: the text whose patterns are drawn.
    """
    chosen = None if heads is None else _chosen(cache, heads)
    example = checked_count("example", example, least=0, most=len(cache.texts) - 1)
    if chosen is not None or list(cache.kept) == ["pattern"]:
        return _plot_patterns(cache, ax, chosen, example)
    sizes = whole_summary(cache)
    with st.one_panel(ax, 3.4, 2.3) as ax:
        for number, (site, rows) in enumerate(sizes.groupby("site", sort=False)):
            colour, mark = COLOURS[number % len(COLOURS)], MARKS[number // len(COLOURS) % len(MARKS)]
            if rows["layer"].isna().all():
                ax.axhline(rows["rms"].iloc[0], color=colour, linestyle=st.DASHED, label=st.label(str(site)))
            else:
                ordered = rows.sort_values("layer")
                layers = ordered["layer"].astype(int)
                ax.plot(layers, ordered["rms"], color=colour, marker=mark, markersize=3.5, label=st.label(str(site)))
        # A logarithmic axis cannot show the RMS of a site that is zero everywhere.
        if (sizes["rms"] > 0).all():
            ax.set_yscale("log")
        st.whole_numbers(ax.xaxis)
        ax.set(xlabel="Layer", ylabel="Root mean square")
        ax.legend(fontsize=7)
        ax.set_title(st.model_title(cache.run, f"size of activations (n = {len(cache.frame):,} tokens)"))
    return ax


def _chosen(cache: Cache, heads: Any) -> list[tuple[int, int]]:
    """Return heads as pairs (layer, head); raise if the cache does not contain one."""
    wanted, chosen = "pairs (layer, head), such as heads=[(0, 3)], or names, such as heads=['0.3']", []
    for one in [heads] if isinstance(heads, str) else checked_several("heads", heads, wanted):
        part = read_part(one) if isinstance(one, str) else None
        chosen.append(tuple(checked_several("heads", one, wanted)) if part is None else (part.layer, part.head))
    kept = {*product(cache.kept["pattern"].layers if "pattern" in cache.kept else (), cache.heads)}
    if missing := [one for one in chosen if one not in kept]:
        raise InputError(
            f"This cache has no attention pattern of head {shown(missing[0])}: heads= must be pairs (layer, head) that "
            "model.cache(..., sites='pattern') has kept."
        )
    if not 0 < len(chosen) <= MOST_ROWS * MOST_COLUMNS:
        most = f"a figure shows 1 to {MOST_ROWS * MOST_COLUMNS}; view() shows all"
        raise InputError(f"heads= names {len(chosen)} heads: {most}.")
    return chosen


def _plot_patterns(cache: Cache, ax: Axes | None, chosen: list[tuple[int, int]] | None, example: int) -> Axes | Figure:
    """Draw the patterns of one text."""
    layers, heads = cache.kept["pattern"].layers, cache.heads
    title = st.model_title(
        cache.run, "attention" + f" in text {example} of {len(cache.texts)}" * (len(cache.texts) > 1)
    )
    columns = MOST_COLUMNS
    if chosen is None and ax is None and len(layers) <= MOST_ROWS and len(heads) <= MOST_COLUMNS:
        chosen, columns = [*product(layers, heads)], len(heads)
    read = layers if chosen is None else {layer for layer, _ in chosen}
    maps = {layer: cache.example("pattern", layer, example).float() for layer in read}
    if chosen is not None:
        named = [(f"{layer}.{head}", maps[layer][heads.index(head)]) for layer, head in chosen]
    else:
        title += f", mean of {len(heads)} heads"
        named = [(f"layer {layer}", each.mean(0)) for layer, each in maps.items()]
        if ax is not None:
            named = [(f"{len(layers)} layers", torch.stack([each for _, each in named]).mean(0))]
    columns = min(columns, len(named))
    rows = -(-len(named) // columns)
    size = 1.4 + 1.3 * max(columns, 2), 0.9 + 1.3 * max(rows, 2 - columns // 2)
    tokens = cache.tokens.loc[cache.tokens["example"] == example, "token"].astype(str).tolist()
    with st.several_panels(ax, size, len(named), columns, title, instead="choose one head") as panels:
        for number, (panel, (name, weights)) in enumerate(zip(panels, named, strict=True)):
            image = _panel(panel, weights, tokens, number % columns == 0, number + columns >= len(named))
            panel.set_title(name, fontsize=7)
        st.color_bar(image, panels, "Attention", aspect=30)
        if len(named) == 1:
            panels[0].set_title(f"{title}, {'head ' if chosen else ''}{named[0][0]}")
    return st.plot_of(panels)


def _panel(ax: Axes, weights: Tensor, tokens: list[str], left: bool, below: bool) -> AxesImage:
    """Draw one pattern: a row for each query, a column for each key, white for no attention."""
    named = len(tokens) <= MOST_TOKENS and weights.shape == (len(tokens), len(tokens))
    for axis, is_outer, what in ((ax.xaxis, below, "Key"), (ax.yaxis, left, "Query")):
        if not is_outer:
            axis.set_visible(False)  # laying out ticks takes longer than everything else
            continue
        if named:
            look = {"rotation": 90} if what == "Key" else {}
            st.cell_ticks(axis, range(len(tokens)), [*map(written, tokens)], fontsize=5, **look)
        else:
            st.whole_numbers(axis)
        axis.set_label_text(what)
    return ax.imshow(weights.numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="none")
