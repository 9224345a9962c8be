"""The cells of a sweep as they are measured: on which example each is, and what is edited and how the table calls it.

What cells of many examples have in common is held once, as a `Kind`; which cell is of which example and kind are two
arrays. A sweep of 24 places over 500 prompts is 24 kinds and 12,000 cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from headwater.models.memory import refuse_too_large
from headwater.patching.variants import NEVER, Edit

CELL_BYTES = 800
"""What a cell takes from its first label to its row of the table."""


@dataclass(frozen=True, eq=False)
class Kind:
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
    kind: Kind

    @property
    def labels(self) -> Mapping[str, Any]:
        """Its coordinates, as they stand in the table."""
        return self.kind.labels

    @property
    def edits(self) -> tuple[Edit, ...]:
        """What is edited."""
        return self.kind.edits


@dataclass(frozen=True, eq=False)
class Cells:
    """Many cells, those of an example side by side and the examples in order."""

    kinds: tuple[Kind, ...]
    """Those that cells may be of."""
    example: Int[np.ndarray, " cell"]
    kind: Int[np.ndarray, " cell"]
    """Which of `kinds` each cell is of."""

    @classmethod
    def of(cls, by_example: Iterable[tuple[int, Sequence[Kind]]]) -> Cells:
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
    def unedited(cls, n_examples: int) -> Cells:
        """Return a cell without edits for each example."""
        return cls((Kind({}, ()),), np.arange(n_examples), np.zeros(n_examples, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.example)

    def __getitem__(self, index: int) -> Cell:
        return Cell(int(self.example[index]), self.kinds[self.kind[index]])

    def __iter__(self) -> Iterator[Cell]:
        return (self[index] for index in range(len(self)))

    def part(self, cells: range) -> Cells:
        """Return cells that stand side by side."""
        return Cells(self.kinds, self.example[cells.start : cells.stop], self.kind[cells.start : cells.stop])

    def among(self, examples: range) -> range:
        """Return which cells are of examples in a row."""
        first, last = np.searchsorted(self.example, [examples.start, examples.stop])
        return range(int(first), int(last))

    @cached_property
    def used(self) -> list[Kind]:
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
