"""The exact effect of every edge, one receiver layer at a time.

    effect(s → r) = metric(base run in which r reads x_r + Δ_s) - metric(base run)

x_r is the residual stream before the receiver's norm, and Δ_s = s(other run) - s(base run). The norm, the receiver and
everything after it are recomputed; every other receiver reads what the run gives it. For the receivers of one layer and
many senders at once:

1. The model's own norm and projections compute q, k and v of x + Δ_s, for every sender.
2. The model's own attention computes z of the base run's q, k, v with one of the three replaced. Heads do not interact
   before W_O, so one row gives the output of every head of the layer, each with only its q (k, v) changed: one row per
   sender, not per edge. That heads do not interact is checked at every layer (norms over all heads of q, as in OLMo 2,
   make them interact).
3. Per edge: z of its head (of the query heads that share its key-value head), with the recorded z of the others,
   through W_O and what follows it in the layer; for an MLP, its output for x + Δ_s.
4. All rows are now whole residual streams, and go through the later layers together, one tile at a time. The keys and
   values before the first change come from the recorded run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.circuits.graph import QKV
from headwater.circuits.pairs import BothRuns, Pairs, Place
from headwater.errors import ModelError, NumericsError
from headwater.kernels.devices import in_tiles, to_device
from headwater.models.blocks import SharedPrefix
from headwater.models.edits import Hook, replace_hook
from headwater.models.forward import DoneError
from headwater.models.sites import hook_name
from headwater.patching.edits import LOGITS, Indices
from headwater.patching.runners import TILE_TOKENS
from headwater.runs.analysis import Run

MOST_ROWS = 1 << 20
"""Largest number of rows at once, whatever was requested."""
NEAR = 1e-4
"""Largest difference of tensors that should be equal, relative to the largest number, in float32."""
Enter: TypeAlias = Callable[[Tensor], Tensor]
"""Returns, for edges given by index, the residual streams that leave the receivers' layer, `row position d_model`."""
ThroughName: TypeAlias = Literal["direct", "mlps"]


