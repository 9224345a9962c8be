"""How large activations are: the root mean square of each site's numbers, by layer, on a logarithmic scale.

What grows through the layers (a residual stream), what stands out (a layer whose numbers are a hundred times its
neighbours'), and what is nil is seen before anything is fitted on it. What stands in no layer is a dashed line.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from headwater.colors import BLUE, FAINT, GREEN, ORANGE, PURPLE
from headwater.figures.fonts import label
from headwater.figures.style import DASHED, model_title, style, whole_numbers
from headwater.models.caches.cache import Cache
from headwater.runs.result import DRAWINGS

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, FAINT)
MARKS = ("o", "s", "^", "D", "v")


@DRAWINGS.add(Cache)
def plot_activation_sizes(cache: Cache, ax: Axes | None = None) -> Axes:
    """Draw the size of each activation by layer.

    Args:
        cache: what `model.cache` gave.
        ax: where to draw; default: a new figure.
    """
    with style():
        ax = ax or plt.figure(figsize=(3.4, 2.3), layout="constrained").add_subplot()
        for number, (site, rows) in enumerate(cache.summary().groupby("site", sort=False)):
            colour, mark = COLOURS[number % len(COLOURS)], MARKS[number // len(COLOURS) % len(MARKS)]
            if rows["layer"].isna().all():
                ax.axhline(rows["rms"].iloc[0], color=colour, linestyle=DASHED, label=label(str(site)))
            else:
                ordered = rows.sort_values("layer")
                layers = ordered["layer"].astype(int)
                ax.plot(layers, ordered["rms"], color=colour, marker=mark, markersize=3.5, label=label(str(site)))
        if (cache.summary()["rms"] > 0).all():
            ax.set_yscale("log")
        whole_numbers(ax.xaxis)
        ax.set_xlabel("Layer")
        ax.set_ylabel("Root mean square")
        ax.legend(fontsize=7)
        ax.set_title(model_title(cache.run, f"size of activations (n = {len(cache.frame):,} tokens)"))
    return ax
