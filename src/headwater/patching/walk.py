"""Run many variants of a few examples in one pass through the layers, each from its own first layer and position.

A *variant* is one edited run, a *wave* the variants of one pass, a *tile* the sequences that go through a block in one
call, one row each. The variants whose first edit is in layer l join there: their residual stream is the unedited run's,
from their first position on. From then on all of them go through the layers together.

1. Each row holds the tokens from its first changed position to the last position read. A tile of rows of similar
   length goes through a whole block and back into the wave's residual stream before the next tile does: so its
   intermediate results stay in the processor's cache, and a tile that runs out of memory can be restarted.
2. A row that joins after attention (because a head output is edited, for example) takes the recorded attention output,
   and a row that joins after the MLP also takes the recorded MLP output.
3. With cumulative windows, a variant's edits may be the first of another's, its parent's. Up to the layer where its own
   edits end it is the parent's run, and has no row. If anything is read from there on, it leaves the parent: it gets a
   row, which begins with a copy of the parent's residual stream.
4. In the last layer only the positions that are read act as queries, receive head outputs, and go through the MLP.

`Stage` enumerates the tensors that pass through a block, and each `Site` names the stage at which it lies. Between
attention and MLP the walk holds the tensor itself; within them a hook replaces it while a tile goes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
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

# Batches of rows, so that one call of a block serves them all; and masks of the keys that each of their tokens reads.
#
# A row is some adjacent positions of one example. Norms, MLPs and the residual stream take the tokens of all rows end
# to end (`token`), without padding; attention takes them as `row position`, padded to the longest row, with the
# recorded keys of the longest prefix in front. The variants determine which rows there are; what the rows take as
# recorded, and their lengths, determine which are batched together.
#
# A token reads the keys that its layer lets it see in the recorded run: those before it, within the window of a
# sliding-window layer. Edits sever some, before the softmax (the mask) or after it (weights are set to 0).


PREFIX_SHARE, FOLDED_PREFIX_SHARE = 4, 64
"""Cost of a prefix key as a fraction (1/n) of a token: copied for one row, or shared by many rows."""
PADDING_SHARE = 16
"""At most 1/n of a large tile is padding."""
FOLDED_PLACES = 128
"""Most places in a folded row: up to here masked keys of its other rows cost less than copies of the prefix."""
FOLDED_PADDING = 1.25
"""Most places per place that holds a row."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of a walk, with one entry per row in each array."""

    variant: Indices
    which: Indices
    """The index of its variant among the distinct ones."""
    example: Indices
    start: Indices
    """Its first position."""
    length: Indices
    offset: Indices
    """Index of its first token among the tokens of all rows."""
    layer: Indices
    """The layer where it joins."""
    stage: Indices
    """The stage of that layer at which it joins."""

    def __len__(self) -> int:
        return len(self.variant)

    def __getitem__(self, rows: slice | Indices | Bool[np.ndarray, " _"]) -> RowTable:
        return RowTable(*(getattr(self, field.name)[rows] for field in fields(self)))

    def stage_in(self, layer: int) -> Indices:
        """Return the stage of a layer up to which each row is as recorded."""
        return np.where(self.layer == layer, self.stage, int(Stage.BLOCK_INPUT))


