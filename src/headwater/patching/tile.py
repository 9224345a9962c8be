"""Rows side by side, so that one call of a block serves them all.

A row is a stretch of one example's positions. Norms, MLPs and the residual stream take the tokens of all rows end to
end (`token`), without padding; attention takes them as `row position`, padded to the longest row, with the recorded
keys of the positions before the longest prefix in front. Which rows there are follows from the variants; which of them
stand side by side, from what they take as recorded, and their lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.models.blocks import Recording, SharedPrefix
from headwater.models.sites import Stage
from headwater.patching.variants import Variant

PREFIX_SHARE = 4
"""A key before a row counts as this part of a token of its own."""
PADDING_SHARE = 16
"""At most this part of a large tile is padding."""


@dataclass(frozen=True)
class Row:
    """One variant on its way down the layers."""

    variant: int
    example: int
    start: int
    """Its first position."""
    length: int
    offset: int
    """Where its tokens begin among those of all rows."""
    layer: int
    """Where it joins, and how far into that layer."""
    stage: Stage

    def stage_in(self, layer: int) -> Stage:
        """How far into a layer it is as it was recorded."""
        return self.stage if self.layer == layer else Stage.BLOCK_INPUT


class Tile:
    """Some rows, and where their tokens lie."""

    def __init__(self, rows: Sequence[Row], device: torch.device):
        self.rows = rows
        self.ends = list(accumulate(row.length for row in rows))
        layout = torch.tensor([[row.start, row.length, row.offset, row.example] for row in rows], device=device)
        self.starts, self.lengths, self._offsets, self._examples = layout.unbind(1)
        self._columns = torch.arange(max(row.length for row in rows), device=device)

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
        return (self._offsets[:, None] + self._columns)[self.held]

    @cached_property
    def key_positions(self) -> Int[Tensor, "row key"]:
        """The position of each key, recorded ones first; -1 where a key is none of the row's."""
        before = torch.arange(self.prefix_length, device=self.starts.device)
        before = torch.where(before < self.starts[:, None], before, -1)
        return torch.cat([before, torch.where(self.held, self.positions, -1)], 1)

    @property
    def prefix_length(self) -> int:
        """How many recorded keys stand before the rows' own."""
        return max(row.start for row in self.rows)

    def tokens_of(self, i: int) -> slice:
        """Where the tokens of one row lie among those of the tile."""
        return slice(self.ends[i] - self.rows[i].length, self.ends[i])

    def padded(self, tokens: Float[Tensor, "token d"]) -> Float[Tensor, "row position d"]:
        """Lay tokens out as rows of one length."""
        if len(tokens) == self.held.numel():
            return tokens.view(*self.held.shape, -1)
        begins = torch.tensor(self.ends, device=tokens.device) - self.lengths
        return tokens[begins[:, None] + self._within]

    def packed(self, rows: Float[Tensor, "row position d"]) -> Float[Tensor, "token d"]:
        """Lay rows end to end again."""
        return rows.flatten(0, 1) if self.ends[-1] == self.held.numel() else rows[self.held]

    def recorded(self, activation: Tensor) -> Tensor:
        """Take what a recorded activation, `example position ...`, holds at each token."""
        examples = self._examples[:, None].expand_as(self.positions)
        return activation[examples[self.held], self.positions[self.held]]

    def prefix(self, recording: Recording, layer: int) -> SharedPrefix | None:
        """Return the recorded keys and values of the positions before the rows; None when there are none."""
        if self.prefix_length == 0:
            return None
        example, *others = {row.example for row in self.rows}
        shared = []
        for cache in (recording.keys[layer], recording.values[layer]):
            before = cache[:, :, : self.prefix_length]
            one = before[example : example + 1].expand(len(self.rows), -1, -1, -1)
            shared.append(before[self._examples] if others else one)
        return SharedPrefix(*shared)

    @cached_property
    def _within(self) -> Int[Tensor, "row position"]:
        return torch.minimum(self._columns, self.lengths[:, None] - 1)


def rows_joining(variants: Sequence[Variant]) -> dict[int, list[Row]]:
    """Say which rows join at which layer; a variant that follows its trunk wherever it is read has none."""
    arrivals: list[tuple[int, Stage, int, int]] = []
    for index, variant in enumerate(variants):
        if not variant.is_felt:
            continue
        if variant.trunk is None:
            arrivals.append((variant.first_layer, variant.stage, variant.first_position, index))
            continue
        leaves = variant.stop_layer < variants[variant.trunk].stop_layer
        if leaves and any(layer >= variant.stop_layer for _, layer in variant.readings):
            arrivals.append((variant.stop_layer, Stage.BLOCK_INPUT, variant.first_position, index))
    joining: dict[int, list[Row]] = {}
    offset = 0
    for layer, stage, start, index in sorted(arrivals):
        variant = variants[index]
        row = Row(index, variant.example, start, variant.stop_position - start, offset, layer, stage)
        joining.setdefault(layer, []).append(row)
        offset += row.length
    return joining


def tiled(rows: Iterable[Row], taken: Callable[[Row], Hashable], tile_tokens: Callable[[], int]) -> Iterator[list[Row]]:
    """Cut rows into tiles that take the same as recorded and are of similar length.

    Args:
        rows: all rows of a layer.
        taken: what of the layer a row takes as it was recorded.
        tile_tokens: the size of the next tile; it shrinks where memory runs out.
    """
    alike: dict[Hashable, list[Row]] = {}
    for row in rows:
        alike.setdefault(taken(row), []).append(row)
    for waiting in alike.values():
        waiting.sort(key=lambda row: (row.length, row.start))
        while waiting:
            tile = [waiting.pop()]
            filled = tile[0].length
            while waiting and _fits(tile, waiting[-1], filled, tile_tokens()):
                filled += waiting[-1].length
                tile.append(waiting.pop())
            yield tile


def _fits(tile: Sequence[Row], row: Row, filled: int, tile_tokens: int) -> bool:
    """Whether a shorter row may join a tile: within its size, and with little padding once it is large."""
    width, rows = tile[0].length, len(tile) + 1
    size = rows * (width + row.start // PREFIX_SHARE)
    padding = rows * width - filled - row.length
    tight = padding <= rows * width // PADDING_SHARE or size <= tile_tokens // 8
    return tight and size <= tile_tokens
