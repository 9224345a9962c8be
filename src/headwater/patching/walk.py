"""Run many variants of a few examples in one walk down the layers, each from its own first layer and position.

At layer l the variants whose first edit lies there join: their residual stream is the unedited run's, from their first
position on. Below, all of them go on together.

1. Every row holds the tokens from its first changed position to the last position read. A tile of rows of similar
   length goes through a whole block and back into the wave's residual stream before the next tile does: what it needs
   on the way stays in the cache, and a tile that runs out of memory can start again.
2. A row that joins after attention (an edited head output, say) takes the recorded attention output, and one that joins
   after the MLP takes that too.
3. A variant with a trunk (cumulative windows) follows its trunk and leaves it at the layer where its own edits end.
4. In the last layer only the positions that are read ask, are written to by heads, and go through the MLP.

Which tensors pass through a block is said by stage, and a site's row says at which stage it lies: between attention and
MLP the walk holds the tensor itself; within them a hook writes while a tile goes through.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.errors import InterventionError
from headwater.models.blocks import Blocks, Recording
from headwater.models.edits import Hook, Trusted, makes
from headwater.models.memory import in_halves
from headwater.models.sites import SITES, Site, Stage, main_site, taken_as_recorded
from headwater.patching.rows import Stretch, Values, write_pattern, write_tokens
from headwater.patching.tile import Row, Tile, rows_joining, tiled
from headwater.patching.variants import (
    LOGITS,
    Deliver,
    Edit,
    Place,
    Reading,
    Replace,
    Variant,
)


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
        variants: Sequence[Variant],
        values: Values,
        deliver: Deliver,
        tile_tokens: int,
        answers: Int[Tensor, "example answer"] | None = None,
    ):
        self.blocks, self.recording, self.variants, self.values = blocks, recording, variants, values
        self.deliver, self.tile_tokens, self.answers = deliver, tile_tokens, answers
        self.layers = sorted(recording.calls)
        needed = [layer if site != LOGITS else self.layers[-1] for v in variants for site, layer in v.readings]
        self.last_layer = max(needed, default=-1)
        self.writers: dict[tuple[str, int], set[int]] = {}
        self.readers: dict[Reading, list[int]] = {}
        for index, variant in enumerate(variants):
            for edit in (edit for edit in variant.edits if isinstance(edit, Replace)):
                for layer in edit.layers:
                    self.writers.setdefault((edit.site.name, layer), set()).add(index)
            for reading in variant.readings if variant.is_felt else ():
                self.readers.setdefault(reading, []).append(index)
        edited = (edit.site for variant in variants for edit in variant.edits if isinstance(edit, Replace))
        self.sites: dict[str, Site] = dict(SITES) | {site.name: site for site in edited}
        self.joining = rows_joining(variants)
        self._busy: dict[Stage, list[Site]] = {}
        self.rows: dict[int, Row] = {}
        self._tile: tuple[int, Tile] | None = None
        self._hooked: dict[str, set[int]] = {"attention": set(), "mlp": set()}
        """The layers within whose attention or MLP something is edited."""
        self._applied: set[tuple[int, int, int]] = set()

    def run(self) -> None:
        """Walk down the layers and deliver every reading of every variant that is felt where it is read."""
        start = self._recorded(Stage.BLOCK_INPUT, 0)
        size = sum(row.length for rows in self.joining.values() for row in rows)
        self.residual = start.new_empty(size, start.shape[-1])
        with self.blocks.model.hooks(self._hooks()), self.blocks.fused():
            for layer in self.layers[: self.last_layer + 1]:
                self._join(layer)
                self._busy = self._busy_at(layer)
                for rows in tiled(self.rows.values(), partial(self._taken, layer), lambda: self.tile_tokens):
                    self._within_memory(rows, partial(self._step, layer))
        self._check_that_all_is_finite()
        self._read_logits()
        self._check_that_every_edit_was_made()

    def _join(self, layer: int) -> None:
        """Take in the rows that start here: from the recorded residual stream, or from the trunk they leave."""
        joining = self.joining.get(layer, [])
        if alone := [row for row in joining if self.variants[row.variant].trunk is None]:
            tile = Tile(alone, self.residual.device)
            self.residual[tile.places] = tile.recorded(self._recorded(Stage.BLOCK_INPUT, layer))
        for row in joining:
            trunk = self.variants[row.variant].trunk
            if trunk is not None:
                self._stream(row).copy_(self._stream(self.rows[trunk]))
            self.rows[row.variant] = row

    def _stream(self, row: Row) -> Float[Tensor, "position d_model"]:
        """A row's part of the residual stream."""
        return self.residual[row.offset : row.offset + row.length]

    def _taken(self, layer: int, row: Row) -> tuple[Stage, ...]:
        """What a row takes in a layer as it was recorded."""
        return taken_as_recorded(row.stage_in(layer), self.blocks.parallel)

    def _busy_at(self, layer: int) -> dict[Stage, list[Site]]:
        """The sites of a layer, outside attention and MLP, that are written or read, by stage."""
        places = {*self.writers, *self.readers}
        busy: dict[Stage, list[Site]] = {}
        for site in self.sites.values():
            if site.within is None and site.stage is not None and (site.name, layer) in places:
                busy.setdefault(site.stage, []).append(site)
        return busy

    def _step(self, layer: int, rows: Sequence[Row]) -> None:
        """Take the rows of one tile through one block; the residual stream is written last, and only then."""
        tile, taken = Tile(rows, self.residual.device), self._taken(layer, rows[0])
        residual = self._at(Stage.BLOCK_INPUT, layer, tile, self.residual[tile.places])
        attended = self._at(Stage.ATTENTION_OUTPUT, layer, tile, self._attention(layer, tile, residual, taken))
        before_mlp = residual + attended
        if not self.blocks.parallel:
            before_mlp = self._at(Stage.BETWEEN, layer, tile, before_mlp)
        read = residual if self.blocks.parallel else before_mlp
        added = self._at(Stage.MLP_OUTPUT, layer, tile, self._feed_forward(layer, tile, read, taken))
        self.residual[tile.places] = self._at(Stage.BLOCK_OUTPUT, layer, tile, before_mlp + added)

    def _attention(
        self, layer: int, tile: Tile, residual: Tensor, taken: tuple[Stage, ...]
    ) -> Float[Tensor, "token d_model"]:
        """What attention adds: computed, or as recorded for rows that join after it."""
        if Stage.ATTENTION_OUTPUT in taken:
            return tile.recorded(self._recorded(Stage.ATTENTION_OUTPUT, layer))
        if Stage.HEAD_OUTPUT in taken:
            z = tile.recorded(self._recorded(Stage.HEAD_OUTPUT, layer))
            for site in self.sites.values():
                if site.stage == Stage.HEAD_OUTPUT and (site.name, layer) in self.writers:
                    write_tokens(z, self._stretches(site, layer, tile), self.values, site, layer)
            return self.blocks.project_heads(layer, z)
        mask, prefix = self._mask(layer, tile), tile.prefix(self.recording, layer)
        call, rows = self.recording.calls[layer], tile.padded(residual)
        if self._needs_all(layer, tile, "attention"):
            with self._inside(layer, tile):
                return tile.packed(self.blocks.attention(layer, rows, call, tile.positions, mask, prefix))
        kept = self._kept_columns(tile)
        read = self.blocks.attention(layer, rows, call, tile.positions, mask, prefix, kept)
        return tile.packed(torch.zeros_like(rows).scatter(1, kept[:, :, None].expand_as(read), read))

    @contextlib.contextmanager
    def _inside(self, layer: int, tile: Tile) -> Iterator[None]:
        """Let the hooks of `_hooks` know what is going through, for the length of a call."""
        self._tile = layer, tile
        try:
            yield
        finally:
            self._tile = None

    def _mask(self, layer: int, tile: Tile) -> Float[Tensor, "row head_or_one position key"]:
        """Say which keys each token may read."""
        positions, keys = tile.positions, tile.key_positions
        allowed = self.recording.visible[layer][positions[:, :, None], keys.clamp_min(0)[:, None, :]]
        allowed = (allowed & (keys >= 0)[:, None, :])[:, None]
        variants = [self.variants[row.variant] for row in tile.rows]
        cuts = [(i, cut) for i, variant in enumerate(variants) for cut in variant.cutting(layer, zero=False)]
        if any(cut.heads is not None for _, cut in cuts):
            allowed = allowed.repeat(1, self.blocks.model.shape.n_heads, 1, 1)
        for i, cut in cuts:
            severed = cut.edges[positions[i]][:, keys[i].clamp_min(0)]
            heads: Any = slice(None) if cut.heads is None else list(cut.heads)
            allowed[i, heads] &= ~severed
            self._note(tile.rows[i], cut, layer)
        if cuts and not bool(allowed.any(-1).all()):
            raise InterventionError(_no_key_left(layer, tile, allowed))
        mask = torch.zeros(allowed.shape, dtype=self.residual.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(mask.dtype).min)

    def _feed_forward(
        self, layer: int, tile: Tile, middle: Tensor, taken: tuple[Stage, ...]
    ) -> Float[Tensor, "token d_model"]:
        """What the MLP adds: computed, or as recorded for rows that join after it; 0 without one."""
        if self.blocks.model.shape.d_mlp and Stage.MLP_OUTPUT in taken:
            return tile.recorded(self._recorded(Stage.MLP_OUTPUT, layer))
        if self._needs_all(layer, tile, "mlp"):
            with self._inside(layer, tile):
                return self.blocks.feed_forward(layer, middle)
        kept = [token for i in range(len(tile.rows)) for token in self._kept_tokens(tile, i)]
        mlp_out = torch.zeros_like(middle)
        mlp_out[kept] = self.blocks.feed_forward(layer, middle[kept])
        return mlp_out

    def _kept_tokens(self, tile: Tile, i: int, index: int | None = None) -> list[int]:
        """Where the positions that a row's variant (or one that follows it) reads lie in a tile."""
        row = tile.rows[i]
        variant = self.variants[row.variant if index is None else index]
        return [tile.tokens_of(i).start + position - row.start for position in variant.kept]

    def _needs_all(self, layer: int, tile: Tile, sublayer: Literal["attention", "mlp"]) -> bool:
        """Whether a sublayer is needed where nothing is read: layers follow, or an edit within or after it looks."""
        if layer < self.last_layer or layer in self._hooked[sublayer]:
            return True
        after = Stage.HEAD_OUTPUT if sublayer == "attention" else Stage.NEURONS
        later = [site for site, at in self.writers if at == layer and (self.sites[site].stage or 0) > after]
        return any(row.variant in self.writers[site, layer] for site in later for row in tile.rows)

    def _kept_columns(self, tile: Tile) -> Int[Tensor, "row kept"]:
        """Which places of a tile's rows are read; rows that read fewer than others name one again."""
        columns = [[position - row.start for position in self.variants[row.variant].kept] for row in tile.rows]
        most = max(map(len, columns))
        padded = [one + one[-1:] * (most - len(one)) for one in columns]
        return torch.tensor(padded, device=self.residual.device)

    def _hooks(self) -> list[Hook]:
        """Hooks at the sites within attention and MLP, wherever the edit of a row that goes through them acts."""
        wanted: dict[Place, Site] = {}
        for row in (variant for variant in self.variants if variant.is_felt and variant.trunk is None):
            taken = taken_as_recorded(row.stage, self.blocks.parallel)
            for edit in row.edits:
                site = edit.site if isinstance(edit, Replace) else main_site(Stage.PATTERN) if edit.zero else None
                if site is None or site.within is None:
                    continue
                passed = Stage.MLP_OUTPUT in taken if site.within == "mlp" else bool(taken)
                for layer in edit.layers:
                    if layer <= self.last_layer and not (passed and layer == row.first_layer):
                        wanted[site.name, layer] = site
        for (_, layer), site in wanted.items():
            self._hooked[str(site.within)].add(layer)
        return [(site.hook_name(layer), self._edit_inside(site)) for (_, layer), site in wanted.items()]

    def _edit_inside(self, site: Site) -> Trusted:
        def edit(activation: Tensor, hook: object) -> Tensor | None:
            if self._tile is None:
                return None
            layer, tile = self._tile
            edited = activation.clone(memory_format=torch.contiguous_format)
            if site.has_keys:
                for stretch in self._stretches(site, layer, tile, 1):
                    i = stretch.offset
                    write_pattern(edited[i], stretch, tile.key_positions[i], self.values, site, layer)
                for i, row in enumerate(tile.rows):
                    self._zero_edges(layer, row, edited[i, :, : row.length], tile.key_positions[i])
            else:
                width = edited.shape[1] if site.within == "attention" else None
                write_tokens(edited.flatten(0, 1), self._stretches(site, layer, tile, width), self.values, site, layer)
            return edited

        return makes(edit)

    def _at(self, stage: Stage, layer: int, tile: Tile, activation: Tensor) -> Tensor:
        """Make the edits at a stage between sublayers, then deliver what is read there."""
        for site in self._busy.get(stage, ()):
            if (site.name, layer) in self.writers:
                write_tokens(activation, self._stretches(site, layer, tile), self.values, site, layer)
            if (site.name, layer) in self.readers:
                self._read((site.name, layer), tile, activation)
        return activation

    def _is_own(self, row: Row, layer: int) -> bool:
        """Whether a row's edits are still to be made; one that left its trunk had them made there."""
        return self.variants[row.variant].trunk is None or layer < row.layer

    def _stretches(self, site: Site, layer: int, tile: Tile, width: int | None = None) -> list[Stretch]:
        """List the edits of a tile's rows at a site, where its tokens lie end to end or, with a width, padded to it."""
        found = []
        writers = self.writers.get((site.name, layer), ())
        for i, row in enumerate(tile.rows):
            if row.variant not in writers or not self._is_own(row, layer):
                continue
            offset = tile.tokens_of(i).start if width is None else i * width
            for edit in self.variants[row.variant].replacing(site, layer):
                found.append(Stretch(edit, row.example, row.start, row.length, offset))
                self._note(row, edit, layer)
        return found

    def _zero_edges(self, layer: int, row: Row, held: Tensor, key_positions: Tensor) -> None:
        for cut in self.variants[row.variant].cutting(layer, zero=True):
            severed = cut.edges[row.start : row.start + row.length][:, key_positions.clamp_min(0)]
            heads: Any = slice(None) if cut.heads is None else list(cut.heads)
            held[heads] = held[heads].masked_fill(severed, 0.0)
            self._note(row, cut, layer)

    def _recorded(self, stage: Stage, layer: int) -> Tensor:
        return self.recording.activations[main_site(stage).hook_name(layer)]

    def _read(self, reading: Reading, tile: Tile, activation: Tensor) -> None:
        """Deliver what is read at a site of a layer, from each variant's own row or its trunk's."""
        place = {row.variant: i for i, row in enumerate(tile.rows)}
        readers: dict[int, list[tuple[int, list[int]]]] = {}
        for index in self.readers[reading]:
            row = self._row_of(index)
            if row is not None and row.variant in place:
                tokens = self._kept_tokens(tile, place[row.variant], index)
                readers.setdefault(len(tokens), []).append((index, tokens))
        for pairs in readers.values():
            read = torch.tensor([tokens for _, tokens in pairs], device=activation.device)
            self.deliver(reading, [index for index, _ in pairs], activation[read])

    def _row_of(self, index: int) -> Row | None:
        """The row that holds a variant: its own, or its trunk's for as long as it follows it."""
        trunk = self.variants[index].trunk
        return self.rows.get(index) or (None if trunk is None else self.rows.get(trunk))

    def _read_logits(self) -> None:
        """Deliver the logits at the kept positions, a tile of variants at a time."""
        readers: dict[int, list[int]] = {}
        for index in self.readers.get((LOGITS, len(self.layers)), ()):
            if self._row_of(index) is not None:
                readers.setdefault(len(self.variants[index].kept), []).append(index)
        for n_kept, indices in readers.items():
            for i in range(0, len(indices), max(1, self.tile_tokens // n_kept)):
                part = indices[i : i + max(1, self.tile_tokens // n_kept)]
                self._within_memory(part, self._deliver_logits)

    def _deliver_logits(self, indices: list[int]) -> None:
        rows = [(row, self.variants[index].kept) for index in indices if (row := self._row_of(index)) is not None]
        places = [[row.offset + position - row.start for position in kept] for row, kept in rows]
        tokens = torch.tensor(places, device=self.residual.device)
        residual = self.residual[tokens.flatten()]
        if self.answers is None:
            logits = self.blocks.logits(residual)
        else:
            examples = torch.tensor([self.variants[i].example for i in indices], device=residual.device)
            logits = self.blocks.logits_of(residual, self.answers[examples].repeat_interleave(tokens.shape[1], 0))
        logits = logits.view(*tokens.shape, -1)
        wrong = ~(logits if self.answers is not None else logits[..., :1]).isfinite().all(-1)
        if bool(wrong.any()):
            i, place = wrong.nonzero()[0].tolist()
            raise NotFiniteError(indices[i], self.variants[indices[i]].kept[place])
        self.deliver((LOGITS, len(self.layers)), indices, logits)

    def _check_that_all_is_finite(self) -> None:
        """Look at each token's sum, which is not finite when one of its numbers is not, and then at the token."""
        suspect = ~self.residual.sum(-1, dtype=torch.float32).isfinite()
        if not bool(suspect.any()):
            return
        for row in self.rows.values():
            wrong = suspect[row.offset : row.offset + row.length] & ~self._stream(row).isfinite().all(-1)
            if bool(wrong.any()):
                raise NotFiniteError(row.variant, row.start + int(wrong.nonzero()[0]))

    def _within_memory(self, items: Sequence[Any], work: Callable[[Any], object]) -> None:
        """Do the work; when memory runs out, do it in parts, and make all tiles smaller from now on."""
        parts = in_halves(items, work)
        self.tile_tokens = max(1, self.tile_tokens // len(parts))

    def _note(self, row: Row, edit: object, layer: int) -> None:
        self._applied.add((row.variant, id(edit), layer))

    def _check_that_every_edit_was_made(self) -> None:
        for index in (index for index in self.rows if self.variants[index].trunk is None):
            for edit in self.variants[index].edits:
                for layer in edit.layers[: max(0, self.last_layer + 1 - edit.layers.start)]:
                    if (index, id(edit), layer) not in self._applied:
                        raise InterventionError(
                            f"The edit {edit} of layer {layer} did not take effect: its hook never fired. This is a "
                            "fault of the model's hooks, not of the sweep's options."
                        )


def not_walked(edits: Iterable[Edit]) -> str | None:
    """Say which edited site the walk does not know, or None when it knows all of them.

    It knows the tensor that passes through a block at each stage, and, within attention and MLP, what a hook sees as
    `row position ...`.
    """
    for site in {edit.site.name: edit.site for edit in edits if isinstance(edit, Replace)}.values():
        inside = site.within is not None and site.stage in (Stage.ATTENTION, Stage.NEURONS) and not site.has_keys
        if site.stage is None or not (inside or site.hook == main_site(site.stage).hook):
            return f"where {site.name} lies in a block is not known to the walk down the layers"
    return None


def _no_key_left(layer: int, tile: Tile, allowed: Bool[Tensor, "row head_or_one position key"]) -> str:
    row, *_, column = (~allowed.any(-1)).nonzero()[0].tolist()
    return (
        f"Knocking out these edges leaves token {int(tile.positions[row, column])} of example {tile.rows[row].example} "
        f"no key to attend to in layer {layer}. Leave it at least one key, or use variant='zero'."
    )
