"""What a cache keeps: how large activations are by layer, on a logarithmic scale; of attention alone, its patterns.

What grows through the layers (a residual stream), what differs (a layer whose numbers are a hundred times its
neighbours'), and what is nil is seen before anything is fitted on it. What is in no layer is a dashed line. The
size is the root mean square of a site's numbers. Patterns are those of the first text, query by key, a panel for each
head of each layer; of many heads their mean, a panel for each layer.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from headwater.colors import BLUE, FAINT, GREEN, ORANGE, PURPLE
from headwater.figures.style import DASHED, label, model_title, new_figure, style, ticks, whole_numbers
from headwater.models.caches.cache import Cache
from headwater.runs.result import DRAWINGS

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, FAINT)
MARKS = ("o", "s", "^", "D", "v")
MOST_ROWS, MOST_COLUMNS, MOST_TOKENS = 6, 8, 20
"""Of patterns: layers and heads that have panels of their own, and tokens that are written at the axes."""


@DRAWINGS.add(Cache)
def plot_cache(cache: Cache, ax: Axes | None = None) -> Axes | Figure:
    """Draw the size of each activation by layer; of a cache of attention patterns alone, the patterns.

    Args:
        cache: what `model.cache` gave.
        ax: where to draw; default: a new figure. Patterns are drawn into it as one panel, their mean.
    """
    with style(ax):
        if list(cache.kept) == ["pattern"]:
            return _plot_patterns(cache, ax)
        ax = ax or new_figure(3.4, 2.3).add_subplot()
        for number, (site, rows) in enumerate(cache.summary().groupby("site", sort=False)):
            colour, mark = COLOURS[number % len(COLOURS)], MARKS[number // len(COLOURS) % len(MARKS)]
            if rows["layer"].isna().all():
                ax.axhline(rows["rms"].iloc[0], color=colour, linestyle=DASHED, label=label(str(site)))
            else:
                ordered = rows.sort_values("layer")
                layers = ordered["layer"].astype(int)
                ax.plot(layers, ordered["rms"], color=colour, marker=mark, markersize=3.5, label=label(str(site)))
        # A logarithmic axis cannot show zero, the RMS of a site that is zero everywhere.
        if (cache.summary()["rms"] > 0).all():
            ax.set_yscale("log")
        whole_numbers(ax.xaxis)
        ax.set_xlabel("Layer")
        ax.set_ylabel("Root mean square")
        ax.legend(fontsize=7)
        ax.set_title(model_title(cache.run, f"size of activations (n = {len(cache.frame):,} tokens)"))
    return ax


def _plot_patterns(cache: Cache, ax: Axes | None) -> Axes | Figure:
    """Draw the patterns of the first text."""
    layers = cache.layers
    by_layer = [cache.example("pattern", layer, 0).float() for layer in layers]
    title = model_title(cache.run, "attention" + (f" of text 0 of {len(cache.texts)}" if len(cache.texts) > 1 else ""))
    if ax is not None:
        _panel(ax, sum(by_layer[1:], by_layer[0]).mean(0) / len(layers), cache, True, True)
        ax.set_title(f"{title}, mean of {len(layers) * len(cache.heads)} heads" if len(cache.heads) > 1 else title)
        return ax
    apart = len(layers) <= MOST_ROWS and len(cache.heads) <= MOST_COLUMNS
    columns = len(cache.heads) if apart else min(len(layers), MOST_COLUMNS)
    named = [(f"{layer}.{head}" if apart else f"layer {layer}", maps[place] if apart else maps.mean(0))
        for layer, maps in zip(layers, by_layer, strict=True)
        for place, head in enumerate(cache.heads if apart else [None])]  # fmt: skip
    rows = -(-len(named) // columns)
    figure = new_figure(1.0 + 1.3 * max(columns, 2), 0.9 + 1.3 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for number, (panel, (name, weights)) in enumerate(zip(panels, named, strict=False)):
        _panel(panel, weights, cache, number % columns == 0, number + columns >= len(named))
        panel.set_title(name, fontsize=7)
    for panel in panels[len(named) :]:
        panel.remove()
    figure.suptitle(title if apart else f"{title}, mean over {len(cache.heads)} heads")
    return figure


def _panel(ax: Axes, weights: Tensor, cache: Cache, left: bool, below: bool) -> None:
    """Draw one pattern: a row for each query, a column for each key, white for no attention."""
    ax.imshow(weights.numpy(), cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="none")
    tokens = cache.tokens.loc[cache.tokens["example"] == 0, "token"].astype(str).tolist()
    named = len(tokens) <= MOST_TOKENS and weights.shape == (len(tokens), len(tokens))
    for axis, shown, what in ((ax.xaxis, below, "Key"), (ax.yaxis, left, "Query")):
        if named:
            axis.set_ticks(range(len(tokens)), ticks(tokens) if shown else [""] * len(tokens), fontsize=5)
        else:
            whole_numbers(axis)
        axis.set_label_text(what if shown else "")
    ax.tick_params(axis="x", rotation=90 if named else 0)
