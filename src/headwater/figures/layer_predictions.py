"""What each layer would predict: layers upwards, positions to the right, the top token in every cell.

The colour is the probability of that token, from white (none) to dark (certain). Of long prompts the last positions are
drawn, of deep models every second layer or fewer: the last always.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.colors import INK
from headwater.errors import InputError
from headwater.figures.fonts import columns, others
from headwater.figures.style import model_title, style
from headwater.figures.sweep import shown
from headwater.lenses.predictions import LayerPredictions
from headwater.options import shown as said
from headwater.options import whole_number
from headwater.runs.result import DRAWINGS

MOST_POSITIONS, MOST_LAYERS = 14, 30
WIDTH, HEIGHT = 0.58, 0.22
"""Inches of a cell."""
LETTERS = 9
"""Of a token in a cell; a longer one is cut."""
COLORS = "Blues"


@DRAWINGS.add(LayerPredictions)
def plot_layer_predictions(result: LayerPredictions, ax: Axes | None = None, *, example: int = 0) -> Axes:
    """Draw one prompt: what `LayerPredictions.plot` says."""
    table = result.table
    try:
        table = table[(table["example"] == whole_number(example)) & (table["top"] == 1)]
    except TypeError:
        table = table.iloc[:0]
    if table.empty:
        raise InputError(f"There is no example {said(example)}; there are 0 to {result.table['example'].max()}.")
    positions = np.unique(table["position"])
    layers = np.unique(table["layer"])
    left_out = max(0, len(positions) - MOST_POSITIONS)
    positions, step = positions[left_out:], -(-len(layers) // MOST_LAYERS)
    layers = layers[::-1][::step][::-1]
    drawn = table[table["position"].isin(positions) & table["layer"].isin(layers)]
    probability = drawn.pivot(index="layer", columns="position", values="probability").to_numpy(dtype=float)
    tokens = drawn.pivot(index="layer", columns="position", values="top_token").to_numpy(dtype=object)
    under = drawn.drop_duplicates("position").sort_values("position")["token"].tolist()
    with style():
        if ax is None:
            size = (1.5 + WIDTH * len(positions), 1.1 + HEIGHT * len(layers))
            ax = plt.figure(figsize=size, layout="constrained").add_subplot()
        mesh = ax.pcolormesh(
            probability, cmap=COLORS, vmin=0, vmax=1, rasterized=True, edgecolor="white", linewidth=0.4
        )
        _write(ax, tokens, probability)
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.set_yticks(np.arange(len(layers)) + 0.5, [str(layer) for layer in layers])
        ax.set_xticks(
            np.arange(len(positions)) + 0.5, [shown(token) for token in under], rotation=45, ha="right",
            rotation_mode="anchor",
        )  # fmt: skip
        ax.tick_params(length=0)
        ax.set(xlabel=f"The last {len(positions)} positions" if left_out else "", ylabel="Layer")
        bar = ax.figure.colorbar(mesh, ax=ax, fraction=0.04, pad=0.01)
        bar.outline.set_visible(False)
        bar.set_label("Probability")
        ax.set_title(model_title(result.run, "top token of each layer"))
    return ax


def _write(ax: Axes, tokens: np.ndarray, probability: np.ndarray) -> None:
    """Write the tokens into their cells, as large as the cells allow."""
    figure = ax.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    place, (wide, high) = ax.get_position(), figure.get_size_inches()
    across, down = 0.9 * wide * place.width / tokens.shape[1], 0.9 * high * place.height / tokens.shape[0]
    size = min(6.0, 72 * down * 0.8, 72 * across / (0.58 * LETTERS))
    if size < 2:
        return
    for row, column in np.ndindex(tokens.shape):
        text = shown(str(tokens[row, column]))
        text = text if columns(text) <= LETTERS else text[: LETTERS - 1].rstrip("\\") + "…"
        dark = probability[row, column] > 0.55
        ax.text(
            column + 0.5, row + 0.5, text, ha="center", va="center", size=size, family=["sans-serif", *others()],
            color="white" if dark else INK,
        )  # fmt: skip
