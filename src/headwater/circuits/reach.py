"""What of a set of edges can carry anything: which senders hear of the prompt, and which are heard at the logits.

An edge is on a path where, by edges of the set alone, its sender is reached from the embedding and its receiver leads
to the logits. What a receiver reads comes out at the sender that it is a part of: q of its own head, k and v of every
head that shares the key-value head, an MLP of itself. Where a norm stands behind attention (Gemma), its scale is one of
all heads of the layer together: `together` lets each of them come out at all.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool

from headwater.circuits.graph import Graph, Indices


def on_a_path(graph: Graph, edges: Indices, together: bool = False) -> Bool[np.ndarray, " edge"]:
    """Return which of some edges are on a path from the embedding to the logits."""
    return reached(graph, edges, together)[graph.sender[edges]] & leads_to_logits(graph, edges, together)


def reached(graph: Graph, edges: Indices, together: bool = False) -> Bool[np.ndarray, " sender"]:
    """Return which senders are reached from the embedding by some edges, ascending."""
    found = np.zeros(len(graph.senders), dtype=bool)
    found[0] = True
    for mine in _by_node(graph, edges):
        arrived = mine[found[graph.sender[mine]]]
        for receiver in np.unique(graph.receiver[arrived]):
            found[driven(graph, int(receiver), together)] = True
    return found


def leads_to_logits(graph: Graph, edges: Indices, together: bool = False) -> Bool[np.ndarray, " edge"]:
    """Return which of some edges, ascending, end in a receiver from which some of them lead to the logits."""
    heard = np.zeros(len(graph.senders), dtype=bool)
    leads = np.zeros(graph.n_edges, dtype=bool)
    for mine in reversed(_by_node(graph, edges)):
        receivers = np.unique(graph.receiver[mine])
        useful = [r for r in receivers if graph.receivers.kind[r] == 4 or heard[driven(graph, int(r), together)].any()]
        kept = mine[np.isin(graph.receiver[mine], useful)]
        leads[kept] = True
        heard[graph.sender[kept]] = True
    return np.asarray(leads[edges])


def _by_node(graph: Graph, edges: Indices) -> list[Indices]:
    """Part edges, ascending, by when they are read: each layer's attention, then its MLP, and last the logits."""
    kind = graph.receivers.kind[graph.receiver[edges]]
    when = 2 * graph.stage[edges] + (kind == 3)
    return [edges[when == one] for one in np.unique(when)]


def driven(graph: Graph, receiver: int, together: bool) -> Indices:
    """Return the senders at which what a receiver reads comes out."""
    senders = graph.driven(receiver)
    if together and graph.receivers.kind[receiver] < 3:
        first = 1 + int(graph.receivers.layer[receiver]) * (graph.n_heads + 1)
        return first + np.arange(graph.n_heads)
    return senders
