"""What of a set of edges can carry anything: which senders hear of the prompt, and which are heard at the logits.

An edge is on a path where, by edges of the set alone, its sender is reached from the embedding and its receiver leads
to the logits. What a receiver reads comes out at the sender that it is a part of: q of its own head, k and v of every
head that shares the key-value head, an MLP of itself. Where a norm stands behind attention (Gemma), its scale is one of
all heads of the layer together: `together` lets each of them come out at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

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
    for mine, receivers, senders in _by_node(graph, edges):
        arrived = np.zeros(receivers.stop - receivers.start, dtype=bool)
        arrived[graph.receiver[mine][found[graph.sender[mine]]] - receivers.start] = True
        found[senders.start : senders.stop] = arrived @ _drives(graph, receivers, together)
    return found


def leads_to_logits(graph: Graph, edges: Indices, together: bool = False) -> Bool[np.ndarray, " edge"]:
    """Return which of some edges, ascending, end in a receiver from which some of them lead to the logits."""
    heard = np.zeros(len(graph.senders), dtype=bool)
    leads = []
    for mine, receivers, senders in reversed(list(_by_node(graph, edges))):
        useful = _drives(graph, receivers, together) @ heard[senders.start : senders.stop]
        if receivers.stop == len(graph.receivers):
            useful = np.ones(1, dtype=bool)
        kept = useful[graph.receiver[mine] - receivers.start]
        leads.append(kept)
        heard[graph.sender[mine[kept]]] = True
    return np.concatenate(leads[::-1])


def _by_node(graph: Graph, edges: Indices) -> Iterator[tuple[Indices, range, range]]:
    """Part edges, ascending, by when they are read: each layer's attention, then its MLP, and last the logits.

    Yields:
        The edges, the receivers that read at that time, and the senders at which what they read comes out.
    """
    n_heads, n_read = graph.n_heads, graph.n_heads + 2 * graph.n_kv_heads
    receiver = graph.receiver[edges]
    for layer in range(graph.n_layers + 1):
        first, comes_out = layer * (n_read + 1), 1 + layer * (n_heads + 1)
        parts = [(range(first, first + n_read), range(comes_out, comes_out + n_heads))]
        parts += [(range(first + n_read, first + n_read + 1), range(comes_out + n_heads, comes_out + n_heads + 1))]
        if layer == graph.n_layers:
            parts = [(range(first, first + 1), range(comes_out, comes_out))]
        for receivers, senders in parts:
            start, stop = np.searchsorted(receiver, [receivers.start, receivers.stop])
            yield edges[start:stop], receivers, senders


@lru_cache(maxsize=8)
def _heads_that_read(n_heads: int, n_kv_heads: int, together: bool) -> Bool[np.ndarray, "receiver head"]:
    """Which heads of a layer read each q, k and v of it; all heads where what they write is scaled together."""
    kv = np.eye(n_kv_heads, dtype=bool).repeat(n_heads // n_kv_heads, 1)
    reads = np.concatenate([np.eye(n_heads, dtype=bool), kv, kv])
    return np.ones_like(reads) if together else reads


def _drives(graph: Graph, receivers: range, together: bool = False) -> Bool[np.ndarray, "receiver sender"]:
    """Return which senders what each of a layer's q, k and v (or its MLP, or the logits) reads comes out at."""
    if len(receivers) > 1:
        return _heads_that_read(graph.n_heads, graph.n_kv_heads, together)
    return np.ones((1, int(receivers.stop < len(graph.receivers))), dtype=bool)


def driven(graph: Graph, receiver: int, together: bool) -> Indices:
    """Return the senders at which what a receiver reads comes out."""
    senders = graph.driven(receiver)
    if together and graph.receivers.kind[receiver] < 3:
        first = 1 + int(graph.receivers.layer[receiver]) * (graph.n_heads + 1)
        return first + np.arange(graph.n_heads)
    return senders
