"""Run many circuits at once: in each, only its own edges carry what is recomputed, all others what lies outside.

    x_r = x_r(O) + Σ over edges s → r of the circuit:  s(now) - s(O)

for every receiver r, in the order of the layers, where s(now) is what the sender writes of what it reads in this run,
and O what is carried outside (below). With all edges that is the clean run, with none O itself, and with all but one
the run in which this edge alone is exchanged.

1. D = s(now) - s(O) is kept for the senders in use, `circuit sender position d_model`; that of the embedding is known.
2. Per layer and circuit one product of a matrix of zeros and ones, `receiver sender`, with D gives what its receivers
   read. A receiver that no edge of the circuit enters reads O: its row is left out.
3. The norm, each head's own columns of W_Q, W_K and W_V, and the model's own attention on all circuits at once; then
   their W_O, head by head. A layer in which no circuit has a head in use is skipped; so are MLPs.
4. The logits are computed at the positions that are read.

Edges that lead nowhere are left out before: those from which no path of the circuit leads to the logits and, where O is
a run, those that no path from the embedding reaches (there s(now) = s(O)).

What the edges outside of a circuit carry: the run that is left when no edge carries the clean prompt.

    other run, resample    what each sender writes in another prompt's run
    zero                   nothing
    mean                   the mean over a data set of what each sender adds

With s(O) for what a sender s writes of these values, a receiver outside of everything reads

    x(O) = Σ s(O) + the biases of attention,    over the senders before it

In the other prompt's run that is its own residual stream, and with means the mean of the residual streams. What is
exchanged is what `hw.edges` exchanges (`headwater.circuits.both_runs`): where a norm comes after attention the mean
of the heads' shares, each under the scale of its own run, not the shares of a mean z, whose scale is that of no run. So
all edges but one come to that edge's effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.circuits.both_runs import BothRuns, Exchanged, HeadShares
from headwater.circuits.exact import EdgeRows, NotFiniteRowError, Receivers
from headwater.circuits.graph import KINDS, Indices, leads_to_logits, on_a_path
from headwater.kernels.devices import to_device
from headwater.models.memory import in_halves
from headwater.models.weights.loaded_weights import LoadedWeights


@dataclass(frozen=True, eq=False)
class ComplementRun:
    """What is carried outside of a circuit in one example, at the positions that are recomputed; by layer."""

    start: int
    """The first of them."""
    is_run: bool
    """Whether it is a prompt's run, so that a sender differs from it only if something reaches it."""
    embedded: Float[Tensor, "position d_model"]
    """What the embedding sends."""
    entering: Sequence[Float[Tensor, "position d_model"]]
    """What heads read; after the last layer, what the logits read."""
    middle: Sequence[Float[Tensor, "position d_model"]]
    """What MLPs read."""
    heads: Sequence[Float[Tensor, "position head d_model"]]
    """What heads send."""
    mlps: Sequence[Float[Tensor, "position d_model"]]
    """What MLPs send."""


def of_other_run(runs: BothRuns, shares: Sequence[HeadShares]) -> ComplementRun:
    """Return what the other run of a pair has."""
    reached, layers = slice(runs.start, runs.stop), range(runs.graph.n_layers)

    def of(site: str, layer: int) -> Tensor:
        return runs.other(site, layer)[reached]

    entering = [of("resid_pre", layer) for layer in layers]
    middle = entering if runs.wave.blocks.parallel else [entering[layer] + of("attn_out", layer) for layer in layers]
    heads = [shares[layer].of(of("z", layer)) for layer in layers]
    mlps = [of("mlp_out", layer) for layer in layers]
    last = of("resid_post", layers[-1])
    return ComplementRun(runs.start, True, entering[0], [*entering, last], middle, heads, mlps)


def of_values(runs: BothRuns, shares: Sequence[HeadShares], exchanged: Exchanged) -> ComplementRun:
    """Return what a kind of values has at the senders of an example."""
    sent = exchanged.of(runs.example, len(runs.plan.base[runs.example]))[:, : runs.stop]
    n_heads, parallel = runs.graph.n_heads, runs.wave.blocks.parallel
    entering, middle, heads, mlps = [sent[0]], [], [], []
    for layer, share in enumerate(shares):
        first = runs.graph.first_head(layer)
        heads.append(sent[first : first + n_heads].movedim(0, 1))
        mlps.append(sent[first + n_heads])
        # Values are of no run: streams are added up sender by sender. The biases belong to no edge.
        attended = entering[-1] + heads[-1].sum(1) + share.of_bias(runs.base("z", layer)[: runs.stop]).to(sent)
        middle.append(entering[-1] if parallel else attended)
        entering.append(attended + mlps[-1])
    return ComplementRun(0, False, sent[0], entering, middle, heads, mlps)


