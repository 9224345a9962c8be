"""The walk's runner: one recorded run of a group's examples, then all variants of a wave in one walk down the layers.

There are three runners of one interface (`Runner`), each whole in itself: this one, whole runs with hooks
(`headwater.patching.whole_runs`: what the walk must equal, and what serves every model), and gradients, which run no
variant (`headwater.patching.attribution`). A cell that no read position can see has effect 0, without a run; so has one
whose edit writes what the run has there already. That is looked up number by number, not inferred from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.errors import NumericsError, first_line
from headwater.kernels.devices import to_device, to_device_many
from headwater.models.blocks import Blocks, Recording, cannot_step
from headwater.models.bridge_check import not_finite, rounding
from headwater.models.memory import is_out_of_memory
from headwater.models.sites import Site, Stage, main_site, taken_as_recorded
from headwater.models.tokens import Batch
from headwater.patching.edits import LOGITS, Deliver, Edit, Place, Variant, Variants
from headwater.patching.plan import Group, Kept, Measured, Plan, Readout, Reads, read_run
from headwater.patching.prompts import Side
from headwater.patching.walk import NotFiniteError, Walk, not_walked
from headwater.patching.whole_runs import Runner, _value_names, run_edited, state_names, tile_tokens, values_written
from headwater.patching.writing import ReplacementValues


class CannotStepError(Exception):
    """A model's blocks cannot be stepped through, or what comes of it is not to be trusted; the text is why."""


