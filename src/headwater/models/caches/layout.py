"""Where the numbers of a cache lie, and how they are put together: text by text, or padded to the longest.

A part of a cache holds some texts: which, says its `examples`. Of an activation it holds, place by place (a place is a
layer), a row per token that is kept, or of what has keys all numbers of one text after those of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.models.caches.activations import Activation
from headwater.models.caches.sequences import starts_of, steps
from headwater.runs.shards import Shards


@dataclass(frozen=True, eq=False)
class CacheLayout:
    """The numbers of a cache in their parts.

    Attributes:
        parts: the numbers; see `headwater.models.caches.cache.Cache.activations`.
        counts: how many rows are kept of each text.
        lengths: how many tokens each text has, which are its keys.
    """

    parts: Shards
    counts: Int[Tensor, " example"]
    lengths: Int[Tensor, " example"]

    @property
    def same_counts(self) -> bool:
        """Whether as many rows are kept of every text."""
        return len(set(self.counts.tolist())) <= 1

    @property
    def same_lengths(self) -> bool:
        """Whether every text has as many keys."""
        return len(set(self.lengths.tolist())) <= 1

    def sizes(self, one: Activation) -> Int[Tensor, " example"]:
        """How many rows a text has, or of what has keys, how many numbers."""
        if not one.has_keys:
            return self.counts
        return self.counts * self.lengths * math.prod(one.size)

    def block(self, one: Activation, taken: Tensor, example: int) -> Tensor:
        """Give what is kept of one text its axes."""
        if not one.has_keys:
            return taken
        return taken.reshape(*one.size, int(self.counts[example]), int(self.lengths[example]))

    def of_example(self, one: Activation, place: int, example: int) -> Tensor:
        """Return what is kept of one text at one place."""
        part, within = (int(found[example]) for found in self._where)
        sizes = self.sizes(one)
        start = int(sizes[self._examples[part][:within]].sum())
        return self.block(one, self.parts[part][one.name][place][start : start + int(sizes[example])], example)

    def numbers(self, one: Activation, place: int) -> Tensor:
        """Return what is kept at one place, text by text in the order given."""
        sizes = self.sizes(one)
        if len(self.parts) == 1 and torch.equal(self._examples[0], torch.arange(len(sizes))):
            return self.parts[0][one.name][place]
        starts = starts_of(sizes)
        whole: Tensor | None = None
        for examples, part in zip(self._examples, self.parts, strict=True):
            held = part[one.name][place]
            whole = held.new_empty((int(sizes.sum()), *held.shape[1:])) if whole is None else whole
            whole[starts[examples].repeat_interleave(sizes[examples]) + steps(sizes[examples])] = held
        assert whole is not None, "a cache has a part"
        return whole

    def padded(self, one: Activation, mask: Bool[Tensor, "batch position"]) -> Tensor:
        """Return what is kept at all layers, every text as long as the longest; `mask` says which are real."""
        counts, keys = self.counts, int(self.lengths.max())
        alike = bool(mask.all()) and (not one.has_keys or self.same_lengths)
        if alike and len(self.parts) == 1 and self.parts.in_memory:
            end = (*one.size, int(counts[0]), keys) if one.has_keys else (int(counts[0]), *one.size)
            return self.parts[0][one.name].reshape(len(one.places), len(counts), *end)
        rows = torch.stack([self.numbers(one, place) for place in range(len(one.places))])
        if not one.has_keys:
            padded = rows.new_zeros(len(one.places), *mask.shape, *one.size)
            padded[:, mask.to(rows.device)] = rows
            return padded
        padded = rows.new_zeros(len(one.places), len(counts), *one.size, mask.shape[1], keys)
        for example, part in enumerate(rows.split(self.sizes(one).tolist(), dim=1)):
            n = int(self.lengths[example])
            block = part.reshape(len(one.places), *one.size, int(counts[example]), n)
            padded[:, example, ..., mask[example].nonzero()[:, 0], :n] = block
        return padded

    @cached_property
    def _examples(self) -> list[Int[Tensor, " example"]]:
        return [part["examples"].clone() for part in self.parts]

    @cached_property
    def _where(self) -> tuple[Int[Tensor, " example"], Int[Tensor, " example"]]:
        """In which part each text is, and as which of its texts."""
        part, within = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        for number, examples in enumerate(self._examples):
            part[examples], within[examples] = number, torch.arange(len(examples))
        return part, within