class EdgeRows:
    """The base run of one example from a position on, with arbitrary residual streams as rows."""

    def __init__(self, runs: BothRuns, start: int):
        self.runs, self.start, self.stop = runs, start, runs.stop
        self.blocks, self.recording = runs.wave.blocks, runs.wave.recording
        self.n_layers = runs.graph.n_layers
        tokens = TILE_TOKENS.get(runs.model.device.type, TILE_TOKENS["cpu"])
        self.at_once = min(MOST_ROWS, runs.plan.batch_size or max(1, tokens // (self.stop - start)))
        self.kept = to_device(torch.tensor(runs.kept) - start, runs.model.device)
        """Indices of the rows' positions that are read."""
        self._masks: dict[int, Tensor] = {}

    def base(self, site: str, layer: int) -> Tensor:
        """Return an activation of the base run at the positions of the rows."""
        return self.runs.base(site, layer)[self.start : self.stop]

    def leaving(self, layer: int) -> Int[Tensor, " kept"] | slice:
        """Return the rows' positions at which streams leave a layer: all, or (last layer) those that are read."""
        # The last layer runs only where read: 133 MFLOP instead of 151 for a late edge of GPT-2's shape (NOTES.md).
        return self.kept if layer == self.n_layers - 1 else slice(None)

    def attention(self, layer: int, residual: Float[Tensor, "row position d_model"], whole: bool = False) -> Tensor:
        """Return what a layer's attention adds to rows: where they leave it, or with `whole` at all their positions."""
        n_rows, shared = len(residual), None
        positions = torch.arange(self.start, self.stop, device=residual.device).expand(n_rows, -1)
        if self.start:
            # Expanded, not copied: before the first change all rows have the keys and values of the recorded run.
            caches = (cache[layer][:1, :, : self.start] for cache in (self.recording.keys, self.recording.values))
            shared = SharedPrefix(*(cache.expand(n_rows, -1, -1, -1) for cache in caches))
        if layer not in self._masks:
            visible = self.recording.visible[layer][self.start : self.stop, : self.stop]
            mask = torch.zeros(visible.shape, dtype=residual.dtype, device=residual.device)
            self._masks[layer] = mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)[None, None]
        # All rows have the same start and end, so one mask serves them.
        mask = self._masks[layer].expand(n_rows, -1, -1, -1)
        at, call = self.leaving(layer), self.recording.calls[layer]
        query_positions = None if whole or isinstance(at, slice) else at.expand(n_rows, -1)
        return self.blocks.attention(layer, residual, positions, mask, shared, query_positions, call=call)

    def through(
        self,
        layer: int,
        residual: Float[Tensor, "#row position d_model"],
        attended: Tensor | None = None,
        mlp: Tensor | None = None,
    ) -> Float[Tensor, "row kept d_model"]:
        """Return rows where they leave a layer, with the outputs of its attention and MLP, if these are given."""
        attended = self.attention(layer, residual) if attended is None else attended
        residual = residual[:, self.leaving(layer)]
        middle = residual + attended
        if mlp is None:
            mlp = self.blocks.feed_forward(layer, residual if self.blocks.parallel else middle)
        return middle + mlp

    def measure(
        self, last: Float[Tensor, "row kept d_model"], changed: Callable[[int], str] = lambda row: "nothing changed"
    ) -> Float[Tensor, "row metric"]:
        """Return the metrics of rows, given their last states; `changed` describes what was changed in a row."""
        runs = self.runs
        # The runner's own unembedding: for a logit difference it uses two columns of W_U, not all.
        logits = runs.wave.logits(last.flatten(0, 1)).view(len(last), last.shape[1], -1)
        finite = logits.isfinite().flatten(1).all(1)
        # This check and the metrics are the only two waits for the device per tile of rows.
        if not bool(finite.all()):
            raise NumericsError(
                f"The run of example {runs.example} with {changed(int((~finite).nonzero()[0]))} gives NaN or infinity "
                f"({runs.model.dtype}). Load the model with dtype='float32'."
            )
        reading, owners, metrics = (LOGITS, self.n_layers), [0] * len(logits), range(len(runs.plan.metrics))
        return torch.stack([runs.wave.readout.apply(m, reading, logits, owners) for m in metrics], 1)

    @cached_property
    def unedited(self) -> Float[Tensor, "1 metric"]:
        """The metrics of the base run, by the same last step as the rows, so that rounding cancels in differences."""
        return self.measure(self.base("resid_post", self.n_layers - 1)[None, self.kept])

    def read_by_mlp(self, layer: int) -> Float[Tensor, "position d_model"]:
        """Return the input of a layer's MLP in the base run, before its norm."""
        entering = self.base("resid_pre", layer)
        return entering if self.blocks.parallel else entering + self.base("attn_out", layer)


class Receivers:
    """Computes the outputs of the receivers of one layer for changed inputs, for many senders at once.

    `hooks` are attached in each call, or once by the caller (`attached`).
    """

    def __init__(self, rows: EdgeRows, layer: int, attached: bool = False):
        self.rows, self.layer, self.attached = rows, layer, attached
        self._given: Mapping[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}
        self._wanted: set[str] = set()
        self.entering = rows.base("resid_pre", layer)
        self.z = rows.base("z", layer)
        self.group = rows.runs.model.shape.group_size

    @property
    def hooks(self) -> list[Hook]:
        """The hooks that record and replace the layer's q, k, v and z."""
        # Not kept: they refer to this object, and so would keep a pair's runs in memory until a garbage collection.
        return [
            (hook_name(site, self.layer), replace_hook(partial(self._exchanged, site=site))) for site in (*QKV, "z")
        ]

    def _exchanged(self, activation: Tensor, hook: object, site: str) -> Tensor | None:
        """Record the activation of a site, and return its replacement, if any."""
        self._seen[site] = activation
        # Attention stops here: q, k and v need no scores, and z needs no W_O.
        if self._wanted and self._wanted <= self._seen.keys():
            raise DoneError
        return self._given.get(site)

    def projected(
        self, inputs: Float[Tensor, "row position d_model"], until: Iterable[str] = QKV, **given: Tensor
    ) -> dict[str, Tensor]:
        """Call the layer's attention, with given q, k or v, until some sites were seen; return these activations."""
        self._wanted, self._given, self._seen = set(until), given, {}
        hooked = contextlib.nullcontext() if self.attached else self.rows.runs.model.hooks(self.hooks)
        with hooked, contextlib.suppress(DoneError):
            self.rows.attention(self.layer, inputs, whole=True)
        self._wanted, self._given = set(), {}
        return {site: self._seen[site] for site in until}

    def heads_of(self, **given: Tensor) -> Float[Tensor, "row position head d_head"]:
        """Return z with some of q, k and v replaced, the others from the base run."""
        n_rows = len(next(iter(given.values())))
        # All rows have the same input and are replaced after their projections, so one projection serves them all.
        with self.rows.blocks.alike(self.layer):
            seen = self.projected(self.entering.expand(n_rows, -1, -1), "z", **given)
        return seen["z"].view(n_rows, *self.z.shape)

    def attended(self, z: Float[Tensor, "row position head d_head"]) -> Float[Tensor, "row position d_model"]:
        """Return what attention adds, given the outputs of its heads at some positions."""
        added = self.rows.blocks.project_heads(self.layer, z.flatten(0, 1))
        return added.view(*z.shape[:2], -1)


def refuse_heads_that_meet(rows: EdgeRows) -> None:
    """Check at every layer that a head's output depends only on its q, k and v, and that only W_O follows z."""
    model = rows.runs.model
    # A property of the model, not of the prompt, so it is checked once.
    if model.heads_checked:
        return
    for layer in range(rows.n_layers):
        receivers = Receivers(rows, layer)
        if not are_near([(receivers.attended(receivers.z[None])[0], rows.base("attn_out", layer))]):
            raise ModelError(f"Attention of layer {layer} of {model.name} does not add z W_O alone: no edges there.")
        projected = receivers.projected(receivers.entering[None])
        for kind in QKV:
            heads, n = projected[kind].clone(), projected[kind].shape[2]
            # Only the first head is changed; the outputs of the others must stay the same if heads do not interact.
            heads[:, :, 0] = 2 * heads[:, :, 0] + 1
            z, touched = receivers.heads_of(**{kind: heads})[0], 1 if kind == "q" else receivers.group
            if n > 1 and not are_near([(z[:, touched:], receivers.z[:, touched:])]):
                raise ModelError(
                    f"The heads of layer {layer} of {model.name} change with the {kind} of another head: they have "
                    "no edges of their own."
                )
    model.heads_checked = True


def are_near(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether all pairs of tensors are near, relative to the second's largest number; the host waits once."""
    ends, tolerance = [], NEAR
    for a, b in pairs:
        ends.append(torch.stack([(a - b).abs().max(), b.abs().max()]).double())
        tolerance = max(tolerance, 16 * torch.finfo(b.dtype).eps)
    return all(apart <= tolerance * max(1e-6, largest) for apart, largest in torch.stack(ends).tolist())


class Exact:
    """Exact effects of the edges of one example, at one place.

    With through="mlps", a sender's change also passes through the MLPs between it and the receiver.
    """

    def __init__(self, runs: BothRuns, place: Place, through: str = "direct"):
        self.runs, self.place, self.graph = runs, place, runs.graph
        changes = runs.changes_at(place)
        self.rows, self.changes = EdgeRows(runs, place.start), changes
        # A sender that is the same in both runs has no effect by any edge, and needs no row.
        self.changed = self.changes.flatten(1).any(1).cpu().numpy()
        # By layer: each sender's change of the heads' input and of the MLP's input, `sender position d_model`.
        self.reaching: Callable[[int], tuple[Tensor, Tensor]] = lambda layer: (changes, changes)
        if through != "direct":
            # Each sender is a set by itself, because an edge through MLPs is a path from one sender.
            each = [np.array([sender]) for sender in range(len(self.graph.senders))]
            self.reaching = ResidualChange(self.rows, self.changes, each, through).at

    def effects(self, stage: int, edges: Indices) -> Float[Tensor, "edge metric"]:
        """Return the effects of edges, all to receivers of one layer (or to the logits: stage `n_layers`)."""
        effects = torch.zeros(len(edges), len(self.runs.plan.metrics), dtype=torch.float64)
        rows = self.rows

        def measure(some: Sequence[int], enter: Enter) -> None:
            part = torch.tensor(some)
            going = enter(part)
            for layer in range(stage + 1, rows.n_layers):
                going = rows.through(layer, going)

            def named(row: int) -> str:
                return f"the edge {self.graph.name(int(edges[some[row]]))} changed"

            effects[part] = rows.measure(going, named) - rows.unedited

        with rows.blocks.fused():
            for mine, enter in self._entering(stage, edges):
                # If memory ran out, the next tiles start with the size that fitted.
                rows.at_once = in_tiles(mine.tolist(), rows.at_once, partial(measure, enter=enter))
        return effects

    def _entering(self, stage: int, edges: Indices) -> Iterator[tuple[Int[Tensor, " edge"], Enter]]:
        """Yield edges, each batch with a function that computes their residual streams after the receivers' layer."""
        rows, receiver, nodes = self.rows, self.graph.receiver[edges], self.graph.receivers
        sender, kind, head = map(
            torch.from_numpy, (self.graph.sender[edges], nodes.kind[receiver], nodes.head[receiver])
        )
        live = torch.from_numpy(np.flatnonzero(self.changed[self.graph.sender[edges]]))
        into_heads, into_mlp = self.reaching(stage)

        def of(changes: Tensor, some: Tensor) -> Tensor:
            # Row numbers are on the host, changes on the model's device.
            return changes[to_device(some, changes.device)]

        if stage == rows.n_layers:
            final = rows.base("resid_post", stage - 1)[rows.kept]
            yield live, lambda some: final + of(into_heads, sender[some])[:, rows.kept]
            return
        receivers, leaving = Receivers(rows, stage), rows.leaving(stage)
        within, mlp = live[kind[live] < len(QKV)], live[kind[live] == len(QKV)]
        # A parallel MLP does not read what attention adds: its output is as recorded.
        recorded = rows.base("mlp_out", stage)[leaving] if rows.blocks.parallel else None
        for senders in sender[within].unique().split(rows.at_once) if len(within) else ():
            mine = within[torch.isin(sender[within], senders)]
            # q, k and v of a sender in one call: this row serves edges to all heads of the layer.
            projected = receivers.projected(receivers.entering + of(into_heads, senders))
            for number, name in enumerate(QKV):
                if not len(fed := mine[kind[mine] == number]):
                    continue
                z = receivers.heads_of(**{name: projected[name]})[:, leaving]
                # A key-value head is read by all query heads of its group, a query only by its head.
                reader = torch.arange(z.shape[2], device=z.device) // (1 if name == "q" else receivers.group)

                # As defaults, because a closure would see the loop's last kind and senders.
                def enter(
                    some: Tensor, z: Tensor = z, reader: Tensor = reader, senders: Tensor = senders
                ) -> Float[Tensor, "row position d_model"]:
                    reads = (reader == to_device(head[some], z.device)[:, None])[:, None, :, None]
                    own = of(z, torch.searchsorted(senders, sender[some]))
                    attended = receivers.attended(torch.where(reads, own, receivers.z[leaving]))
                    return rows.through(stage, receivers.entering[None], attended, recorded)

                yield fed, enter
        if len(mlp):
            read, middle = rows.read_by_mlp(stage), rows.base("resid_pre", stage) + rows.base("attn_out", stage)

            def enter_mlp(some: Tensor) -> Float[Tensor, "row position d_model"]:
                changed = read + of(into_mlp, sender[some])
                return middle[leaving] + rows.blocks.feed_forward(stage, changed[:, leaving])

            yield mlp, enter_mlp


def baselines_of(pairs: Pairs, run: Run, exact: bool = True) -> Float[Tensor, "example metric 3"]:
    """Return for each pair the metrics of its clean and corrupted run, and the metrics' rounding error (floor).

    The floor is the precision of the metrics; with `exact`, at least the largest difference from the base run of rows
    without any change, one entering at each layer.
    """

    def measure(example: int) -> dict[str, Tensor]:
        with torch.no_grad(), pairs.model.lock:
            runs = pairs.runs(example)
            rows = EdgeRows(runs, runs.start)
            refuse_heads_that_meet(rows)
            base, other = runs.metrics
            # At least the metrics' own precision, because rows without a change may agree by chance.
            floor = torch.finfo(pairs.model.dtype).eps * torch.maximum(base.abs(), other.nan_to_num().abs())
            if exact:
                going = rows.base("resid_pre", 0)[None]
                for layer in range(rows.n_layers):
                    receivers, leaving = Receivers(rows, layer), rows.leaving(layer)
                    attended = receivers.attended(receivers.z[None, leaving])
                    mlp = rows.base("mlp_out", layer)[leaving] if rows.blocks.parallel else None
                    joining = rows.through(layer, receivers.entering[None], attended, mlp)
                    going = torch.cat([rows.through(layer, going), joining]) if layer else joining
                floor = torch.maximum((rows.measure(going) - rows.unedited).abs().amax(0), floor)
            clean, corrupted = (base, other) if pairs.plan.pair.base_is_clean else (other, base)
        return {"baselines": torch.stack([clean, corrupted, floor], -1)}

    return torch.stack([piece["baselines"] for piece in run.pieces("baselines", range(len(pairs)), measure)])


# Change of the residual stream before each layer when senders are replaced and attention is frozen.
#
# direct   δ_l = Σ Δ_s, over the replaced senders s before l
# mlps     the same, and each MLP on the way is recomputed:  δ after it = δ + mlp(x + δ) - mlp(x)
#
# Every head keeps its output from the base run (a replaced head: from the other run), so that a change reaches a
# receiver along the residual stream, or through MLPs, and through no other head (Wang et al. 2022). One pass up the
# layers serves every receiver of every set of senders.


class ResidualChange:
    """The changes by some sets of senders, each replaced together, layer by layer at the recomputed positions."""

    def __init__(
        self,
        rows: EdgeRows,
        changes: Float[Tensor, "sender position d_model"],
        sets: Sequence[Indices],
        through: str = "direct",
    ):
        self.rows, self.changes, self.through, self.graph = rows, changes, through, rows.runs.graph
        self._set = torch.from_numpy(np.repeat(np.arange(len(sets)), [len(one) for one in sets]))
        self._sender = torch.from_numpy(np.concatenate(sets))
        self._layer = 0
        # The change before the layer's heads.
        self._before = self._with(changes.new_zeros(len(sets), *changes.shape[1:]), 0, 1)

    def at(self, layer: int) -> tuple[Float[Tensor, "set position d_model"], Float[Tensor, "set position d_model"]]:
        """Return the changes of the inputs of a layer's heads and of its MLP; for `n_layers`, of the logits' input.

        Layers are requested in ascending order.
        """
        assert layer >= self._layer
        rows, graph = self.rows, self.graph
        while True:
            heads, mlp = graph.first_head(self._layer), graph.first_head(self._layer) + graph.n_heads
            is_last = self._layer == rows.n_layers
            after = self._before if is_last else self._with(self._before, heads, mlp)
            read = self._before if rows.blocks.parallel else after
            if self._layer == layer:
                return self._before, read
            if self.through == "mlps":
                changed = read.flatten(1).any(1).cpu()
                # An MLP that is itself replaced gives its output from the other run, whatever reaches it.
                changed[self._set[self._sender == mlp]] = False
                after, entering = after.clone(), rows.read_by_mlp(self._layer)
                for part in changed.nonzero()[:, 0].split(rows.at_once):
                    some, recorded = to_device(part, after.device), rows.base("mlp_out", self._layer)
                    after[some] += rows.blocks.feed_forward(self._layer, entering + read[some]) - recorded
            self._before, self._layer = self._with(after, mlp, mlp + 1), self._layer + 1

    def _with(self, changes: Tensor, first: int, stop: int) -> Float[Tensor, "set position d_model"]:
        """Add the changes of the replaced senders from `first` on and before `stop`."""
        mine = (self._sender >= first) & (self._sender < stop)
        if not bool(mine.any()):
            return changes
        into, sender = (to_device(one[mine], changes.device) for one in (self._set, self._sender))
        return changes.index_add(0, into, self.changes[sender])
