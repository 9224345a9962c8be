"""The three ways to measure the cells of a group of examples; each is one class with one method, and each is whole.

    wavefront    one recorded run, then all variants of a wave in one walk down the layers (`headwater.patching.walk`)
    whole runs   ordinary forwards with hooks, many variants in each: what the walk must equal, what serves every model
    gradients    no variant is run: attribution patching, in `headwater.patching.attribution`

A cell that no read position can feel has effect 0, without a run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, NoReturn

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.errors import NumericsError
from headwater.kernels.devices import sent, sent_together
from headwater.models.blocks import Blocks, Recording
from headwater.models.checks import not_finite
from headwater.models.hooked import HookedModel
from headwater.models.memory import in_halves, is_out_of_memory
from headwater.models.positions import Prompt
from headwater.models.sites import SITES, Stage, main_site, taken_as_recorded
from headwater.models.steppable import cannot_step
from headwater.models.tokens import Batch
from headwater.patching.forwards import capture, deepest, run_edited, run_variants, visible_keys
from headwater.patching.idle import idle, same_values
from headwater.patching.plan import Group, Kept, Plan, columns_of
from headwater.patching.readout import Measured, Readout, Reads, read_run
from headwater.patching.rows import Values
from headwater.patching.values import Wanted, values_of
from headwater.patching.variants import LOGITS, Deliver, Indices, Place, Variant, Variants
from headwater.patching.walk import NotFiniteError, Walk, not_walked

TILE_TOKENS = {"cpu": 1024, "cuda": 1 << 15}
"""Tokens of a model of the width `WIDTH` given to a sublayer at once; halved when memory runs out."""
WIDTH = 768
TILE_WEIGHTS = 1 << 20
"""At most so many attention weights in a tile that is larger for being of a narrow model."""


def tile_tokens(model: HookedModel, length: int) -> int:
    """Return how many tokens are given to a sublayer at once: of a narrow model more, as a cache holds more of them."""
    usual = TILE_TOKENS.get(model.device.type, TILE_TOKENS["cpu"])
    narrow = usual * WIDTH // model.shape.d_model
    return max(usual, min(narrow, TILE_WEIGHTS // (length * model.shape.n_heads)))


class Runner(ABC):
    """The runs of a group of examples: made unedited at once, then edited for any of the group's cells.

    Use inside the model's lock, and inside `torch.inference_mode()` unless it needs a graph.
    """

    name: ClassVar[str]
    needs_graph: ClassVar[bool]

    @abstractmethod
    def __init__(self, plan: Plan, examples: range):
        """Make the unedited runs."""

    @abstractmethod
    def measure(self, cells: range) -> Measured:
        """Measure some of the group's cells."""


class CannotStepError(Exception):
    """A model's blocks cannot be stepped through, or what comes of it is not to be trusted; the text is why."""


