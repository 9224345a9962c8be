"""The graph of a model: what adds to the residual stream, what reads it, and which of these come before which.

Senders add to the residual stream: the embedding, each head's z W_O, each MLP's output. Receivers read it, each from a
separate copy before the norm: the q of each query head, the k and v of each key-value head, each MLP, and the logits.
An edge leads from a sender to a receiver that comes after it; the heads of a layer feed its MLP if blocks are serial.
With L layers, H query heads, K key-value heads and S = L + (H + 1) L (L - 1) / 2 there are

    senders      1 + L (H + 1)
    receivers    L (H + 2 K + 1) + 1
    edges        (H + 2 K + 1) S + [serial] L H + 1 + L (H + 1)

32,491 edges in GPT-2. Senders are numbered layer by layer, heads before the MLP, so that the senders before a receiver
are a prefix of all senders; edges are numbered by receiver, then by sender. No object is created per edge.

The file also computes which edges of a set can carry anything: which the prompt reaches, and which reach the logits.

An edge is on a path if, by edges of the set alone, its sender is reached from the embedding and its receiver leads to
the logits. A receiver drives the sender that it is a part of: q drives its head, k and v drive every head that shares
the key-value head, an MLP drives itself. If a norm comes after attention (Gemma), its scale depends on all heads of the
layer: `together` lets each receiver drive all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import pandas as pd
from jaxtyping import Bool
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from headwater.errors import InputError
from headwater.models.families import ModelShape
from headwater.models.part_names import part_named
from headwater.options import checked_several, shown
from headwater.patching.edits import Indices

SENDERS = ("embed", "head", "mlp")
RECEIVERS = ("q", "k", "v", "mlp", "logits")
QKV = RECEIVERS[:3]
"""The kinds of receivers in attention."""


@dataclass(frozen=True)
class Nodes:
    """Senders or receivers, as columns with an entry per node."""

    kinds: tuple[str, ...]
    kind: Indices
    """Index into `kinds`."""
    layer: Indices
    """-1 for nodes in no layer."""
    head: Indices
    """-1 for nodes without heads; key-value heads for k and v."""

    def __len__(self) -> int:
        return len(self.kind)

    def name(self, index: SupportsIndex) -> str:
        """Return the name of a node: "head 9.9", "mlp 8", "logits"."""
        kind, layer, head = self.kinds[self.kind[index]], self.layer[index], self.head[index]
        return kind if layer < 0 else f"{kind} {layer}" if head < 0 else f"{kind} {layer}.{head}"

    def names(self) -> list[str]:
        """Return all names, in order."""
        return [self.name(index) for index in range(len(self))]


@dataclass(frozen=True)
class Graph:
    """Senders, receivers and edges of a model of a given size."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    parallel: bool

    @classmethod
    def of(cls, shape: ModelShape) -> Graph:
        """Return the graph of a model."""
        return cls(shape.n_layers, shape.n_heads, shape.n_kv_heads, shape.parallel_blocks)

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> Graph:
        """Return the graph with the given `sizes`."""
        layers, heads, kv_heads, parallel = map(int, sizes)
        return cls(layers, heads, kv_heads, bool(parallel))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Number of layers, query heads, key-value heads, and 1 if blocks are parallel: the form stored in files."""
        return self.n_layers, self.n_heads, self.n_kv_heads, int(self.parallel)

    def __str__(self) -> str:
        grouped = f" on {self.n_kv_heads} key-value heads" * (self.n_kv_heads != self.n_heads)
        return f"{self.n_layers} layers of {self.n_heads} heads{grouped}{', parallel blocks' * self.parallel}"

    def refuse_other(self, what: str, graph: Graph) -> None:
        """Refuse something that is of a model with another graph."""
        if graph != self:
            raise InputError(f"{what} is from a model of {graph}, and not of {self}.")

    @property
    def n_edges(self) -> int:
        """Number of edges."""
        return int(self._ends[-1])

    @cached_property
    def senders(self) -> Nodes:
        """All nodes that add to the residual stream: the embedding, then each layer's heads and MLP."""
        width = self.n_heads + 1
        place = np.arange(self.n_layers * width)
        is_mlp = place % width == self.n_heads
        kind = np.where(is_mlp, 2, 1)
        head = np.where(is_mlp, -1, place % width)
        # The embedding comes before the layers.
        return Nodes(SENDERS, np.insert(kind, 0, 0), np.insert(place // width, 0, -1), np.insert(head, 0, -1))

    @cached_property
    def receivers(self) -> Nodes:
        """All nodes that read the residual stream: each layer's q, k, v and MLP, then the logits."""
        one = [(0, h) for h in range(self.n_heads)]
        one += [(kind, h) for kind in (1, 2) for h in range(self.n_kv_heads)] + [(3, -1)]
        kind, head = (np.tile(np.array(column), self.n_layers) for column in zip(*one, strict=True))
        layer = np.repeat(np.arange(self.n_layers), len(one))
        return Nodes(RECEIVERS, np.append(kind, 4), np.append(layer, -1), np.append(head, -1))

    @cached_property
    def reach(self) -> Indices:
        """For each receiver, the number of senders before it; they are the first ones."""
        nodes = self.receivers
        # The embedding, and heads and MLP of every earlier layer: q, k and v read no head of their own layer.
        before = self.first_head(nodes.layer)
        if not self.parallel:
            # A serial block's MLP reads what its heads added.
            before = before + np.where(nodes.kind == 3, self.n_heads, 0)
        return np.where(nodes.kind == 4, len(self.senders), before)

    @cached_property
    def _ends(self) -> Indices:
        """For each receiver, the number of edges up to and including its last."""
        return np.cumsum(self.reach)

    @cached_property
    def sender(self) -> Indices:
        """For each edge, its sender."""
        # A receiver's edges are numbered by sender, and its senders are a prefix of all: no list of pairs is needed.
        starts = np.repeat(self._ends - self.reach, self.reach)
        return np.arange(self.n_edges) - starts

    @cached_property
    def receiver(self) -> Indices:
        """For each edge, its receiver."""
        return np.repeat(np.arange(len(self.receivers)), self.reach)

    @cached_property
    def stage(self) -> Indices:
        """For each edge, the layer of its receiver; `n_layers` for the logits."""
        layer = self.receivers.layer
        return np.where(layer < 0, self.n_layers, layer)[self.receiver]

    @cached_property
    def stratum(self) -> Indices:
        """For each edge, a number for the kind and layer of its sender and of its receiver."""
        layers = self.n_layers + 1
        sender, receiver = (
            (nodes.kind * layers + nodes.layer + 1)[which]
            for nodes, which in ((self.senders, self.sender), (self.receivers, self.receiver))
        )
        return np.asarray(sender * len(RECEIVERS) * layers + receiver)

    def runs_from(self, stages: Indices) -> float:
        """Return how many whole runs cost as much as one row per entry of `stages`.

        A row starts in the middle of that layer (`n_layers`: at the logits).
        """
        return float(np.maximum(self.n_layers - 0.5 - stages, 0).sum()) / self.n_layers

    def first_head(self, layer: Any) -> Any:
        """Return the index of a layer's first head among senders; its MLP comes after its heads."""
        return 1 + layer * (self.n_heads + 1)

    def driven(self, receiver: int, together: bool = False) -> Indices:
        """Return the senders that a receiver drives; none for the logits."""
        n_qkv, group = self.n_heads + 2 * self.n_kv_heads, self.n_heads // self.n_kv_heads
        layer, place = divmod(receiver, n_qkv + 1)
        first = self.first_head(layer)
        if layer == self.n_layers:
            return np.zeros(0, dtype=np.int64)
        # In both lists a layer's MLP is last: among receivers after q, k and v, among senders after the heads.
        if place == n_qkv:
            return np.array([first + self.n_heads])
        if together:
            return first + np.arange(self.n_heads)
        if place < self.n_heads:
            return np.array([first + place])
        # The query heads that share this key-value head.
        return first + (place - self.n_heads) % self.n_kv_heads * group + np.arange(group)

    def edge(self, sender: int, receiver: int) -> int:
        """Return the index of the edge from a sender to a receiver."""
        if not sender < self.reach[receiver]:
            self.refuse_order(self.senders.name(sender), self.receivers.name(receiver))
        return int(self._ends[receiver] - self.reach[receiver] + sender)

    def edge_named(self, name: object) -> int:
        """Return the index of the edge with a name such as "head 9.9 -> q 10.7"."""
        edges = self.edges_named(name)
        if len(edges) != 1:
            raise InputError(f"{shown(name)} names {len(edges)} edges, such as {self.name(edges[0])}: name one.")
        return int(edges[0])

    def edges_named(self, name: Any) -> Indices:
        """Return the edges of a name, ascending: one, or all between several nodes, as for "head 9 -> mlp"."""
        parts = [one.strip() for one in name.replace("→", "->").split("->")] if isinstance(name, str) else name
        if not isinstance(parts, list | tuple) or len(parts) != 2:
            raise InputError(f'{shown(name)} names no edge; write it as "head 9.9 -> q 10.7" or "embed -> logits".')
        senders, receivers = self.find(self.senders, parts[:1]), self.find(self.receivers, parts[1:])
        if len(senders) == len(receivers) == 1:
            return np.array([self.edge(int(senders[0]), int(receivers[0]))])
        return self.among(parts[:1], parts[1:])

    def name(self, edge: SupportsIndex) -> str:
        """Return the name of an edge."""
        return f"{self.senders.name(self.sender[edge])} -> {self.receivers.name(self.receiver[edge])}"

    def names(self, edges: Indices) -> list[str]:
        """Return the names of edges."""
        return [self.name(edge) for edge in edges]

    def columns(self, edges: Indices) -> dict[str, Any]:
        """Return the columns of a table that name edges, one row per edge.

        They are `sender, sender_layer, sender_head, receiver, receiver_layer, receiver_head`; numbers that do not apply
        are `<NA>`.
        """
        columns: dict[str, Any] = {}
        for role, nodes, which in (
            ("sender", self.senders, self.sender[edges]),
            ("receiver", self.receivers, self.receiver[edges]),
        ):
            columns[role] = np.array(nodes.kinds, dtype=object)[nodes.kind[which]]
            columns[f"{role}_layer"] = present(nodes.layer[which])
            columns[f"{role}_head"] = present(nodes.head[which])
        return columns

    def among(self, senders: object, receivers: object) -> Indices:
        """Return the edges from some senders to some receivers, ascending; None selects all of them."""
        chosen = np.ones(self.n_edges, dtype=bool)
        for option, nodes, of_edge, names in (
            ("senders", self.senders, self.sender, senders),
            ("receivers", self.receivers, self.receiver, receivers),
        ):
            if names is not None:
                chosen &= np.isin(of_edge, self.find(nodes, listed_parts(option, names)))
        if not chosen.any():
            self.refuse_order(shown(senders), shown(receivers))
        return np.flatnonzero(chosen)

    def find(self, nodes: Nodes, names: Iterable[object]) -> Indices:
        """Return the nodes with these names (`models.part_names`), ascending; a head as receiver is its q, k and v."""
        chosen = np.zeros(len(nodes), dtype=bool)
        for name in names:
            kind, layer, head, _ = part_named(name, self)
            for node_kind in QKV if kind == "head" and nodes.kinds == RECEIVERS else (kind,):
                if node_kind not in nodes.kinds:
                    some = '"embed", "head 0.1", "mlp 0"' if nodes.kinds == SENDERS else '"q 1.0", "mlp 0", "logits"'
                    what, other = ("sender", "receiver") if nodes.kinds == SENDERS else ("receiver", "sender")
                    raise InputError(f"{shown(name)} is a {other}, not a {what}, such as {some}.")
                of = head
                if head is not None and kind == "head" and node_kind in "kv":
                    # Selected by a query head, k and v are those of the key-value head that its group shares.
                    of = head * self.n_kv_heads // self.n_heads
                which = nodes.kind == nodes.kinds.index(node_kind)
                which &= True if layer is None else nodes.layer == layer
                chosen |= which if of is None else which & (nodes.head == of)
        return np.flatnonzero(chosen)

    def refuse_order(self, sender: str, receiver: str) -> NoReturn:
        """Refuse a sender that comes after its receiver."""
        order = "heads and MLP of a layer read the same input" if self.parallel else "heads feed their own MLP"
        raise InputError(
            f"{sender} cannot feed {receiver}: a sender must come before its receiver ({order}, heads of one layer do "
            "not feed each other)."
        )


def listed_parts(option: str, names: Any) -> list[Any]:
    """Return names of parts as a list."""
    wanted = "a name such as 'mlp 0', a list of names, or None for all"
    listed = [names] if isinstance(names, str) else checked_several(option, names, wanted)
    if not listed:
        raise InputError(f"{option} is an empty list; give None for all.")
    return listed


def present(numbers: Indices) -> object:
    """Return integers as a column, with -1 as a missing value."""
    return pd.arrays.IntegerArray(np.where(numbers < 0, 0, numbers).astype(np.int64), numbers < 0)


def on_a_path(graph: Graph, edges: Indices, together: bool = False) -> Bool[np.ndarray, " edge"]:
    """Return a mask of the edges that are on a path from the embedding to the logits."""
    is_reached = _connected(graph, edges, together, forward=True)[graph.sender[edges]]
    return np.asarray(is_reached & leads_to_logits(graph, edges, together))


def leads_to_logits(graph: Graph, edges: Indices, together: bool = False) -> Bool[np.ndarray, " edge"]:
    """Return a mask of the edges whose receiver leads to the logits by edges of the set."""
    leads = _connected(graph, edges, together, forward=False)
    return np.asarray(leads[len(graph.senders) + graph.receiver[edges]])


def _connected(graph: Graph, edges: Indices, together: bool, forward: bool) -> Bool[np.ndarray, " node"]:
    """Return which senders, then receivers, the embedding reaches by edges of the set, or which lead to the logits."""
    n_senders, n_nodes = len(graph.senders), len(graph.senders) + len(graph.receivers)
    drivers, driven = _drives(graph, together)
    start = np.concatenate([graph.sender[edges], n_senders + drivers])
    end = np.concatenate([n_senders + graph.receiver[edges], driven])
    rows, columns, first = (start, end, 0) if forward else (end, start, n_nodes - 1)
    links = csr_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(n_nodes, n_nodes))
    connected = np.zeros(n_nodes, dtype=bool)
    connected[breadth_first_order(links, first, return_predecessors=False)] = True
    return connected


@lru_cache(maxsize=8)
def _drives(graph: Graph, together: bool) -> tuple[Indices, Indices]:
    """Return all pairs of a receiver and a sender that it drives."""
    driven = [graph.driven(receiver, together) for receiver in range(len(graph.receivers))]
    return np.repeat(np.arange(len(driven)), [len(some) for some in driven]), np.concatenate(driven)
