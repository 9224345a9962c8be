"""Token ids of many texts, one after the other, and which of these tokens `positions=` means.

Nothing is padded, so that one long text costs no more than itself; a `Batch` is made of whichever texts run together.
Numbers in `positions=` count from each text's own beginning or end; words and roles are looked for in each text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.positions import Prompt, checked_roles, positions_of, roles_of
from headwater.models.tokens import Batch, Inputs, pad_id, refuse_what_has_no_order
from headwater.options import has_no_order, is_one, one_or_several, whole_numbers

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

    @cached_property
    def _starts(self) -> Int[Tensor, " example"]:
        return starts_of(self.lengths)

    def batch(self, examples: Sequence[int]) -> Batch:
        """Return some of the texts as a batch; errors call its rows by their numbers here."""
        starts, lengths = self._starts[list(examples)].tolist(), self.lengths[list(examples)].tolist()
        spans = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        batch = Batch.of([self.tokens[span].tolist() for span in spans], self.pad)
        offsets = None
        if self.characters is not None:
            offsets = tuple(tuple((int(a), int(b)) for a, b in self.characters[span].tolist()) for span in spans)
        texts = tuple(self.texts[example] for example in examples) if self.texts is not None else None
        return Batch(batch.tokens, batch.mask, offsets, tuple(examples), texts)


def sequences_of(inputs: Inputs, model: Model) -> Sequences:
    """Tokenize inputs without padding, texts some hundred at a time."""
    refuse_what_has_no_order(inputs)
    if isinstance(inputs, Batch | Tensor) or is_one(inputs):
        batches = [model.tokenize(inputs)]
    else:
        parts = one_or_several(inputs)
        is_chat = any(isinstance(part, Mapping) for part in parts[:1])
        is_ids = all(map(is_one, parts)) and not any(isinstance(part, str) for part in parts[:1])
        size = len(parts) if is_chat or is_ids else AT_ONCE  # these are one row together
        try:
            batches = [model.tokenize(parts[start : start + size]) for start in range(0, max(len(parts), 1), size or 1)]
        except InputError:
            model.tokenize(parts)  # the error counts rows from the first of all
            raise
    tokens = torch.cat([batch.tokens[batch.mask] for batch in batches])
    lengths = torch.cat([batch.lengths for batch in batches])
    spans = [span for batch in batches for row in batch.offsets or () for span in row]
    characters = torch.tensor(spans, dtype=torch.int32).reshape(-1, 2)
    texts = tuple(text for batch in batches for text in batch.texts or ())
    return Sequences(
        # int32 holds every token id in half the bytes of int64.
        tokens.int(),
        lengths,
        pad_id(model.tokenizer),
        characters if all(batch.offsets is not None for batch in batches) else None,
        texts if all(batch.texts is not None for batch in batches) else None,
    )


def starts_of(lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
    """Return how many tokens come before each text."""
    return lengths.cumsum(0) - lengths


def steps(lengths: Int[Tensor, " example"]) -> Int[Tensor, " token"]:
    """Count from 0 within each of several lengths: 2, 3 gives 0 1 0 1 2."""
    return torch.arange(int(lengths.sum())) - starts_of(lengths).repeat_interleave(lengths)


def columns_of(numbers: Sequence[int], lengths: Int[Tensor, " example"]) -> Int[Tensor, "example position"]:
    """Return which token of each text numbers mean; -1 where a text is too short. Negative ones count from its end."""
    wanted = torch.tensor(list(numbers), dtype=torch.long)
    columns = torch.where(wanted < 0, lengths[:, None] + wanted, wanted.expand(len(lengths), -1))
    return torch.where((columns >= 0) & (columns < lengths[:, None]), columns, -1)


@dataclass(frozen=True, eq=False)
class Chosen:
    """Which tokens of texts are meant.

    Attributes:
        counts: how many of each text.
        positions: which, one text after the other.
        numbers: the numbers by which they were requested, if so.
        roles: of each, where they were asked for by role.
        everything: whether all tokens of all texts are meant.
    """

    counts: Int[Tensor, " example"]
    positions: Int[Tensor, " token"]
    numbers: tuple[int, ...] | None = None
    roles: tuple[str, ...] | None = None
    everything: bool = False

    def seen_by(self, sites: Sequence[Site], sequences: Sequences) -> Chosen:
        """Leave out the tokens that some of these sites leaves out.

        Raises:
            InputError: nothing is left of a text.
        """
        if not any(site.leaves_out for site in sites):
            return self
        is_seen: list[bool] = []
        texts, chosen = sequences.tokens.split(sequences.lengths.tolist()), self.positions.split(self.counts.tolist())
        for example, (ids, positions) in enumerate(zip(texts, chosen, strict=True)):
            left_out = frozenset[int]().union(*(site.left_out(ids.tolist()) for site in sites))
            is_seen += [position not in left_out for position in positions.tolist()]
            if left_out.issuperset(positions.tolist()):
                raise InputError(
                    f"Nothing of text {example} is left to keep: {sites[0].name} was trained without its tokens."
                )
        if all(is_seen):
            return self
        mask = torch.tensor(is_seen)
        roles = None if self.roles is None else tuple(compress(self.roles, is_seen))
        counts = torch.stack([part.sum() for part in mask.split(self.counts.tolist())])
        return Chosen(counts, self.positions[mask], None, roles)


def chosen_tokens(positions: Any, sequences: Sequences, model: Model) -> Chosen:
    """Return which tokens `positions=` means: all (None), numbers, or what `headwater.models.positions` reads.

    A list or a tuple of whole numbers is several positions of every text; one that a text is too short for is left out
    there.
    """
    lengths = sequences.lengths
    if positions is None:
        return Chosen(lengths, steps(lengths), everything=True)
    numbers = _numbers(positions)
    if numbers is None:
        return _found_in_each(positions, sequences, model)
    if not numbers:
        raise InputError("positions= names no position.")
    longest = int(lengths.max())
    if outside := [number for number in numbers if not -longest <= number < longest]:
        raise InputError(f"No sequence has a position {outside[0]}; the longest has {longest} tokens.")
    columns = columns_of(numbers, lengths)
    return Chosen((columns >= 0).sum(1), columns[columns >= 0], numbers)


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
    is_roles, n_texts = isinstance(positions, Mapping), len(sequences)
    if is_roles:
        checked_roles(positions)
    counts: list[int] = []
    places: list[tuple[str, int]] = []
    for example in range(n_texts):
        batch = sequences.batch([example])
        ids = tuple(batch.tokens[0].tolist())
        offsets, text = (batch.offsets or [None])[0], (batch.texts or [None])[0]
        prompt = Prompt(ids, model.token_strings(ids), offsets, text)
        if is_roles:
            by_role = roles_of(positions, prompt, example, n_texts)
        else:
            by_role = {"": positions_of(positions, prompt, example, n_texts)}
        places += [(role, position) for role, found in by_role.items() for position in found]
        counts.append(sum(map(len, by_role.values())))
    roles = tuple(role for role, _ in places) if is_roles else None
    return Chosen(torch.tensor(counts), torch.tensor([position for _, position in places]), None, roles)
