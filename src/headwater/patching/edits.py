"""What a sweep edits and reads: edits, the table of cells that they make, and the variants of runs that are measured.

    Edit          writes an activation at a site, over layers, positions, heads; or severs attention edges
    CellTemplate  the edits of a cell with its labels, shared by all examples that have the same
    CellTable     which example and template each cell is: a sweep of 24 places over 500 prompts is 24 templates
    Variant       what is run for a cell: its edits, from where on it is recomputed, and what is read afterwards
    Variants      the variants of one walk down the layers

Both engines, whole runs and the walk, take the same variants and write them by `headwater.patching.writing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.models.memory import refuse_too_large
from headwater.models.sites import Site, Stage

LOGITS = "logits"
NEVER = 1 << 40
"""A position that no prompt has."""
CELL_BYTES = 800
"""What a cell takes from its first label to its row of the table."""

Indices: TypeAlias = Int[np.ndarray, "_"]
Place: TypeAlias = tuple[str, int]
"""A site and a layer."""
Reading: TypeAlias = Place
"""Where a metric reads; `("logits", n_layers)` for the logits."""
Deliver: TypeAlias = Callable[[Reading, Indices, Tensor], None]
"""Takes a reading, the variants read and their values, `variant kept width`."""


@dataclass(frozen=True)
class ReplacementSpec:
    """Values with what they need: what `hw.add`, `hw.scale`, `hw.noise`, `hw.mean` and `hw.resample` return."""

    kind: str
    """The name of a kind of values."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Edit:
    """One change to a run: other values at a site, or (a knockout) attention edges that are severed in its pattern."""

    site: Site
    layers: range
    positions: tuple[int, ...] | None = None
    """Token positions (query positions of a pattern); None is all of them."""
    heads: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    """Key positions of a pattern; None is all of them."""
    units: tuple[int, ...] | None = None
    """Of the last axis, such as neurons; None is all of it."""
    since: int = 0
    """Before this position nothing changes: the values are those of the run itself, or no query loses a key."""
    source_layer: int | None = None
    """The layer whose values are written; None is the layer itself."""
    sample: int = 0
    """Which draw, of values that are drawn several times."""
    severed: Bool[Tensor, "query key"] | None = None
    """In place of values: True where query must not read key."""
    after_softmax: bool = False
    """Of severed edges: set their weights to 0, rather than their scores to minus infinity (the others then grow)."""

    @property
    def writes(self) -> bool:
        """Whether it writes values, rather than severing edges."""
        return self.severed is None

    @property
    def edges(self) -> Bool[Tensor, "query key"]:
        """The edges that are severed, of an edit that severs any."""
        assert self.severed is not None
        return self.severed

    @property
    def stage(self) -> Stage | None:
        """How far into the block the edit acts; None where the site does not say."""
        return self.site.stage if self.writes else Stage.ATTENTION

    def source_of(self, layer: int) -> int:
        """Return the layer whose values are written at a layer."""
        return layer if self.source_layer is None else self.source_layer

    @cached_property
    def first_position(self) -> int:
        """The first position whose state can change; beyond any prompt if none can."""
        # A query before the first edited key cannot see it, so that its weights do not change.
        first = self.since if self.keys is None else max(self.since, min(self.keys))
        return first if self.positions is None else min((p for p in self.positions if p >= first), default=NEVER)


@dataclass(frozen=True, eq=False)
class CellTemplate:
    """What cells of several examples may have in common."""

    labels: Mapping[str, Any]
    """Their coordinates, as they are in the table."""
    edits: tuple[Edit, ...]
    nested: tuple[Any, ...] | None = None
    """Cells of one example with the same key here begin at one layer and end ever later: each contains those before."""
    token_at: tuple[int, ...] | None = None
    """The positions whose tokens the table shows."""

    @cached_property
    def first_position(self) -> int:
        """The first position whose state can change."""
        return min((edit.first_position for edit in self.edits), default=NEVER)


