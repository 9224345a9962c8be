"""Which keys the tokens of a walk may read, and which of these edits sever.

A token reads the keys that its layer lets it see in the recorded run: those before it, within the window of a layer
that slides. Edits sever some, before the softmax (the mask) or after it (where weights are set to 0).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.errors import InterventionError
from headwater.kernels.devices import sent
from headwater.models.blocks import Recording
from headwater.models.sites import Stage, main_site
from headwater.patching.tile import Tile
from headwater.patching.variants import Cut, Indices, Variants


class Masks:
    """The masks of one walk.

    Args:
        recording: the unedited run.
        variants: what is severed in whose runs.
        n_heads: of the model.
        applied: by edit and layer, the variants in which it was made; what is severed is added.
    """

    def __init__(
        self,
        recording: Recording,
        variants: Variants,
        n_heads: int,
        applied: dict[tuple[int, int], list[Indices]],
    ):
        self.recording, self.variants, self._n_heads, self._applied = recording, variants, n_heads, applied
        self._like = recording.activations[main_site(Stage.BLOCK_INPUT).hook_name(0)]
        self._added: dict[int, Tensor] = {}
        """By what a layer's queries see: the mask that says so."""
        self._keyless: list[tuple[int, Tile, Bool[Tensor, "row head_or_one position"]]] = []
        """Where edges are severed, by layer and tile: the tokens that are left no key."""

    def mask(self, layer: int, tile: Tile) -> Float[Tensor, "row head_or_one position key"]:
        """Say which keys each token may read."""
        mask = self._of_layer(layer)[tile.positions[:, :, None], tile.key_positions[:, None, :]][:, None]
        if (severed := self.severed(layer, tile, zero=False)) is not None:
            mask = mask.masked_fill(severed, torch.finfo(mask.dtype).min)
            self._keyless.append((layer, tile, (mask != 0).all(-1)))
        return mask

    def severed(self, layer: int, tile: Tile, zero: bool) -> Bool[Tensor, "row head_or_one position key"] | None:
        """Say which edges of a tile's rows are severed, before the softmax or after it; None where none are."""
        rows, changes = tile.rows, self.variants.changes
        cutting = {number: changes[number].cutting(layer, zero) for number in np.unique(rows.which)}
        severed: Tensor | None = None
        for turn in range(max(map(len, cutting.values()))):
            cuts = [cutting[number][turn] if turn < len(cutting[number]) else None for number in rows.which]
            edges, numbers = self._edges_cut
            which = np.array([0 if cut is None else numbers[id(cut.edges)] for cut in cuts])
            at = sent(which, edges.device)[:, None, None], tile.positions[:, :, None]
            found = edges[*at, tile.key_positions.clamp_min(0)[:, None, :]][:, None]
            if any(cut is not None and cut.heads is not None for cut in cuts):
                heads = np.zeros((len(cuts), self._n_heads), dtype=bool)
                for own, cut in zip(heads, cuts, strict=True):
                    own[slice(None) if cut is None or cut.heads is None else list(cut.heads)] = True
                found = found & sent(heads, found.device)[:, :, None, None]
            severed = found if severed is None else severed | found
            for i, cut in enumerate(cuts):
                if cut is not None:
                    self._applied.setdefault((id(cut), layer), []).append(rows.variant[i : i + 1])
        return severed

    def check_that_every_token_has_a_key(self) -> None:
        """Look once, at the end, at all that severed edges left, so that no device is waited for on the way.

        Raises:
            InterventionError: a token was left without any key.
        """
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
        visible = self.recording.visible[layer]
        if id(visible) not in self._added:
            least = torch.finfo(self._like.dtype).min
            mask = visible.new_full((len(visible), visible.shape[1] + 1), least, dtype=self._like.dtype)
            self._added[id(visible)] = mask.masked_fill_(torch.nn.functional.pad(visible, (0, 1)), 0.0)
        return self._added[id(visible)]

    @cached_property
    def _edges_cut(self) -> tuple[Bool[Tensor, "_ query key"], dict[int, int]]:
        """What edits sever: no edge at first, then each of their matrices once; and by matrix its number."""
        edits = [edit for change in self.variants.changes for edit in change.edits if isinstance(edit, Cut)]
        matrices = {id(edit.edges): edit.edges for edit in edits}
        longest = max(len(matrix) for matrix in matrices.values())
        edges = torch.zeros(1 + len(matrices), longest, longest, dtype=torch.bool, device=self._like.device)
        for own, matrix in zip(edges[1:], matrices.values(), strict=True):
            own[: len(matrix), : len(matrix)] = matrix
        return edges, {one: 1 + number for number, one in enumerate(matrices)}
