"""Run circuits on pairs of prompts, as every analysis of circuits does.

The edited prompt is the clean one. The edges outside a circuit carry the other prompt of the pair, or `values=`. For
each example and metric, three references go with the metrics of the circuits:

    clean       the metric of the clean run, which equals the run of the full circuit
    corrupted   the metric of the empty circuit: the other prompt's run, or the values alone
    floor       the largest change of the metric that rounding can cause: a smaller gap counts as none
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.circuits.exact import EdgeRows, Receivers, are_near, refuse_heads_that_meet
from headwater.circuits.graph import QKV, leads_to_logits, on_a_path
from headwater.circuits.pairs import BothRuns, Pairs
from headwater.errors import ModelError
from headwater.kernels.devices import in_halves, to_device
from headwater.patching.edits import Indices

KEPT_FLOATS = 1 << 29
"""Approximate limit on the number of floats in the runs of pairs that are kept between batches."""
ROUNDING = 32
"""Rounding changes a metric by at most this many times the dtype's eps times the largest logit.

A smaller gap counts as no gap.
"""
UNLIKE_CLEAN = 1e-3
"""Largest allowed distance of the full circuit from the clean run, relative to the largest logit that is read."""


def pairs_to_keep(pairs: Pairs, most: int) -> int:
    """Return for how many pairs the runs are kept between batches."""
    # What each sender adds outside of circuits, and the recorded activations, which are about as many numbers.
    a_pair = 2 * len(pairs.graph.senders) * int(pairs.tokens.max()) * pairs.model.shape.d_model
    return max(1, min(most, len(pairs), KEPT_FLOATS // a_pair))


class CircuitRunner:
    """Runs circuits on one pair after the other; keeps the runs of `keep` pairs."""

    def __init__(self, pairs: Pairs, fingerprint: str | None = None, keep: int = 1):
        self.pairs, self.keep = pairs, keep
        pairs.fingerprint = fingerprint
        self._walks: dict[int, tuple[CircuitWalk, Tensor]] = {}
        self._is_checked = False

    def measure(self, example: int, circuits: Sequence[Indices]) -> dict[str, Tensor]:
        """Return the metrics of circuits on an example, `circuit metric`, and its `baselines`, `metric 3`."""
        model, graph = self.pairs.model, self.pairs.graph
        with torch.no_grad(), model.lock:
            if example not in self._walks:
                if len(self._walks) >= self.keep:
                    self._walks.popitem()  # the last one, so that the first ones can be reused in every round
                walk = CircuitWalk(self.pairs.runs(example))
                if example == 0:
                    refuse_heads_that_meet(walk.rows)
                self._walks[example] = walk, self._baselines(walk)
            walk, baselines = self._walks[example]
            # Checked once: the circuit of all edges must reproduce the clean run.
            if example == 0 and not self._is_checked:
                # Run alone, because in a batch it would change the last digits of others, and so a resumed search.
                full, clean = walk.measure([np.arange(graph.n_edges)])[0], baselines[:, 0]
                self._is_checked = True
                allowed = max(UNLIKE_CLEAN, 64 * torch.finfo(model.dtype).eps) * walk.largest_logit
                # Written so that NaN is refused, too.
                if not float((full - clean).abs().max()) <= allowed:
                    raise ModelError(
                        f"The circuit of all edges of {model.name} does not give its clean run: {float(full[0]):.4g} "
                        f"instead of {float(clean[0]):.4g} on {self.pairs.metrics[0]}. Its circuits have no meaning."
                    )
            values = walk.measure(circuits)
        return {"values": values, "baselines": baselines}

    def _baselines(self, walk: CircuitWalk) -> Float[Tensor, "metric 3"]:
        runs = walk.runs
        clean, corrupted = runs.metrics
        if not self.pairs.has_other_run:
            # The values come from no run, so the empty circuit has to be run to get its metric.
            corrupted = walk.measure([np.zeros(0, dtype=np.int64)])[0]
        # Dividing by a gap within rounding would give an arbitrary number, so faithfulness is NaN below this floor.
        floor = ROUNDING * torch.finfo(runs.model.dtype).eps * walk.largest_logit
        return torch.stack([clean, corrupted, torch.full_like(clean, floor)], -1)


# Run many circuits at once: in each, only its edges carry recomputed outputs; all others carry the outside values O.
#
# x_r = x_r(O) + Σ over edges s → r of the circuit:  s(now) - s(O)
#
# for every receiver r, layer by layer. s(now) is what the sender writes, given its input in this run; O is what is
# carried outside (below). With all edges this is the clean run, with none it is O itself, and with all but one it is
# the run in which only this edge is patched.
#
# 1. D = s(now) - s(O) is stored for the senders in use, `circuit sender position d_model`. D of the embedding is known
#    from the start.
# 2. Per layer and circuit, one product of a 0/1 matrix, `receiver sender`, with D gives the inputs of the receivers. A
#    receiver that no edge of the circuit enters reads O: its row is left out.
# 3. Then the norm, each head's columns of W_Q, W_K and W_V, and the model's own attention on all circuits at once; then
#    W_O, head by head. Layers in which no circuit uses a head are skipped, and so are unused MLPs.
# 4. The logits are computed at the positions that are read.
#
# Edges without an effect are dropped first: those from which no path of the circuit leads to the logits and, if O is a
# run, those that no path from the embedding reaches (there s(now) = s(O)).
#
# O is the run in which no edge carries the clean prompt. s(O) is what a sender s contributes under the values (another
# prompt's run, zeros, or means of what it adds), and a receiver outside of the circuit reads
#
# x(O) = Σ s(O) + the biases of attention,    over the senders before it
#
# For the other prompt's run this is its residual stream, and for means it is the mean of the residual streams. The
# values are those that `hw.edges` uses (`headwater.circuits.pairs`): if a norm comes after attention, the mean of
# the heads' shares, each under the scale of its own run, and not the shares of a mean z, whose scale belongs to no run.
# So the circuit of all edges but one gives the effect of that edge.


def outside_values(runs: BothRuns) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return what is carried outside of a circuit in one example, at the recomputed positions.

    The outputs, `sender position d_model`; by layer, the input of its heads, and last that of the logits; by layer, the
    input of its MLP; each `position d_model`.
    """
    # This also checks that the shares of the heads add up.
    sent, graph, reached = runs.sent(), runs.graph, slice(runs.start, runs.stop)
    if runs.pairs.has_other_run:
        entering = [runs.other("resid_pre", layer)[reached] for layer in range(graph.n_layers)]
        attended = [residual + runs.other("attn_out", layer)[reached] for layer, residual in enumerate(entering)]
        entering.append(runs.other("resid_post", graph.n_layers - 1)[reached])
    else:
        entering, attended = [sent[0]], []
        for layer, share in enumerate(runs.pairs.shares):
            # The values come from no run, so streams are summed sender by sender. The biases belong to no edge.
            first, mlp = graph.first_head(layer), graph.first_head(layer) + graph.n_heads
            bias = share.of_bias(share.outputs(runs.base("z", layer)[reached]))
            attended.append(entering[-1] + sent[first:mlp].sum(0) + bias.to(sent))
            entering.append(attended[-1] + sent[mlp])
    return sent, entering, entering[:-1] if runs.wave.blocks.parallel else attended


