"""Rows side by side, so that one call of a block serves them all; and which keys each of their tokens may read.

A row is some adjacent positions of one example. Norms, MLPs and the residual stream take the tokens of all rows end to
end (`token`), without padding; attention takes them as `row position`, padded to the longest row, with the recorded
keys of the positions before the longest prefix in front. Which rows there are follows from the variants; which of them
are side by side, from what they take as recorded, and their lengths.

A token reads the keys that its layer lets it see in the recorded run: those before it, within the window of a layer
that slides. Edits sever some, before the softmax (the mask) or after it (where weights are set to 0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwater.errors import InterventionError
from headwater.kernels.devices import to_device
from headwater.models.blocks import Recording, SharedPrefix
from headwater.models.sites import Stage, main_site
from headwater.patching.edits import Indices, Variants

PREFIX_SHARE, FOLDED_PREFIX_SHARE = 4, 64
"""A key before a row counts as this part of a token of its own: copied for the row alone, or there for many rows."""
PADDING_SHARE = 16
"""At most this part of a large tile is padding."""
FOLDED_PLACES = 128
"""Of a folded row, at most: masked keys of its other rows cost less than copies of the prefix."""
FOLDED_PADDING = 1.25
"""At most so many places for each that holds a row."""


@dataclass(frozen=True, eq=False)
class RowTable:
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

    def __getitem__(self, rows: slice | Indices | Bool[np.ndarray, " _"]) -> RowTable:
        return RowTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    def stage_in(self, layer: int) -> Indices:
        """How far into a layer each is as it was recorded."""
        return np.where(self.layer == layer, self.stage, int(Stage.BLOCK_INPUT))


class Tile:
    """Some rows, and where their tokens lie; that is found on the host, so that no device is waited for."""

    def __init__(self, rows: RowTable, device: torch.device):
        self.rows = rows
        ends = np.cumsum(rows.length)
        self.begins, self.n_tokens = ends - rows.length, int(ends[-1])
        """Where each row's tokens begin among those of the tile, and how many there are."""
        self.width = int(rows.length.max())
        """The tokens of the longest row."""
        # Three arrays in one copy: each copy to a device is a launch of its own.
        known = np.stack([rows.start, rows.length, rows.example])
        self.starts, self.lengths, self.examples = to_device(known, device)
        self._columns = torch.arange(self.width, device=device)

    @cached_property
    def is_token(self) -> Bool[Tensor, "row position"]:
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
        # A row takes the recorded keys before its own start only: from there on it has keys of its own, edited ones.
        before = torch.where(before < self.starts[:, None], before, -1)
        return torch.cat([before, torch.where(self.is_token, self.positions, -1)], 1)

    @property
    def prefix_length(self) -> int:
        """How many recorded keys are before the rows' own."""
        return int(self.rows.start.max())

    @property
    def _is_full(self) -> bool:
        """Whether no place is padding."""
        return self.n_tokens == len(self.rows) * self.width

    def padded(self, tokens: Float[Tensor, "token d"]) -> Float[Tensor, "row position d"]:
        """Lay tokens out as rows of one length."""
        # A view: rows of one length are laid out without a copy.
        if self._is_full:
            return tokens.view(len(self.rows), self.width, -1)
        begins = to_device(self.begins, tokens.device)
        # Padding repeats the row's last token: numbers that are finite, and that nothing reads.
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
            # Rows of one example share one view of its keys; only rows of several have to gather theirs.
            of_example = before[example : example + 1].expand(len(self.rows), -1, -1, -1)
            shared.append(before[self.examples] if others else of_example)
        return SharedPrefix(*shared)

    @cached_property
    def _places_padded(self) -> Int[Tensor, " token"]:
        """Where each token lies among the places of padded rows."""
        return self._each_token(np.arange(len(self.rows)) * self.width)

    @cached_property
    def _recorded_at(self) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"]]:
        """Example and position of each token."""
        examples = to_device(np.repeat(self.rows.example, self.rows.length), self.starts.device)
        return examples, self._each_token(self.rows.start)

    def _each_token(self, first: Indices) -> Int[Tensor, " token"]:
        """Return a number for each token: its row's, and one more for each token before it in the row."""
        numbers = np.repeat(first - self.begins, self.rows.length) + np.arange(self.n_tokens)
        return to_device(numbers, self.starts.device)

    @cached_property
    def _within(self) -> Int[Tensor, "row position"]:
        return torch.minimum(self._columns, self.lengths[:, None] - 1)


