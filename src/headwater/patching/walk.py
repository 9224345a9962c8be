"""Run many variants of a few examples in one walk down the layers, each from its own first layer and position.

At layer l the variants whose first edit lies there join: their residual stream is the unedited run's, from their first
position on. Below, all of them go on together.

1. Every row holds the tokens from its first changed position to the last position read. A tile of rows of similar
   length goes through a whole block and back into the wave's residual stream before the next tile does: what it needs
   on the way stays in the cache, and a tile that runs out of memory can start again.
2. A row that joins after attention (an edited head output, say) takes the recorded attention output, and one that joins
   after the MLP takes that too.
3. A variant nested in another (cumulative windows) follows that one and leaves it at the layer where its edits end.
4. In the last layer only the positions that are read ask, are written to by heads, and go through the MLP.

Which tensors pass through a block is said by stage, and a site's row says at which stage it lies: between attention and
MLP the walk holds the tensor itself; within them a hook writes while a tile goes through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwater.errors import InterventionError
from headwater.kernels.devices import in_halves, to_device
from headwater.models.blocks import Blocks, Recording, SharedPrefix
from headwater.models.edits import Hook, TrustedHook, replace_hook
from headwater.models.sites import SITES, Site, Stage, main_site, taken_as_recorded
from headwater.patching.edits import (
    LOGITS,
    Deliver,
    Edit,
    Indices,
    Place,
    Reading,
    ReplacementValues,
    TokenSpanEdit,
    Variants,
    write_patterns,
    write_tokens,
)

# Rows side by side, so that one call of a block serves them all; and which keys each of their tokens may read.
#
# A row is some adjacent positions of one example. Norms, MLPs and the residual stream take the tokens of all rows end
# to end (`token`), without padding; attention takes them as `row position`, padded to the longest row, with the
# recorded keys of the positions before the longest prefix in front. Which rows there are follows from the variants;
# which of them are side by side, from what they take as recorded, and their lengths.
#
# A token reads the keys that its layer lets it see in the recorded run: those before it, within the window of a layer
# that slides. Edits sever some, before the softmax (the mask) or after it (where weights are set to 0).


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
        self.prefix_length = int(rows.start.max())
        """How many recorded keys are before the rows' own."""
        self._is_full = self.n_tokens == len(rows) * self.width
        """Whether no place is padding."""
        # Three arrays in one copy: each copy to a device is a launch of its own.
        self.starts, self.lengths, self.examples = to_device(np.stack([rows.start, rows.length, rows.example]), device)
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
        tokens = rows.flatten(0, 1)
        return tokens if self._is_full else tokens[self._each_token(np.arange(len(self.rows)) * self.width)]

    def recorded(self, activation: Tensor) -> Tensor:
        """Take what a recorded activation, `example position ...`, holds at each token."""
        examples, positions = self._recorded_at
        return activation[examples, positions]

    def prefix(self, recording: Recording, layer: int) -> SharedPrefix | None:
        """Return the recorded keys and values of the positions before the rows; None when there are none."""
        if self.prefix_length == 0:
            return None
        caches = (cache[layer][:, :, : self.prefix_length] for cache in (recording.keys, recording.values))
        example = int(self.rows.example[0])
        if (self.rows.example != example).any():
            return SharedPrefix(*(cache[self.examples] for cache in caches))
        # Rows of one example share one view of its keys; only rows of several have to gather theirs.
        return SharedPrefix(*(cache[example : example + 1].expand(len(self.rows), -1, -1, -1) for cache in caches))

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
    """

    def __init__(self, tile: Tile, index: Int[np.ndarray, "group slot"]):
        # The index says which row of the tile; the last one of a group is repeated where others hold more.
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
    """Return the rows of a walk in the order in which they join; a nested variant has one if it leaves the other."""
    followed, felt = variants.nested_in, variants.can_change_output
    numbers = []
    for change in variants.changes:
        joins = (change.first_layer, int(change.stage)) if change.can_change_output else (0, 0)
        after_last_edit = max((edit.layers.stop for edit in change.edits), default=0)
        deepest_read = max((layer for _, layer in change.readings), default=-1)
        # Recomputed up to the last position that is read; where attention looks ahead, that one reads the whole prompt.
        stop_position = change.kept[-1] + 1 if change.whole is None else change.whole
        numbers.append((*joins, after_last_edit, deepest_read, change.first_position, stop_position))
    layer, stage, leave, read, start, end = np.array(numbers, dtype=np.int64).reshape(-1, 6)[variants.which].T
    # A variant that reads nothing after its last edit never needs a row: the one it is nested in has what it reads.
    leaves = (followed >= 0) & (leave < leave[followed]) & (read >= leave)
    index = np.flatnonzero(felt & ((followed < 0) | leaves))
    alone = followed[index] < 0
    layer = np.where(alone, layer[index], leave[index])
    stage = np.where(alone, stage[index], int(Stage.BLOCK_INPUT))
    start, length = start[index], (end - start)[index]
    # By layer, so that all rows that have joined are one slice.
    order = np.lexsort((index, start, stage, layer))
    index, length = index[order], length[order]
    offset = np.cumsum(length) - length
    joined = (start[order], length, offset, layer[order], stage[order])
    return RowTable(index, variants.which[index], variants.example[index], *joined)


def tiled(rows: RowTable, recorded: Indices, folded: bool, tile_tokens: Callable[[], int]) -> Iterator[RowTable]:
    """Cut the rows of a layer into tiles within a size, with little padding where they are large.

    Rows of a tile have the same number in `recorded`, and may share the recorded keys of their example (`folded`).
    """
    for same in np.unique(recorded):
        waiting = rows[np.flatnonzero(recorded == same)]
        # The longest first: neighbours differ least in length, and where memory is too small the first tile shows it.
        waiting = waiting[np.lexsort((waiting.example, waiting.start, waiting.length))[::-1]]
        while len(waiting):
            most = tile_tokens()
            length, start = waiting.length[: max(1, most)], waiting.start[: max(1, most)]
            width, count = int(length[0]), np.arange(1, len(length) + 1)
            # Wider rows do not fold.
            share = FOLDED_PREFIX_SHARE if folded and 2 * width <= FOLDED_PLACES else PREFIX_SHARE
            # Where prompts are of one length the last row, the shortest, starts latest: its prefix is that of the tile.
            size = count * (width + start // share)
            padding = count * width - np.cumsum(length)
            fits = ((padding <= count * width // PADDING_SHARE) | (size <= most // 8)) & (size <= most)
            # A row longer than a tile still goes, alone.
            fits[0] = True
            n = len(fits) if fits.all() else int(fits.argmin())
            yield waiting[:n]
            waiting = waiting[n:]


class Masks:
    """The masks of one walk.

    `applied`: by edit and layer, the variants in which it was made; what is severed is added.
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
        mask = self.of_layer(layer)[tile.positions[:, :, None], tile.key_positions[:, None, :]][:, None]
        if (severed := self.severed(layer, tile, zero=False)) is not None:
            # finfo.min as in transformers' masks: -inf would make NaN of a row that is left no key.
            mask = mask.masked_fill(severed, torch.finfo(mask.dtype).min)
            self._keyless.append((layer, tile, (mask != 0).all(-1)))
        return mask

    def severed(self, layer: int, tile: Tile, zero: bool) -> Bool[Tensor, "row head_or_one position key"] | None:
        """Say which edges of a tile's rows are severed, before the softmax or after it; None where none are."""
        rows, changes = tile.rows, self.variants.changes
        cutting: dict[int, list[Edit]] = {}
        for number in np.unique(rows.which):
            cuts_of_change = (edit for edit in changes[number].edits if not edit.writes and layer in edit.layers)
            cutting[number] = [edit for edit in cuts_of_change if edit.after_softmax == zero]
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

    def of_layer(self, layer: int) -> Float[Tensor, "query key"]:
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