HELD_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
"""Memory of a batch of circuits: a larger batch exceeds the processor's caches and is not faster."""
ALL = slice(None)


class CircuitWalk:
    """Runs circuits on one example; its rows begin at the first position that differs from what lies outside."""

    def __init__(self, runs: BothRuns):
        self.runs, self.graph, self.shares = runs, runs.graph, runs.pairs.shares
        self.rows = EdgeRows(runs, runs.start)
        self.sent, self.entering, self.middle = outside_values(runs)
        self.receivers = [Receivers(self.rows, layer, attached=True) for layer in range(self.graph.n_layers)]
        self.projection = cache(partial(_Projection, self))
        # How many times smaller batches are because memory ran out.
        self._divided_by = 1

    @cached_property
    def largest_logit(self) -> float:
        """The largest absolute logit of the clean run, at least 1: the scale of rounding errors."""
        last = self.rows.base("resid_post", self.graph.n_layers - 1)[self.rows.kept]
        return max(1.0, float(self.runs.wave.logits(last).abs().max()))

    def measure(self, circuits: Sequence[Indices]) -> Float[Tensor, "circuit metric"]:
        """Return the metrics when each circuit runs alone; circuits are given as ascending edge indices."""
        values = torch.zeros(len(circuits), len(self.runs.plan.metrics), dtype=torch.float64)
        # A norm after attention divides by the scale of all heads together: each head depends on the others' inputs.
        together = any(shares.norm is not None for shares in self.shares)
        # If the values come from no run, a sender differs from them even where nothing of the clean prompt reaches it.
        kept = on_a_path if self.runs.pairs.has_other_run else leads_to_logits
        live = [edges[kept(self.graph, edges, together)] for edges in circuits]
        order = np.argsort([len(edges) for edges in live], kind="stable")  # batches of sparse circuits skip layers

        def run(some: list[int]) -> None:
            last = _Batch(self, [live[i] for i in some]).last()
            values[torch.tensor(some)] = self.rows.measure(last, lambda row: f"circuit {some[row]} alone")

        hooks = [hook for receivers in self.receivers for hook in receivers.hooks]
        with self.rows.blocks.fused(), self.runs.model.hooks(hooks):
            while len(order):
                at_once = self.runs.plan.batch_size or self._at_once([live[i] for i in order])
                at_once = max(1, at_once // self._divided_by)
                self._divided_by *= len(in_halves(order[:at_once].tolist(), run))
                order = order[at_once:]
        return values

    def _at_once(self, live: Sequence[Indices]) -> int:
        """Return how many of the next circuits fit in memory: their senders' outputs, and a layer's head inputs."""
        budget = HELD_BYTES.get(self.runs.model.device.type, HELD_BYTES["cpu"])
        heads = self.graph.n_heads + 2 * self.graph.n_kv_heads
        a_stream = self.rows.base("resid_pre", 0).nbytes
        used, fit = np.zeros(len(self.graph.senders), dtype=bool), 0
        for edges in live:
            used[self.graph.sender[edges]] = True
            # The first circuit always runs; only further ones have to fit.
            if fit and fit + 1 > budget // ((int(used.sum()) + heads) * a_stream):
                break
            fit += 1
        return fit


class _Projection:
    """Computes q, k and v of single heads of one layer from each head's input.

    `outside`: the q, k and v outside of every circuit.
    """

    def __init__(self, walk: CircuitWalk, layer: int):
        self.walk, self.layer = walk, layer
        self.receivers = walk.receivers[layer]
        outside = walk.entering[layer]
        projected = self.receivers.projected(outside[None])
        self.outside = {kind: projected[kind].clone() for kind in QKV}
        normed = walk.rows.blocks.normed(layer, outside[None], mlp=False)
        every = {kind: torch.arange(projected[kind].shape[2]) for kind in QKV}
        # Checked, not assumed: a model may norm or scale q and k after the projection, which the columns leave out.
        has_weights = all(w is not None and len(w) == self.outside[k].shape[2] for k, (w, _) in self._factors.items())
        self.by_weights = has_weights and are_near(
            (self._columns(kind, normed.expand(len(heads), -1, -1), heads), projected[kind][0].movedim(1, 0))
            for kind, heads in every.items()
        )

    def of(
        self, kind: str, inputs: Float[Tensor, "row position d_model"], heads: Int[Tensor, " row"]
    ) -> Float[Tensor, "row position d_head"]:
        """Return for each row the q (k, v) of its head; rows are sorted by head."""
        if self.by_weights:
            return self._columns(kind, self.walk.rows.blocks.normed(self.layer, inputs, mlp=False), heads)
        # Otherwise all heads of each row are computed, and the row's head is selected.
        made = self.receivers.projected(inputs)[kind]
        return made[torch.arange(len(heads), device=made.device), :, to_device(heads, made.device)]

    @cached_property
    def _factors(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        factors = self.walk.runs.pairs.weights.layer(self.layer)
        return {"q": (factors.W_Q, factors.b_Q), "k": (factors.W_K, factors.b_K), "v": (factors.W_V, factors.b_V)}

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
    """One pass up the layers with some circuits, by their live edges."""

    def __init__(self, walk: CircuitWalk, circuits: Sequence[Indices]):
        self.walk, self.graph, self.n_circuits = walk, walk.graph, len(circuits)
        graph = walk.graph
        edges, counts = np.concatenate(circuits), [len(one) for one in circuits]
        self.circuit = np.repeat(np.arange(len(circuits)), counts)
        self.receiver, self.sender = graph.receiver[edges], graph.sender[edges]
        self.begins = np.concatenate([[0], np.cumsum(counts)])
        self.used = np.unique(self.sender)
        # Memory is allocated only for senders in use, not for the whole graph.
        self.slot = np.full(len(graph.senders), -1)
        self.slot[self.used] = np.arange(len(self.used))
        self.sends = np.zeros((len(circuits), len(graph.senders)), dtype=bool)
        self.sends[self.circuit, self.sender] = True
        embedded = walk.rows.base("resid_pre", 0)
        self.now = embedded.new_zeros(len(circuits), len(self.used), *embedded.shape)
        if self.slot[0] >= 0:
            # The embedding always sends its clean output, because no edge enters it.
            self.now[:, 0] = embedded - walk.sent[0]

    def last(self) -> Float[Tensor, "circuit kept d_model"]:
        """Return the last residual stream at the positions that are read."""
        for layer in range(self.graph.n_layers):
            self._heads(layer)
            self._mlp(layer)
        kept = self.walk.rows.kept
        states = self.walk.entering[-1][kept].expand(self.n_circuits, -1, -1).clone()
        logits = len(self.graph.receivers) - 1
        circuit, _, inputs = self._mixed(range(logits, logits + 1), self.walk.entering[-1], kept)
        states[to_device(circuit, states.device)] = inputs
        return states

    def _heads(self, layer: int) -> None:
        """Run a layer's heads, in the circuits where one of them reaches the output."""
        first = self.graph.first_head(layer)
        used = self.sends[:, first : first + self.graph.n_heads]
        rows = np.flatnonzero(used.any(1))
        if not len(rows):
            return
        projection = self.walk.projection(layer)
        circuit, receiver, inputs = self._mixed(self._reading(layer)[:-1], self.walk.entering[layer])
        place = np.searchsorted(rows, circuit)
        # A head that no edge enters reads what is carried outside; the other heads are overwritten below.
        by_kind = {kind: base.expand(len(rows), -1, -1, -1).clone() for kind, base in projection.outside.items()}
        bounds = np.searchsorted(self.graph.receivers.kind[receiver], range(len(QKV) + 1))
        for kind, mine in zip(QKV, map(slice, bounds[:-1], bounds[1:]), strict=True):
            heads = self.graph.receivers.head[receiver[mine]]
            if len(heads):
                new = projection.of(kind, inputs[mine], torch.from_numpy(heads)).to(by_kind[kind])
                by_kind[kind][to_device(place[mine], new.device), :, to_device(heads, new.device)] = new
        # The model's own attention runs on all circuits at once, so its scale, mask and soft cap are not reimplemented.
        z = projection.receivers.heads_of(**by_kind)
        shares = self.walk.shares[layer]
        outside = self.walk.sent[first : first + self.graph.n_heads]
        self._write(rows, used[rows], first, shares.of(shares.outputs(z)).movedim(2, 1) - outside)

    def _mlp(self, layer: int) -> None:
        """Run a layer's MLP, in the circuits where it reaches the output."""
        sender = self.graph.first_head(layer) + self.graph.n_heads
        used = self.sends[:, [sender]]
        rows = np.flatnonzero(used.any(1))
        if not len(rows):
            return
        outside, positions = self.walk.middle[layer], self.walk.rows.leaving(layer)
        inputs = outside[positions].expand(len(rows), -1, -1).clone()
        circuit, _, mixed = self._mixed(self._reading(layer)[-1:], outside, positions)
        inputs[to_device(np.searchsorted(rows, circuit), inputs.device)] = mixed
        changes = self.walk.rows.blocks.feed_forward(layer, inputs) - self.walk.sent[sender, positions]
        # In the last layer the MLP ran only at the positions that are read; its change elsewhere is never used.
        if not isinstance(positions, slice):
            changes = changes.new_zeros(len(rows), *outside.shape).index_copy_(1, positions, changes)
        self._write(rows, used[rows], sender, changes[:, None])

    def _reading(self, layer: int) -> range:
        """Return the receivers of a layer: q, k and v of its heads, then its MLP."""
        n_receivers = self.graph.n_heads + 2 * self.graph.n_kv_heads + 1
        return range(layer * n_receivers, (layer + 1) * n_receivers)

    def _mixed(
        self, receivers: range, outside: Tensor, positions: Int[Tensor, " kept"] | slice = ALL
    ) -> tuple[Indices, Indices, Float[Tensor, "row position d_model"]]:
        """Return circuit, receiver and input of each receiver that an edge enters, at the given or all positions."""
        outside = outside[positions]
        parts = [self._entering(circuit, receivers) for circuit in range(self.n_circuits)]
        circuits = np.repeat(np.arange(self.n_circuits), [len(targets) for targets, _, _ in parts])
        entered = np.concatenate([targets for targets, _, _ in parts])
        # Sorted by receiver, so that the rows of one head form one product with its columns. A circuit's edges are
        # already sorted by receiver, so those into consecutive receivers are contiguous.
        order = np.argsort(entered, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        inputs = outside.new_empty(len(order), *outside.shape)
        for circuit, (targets, row, slot) in enumerate(parts):
            mine, place = place[: len(targets)], place[len(targets) :]
            if not len(targets):
                continue
            # Slots are in the order of senders, so the product can stop after the largest one.
            reach = int(slot.max()) + 1
            # A product with a 0/1 matrix: adding edge by edge would read each sender's stream once per edge.
            carried = np.zeros((len(targets), reach), dtype=np.float32)
            carried[row, slot] = 1
            now = self.now[circuit, :reach][:, positions].flatten(1)
            _product(to_device(carried, now.device).to(now), now, inputs.flatten(1), mine)
        return circuits[order], entered[order], inputs.add_(outside)

    def _entering(self, circuit: int, receivers: range) -> tuple[Indices, Indices, Indices]:
        """Return the receivers that edges of a circuit enter, and for each edge the index of its receiver, and slot."""
        begin, end = self.begins[circuit], self.begins[circuit + 1]
        bounds = np.searchsorted(self.receiver[begin:end], [receivers.start, receivers.stop]) + begin
        receiver = self.receiver[bounds[0] : bounds[1]]
        is_new = np.diff(receiver, prepend=-1) > 0
        return receiver[is_new], np.cumsum(is_new) - 1, self.slot[self.sender[bounds[0] : bounds[1]]]

    def _write(self, rows: Indices, used: Bool[np.ndarray, "row sender"], first: int, changes: Tensor) -> None:
        """Store what the used senders, counted from `first`, write now, minus what they write outside."""
        row, sender = np.nonzero(used)
        into, slot, row_there, sender_there = (
            to_device(one, self.now.device) for one in (rows[row], self.slot[first + sender], row, sender)
        )
        self.now[into, slot] = changes[row_there, sender_there].to(self.now)


def _product(a: Float[Tensor, "row sender"], b: Float[Tensor, "sender width"], into: Tensor, rows: Indices) -> None:
    """Write a product into some rows of a matrix: in place if the rows are evenly spaced, otherwise by a copy."""
    step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
    # mm can write into a strided view; indexed rows need the product first, and then a copy of it.
    if (np.diff(rows) == step).all():
        torch.mm(a, b, out=into[int(rows[0]) : int(rows[-1]) + 1 : step])
    else:
        into[to_device(rows, into.device)] = a @ b
