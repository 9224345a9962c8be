"""Circuits, claims and edges: a circuit as a graph, and effects beside what they are compared with.

A circuit is drawn by layers, from the embedding on the left to the logits on the right. MLPs are on one line with the
embedding and the logits; the heads of a layer are above it, those fed by many low nodes at the bottom. A line is an
edge: red if its effect is above 0, blue below, grey if unknown; its width grows with the square root of the effect's
size. The line style shows which input of a head it feeds: solid for q, dashed for k, dotted for v. If several query
heads share one key or value, the line leads to those of them in the circuit. Up to `FEW` edges are labelled with their
effects.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

import headwater.figures.style as st
from headwater.circuits.circuit import Circuit
from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.curve import CircuitCurve
from headwater.circuits.graph import Graph, Nodes
from headwater.circuits.path_patching import PathEffects
from headwater.circuits.result import EdgeEffects
from headwater.circuits.search import DECISIONS, KEPT, LEFT_OUT, NOT_TRIED, CircuitSearch
from headwater.colors import BLUE, DIVERGING, FAINT, INK
from headwater.options import checked_name
from headwater.runs.result import DRAWINGS, Claim, Result, whole_summary

ABOVE, BELOW = "#b2182b", "#2166ac"
"""The end colours of the scale of edge maps."""
LINES: Mapping[str, Any] = {"q": "-", "k": st.DASHED, "v": (0, (1, 1.2)), "mlp": "-", "logits": "-"}
FED = {"q": "query", "k": "key", "v": "value"}
FEW = 24
"""Most edges that are labelled with their effects."""
WIDTHS = (0.4, 3.2)
COLUMN, ROW = 0.62, 0.34
"""Inches between columns, and between the heads of a layer, if there is room."""
LEAST, LARGEST = (6.8, 2.2), (10.0, 7.0)
"""Inches of the smallest and largest figure: few columns are spread out, many are closer, with smaller names."""
NAME = 6.5
"""Largest font size of node names, in points; in crowded figures, the MLP of layer 3 is m3."""
BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white", "linewidth": 0.6}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
MINUS = "\N{MINUS SIGN}"
Place: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Drawn:
    """One line: an edge, or its part that leads to one of several heads sharing the same key or value."""

    edge: int
    """Index of the edge in the circuit."""
    source: int
    """Nodes are sender numbers; the logits come after the last sender."""
    target: int
    kind: str


def title_of(circuit: Circuit) -> str:
    """Return the title of a circuit's figure as plain text."""
    seen = f"circuit of {len(circuit):,} edges, {len(circuit.on_a_path):,} on a path"
    return st.plain_title(circuit.model, seen) if circuit.model else seen.capitalize()


@DRAWINGS.add(Circuit)
def plot_circuit(circuit: Circuit, ax: Axes | None = None) -> Axes | Figure:
    """Draw a circuit by layers, as described above."""
    lines = lines_of(circuit)
    places = layout(circuit.graph, lines)
    far = max((x for x, _ in places.values()), default=1.0)
    high = max((y for _, y in places.values()), default=0.0)
    curves = {line: _curve(places, line) for line in lines}
    low = min([-0.4, *(_point(curve, 0.5)[1] - 0.2 for curve in curves.values())])
    size = np.clip((1.0 + COLUMN * far, 1.1 + ROW * (high - low)), LEAST, LARGEST)
    with st.one_panel(ax, *size) as ax:
        wide, tall = np.divide(st.inches(ax), (far + 1.2, high - low + 0.7))
        is_crowded = 72 * wide < 3.2 * NAME
        points = min(NAME, 72 * wide / (2.4 if is_crowded else 3.2), 72 * tall / 1.8)
        sizes = np.abs(np.nan_to_num(circuit.effects))
        top = float(sizes.max(initial=0.0)) or 1.0
        order = sorted(lines, key=lambda line: sizes[line.edge])
        for rank, line in enumerate(order):
            effect = float(circuit.effects[line.edge])
            share = 0.0 if np.isnan(effect) else float(np.sqrt(abs(effect) / top))
            color = FAINT if np.isnan(effect) else ABOVE if effect > 0 else BELOW
            look: dict[str, Any] = {"linestyle": LINES[line.kind], "linewidth": WIDTHS[0] + share * np.ptp(WIDTHS)}
            look |= {"alpha": 0.35 + 0.55 * share, "zorder": 1 + rank / max(1, len(order)), "capstyle": "butt"}
            ax.add_patch(PathPatch(curves[line], facecolor="none", edgecolor=color, **look))
        senders = circuit.graph.senders
        for node, (x, y) in places.items():
            box = BOX | {"edgecolor": INK if y == 0 else FAINT}
            name = "logits" if node == len(senders) else senders.name(node).removeprefix("head ")
            name = name.replace("mlp ", "m") if is_crowded else name
            ax.text(x, y, name, ha="center", va="center", size=points, zorder=5, bbox=box)
        if len(circuit) <= FEW and wide >= 0.8 * COLUMN:
            _write_effects(ax, circuit, list(reversed(order)), curves, places)
        ax.set(xlim=(-0.6, far + 0.6), ylim=(low, high + 0.7), yticks=[], xlabel="Layer")
        ax.spines[["left", "bottom"]].set_visible(False)
        ax.tick_params(axis="x", length=0)
        inner = [node for node in places if 0 < node < len(senders)]
        at = pd.Series([places[node][0] for node in inner], dtype=float).groupby([int(senders.layer[i]) for i in inner])
        st.cell_ticks(ax.xaxis, at.mean().tolist(), [str(layer) for layer, _ in at])
        _name_lines(ax, circuit.effects, {line.kind for line in lines})
        st.legend_above(ax, 7, st.label(title_of(circuit)))
    return ax


