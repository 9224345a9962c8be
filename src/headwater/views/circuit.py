"""The view of edges and of circuits: layers upward, the strongest first; each edge with its interval and placebo.

The placebo of an edge is drawn from the other edges between the same kinds of parts in the same layers: the 95 %
quantile of the sizes of their mean effects. The interval is the bootstrap's, over examples. How faithful the strongest
edges are alone is read of runs of just these, never in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater.circuits.circuit import Circuit, strength_order
from headwater.circuits.circuit_runs import CircuitRuns
from headwater.circuits.graph import Graph
from headwater.circuits.result import EdgeEffects
from headwater.errors import InputError
from headwater.figures.circuit import ABOVE, BELOW, layout, lines_of, title_of
from headwater.figures.style import WAYS
from headwater.options import checked_count, checked_kind, checked_name
from headwater.runs.result import VIEWS, View, whole_summary
from headwater.stats.resample import Bootstrap, percentile_interval
from headwater.views.page import drawn, interactive, page_around, picture, rounded, table_of, text_of

LARGEST = 200
"""Edges that a page holds by default."""
MOST = 5000
"""Edges that a page holds at most."""
QUANTILE = 0.95
ROWS = 50
"""Edges in the table below a circuit."""


@VIEWS.add(EdgeEffects)
def view_edges(
    edges: EdgeEffects, *, n: int | None = None, metric: str | None = None, runs: CircuitRuns | None = None
) -> View:
    """Show the strongest edges as a circuit; edges of single positions, or through MLPs, as their figure.

    Args:
        edges: a result of `hw.edges`.
        n: how many edges the slider reaches; up to 200 by default.
        metric: on which metric; the first by default.
        runs: of `hw.run_circuits`: how faithful the strongest edges are alone, `edges.circuit(n)` of several sizes.
    """
    most = min(MOST, len(edges.chosen))
    n = min(LARGEST, most) if n is None else checked_count("n", n, most=most)
    if edges.by_position or {"positions", "through"} & set(edges.run.options):
        return picture(edges)
    spec = spec_of(edges, edges.circuit(n, metric=metric), metric, runs)
    name = (metric or edges.metrics[0]).replace("_", " ")
    note = (
        f"the {n:,} strongest of {len(edges.chosen):,} edges; {WAYS[edges.run.options['direction']]}, effect on {name}"
    )
    return interactive(edges, "circuit.js", spec | {"note": note}, height=760)


@VIEWS.add(Circuit)  # type: ignore[arg-type]
def view_circuit(
    circuit: Circuit,
    *,
    n: int | None = None,
    edges: EdgeEffects | None = None,
    metric: str | None = None,
    runs: CircuitRuns | None = None,
) -> View:
    """Show a circuit: what `Circuit.view` says."""
    if not len(circuit):
        raise InputError("The circuit has no edges: there is nothing to show.")
    most = min(MOST, len(circuit))
    shown = circuit.strongest(min(LARGEST, most) if n is None else checked_count("n", n, most=most))
    spec = spec_of(edges, shown, metric, runs)
    spec["note"] = f"the {len(shown):,} strongest of {len(circuit):,} edges" * (len(shown) < len(circuit))
    below = f"<p>{text_of(repr(circuit))}.</p>{table_of(shown.table.head(ROWS))}"
    return page_around(spec, "circuit.js", (drawn(shown), title_of(shown)), below, height=760)


def spec_of(
    edges: EdgeEffects | None, circuit: Circuit, metric: str | None, runs: CircuitRuns | None
) -> dict[str, object]:
    """Return what the script draws: nodes by place, the lines between them, and edges, the strongest first."""
    graph, order = circuit.graph, strength_order(circuit.effects)
    lines, rank = lines_of(circuit), np.argsort(order)
    places = layout(graph, lines)
    numbers = circuit.edges[order]
    about: dict[str, object] = dict.fromkeys(("low", "high", "placebo"), [None] * len(order))
    about |= {"others": [0] * len(order), "exact": [True] * len(order)}
    if edges is not None:
        about = _intervals(edges, numbers, metric)
    return {
        "title": title_of(circuit),
        "examples": None if edges is None else len(edges.effects),
        "colors": [ABOVE, BELOW],
        "nodes": {
            str(node): {"name": "logits" if node == len(graph.senders) else graph.senders.name(node), "at": list(place)}
            for node, place in places.items()
        },
        "lines": [[int(rank[line.edge]), line.source, line.target, line.kind] for line in lines],
        "edges": {"name": [graph.name(int(edge)) for edge in numbers], "effect": rounded(circuit.effects[order])}
        | about,
        "runs": None if runs is None else _alone(runs, numbers),
    }


def _intervals(edges: EdgeEffects, numbers: np.ndarray, metric: str | None) -> dict[str, object]:
    """Return the interval and placebo of some edges, and whether their effects are runs."""
    checked_kind("edges", edges, EdgeEffects, "hw.edges(...)")
    m = 0 if metric is None else list(edges.metrics).index(checked_name("metric", metric, tuple(edges.metrics)))
    exact, estimated = (part[:, 0, :, m].double().numpy() for part in (edges.effects, edges.estimates))
    values, chosen = np.where(np.isnan(exact).all(0), estimated, exact), edges.chosen.numpy()
    if absent := [int(edge) for edge in numbers if edge not in chosen]:
        raise InputError(f"edges= holds no effect of {edges.graph.name(absent[0])}, an edge of the circuit.")
    columns = np.searchsorted(chosen, numbers)
    low, high = percentile_interval(Bootstrap.of(range(len(values))).mean(values[:, columns]))
    placebo, others = _placebos(edges.graph, chosen, values.mean(0), columns)
    result = {"low": rounded(low), "high": rounded(high), "placebo": rounded(placebo), "others": others}
    return result | {"exact": [bool(one) for one in ~np.isnan(exact[:, columns]).all(0)]}


def _alone(runs: CircuitRuns, numbers: np.ndarray) -> list[dict[str, object]]:
    """Return how faithful the strongest edges are alone, by how many, beside random circuits of their shape."""
    checked_kind("runs", runs, CircuitRuns, "hw.run_circuits(...)")
    named = {name: one for name, one in runs.circuits.items() if 0 < len(one) <= len(numbers)}
    nested = [name for name, one in named.items() if set(one.edges.tolist()) == set(numbers[: len(one)].tolist())]
    summary = whole_summary(runs)
    rows = summary[summary["circuit"].isin(nested) & (summary["metric"] == summary["metric"].iloc[0])]
    if not len(rows):
        raise InputError(
            "runs= holds no circuit that is the strongest edges of this one: give hw.run_circuits circuits such as "
            "circuit.strongest(20)."
        )
    rows = rows.sort_values("edges", kind="stable")
    found: dict[str, list[Any]] = {name: rows[name].tolist() for name in ("edges", "examples")}
    found |= {name: rounded(rows[name]) for name in ("faithfulness", "low", "high", "placebo", "placebo_high")}
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _placebos(graph: Graph, chosen: np.ndarray, means: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return of each edge how large other edges of its shape are (their 95 % quantile), and how many these are."""
    shapes, sizes = graph.stratum[chosen], np.abs(means)
    quantiles, counts = np.full(len(columns), np.nan), []
    for place, column in enumerate(columns):
        is_peer = (shapes == shapes[column]) & ~np.isnan(sizes)
        is_peer[column] = False
        counts.append(int(is_peer.sum()))
        if is_peer.any():
            quantiles[place] = np.quantile(sizes[is_peer], QUANTILE)
    return quantiles, counts
