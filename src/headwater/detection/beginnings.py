"""Beginnings: the keys and values of the first tokens of rows that are run many times and change only later.

What a causal model computes at a position hangs on no later one. Rows that are edited from some position on are run up
to it once, and as often as wanted from there on. Beginnings of several lengths lie in one tensor, each up against its
end, and go together in one run, which is told by a mask what is before a shorter one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.models.hooked import HookedModel
from headwater.models.shared_start import KeysValues, keys_values
from headwater.models.tokens import by_length

KEPT_BYTES = {"cpu": 1 << 30, "cuda": 1 << 33}
"""What the keys and values may take; rows beyond are not begun, and run whole every time."""


@dataclass(frozen=True, eq=False)
class Beginnings:
    """The keys and values of some rows' first tokens."""

    place: Mapping[int, int] = field(default_factory=dict)
    """By row, where it is in `held`."""
    lengths: Mapping[int, int] = field(default_factory=dict)
    """By row, how many tokens were run."""
    held: KeysValues = field(default_factory=dict)

    def longest(self, rows: Sequence[int]) -> int:
        """Return how many tokens the longest beginning of some rows has."""
        return max(self.lengths.get(row, 0) for row in rows)

    def of(self, rows: Sequence[int]) -> tuple[KeysValues, Bool[Tensor, "row position"]]:
        """Return the keys and values of some rows, as many as the longest has, and which of them are real."""
        longest = self.longest(rows)
        places = torch.tensor([self.place.get(row, 0) for row in rows])
        pairs = {
            layer: (
                keys[:, :, keys.shape[2] - longest :].index_select(0, places.to(keys.device)),
                values[:, :, values.shape[2] - longest :].index_select(0, places.to(values.device)),
            )
            for layer, (keys, values) in self.held.items()
        }
        missing = torch.tensor([longest - self.lengths.get(row, 0) for row in rows])
        return pairs, torch.arange(longest) >= missing[:, None]


def beginnings(
    model: HookedModel, tokens: Sequence[Sequence[int]], lengths: Sequence[int], n_layers: int, batch_size: int
) -> Beginnings:
    """Run the first tokens of rows through the first layers, longest rows first, as far as they may be kept."""
    room, longest = KEPT_BYTES.get(model.device.type, KEPT_BYTES["cpu"]), max(lengths, default=0)
    parts: list[KeysValues] = []
    begun: list[int] = []
    # longest=float: a batch holds one length, so that no padding is kept. The longest spare most, and come first.
    for rows in reversed(by_length(lengths, batch_size, longest=float)):
        if not (first := lengths[rows[0]]):
            break
        made = keys_values(model, torch.tensor([list(tokens[row][:first]) for row in rows]), {}, n_layers)
        padded = {
            layer: (_padded_before(keys, longest), _padded_before(values, longest))
            for layer, (keys, values) in made.items()
        }
        room -= sum(one.numel() * one.element_size() for pair in padded.values() for one in pair)
        if room < 0:
            break
        parts.append(padded)
        begun += rows
    # pop: a layer's parts go as soon as they are joined, or all of it would be in memory twice.
    joined = {layer: _together([part.pop(layer) for part in parts]) for layer in (list(parts[0]) if parts else [])}
    return Beginnings({row: i for i, row in enumerate(begun)}, {row: lengths[row] for row in begun}, joined)


def _padded_before(made: Tensor, longest: int) -> Tensor:
    """Put zeros before keys or values, up to a length."""
    return torch.nn.functional.pad(made, (0, 0, longest - made.shape[2], 0))


def _together(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])