@dataclass(frozen=True, eq=False)
class CellTable:
    """Many cells: those of an example are adjacent, and the examples in order."""

    templates: tuple[CellTemplate, ...]
    example: Indices
    template: Indices
    """By cell: which of `templates` it is."""

    @classmethod
    def of(cls, by_example: Iterable[tuple[int, Sequence[CellTemplate]]]) -> CellTable:
        """Put the cells of each example in a row."""
        # A list that several examples share is numbered once: 500 prompts of one shape cost as much as one.
        rows = list(by_example)
        lists = {id(some): some for _, some in rows}
        templates = {id(template): template for some in lists.values() for template in some}
        number = {one: i for i, one in enumerate(templates)}
        numbers = {one: np.array([number[id(template)] for template in some], int) for one, some in lists.items()}
        template = np.concatenate([np.zeros(0, dtype=np.int64), *(numbers[id(some)] for _, some in rows)])
        example = np.repeat(np.array([one for one, _ in rows], dtype=np.int64), [len(some) for _, some in rows])
        return cls(tuple(templates.values()), example, template)

    @classmethod
    def unedited(cls, n_examples: int) -> CellTable:
        """Return a cell without edits for each example."""
        return cls((CellTemplate({}, ()),), np.arange(n_examples), np.zeros(n_examples, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.example)

    def __iter__(self) -> Iterator[tuple[int, CellTemplate]]:
        return ((int(i), self.templates[t]) for i, t in zip(self.example, self.template, strict=True))

    def part(self, cells: range) -> CellTable:
        """Return adjacent cells."""
        return CellTable(
            self.templates, self.example[cells.start : cells.stop], self.template[cells.start : cells.stop]
        )

    def among(self, examples: range) -> range:
        """Return which cells are of examples in a row."""
        first, last = np.searchsorted(self.example, [examples.start, examples.stop])
        return range(int(first), int(last))

    @cached_property
    def used(self) -> list[CellTemplate]:
        """The templates of which there is a cell."""
        return [self.templates[number] for number in np.unique(self.template)]

    @cached_property
    def first_position(self) -> Int[np.ndarray, " cell"]:
        """By cell: the first position whose state can change."""
        return np.array([one.first_position for one in self.templates], dtype=np.int64)[self.template]

    def longest_of_nested(self) -> Int[np.ndarray, " cell"]:
        """By cell: the last and longest of the cells that it is nested in; -1 for that one, and for all others."""
        longest = np.full(len(self), -1)
        # From the last cell back: the first one met of each nest is its longest.
        is_nested = np.array([one.nested is not None for one in self.templates], dtype=bool)[self.template]
        last: dict[tuple[Any, ...], int] = {}
        # A loop over nested cells alone: sweeps without cumulative windows have none.
        for i in np.flatnonzero(is_nested)[::-1].tolist():
            longest_one = last.setdefault((int(self.example[i]), self.templates[self.template[i]].nested), i)
            longest[i] = longest_one if longest_one != i else -1
        return longest


@dataclass(frozen=True, eq=False)
class Variant:
    """Some edits of a run, of as many examples as have them."""

    edits: tuple[Edit, ...]
    kept: tuple[int, ...]
    """The positions that metrics read, ascending."""
    readings: tuple[Reading, ...]
    start: tuple[int, int] | None = None
    """Overrides the layer and position from which the run is recomputed."""
    whole: int | None = None
    """Where attention looks ahead, the length of the prompt: an edit anywhere reaches all of it."""

    @cached_property
    def first_layer(self) -> int:
        """The layer of the first edit."""
        return self.start[0] if self.start else min(edit.layers.start for edit in self.edits)

    @cached_property
    def stage(self) -> Stage:
        """How far into its first layer the first edit acts."""
        if self.start:
            return Stage.BLOCK_INPUT
        # Later layers are computed anyway; only the stages of the first one say what can be taken as recorded.
        stages = {edit.stage for edit in self.edits if edit.layers.start == self.first_layer and edit.stage is not None}
        first = min(stages)
        if Stage.NEURONS in stages and first < Stage.NEURONS:  # within both parts of the block: both are computed
            return min(first, Stage.PATTERN)
        return first

    @property
    def stop_layer(self) -> int:
        """The layer after the last edit."""
        return max((edit.layers.stop for edit in self.edits), default=0)

    @cached_property
    def first_change(self) -> int:
        """The first position whose state an edit can change."""
        return self.start[1] if self.start else min(edit.first_position for edit in self.edits)

    @cached_property
    def first_position(self) -> int:
        """Where the recomputed positions begin: at the first change, or at the first position read if earlier."""
        # Positions between the first read and the first change are recomputed too: a row is one stretch of tokens.
        return 0 if self.whole is not None else min(self.first_change, self.kept[0])

    @property
    def stop_position(self) -> int:
        """Where the recomputed positions end: after the last that is read, or that one of these reads."""
        return self.kept[-1] + 1 if self.whole is None else self.whole

    @cached_property
    def can_change_output(self) -> bool:
        """Whether a position that is read can see any edit: where not, the effect is 0 and nothing is run."""
        return self.whole is not None or self.first_change <= self.kept[-1]

    def writes_at(self, site: Site | str, layer: int) -> list[Edit]:
        """Return the edits that write at a site of a layer."""
        name = site if isinstance(site, str) else site.name
        return [edit for edit in self.edits if edit.writes and edit.site.name == name and layer in edit.layers]

    def severs_in(self, layer: int, after_softmax: bool) -> list[Edit]:
        """Return the edits that sever edges of a layer, before the softmax or after it."""
        cuts = (edit for edit in self.edits if not edit.writes and edit.after_softmax == after_softmax)
        return [edit for edit in cuts if layer in edit.layers]


@dataclass(frozen=True, eq=False)
class Variants:
    """The runs of a walk: an example each, and one of a few changes."""

    changes: tuple[Variant, ...]
    which: Indices
    """By run: which of the changes."""
    example: Indices
    """By run: which example of the group."""
    trunk: Indices
    """By run: another that has these edits and, in later layers, more of them; -1 where it follows none."""
    noop: Bool[np.ndarray, " _"] | None = None
    """By run: whether it is known to be as if nothing were edited."""

    @classmethod
    def one(cls, change: Variant, example: int) -> Variants:
        """Return a single run."""
        return cls((change,), np.array([0]), np.array([example]), np.array([-1]))

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> Variant:
        return self.changes[self.which[index]]

    @property
    def can_change_output(self) -> Bool[np.ndarray, " _"]:
        """By run: whether what is read can differ from what it is without the edits."""
        can = self.each(lambda change: change.can_change_output).astype(bool)
        return can if self.noop is None else can & ~self.noop

    def each(self, number: Callable[[Variant], int]) -> Indices:
        """Return a number of each run's change, by run."""
        return np.array([number(change) for change in self.changes], dtype=np.int64)[self.which]


def padded_kept(changes: Sequence[Variant]) -> tuple[Int[np.ndarray, "_ kept"], Bool[np.ndarray, "_ kept"]]:
    """Return the positions that are read of each change, the last one again where others read more; and which count."""
    most = max((len(change.kept) for change in changes), default=0)
    # Padded by repeating, so that an index of padding is a valid one.
    positions = np.array([(*change.kept, *change.kept[-1:] * (most - len(change.kept))) for change in changes])
    counts = np.array([len(change.kept) for change in changes])
    return positions, np.arange(most) < counts[:, None]


def refuse_too_many_cells(n_cells: int) -> None:
    """Refuse a sweep whose very list of cells would not fit in memory."""
    advice = "Sweep over fewer axes (over=), layers, heads, positions or prompts."
    refuse_too_large(f"The list of this sweep's {n_cells:,} cells", n_cells * CELL_BYTES, torch.device("cpu"), advice)
