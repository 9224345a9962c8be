"""What a sweep edits and reads: edits, the table of cells that they make, and the variants of runs that are measured.

    Edit          writes an activation at a site, over layers, positions, heads; or severs attention edges
    CellTemplate  the edits of one cell with its labels, for all examples that have it alike
    CellTable     which example and template each cell is: a sweep of 24 places over 500 prompts is 24 templates
    Variant       what is run for a cell: its edits, from where on, and what is read afterwards
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


@dataclass(frozen=True)
class Replace:
    """Write other values at a site."""

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
    """Before this position the values are those of the run itself, so that writing them changes nothing."""
    source_layer: int | None = None
    """The layer whose values are written; None is the layer itself."""
    sample: int = 0
    """Which draw, of values that are drawn several times."""

    def read_at(self, layer: int) -> int:
        """Return the layer whose values are written at a layer."""
        return layer if self.source_layer is None else self.source_layer

    @property
    def stage(self) -> Stage | None:
        """How far into the block the edit acts; None where the site does not say."""
        return self.site.stage

    @cached_property
    def first_position(self) -> int:
        """The first position whose state can change; beyond any prompt if none can."""
        first = self.since if self.keys is None else max(self.since, min(self.keys))
        return first if self.positions is None else min((p for p in self.positions if p >= first), default=NEVER)


@dataclass(frozen=True, eq=False)
class Cut:
    """Sever attention edges, before the softmax (`zero=False`: the other weights grow) or after it."""

    layers: range
    edges: Bool[Tensor, "query key"]
    """True where query must not read key."""
    heads: tuple[int, ...] | None = None
    zero: bool = False
    first_position: int = 0
    """The first position whose state can change: the first query that loses a key, or one before it."""

    stage = Stage.ATTENTION


Edit = Replace | Cut
Indices: TypeAlias = Int[np.ndarray, "_"]
Place: TypeAlias = tuple[str, int]
"""A site and a layer."""
Reading: TypeAlias = Place
"""Where a metric reads; `("logits", n_layers)` for the logits."""
Deliver: TypeAlias = Callable[[Reading, Indices, Tensor], None]
"""Takes a reading, the variants read and their values, `variant kept width`."""


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
    def first_position(self) -> int:
        """Where the recomputed stretch begins: at the first change, or at the first position read if earlier."""
        if self.whole is not None:
            return 0
        changed = self.start[1] if self.start else min(edit.first_position for edit in self.edits)
        return min(changed, self.kept[0])

    @property
    def stop_position(self) -> int:
        """Where the recomputed stretch ends: after the last position that is read, or that one of these reads."""
        return self.kept[-1] + 1 if self.whole is None else self.whole

    @cached_property
    def is_felt(self) -> bool:
        """Whether a position that is read can see any edit."""
        if self.whole is not None:
            return True
        changed = self.start[1] if self.start else min(edit.first_position for edit in self.edits)
        return changed <= self.kept[-1]

    def replacing(self, site: Site | str, layer: int) -> list[Replace]:
        """Return the edits that write at a site of a layer."""
        name = site if isinstance(site, str) else site.name
        return [e for e in self.edits if isinstance(e, Replace) and e.site.name == name and layer in e.layers]

    def cutting(self, layer: int, zero: bool) -> list[Cut]:
        """Return the edits that sever edges of a layer, before the softmax or after it."""
        return [e for e in self.edits if isinstance(e, Cut) and e.zero == zero and layer in e.layers]


@dataclass(frozen=True, eq=False)
class Variants:
    """The runs of a wave: an example each, and one of a few changes."""

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
    def felt(self) -> Bool[np.ndarray, " _"]:
        """By run: whether what is read can be another than without its edits."""
        felt = self.each(lambda change: change.is_felt).astype(bool)
        return felt if self.noop is None else felt & ~self.noop

    def each(self, number: Callable[[Variant], int]) -> Indices:
        """Return a number of each run's change, by run."""
        return np.array([number(change) for change in self.changes], dtype=np.int64)[self.which]