def _name_lines(ax: Axes, effects: np.ndarray, kinds: Collection[str]) -> None:
    """Add what colours, widths and patterns of lines mean to the legend, as far as they are drawn."""
    is_unknown = np.isnan(effects)
    signs = {"above 0": (effects > 0, ABOVE), "below 0": (effects < 0, BELOW), "unknown": (is_unknown, FAINT)}
    for name, (is_so, color) in signs.items():
        if is_so.any():
            ax.plot([], [], label=f"effect {name}", color=color, linewidth=2)
    if not is_unknown.all():
        top = float(np.nanmax(np.abs(effects))) or 1.0
        ax.plot([], [], label=f"thickest: {top:.2g}", color=INK, linewidth=WIDTHS[1])
    for kind in (kind for kind in FED if kind in kinds):
        ax.plot([], [], label=f"into {kind} ({FED[kind]})", color=INK, linestyle=LINES[kind])


def lines_of(circuit: Circuit) -> list[Drawn]:
    """Return the lines of a circuit's edges, in their order."""
    graph, lines = circuit.graph, []
    sends = set(graph.sender[circuit.edges].tolist())
    logits = len(graph.senders)
    for number, edge in enumerate(circuit.edges.tolist()):
        receiver = int(graph.receiver[edge])
        kind = graph.receivers.kinds[graph.receivers.kind[receiver]]
        driven = [] if kind == "logits" else [int(node) for node in graph.driven(receiver)]
        targets = [logits] if kind == "logits" else [node for node in driven if node in sends] or driven[:1]
        lines += [Drawn(number, int(graph.sender[edge]), target, kind) for target in targets]
    return lines


def layout(graph: Graph, lines: list[Drawn]) -> dict[int, Place]:
    """Return the place of each node: a column for the heads of a layer and one for its MLP, if they take part."""
    nodes = sorted({node for line in lines for node in (line.source, line.target)})
    logits = len(graph.senders)
    columns: dict[tuple[int, int], list[int]] = {}
    for node in nodes:
        layer = graph.n_layers if node == logits else int(graph.senders.layer[node])
        columns.setdefault((layer, int(node != logits and graph.senders.kind[node] == 2)), []).append(node)
    places: dict[int, Place] = {}
    for x, (_, column) in enumerate(sorted(columns.items())):
        is_head = column[0] != logits and graph.senders.kind[column[0]] == 1
        heights: dict[int, float] = {}
        for node in column:
            below = [places[line.source][1] for line in lines if line.target == node and line.source in places]
            heights[node] = float(np.mean(below)) if below else 0.0
        for y, node in enumerate(sorted(column, key=lambda node: heights[node])):
            places[node] = float(x), (y + 1.0 + 0.5 * (x % 2)) if is_head else 0.0
    return places


