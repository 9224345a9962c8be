"""What all rows begin with, such as a prompt's examples, is run once, and the rest of each row on top of it.

1. `common_start` says how many tokens that are, and whether they are worth a run of their own.
2. `keys_values` runs them, and keeps what a cache of keys and values would hold after it.
3. `FixedPrefix` is that cache for the rest of the rows: one row of it serves all, and it never grows.

What a family does with a cache is not taken on trust: whoever shares a start compares some rows with whole runs first.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from headwater.models.cache_names import takes_cache
from headwater.models.tokens import Batch

if TYPE_CHECKING:
    from headwater.models.model import Model

KeysValues: TypeAlias = dict[int, tuple[Tensor, Tensor]]
"""By layer, as a cache gets them (after rotation): `row kv_head key d_head`; one row may serve all."""
WORTH_A_RUN, SAVED = 16, 48
"""A start of fewer tokens, or one that saves fewer over all rows, does not pay for one more pass over the weights."""


def common_start(tokens: Int[Tensor, "row position"]) -> int:
    """Return how many tokens all rows begin with; 0 where running them once saves little."""
    shared = int((tokens == tokens[:1]).all(0).int().cumprod(0).sum())
    return shared if shared >= WORTH_A_RUN and shared * (len(tokens) - 1) >= SAVED else 0


def goes_on(model: Model) -> bool:
    """Whether a model is known to compute the same at a position when those before it are run by themselves."""
    return takes_cache(model.raw) and not model.looks_ahead and not model.rotary_by_length


class FixedPrefix(DynamicCache):  # type: ignore[misc]
    """A cache that puts fixed keys and values before each layer's own, remembers values, and never grows."""

    def __init__(self, before: KeysValues):
        super().__init__()
        self.before = before
        self.watched: range = range(0)
        self.values: dict[int, Tensor] = {}
        # One row and one coordinate are enough for its length: DynamicCache would copy whole tensors.
        for layer, (keys, values) in before.items():  # only its length is read
            super().update(keys[:, :1, :, :1], values[:, :1, :, :1], layer)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the fixed keys and values followed by the new ones."""
        if layer in self.before:
            before = (fixed.expand(len(keys), -1, -1, -1) for fixed in self.before[layer])
            keys, values = (torch.cat(both, 2) for both in zip(before, (keys, values), strict=True))
        if layer in self.watched:
            self.values[layer] = values.detach()
        return keys, values


class _EnoughError(Exception):
    """Ends a run whose last keys and values have come."""


class Tap(FixedPrefix):
    """The same, which keeps the keys and values of every layer, those before included: `after`.

    With `n_layers` it ends the run after so many of them: nothing else is wanted of it.
    """

    def __init__(self, before: KeysValues, n_layers: int = 0):
        super().__init__(before)
        self.last, self.after = n_layers - 1, KeysValues()

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the fixed keys and values followed by the new ones, and keep them."""
        self.after[layer] = super().update(keys, values, layer)
        if layer == self.last:
            raise _EnoughError
        return self.after[layer]


def keys_values(model: Model, tokens: Int[Tensor, "row position"], before: KeysValues, n_layers: int) -> KeysValues:
    """Return the keys and values of the first layers for the tokens `before` covers and these, which follow them."""
    if not tokens.shape[1]:
        return before
    tap = Tap(before, n_layers)
    with contextlib.suppress(_EnoughError):
        model.run(unpadded(tokens), stop_at=n_layers, past_key_values=tap)
    return {layer: (keys.clone(), values.clone()) for layer, (keys, values) in tap.after.items()}


def unpadded(tokens: Int[Tensor, "row position"]) -> Batch:
    """Padding at the end needs no mask: nothing before it can see it, and nothing is read from it."""
    return Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
