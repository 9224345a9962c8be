"""A circuit as a graph by layers: from the embedding on the left to the logits on the right.

MLPs are on one line with the embedding and the logits, the heads of a layer above it, those that many low nodes feed
at the bottom. A line is an edge: red where its effect is above 0, blue below, grey where none is known; its width goes
with the square root of the effect's size. What of a head it feeds is told by the line: q drawn through, k dashed, v
dotted. Where several query heads read one key or value, it leads to those of them that take part. Up to `FEW` edges
have their effects written beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from headwater.circuits.circuit import Circuit
from headwater.circuits.graph import Graph
from headwater.colors import FAINT, INK
from headwater.figures.style import DASHED, cell_ticks, inches, label, legend_above, one_panel, plain_title
from headwater.runs.result import DRAWINGS

ABOVE, BELOW = "#b2182b", "#2166ac"
"""The ends of the scale in which a map of edges is drawn."""
LINES: Mapping[str, Any] = {"q": "-", "k": DASHED, "v": (0, (1, 1.2)), "mlp": "-", "logits": "-"}
FED = {"q": "query", "k": "key", "v": "value"}
FEW = 24
"""Edges whose effects are written beside them."""
WIDTHS = (0.4, 3.2)
COLUMN, ROW = 0.62, 0.34
"""Inches between columns, and between the heads of a layer, where there is room for them."""
LEAST, LARGEST = (6.8, 2.2), (10.0, 7.0)
"""Inches of the smallest and largest figure: few columns are further apart, many closer, with smaller names."""
NAME = 6.5
"""Points of the names of nodes, at most; where less, the MLP of layer 3 is m3."""
BOX = {"boxstyle": "round,pad=0.25", "facecolor": "white", "linewidth": 0.6}
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
MINUS = "\N{MINUS SIGN}"
Place: TypeAlias = tuple[float, float]


@dataclass(frozen=True)
class Drawn:
    """One line: an edge, or its part to one of several heads that read the same key or value."""

    edge: int
    """Which of the circuit's."""
    source: int
    """Nodes are senders by number; the logits come after the last."""
    target: int
    kind: str


def title_of(circuit: Circuit) -> str:
    """Return the title of a circuit's figure as plain text."""
    seen = f"circuit of {len(circuit):,} edges, {len(circuit.on_a_path):,} on a path"
    return plain_title(circuit.model, seen) if circuit.model else seen.capitalize()


@DRAWINGS.add(Circuit)
def plot_circuit(circuit: Circuit, ax: Axes | None = None) -> Axes | Figure:
    """Draw a circuit: what `Circuit.plot` says."""
    lines = lines_of(circuit)
    places = layout(circuit.graph, lines)
    far = max((x for x, _ in places.values()), default=1.0)
    high = max((y for _, y in places.values()), default=0.0)
    curves = {line: _curve(places, line) for line in lines}
    low = min([-0.4, *(_point(curve, 0.5)[1] - 0.2 for curve in curves.values())])
    size = np.clip((1.0 + COLUMN * far, 1.1 + ROW * (high - low)), LEAST, LARGEST)
    with one_panel(ax, *size) as ax:
        wide, tall = np.divide(inches(ax), (far + 1.2, high - low + 0.7))
        is_crowded = 72 * wide < 3.2 * NAME
        points = min(NAME, 72 * wide / (2.4 if is_crowded else 3.2), 72 * tall / 1.8)
        sizes = np.abs(np.nan_to_num(circuit.effects))
        top = float(sizes.max(initial=0.0)) or 1.0
        order = sorted(lines, key=lambda line: sizes[line.edge])
        for rank, line in enumerate(order):
            _draw(ax, curves[line], line, float(circuit.effects[line.edge]), top, rank / max(1, len(order)))
        senders = circuit.graph.senders
        for node, (x, y) in places.items():
            box = BOX | {"edgecolor": INK if y == 0 else FAINT}
            name = "logits" if node == len(senders) else senders.name(node).removeprefix("head ")
            name = name.replace("mlp ", "m") if is_crowded else name
            ax.text(x, y, name, ha="center", va="center", size=points, zorder=5, bbox=box)
        if len(circuit) <= FEW and wide >= 0.8 * COLUMN:
            _write_effects(ax, circuit, list(reversed(order)), curves, places)
        ax.set(xlim=(-0.6, far + 0.6), ylim=(low, high + 0.7), yticks=[])
        _number_layers(ax, circuit.graph, places)
        _legend(ax, circuit, lines, top)
    return ax


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
    """Return where each node is: a column for the heads of a layer and one for its MLP, where they take part."""
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
    if y0 == y1 == 0:  # between nodes that are on one line, those between them are in the way
        depth = -0.28 - 0.2 * (x1 - x0)
        middle = [(x0 + 0.25 * (x1 - x0), depth), (x1 - 0.25 * (x1 - x0), depth)]
    else:
        bend = {"q": 0.22, "k": -0.22}.get(line.kind, 0.0)
        middle = [(x0 + 0.45 * (x1 - x0), y0 + bend), (x1 - 0.45 * (x1 - x0), y1 + 2 * bend)]
    return Path([(x0, y0), *middle, (x1, y1)], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])