NEAR = 1e-4
HELD_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
"""What a batch of circuits may hold: more runs out of the processor's caches and is not faster."""
ALL = slice(None)


@dataclass(frozen=True, eq=False)
class ReceiverInputs:
    """What some receivers of a layer read: a row for each that an edge of a circuit enters, receiver by receiver."""

    circuit: Indices
    receiver: Indices
    inputs: Float[Tensor, "row position d_model"]


class CircuitWalk:
    """Runs circuits on one example.

    Args:
        rows: the clean run, from the first position on at which it differs from what lies outside.
        outside: what the edges outside of a circuit carry.
        shares: what the heads of each layer write.
        weights: the model's.
    """

    def __init__(self, rows: EdgeRows, outside: ComplementRun, shares: Sequence[HeadShares], weights: LoadedWeights):
        self.rows, self.outside, self.shares, self.weights = rows, outside, shares, weights
        self.runs, self.graph = rows.runs, rows.runs.graph
        self.receivers = [Receivers(rows, layer) for layer in range(self.graph.n_layers)]
        self._projections: dict[int, _Projection] = {}

    def measure(self, circuits: Sequence[Indices], batch_size: int | None = None) -> Float[Tensor, "circuit metric"]:
        """Return the metrics of the runs of some circuits, given as edges, ascending."""
        values = torch.zeros(len(circuits), len(self.runs.plan.metrics), dtype=torch.float64)
        live = [self._live(edges) for edges in circuits]
        order = np.argsort([len(edges) for edges in live], kind="stable")  # sparse ones skip together

        def run(some: list[int]) -> None:
            values[torch.tensor(some)] = self._measured(live, some)

        hooks = [hook for receivers in self.receivers for hook in receivers.hooks]
        with self.rows.blocks.fused(), self.runs.model.hooks(hooks):
            first, at_once = 0, 0
            while first < len(order):
                at_once = batch_size or self._at_once([live[i] for i in order[first:]])
                in_halves([int(i) for i in order[first : first + at_once]], run)
                first += at_once
        return values

    def _measured(self, live: Sequence[Indices], some: list[int]) -> Float[Tensor, "circuit metric"]:
        try:
            return self.rows.measure(_Batch(self, [live[i] for i in some]).last())
        except NotFiniteRowError as error:
            raise self.rows.not_finite(f"circuit {some[error.row]} alone") from None

    def _live(self, edges: Indices) -> Indices:
        # A norm after attention divides by the size of all heads together: each head depends on what the others read.
        together = any(shares.norm is not None for shares in self.shares)
        # With values that are of no run a sender differs from them also where nothing of the clean prompt reaches it.
        which = on_a_path if self.outside.is_run else leads_to_logits
        kept = which(self.graph, edges, together)
        return np.asarray(edges[kept])

    def _at_once(self, live: Sequence[Indices]) -> int:
        """How many of the next circuits fit: what each of their senders writes, and what a layer's heads read."""
        budget = HELD_BYTES.get(self.runs.model.device.type, HELD_BYTES["cpu"])
        heads = self.graph.n_heads + 2 * self.graph.n_kv_heads
        a_stream = self.outside.embedded.nbytes
        used, fit = np.zeros(len(self.graph.senders), dtype=bool), 0
        for edges in live:
            used[self.graph.sender[edges]] = True
            # One circuit goes in any case; it is the second that has to fit.
            if fit and fit + 1 > budget // ((int(used.sum()) + heads) * a_stream):
                break
            fit += 1
        return fit

    def projection(self, layer: int) -> _Projection:
        """Return the q, k and v of a layer outside of every circuit, and what makes those of other inputs."""
        if layer not in self._projections:
            self._projections[layer] = _Projection(self, layer)
        return self._projections[layer]