class Wave(Runner):
    """One recorded run of the prompts of both sides, then one walk down the layers for the cells of a wave.

    Args:
        plan: the sweep.
        examples: whose runs are made.
        also: further activations to record of both sides, by hook name.
        held: where gradients will be taken, by hook name; the first comes before the others.

    Raises:
        CannotStepError: the walk is not for this model; the first time, a row without any edit is sent down, whose
            logits must be those of the plain run.
    """

    name: ClassVar[str] = "wavefront"
    needs_graph: ClassVar[bool] = False

    def __init__(self, plan: Plan, examples: range, also: Iterable[str] = (), held: Sequence[str] = ()):
        self.plan = plan
        if reason := cannot_step(plan.model):
            raise CannotStepError(reason)
        self.group, self.blocks = Group(plan, examples), Blocks(plan.model)
        if reason := not_walked(edit for kind in self.group.kinds for edit in kind.edits):
            raise CannotStepError(reason)
        self._tile = plan.batch_size * max(self.group.lengths) if plan.batch_size else None
        self._answers: Tensor | None = None
        if (answers := plan.only_answers) is not None:
            self._answers = sent(answers[examples.start : examples.stop], plan.model.device)
        self._sides = [plan.base] if plan.other is None else [plan.base, plan.other]
        names = [*state_names(self.group), *self._joined_names(), *_value_names(self.group).values(), *also]
        batch = self.group.batch(*self._sides)
        self._record(batch, names, held)
        if not plan.model.steps_checked:
            if reason := self._distrust(batch):
                raise CannotStepError(reason)
            plan.model.steps_checked = True
            if self.blocks.has_own_steps:  # from now on they record, too: a first call gives the bits of a second
                self._record(batch, names, held)

    def _record(self, batch: Batch, names: Iterable[str], held: Sequence[str]) -> None:
        """Run both sides without edits, and keep what edits write and what is read of the runs."""
        plan, n = self.plan, len(self.group.examples)
        before = self.group.corrupting(*self._sides)
        unembed = not plan.model.steps_checked
        self.recording: Recording = self.blocks.record(batch, names, before, held, unembed=unembed)
        others = {name: activation[n:] for name, activation in self.recording.activations.items()}
        self.values = values_written(self.group, others)
        base = self._read(self.recording.activations, plan.base, self.group.kept)
        other = self._read(others, plan.other, self.group.other_kept) if plan.other is not None else None
        self.readout = Readout(self.group, base, other, self.recording.visible, self._answers)

    def measure(self, cells: range) -> Measured:
        """Measure some of the group's cells, all in one walk."""
        return self.readout.collect(cells, self.run)

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver what is read of variants of the group's runs, all in one walk."""
        tile = self._tile or tile_tokens(self.plan.model, max(self.group.lengths))
        answers = None if self._answers is None else self._answers.repeat(len(self._sides), 1)
        variants = replace(variants, idle=idle(variants, self._same))
        walk = Walk(self.blocks, self.recording, variants, self.values, deliver, tile, answers)
        try:
            walk.run()
        except NotFiniteError as found:
            self._name_not_finite(variants[found.variant], int(variants.example[found.variant]), found.position)
        self._tile = walk.tile_tokens if walk.tile_tokens < tile else self._tile

    @cached_property
    def _same(self) -> dict[Place, Bool[np.ndarray, "example position *head"]]:
        """By place, where what edits write is what stands there in the unedited runs."""
        return same_values(self.values, self.group.sites, self.recording.activations, len(self.group.examples))

    def _distrust(self, batch: Batch) -> str | None:
        """Run the longest prompt, then send it through the blocks; say why that is not to be trusted, if it is not."""
        n_layers, lengths = self.plan.model.shape.n_layers, batch.lengths.tolist()
        longest = lengths.index(max(lengths))
        last = lengths[longest] - 1
        names, before = self._joined_names(), self.group.corrupting_rows([longest], *self._sides)
        recording = self.blocks.record(batch.rows(longest, longest + 1), names, before)
        if set(recording.keys) != set(range(n_layers)):
            return "its attention does not hand its keys and values to a cache"
        logits = recording.last_logits
        assert logits is not None
        expected, answers = logits[0].float(), None
        tolerance = max(1e-4, 8 * torch.finfo(logits.dtype).eps) * float(expected.abs().max())
        if self._answers is not None:
            answers = self._answers[longest % len(self.group.examples)][None]
            expected = expected[answers[0]]
        found: list[Tensor] = []
        middle, whole = (0, last + 1) if self.plan.model.looks_ahead else ((last + 1) // 2, None)
        variants = Variants.one(Variant((), (last,), ((LOGITS, n_layers),), start=(0, middle), whole=whole), 0)
        tile = self._tile or tile_tokens(self.plan.model, last + 1)
        try:
            Walk(
                self.blocks, recording, variants, Values({}), lambda *read: found.append(read[-1][0, 0]), tile, answers
            ).run()
        except NotFiniteError:
            return "stepping through its blocks gives NaN or infinity where the model does not"
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            return (
                f"its blocks cannot be called one by one ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
            )
        difference = float((found[0].detach().float() - expected).abs().max())
        return (
            f"stepping through its blocks changes its logits by {difference:.1e}"
            if not difference <= tolerance
            else None
        )

    def _name_not_finite(self, variant: Variant, example: int, position: int) -> NoReturn:
        """Say in which layer an edited run went wrong, by making it once more as a whole run."""
        model, batch = self.plan.model, self.group.batch(*self._sides).rows(example, example + 1)
        run_edited(model, batch, variant, example, self.values, self.group.corrupting_rows([example], *self._sides))
        token = int(batch.tokens[0, position])
        raise NumericsError(not_finite(model, "the logits", batch.name(0), position, token, edited=True))

    def _joined_names(self) -> list[str]:
        """Name the activations of the base run with which rows start."""
        names = [main_site(Stage.BLOCK_INPUT).hook_name(0)]
        variants = [Variant(kind.edits, (0,), ()) for kind in self.group.kinds if kind.edits]
        for layer, entered in sorted({(variant.first_layer, variant.stage) for variant in variants}):
            sites = [main_site(stage) for stage in taken_as_recorded(entered, self.blocks.parallel)]
            there = [site for site in sites if site.absent(self.plan.model.shape) is None]
            names += [site.hook_name(layer) for site in (main_site(Stage.BLOCK_INPUT), *there)]
        return names

    def _read(self, activations: Mapping[str, Tensor], side: Sequence[Prompt], kept: Kept) -> Reads:
        """Read one side of the recorded run, whose logits were not computed."""
        group, n_layers = self.group, self.plan.model.shape.n_layers
        read = read_run(group, kept, activations)
        if (LOGITS, n_layers) in group.readings:
            residual = activations[main_site(Stage.BLOCK_OUTPUT).hook_name(n_layers - 1)]
            read[LOGITS, n_layers] = self._logits_at(residual, kept)
            if not bool(torch.cat(read[LOGITS, n_layers])[:, :1].isfinite().all()):
                for i, logits in enumerate(read[LOGITS, n_layers]):
                    self._refuse_not_finite(logits, side, i, kept)
        return read

    def _logits_at(self, residual: Float[Tensor, "example position d_model"], kept: Kept) -> list[Tensor]:
        """Return the logits of each example at its positions, `kept d_vocab_or_answer`, of many examples at once."""
        if self._answers is None:
            columns = sent_together([torch.tensor(places) for places in kept], residual.device)
            return [self.logits(residual[i, places], i) for i, places in enumerate(columns)]
        listed = torch.tensor([(i, place) for i, places in enumerate(kept) for place in places])
        row, place = sent(listed, residual.device).unbind(1)
        logits = self.blocks.logits_of(residual[row, place], self._answers[row])
        return list(logits.split([len(places) for places in kept]))

    def logits(self, residual: Float[Tensor, "kept d_model"], example: int) -> Float[Tensor, "kept d_vocab_or_answer"]:
        """Return the logits of states after the last block, of an example's answers where these suffice."""
        if self._answers is None:
            return self.blocks.logits(residual)
        return self.blocks.logits_of(residual, self._answers[example].expand(len(residual), -1))

    def _refuse_not_finite(
        self, logits: Float[Tensor, "kept width"], side: Sequence[Prompt], example: int, kept: Kept
    ) -> None:
        wrong = ~logits[:, :1].isfinite().all(-1)
        if bool(wrong.any()):
            batch, position = self.group.batch(side), kept[example][int(wrong.nonzero()[0])]
            token = int(batch.tokens[example, position])
            raise NumericsError(not_finite(self.plan.model, "the logits", batch.name(example), position, token))


class Whole(Runner):
    """One forward of each side, then forwards of whole prompts, a cell in each row."""

    name: ClassVar[str] = "whole runs"
    needs_graph: ClassVar[bool] = False

    def __init__(self, plan: Plan, examples: range):
        self.plan, self.group = plan, Group(plan, examples)
        group, model = self.group, plan.model
        self._prompts = group.batch(plan.base)
        before = group.corrupting(plan.base)
        captured = capture(model, self._prompts, state_names(group), columns_of(group.kept), before)
        base = read_run(group, group.kept, *captured)
        longest = self._prompts.rows(group.longest, group.longest + 1)
        visible = visible_keys(model, longest, group.cut_layers) if group.cut_layers else {}
        others, other = other_run(group)
        self.values = values_written(group, others)
        self.readout = Readout(group, base, other, visible)
        length = max(group.lengths)
        self.at_once = plan.batch_size or max(1, tile_tokens(model, length) // length)
        """How many rows a forward has: as many tokens as a tile of the walk."""

    def measure(self, cells: range) -> Measured:
        """Measure some of the group's cells, many in each forward."""
        return self.readout.collect(cells, self.run)

    def run(self, variants: Variants, deliver: Deliver) -> None:
        """Deliver what is read of variants of the group's runs, `at_once` of them in a forward.

        Rows of a forward read the same positions of as deep a layer, so that no logits are made that nobody reads.
        """
        alike: dict[tuple[object, ...], list[int]] = {}
        keys = [(change.kept, deepest(change), change.whole) for change in variants.changes]
        for index in np.flatnonzero(variants.each(lambda change: change.is_felt)).tolist():
            alike.setdefault(keys[variants.which[index]], []).append(index)
        for indices in alike.values():
            indices.sort(key=lambda index: self.group.lengths[variants.example[index]])
            while indices:
                rows, indices = np.array(indices[: self.at_once]), indices[self.at_once :]
                parts = in_halves(rows, lambda part: self._forward(variants, part, deliver))
                self.at_once = max(1, self.at_once // len(parts))

    def _forward(self, variants: Variants, indices: Indices, deliver: Deliver) -> None:
        """Deliver what is read of some variants, made in one forward."""
        examples, changes = variants.example[indices].tolist(), [variants[index] for index in indices.tolist()]
        before = self.group.corrupting_rows(examples, self.plan.base)
        prompts = self._prompts.take(examples)
        for reading, read in run_variants(self.plan.model, prompts, changes, examples, self.values, before).items():
            deliver(reading, indices[list(read)], torch.stack(list(read.values())))


ENGINES: Mapping[str, type[Runner]] = {"auto": Wave, "whole runs": Whole}
"""What measures cells, by the option `engine`: a walk down the layers where the model allows it, or whole runs."""


def state_names(group: Group) -> list[str]:
    """Name the activations that something reads."""
    return [SITES[site].hook_name(layer) for site, layer in group.readings if site != LOGITS]


def _value_names(group: Group) -> dict[Place, str]:
    """Name the other run's activations that values are made of."""
    source = group.plan.source
    if source is None or not source.takes_other_run:
        return {}
    return {(site, layer): group.sites[site].hook_name(layer) for site, layer in group.sources}


def other_run(group: Group) -> tuple[Mapping[str, Tensor], Reads | None]:
    """Run the other prompt of each pair, and keep what values are made of."""
    plan = group.plan
    if plan.other is None:
        return {}, None
    names = [*state_names(group), *_value_names(group).values()]
    kept, before = columns_of(group.other_kept), group.corrupting(plan.other)
    activations, logits = capture(plan.model, group.batch(plan.other), names, kept, before)
    return activations, read_run(group, group.other_kept, activations, logits)


def values_written(group: Group, others: Mapping[str, Tensor]) -> Values:
    """Return what edits write, given the other run's activations."""
    plan = group.plan
    if plan.source is None:
        return Values({})
    names, sites = _value_names(group), group.sites
    other = {place: sites[place[0]].read(group.in_base(others[name], sites[place[0]])) for place, name in names.items()}
    wanted = Wanted(plan.model, group.examples, max(group.lengths), tuple(sorted(group.sources)), other, sites)
    return values_of(plan.source, wanted, group.lengths)