class WalkRunner(Runner):
    """One recorded run of the prompts of both sides, then one walk down the layers for the cells of a wave.

    Args:
        plan: the sweep.
        examples: whose runs are made.
        also: further activations to record of both sides, by hook name.
        gradients_at: where gradients will be taken, by hook name; the first comes before the others.

    Raises:
        CannotStepError: the walk is not for this model; the first time, a row without any edit is sent down, whose
            logits must be those of the plain run.
    """

    name: ClassVar[str] = "wavefront"
    needs_graph: ClassVar[bool] = False

    def __init__(self, plan: Plan, examples: range, also: Iterable[str] = (), gradients_at: Sequence[str] = ()):
        self.plan = plan
        if reason := cannot_step(plan.model):
            raise CannotStepError(reason)
        self.group, self.blocks = Group(plan, examples), Blocks(plan.model)
        if reason := not_walked(self.group.edits):
            raise CannotStepError(reason)
        self._tile = plan.batch_size * max(self.group.lengths) if plan.batch_size else None
        self._answers: Tensor | None = None
        if (answers := plan.only_answers) is not None:
            self._answers = to_device(answers[examples.start : examples.stop], plan.model.device)
        # Both sides are one batch: weights are read once for the two runs.
        self._sides = plan.pair.sides
        names = [*state_names(self.group), *self._joined_names(), *_value_names(self.group).values(), *also]
        batch = self.group.batch(*self._sides)
        # Before the steps are checked: it names the layer where something is not finite, the check would blame steps.
        self._record(batch, names, gradients_at)
        if not plan.model.steps_checked:
            if reason := self._distrust(batch):
                raise CannotStepError(reason)
            plan.model.steps_checked = True
            # From now on steps record, too, or a start is shared: a first call gives the bits of a second.
            if self.blocks.has_own_steps or self.blocks.common_start(batch, names):
                self._record(batch, names, gradients_at)

    def _record(self, batch: Batch, names: Sequence[str], gradients_at: Sequence[str]) -> None:
        """Run both sides without edits, and keep what edits write and what is read of the runs."""
        plan, n = self.plan, len(self.group.examples)
        before = self.group.corrupting(*self._sides)
        # Whole logits serve the check of the first call alone; later only the positions that are read are unembedded.
        unembed = not plan.model.steps_checked
        in_two = None if before or gradients_at or unembed else self.blocks.record_in_two(batch, names)
        self.recording: Recording = in_two or self.blocks.record(batch, names, before, gradients_at, unembed=unembed)
        others = {name: activation[n:] for name, activation in self.recording.activations.items()}
        self.values = values_written(self.group, others)
        base = self._read(self.recording.activations, "base", self.group.kept)
        other = self._read(others, "other", self.group.other_kept) if plan.other is not None else None
        self.readout = Readout(self.group, base, other, self.recording.visible, self._answers)

    def measure(self, cells: range) -> Measured:
        """Measure some of the group's cells, all in one walk."""
        return self.readout.collect(cells, self.run)

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver what is read of variants of the group's runs, all in one walk."""
        tile = self._tile or tile_tokens(self.plan.model, max(self.group.lengths))
        answers = None if self._answers is None else self._answers.repeat(len(self._sides), 1)
        # Pairs that differ in one token enter the first layer alike everywhere else: 10 of its 12 cells need no run.
        variants = replace(variants, noop=noop_runs(variants, self._same))
        walk = Walk(self.blocks, self.recording, variants, self.values, deliver, tile, answers)
        try:
            walk.run()
        except NotFiniteError as found:
            self._name_not_finite(variants[found.variant], int(variants.example[found.variant]), found.position)
        # Remembered where memory ran out, so that the next wave does not try the large tile again.
        self._tile = walk.tile_tokens if walk.tile_tokens < tile else self._tile

    @cached_property
    def _same(self) -> dict[Place, Bool[np.ndarray, "example position *head"]]:
        """By place, where what edits write is what is there in the unedited runs."""
        return unchanged_places(self.values, self.group.sites, self.recording.activations, len(self.group.examples))

    def _distrust(self, batch: Batch) -> str | None:
        """Run the longest prompt, then send it through the blocks; say why that is not to be trusted, if it is not."""
        n_layers, lengths = self.plan.model.shape.n_layers, batch.lengths.tolist()
        # The longest has no padding: its last column is its last token, whose logits the run has.
        longest = lengths.index(max(lengths))
        last = lengths[longest] - 1
        names, before = self._joined_names(), self.group.corrupting(*self._sides, rows=[longest])
        recording = self.blocks.record(batch.rows(longest, longest + 1), names, before)
        # Some attention keeps a state of its own (recurrent layers), or shares keys between layers.
        if set(recording.keys) != set(range(n_layers)):
            return "its attention does not hand its keys and values to a cache"
        logits = recording.last_logits
        assert logits is not None
        expected, answers = logits[0].float(), None
        tolerance = rounding(logits.dtype) * float(expected.abs().max())
        if self._answers is not None:
            answers = self._answers[longest % len(self.group.examples)][None]
            expected = expected[answers[0]]
        read_logits: list[Tensor] = []
        # From the middle on, so that recorded keys before a row are tried too; looking ahead, there are none.
        middle, whole = (0, last + 1) if self.plan.model.looks_ahead else ((last + 1) // 2, None)
        variants = Variants.one(Variant((), (last,), ((LOGITS, n_layers),), start=(0, middle), whole=whole), 0)
        tile = self._tile or tile_tokens(self.plan.model, last + 1)
        try:
            Walk(
                self.blocks,
                recording,
                variants,
                ReplacementValues({}),
                lambda *read: read_logits.append(read[-1][0, 0]),
                tile,
                answers,
            ).run()
        except NotFiniteError:
            return "stepping through its blocks gives NaN or infinity where the model does not"
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            # Says nothing about the steps: the caller tries half of the examples.
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            return f"its blocks cannot be called one by one ({type(error).__name__}: {first_line(error)[:120]})"
        difference = float((read_logits[0].detach().float() - expected).abs().max())
        return (
            f"stepping through its blocks changes its logits by {difference:.1e}"
            # Written so that NaN counts as different.
            if not difference <= tolerance
            else None
        )

    def _name_not_finite(self, variant: Variant, example: int, position: int) -> NoReturn:
        """Say in which layer an edited run went wrong, by making it once more as a whole run."""
        model, batch = self.plan.model, self.group.batch(*self._sides).rows(example, example + 1)
        run_edited(model, batch, variant, example, self.values, self.group.corrupting(*self._sides, rows=[example]))
        token = int(batch.tokens[0, position])
        raise NumericsError(not_finite(model, "the logits", batch.name(0), position, token, edited=True))

    def _joined_names(self) -> list[str]:
        """Name the activations of the base run with which rows start."""
        names = [main_site(Stage.BLOCK_INPUT).hook_name(0)]
        variants = [Variant(template.edits, (0,), ()) for template in self.group.cells.used if template.edits]
        for layer, entered in sorted({(variant.first_layer, variant.stage) for variant in variants}):
            sites = [main_site(stage) for stage in taken_as_recorded(entered, self.blocks.parallel)]
            # A model without MLPs has nothing recorded of one.
            there = [site for site in sites if site.absent(self.plan.model.shape) is None]
            names += [site.hook_name(layer) for site in (main_site(Stage.BLOCK_INPUT), *there)]
        return names

    def _read(self, activations: Mapping[str, Tensor], side: Side, kept: Kept) -> Reads:
        """Read one side of the recorded run, whose logits were not computed."""
        group, n_layers = self.group, self.plan.model.shape.n_layers
        read = read_run(group, kept, activations)
        if (LOGITS, n_layers) in group.readings:
            residual = activations[main_site(Stage.BLOCK_OUTPUT).hook_name(n_layers - 1)]
            read[LOGITS, n_layers] = self._logits_at(residual, kept)
            # All examples in one look: each look waits for the device.
            if not bool(torch.cat(read[LOGITS, n_layers])[:, :1].isfinite().all()):
                for i, logits in enumerate(read[LOGITS, n_layers]):
                    self._refuse_not_finite(logits, side, i, kept)
        return read

    def _logits_at(self, residual: Float[Tensor, "example position d_model"], kept: Kept) -> list[Tensor]:
        """Return the logits of each example at its positions, `kept d_vocab_or_answer`, of many examples at once."""
        if self._answers is None:
            columns = to_device_many([torch.tensor(places) for places in kept], residual.device)
            return [self.logits(residual[i, places], i) for i, places in enumerate(columns)]
        listed = torch.tensor([(i, place) for i, places in enumerate(kept) for place in places])
        row, place = to_device(listed, residual.device).unbind(1)
        logits = self.blocks.logits_of(residual[row, place], self._answers[row])
        return list(logits.split([len(places) for places in kept]))

    def logits(self, residual: Float[Tensor, "kept d_model"], example: int) -> Float[Tensor, "kept d_vocab_or_answer"]:
        """Return the logits of states after the last block, of an example's answers where these suffice."""
        if self._answers is None:
            return self.blocks.logits(residual)
        return self.blocks.logits_of(residual, self._answers[example].expand(len(residual), -1))

    def _refuse_not_finite(self, logits: Float[Tensor, "kept width"], side: Side, example: int, kept: Kept) -> None:
        wrong = ~logits[:, :1].isfinite().all(-1)
        if bool(wrong.any()):
            batch, position = self.group.batch(side), kept[example][int(wrong.nonzero()[0])]
            token = int(batch.tokens[example, position])
            raise NumericsError(not_finite(self.plan.model, "the logits", batch.name(example), position, token))


def unchanged_places(
    values: ReplacementValues, sites: Mapping[str, Site], recorded: Mapping[str, Tensor], n_examples: int
) -> dict[Place, Bool[np.ndarray, "example position *head"]]:
    """Say by place where what is written is what is there, wherever something is the same; fetched in one go.

    Args:
        values: what edits write.
        sites: those where they write, by name.
        recorded: the activations of the unedited runs, by hook name, those of the edited prompts first.
        n_examples: how many of these there are.
    """
    # What a change leaves is known only once the run is there to be changed.
    if values.change is not None or values.samples != 1:
        return {}
    equal: dict[Place, Tensor] = {}
    for (name, layer), written in values.by_site.items():
        site = sites[name]
        current = recorded.get(site.hook_name(layer))
        if current is not None and not (site.has_keys or site.has_units):
            current = site.read(current[:n_examples])
            if current.shape == written.shape:
                # Exactly equal, not close: what is not run must be what would have come out, to the bit.
                equal[name, layer] = (current == written).all(-1)
    if not equal:
        return {}
    # One copy for all places: each copy waits for the device.
    fetched = torch.cat([one.flatten() for one in equal.values()]).cpu().split([one.numel() for one in equal.values()])
    by_place = {place: one.view(equal[place].shape).numpy() for place, one in zip(equal, fetched, strict=True)}
    return {place: same for place, same in by_place.items() if same.any()}


def noop_runs(
    variants: Variants, same: Mapping[Place, Bool[np.ndarray, "example position *head"]]
) -> Bool[np.ndarray, " _"]:
    """Say which runs are as if nothing were edited, given where that is so by place."""
    is_noop = np.zeros(len(variants), dtype=bool)
    order = np.argsort(variants.which, kind="stable")
    ends = np.searchsorted(variants.which[order], np.arange(len(variants.changes)), side="right")
    for runs, change in zip(np.split(order, ends[:-1]), variants.changes, strict=True):
        if same and _may_be_noop(change, same):
            parts = [
                _at(same[edit.site.name, layer], edit)[variants.example[runs]].reshape(len(runs), -1)
                for edit in change.edits
                if edit.writes
                for layer in edit.layers
            ]
            is_noop[runs] = np.concatenate(parts, 1).all(1)
    follows = variants.trunk >= 0
    # Nested cells share their trunk's run: neither it nor what follows it can be left out by itself.
    is_noop[follows] = False
    is_noop[variants.trunk[follows]] = False
    return is_noop


def _may_be_noop(change: Variant, same: Mapping[Place, object]) -> bool:
    """Whether every edit writes the values of its own layers, at places where some are the same."""
    return bool(change.edits) and all(
        edit.writes
        and edit.units is None
        and all((edit.site.name, layer) in same and edit.source_of(layer) == layer for layer in edit.layers)
        for edit in change.edits
    )


def _at(same: Bool[np.ndarray, "example position *head"], edit: Edit) -> Bool[np.ndarray, "example _ *_"]:
    """Take the positions and heads that an edit writes."""
    same = same if edit.positions is None else same[:, list(edit.positions)]
    return same if edit.heads is None else same[:, :, list(edit.heads)]
