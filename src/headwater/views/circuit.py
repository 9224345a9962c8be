"""The view of edges: the strongest as a circuit, layers upward; each with its interval and what edges of its shape do.

The placebo of an edge is drawn from the other edges between the same kinds of parts in the same layers: the 95 %
quantile of the sizes of their mean effects. The interval is the bootstrap's, over examples.
"""

from __future__ import annotations

import numpy as np

from headwater.circuits.circuit import made
from headwater.circuits.graph import Graph
from headwater.circuits.result import EdgeEffects
from headwater.figures.circuit import ABOVE, BELOW, layout, lines_of
from headwater.options import checked_count
from headwater.runs.result import VIEWS
from headwater.runs.view import View
from headwater.stats.resample import Draws, ends
from headwater.views.interactive import interactive
from headwater.views.lines import rounded
from headwater.views.picture import picture

LARGEST = 200
"""Edges that a page holds by default."""
MOST = 5000
"""Edges that a page holds at most."""
QUANTILE = 0.95


@VIEWS.add(EdgeEffects)
def view_edges(edges: EdgeEffects, *, n: int | None = None, metric: str | None = None) -> View:
    """Show the strongest edges as a circuit; edges of single positions, or through MLPs, as their figure.

    Args:
        edges: a result of `hw.edges`.
        n: how many edges the slider reaches; up to 200 by default.
        metric: on which metric; the first by default.

    Raises:
        InputError: there is no such metric, or there are not so many edges.
    """
    most = min(MOST, len(edges.chosen))
    n = min(LARGEST, most) if n is None else checked_count("n", n, most=most)
    if edges.by_position or {"positions", "through"} & set(edges.run.options):
        return picture(edges)
    return interactive(edges, "circuit.js", spec_of(edges, n, metric), height=760)


def spec_of(edges: EdgeEffects, n: int, metric: str | None) -> dict[str, object]:
    """Return what the script draws: nodes by place, the lines between them, and edges, the strongest first."""
    circuit = edges.circuit(n, metric=metric)
    graph, m = edges.graph, 0 if metric is None else list(edges.metrics).index(metric)
    order = np.argsort(-np.abs(circuit.effects), kind="stable")
    ranked = made(graph, circuit.edges, dict(zip(circuit.edges.tolist(), circuit.effects.tolist(), strict=True)))
    exact, estimated = (one[:, 0, :, m].double().numpy() for one in (edges.effects, edges.estimates))
    values = np.where(np.isnan(exact).all(0), estimated, exact)
    columns = np.searchsorted(edges.chosen.numpy(), circuit.edges[order])
    low, high = ends(Draws.of(range(len(values))).mean(values[:, columns]))
    placebo, others = _placebos(graph, edges.chosen.numpy(), values.mean(0), columns)
    lines, rank = lines_of(ranked), np.argsort(order)
    places = layout(graph, lines)
    return {
        "title": f"Edges of {edges.run.model}, {edges.metrics[m].replace('_', ' ')}: the {n:,} strongest of "
        f"{len(edges.chosen):,}",
        "examples": len(values),
        "colors": [ABOVE, BELOW],
        "nodes": {
            str(node): {"name": "logits" if node == len(graph.senders) else graph.senders.name(node), "at": list(place)}
            for node, place in places.items()
        },
        "lines": [[int(rank[line.edge]), line.source, line.target, line.kind] for line in lines],
        "edges": {
            "name": [graph.name(int(edge)) for edge in circuit.edges[order]],
            "effect": rounded(circuit.effects[order]),
            "low": rounded(low),
            "high": rounded(high),
            "placebo": rounded(placebo),
            "others": others,
            "exact": [bool(one) for one in ~np.isnan(exact[:, columns]).all(0)],
        },
    }


def _placebos(graph: Graph, chosen: np.ndarray, means: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return of each edge how large other edges of its shape are (their 95 % quantile), and how many these are."""
    shapes, sizes = graph.stratum[chosen], np.abs(means)
    found, counts = np.full(len(columns), np.nan), []
    for place, column in enumerate(columns):
        alike = (shapes == shapes[column]) & ~np.isnan(sizes)
        alike[column] = False
        counts.append(int(alike.sum()))
        if alike.any():
            found[place] = np.quantile(sizes[alike], QUANTILE)
    return found, counts
