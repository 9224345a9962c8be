"""Predictions of each layer (logit lens), and direct contributions of components to a logit difference."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import headwater.figures.style as st
from headwater.colors import BLUE, DIVERGING, FAINT, GREEN, INK, ORANGE, PURPLE
from headwater.figure_options import requested_size
from headwater.figures.sweep import shown
from headwater.lenses.direct_attribution import DirectAttribution
from headwater.lenses.predictions import LayerPredictions
from headwater.options import checked_count
from headwater.runs.result import DRAWINGS

# Prediction of each layer: layers upwards, positions to the right, the top token in every cell.
#
# The colour is the probability of that token, from white (none) to dark (certain). Long prompts show only their last
# positions, deep models only every second layer or fewer, always with the last: as many as are readable at the figure's
# size.


MOST_POSITIONS, MOST_LAYERS = 14, 30
WIDTH, HEIGHT = 0.58, 0.22
"""Inches of a cell, by default."""
LEAST_WIDTH, LEAST_HEIGHT = 0.36, 0.1
"""Inches of the smallest cell whose token is readable."""
AROUND = (1.5, 1.1)
"""Inches for the labels around the cells."""
LETTERS = 9
"""Most characters of a token in a cell; longer tokens are cut."""


@DRAWINGS.add(LayerPredictions)
def plot_layer_predictions(result: LayerPredictions, ax: Axes | None = None, *, example: int = 0) -> Axes:
    """Draw the prompt `example`: the top token of each layer and position, coloured by its probability."""
    table = result.table
    example = checked_count("example", example, least=0, most=int(table["example"].max()))
    table = table[(table["example"] == example) & (table["top"] == 1)]
    positions = np.unique(table["position"])
    layers = np.unique(table["layer"])
    if ax is not None:
        wide, high = st.inches(ax)
    else:
        wide, high = np.subtract(requested_size() or (np.inf, np.inf), AROUND)
    most_positions, most_layers = min(MOST_POSITIONS, wide / LEAST_WIDTH), min(MOST_LAYERS, high / LEAST_HEIGHT)
    left_out = max(0, len(positions) - max(1, int(most_positions)))
    positions, step = positions[left_out:], -(-len(layers) // max(1, int(most_layers)))
    # Counted down from the last layer, so that it is always drawn.
    layers = layers[::-1][::step][::-1]
    drawn = table[table["position"].isin(positions) & table["layer"].isin(layers)]
    probability = drawn.pivot(index="layer", columns="position", values="probability").to_numpy(dtype=float)
    tokens = drawn.pivot(index="layer", columns="position", values="top_token").to_numpy(dtype=object)
    under = drawn.drop_duplicates("position").sort_values("position")["token"].tolist()
    with st.one_panel(ax, AROUND[0] + WIDTH * len(positions), AROUND[1] + HEIGHT * len(layers)) as ax:
        mesh = st.heat_map(ax, probability, "Blues", 0.0, 1.0)
        mesh.set(edgecolor="white", linewidth=0.4)
        # Tokens are written in the largest size that fits their cells, if that is readable.
        across, down = np.divide(st.inches(ax), tokens.shape[::-1])
        size = min(6.0, 72 * down * 0.8, 72 * across / (0.58 * LETTERS))
        for row, column in np.ndindex(tokens.shape) if size >= 2 else ():
            text = shown(str(tokens[row, column]))
            text = text if st.columns(text) <= LETTERS else text[: LETTERS - 1].rstrip("\\") + "…"
            ax.text(
                column, row, text, ha="center", va="center", size=size, family=["sans-serif", *st.others()],
                color="white" if probability[row, column] > 0.55 else INK,
            )  # fmt: skip
        st.cell_ticks(ax.yaxis, range(len(layers)), [str(layer) for layer in layers])
        names = [shown(token) for token in under]
        st.cell_ticks(ax.xaxis, range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        ax.set(xlabel=f"The last {len(positions)} positions" if left_out else "", ylabel="Layer")
        st.color_bar(mesh, ax, "Probability", fraction=0.04, pad=0.01)
        texts = result.table["example"].nunique()
        ax.set_title(
            st.model_title(result.run, "top token of each layer" + f", text {example} of {texts}" * (texts > 1))
        )
    return ax


# Direct logit attribution: a map of the heads and MLPs of every layer, or of the positions heads attend to; else bars.
#
# The colour scale of the map diverges symmetrically from 0; its last column, set apart, shows the MLPs. Components
# without a layer, the embedding and the bias, are in the label of the x axis. Several prompts are averaged.

LABEL = "Contribution to the logit difference"
NAMES = {"embed": "Embedding", "head": "Heads", "mixer": "Layers without heads", "mlp": "MLPs", "bias": "Biases"}
COLOURS = {"embed": PURPLE, "head": BLUE, "mixer": GREEN, "mlp": ORANGE, "bias": FAINT}


@DRAWINGS.add(DirectAttribution)
def plot_direct_attribution(result: DirectAttribution, ax: Axes | None = None) -> Axes | Figure:
    """Draw the contribution of each component, averaged over prompts."""
    roles = result.totals["role"].unique().tolist() if "role" in result.table.columns else [None]
    # A panel's inches: of its cells, within limits, plus the labels around them.
    across, down = (result.table[name].fillna(0).max() + 1 for name in ("head", "layer"))
    width, height = float(np.clip(1.7 + 0.14 * across, 3.6, 7)), float(np.clip(1.0 + 0.11 * down, 2.6, 6))
    with st.several_panels(ax, (width * len(roles), height), len(roles), len(roles)) as panels:
        for one, role in zip(panels, roles, strict=True):
            both = (result.table, result.totals)
            table, totals = (rows if role is None else rows[rows["role"] == role] for rows in both)
            _panel(one, result, table, totals, "" if role is None else f"{role}, ")
    return st.plot_of(panels)


def _panel(ax: Axes, result: DirectAttribution, table: pd.DataFrame, totals: pd.DataFrame, what: str) -> None:
    """Draw the attribution in some rows, in one panel."""
    n = len(totals)
    each = table.groupby(["component", "layer", "head"], dropna=False)["contribution"].sum() / n
    means, pad = each.reset_index(), 6.0
    if result.run.options.get("by") == "position":
        _sources(ax, table, means)
    elif means["head"].notna().any():
        _map(ax, means)
        pad += 1.3 * mpl.rcParams["xtick.labelsize"]
    else:
        _bars(ax, means)
    total = f"{totals['logit_difference'].mean():+.2f}".replace("-", "−")
    ax.set_title(st.model_title(result.run, f"{what}parts of logit difference {total} (n = {n:,})"), pad=pad)


def _map(ax: Axes, means: pd.DataFrame) -> None:
    heads = means[means["component"] == "head"].pivot(index="layer", columns="head", values="contribution")
    mlps = means[means["component"] == "mlp"].set_index("layer")["contribution"]
    heads = heads.reindex(mlps.index)
    n_heads = heads.shape[1]
    # The empty column separates the MLPs from the heads; one image keeps both on one colour scale.
    drawn = np.ma.masked_invalid(np.column_stack([heads, np.full(len(heads), np.nan), mlps]).astype(float))
    limit = st.largest(drawn)
    edges = np.append(np.arange(n_heads + 1), [n_heads + 0.4, n_heads + 1.4])
    mesh = ax.pcolormesh(
        edges, np.arange(len(heads) + 1), drawn, cmap=DIVERGING, vmin=-limit, vmax=limit, rasterized=True
    )
    ax.spines[:].set_visible(False)
    st.cell_ticks(ax.xaxis, np.arange(n_heads) + 0.5, [str(i) for i in range(n_heads)], st.MOST_TICKS)
    st.cell_ticks(ax.yaxis, np.arange(len(heads)) + 0.5, [str(i) for i in heads.index], st.MOST_TICKS)
    ax.tick_params(length=0)
    ax.annotate("MLP", (n_heads + 0.9, 1), xycoords=ax.get_xaxis_transform(), size=mpl.rcParams["xtick.labelsize"],
        xytext=(0, 2), textcoords="offset points", ha="center")  # fmt: skip
    not_drawn = means["layer"].isna() | means["component"].isin(["bias", "mixer"])
    ax.set(xlabel=f"Head{_written(means[not_drawn])}", ylabel="Layer")
    st.color_bar(mesh, ax, LABEL)


def _sources(ax: Axes, table: pd.DataFrame, means: pd.DataFrame) -> None:
    """Draw the heads of each layer summed, by attended position: the mean over prompts that have the position."""
    heads = table[table["component"] == "head"]
    sums = heads.groupby(["layer", "position"])["contribution"].sum()
    drawn = (sums / heads.groupby(["layer", "position"])["example"].nunique()).unstack()
    mesh = st.heat_map(ax, drawn)
    st.whole_numbers(ax.xaxis, ax.yaxis)
    others = _written(means[means["component"] != "head"])
    ax.set(xlabel=f"Position attended to{others}", ylabel="Layer (its heads together)")
    st.color_bar(mesh, ax, LABEL)


def _written(means: pd.DataFrame) -> str:
    """Return the components that are not drawn, in words: the embedding and the biases."""
    sums = means.groupby("component")["contribution"].sum().to_dict()
    words = [f"{NAMES[str(name)].lower()} {value:+.2f}".replace("-", "−") for name, value in sums.items()]
    return f" ({', '.join(words)})" if words else ""


def _bars(ax: Axes, means: pd.DataFrame) -> None:
    """Draw bars for the components of each layer, or, without layers, one for each component."""
    layered = means[means["layer"].notna()]
    found = set((means if layered.empty else layered)["component"])
    present = [name for name in NAMES if name in found]
    if layered.empty:
        values = means.set_index("component")["contribution"]
        ax.bar([NAMES[name] for name in present], values[present], color=[COLOURS[name] for name in present])
    else:
        width = 0.8 / len(present)
        for place, name in enumerate(present):
            part = layered[layered["component"] == name]
            at = part["layer"].to_numpy(dtype=float) + (place - (len(present) - 1) / 2) * width
            ax.bar(at, part["contribution"], width, color=COLOURS[name], label=NAMES[name])
        st.whole_numbers(ax.xaxis)
        ax.set_xlabel(f"Layer{_written(means[means['layer'].isna()])}")
        ax.legend()
    ax.axhline(0, color=FAINT, linewidth=0.6)
    ax.set_ylabel(LABEL)