class NotFiniteError(Exception):
    """A variant's residual stream or logits hold NaN or infinity."""

    def __init__(self, variant: int, position: int):
        super().__init__(f"variant {variant}, position {position}")
        self.variant, self.position = variant, position


class Walk:
    """One walk down the layers. Use inside `torch.inference_mode()` and the model's lock."""

    def __init__(
        self,
        blocks: Blocks,
        recording: Recording,
        variants: Variants,
        values: ReplacementValues,
        deliver: Deliver,
        tile_tokens: int,
        answers: Int[Tensor, "example answer"] | None = None,
    ):
        self.blocks, self.recording, self.variants, self.values = blocks, recording, variants, values
        self.deliver, self.tile_tokens, self.answers = deliver, tile_tokens, answers
        self.layers = sorted(recording.calls)
        changes = variants.changes
        # Layers after the last that anything reads are not walked; logits need all.
        needed = [layer if site != LOGITS else self.layers[-1] for change in changes for site, layer in change.readings]
        self.last_layer = max(needed, default=-1)
        self.writers: dict[tuple[str, int], set[int]] = {}
        self.readers: dict[Reading, set[int]] = {}
        for number, change in enumerate(changes):
            for edit in (edit for edit in change.edits if edit.writes):
                for layer in edit.layers:
                    self.writers.setdefault((edit.site.name, layer), set()).add(number)
            # What no read position can see keeps the number of the unedited run, and is not read again.
            for reading in change.readings if change.can_change_output else ():
                self.readers.setdefault(reading, set()).add(number)
        # A dictionary of features brings a site of its own, which is in no registry.
        edited = (edit.site for change in changes for edit in change.edits if edit.writes)
        self.sites: dict[str, Site] = dict(SITES) | {site.name: site for site in edited}
        self.joining = rows_of(variants)
        self.rows = self.joining[:0]
        self._row = np.full(len(variants), -1)
        """By variant: its row, once it joined; -1 before, and where it has none."""
        most, counts = max((len(one.kept) for one in changes), default=0), np.array([len(one.kept) for one in changes])
        # Padded by repeating, so that an index of padding is a valid one.
        positions = np.array([(*one.kept, *one.kept[-1:] * (most - len(one.kept))) for one in changes])
        self._kept = positions, np.arange(most) < counts[:, None]
        """By change: the positions read, the last one again where others read more; and which of them count."""
        self._busy: dict[tuple[Stage, int], list[Site]] = {}
        """By stage and layer: the sites outside attention and MLP that are written or read."""
        places = {*self.writers, *self.readers}
        for site, layer in product(self.sites.values(), self.layers):
            if site.within is None and site.stage is not None and (site.name, layer) in places:
                self._busy.setdefault((site.stage, layer), []).append(site)
        self._tile: tuple[int, Tile] | None = None
        self._hooked: dict[str, set[int]] = {"attention": set(), "mlp": set()}
        """The layers within whose attention or MLP something is edited."""
        self._applied: dict[tuple[int, int], list[Indices]] = {}
        """By edit and layer: the variants in which it was made."""
        self._masks = Masks(recording, variants, blocks.model.shape.n_heads, self._applied)

    def run(self) -> None:
        """Walk down the layers and deliver every reading of every variant that is felt where it is read."""
        start = self._recorded(Stage.BLOCK_INPUT, 0)
        # One buffer for the tokens of all rows, also of those that join later: no row is moved when others join.
        size = int(self.joining.length.sum())
        self.residual = start.new_empty(size, start.shape[-1])
        # Stages that leave the same to compute share tiles: rows that join at them go through the layer alike.
        first: dict[tuple[Stage, ...], int] = {}
        alike = np.array([first.setdefault(self._taken(stage), int(stage)) for stage in Stage])
        # One set of hooks for the whole walk; while no tile is inside a sublayer they do nothing.
        with self.blocks.model.hooks(self._hooks()), self.blocks.fused():
            for layer in self.layers[: self.last_layer + 1]:
                self._join(layer)
                # The size is read for each tile: it shrinks where memory runs out in the middle of a layer.
                recorded = alike[self.rows.stage_in(layer)]
                for rows in tiled(self.rows, recorded, self._folds(layer), lambda: self.tile_tokens):
                    self._within_memory(rows, partial(self._step, layer))
        # First: a token without a key attends to all keys alike, future ones too, and what comes of it is finite.
        self._masks.check_that_every_token_has_a_key()
        self._check_that_all_is_finite()
        self._read_logits()
        self._check_that_every_edit_was_made()

    def _join(self, layer: int) -> None:
        """Take in the rows that start here: from the recorded residual stream, or from the row they leave."""
        # `joining` is in the order of layers, so that rows which have joined are always one slice.
        begin, end = np.searchsorted(self.joining.layer, [layer, layer + 1])
        joining, followed = self.joining[begin:end], self.variants.nested_in[self.joining.variant[begin:end]]
        if len(alone := joining[followed < 0]):
            tile = Tile(alone, self.residual.device)
            self.residual[tile.places] = tile.recorded(self._recorded(Stage.BLOCK_INPUT, layer))
        # A nested row had the same edits as the other until here: it begins with a copy of that one's state.
        if len(leaving := joining[followed >= 0]):
            trunks = replace(leaving, offset=self.joining.offset[self._row[followed[followed >= 0]]])
            left, at = (Tile(rows, self.residual.device).places for rows in (trunks, leaving))
            self.residual[at] = self.residual[left]
        self.rows = self.joining[:end]
        self._row[joining.variant] = np.arange(begin, end)

    def _taken(self, stage: int) -> tuple[Stage, ...]:
        """What a row takes as it was recorded of the layer that it enters at a stage."""
        return taken_as_recorded(Stage(stage), self.blocks.parallel)

    def _step(self, layer: int, rows: RowTable) -> None:
        """Take the rows of one tile through one block; the residual stream is written last, and only then."""
        tile, recorded = Tile(rows, self.residual.device), self._taken(int(rows[:1].stage_in(layer)[0]))
        residual = self._at(Stage.BLOCK_INPUT, layer, tile, self.residual[tile.places])
        attended = self._at(Stage.ATTENTION_OUTPUT, layer, tile, self._attention(layer, tile, residual, recorded))
        before_mlp = residual + attended
        if not self.blocks.parallel:
            before_mlp = self._at(Stage.BETWEEN, layer, tile, before_mlp)
        # A parallel block's MLP reads what its attention reads (Pythia, Phi, GPT-J).
        read = residual if self.blocks.parallel else before_mlp
        added = self._at(Stage.MLP_OUTPUT, layer, tile, self._feed_forward(layer, tile, read, recorded))
        self.residual[tile.places] = self._at(Stage.BLOCK_OUTPUT, layer, tile, before_mlp + added)

    def _attention(
        self, layer: int, tile: Tile, residual: Tensor, recorded: tuple[Stage, ...]
    ) -> Float[Tensor, "token d_model"]:
        """What attention adds: computed, or as recorded for rows that join after it."""
        if Stage.ATTENTION_OUTPUT in recorded:
            return tile.recorded(self._recorded(Stage.ATTENTION_OUTPUT, layer))
        if Stage.HEAD_OUTPUT in recorded:
            # An edit of z needs no attention: the recorded z, with the edited heads, goes through W_O alone.
            z = tile.recorded(self._recorded(Stage.HEAD_OUTPUT, layer))
            for site in self.sites.values():
                if site.stage == Stage.HEAD_OUTPUT and (site.name, layer) in self.writers:
                    write_tokens(z, self._span_edits(site, layer, tile), self.values, site, layer)
            return self.blocks.project_heads(layer, z)
        # Called with the arguments that the model's own call had, but for rows, positions, mask and cache.
        rows, attention = tile.padded(residual), partial(self.blocks.attention, layer, call=self.recording.calls[layer])
        if (folded := FoldedRows.of(tile) if self._folds(layer) else None) is not None:
            # Nothing is severed before the softmax where rows are folded.
            mask = self._masks.of_layer(layer)[folded.positions[:, :, None], folded.key_positions][:, None]
            keys_before = folded.prefix(self.recording, layer)
            written = attention(folded.laid_out(rows), folded.positions, mask, keys_before, recorded=folded.examples)
            return tile.packed(folded.taken_apart(written))
        places_and_keys = tile.positions, self._masks.mask(layer, tile), tile.prefix(self.recording, layer)
        if self._needs_all(layer, tile, "attention"):
            with self._inside(layer, tile):
                return tile.packed(attention(rows, *places_and_keys, recorded=tile.examples))
        # In the last layer only the positions that are read attend. The others hold zeros, which nothing reads.
        columns = self._kept[0][tile.rows.which] - tile.rows.start[:, None]
        # Rows that read fewer than others name one again.
        most = int(self._kept[1][tile.rows.which].sum(1).max())
        kept = to_device(columns[:, :most], rows.device)
        written = attention(rows, *places_and_keys, kept, recorded=tile.examples)
        return tile.packed(torch.zeros_like(rows).scatter(1, kept[:, :, None].expand_as(written), written))

    def _folds(self, layer: int) -> bool:
        """Whether rows go through a layer's attention side by side: nothing in it may ask which row a token is of."""
        alone = self.blocks.has_own_steps or layer in self._hooked["attention"] or layer in self._masks.severed_layers
        return layer < self.last_layer and not alone

    @contextlib.contextmanager
    def _inside(self, layer: int, tile: Tile) -> Iterator[None]:
        """Let the hooks of `_hooks` know what is going through, for the length of a call."""
        self._tile = layer, tile
        try:
            yield
        finally:
            self._tile = None

    def _feed_forward(
        self, layer: int, tile: Tile, middle: Tensor, recorded: tuple[Stage, ...]
    ) -> Float[Tensor, "token d_model"]:
        """What the MLP adds: computed, or as recorded for rows that join after it; 0 without one."""
        if self.blocks.model.shape.d_mlp and Stage.MLP_OUTPUT in recorded:
            return tile.recorded(self._recorded(Stage.MLP_OUTPUT, layer))
        if self._needs_all(layer, tile, "mlp"):
            with self._inside(layer, tile):
                return self.blocks.feed_forward(layer, middle)
        positions, read = self._kept[0][tile.rows.which], self._kept[1][tile.rows.which]
        # Without the padding of `_kept`: of a token that is named twice the MLP would be computed twice.
        kept = to_device((positions + (tile.begins - tile.rows.start)[:, None])[read], middle.device)
        mlp_out = torch.zeros_like(middle)
        mlp_out[kept] = self.blocks.feed_forward(layer, middle[kept])
        return mlp_out

    def _needs_all(self, layer: int, tile: Tile, sublayer: Literal["attention", "mlp"]) -> bool:
        """Whether a sublayer is needed where nothing is read: layers follow, or an edit within or after it looks."""
        if layer < self.last_layer or layer in self._hooked[sublayer]:
            return True
        after = Stage.HEAD_OUTPUT if sublayer == "attention" else Stage.NEURONS
        # A change (noise, a factor) reads what the sublayer adds at its own positions, which no metric need read.
        later = [site for site, at in self.writers if at == layer and (self.sites[site].stage or 0) > after]
        written = {number for site in later for number in self.writers[site, layer]}
        return not written.isdisjoint(tile.rows.which.tolist())

    def _hooks(self) -> list[Hook]:
        """Hooks at the sites within attention and MLP, wherever the edit of a row that goes through them acts."""
        sites: dict[Place, Site] = {}
        # A nested variant has edits that the other has too, in more layers.
        for number in np.unique(self.variants.which[self.variants.nested_in < 0]):
            change = self.variants.changes[number]
            recorded = self._taken(change.stage) if change.can_change_output else ()
            for edit in change.edits if change.can_change_output else ():
                # Severed after the softmax is a zero in the pattern; before it, an entry of the mask, without a hook.
                site = edit.site if edit.writes else main_site(Stage.PATTERN) if edit.after_softmax else None
                if site is None or site.within is None:
                    continue
                # In the layer where it joins a row skips what lies before its first edit: no hook would see it.
                passed = Stage.MLP_OUTPUT in recorded if site.within == "mlp" else bool(recorded)
                for layer in edit.layers:
                    if layer <= self.last_layer and not (passed and layer == change.first_layer):
                        sites[site.name, layer] = site
        for (_, layer), site in sites.items():
            self._hooked[str(site.within)].add(layer)
        return [(site.hook_name(layer), self._edit_inside(site)) for (_, layer), site in sites.items()]

    def _edit_inside(self, site: Site) -> TrustedHook:
        def edit(activation: Tensor, hook: object) -> Tensor | None:
            # Rows that begin with a recorded z pass W_O's hooks outside `_inside`: their z is edited already.
            if self._tile is None:
                return None
            layer, tile = self._tile
            # A copy, since the block may use its own tensor again; contiguous, so that flatten is a view to write into.
            edited = activation.clone(memory_format=torch.contiguous_format)
            if site.has_keys:
                stretches = self._span_edits(site, layer, tile, 1)
                write_patterns(edited, stretches, tile.key_positions, self.values, site, layer)
                if (severed := self._masks.severed(layer, tile, zero=True)) is not None:
                    edited.masked_fill_(severed, 0.0)
            else:
                # Attention takes padded rows, an MLP tokens end to end.
                width = edited.shape[1] if site.within == "attention" else None
                write_tokens(edited.flatten(0, 1), self._span_edits(site, layer, tile, width), self.values, site, layer)
            return edited

        return replace_hook(edit)

    def _at(self, stage: Stage, layer: int, tile: Tile, activation: Tensor) -> Tensor:
        """Make the edits at a stage between sublayers, then deliver what is read there."""
        for site in self._busy.get((stage, layer), ()):
            # Edits first: what is read at a site is what the edited run has there.
            if (site.name, layer) in self.writers:
                write_tokens(activation, self._span_edits(site, layer, tile), self.values, site, layer)
            if (site.name, layer) in self.readers:
                self._read((site.name, layer), tile, activation)
        return activation

    def _span_edits(self, site: Site, layer: int, tile: Tile, width: int | None = None) -> list[TokenSpanEdit]:
        """List the edits of a tile's rows at a site, where its tokens lie end to end or, with a width, padded to it."""
        spans, rows = [], tile.rows
        offset = tile.begins if width is None else np.arange(len(rows)) * width
        # A row that left another had its edits made there.
        edited_here = (self.variants.nested_in[rows.variant] < 0) | (layer < rows.layer)
        for number in sorted(self.writers.get((site.name, layer), ())):
            if not len(rows_of_change := np.flatnonzero(edited_here & (rows.which == number))):
                continue
            # Rows of one change begin and end at the same positions.
            start, length = int(rows.start[rows_of_change[0]]), int(rows.length[rows_of_change[0]])
            for edit in self.variants.changes[number].edits:
                if edit.writes and edit.site.name == site.name and layer in edit.layers:
                    at = rows.example[rows_of_change], start, length, offset[rows_of_change]
                    spans.append(TokenSpanEdit(edit, *at))
                    self._note(rows.variant[rows_of_change], edit, layer)
        return spans

    def _recorded(self, stage: Stage, layer: int) -> Tensor:
        return self.recording.activations[main_site(stage).hook_name(layer)]

    def _read(self, reading: Reading, tile: Tile, activation: Tensor) -> None:
        """Deliver what is read at a site of a layer, from each variant's own row or that of the one it follows."""
        # One more at the end: index -1, of variants without a row, finds -1 there.
        place = np.full(len(self.variants) + 1, -1)
        place[self._row[tile.rows.variant]] = np.arange(len(tile.rows))
        index = self._reading(reading)
        row_of = place[self._rows_of(index)]
        index, row_of = index[row_of >= 0], row_of[row_of >= 0]
        for with_count, positions in self._by_count(index):
            at = row_of[with_count]
            tokens = positions + (tile.begins - tile.rows.start)[at][:, None]
            self.deliver(reading, index[with_count], activation[to_device(tokens, activation.device)])

    def _reading(self, reading: Reading) -> Indices:
        """The variants of which something is read at a site of a layer."""
        return np.flatnonzero(np.isin(self.variants.which, list(self.readers.get(reading, ()))))

    def _rows_of(self, index: Indices) -> Indices:
        """The rows that hold variants: their own, or that of the one that they still follow; -1 without one."""
        own, other = self._row[index], self.variants.nested_in[index]
        return np.where(own >= 0, own, np.where(other >= 0, self._row[other], -1))

    def _by_count(self, index: Indices) -> Iterator[tuple[Indices, Indices]]:
        """Yield variants of which as many positions are read: which of those given, and the positions of each."""
        positions, read = self._kept[0][self.variants.which[index]], self._kept[1][self.variants.which[index]]
        counts = read.sum(1)
        for count in np.unique(counts):
            with_count = np.flatnonzero(counts == count)
            yield with_count, positions[with_count, :count]

    def _read_logits(self) -> None:
        """Deliver the logits at the kept positions, a tile of variants at a time."""
        reading = LOGITS, len(self.layers)

        def deliver(indices: Indices) -> None:
            ((_, positions),) = self._by_count(indices)
            rows = self.joining[self._rows_of(indices)]
            tokens = to_device(positions + (rows.offset - rows.start)[:, None], self.residual.device)
            residual = self.residual[tokens.flatten()]
            if self.answers is None:
                logits = self.blocks.logits(residual)
            else:
                examples = to_device(self.variants.example[indices], residual.device)
                logits = self.blocks.logits_of(residual, self.answers[examples].repeat_interleave(tokens.shape[1], 0))
            logits = logits.view(*tokens.shape, -1)
            # Of all logits the first one is enough: what is not finite in a state reaches every column of W_U.
            wrong = ~(logits if self.answers is not None else logits[..., :1]).isfinite().all(-1)
            if bool(wrong.any()):
                i, place = wrong.nonzero()[0].tolist()
                raise NotFiniteError(int(indices[i]), int(positions[i, place]))
            self.deliver(reading, indices, logits)

        index = self._reading(reading)
        index = index[self._rows_of(index) >= 0]
        for with_count, positions in self._by_count(index):
            most = max(1, self.tile_tokens // positions.shape[1])
            for i in range(0, len(with_count), most):
                self._within_memory(index[with_count[i : i + most]], deliver)

    def _check_that_all_is_finite(self) -> None:
        """Look at each token's sum, which is not finite when one of its numbers is not, and then at the token."""
        # A sum reads the memory once, without a mask of its size; but it may overflow where no number does.
        suspect = ~self.residual.sum(-1, dtype=torch.float32).isfinite()
        if not bool(suspect.any()):
            return
        wrong = suspect & ~self.residual.isfinite().all(-1)
        for row in np.flatnonzero(self.rows.length):
            offset, length = int(self.rows.offset[row]), int(self.rows.length[row])
            if bool((own := wrong[offset : offset + length]).any()):
                raise NotFiniteError(int(self.rows.variant[row]), int(self.rows.start[row]) + int(own.nonzero()[0]))

    def _within_memory(self, items: Any, work: Callable[[Any], object]) -> None:
        """Do the work; when memory runs out, do it in parts, and make all tiles smaller from now on."""
        parts = in_halves(items, work)
        self.tile_tokens = max(1, self.tile_tokens // len(parts))

    def _note(self, variants: Indices, edit: object, layer: int) -> None:
        self._applied.setdefault((id(edit), layer), []).append(variants)

    def _check_that_every_edit_was_made(self) -> None:
        alone = self.rows.variant[self.variants.nested_in[self.rows.variant] < 0]
        for number in np.unique(self.variants.which[alone]):
            expected = alone[self.variants.which[alone] == number]
            for edit in self.variants.changes[number].edits:
                for layer in edit.layers[: max(0, self.last_layer + 1 - edit.layers.start)]:
                    # Hooks of TransformerLens may be listed and never fire: an edit there does nothing, silently.
                    made = np.zeros(len(self.variants), dtype=bool)
                    for edited in self._applied.get((id(edit), layer), ()):
                        made[edited] = True
                    if not made[expected].all():
                        raise InterventionError(
                            f"The edit {edit} of layer {layer} did not take effect: its hook never fired. This is a "
                            "fault of the model's hooks, not of the sweep's options."
                        )


def not_walked(edits: Iterable[Edit]) -> str | None:
    """Say which edited site the walk does not know, or None when it knows all of them."""
    # It knows the tensor between the parts of a block, and within them what a hook sees as `row position ...`.
    for site in {edit.site.name: edit.site for edit in edits if edit.writes}.values():
        inside = site.within is not None and site.stage in (Stage.ATTENTION, Stage.NEURONS) and not site.has_keys
        if site.stage is None or not (inside or site.hook == main_site(site.stage).hook):
            return f"where {site.name} lies in a block is not known to the walk down the layers"
    return None
