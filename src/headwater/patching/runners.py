"""Runners measure the cells of a group of examples: by a walk down the layers, or by whole runs of the prompts.

    WalkRunner    one recorded run of both prompts, then all variants of a wave in one walk down the layers
    WholeRuns     ordinary forwards of whole prompts, with hooks that make each row's edits or keep its readings

`WholeRuns` is the reference that the walk must equal, and works for every model. A third runner, `AttributionRunner`,
takes gradients and runs no variant. A cell whose edits no read position can see has effect 0, without a run, as has one
that replaces the first layer's input at tokens that are the same in both prompts. Positions before the first different
token are never recomputed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.errors import InputError, InterventionError, NumericsError, first_line
from headwater.kernels.devices import in_tiles, is_out_of_memory, to_device, to_device_many
from headwater.models.blocks import Blocks, Recording, cannot_step
from headwater.models.bridge_check import edges_are_cut, rounding
from headwater.models.edits import Hook, begin_graph, forking, keeping, read_hook, replace_hook
from headwater.models.forward import not_finite
from headwater.models.gradients import refuse_without_gradients
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES, Site, Stage, hook_name, main_site, taken_as_recorded
from headwater.models.tokens import Batch
from headwater.patching.edits import (
    LOGITS,
    CellTable,
    Deliver,
    Edit,
    Indices,
    Place,
    Reading,
    ReplacementValues,
    TokenSpanEdit,
    Variant,
    Variants,
    write_patterns,
    write_tokens,
)
from headwater.patching.plan import Group, Kept, Measured, Plan, Readout, Reads, columns_of, read_run
from headwater.patching.prompts import Side
from headwater.patching.replacements import ValueRequest, capture, compute_values
from headwater.patching.walk import NotFiniteError, Walk, not_walked

TILE_TOKENS = {"cpu": 1024, "cuda": 1 << 15}
"""Tokens per call of a sublayer, for a model of width `WIDTH`; halved when memory runs out."""
WIDTH = 768
TILE_WEIGHTS = 1 << 20
"""Most attention weights in a tile that is enlarged because the model is narrow."""


def tile_tokens(model: HookedModel, length: int) -> int:
    """Return the tokens per call of a sublayer: more for a narrow model, because a cache holds more of its tokens."""
    usual = TILE_TOKENS.get(model.device.type, TILE_TOKENS["cpu"])
    # The same number of bytes, until attention weights, which do not shrink with the width, dominate.
    narrow = usual * WIDTH // model.shape.d_model
    return max(usual, min(narrow, TILE_WEIGHTS // (length * model.shape.n_heads)))


class Runner(ABC):
    """The runs of a group of examples: unedited runs first, then edited runs for any of the group's cells.

    Use inside the model's lock, and inside `torch.inference_mode()` unless it needs a graph.
    """

    name: ClassVar[str]
    needs_graph: ClassVar[bool] = False
    plan: Plan
    group: Group
    readout: Readout

    @abstractmethod
    def __init__(self, plan: Plan, examples: range):
        """Make the unedited runs."""

    def measure(self, cells: CellTable) -> Measured:
        """Measure cells of the group's examples, from the readings of their variants that `run` delivers."""
        variants, readout = self.group.variants(cells), self.readout
        measured_cells = readout.unedited(variants)

        def deliver(reading: Reading, indices: Indices, read: Tensor) -> None:
            for m in range(len(self.plan.metrics)):
                asks = np.array([one.of_metrics[m] == reading for one in variants.distinct])[variants.which[indices]]
                if asks.any():
                    asking = indices[asks]
                    # Usually the metric applies to all variants of a reading: then the logits are not copied.
                    part = read if asks.all() else read[to_device(np.flatnonzero(asks), read.device)]
                    measured = readout.apply(m, reading, part, variants.example[asking])
                    measured_cells.values[torch.from_numpy(asking), m] = measured
            if reading in measured_cells.after:
                measured_cells.after[reading][to_device(indices, measured_cells.after[reading].device)] = read

        self.run(variants, deliver)
        return measured_cells

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver the readings of variants of the group's runs."""
        raise NotImplementedError

    def _other_run(self) -> tuple[ReplacementValues, Reads | None]:
        """Run the other prompt of each pair (if any); return the values that edits write, and that run's readings."""
        group = self.group
        if self.plan.pair.other is None:
            return values_written(group, {}), None
        names = [*group.read_names, *group.value_names.values()]
        kept, before = columns_of(group.other_kept), group.corrupting("other")
        activations, logits = capture(self.plan.model, group.batch("other"), names, kept, before)
        return values_written(group, activations), read_run(group, group.other_kept, activations, logits)


