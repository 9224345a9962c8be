"""What each layer would predict: layers upwards, positions to the right, the top token in every cell.

The colour is the probability of that token, from white (none) to dark (certain). Of long prompts the last positions are
drawn, of deep models every second layer or fewer: the last always; of both as many as can be read at the figure's size.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from headwater.colors import INK
from headwater.errors import InputError
from headwater.figures.style import cell_ticks, columns, inches, model_title, new_figure, others, style
from headwater.figures.sweep import shown
from headwater.lenses.predictions import LayerPredictions
from headwater.options import shown as said
from headwater.options import whole_number
from headwater.runs.figure_options import requested_size
from headwater.runs.result import DRAWINGS

MOST_POSITIONS, MOST_LAYERS = 14, 30
WIDTH, HEIGHT = 0.58, 0.22
"""Inches of a cell."""
LEAST_WIDTH, LEAST_HEIGHT = 0.36, 0.1
"""Inches of a cell whose token can be read."""
AROUND = (1.5, 1.1)
"""Inches of what is written around the cells."""
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
    if ax is not None:
        wide, high = inches(ax)
    else:
        wide, high = np.subtract(requested_size() or (np.inf, np.inf), AROUND)
    most_positions, most_layers = min(MOST_POSITIONS, wide / LEAST_WIDTH), min(MOST_LAYERS, high / LEAST_HEIGHT)
    left_out = max(0, len(positions) - max(1, int(most_positions)))
    positions, step = positions[left_out:], -(-len(layers) // max(1, int(most_layers)))
    # Counted from the last layer down, so that the last layer is always drawn.
    layers = layers[::-1][::step][::-1]
    drawn = table[table["position"].isin(positions) & table["layer"].isin(layers)]
    probability = drawn.pivot(index="layer", columns="position", values="probability").to_numpy(dtype=float)
    tokens = drawn.pivot(index="layer", columns="position", values="top_token").to_numpy(dtype=object)
    under = drawn.drop_duplicates("position").sort_values("position")["token"].tolist()
    with style(ax):
        if ax is None:
            size = AROUND[0] + WIDTH * len(positions), AROUND[1] + HEIGHT * len(layers)
            ax = new_figure(*size).add_subplot()
        mesh = ax.pcolormesh(
            probability, cmap=COLORS, vmin=0, vmax=1, rasterized=True, edgecolor="white", linewidth=0.4
        )
        _write(ax, tokens, probability)
        for spine in ax.spines.values():
            spine.set_visible(False)
        cell_ticks(ax.yaxis, np.arange(len(layers)) + 0.5, [str(layer) for layer in layers])
        names = [shown(token) for token in under]
        cell_ticks(ax.xaxis, np.arange(len(names)) + 0.5, names, rotation=45, ha="right", rotation_mode="anchor")
        ax.tick_params(length=0)
        ax.set(xlabel=f"The last {len(positions)} positions" if left_out else "", ylabel="Layer")
        bar = ax.figure.colorbar(mesh, ax=ax, fraction=0.04, pad=0.01)
        bar.outline.set_visible(False)
        bar.set_label("Probability")
        texts = result.table["example"].nunique()
        ax.set_title(model_title(result.run, "top token of each layer" + f", text {example} of {texts}" * (texts > 1)))
    return ax


def _write(ax: Axes, tokens: np.ndarray, probability: np.ndarray) -> None:
    """Write the tokens into their cells, as large as the cells allow."""
    across, down = np.divide(inches(ax), tokens.shape[::-1])
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