class _Projection:
    """Makes q, k and v of single heads of one layer from what each of them reads."""

    def __init__(self, walk: CircuitWalk, layer: int):
        self.walk, self.layer = walk, layer
        self.receivers = walk.receivers[layer]
        outside = walk.outside.entering[layer]
        projected = self.receivers.projected(outside[None])
        self.outside = {kind: projected[kind].clone() for kind in KINDS}
        normed = walk.rows.blocks.normed(layer, outside[None], mlp=False)
        every = {kind: torch.arange(projected[kind].shape[2]) for kind in KINDS}
        # Seen, not assumed: a model may norm or scale q and k after the projection, which columns alone leave out.
        self.by_weights = self._has_weights and _near(
            (self._columns(kind, normed.expand(len(heads), -1, -1), heads), projected[kind][0].movedim(1, 0))
            for kind, heads in every.items()
        )

    def of(
        self, kind: str, inputs: Float[Tensor, "row position d_model"], heads: Int[Tensor, " row"]
    ) -> Float[Tensor, "row position d_head"]:
        """Return of each row the q (k, v) of its own head; rows are head by head."""
        if self.by_weights:
            return self._columns(kind, self.walk.rows.blocks.normed(self.layer, inputs, mlp=False), heads)
        # Else all heads of each row are made, of which it takes its own.
        made = self.receivers.projected(inputs)[kind]
        return made[torch.arange(len(heads), device=made.device), :, to_device(heads, made.device)]

    @cached_property
    def _factors(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        factors = self.walk.weights.layer(self.layer)
        return {"q": (factors.W_Q, factors.b_Q), "k": (factors.W_K, factors.b_K), "v": (factors.W_V, factors.b_V)}

    @property
    def _has_weights(self) -> bool:
        sizes = {kind: self.outside[kind].shape[2] for kind in KINDS}
        return all(weight is not None and len(weight) == sizes[kind] for kind, (weight, _) in self._factors.items())

    def _columns(self, kind: str, normed: Tensor, heads: Int[Tensor, " row"]) -> Tensor:
        weight, bias = self._factors[kind]
        assert weight is not None
        columns = normed.new_empty(*normed.shape[:2], weight.shape[2])
        rows, start = normed.to(weight), 0
        for head, count in zip(*(one.tolist() for one in heads.unique_consecutive(return_counts=True)), strict=True):
            mine = slice(start, start + count)
            made = rows[mine].flatten(0, 1) @ weight[head]
            made = made if bias is None else made.add_(bias[head])
            columns[mine] = made.view(count, *columns.shape[1:])
            start += count
        return columns


class _Batch:
    """One walk up the layers with some circuits, by their live edges."""

    def __init__(self, walk: CircuitWalk, circuits: Sequence[Indices]):
        self.walk, self.outside, graph = walk, walk.outside, walk.graph
        self.graph, self.n_circuits = graph, len(circuits)
        edges = np.concatenate(circuits) if circuits else np.zeros(0, dtype=np.int64)
        self.circuit = np.repeat(np.arange(len(circuits)), [len(one) for one in circuits])
        self.receiver, self.sender = graph.receiver[edges], graph.sender[edges]
        self.begins = np.concatenate([[0], np.cumsum([len(one) for one in circuits])])
        self.used = np.unique(self.sender)
        # Only senders in use have memory, not all of the graph.
        self.slot = np.full(len(graph.senders), -1)
        self.slot[self.used] = np.arange(len(self.used))
        self.sends = np.zeros((len(circuits), len(graph.senders)), dtype=bool)
        self.sends[self.circuit, self.sender] = True
        embedded = walk.outside.embedded
        self.now = embedded.new_zeros(len(circuits), len(self.used), *embedded.shape)
        if self.slot[0] >= 0:
            # The embedding always sends the clean prompt's: nothing reaches it that could be another.
            clean = walk.rows.base("resid_pre", 0)
            self.now[:, 0] = clean - embedded

    def last(self) -> Float[Tensor, "circuit kept d_model"]:
        """Return the last states at the positions that are read."""
        layers = range(self.graph.n_layers)
        for layer in layers:
            self._heads(layer)
            self._mlp(layer)
        kept = self.walk.rows.kept
        states = self.outside.entering[-1][kept].expand(self.n_circuits, -1, -1).clone()
        logits = len(self.graph.receivers) - 1
        mixed = self._mixed(range(logits, logits + 1), self.outside.entering[-1], kept)
        states[to_device(mixed.circuit, states.device)] = mixed.inputs
        return states

    def _heads(self, layer: int) -> None:
        """Let a layer's heads read and write, in the circuits where one of them is heard."""
        first = self.graph.first_head(layer)
        heard = self.sends[:, first : first + self.graph.n_heads]
        rows = np.flatnonzero(heard.any(1))
        if not len(rows):
            return
        projection = self.walk.projection(layer)
        mixed = self._mixed(self._reading(layer)[:-1], self.outside.entering[layer])
        place = np.searchsorted(rows, mixed.circuit)
        # A head that no edge enters reads what is carried outside; the others are written over below.
        given = {kind: made.expand(len(rows), -1, -1, -1).clone() for kind, made in projection.outside.items()}
        bounds = np.searchsorted(self.graph.receivers.kind[mixed.receiver], range(len(KINDS) + 1))
        for kind, mine in zip(KINDS, map(slice, bounds[:-1], bounds[1:]), strict=True):
            heads = self.graph.receivers.head[mixed.receiver[mine]]
            if len(heads):
                made = projection.of(kind, mixed.inputs[mine], torch.from_numpy(heads)).to(given[kind])
                given[kind][to_device(place[mine], made.device), :, to_device(heads, made.device)] = made
        # The model's own attention on all circuits at once: its scale, mask and soft cap are not made again here.
        z = projection.receivers.heads_of(given)
        changes = self.walk.shares[layer].of(z) - self.outside.heads[layer]
        self._write(rows, heard[rows], first, changes.movedim(2, 1))

    def _mlp(self, layer: int) -> None:
        """Let a layer's MLP read and write, in the circuits where it is heard."""
        sender = self.graph.first_head(layer) + self.graph.n_heads
        heard = self.sends[:, [sender]]
        rows = np.flatnonzero(heard.any(1))
        if not len(rows):
            return
        outside, blocks = self.outside.middle[layer], self.walk.rows
        kept = self.walk.rows.leaving(layer)
        inputs = outside[kept].expand(len(rows), -1, -1).clone()
        mixed = self._mixed(self._reading(layer)[-1:], outside, kept)
        inputs[to_device(np.searchsorted(rows, mixed.circuit), inputs.device)] = mixed.inputs
        changes = blocks.feed_forward(layer, inputs) - self.outside.mlps[layer][kept]
        # In the last layer the MLP ran where it is read; elsewhere nobody asks for its change.
        if not isinstance(kept, slice):
            changes = changes.new_zeros(len(rows), *outside.shape).index_copy_(1, kept, changes)
        self._write(rows, heard[rows], sender, changes[:, None])

    def _reading(self, layer: int) -> range:
        """The receivers of a layer: q, k and v of its heads, then its MLP."""
        n_receivers = self.graph.n_heads + 2 * self.graph.n_kv_heads + 1
        return range(layer * n_receivers, (layer + 1) * n_receivers)

    def _mixed(self, receivers: range, outside: Tensor, kept: Int[Tensor, " kept"] | slice = ALL) -> ReceiverInputs:
        """Return what some receivers read in each circuit that has edges into them; at some positions, or at all.

        The edges of a circuit are in the order of their receivers, so those into neighbours are together.
        """
        outside = outside[kept]
        parts = [self._entering(one, receivers) for one in range(self.n_circuits)]
        circuits = np.repeat(np.arange(self.n_circuits), [len(found) for found, _, _ in parts])
        entered = np.concatenate([found for found, _, _ in parts])
        # Receiver by receiver, so that the rows of one head are one product with its columns.
        order = np.argsort(entered, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        inputs = outside.new_empty(len(order), *outside.shape)
        for one, (found, row, slot) in enumerate(parts):
            mine, place = place[: len(found)], place[len(found) :]
            if not len(found):
                continue
            # Slots follow the senders' order, so that later ones are left out of the product.
            reach = int(slot.max()) + 1
            # A product of zeros and ones: adding edge by edge would read each sender's stream once an edge.
            carried = np.zeros((len(found), reach), dtype=np.float32)
            carried[row, slot] = 1
            now = self.now[one, :reach][:, kept].flatten(1)
            _product(to_device(carried, now.device).to(now), now, inputs.flatten(1), mine)
        return ReceiverInputs(circuits[order], entered[order], inputs.add_(outside))

    def _entering(self, circuit: int, receivers: range) -> tuple[Indices, Indices, Indices]:
        """Return the receivers that edges of a circuit enter, and of each edge the place of its receiver, and slot."""
        begin, end = self.begins[circuit], self.begins[circuit + 1]
        bounds = np.searchsorted(self.receiver[begin:end], [receivers.start, receivers.stop]) + begin
        receiver = self.receiver[bounds[0] : bounds[1]]
        is_new = np.diff(receiver, prepend=-1) > 0
        return receiver[is_new], np.cumsum(is_new) - 1, self.slot[self.sender[bounds[0] : bounds[1]]]

    def _write(self, rows: Indices, heard: Bool[np.ndarray, "row sender"], first: int, changes: Tensor) -> None:
        """Keep what senders from a first one on write now, less what they write outside, where they are heard."""
        row, sender = np.nonzero(heard)
        into, slot, row_there, sender_there = (
            to_device(one, self.now.device) for one in (rows[row], self.slot[first + sender], row, sender)
        )
        self.now[into, slot] = changes[row_there, sender_there].to(self.now)


def _product(a: Float[Tensor, "row sender"], b: Float[Tensor, "sender width"], into: Tensor, rows: Indices) -> None:
    """Write a product into some rows of a matrix: straight where these are at equal distances, else by a copy."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    # mm writes into a strided view; an index would need the product first, and a copy of it.
    if (np.diff(rows) == step).all():
        torch.mm(a, b, out=into[int(rows[0]) : int(rows[-1]) + 1 : step])
    else:
        into[to_device(rows, into.device)] = a @ b


def _near(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether tensors are near others, each beside the largest number of its other; the host waits once for all."""
    ends, tolerance = [], NEAR
    for a, b in pairs:
        ends.append(torch.stack([(a - b).abs().max(), b.abs().max()]).double())
        tolerance = max(tolerance, 16 * torch.finfo(b.dtype).eps)
    return all(apart <= tolerance * max(1e-6, largest) for apart, largest in torch.stack(ends).tolist())