class Tile:
    """Some rows and the indices of their tokens, computed on the host, so that no device is waited for."""

    def __init__(self, rows: RowTable, device: torch.device):
        self.rows = rows
        ends = np.cumsum(rows.length)
        self.begins, self.n_tokens = ends - rows.length, int(ends[-1])
        """Index of each row's first token among the tile's tokens, and the number of tokens."""
        self.width = int(rows.length.max())
        """Number of tokens of the longest row."""
        self.prefix_length = int(rows.start.max())
        """Number of recorded keys before the rows' own keys."""
        self._is_full = self.n_tokens == len(rows) * self.width
        """Whether no place is padding."""
        # Three arrays in one copy: each copy to a device is a launch of its own.
        self.starts, self.lengths, self.examples = to_device(np.stack([rows.start, rows.length, rows.example]), device)
        self._columns = torch.arange(self.width, device=device)

    @cached_property
    def is_token(self) -> Bool[Tensor, "row position"]:
        """True at places that hold a token; the others are padding."""
        return self._columns < self.lengths[:, None]

    @cached_property
    def positions(self) -> Int[Tensor, "row position"]:
        """The position of each token; padding repeats the row's last position."""
        return self.starts[:, None] + torch.minimum(self._columns, self.lengths[:, None] - 1)

    @cached_property
    def places(self) -> Int[Tensor, " token"]:
        """Index of each token among the tokens of all rows."""
        return self._each_token(self.rows.offset)

    @cached_property
    def key_positions(self) -> Int[Tensor, "row key"]:
        """The position of each key, recorded keys first; -1 where a key does not belong to the row."""
        before = torch.arange(self.prefix_length, device=self.starts.device)
        # A row takes only the recorded keys before its start: from there on it has its own, edited keys.
        before = torch.where(before < self.starts[:, None], before, -1)
        return torch.cat([before, torch.where(self.is_token, self.positions, -1)], 1)

    def padded(self, tokens: Float[Tensor, "token d"]) -> Float[Tensor, "row position d"]:
        """Pad the tokens to rows of one length."""
        # A view: rows of one length are laid out without a copy.
        if self._is_full:
            return tokens.view(len(self.rows), self.width, -1)
        # Padding repeats the row's last token, so that it holds finite numbers; nothing reads them.
        return tokens[self.positions + to_device(self.begins - self.rows.start, tokens.device)[:, None]]

    def packed(self, rows: Float[Tensor, "row position d"]) -> Float[Tensor, "token d"]:
        """Undo `padded`: lay rows end to end, without padding."""
        tokens = rows.flatten(0, 1)
        return tokens if self._is_full else tokens[self._each_token(np.arange(len(self.rows)) * self.width)]

    def recorded(self, activation: Tensor) -> Tensor:
        """Gather a recorded activation, `example position ...`, at each token."""
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
        # Rows of one example share one view of its keys; rows of several examples have to gather theirs.
        return SharedPrefix(*(cache[example : example + 1].expand(len(self.rows), -1, -1, -1) for cache in caches))

    @cached_property
    def _recorded_at(self) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"]]:
        """The example and position of each token."""
        examples = to_device(np.repeat(self.rows.example, self.rows.length), self.starts.device)
        return examples, self._each_token(self.rows.start)

    def _each_token(self, first: Indices) -> Int[Tensor, " token"]:
        """Return for each token its row's number in `first` plus the number of tokens before it in the row."""
        numbers = np.repeat(first - self.begins, self.rows.length) + np.arange(self.n_tokens)
        return to_device(numbers, self.starts.device)