def _curve(places: Mapping[int, Place], line: Drawn) -> Path:
    (x0, y0), (x1, y1) = places[line.source], places[line.target]
    if y0 == y1 == 0:  # both nodes are on the base line: curve below the nodes between them
        depth = -0.28 - 0.2 * (x1 - x0)
        middle = [(x0 + 0.25 * (x1 - x0), depth), (x1 - 0.25 * (x1 - x0), depth)]
    else:
        bend = {"q": 0.22, "k": -0.22}.get(line.kind, 0.0)
        middle = [(x0 + 0.45 * (x1 - x0), y0 + bend), (x1 - 0.45 * (x1 - x0), y1 + 2 * bend)]
    return Path([(x0, y0), *middle, (x1, y1)], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def _write_effects(
    ax: Axes, circuit: Circuit, lines: list[Drawn], curves: Mapping[Drawn, Path], places: Mapping[int, Place]
) -> None:
    """Write the effects on their lines, the largest first; leave out those without room."""
    written: set[int] = set()
    occupied = [(x, y, 0.35, 0.27) for x, y in places.values()]
    for line in lines:
        effect = float(circuit.effects[line.edge])
        if np.isnan(effect) or line.edge in written:
            continue
        text = f"{line.kind} {effect:+.2g}" if line.kind in "qkv" else f"{effect:+.2g}"
        spots = [_point(curves[line], t) for t in (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82)]
        for x, y in spots:
            if not any(abs(x - a) < wide + 0.4 and abs(y - b) < high + 0.05 for a, b, wide, high in occupied):
                break
        else:
            continue
        written.add(line.edge)
        occupied.append((x, y, 0.4, 0.28))
        color = ABOVE if effect > 0 else BELOW
        look: dict[str, Any] = {"size": 5.5, "color": color, "zorder": 6, "bbox": LABEL_BOX}
        ax.text(x, y, text.replace("-", MINUS), ha="center", va="center", **look)


def _point(curve: Path, t: float) -> Place:
    """Return the point at parameter `t` of a cubic Bézier curve."""
    a, b, c, d = np.asarray(curve.vertices)
    x, y = (1 - t) ** 3 * a + 3 * t * (1 - t) ** 2 * b + 3 * t**2 * (1 - t) * c + t**3 * d
    return float(x), float(y)


# Circuits run alone: the faithfulness of each with its placebos, and the curve over sizes with the placebos as a band.
#
# Both axes of faithfulness show 0 (the empty circuit) and 1 (the model). The placebo band reaches from their 5 % to
# their 95 % quantile; the circuits' band is the bootstrap interval over prompts.

CIRCUIT, PLACEBO, LINE = "#0b5394", "#9a9a9a", "#d0d0d0"


@DRAWINGS.add(CircuitRuns)
def plot_circuit_runs(runs: CircuitRuns, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw the faithfulness of each circuit on one metric (default: the first), beside its placebos."""
    name, table, summary = _of_metric(runs, metric)
    with st.one_panel(ax, 4.6, 0.8 + 0.4 * len(summary)) as ax:
        for x in (0.0, 1.0):
            ax.axvline(x, color=LINE, linewidth=0.8)
        for place, (_, row) in enumerate(summary.iterrows()):
            others = _placebos(table[table["circuit"] == row["circuit"]])
            ax.plot(others, np.full(len(others), place), "|", color=PLACEBO, markersize=9)
            if np.isfinite(row["low"]):
                ax.plot([row["low"], row["high"]], [place, place], color=CIRCUIT, linewidth=1.2)
            ax.plot(row["faithfulness"], place, "o", color=CIRCUIT, markersize=5)
        names = zip(st.ticks(summary["circuit"].map(str)), summary["edges"], strict=True)
        st.name_rows(ax, [f"{name} ({edges:,})" for name, edges in names])
        ax.set_xlabel(st.label(f"Faithfulness on {name.replace('_', ' ')}"))
        bars = " (bars: random circuits)" * bool(table["placebo"].notna().any())
        ax.set_title(st.model_title(runs.run, f"circuits alone{bars}"))
    return ax


@DRAWINGS.add(CircuitCurve)
def plot_circuit_curve(curve: CircuitCurve, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw the faithfulness on one metric (default: the first) by the size of the circuit."""
    name, table, summary = _of_metric(curve, metric)
    summary = summary.sort_values("size")
    with st.one_panel(ax, 4.6, 3.2) as ax:
        for y in (0.0, 1.0):
            ax.axhline(y, color=LINE, linewidth=0.8)
        others = [_placebos(table[table["circuit"] == circuit]) for circuit in summary["circuit"]]
        if all(len(one) for one in others):
            placebos = np.array([np.quantile(one, (0.5, 0.05, 0.95)) for one in others]).T
            st.draw_line(
                ax, summary["size"], *placebos, color=PLACEBO, linewidth=1.0, label="random, of the same shape"
            )
        look: dict[str, Any] = {"marker": "o", "markersize": 3.5, "label": "strongest edges"}
        st.draw_line(ax, *(summary[name] for name in ("size", "faithfulness", "low", "high")), color=CIRCUIT, **look)
        ax.set(xscale="log", xlabel="Share of all edges", ylabel=st.label(f"Faithfulness on {name.replace('_', ' ')}"))
        n = curve.table["example"].nunique()
        st.legend_above(ax, 2, st.model_title(curve.run, "circuits by size, run alone" + f" (n = {n})" * (n > 1)))
    return ax


@DRAWINGS.add(CircuitSearch)
def plot_circuit_search(search: CircuitSearch, ax: Axes | None = None) -> Axes | Figure:
    """Draw the metric against the number of edges that remain."""
    begun = search.table[search.table["decision"] != DECISIONS[LEFT_OUT]]
    tried = begun[begun["decision"] != DECISIONS[NOT_TRIED]]
    is_kept = (tried["decision"] == DECISIONS[KEPT]).to_numpy()
    remaining = len(begun) - np.cumsum(~is_kept)
    circuit_rows = search.alone[search.alone["placebo"].isna()]
    with st.one_panel(ax, 4.6, 3.2) as ax:
        for name in ("clean", "corrupted"):
            ax.axhline(circuit_rows[name].mean(), color=LINE, linewidth=0.8)
            at = ("axes fraction", "data")
            ax.annotate(name, (1.0, circuit_rows[name].mean()), xycoords=at, fontsize="small", va="bottom", ha="right")
        ax.plot(remaining, tried["value"], color=PLACEBO, linewidth=1.2, label="remaining edges")
        ax.plot(remaining[is_kept], tried["value"][is_kept], "|", color=CIRCUIT, markersize=9, label="edge kept")
        ax.invert_xaxis()
        ax.set(xlabel="Edges remaining", ylabel=st.label(str(circuit_rows["metric"].iloc[0]).replace("_", " ")))
        ax.legend(frameon=False, loc="lower left")
        edges = f"{len(search.circuit):,} of {len(search.table):,} edges kept"
        ax.set_title(st.model_title(search.run, f"search for a circuit ({edges})"))
    return ax


def _of_metric(result: Result, metric: str | None) -> tuple[str, pd.DataFrame, pd.DataFrame]:
    """Return the metric to draw, the first by default, and its rows of the table and of the summary."""
    names = tuple(result.table["metric"].unique())
    name = names[0] if metric is None else checked_name("metric", metric, names)
    table, summary = (rows[rows["metric"] == name] for rows in (result.table, whole_summary(result)))
    return name, table, summary


def _placebos(part: pd.DataFrame) -> np.ndarray:
    """Return the faithfulness of each placebo over prompts: the ratio of the means."""
    means = part[part["placebo"].notna()].groupby("placebo")[["value", "clean", "corrupted"]].mean()
    gap = (means["clean"] - means["corrupted"]).to_numpy()
    return ((means["value"] - means["corrupted"]).to_numpy() / np.where(gap == 0, np.nan, gap)).astype(float)


# A claim: the effect of the set with its interval, above its comparisons, from top to bottom.
#
# For random sets, the line ends at the 95 % quantile of their sizes, on the side of the effect, and the marker is their
# mean size. The dashed line is the margin; the whole interval must lie beyond it.


@DRAWINGS.add(Claim)
def plot_claim(claim: Claim, ax: Axes | None = None) -> Axes | Figure:
    """Draw a claim's effect above its comparisons."""
    row = claim.table.iloc[0]
    side = 1.0 if row["effect"] >= 0 else -1.0
    name = "the set, on one prompt" if np.isnan(row["low"]) else "the set, with its\n95 % interval"
    rows: list[tuple[str, float, tuple[float, float] | None, str, str]]
    rows = [(name, row["effect"], (row["low"], row["high"]), BLUE, "o")]
    if not np.isnan(row["placebo"]):
        to = (0.0, side * row["placebo_high"])
        rows.append(("random sets like it:\nmean, 95 % quantile", side * row["placebo"], to, FAINT, "s"))
    if not np.isnan(row["other_ablation"]):
        rows.append(("under another ablation", row["other_ablation"], None, INK, "D"))
    if not np.isnan(row["held_out"]):
        rows.append(("on held-out prompts", row["held_out"], None, INK, "^"))
    with st.one_panel(ax, 4.8, 2.0) as ax:
        ax.axvline(0, color=FAINT, linewidth=0.6, zorder=0)
        if not np.isnan(row["margin"]):
            ax.axvline(side * row["margin"], color=INK, linewidth=0.8, linestyle=st.DASHED, zorder=0, label="margin")
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for place, (_, value, ends, color, mark) in enumerate(rows):
            if ends is not None:
                ax.hlines(place, *ends, colors=color, linewidths=1.4)
            ax.plot(value, place, mark, color=color, markersize=5)
        st.name_rows(ax, [name for name, *_ in rows])
        ax.set_xlabel("Effect")
        what = claim.what[:1].lower() + claim.what[1:]
        seen = f"the claim about {what} {claim.verdict}"
        ax.set_title("\n".join(textwrap.wrap(st.label(st.model_title(claim.run, seen)), 52)))
    return ax


# Maps of edges or paths: senders across, receivers down; pairs without an edge, or without a path, are blank.
#
# The colour scale diverges symmetrically from 0; it shows the square root of the size, because a few edges have far
# larger effects than all others. Edges are in the order of the layers, separated by thin lines; paths are in the order
# in which they were named.


@DRAWINGS.add(EdgeEffects)
def plot_edge_effects(edges: EdgeEffects, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw the effect of edges on one metric (default: the first)."""
    matrix, graph = edges.matrix(metric), edges.graph
    down = ~np.isnan(matrix).all(1)
    across = ~np.isnan(matrix).all(0)
    shown = matrix[np.ix_(down, across)]
    with st.one_panel(ax, 4.6, 4.6) as ax:
        _ticks(ax, "x", graph.senders, np.flatnonzero(across))
        _ticks(ax, "y", graph.receivers, np.flatnonzero(down))
        _effect_map(ax, shown, edges, "Effect" if edges.is_exact else "Estimate", metric, "effect of edges")
    return ax


def _effect_map(ax: Axes, grid: Any, result: Any, what: str, metric: str | None, seen: str) -> None:
    top = st.largest(grid)
    signed_root = (lambda x: np.sign(x) * np.sqrt(np.abs(x)), lambda x: np.sign(x) * np.square(x))
    norm = FuncNorm(signed_root, vmin=-top, vmax=top)
    image = ax.imshow(grid, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
    ax.set(xlabel="Sender", ylabel="Receiver")
    name = result.metrics[0] if metric is None else metric
    ax.figure.colorbar(image, ax=ax, pad=0.02).set_label(st.label(f"{what} on {name.replace('_', ' ')}"))
    n = result.table["example"].nunique()
    ax.set_title(
        st.model_title(result.run, f"{seen}, {st.WAYS[result.run.options['direction']]}" + f" (n = {n})" * (n > 1))
    )


def _ticks(ax: Axes, axis: str, nodes: Nodes, present: np.ndarray) -> None:
    """Name every node if there are few; otherwise name the middle of each layer, where there is room."""
    names = [nodes.name(int(index)) for index in present]
    layers = nodes.layer[present]
    begins = [i for i in range(len(present)) if i == 0 or layers[i] != layers[i - 1]]
    is_x = axis == "x"
    line = ax.axvline if is_x else ax.axhline
    # Thinner lines for many layers, so that the cells between them remain visible.
    width = min(0.4, 2.4 * st.inches(ax)[0 if is_x else 1] / len(begins))
    for i in begins[1:]:
        line(i - 0.5, color=LINE, linewidth=width)
    positions = [float(i) for i in range(len(names))]
    if len(names) > st.MOST_TICKS:
        ends = [*begins[1:], len(present)]
        positions = [(begin + end - 1) / 2 for begin, end in zip(begins, ends, strict=True)]
        names = [names[begin] if layers[begin] < 0 else f"layer {layers[begin]}" for begin in begins]
    st.cell_ticks(ax.xaxis if is_x else ax.yaxis, positions, names, rotation=90 if is_x else 0)


@DRAWINGS.add(PathEffects)
def plot_path_effects(paths: PathEffects, ax: Axes | None = None, *, metric: str | None = None) -> Axes | Figure:
    """Draw the effect of paths on one metric (default: the first)."""
    matrix = paths.matrix(metric)
    with st.one_panel(ax, 4.6, 3.6) as ax:
        for names, axis in ((matrix.columns, ax.xaxis), (matrix.index, ax.yaxis)):
            st.cell_ticks(axis, range(len(names)), st.ticks(names, 28), rotation=90 if axis is ax.xaxis else 0)
        way = "direct paths" if paths.through == "direct" else "paths through MLPs"
        _effect_map(ax, matrix, paths, "Effect", metric, f"effect of {way}")
    return ax