def _draw(ax: Axes, curve: Path, line: Drawn, effect: float, top: float, rank: float) -> None:
    share = 0.0 if np.isnan(effect) else float(np.sqrt(abs(effect) / top))
    color = FAINT if np.isnan(effect) else ABOVE if effect > 0 else BELOW
    width = WIDTHS[0] + share * (WIDTHS[1] - WIDTHS[0])
    look: dict[str, Any] = {"linestyle": LINES[line.kind], "alpha": 0.35 + 0.55 * share, "zorder": 1 + rank}
    ax.add_patch(PathPatch(curve, facecolor="none", edgecolor=color, linewidth=width, capstyle="butt", **look))


def _write_effects(
    ax: Axes, circuit: Circuit, lines: list[Drawn], curves: Mapping[Drawn, Path], places: Mapping[int, Place]
) -> None:
    """Write the effects on their lines, the largest first, each where there is room; else it is left out."""
    written: set[int] = set()
    occupied = [(x, y, 0.35, 0.27) for x, y in places.values()]
    for line in lines:
        effect = float(circuit.effects[line.edge])
        if np.isnan(effect) or line.edge in written:
            continue
        text = f"{line.kind} {effect:+.2g}" if line.kind in "qkv" else f"{effect:+.2g}"
        spots = [_point(curves[line], t) for t in (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74, 0.18, 0.82)]
        free = [
            (x, y)
            for x, y in spots
            if not any(abs(x - a) < wide + 0.4 and abs(y - b) < high + 0.05 for a, b, wide, high in occupied)
        ]
        if not free:
            continue
        x, y = free[0]
        written.add(line.edge)
        occupied.append((x, y, 0.4, 0.28))
        color = ABOVE if effect > 0 else BELOW
        look: dict[str, Any] = {"size": 5.5, "color": color, "zorder": 6, "bbox": LABEL_BOX}
        ax.text(x, y, text.replace("-", MINUS), ha="center", va="center", **look)


def _point(curve: Path, t: float) -> Place:
    """A point of a cubic Bézier curve."""
    a, b, c, d = np.asarray(curve.vertices)
    x, y = (1 - t) ** 3 * a + 3 * t * (1 - t) ** 2 * b + 3 * t**2 * (1 - t) * c + t**3 * d
    return float(x), float(y)


def _number_layers(ax: Axes, graph: Graph, places: Mapping[int, Place]) -> None:
    """Leave only the layers' numbers of the frame."""
    by_layer: dict[int, list[float]] = {}
    for node, (x, _) in places.items():
        if 0 < node < len(graph.senders):
            by_layer.setdefault(int(graph.senders.layer[node]), []).append(x)
    ax.spines[["left", "bottom"]].set_visible(False)
    cell_ticks(ax.xaxis, [float(np.mean(xs)) for xs in by_layer.values()], [str(layer) for layer in by_layer])
    ax.tick_params(axis="x", length=0)
    ax.set_xlabel("Layer")


def _legend(ax: Axes, circuit: Circuit, lines: list[Drawn], top: float) -> None:
    """Say above the axes what lines mean."""
    effects: Any = circuit.effects
    signs = {"above 0": (effects > 0, ABOVE), "below 0": (effects < 0, BELOW), "not known": (np.isnan(effects), FAINT)}
    entries: list[tuple[str, dict[str, Any]]] = [
        (f"effect {name}", {"color": color, "linewidth": 2}) for name, (is_so, color) in signs.items() if is_so.any()
    ]
    if not np.isnan(effects).all():
        entries.append((f"thickest: {top:.2g}", {"color": INK, "linewidth": WIDTHS[1]}))
    kinds = {line.kind for line in lines}
    for kind in (kind for kind in FED if kind in kinds):
        entries.append((f"into {kind} ({FED[kind]})", {"color": INK, "linestyle": LINES[kind]}))
    for text, look in entries:
        ax.plot([], [], label=text, **look)
    legend_above(ax, min(7, len(entries)) or 1, label(title_of(circuit)))