def groups_of_rows(tile: Tile) -> Int[np.ndarray, "group slot"] | None:
    """Group the rows of each example in a tile, so that attention takes a group as one row; None if that gains nothing.

    The last row of a group is repeated where other groups hold more. A group shares one copy of the recorded keys and
    values of its example. Else they are copied for every row, and where heads share keys once more for every head: a
    third of the time of a sweep whose rows have one token.
    """
    _, which, counts = np.unique(tile.rows.example, return_inverse=True, return_counts=True)
    # Without a recorded prefix there is nothing to share.
    most = FOLDED_PLACES // tile.width if tile.prefix_length else 0
    while most > 1:
        n_slots = -(-counts.max() // -(-counts.max() // most))  # groups of the largest example have equal sizes
        n_groups = -(-counts // n_slots)
        # Examples with few rows leave slots empty: try fewer slots per group before giving up on groups.
        if n_groups.sum() * n_slots <= FOLDED_PADDING * len(tile.rows):
            example = np.repeat(np.arange(len(counts)), n_groups)
            group = np.arange(len(example)) - np.repeat(np.cumsum(n_groups) - n_groups, n_groups)
            row = np.minimum(group[:, None] * n_slots + np.arange(n_slots), counts[example][:, None] - 1)
            by_example, first = np.argsort(which, kind="stable"), np.cumsum(counts) - counts
            return by_example[first[example][:, None] + row]
        most //= 2
    return None


def rows_of(variants: Variants) -> RowTable:
    """Return the rows of a walk in the order in which they join; a variant with a parent has one if it leaves it."""
    parent, is_live = variants.parent, variants.can_change_output
    numbers = []
    for variant in variants.distinct:
        joins = variant.joins if variant.can_change_output else (0, Stage.BLOCK_INPUT)
        after_last_edit = max((edit.layers.stop for edit in variant.edits), default=0)
        deepest_read = max((layer for _, layer in variant.readings), default=-1)
        # Recomputed from the first change, or the first position read if that is earlier, up to the last one read: a
        # row is one span of tokens. With non-causal attention it is the whole prompt.
        span = (0, variant.whole)
        if variant.whole is None:
            span = min(variant.first_change, variant.kept[0]), variant.kept[-1] + 1
        numbers.append((*joins, after_last_edit, deepest_read, *span))
    layer, stage, edits_stop, read, start, end = np.array(numbers, dtype=np.int64).reshape(-1, 6)[variants.which].T
    # A variant that reads nothing after its last edit never needs a row: its parent's row has what it reads.
    leaves = (parent >= 0) & (edits_stop < edits_stop[parent]) & (read >= edits_stop)
    index = np.flatnonzero(is_live & ((parent < 0) | leaves))
    # A row without a parent joins at its first edit, another one where it leaves its parent.
    alone = parent[index] < 0
    layer = np.where(alone, layer[index], edits_stop[index])
    stage = np.where(alone, stage[index], int(Stage.BLOCK_INPUT))
    start, length = start[index], (end - start)[index]
    # Sorted by layer, so that all rows that have joined form one slice.
    order = np.lexsort((index, start, stage, layer))
    index, length = index[order], length[order]
    offset = np.cumsum(length) - length
    joined = (start[order], length, offset, layer[order], stage[order])
    return RowTable(index, variants.which[index], variants.example[index], *joined)


def tiled(rows: RowTable, recorded: Indices, folded: bool, tile_tokens: Callable[[], int]) -> Iterator[RowTable]:
    """Cut the rows of a layer into tiles of limited size, with little padding if they are large.

    The rows of a tile have the same number in `recorded`, and may share the recorded keys of their example (`folded`).
    """
    for same in np.unique(recorded):
        waiting = rows[np.flatnonzero(recorded == same)]
        # Longest first: neighbours then differ least in length, and if memory is too small the first tile shows it.
        waiting = waiting[np.lexsort((waiting.example, waiting.start, waiting.length))[::-1]]
        while len(waiting):
            most = tile_tokens()
            length, start = waiting.length[: max(1, most)], waiting.start[: max(1, most)]
            width, count = int(length[0]), np.arange(1, len(length) + 1)
            # Wider rows do not fold.
            share = FOLDED_PREFIX_SHARE if folded and 2 * width <= FOLDED_PLACES else PREFIX_SHARE
            # If prompts have one length the last row, the shortest, starts latest: its prefix is the tile's prefix.
            size = count * (width + start // share)
            padding = count * width - np.cumsum(length)
            fits = ((padding <= count * width // PADDING_SHARE) | (size <= most // 8)) & (size <= most)
            # A row longer than a tile still gets a tile, alone.
            fits[0] = True
            n = len(fits) if fits.all() else int(fits.argmin())
            yield waiting[:n]
            waiting = waiting[n:]


class NotFiniteError(Exception):
    """A variant's residual stream or logits hold NaN or infinity."""

    def __init__(self, variant: int, position: int):
        super().__init__(f"variant {variant}, position {position}")
        self.variant, self.position = variant, position


class Walk:
    """One walk through the layers. Use inside `torch.inference_mode()` and the model's lock."""

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
        distinct = variants.distinct
        # Layers after the last one that anything reads are not walked; logits need all layers.
        needed = [
            layer if site != LOGITS else self.layers[-1] for variant in distinct for site, layer in variant.readings
        ]
        self.last_layer = max(needed, default=-1)
        self.writers: dict[tuple[str, int], set[int]] = {}
        self.readers: dict[Reading, set[int]] = {}
        for number, variant in enumerate(distinct):
            for edit in (edit for edit in variant.edits if edit.writes):
                for layer in edit.layers:
                    self.writers.setdefault((edit.site.name, layer), set()).add(number)
            # A reading that no edit can affect keeps the value of the unedited run, and is not read again.
            for reading in variant.readings if variant.can_change_output else ():
                self.readers.setdefault(reading, set()).add(number)
        # A feature dictionary brings a site of its own, which is in no registry.
        edited = (edit.site for variant in distinct for edit in variant.edits if edit.writes)
        self.sites: dict[str, Site] = dict(SITES) | {site.name: site for site in edited}
        self.joining = rows_of(variants)
        self.rows = self.joining[:0]
        self._row = np.full(len(variants), -1)
        """By variant: its row, once it has joined; -1 before, and if it has none."""
        counts = np.array([len(one.kept) for one in distinct])
        most = max(counts, default=0)
        # Padded by repetition, so that indices of padding are valid.
        positions = np.array([(*one.kept, *one.kept[-1:] * (most - len(one.kept))) for one in distinct])
        self._kept = positions, np.arange(most) < counts[:, None]
        """By variant: the positions read, padded by repeating the last one; and a mask of the real entries."""
        self._busy: dict[tuple[Stage, int], list[Site]] = {}
        """By stage and layer: the sites outside attention and MLP that are edited or read."""
        places = {*self.writers, *self.readers}
        for site, layer in product(self.sites.values(), self.layers):
            if site.within is None and site.stage is not None and (site.name, layer) in places:
                self._busy.setdefault((site.stage, layer), []).append(site)
        self._tile: tuple[int, Tile] | None = None
        self._hooked: dict[str, set[int]] = {"attention": set(), "mlp": set()}
        """The layers in whose attention or MLP something is edited by a hook."""
        self._applied: dict[tuple[int, int], list[Indices]] = {}
        """By edit and layer: the variants in which it was made."""
        cuts = (edit for variant in distinct for edit in variant.edits if not edit.writes)
        self._severed_layers = {layer for cut in cuts if not cut.after_softmax for layer in cut.layers}
        """The layers where edges of some row are severed before the softmax."""
        self._layer_masks: dict[int, Tensor] = {}
        """By visibility matrix: the additive mask computed from it."""
        self._keyless: list[tuple[int, Tile, Bool[Tensor, "row head_or_one position"]]] = []
        """By layer and tile, where edges are severed before the softmax: the tokens left without a key."""

    def run(self) -> None:
        """Walk down the layers and deliver each reading of each variant whose edits can affect what it reads."""
        start = self._recorded(Stage.BLOCK_INPUT, 0)
        # One buffer for the tokens of all rows, including rows that join later: joining never moves a row.
        size = int(self.joining.length.sum())
        self.residual = start.new_empty(size, start.shape[-1])
        # Stages that leave the same parts to compute share tiles: rows that join at them go through the layer alike.
        first: dict[tuple[Stage, ...], int] = {}
        taken = (taken_as_recorded(stage, self.blocks.parallel) for stage in Stage)
        alike = np.array([first.setdefault(one, int(stage)) for one, stage in zip(taken, Stage, strict=True)])
        # One set of hooks for the whole walk; they do nothing while no tile is inside a sublayer.
        with self.blocks.model.hooks(self._hooks()), self.blocks.fused():
            for layer in self.layers[: self.last_layer + 1]:
                self._join(layer)
                # The tile size is looked up for each tile: it shrinks if memory runs out in the middle of a layer.
                recorded = alike[self.rows.stage_in(layer)]
                for rows in tiled(self.rows, recorded, self._folds(layer), lambda: self.tile_tokens):
                    self._within_memory(rows, partial(self._step, layer))
        self._check_keys_and_numbers()
        self._read_logits()
        self._check_that_every_edit_was_made()

    def _join(self, layer: int) -> None:
        """Add the rows that start here: from the recorded residual stream, or from the row they leave."""
        # `joining` is sorted by layer, so that the rows that have joined are always one slice.
        begin, end = np.searchsorted(self.joining.layer, [layer, layer + 1])
        joining, parent = self.joining[begin:end], self.variants.parent[self.joining.variant[begin:end]]
        if len(alone := joining[parent < 0]):
            tile = Tile(alone, self.residual.device)
            self.residual[tile.places] = tile.recorded(self._recorded(Stage.BLOCK_INPUT, layer))
        # Until here these had the same edits as their parents: each begins with a copy of the parent's state.
        if len(leaving := joining[parent >= 0]):
            in_parent = replace(leaving, offset=self.joining.offset[self._row[parent[parent >= 0]]])
            source, target = (Tile(rows, self.residual.device).places for rows in (in_parent, leaving))
            self.residual[target] = self.residual[source]
        self.rows = self.joining[:end]
        self._row[joining.variant] = np.arange(begin, end)

    def _step(self, layer: int, rows: RowTable) -> None:
        """Pass the rows of one tile through one block; the residual stream is updated only at the end."""
        # None unless a sublayer is in progress whose hooks edit this tile, also after it ran out of memory.
        self._tile = None
        tile = Tile(rows, self.residual.device)
        recorded = taken_as_recorded(Stage(int(rows[:1].stage_in(layer)[0])), self.blocks.parallel)
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
        """Return the attention output: computed, or as recorded for rows that join after it."""
        if Stage.ATTENTION_OUTPUT in recorded:
            return tile.recorded(self._recorded(Stage.ATTENTION_OUTPUT, layer))
        if Stage.HEAD_OUTPUT in recorded:
            # An edit of z needs no attention: only the recorded z, with the edited heads, goes through W_O.
            z = tile.recorded(self._recorded(Stage.HEAD_OUTPUT, layer))
            for site in self.sites.values():
                if site.stage == Stage.HEAD_OUTPUT and (site.name, layer) in self.writers:
                    write_tokens(z, self._span_edits(site, layer, tile), self.values, site, layer)
            return self.blocks.project_heads(layer, z)
        # Called with the arguments of the model's own call, except rows, positions, mask and cache.
        rows, attention = tile.padded(residual), partial(self.blocks.attention, layer, call=self.recording.calls[layer])
        if self._folds(layer) and (groups := groups_of_rows(tile)) is not None:
            return tile.packed(self._attention_in_groups(layer, tile, rows, groups, attention))
        places_and_keys = tile.positions, self._mask(layer, tile), tile.prefix(self.recording, layer)
        if self._needs_all(layer, tile, "attention"):
            self._tile = layer, tile
            written = attention(rows, *places_and_keys, recorded=tile.examples)
            self._tile = None
            return tile.packed(written)
        # In the last layer only the positions that are read attend. The others hold zeros, which nothing reads.
        columns = self._kept[0][tile.rows.which] - tile.rows.start[:, None]
        # Rows that read fewer positions than others repeat one.
        most = int(self._kept[1][tile.rows.which].sum(1).max())
        kept = to_device(columns[:, :most], rows.device)
        written = attention(rows, *places_and_keys, kept, recorded=tile.examples)
        return tile.packed(torch.zeros_like(rows).scatter(1, kept[:, :, None].expand_as(written), written))

    def _attention_in_groups(
        self,
        layer: int,
        tile: Tile,
        rows: Float[Tensor, "row position d_model"],
        groups: Int[np.ndarray, "group slot"],
        attention: Callable[..., Tensor],
    ) -> Float[Tensor, "row position d_model"]:
        """Return the attention output of the rows of a tile, with a group of rows in one row of attention."""
        place = np.empty(len(tile.rows), dtype=np.int64)
        # Backwards, since the last write wins: for a repeated row its first slot is kept.
        place[groups[:, ::-1]] = np.arange(groups.size).reshape(groups.shape)[:, ::-1]
        index, of_row = (to_device(one, rows.device) for one in (groups, place))
        examples, positions = tile.examples[index[:, 0]], tile.positions[index].flatten(1, 2)
        slot = torch.arange(groups.shape[1], device=rows.device).repeat_interleave(tile.width)
        keys = torch.where(tile.is_token, tile.positions, -1)[index].flatten(1, 2)
        # Keys of the other rows in a group are masked like padding: rows are different runs.
        keys = torch.where(slot[:, None] == slot, keys[:, None], -1)
        before = torch.arange(tile.prefix_length, device=rows.device)
        starts = tile.starts[index].repeat_interleave(tile.width, 1)[:, :, None]
        keys = torch.cat([torch.where(before < starts, before, -1), keys], -1)
        # Where rows are grouped nothing is severed before the softmax.
        mask = self._mask_of_layer(layer)[positions[:, :, None], keys][:, None]
        caches = self.recording.keys[layer], self.recording.values[layer]
        prefix = SharedPrefix(*(cache[:, :, : tile.prefix_length][examples] for cache in caches))
        written = attention(rows[index].flatten(1, 2), positions, mask, prefix, recorded=examples)
        return written.unflatten(1, (groups.shape[1], -1)).flatten(0, 1)[of_row]

    def _folds(self, layer: int) -> bool:
        """Return whether rows may be folded in a layer's attention: no step in it may need a token's row."""
        alone = self.blocks.has_own_steps or layer in self._hooked["attention"] or layer in self._severed_layers
        return layer < self.last_layer and not alone

    def _mask(self, layer: int, tile: Tile) -> Float[Tensor, "row head_or_one position key"]:
        """Return the additive mask of the keys that each token may read."""
        mask = self._mask_of_layer(layer)[tile.positions[:, :, None], tile.key_positions[:, None, :]][:, None]
        if (severed := self._severed(layer, tile, zero=False)) is not None:
            # finfo.min as in transformers' masks: -inf would make NaN of a row left without a key.
            mask = mask.masked_fill(severed, torch.finfo(mask.dtype).min)
            self._keyless.append((layer, tile, (mask != 0).all(-1)))
        return mask

    def _severed(self, layer: int, tile: Tile, zero: bool) -> Bool[Tensor, "row head_or_one position key"] | None:
        """Return which edges of a tile's rows are severed, before or after (`zero`) the softmax; None if none are."""
        rows, distinct = tile.rows, self.variants.distinct
        cutting: dict[int, list[Edit]] = {}
        for number in np.unique(rows.which):
            cuts_of_variant = (edit for edit in distinct[number].edits if not edit.writes and layer in edit.layers)
            cutting[number] = [edit for edit in cuts_of_variant if edit.after_softmax == zero]
        severed: Tensor | None = None
        # The n-th cuts of all rows at once: one by one, a severed head took 18 to 20 launches.
        for turn in range(max(map(len, cutting.values()))):
            cuts = [cutting[number][turn] if turn < len(cutting[number]) else None for number in rows.which]
            edges, numbers = self._edges_cut
            which = np.array([0 if cut is None else numbers[id(cut.edges)] for cut in cuts])
            at = to_device(which, edges.device)[:, None, None], tile.positions[:, :, None]
            # Keys that do not belong to the row read column 0: they are masked anyway.
            cut_edges = edges[*at, tile.key_positions.clamp_min(0)[:, None, :]][:, None]
            if any(cut is not None and cut.heads is not None for cut in cuts):
                heads = np.zeros((len(cuts), self.blocks.model.shape.n_heads), dtype=bool)
                for of_row, cut in zip(heads, cuts, strict=True):
                    of_row[slice(None) if cut is None or cut.heads is None else list(cut.heads)] = True
                cut_edges = cut_edges & to_device(heads, cut_edges.device)[:, :, None, None]
            severed = cut_edges if severed is None else severed | cut_edges
            for i, cut in enumerate(cuts):
                if cut is not None:
                    self._applied.setdefault((id(cut), layer), []).append(rows.variant[i : i + 1])
        return severed

    def _mask_of_layer(self, layer: int) -> Float[Tensor, "query key"]:
        """Return the mask added to the scores; the last key, number -1, is a placeholder that no query sees."""
        # Layers with the same visibility (all full, or all sliding) share one tensor, and so one mask.
        visible = self.recording.visible[layer]
        if id(visible) not in self._layer_masks:
            least = torch.finfo(self.residual.dtype).min
            mask = visible.new_full((len(visible), visible.shape[1] + 1), least, dtype=self.residual.dtype)
            self._layer_masks[id(visible)] = mask.masked_fill_(torch.nn.functional.pad(visible, (0, 1)), 0.0)
        return self._layer_masks[id(visible)]

    @cached_property
    def _edges_cut(self) -> tuple[Bool[Tensor, "_ query key"], dict[int, int]]:
        """The severed edges: an empty matrix, then each distinct matrix once; and the number of each matrix."""
        edits = [edit for variant in self.variants.distinct for edit in variant.edits if not edit.writes]
        matrices = {id(edit.edges): edit.edges for edit in edits}
        longest = max(len(matrix) for matrix in matrices.values())
        # Number 0 severs nothing: it is for rows without a cut in this turn of `_severed`.
        edges = torch.zeros(1 + len(matrices), longest, longest, dtype=torch.bool, device=self.residual.device)
        for padded, matrix in zip(edges[1:], matrices.values(), strict=True):
            padded[: len(matrix), : len(matrix)] = matrix
        return edges, {one: 1 + number for number, one in enumerate(matrices)}

    def _feed_forward(
        self, layer: int, tile: Tile, middle: Tensor, recorded: tuple[Stage, ...]
    ) -> Float[Tensor, "token d_model"]:
        """Return the MLP output: computed, or as recorded for rows that join after it; 0 without an MLP."""
        if self.blocks.model.shape.d_mlp and Stage.MLP_OUTPUT in recorded:
            return tile.recorded(self._recorded(Stage.MLP_OUTPUT, layer))
        if self._needs_all(layer, tile, "mlp"):
            self._tile = layer, tile
            mlp_out = self.blocks.feed_forward(layer, middle)
            self._tile = None
            return mlp_out
        positions, read = self._kept[0][tile.rows.which], self._kept[1][tile.rows.which]
        # Without the padding of `_kept`: the MLP would be computed twice for a repeated token.
        kept = to_device((positions + (tile.begins - tile.rows.start)[:, None])[read], middle.device)
        mlp_out = torch.zeros_like(middle)
        mlp_out[kept] = self.blocks.feed_forward(layer, middle[kept])
        return mlp_out

    def _needs_all(self, layer: int, tile: Tile, sublayer: Literal["attention", "mlp"]) -> bool:
        """Return whether a sublayer is needed at unread positions: for later layers, or for an edit in or after it."""
        if layer < self.last_layer or layer in self._hooked[sublayer]:
            return True
        after = Stage.HEAD_OUTPUT if sublayer == "attention" else Stage.NEURONS
        # A function of rows (noise, a factor) reads the sublayer's output at its own positions, even if no metric does.
        later = [site for site, at in self.writers if at == layer and (self.sites[site].stage or 0) > after]
        written = {number for site in later for number in self.writers[site, layer]}
        return not written.isdisjoint(tile.rows.which.tolist())

    def _hooks(self) -> list[Hook]:
        """Return hooks at the edited sites within attention and MLP, for the rows that go through them."""
        sites: dict[Place, Site] = {}
        # The edits of a variant with a parent are made in the parent's row.
        for number in np.unique(self.variants.which[self.variants.parent < 0]):
            variant = self.variants.distinct[number]
            if not variant.can_change_output:
                continue
            first_layer, stage = variant.joins
            recorded = taken_as_recorded(stage, self.blocks.parallel)
            for edit in variant.edits:
                # Severing after the softmax sets zeros in the pattern; severing before it changes the mask, not a hook.
                site = edit.site if edit.writes else main_site(Stage.PATTERN) if edit.after_softmax else None
                if site is None or site.within is None:
                    continue
                # In the layer where it joins, a row skips the parts before its first edit: no hook would see it.
                passed = Stage.MLP_OUTPUT in recorded if site.within == "mlp" else bool(recorded)
                for layer in edit.layers:
                    if layer <= self.last_layer and not (passed and layer == first_layer):
                        sites[site.name, layer] = site
        for (_, layer), site in sites.items():
            self._hooked[str(site.within)].add(layer)
        return [(site.hook_name(layer), self._edit_inside(site)) for (_, layer), site in sites.items()]

    def _edit_inside(self, site: Site) -> TrustedHook:
        def edit(activation: Tensor, hook: object) -> Tensor | None:
            # Rows that start from a recorded z pass W_O's hooks with no tile set: their z is already edited.
            if self._tile is None:
                return None
            layer, tile = self._tile
            # A copy, since the block may reuse its own tensor; contiguous, so that flatten returns a writable view.
            edited = activation.clone(memory_format=torch.contiguous_format)
            if site.has_keys:
                span_edits = self._span_edits(site, layer, tile, 1)
                write_patterns(edited, span_edits, tile.key_positions, self.values, site, layer)
                if (severed := self._severed(layer, tile, zero=True)) is not None:
                    edited.masked_fill_(severed, 0.0)
            else:
                # Attention receives padded rows, an MLP tokens end to end.
                width = edited.shape[1] if site.within == "attention" else None
                write_tokens(edited.flatten(0, 1), self._span_edits(site, layer, tile, width), self.values, site, layer)
            return edited

        return replace_hook(edit)

    def _at(self, stage: Stage, layer: int, tile: Tile, activation: Tensor) -> Tensor:
        """Apply the edits at a stage between sublayers, then deliver the readings there."""
        for site in self._busy.get((stage, layer), ()):
            # Edits first: a reading at a site is the edited run's activation.
            if (site.name, layer) in self.writers:
                write_tokens(activation, self._span_edits(site, layer, tile), self.values, site, layer)
            if (site.name, layer) in self.readers:
                self._read((site.name, layer), tile, activation)
        return activation

    def _span_edits(self, site: Site, layer: int, tile: Tile, width: int | None = None) -> list[TokenSpanEdit]:
        """List the edits of a tile's rows at a site; tokens are end to end or, with a width, padded to it."""
        spans, rows = [], tile.rows
        offset = tile.begins if width is None else np.arange(len(rows)) * width
        # A row that left its parent joined after its last edit: none of its edits is in this layer.
        for number in sorted(self.writers.get((site.name, layer), ())):
            if not len(rows_of_variant := np.flatnonzero(rows.which == number)):
                continue
            # Rows of one variant begin and end at the same positions.
            start, length = int(rows.start[rows_of_variant[0]]), int(rows.length[rows_of_variant[0]])
            for edit in self.variants.distinct[number].edits:
                if edit.writes and edit.site.name == site.name and layer in edit.layers:
                    at = rows.example[rows_of_variant], start, length, offset[rows_of_variant]
                    spans.append(TokenSpanEdit(edit, *at))
                    self._applied.setdefault((id(edit), layer), []).append(rows.variant[rows_of_variant])
        return spans

    def _recorded(self, stage: Stage, layer: int) -> Tensor:
        return self.recording.activations[main_site(stage).hook_name(layer)]

    def _read(self, reading: Reading, tile: Tile, activation: Tensor) -> None:
        """Deliver a reading at a site of a layer, from each variant's own row or its parent's row."""
        place = np.full(len(self.joining), -1)
        place[self._row[tile.rows.variant]] = np.arange(len(tile.rows))
        index, row = self._rows_reading(reading)
        index, row_of = index[place[row] >= 0], place[row][place[row] >= 0]
        for with_count, positions in self._by_count(index):
            at = row_of[with_count]
            tokens = positions + (tile.begins - tile.rows.start)[at][:, None]
            self.deliver(reading, index[with_count], activation[to_device(tokens, activation.device)])

    def _rows_reading(self, reading: Reading) -> tuple[Indices, Indices]:
        """Return the variants that have this reading, and the row of each: its own, or until it has one its parent's.

        Variants without either are left out.
        """
        index = np.flatnonzero(np.isin(self.variants.which, list(self.readers.get(reading, ()))))
        own, parent = self._row[index], self.variants.parent[index]
        rows = np.where(own >= 0, own, np.where(parent >= 0, self._row[parent], -1))
        return index[rows >= 0], rows[rows >= 0]

    def _by_count(self, index: Indices) -> Iterator[tuple[Indices, Indices]]:
        """Group variants by their number of positions read: yield a group's indices, and the positions of each."""
        positions, read = self._kept[0][self.variants.which[index]], self._kept[1][self.variants.which[index]]
        counts = read.sum(1)
        for count in np.unique(counts):
            with_count = np.flatnonzero(counts == count)
            yield with_count, positions[with_count, :count]

    def _read_logits(self) -> None:
        """Deliver the logits at the kept positions, a tile of variants at a time."""
        reading = LOGITS, len(self.layers)
        index, row = self._rows_reading(reading)
        row_of = np.full(len(self.variants), -1)
        row_of[index] = row

        def deliver(indices: Indices) -> None:
            ((_, positions),) = self._by_count(indices)
            rows = self.joining[row_of[indices]]
            tokens = to_device(positions + (rows.offset - rows.start)[:, None], self.residual.device)
            residual = self.residual[tokens.flatten()]
            if self.answers is None:
                logits = self.blocks.logits(residual)
            else:
                examples = to_device(self.variants.example[indices], residual.device)
                logits = self.blocks.logits_of(residual, self.answers[examples].repeat_interleave(tokens.shape[1], 0))
            logits = logits.view(*tokens.shape, -1)
            # One column of full logits is enough: a non-finite number in a state reaches every column of W_U.
            wrong = ~(logits if self.answers is not None else logits[..., :1]).isfinite().all(-1)
            if bool(wrong.any()):
                i, place = wrong.nonzero()[0].tolist()
                raise NotFiniteError(int(indices[i]), int(positions[i, place]))
            self.deliver(reading, indices, logits)

        for with_count, positions in self._by_count(index):
            rest = index[with_count]
            while len(rest):
                most = max(1, self.tile_tokens // positions.shape[1])
                self._within_memory(rest[:most], deliver)
                rest = rest[most:]

    def _check_keys_and_numbers(self) -> None:
        """Check once, at the end, so that no device is waited for during the walk."""
        # Keys first: a token without a key attends to all keys equally, future keys too; its result is finite.
        if self._keyless and any(torch.stack([found.any() for *_, found in self._keyless]).tolist()):
            layer, tile, keyless = next(one for one in self._keyless if bool(one[2].any()))
            row, *_, column = keyless.nonzero()[0].tolist()
            raise InterventionError(
                f"Knocking out these edges leaves token {int(tile.positions[row, column])} of example "
                f"{tile.rows.example[row]} no key to attend to in layer {layer}. Leave it at least one key, or use "
                "variant='zero'."
            )
        # A sum reads the memory once, without a mask of its size; but it may overflow where every number is finite.
        suspect = ~self.residual.sum(-1, dtype=torch.float32).isfinite()
        if not bool(suspect.any()):
            return
        wrong = suspect & ~self.residual.isfinite().all(-1)
        for row in np.flatnonzero(self.rows.length):
            offset, length = int(self.rows.offset[row]), int(self.rows.length[row])
            if bool((own := wrong[offset : offset + length]).any()):
                raise NotFiniteError(int(self.rows.variant[row]), int(self.rows.start[row]) + int(own.nonzero()[0]))

    def _within_memory(self, items: Any, work: Callable[[Any], object]) -> None:
        """Do the work; if memory runs out, do it in parts, and make all later tiles smaller."""
        parts = in_halves(items, work)
        self.tile_tokens = max(1, self.tile_tokens // len(parts))

    def _check_that_every_edit_was_made(self) -> None:
        alone = self.rows.variant[self.variants.parent[self.rows.variant] < 0]
        for number in np.unique(self.variants.which[alone]):
            expected = alone[self.variants.which[alone] == number]
            for edit in self.variants.distinct[number].edits:
                for layer in edit.layers[: max(0, self.last_layer + 1 - edit.layers.start)]:
                    # A TransformerLens hook may be listed and never fire: an edit there would silently do nothing.
                    made = np.zeros(len(self.variants), dtype=bool)
                    for edited in self._applied.get((id(edit), layer), ()):
                        made[edited] = True
                    if not made[expected].all():
                        raise InterventionError(
                            f"The edit {edit} of layer {layer} did not take effect: its hook never fired. This is a "
                            "fault of the model's hooks, not of the sweep's options."
                        )


def not_walked(edits: Iterable[Edit]) -> str | None:
    """Return why the walk cannot edit one of these sites, or None if it can edit all of them."""
    # The walk edits tensors between the parts of a block and, within them, activations shaped `row position ...`.
    for site in {edit.site.name: edit.site for edit in edits if edit.writes}.values():
        inside = site.within is not None and site.stage in (Stage.ATTENTION, Stage.NEURONS) and not site.has_keys
        if site.stage is None or not (inside or site.hook == main_site(site.stage).hook):
            return f"the walk down the layers does not know where {site.name} lies in a block"
    return None