class FoldedRows:
    """A tile's rows side by side, several of one example in one row of attention, which a mask keeps apart.

    The recorded keys and values of an example are then there once for a group of its rows. With each row by itself they
    are copied for every row, and where heads share keys once more for every head: a third of the time of a sweep whose
    rows are of one token.

    Args:
        tile: the rows.
        index: by group and slot, which row of the tile; the last one of a group is repeated where others hold more.
    """

    def __init__(self, tile: Tile, index: Int[np.ndarray, "group slot"]):
        self.tile, self.n_slots = tile, index.shape[1]
        place = np.empty(len(tile.rows), dtype=np.int64)
        # Backwards, since the last write counts: of a row that is repeated the first slot is taken.
        place[index[:, ::-1]] = np.arange(index.size).reshape(index.shape)[:, ::-1]
        self._index, self._place = (to_device(one, tile.starts.device) for one in (index, place))
        self.examples = tile.examples[self._index[:, 0]]

    @classmethod
    def of(cls, tile: Tile) -> FoldedRows | None:
        """Fold a tile; None where there is nothing to gain."""
        _, which, counts = np.unique(tile.rows.example, return_inverse=True, return_counts=True)
        # Without a recorded prefix there is nothing to share.
        most = FOLDED_PLACES // tile.width if tile.prefix_length else 0
        while most > 1:
            n_slots = -(-counts.max() // -(-counts.max() // most))  # groups of the largest example are of one size
            n_groups = -(-counts // n_slots)
            # Examples with few rows leave slots empty; fewer slots a group are tried before folding is given up.
            if n_groups.sum() * n_slots <= FOLDED_PADDING * len(tile.rows):
                example = np.repeat(np.arange(len(counts)), n_groups)
                group = np.arange(len(example)) - np.repeat(np.cumsum(n_groups) - n_groups, n_groups)
                row = np.minimum(group[:, None] * n_slots + np.arange(n_slots), counts[example][:, None] - 1)
                by_example, first = np.argsort(which, kind="stable"), np.cumsum(counts) - counts
                return cls(tile, by_example[first[example][:, None] + row])
            most //= 2
        return None

    def laid_out(self, rows: Shaped[Tensor, "row position *d"]) -> Shaped[Tensor, "group place *d"]:
        """Lay the rows of the tile side by side."""
        return rows[self._index].flatten(1, 2)

    def taken_apart(self, folded: Float[Tensor, "group place d"]) -> Float[Tensor, "row position d"]:
        """Return the rows of the tile again."""
        return folded.unflatten(1, (self.n_slots, -1)).flatten(0, 1)[self._place]

    @cached_property
    def positions(self) -> Int[Tensor, "group place"]:
        """The position of each token."""
        return self.laid_out(self.tile.positions)

    @cached_property
    def key_positions(self) -> Int[Tensor, "group place key"]:
        """The position of each key as a place sees it; -1 where it is none of its row's."""
        tile, slot = self.tile, torch.arange(self.n_slots, device=self._index.device).repeat_interleave(self.tile.width)
        keys = torch.where(tile.is_token, tile.positions, -1)
        # Keys of the other rows in a group are masked like padding: rows are different runs.
        keys = torch.where(slot[:, None] == slot, self.laid_out(keys)[:, None], -1)
        before = torch.arange(tile.prefix_length, device=keys.device)
        starts = self.laid_out(tile.starts[:, None].expand(-1, tile.width))[:, :, None]
        return torch.cat([torch.where(before < starts, before, -1), keys], -1)

    def prefix(self, recording: Recording, layer: int) -> SharedPrefix:
        """Return the recorded keys and values of the positions before the rows, those of an example once a group."""
        caches = recording.keys[layer], recording.values[layer]
        return SharedPrefix(*(cache[:, :, : self.tile.prefix_length][self.examples] for cache in caches))


def rows_of(variants: Variants) -> RowTable:
    """Return the rows of a walk in the order in which they join; a variant that never leaves its trunk has none."""
    followed = variants.trunk
    felt, stop = variants.can_change_output, variants.each(lambda one: one.stop_layer)
    read = variants.each(lambda one: max((layer for _, layer in one.readings), default=-1))
    # A variant that reads nothing after its last edit never needs a row: its trunk has what it reads.
    leaves = (followed >= 0) & (stop < stop[followed]) & (read >= stop)
    index = np.flatnonzero(felt & ((followed < 0) | leaves))
    alone = followed[index] < 0
    layer = np.where(
        alone, variants.each(lambda one: one.first_layer if one.can_change_output else 0)[index], stop[index]
    )
    entered = variants.each(lambda one: int(one.stage) if one.can_change_output else 0)[index]
    stage = np.where(alone, entered, int(Stage.BLOCK_INPUT))
    start = variants.each(lambda one: one.first_position)[index]
    length = variants.each(lambda one: one.stop_position)[index] - start
    # By layer, so that all rows that have joined are one slice.
    order = np.lexsort((index, start, stage, layer))
    index, length = index[order], length[order]
    offset = np.cumsum(length) - length
    joined = (start[order], length, offset, layer[order], stage[order])
    return RowTable(index, variants.which[index], variants.example[index], *joined)


def tiled(rows: RowTable, taken: Indices, folded: bool, tile_tokens: Callable[[], int]) -> Iterator[RowTable]:
    """Cut rows into tiles that take the same as recorded and are of similar length.

    Args:
        rows: all rows of a layer.
        taken: by row, a number for what of the layer it takes as it was recorded.
        folded: whether rows of one example will share its recorded keys, as far as they are short enough.
        tile_tokens: the size of the next tile; it shrinks where memory runs out.
    """
    for same in np.unique(taken):
        waiting = rows[np.flatnonzero(taken == same)]
        # The longest first: neighbours differ least in length, and where memory is too small the first tile shows it.
        waiting = waiting[np.lexsort((waiting.example, waiting.start, waiting.length))[::-1]]
        while len(waiting):
            n = _how_many_fit(waiting, tile_tokens(), folded)
            yield waiting[:n]
            waiting = waiting[n:]


def _how_many_fit(rows: RowTable, tile_tokens: int, folded: bool) -> int:
    """Return how many rows, the longest first, go into a tile: within its size, with little padding if it is large."""
    length, start = rows.length[: max(1, tile_tokens)], rows.start[: max(1, tile_tokens)]
    width, count = int(length[0]), np.arange(1, len(length) + 1)
    share = FOLDED_PREFIX_SHARE if folded and 2 * width <= FOLDED_PLACES else PREFIX_SHARE  # wider ones do not fold
    # Where prompts are of one length the last row, the shortest, starts latest: its prefix is that of the tile.
    size = count * (width + start // share)
    padding = count * width - np.cumsum(length)
    fits = ((padding <= count * width // PADDING_SHARE) | (size <= tile_tokens // 8)) & (size <= tile_tokens)
    # A row longer than a tile still goes, alone.
    fits[0] = True
    return len(fits) if fits.all() else int(fits.argmin())


class Masks:
    """The masks of one walk.

    Args:
        recording: the unedited run.
        variants: what is severed in whose runs.
        n_heads: of the model.
        applied: by edit and layer, the variants in which it was made; what is severed is added.
    """

    def __init__(
        self, recording: Recording, variants: Variants, n_heads: int, applied: dict[tuple[int, int], list[Indices]]
    ):
        self.recording, self.variants, self._n_heads, self._applied = recording, variants, n_heads, applied
        self._like = recording.activations[main_site(Stage.BLOCK_INPUT).hook_name(0)]
        self._added: dict[int, Tensor] = {}
        """By what a layer's queries see: the mask that says so."""
        cuts = (edit for change in variants.changes for edit in change.edits if not edit.writes)
        self.severed_layers = {layer for cut in cuts if not cut.after_softmax for layer in cut.layers}
        """Where edges of some row are severed before the softmax."""
        self._keyless: list[tuple[int, Tile, Bool[Tensor, "row head_or_one position"]]] = []
        """Where edges are severed, by layer and tile: the tokens that are left no key."""

    def mask(self, layer: int, tile: Tile) -> Float[Tensor, "row head_or_one position key"]:
        """Say which keys each token may read."""
        mask = self._of_layer(layer)[tile.positions[:, :, None], tile.key_positions[:, None, :]][:, None]
        if (severed := self.severed(layer, tile, zero=False)) is not None:
            # finfo.min as in transformers' masks: -inf would make NaN of a row that is left no key.
            mask = mask.masked_fill(severed, torch.finfo(mask.dtype).min)
            self._keyless.append((layer, tile, (mask != 0).all(-1)))
        return mask

    def folded_mask(self, layer: int, folded: FoldedRows) -> Float[Tensor, "group 1 place key"]:
        """Say which keys each token may read, of rows side by side of which nothing is severed before the softmax."""
        return self._of_layer(layer)[folded.positions[:, :, None], folded.key_positions][:, None]

    def severed(self, layer: int, tile: Tile, zero: bool) -> Bool[Tensor, "row head_or_one position key"] | None:
        """Say which edges of a tile's rows are severed, before the softmax or after it; None where none are."""
        rows, changes = tile.rows, self.variants.changes
        cutting = {
            number: [
                edit
                for edit in changes[number].edits
                if not edit.writes and edit.after_softmax == zero and layer in edit.layers
            ]
            for number in np.unique(rows.which)
        }
        severed: Tensor | None = None
        # The n-th cuts of all rows at once: one by one a severed head took 18 to 20 launches.
        for turn in range(max(map(len, cutting.values()))):
            cuts = [cutting[number][turn] if turn < len(cutting[number]) else None for number in rows.which]
            edges, numbers = self._edges_cut
            which = np.array([0 if cut is None else numbers[id(cut.edges)] for cut in cuts])
            at = to_device(which, edges.device)[:, None, None], tile.positions[:, :, None]
            # Keys that are none of the row's read column 0: they are masked anyway.
            cut_edges = edges[*at, tile.key_positions.clamp_min(0)[:, None, :]][:, None]
            if any(cut is not None and cut.heads is not None for cut in cuts):
                heads = np.zeros((len(cuts), self._n_heads), dtype=bool)
                for of_row, cut in zip(heads, cuts, strict=True):
                    of_row[slice(None) if cut is None or cut.heads is None else list(cut.heads)] = True
                cut_edges = cut_edges & to_device(heads, cut_edges.device)[:, :, None, None]
            severed = cut_edges if severed is None else severed | cut_edges
            for i, cut in enumerate(cuts):
                if cut is not None:
                    self._applied.setdefault((id(cut), layer), []).append(rows.variant[i : i + 1])
        return severed

    def check_that_every_token_has_a_key(self) -> None:
        """Look once, at the end, at all that severed edges left, so that no device is waited for on the way."""
        if not self._keyless or not any(torch.stack([found.any() for *_, found in self._keyless]).tolist()):
            return
        layer, tile, keyless = next(one for one in self._keyless if bool(one[2].any()))
        row, *_, column = keyless.nonzero()[0].tolist()
        raise InterventionError(
            f"Knocking out these edges leaves token {int(tile.positions[row, column])} of example "
            f"{tile.rows.example[row]} no key to attend to in layer {layer}. Leave it at least one key, or use "
            "variant='zero'."
        )

    def _of_layer(self, layer: int) -> Float[Tensor, "query key"]:
        """What is added to the score of each query and key; the last key, number -1, is none and seen by no query."""
        # Layers that see alike (all, or all that slide) share one tensor, and so one mask.
        visible = self.recording.visible[layer]
        if id(visible) not in self._added:
            least = torch.finfo(self._like.dtype).min
            mask = visible.new_full((len(visible), visible.shape[1] + 1), least, dtype=self._like.dtype)
            self._added[id(visible)] = mask.masked_fill_(torch.nn.functional.pad(visible, (0, 1)), 0.0)
        return self._added[id(visible)]

    @cached_property
    def _edges_cut(self) -> tuple[Bool[Tensor, "_ query key"], dict[int, int]]:
        """What edits sever: no edge at first, then each of their matrices once; and by matrix its number."""
        edits = [edit for change in self.variants.changes for edit in change.edits if not edit.writes]
        matrices = {id(edit.edges): edit.edges for edit in edits}
        longest = max(len(matrix) for matrix in matrices.values())
        # Number 0 severs nothing: it is for rows without a cut in this turn.
        edges = torch.zeros(1 + len(matrices), longest, longest, dtype=torch.bool, device=self._like.device)
        for padded, matrix in zip(edges[1:], matrices.values(), strict=True):
            padded[: len(matrix), : len(matrix)] = matrix
        return edges, {one: 1 + number for number, one in enumerate(matrices)}
