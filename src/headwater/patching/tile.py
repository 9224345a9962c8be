"""Rows side by side, so that one call of a block serves them all.

A row is a stretch of one example's positions. Norms, MLPs and the residual stream take the tokens of all rows end to
end (`token`), without padding; attention takes them as `row position`, padded to the longest row, with the recorded
keys of the positions before the longest prefix in front. Which rows there are follows from the variants; which of them
stand side by side, from what they take as recorded, and their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.kernels.devices import sent
from headwater.models.blocks import Recording, SharedPrefix
from headwater.models.sites import Stage
from headwater.patching.variants import Indices, Variants

PREFIX_SHARE = 4
"""A key before a row counts as this part of a token of its own."""
PADDING_SHARE = 16
"""At most this part of a large tile is padding."""


@dataclass(frozen=True, eq=False)
class Lanes:
    """Rows on their way down the layers, a number of each by row."""

    variant: Indices
    which: Indices
    """Which change its variant is."""
    example: Indices
    start: Indices
    """Its first position."""
    length: Indices
    offset: Indices
    """Where its tokens begin among those of all rows."""
    layer: Indices
    """Where it joins."""
    stage: Indices
    """How far into that layer."""

    def __len__(self) -> int:
        return len(self.variant)

    def __getitem__(self, rows: slice | Indices | Bool[np.ndarray, " _"]) -> Lanes:
        return Lanes(*(getattr(self, field.name)[rows] for field in fields(self)))

    def stage_in(self, layer: int) -> Indices:
        """How far into a layer each is as it was recorded."""
        return np.where(self.layer == layer, self.stage, int(Stage.BLOCK_INPUT))


class Tile:
    """Some rows, and where their tokens lie; that is found on the host, so that no device is waited for."""

    def __init__(self, rows: Lanes, device: torch.device):
        self.rows = rows
        ends = np.cumsum(rows.length)
        self.begins, self.n_tokens = ends - rows.length, int(ends[-1])
        """Where each row's tokens begin among those of the tile, and how many there are."""
        self.width = int(rows.length.max())
        """The tokens of the longest row."""
        known = np.stack([rows.start, rows.length, rows.example])
        self.starts, self.lengths, self.examples = sent(known, device)
        self._columns = torch.arange(self.width, device=device)

    @cached_property
    def held(self) -> Bool[Tensor, "row position"]:
        """Which places hold a token; the others are padding."""
        return self._columns < self.lengths[:, None]

    @cached_property
    def positions(self) -> Int[Tensor, "row position"]:
        """The position of each token; padding repeats the row's last."""
        return self.starts[:, None] + self._within

    @cached_property
    def places(self) -> Int[Tensor, " token"]:
        """Where each token lies among those of all rows."""
        return self._each_token(self.rows.offset)

    @cached_property
    def key_positions(self) -> Int[Tensor, "row key"]:
        """The position of each key, recorded ones first; -1 where a key is none of the row's."""
        before = torch.arange(self.prefix_length, device=self.starts.device)
        before = torch.where(before < self.starts[:, None], before, -1)
        return torch.cat([before, torch.where(self.held, self.positions, -1)], 1)

    @property
    def prefix_length(self) -> int:
        """How many recorded keys stand before the rows' own."""
        return int(self.rows.start.max())

    @property
    def _is_full(self) -> bool:
        """Whether no place is padding."""
        return self.n_tokens == len(self.rows) * self.width

    def padded(self, tokens: Float[Tensor, "token d"]) -> Float[Tensor, "row position d"]:
        """Lay tokens out as rows of one length."""
        if self._is_full:
            return tokens.view(len(self.rows), self.width, -1)
        begins = sent(self.begins, tokens.device)
        return tokens[begins[:, None] + self._within]

    def packed(self, rows: Float[Tensor, "row position d"]) -> Float[Tensor, "token d"]:
        """Lay rows end to end again."""
        return rows.flatten(0, 1) if self._is_full else rows.flatten(0, 1)[self._places_padded]

    def recorded(self, activation: Tensor) -> Tensor:
        """Take what a recorded activation, `example position ...`, holds at each token."""
        examples, positions = self._recorded_at
        return activation[examples, positions]

    def prefix(self, recording: Recording, layer: int) -> SharedPrefix | None:
        """Return the recorded keys and values of the positions before the rows; None when there are none."""
        if self.prefix_length == 0:
            return None
        example = int(self.rows.example[0])
        others = bool((self.rows.example != example).any())
        shared = []
        for cache in (recording.keys[layer], recording.values[layer]):
            before = cache[:, :, : self.prefix_length]
            one = before[example : example + 1].expand(len(self.rows), -1, -1, -1)
            shared.append(before[self.examples] if others else one)
        return SharedPrefix(*shared)

    @cached_property
    def _places_padded(self) -> Int[Tensor, " token"]:
        """Where each token lies among the places of padded rows."""
        return self._each_token(np.arange(len(self.rows)) * self.width)

    @cached_property
    def _recorded_at(self) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"]]:
        """Example and position of each token."""
        examples = sent(np.repeat(self.rows.example, self.rows.length), self.starts.device)
        return examples, self._each_token(self.rows.start)

    def _each_token(self, first: Indices) -> Int[Tensor, " token"]:
        """Return a number for each token: its row's, and one more for each token before it in the row."""
        numbers = np.repeat(first - self.begins, self.rows.length) + np.arange(self.n_tokens)
        return sent(numbers, self.starts.device)

    @cached_property
    def _within(self) -> Int[Tensor, "row position"]:
        return torch.minimum(self._columns, self.lengths[:, None] - 1)