def padded_kept(changes: Sequence[Variant]) -> tuple[Int[np.ndarray, "_ kept"], Bool[np.ndarray, "_ kept"]]:
    """Return the positions that are read of each change, the last one again where others read more; and which count."""
    most = max((len(change.kept) for change in changes), default=0)
    positions = np.array([(*change.kept, *change.kept[-1:] * (most - len(change.kept))) for change in changes])
    counts = np.array([len(change.kept) for change in changes])
    return positions, np.arange(most) < counts[:, None]


CELL_BYTES = 800
"""What a cell takes from its first label to its row of the table."""


@dataclass(frozen=True, eq=False)
class CellTemplate:
    """What cells of several examples may have in common."""

    labels: Mapping[str, Any]
    """Their coordinates, as they stand in the table."""
    edits: tuple[Edit, ...]
    family: tuple[Any, ...] | None = None
    """Cells of one family (adjacent, of one example) begin at one layer and end ever later: they share a trunk."""
    token_at: tuple[int, ...] | None = None
    """The positions whose tokens the table shows."""

    @cached_property
    def first_position(self) -> int:
        """The first position whose state can change."""
        return min((edit.first_position for edit in self.edits), default=NEVER)


@dataclass(frozen=True, eq=False)
class Cell:
    """One cell of the sweep on one example."""

    example: int
    kind: CellTemplate

    @property
    def labels(self) -> Mapping[str, Any]:
        """Its coordinates, as they stand in the table."""
        return self.kind.labels

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What is edited."""
        return self.kind.edits


@dataclass(frozen=True, eq=False)
class CellTable:
    """Many cells, those of an example side by side and the examples in order."""

    kinds: tuple[CellTemplate, ...]
    """Those that cells may be of."""
    example: Int[np.ndarray, " cell"]
    kind: Int[np.ndarray, " cell"]
    """Which of `kinds` each cell is of."""

    @classmethod
    def of(cls, by_example: Iterable[tuple[int, Sequence[CellTemplate]]]) -> CellTable:
        """Put the cells of each example in a row."""
        rows = list(by_example)
        listed = {id(own): own for _, own in rows}
        kinds = {id(kind): kind for own in listed.values() for kind in own}
        number = {one: i for i, one in enumerate(kinds)}
        numbers = {one: np.array([number[id(kind)] for kind in own], dtype=np.int64) for one, own in listed.items()}
        kind = np.concatenate([np.zeros(0, dtype=np.int64), *(numbers[id(own)] for _, own in rows)])
        example = np.repeat(np.array([one for one, _ in rows], dtype=np.int64), [len(own) for _, own in rows])
        return cls(tuple(kinds.values()), example, kind)

    @classmethod
    def unedited(cls, n_examples: int) -> CellTable:
        """Return a cell without edits for each example."""
        return cls((CellTemplate({}, ()),), np.arange(n_examples), np.zeros(n_examples, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.example)

    def __getitem__(self, index: int) -> Cell:
        return Cell(int(self.example[index]), self.kinds[self.kind[index]])

    def __iter__(self) -> Iterator[Cell]:
        return (self[index] for index in range(len(self)))

    def part(self, cells: range) -> CellTable:
        """Return cells that stand side by side."""
        return CellTable(self.kinds, self.example[cells.start : cells.stop], self.kind[cells.start : cells.stop])

    def among(self, examples: range) -> range:
        """Return which cells are of examples in a row."""
        first, last = np.searchsorted(self.example, [examples.start, examples.stop])
        return range(int(first), int(last))

    @cached_property
    def used(self) -> list[CellTemplate]:
        """The kinds of which there is a cell."""
        return [self.kinds[number] for number in np.unique(self.kind)]

    @cached_property
    def first_position(self) -> Int[np.ndarray, " cell"]:
        """The first position of each cell whose state can change."""
        return np.array([kind.first_position for kind in self.kinds], dtype=np.int64)[self.kind]


def refuse_too_many_cells(n_cells: int) -> None:
    """Refuse a sweep whose very list of cells would not fit.

    Raises:
        InputError: with the figures.
    """
    advice = "Sweep over fewer axes (over=), layers, heads, positions or prompts."
    refuse_too_large(f"The list of this sweep's {n_cells:,} cells", n_cells * CELL_BYTES, torch.device("cpu"), advice)
