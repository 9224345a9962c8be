"""How many bytes edges, paths and circuits of one pair hold at once, counted before the start.

Of a pair, in numbers of the model's dtype (T tokens, t of them from the first difference on, S senders):

    recorded    of both runs and every layer, all that is kept: T · (4 d_model + z, k and v)
    changes     what each sender changes: S · t · d_model; for circuits twice, what it sends and what it sends outside
    made        what receivers make of changed inputs before rows join: q, k, v and z of the senders at once; for
                circuits what the heads of a layer read, what they write, and how far that is from what lies outside
    rows        a tile on its way through a layer: the widest of its attention and its MLP
    a walk      what circuits of a pair have in common: what is recorded, changes, and what receivers read outside

It is what tensors hold. An allocator may keep more: on a CPU up to twice as much was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.circuits.graph import RECEIVERS, Graph, Indices
from headwater.models.hooked import HookedModel
from headwater.patching.plan import Plan
from headwater.patching.runners import TILE_TOKENS
from headwater.patching.values import Source

HELD_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
"""What a batch of circuits may hold: more runs out of the processor's caches and is no faster."""


def largest(plan: Plan, source: Source) -> Footprint:
    """Return the footprint of the pair of a plan that has most tokens from its first difference on."""
    lengths = [len(prompt) for prompt in plan.base]
    changed = [kept[-1] + 1 - min(source.since(i), kept[0]) for i, kept in enumerate(plan.positions)]
    return Footprint(plan.model, max(lengths), max(1, *changed))


@dataclass(frozen=True)
class Footprint:
    """Counts the bytes of one pair.

    Args:
        model: whose.
        length: tokens of a prompt.
        changed: tokens from the first difference on.
    """

    model: HookedModel
    length: int
    changed: int

    def edges(self, edges: Indices) -> int:
        """Return the bytes of the exact effects of some edges."""
        graph = self._graph
        below = edges[graph.stage[edges] < graph.n_layers - 1]  # in the last layer rows are the positions that are read
        alike = graph.stage[below] * len(RECEIVERS) + graph.receivers.kind[graph.receiver[below]]
        rows = min(self._at_once, int(np.bincount(alike).max(initial=1)))
        senders = min(self._at_once, len(np.unique(graph.sender[below])))
        return self._bytes(self._recorded + self._changes + self._heads(senders) + self._tile(rows))

    def paths(self, n_sets: int, n_rows: int, into_heads: int, into_others: int) -> int:
        """Return the bytes of paths whose first receivers lie in one layer.

        Args:
            n_sets: how many sets of senders.
            n_rows: how many of these lead to one set of receivers.
            into_heads: in how many layers some receivers are heads.
            into_others: in how many layers one is an MLP; 1 where it is the logits.
        """
        sets, rows = (min(self._at_once, n) for n in (n_sets, n_rows))
        a_stream = sets * self.changed * self.model.shape.d_model
        made = into_heads * self._heads(sets) + into_others * a_stream
        return self._bytes(self._recorded + self._changes + made + 2 * a_stream + self._tile(rows))

    def circuits(self, circuits: Sequence[Indices], n_circuits: int, batch_size: int | None = None) -> int:
        """Return the bytes of some circuits and of others like them.

        Args:
            circuits: their edges.
            n_circuits: how many run in all.
            batch_size: how many at once, where that was said.
        """
        graph, a_stream = self._graph, self.changed * self.model.shape.d_model
        senders = max((len(np.unique(graph.sender[edges])) for edges in circuits), default=1)
        read = max((self._most_read(edges) for edges in circuits), default=1)
        at_once = max(1, min(n_circuits, batch_size or self.circuits_at_once(senders)))
        widest = max((read + 2 * graph.n_heads) * a_stream + 2 * self._heads(1), self._tile(1))
        return self.walk() + self._bytes(at_once * (senders * a_stream + widest))

    def walk(self) -> int:
        """Return the bytes of what runs circuits on a pair, kept from one batch of circuits to the next."""
        shape = self.model.shape
        read = 3 * self.changed * shape.d_model + 2 * self._heads(1)
        return self._bytes(self._recorded + 2 * self._changes + shape.n_layers * read)

    def _most_read(self, edges: Indices) -> int:
        """Count the heads' receivers of a layer that edges enter, in the layer where they are most."""
        receivers = np.unique(self._graph.receiver[edges])
        nodes = self._graph.receivers
        within = receivers[nodes.kind[receivers] < RECEIVERS.index("mlp")]
        return int(np.bincount(nodes.layer[within]).max(initial=0))

    def circuits_at_once(self, n_senders: int) -> int:
        """Return how many circuits with so many senders in use are within what a batch may hold."""
        budget = HELD_BYTES.get(self.model.device.type, HELD_BYTES["cpu"])
        heads = self._graph.n_heads + 2 * self._graph.n_kv_heads
        return budget // ((n_senders + heads) * self._bytes(self.changed * self.model.shape.d_model))

    @property
    def _graph(self) -> Graph:
        return Graph.of(self.model.shape)

    @property
    def _at_once(self) -> int:
        tokens = TILE_TOKENS.get(self.model.device.type, TILE_TOKENS["cpu"])
        return max(1, tokens // self.changed)

    @property
    def _recorded(self) -> int:
        shape = self.model.shape
        heads = (shape.n_heads + 2 * shape.n_kv_heads) * shape.d_head
        return 2 * self.length * shape.n_layers * (4 * shape.d_model + heads)

    @property
    def _changes(self) -> int:
        return self.changed * len(self._graph.senders) * self.model.shape.d_model

    def _heads(self, rows: int) -> int:
        """Count q, k, v and z of rows."""
        shape = self.model.shape
        return rows * self.changed * 2 * (shape.n_heads + shape.n_kv_heads) * shape.d_head

    def _tile(self, rows: int) -> int:
        """Count what rows hold within a layer: in its attention, or in its MLP."""
        shape, tokens = self.model.shape, rows * self.changed
        keys = rows * self.length * shape.d_head * 2 * shape.n_kv_heads * (1 if shape.group_size == 1 else 3)
        scores = 2 * rows * shape.n_heads * self.changed * self.length
        attention = 3 * tokens * shape.d_model + self._heads(rows) + keys + scores
        return max(attention, tokens * (4 * shape.d_model + 2 * shape.d_mlp))

    def _bytes(self, numbers: int) -> int:
        return numbers * self.model.dtype.itemsize
