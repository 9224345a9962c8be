"""Token ids of many texts, one after the other: nothing is padded, so that one long text costs no more than itself.

Texts are tokenized some hundred at a time, and a `Batch` is made of whichever are to run together. Which tokens of each
are meant by `positions=` is said here too: numbers count from each text's own beginning or end, words and roles are
looked for in each.

Where the numbers of a cache lie, and how they are put together: text by text, or padded to the longest.

A part of a cache holds some texts: which, says its `examples`. Of an activation it holds, place by place (a place is a
layer), a row per token that is kept, or of what has keys all numbers of one text after those of another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.caches.activations import Activation
from headwater.models.positions import Prompt, checked_roles, positions_of, roles_of
from headwater.models.tokens import Batch, Inputs, pad_id, refuse_what_has_no_order
from headwater.options import has_no_order, is_one, one_or_several, whole_numbers
from headwater.runs.shards import Shards

if TYPE_CHECKING:
    from headwater.models.model import Model
    from headwater.models.sites import Site


AT_ONCE = 256
"""Texts that are tokenized together."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Token ids of texts, each as long as it is.

    Attributes:
        tokens: the ids of one text after the other.
        lengths: how many each text has.
        pad: the id that is written at padding where texts become a batch.
        characters: for texts, where each token begins and ends.
        texts: what they were made from, where they were.
    """

    tokens: Int[Tensor, " token"]
    lengths: Int[Tensor, " example"]
    pad: int
    characters: Int[Tensor, "token 2"] | None = None
    texts: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def starts(self) -> Int[Tensor, " example"]:
        """Return where each text begins among the tokens."""
        return starts_of(self.lengths)

    def batch(self, examples: Sequence[int]) -> Batch:
        """Return some of the texts as a batch; errors call its rows by their numbers here."""
        starts, ends = self.starts()[list(examples)].tolist(), (self.starts() + self.lengths)[list(examples)].tolist()
        rows = [self.tokens[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        made = Batch.of(rows, self.pad)
        offsets = None
        if self.characters is not None:
            spans = (self.characters[start:end].tolist() for start, end in zip(starts, ends, strict=True))
            offsets = tuple(tuple((int(a), int(b)) for a, b in one) for one in spans)
        texts = tuple(self.texts[example] for example in examples) if self.texts is not None else None
        return Batch(made.tokens, made.mask, offsets, tuple(examples), texts)


def sequences_of(inputs: Inputs, model: Model) -> Sequences:
    """Tokenize inputs without padding."""
    refuse_what_has_no_order(inputs)
    pad = pad_id(model.tokenizer)
    if isinstance(inputs, Batch | Tensor) or is_one(inputs):
        return _joined([model.tokenize(inputs)], pad)
    parts = one_or_several(inputs)
    is_chat = any(isinstance(part, Mapping) for part in parts[:1])
    is_ids = all(map(is_one, parts)) and not any(isinstance(part, str) for part in parts[:1])
    if len(parts) <= AT_ONCE or is_chat or is_ids:
        return _joined([model.tokenize(parts)], pad)
    try:
        return _joined([model.tokenize(parts[start : start + AT_ONCE]) for start in range(0, len(parts), AT_ONCE)], pad)
    except InputError:
        model.tokenize(parts)  # the error counts rows from the first of all
        raise


def _joined(batches: Sequence[Batch], pad: int) -> Sequences:
    tokens = torch.cat([batch.tokens[batch.mask] for batch in batches])
    spans = [span for batch in batches for row in batch.offsets or () for span in row]
    known = all(batch.offsets is not None for batch in batches)
    texts = tuple(text for batch in batches for text in batch.texts or ())
    return Sequences(
        tokens.int(),
        torch.cat([batch.lengths for batch in batches]),
        pad,
        torch.tensor(spans, dtype=torch.int32).reshape(-1, 2) if known else None,
        texts if all(batch.texts is not None for batch in batches) else None,
    )


def starts_of(lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
    """Return how many tokens stand before each text."""
    return lengths.cumsum(0) - lengths


def steps(lengths: Int[Tensor, " example"]) -> Int[Tensor, " token"]:
    """Count from 0 within each of several lengths: 2, 3 gives 0 1 0 1 2."""
    return torch.arange(int(lengths.sum())) - starts_of(lengths).repeat_interleave(lengths)


def asked_columns(asked: Sequence[int], lengths: Int[Tensor, " example"]) -> Int[Tensor, "example position"]:
    """Say which token of each text numbers mean; -1 where a text is too short. Negative ones count from its end."""
    wanted = torch.tensor(list(asked), dtype=torch.long)
    columns = torch.where(wanted < 0, lengths[:, None] + wanted, wanted.expand(len(lengths), -1))
    return torch.where((columns >= 0) & (columns < lengths[:, None]), columns, -1)


@dataclass(frozen=True, eq=False)
class Chosen:
    """Which tokens of texts are meant.

    Attributes:
        counts: how many of each text.
        positions: which, one text after the other.
        asked: the numbers by which they were asked for, if so.
        roles: of each, where they were asked for by role.
        everything: whether all tokens of all texts are meant.
    """

    counts: Int[Tensor, " example"]
    positions: Int[Tensor, " token"]
    asked: tuple[int, ...] | None = None
    roles: tuple[str, ...] | None = None
    everything: bool = False


def seen_tokens(chosen: Chosen, sequences: Sequences, sites: Sequence[Site]) -> Chosen:
    """Leave out tokens that some of the sites leaves out."""
    if not any(site.leaves_out for site in sites):
        return chosen
    kept: list[list[bool]] = []
    asked = chosen.positions.split(chosen.counts.tolist())
    for example, (ids, at) in enumerate(zip(sequences.tokens.split(sequences.lengths.tolist()), asked, strict=True)):
        left_out = frozenset[int]().union(*(site.left_out(ids.tolist()) for site in sites))
        kept.append([place not in left_out for place in at.tolist()])
        if not any(kept[-1]):
            raise InputError(
                f"Nothing of text {example} is left to keep: {sites[0].name} was trained without its tokens."
            )
    mask = torch.tensor([one for text in kept for one in text])
    roles = None if chosen.roles is None else tuple(compress(chosen.roles, mask.tolist()))
    if bool(mask.all()):
        return chosen
    return Chosen(torch.tensor([sum(text) for text in kept]), chosen.positions[mask], None, roles)


def chosen_tokens(positions: object, sequences: Sequences, model: Model) -> Chosen:
    """Say which tokens `positions=` means: None for all, numbers, or what `headwater.models.positions` reads.

    A list or a tuple of whole numbers is several positions of every text; one that a text is too short for is left out
    there.
    """
    lengths = sequences.lengths
    if positions is None:
        return Chosen(lengths, steps(lengths), everything=True)
    asked = _numbers(positions)
    if asked is None:
        return _found_in_each(positions, sequences, model)
    longest = int(lengths.max())
    if not asked:
        raise InputError("positions= names no position.")
    outside = [position for position in asked if not -longest <= position < longest]
    if outside:
        raise InputError(f"No sequence has a position {outside[0]}; the longest has {longest} tokens.")
    columns = asked_columns(asked, lengths)
    return Chosen((columns >= 0).sum(1), columns[columns >= 0], asked)


def _numbers(positions: object) -> tuple[int, ...] | None:
    """Return positions that are numbers, of every text alike; None where they are named in another way."""
    if isinstance(positions, str):
        return (-1,) if positions == "last" else None
    if has_no_order(positions):
        return None
    try:
        return tuple(whole_numbers(positions))
    except TypeError:
        return None


def _found_in_each(positions: Any, sequences: Sequences, model: Model) -> Chosen:
    """Look for what is named in each text by itself."""
    is_roles = isinstance(positions, Mapping)
    if is_roles:
        checked_roles(positions)
    counts: list[int] = []
    found: list[int] = []
    roles: list[str] = []
    for example in range(len(sequences)):
        batch = sequences.batch([example])
        ids = tuple(batch.tokens[0].tolist())
        offsets, text = (batch.offsets or [None])[0], (batch.texts or [None])[0]
        prompt = Prompt(ids, model.token_strings(ids), offsets, text)
        if is_roles:
            named = roles_of(positions, prompt, example, len(sequences))
            places = [(role, place) for role, held in named.items() for place in held]
        else:
            places = [("", place) for place in positions_of(positions, prompt, example, len(sequences))]
        counts.append(len(places))
        roles += [role for role, _ in places]
        found += [place for _, place in places]
    return Chosen(torch.tensor(counts), torch.tensor(found), None, tuple(roles) if is_roles else None)


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