class CannotStepError(Exception):
    """A model's blocks cannot be stepped through, or the result cannot be trusted; the message gives the reason."""


class WalkRunner(Runner):
    """One recorded run of the prompts of both sides, then one walk down the layers for the cells of a wave.

    `also` are hook names of further activations to record on both sides, and `gradients_at` those where gradients will
    be taken; the first of these comes before the others.

    Raises:
        CannotStepError: the walk does not support this model.
    """

    name: ClassVar[str] = "wavefront"

    def __init__(self, plan: Plan, examples: range, also: Iterable[str] = (), gradients_at: Sequence[str] = ()):
        self.plan, self.group = plan, Group(plan, examples)
        if reason := cannot_step(plan.model) or not_walked(self.group.edits):
            raise CannotStepError(reason)
        self.blocks = Blocks(plan.model)
        self._tile = plan.batch_size * max(self.group.lengths) if plan.batch_size else None
        self._answers: Tensor | None = None
        if (answers := plan.only_answers) is not None:
            self._answers = to_device(answers[examples.start : examples.stop], plan.model.device)
        # Both sides are one batch: weights are loaded once for the two runs.
        self._sides: tuple[Side, ...] = ("base",) if plan.pair.other is None else ("base", "other")
        names = [*self.group.read_names, *self._joined_names(), *self.group.value_names.values(), *also]
        batch = self.group.batch(*self._sides)
        # Before the check of the steps: recording names the layer of a non-finite value, the check would blame steps.
        self._record(batch, names, gradients_at)
        if not plan.model.steps_checked:
            if reason := self._why_whole_runs(batch):
                raise CannotStepError(reason)
            plan.model.steps_checked = True
            # Later calls share a common start. Record this first call the same way, so that its numbers are the same to
            # the bit.
            if self.blocks.common_start(batch, names):
                self._record(batch, names, gradients_at)

    def _record(self, batch: Batch, names: Sequence[str], gradients_at: Sequence[str]) -> None:
        """Run both sides without edits, and keep the values that edits write and the readings of the runs."""
        plan, n = self.plan, len(self.group.examples)
        before = self.group.corrupting(*self._sides)
        # All logits are needed only for the check of the first call; later only the positions read are unembedded.
        unembed = not plan.model.steps_checked
        in_two = None if before or gradients_at or unembed else self.blocks.record_in_two(batch, names)
        self.recording: Recording = in_two or self.blocks.record(batch, names, before, gradients_at, unembed=unembed)
        others = {name: activation[n:] for name, activation in self.recording.activations.items()}
        self.values = values_written(self.group, others)
        base = self._read(self.recording.activations, "base", self.group.kept)
        other = self._read(others, "other", self.group.other_kept) if plan.pair.other is not None else None
        self.readout = Readout(self.group, base, other, self.recording.visible, self._answers)

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver the readings of variants of the group's runs, all in one walk."""
        tile = self._tile or tile_tokens(self.plan.model, max(self.group.lengths))
        walk = Walk(self.blocks, self.recording, variants, self.values, deliver, tile, self._answers)
        try:
            walk.run()
        except NotFiniteError as error:
            # Repeated as a whole run, whose own checks report the layer where it went wrong.
            variant, example = variants[error.variant], int(variants.example[error.variant])
            model, batch = self.plan.model, self.group.batch(*self._sides).rows(example, example + 1)
            before, n_layers = self.group.corrupting(*self._sides, rows=[example]), model.shape.n_layers
            model.run(batch, [*before, *_edits([variant], [example], self.values, n_layers)], stop_at=n_layers)
            token = int(batch.tokens[0, error.position])
            where = batch.name(0), error.position, token
            raise NumericsError(not_finite(model, "the logits", *where)) from None
        # Remembered if memory ran out, so that the next wave does not try the large tile again.
        self._tile = walk.tile_tokens if walk.tile_tokens < tile else self._tile

    def _why_whole_runs(self, batch: Batch) -> str | None:
        """Step the longest prompt through the blocks; return why that cannot be trusted, if it cannot."""
        recording, n_layers, lengths = self.recording, self.plan.model.shape.n_layers, batch.lengths.tolist()
        # The longest prompt has no padding: its last column is its last token, whose logits the run has.
        longest = lengths.index(max(lengths))
        last = lengths[longest] - 1
        # Some attention keeps a state of its own (recurrent layers), or shares keys between layers.
        if set(recording.keys) != set(range(n_layers)):
            return "its attention does not pass its keys and values to a cache"
        logits = recording.last_logits
        assert logits is not None
        expected, answers = logits[longest].float(), None
        tolerance = rounding(logits.dtype) * float(expected.abs().max())
        if self._answers is not None:
            answers = self._answers.repeat(len(self._sides), 1)
            expected = expected[answers[longest]]
        read_logits: list[Tensor] = []
        # From the middle on, to test recorded keys before a row too; with non-causal attention there are none.
        middle, whole = (0, last + 1) if self.plan.model.is_bidirectional else ((last + 1) // 2, None)
        # The edit writes the recorded numbers: the walk must give the logits of the unedited run.
        site = main_site(Stage.BLOCK_INPUT)
        same = ReplacementValues({(site.name, 0): recording.activations[site.hook_name(0)]})
        rewritten = Variant((Edit(site, range(1), since=middle),), (last,), ((LOGITS, n_layers),), whole=whole)
        variants = Variants((rewritten,), np.array([0]), np.array([longest]), np.array([-1]))
        tile = self._tile or tile_tokens(self.plan.model, last + 1)
        keep = lambda *read: read_logits.append(read[-1][0, 0])  # noqa: E731
        try:
            Walk(self.blocks, recording, variants, same, keep, tile, answers).run()
        except NotFiniteError:
            return "stepping through its blocks gives NaN or infinity where the model does not"
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            # Running out of memory says nothing about the steps: the caller tries half of the examples.
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            return f"its blocks cannot be called one by one ({type(error).__name__}: {first_line(error)[:120]})"
        difference = float((read_logits[0].detach().float() - expected).abs().max())
        if difference <= tolerance:
            return None
        # Reached also if the difference is NaN.
        return f"stepping through its blocks changes its logits by {difference:.1e}"

    def _joined_names(self) -> list[str]:
        """Return the hook names of the base run's activations that rows start from."""
        names = [main_site(Stage.BLOCK_INPUT).hook_name(0)]
        variants = [Variant(template.edits, (0,), ()) for template in self.group.cells.used if template.edits]
        for layer, joined in sorted({variant.joins for variant in variants}):
            sites = [main_site(stage) for stage in taken_as_recorded(joined, self.blocks.parallel)]
            # A model without MLPs has no recorded MLP output.
            there = [site for site in sites if site.absent(self.plan.model.shape) is None]
            names += [site.hook_name(layer) for site in (main_site(Stage.BLOCK_INPUT), *there)]
        return names

    def _read(self, activations: Mapping[str, Tensor], side: Side, positions: Kept) -> Reads:
        """Read one side of the recorded run, and compute the logits at its kept positions."""
        group, n_layers = self.group, self.plan.model.shape.n_layers
        read = read_run(group, positions, activations)
        if (LOGITS, n_layers) in group.readings:
            residual = activations[main_site(Stage.BLOCK_OUTPUT).hook_name(n_layers - 1)]
            if self._answers is None:
                columns = to_device_many([torch.tensor(places) for places in positions], residual.device)
                read[LOGITS, n_layers] = [self.blocks.logits(residual[i, places]) for i, places in enumerate(columns)]
            else:
                listed = torch.tensor([(i, place) for i, places in enumerate(positions) for place in places])
                row, place = to_device(listed, residual.device).unbind(1)
                logits = self.blocks.logits_of(residual[row, place], self._answers[row])
                read[LOGITS, n_layers] = list(logits.split([len(places) for places in positions]))
            # All examples in one check: each check waits for the device.
            if not bool(torch.cat(read[LOGITS, n_layers])[:, :1].isfinite().all()):
                for i, logits in enumerate(read[LOGITS, n_layers]):
                    wrong = ~logits[:, :1].isfinite().all(-1)
                    if bool(wrong.any()):
                        batch, position = group.batch(side), positions[i][int(wrong.nonzero()[0])]
                        token = int(batch.tokens[i, position])
                        raise NumericsError(not_finite(self.plan.model, "the logits", batch.name(i), position, token))
        return read

    def logits(self, residual: Float[Tensor, "kept d_model"]) -> Float[Tensor, "kept d_vocab_or_answer"]:
        """Return the logits of the only example's states after the last block; only of its answers if these suffice."""
        if self._answers is None:
            return self.blocks.logits(residual)
        return self.blocks.logits_of(residual, self._answers[0].expand(len(residual), -1))


class WholeRuns(Runner):
    """One forward of each side, then forwards of whole prompts, with a cell in each row."""

    name: ClassVar[str] = "whole runs"

    def __init__(self, plan: Plan, examples: range):
        self.plan, self.group = plan, Group(plan, examples)
        group, model = self.group, plan.model
        self._prompts = group.batch("base")
        before = group.corrupting("base")
        captured = capture(model, self._prompts, group.read_names, columns_of(group.kept), before)
        base = read_run(group, group.kept, *captured)
        # The keys that a query sees depend on its position: the longest prompt has every query position.
        length = max(group.lengths)
        longest = self._prompts.take([group.lengths.index(length)])
        severed = {layer for edit in group.edits if not edit.writes for layer in edit.layers}
        visible = visible_keys(model, longest, severed) if severed else {}
        self.values, other = self._other_run()
        self.readout = Readout(group, base, other, visible)
        self.at_once = plan.batch_size or max(1, tile_tokens(model, length) // length)
        """Rows per forward: as many tokens as a tile of the walk."""

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver the readings of variants of the group's runs, `at_once` of them per forward.

        Rows of a forward read the same positions of equally deep layers, so that no unread logits are computed.
        """
        groups: dict[tuple[tuple[int, ...], int, int | None], list[int]] = {}
        for index in np.flatnonzero(variants.can_change_output).tolist():
            variant = variants[index]
            # Layers after the deepest reading are not run.
            stop = max(layer + (site != LOGITS) for site, layer in variant.readings)
            groups.setdefault((variant.kept, stop, variant.whole), []).append(index)
        for (kept, stop, _), indices in groups.items():
            # Neighbouring rows of one length need no padding.
            indices.sort(key=lambda index: self.group.lengths[variants.example[index]])
            forward = partial(self.forward, variants, deliver, list(kept), stop)
            self.at_once = in_tiles(np.array(indices), self.at_once, forward)

    def forward(self, variants: Variants, deliver: Deliver, kept: list[int], stop: int, rows: Indices) -> None:
        """Run the prompts of some variants, each with its own edits, and deliver what is read at the positions `kept`.

        Layers from `stop` on are not run. What one row reads is read of all rows.
        """
        model, examples, own = self.plan.model, variants.example[rows].tolist(), [variants[i] for i in rows.tolist()]
        logits, readings = (LOGITS, model.shape.n_layers), {reading for variant in own for reading in variant.readings}
        read: dict[str, Tensor] = {}
        names = {(site, layer): SITES[site].hook_name(layer) for site, layer in readings if site != LOGITS}
        # Noise that makes the corrupted run comes first: edits act on that run.
        hooks = [*self.group.corrupting("base", rows=examples), *_edits(own, examples, self.values, stop)]
        # Indices make a copy: a view would keep the whole activation alive, and a later hook might write into it.
        hooks += keeping(names.values(), read, lambda activation: activation[:, kept])
        stop_at = None if logits in readings or stop == model.shape.n_layers else stop
        # Only these positions go through W_U: with a large vocabulary it is the costliest product of a short prompt.
        keep = torch.tensor(kept) if stop_at is None else None
        out = model.run(self._prompts.take(examples), hooks, keep=keep, stop_at=stop_at)
        for reading in readings:
            deliver(reading, rows, out if reading == logits else read[names[reading]])


def values_written(group: Group, others: Mapping[str, Tensor]) -> ReplacementValues:
    """Return the values that edits write, computed from the other run's activations."""
    model, replacement, sites = group.plan.model, group.plan.replacement, group.sites
    if replacement is None:
        return ReplacementValues({})
    other = {
        (site, layer): sites[site].read(group.aligned_with_base(others[name], sites[site]))
        for (site, layer), name in group.value_names.items()
    }
    wanted = ValueRequest(model, group.examples, group.lengths, tuple(sorted(group.sources)), other, sites)
    return compute_values(replacement, wanted)


def visible_keys(model: HookedModel, prompt: Batch, layers: Collection[int]) -> dict[int, Bool[Tensor, "query key"]]:
    """Return the keys that each query sees at these layers, taken from the masked scores of one run."""
    visible: dict[str, Tensor] = {}
    names = {layer: hook_name("attn_scores", layer) for layer in layers}
    # Half of the minimum: a masked score is finfo.min plus a little, or -inf in TransformerLens's own models.
    hooks = keeping(names.values(), visible, lambda scores: scores[0, 0] > torch.finfo(scores.dtype).min / 2)
    # Measured, not derived: sliding windows and chunks are masked by the model itself.
    model.run(prompt, hooks, stop_at=max(layers) + 1)
    return {layer: visible[name] for layer, name in names.items()}


def _edits(variants: Sequence[Variant], examples: Sequence[int], values: ReplacementValues, stop: int) -> list[Hook]:
    """Return the hooks that make the edits of each row's variant in the layers before `stop`."""
    written: dict[Place, list[tuple[int, Edit]]] = {}
    severed: dict[tuple[int, bool], list[tuple[int, Edit]]] = {}
    for row, variant in enumerate(variants):
        for edit in variant.edits:
            # Not beyond the last layer that runs: hooks there would never fire.
            for layer in range(edit.layers.start, min(edit.layers.stop, stop)):
                if edit.writes:
                    written.setdefault((edit.site.name, layer), []).append((row, edit))
                else:
                    severed.setdefault((layer, edit.after_softmax), []).append((row, edit))
    hooks: list[Hook] = []
    for (layer, zero), cuts in severed.items():
        hooks += severing_hooks(layer, zero, partial(_severed, cuts))
    for (_, layer), row_edits in written.items():
        edits = [(edit, examples[row]) for row, edit in row_edits]
        act = partial(written_into, edits=edits, values=values, layer=layer, rows=[row for row, _ in row_edits])
        hooks.append((row_edits[0][1].site.hook_name(layer), replace_hook(act)))
    return hooks


def _severed(cuts: Sequence[tuple[int, Edit]], scores: Tensor) -> Bool[Tensor, "row head query key"]:
    """Return where scores, or a pattern, have edges that the cuts of their rows sever."""
    is_severed = torch.zeros_like(scores, dtype=torch.bool)
    for row, cut in cuts:
        edges = cut.edges[: scores.shape[-2], : scores.shape[-1]].to(scores.device)
        heads: Any = slice(None) if cut.heads is None else list(cut.heads)
        # |=, since several cuts may affect one row and head.
        is_severed[row, heads, : len(edges), : edges.shape[1]] |= edges
    return is_severed


def severing_hooks(layer: int, zero: bool, severed: Callable[[Tensor], Tensor]) -> list[Hook]:
    """Return the hooks that sever edges of a layer, after (`zero`) or before the softmax.

    `severed` returns a mask of the severed edges for the scores, or for the pattern, `row head query key`.
    """
    pattern = hook_name("pattern", layer)
    if zero:
        return [(pattern, replace_hook(lambda weights, hook: weights.masked_fill(severed(weights), 0.0)))]

    def mask(scores: Tensor, hook: object) -> Tensor:
        least, cut = torch.finfo(scores.dtype).min, severed(scores)
        visible = scores > least / 2
        # A query with only finfo.min attends to all keys equally, future ones too, and with a sink to none: the check
        # of the pattern may not see either. One that saw no key is ignored.
        blind = visible.any(-1) & ~(visible & ~cut).any(-1)
        if bool(blind.any()):
            token = int(blind.nonzero()[0][-1])
            raise InterventionError(
                f"Knocking out these edges leaves token {token} no key to attend to in layer {layer}. Leave it at "
                "least one key, or use variant='zero'."
            )
        return scores.masked_fill(cut, least)

    # Attention in transformers' own code may ignore edited scores: check in the pattern that edges were cut.
    check = read_hook(lambda weights, hook: edges_are_cut(weights, severed(weights), pattern))
    return [(hook_name("attn_scores", layer), replace_hook(mask)), (pattern, check)]


def written_into(
    activation: Tensor,
    hook: object,
    edits: Sequence[tuple[Edit, int]],
    values: ReplacementValues,
    layer: int,
    rows: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
) -> Tensor:
    """Return an activation of whole prompts, `batch position ...`, with edits applied to these rows.

    Each edit comes with the example whose values it writes. Without `rows`, there is one edit for each row in turn.
    `starts` are the positions of the first column, by edit, if the activation is of the last tokens of the prompts.
    """
    # A copy, as TransformerLens's cache may hold this tensor; contiguous, so that flatten returns a writable view.
    edited = activation.clone(memory_format=torch.contiguous_format)
    site, length = edits[0][0].site, edited.shape[2 if edits[0][0].site.has_keys else 1]
    # Padding is not edited: a function of rows would receive rows that no prompt has.
    lengths = [values.lengths[example] for _, example in edits]
    rows, apart = range(len(edits)) if rows is None else rows, 1 if site.has_keys else length
    starts = [0] * len(edits) if starts is None else starts
    span_edits = [
        TokenSpanEdit(edit, np.array([example]), start, held - start, np.array([row * apart]))
        for (edit, example), held, row, start in zip(edits, lengths, rows, starts, strict=True)
    ]
    if not site.has_keys:
        write_tokens(edited.flatten(0, 1), span_edits, values, site, layer)
        return edited
    # Keys of whole prompts begin in column 0; those of new tokens, with the tokens before them, end in the last column.
    keys = np.full((len(edited), edited.shape[-1]), -1)
    for row, start, end in zip(rows, starts, lengths, strict=True):
        keys[row, slice(-end, None) if start else slice(end)] = np.arange(end)[-edited.shape[-1] :]
    columns = to_device(keys, edited.device)
    write_patterns(edited, span_edits, columns, values, site, layer)
    return edited


# Attribution patching: first-order estimates of a sweep's cells, from gradients (Nanda 2023; Syed et al. 2023).
#
#     effect ≈ Σ (value - activation) · ∂ metric / ∂ activation
#
# It takes one forward of the prompts that values come from and one of the prompts that are edited, and one backward per
# metric for the gradients at all sites at once; a cell sums the product over the layers, positions and heads that it
# covers. The estimate is exact where the metric is linear in the activation, and can be far off where a softmax or a
# norm saturates: `sweep.agreement(exact)` measures how far.


Drawn: TypeAlias = tuple[str, int, int, int]
"""A site, its layer, the layer that the written values come from, and their draw."""


class AttributionRunner(Runner):
    """One forward with a graph, a backward per metric, and for each cell a sum over the places that it covers.

    Raises:
        InputError: a metric reads the last edited layer (a gradient needs one layer for all cells), or has no gradient,
            or the model was loaded under `torch.inference_mode()`.
    """

    name: ClassVar[str] = "gradients"
    needs_graph: ClassVar[bool] = True

    def __init__(self, plan: Plan, examples: range):
        refuse_without_gradients(plan.model)
        if own_layer := [one.name for one in plan.metrics if one.site != LOGITS and one.layer is None]:
            raise InputError(
                f"The metric {own_layer[0]!r} reads each cell's own layer; attribution needs layer= a number."
            )
        self.plan, self.group = plan, Group(plan, examples)
        group, places = self.group, self.group.places
        recorded: dict[str, Tensor] = {}
        names = [*group.read_names, *(group.sites[site].hook_name(layer) for site, layer in places)]
        names += [_carrying(group.sites[site]).hook_name(layer) for site, layer in places]
        # The graph begins at the embeddings, whether or not parameters are frozen.
        hooks: list[Hook] = [*group.corrupting("base"), (hook_name("embed"), begin_graph), *forking(names, recorded)]
        logits = plan.model.run(group.batch("base"), hooks, keep=columns_of(group.kept), grad=True)
        with torch.enable_grad():
            base = read_run(group, group.kept, recorded, logits)
        self.values, other = self._other_run()
        self.readout = Readout(group, base, other, {})
        self._products = [self._product(m, recorded) for m in range(len(plan.metrics))]

    def measure(self, cells: CellTable) -> Measured:
        """Return the unedited values plus, for each cell, the sum over the places that it covers."""
        measured = self.readout.unedited(self.group.variants(cells))
        for m, products in enumerate(self._products):
            measured.values[:, m] += sums(products, cells, self.group.examples.start)
        return measured

    def _product(self, m: int, recorded: Mapping[str, Tensor]) -> dict[Drawn, Tensor]:
        """Return by place, source layer and draw (value - activation) · gradient, summed over the width (not keys)."""
        metric, readout = self.plan.metrics[m], self.readout
        reading = self.plan.reading(metric, ())
        with torch.enable_grad():
            # By prompt, since each keeps other positions. Prompts do not mix: one sum has the gradients of all.
            measured = [readout.apply(m, reading, read[None], [i])[0] for i, read in enumerate(readout.base[reading])]
            total = torch.stack(measured).sum()
        if not total.requires_grad:
            raise InputError(
                f"The metric {metric.name!r} has no gradient; attribution needs one (a logit difference has)."
            )
        places, sites = sorted(self.group.places), self.group.sites
        ends = [recorded[_carrying(sites[site]).hook_name(layer)] for site, layer in places]
        # A site after everything that a metric reads has no gradient: None, taken as 0 below.
        slopes = torch.autograd.grad(total, ends, retain_graph=m + 1 < len(self.plan.metrics), allow_unused=True)
        products: dict[Drawn, Tensor] = {}
        for (site, layer), slope in zip(places, slopes, strict=True):
            row = sites[site]
            current = recorded[row.hook_name(layer)].detach()
            slope = torch.zeros_like(current) if slope is None else slope
            here = [edit for edit in self.group.writes if edit.site.name == site and layer in edit.layers]
            for source, sample in sorted({(edit.source_layer_of(layer), edit.sample) for edit in here}):
                value = self._written(row.inner, layer, source, sample, row.read(current))
                # On the CPU: on a GPU the sum of each cell would take a few launches, for a few numbers.
                product = row.first_order(current, slope, value).cpu()
                # NumPy has no bfloat16.
                product = product if product.dtype == torch.float64 else product.float()
                if not bool((finite := product.flatten(1).isfinite().all(1)).all()):
                    raise NumericsError(
                        f"The gradient of {metric.name!r} at {site} of layer {layer} is NaN or infinite in example "
                        f"{self.group.examples[int((~finite).nonzero()[0])]} ({self.plan.model.dtype}). Load the model "
                        "with dtype='float32'."
                    )
                products[site, layer, source, sample] = product
        return products

    def _written(self, site: Site, layer: int, source: int, sample: int, standing: Tensor) -> Tensor:
        """Return the reading at a site after an edit of every token of every example."""
        if self.values.change is None:
            return self.values.by_site[site.name, source]
        edit = Edit(site, range(layer, layer + 1), source_layer=source, sample=sample)
        with torch.no_grad():
            edits = [(edit, example) for example in range(len(self.group.examples))]
            return written_into(standing, None, edits, self.values, layer)


def _carrying(site: Site) -> Site:
    """Return the site where the gradient is taken: the site's carrier (if any), whose gradient is the same."""
    return SITES[site.carrier.at] if site.carrier else site


def sums(products: Mapping[Drawn, Tensor], cells: CellTable, first: int) -> Float[Tensor, " cell"]:
    """Sum the products over the places that each cell covers; their first axis begins with the example `first`."""
    total = np.zeros(len(cells))
    order = np.argsort(cells.template, kind="stable")
    numbers, begins = np.unique(cells.template[order], return_index=True)
    for number, alike in zip(numbers, np.split(order, begins[1:]), strict=True):
        for edit in cells.templates[number].edits:
            # By axis of the product: the indices that the edit covers; None is all.
            axes: list[tuple[int, ...] | None] = [edit.positions]
            if edit.site.has_keys:
                axes = [edit.heads, edit.positions, edit.keys]
            elif edit.site.has_heads:
                axes.append(edit.heads)
            elif "feature" in edit.site.axes:
                # After the features comes their error.
                axes.append(None if edit.units is None else (*edit.units, -1))
            for layer in edit.layers:
                product = products[edit.site.name, layer, edit.source_layer_of(layer), edit.sample].numpy()
                covered = zip(axes, product.shape[1:], strict=True)
                places = [np.arange(length) if at is None else np.array(at) for at, length in covered]
                there = product[np.ix_(cells.example[alike] - first, *places)]
                total[alike] += there.reshape(len(alike), -1).sum(1, dtype=np.float64)
    return torch.from_numpy(total)