def rows_of(variants: Variants) -> Lanes:
    """Return the rows of a walk in the order in which they join; a variant that never leaves its trunk has none."""
    followed = variants.trunk
    felt, stop = variants.felt, variants.each(lambda one: one.stop_layer)
    read = variants.each(lambda one: max((layer for _, layer in one.readings), default=-1))
    leaves = (followed >= 0) & (stop < stop[followed]) & (read >= stop)
    index = np.flatnonzero(felt & ((followed < 0) | leaves))
    alone = followed[index] < 0
    layer = np.where(alone, variants.each(lambda one: one.first_layer if one.is_felt else 0)[index], stop[index])
    entered = variants.each(lambda one: int(one.stage) if one.is_felt else 0)[index]
    stage = np.where(alone, entered, int(Stage.BLOCK_INPUT))
    start = variants.each(lambda one: one.first_position)[index]
    length = variants.each(lambda one: one.stop_position)[index] - start
    order = np.lexsort((index, start, stage, layer))
    index, length = index[order], length[order]
    offset = np.cumsum(length) - length
    joined = (start[order], length, offset, layer[order], stage[order])
    return Lanes(index, variants.which[index], variants.example[index], *joined)


def tiled(rows: Lanes, taken: Indices, tile_tokens: Callable[[], int]) -> Iterator[Lanes]:
    """Cut rows into tiles that take the same as recorded and are of similar length.

    Args:
        rows: all rows of a layer.
        taken: by row, a number for what of the layer it takes as it was recorded.
        tile_tokens: the size of the next tile; it shrinks where memory runs out.
    """
    for same in np.unique(taken):
        waiting = rows[np.flatnonzero(taken == same)]
        waiting = waiting[np.lexsort((waiting.start, waiting.length))[::-1]]
        while len(waiting):
            n = _how_many_fit(waiting, tile_tokens())
            yield waiting[:n]
            waiting = waiting[n:]


def _how_many_fit(rows: Lanes, tile_tokens: int) -> int:
    """Return how many rows, the longest first, go into a tile: within its size, with little padding if it is large."""
    length, start = rows.length[: max(1, tile_tokens)], rows.start[: max(1, tile_tokens)]
    width, count = int(length[0]), np.arange(1, len(length) + 1)
    size = count * (width + start // PREFIX_SHARE)
    padding = count * width - np.cumsum(length)
    fits = ((padding <= count * width // PADDING_SHARE) | (size <= tile_tokens // 8)) & (size <= tile_tokens)
    fits[0] = True
    return len(fits) if fits.all() else int(fits.argmin())
