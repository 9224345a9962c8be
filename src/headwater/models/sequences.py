"""Token ids of many texts, one after the other: nothing is padded, so that one long text costs no more than itself.

Texts are tokenized some hundred at a time, and a `Batch` is made of whichever are to run together. Which tokens of each
are meant by `positions=` is said here too: numbers count from each text's own beginning or end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.tokens import Batch, Inputs, pad_id, refuse_what_has_no_order
from headwater.options import is_one, one_or_several, shown, whole_numbers

if TYPE_CHECKING:
    from headwater.models.model import Model

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
    """Tokenize inputs without padding.

    Raises:
        InputError: see `headwater.models.tokens.make_batch`.
    """
    refuse_what_has_no_order(inputs)
    pad = pad_id(model.tokenizer)
    if isinstance(inputs, Batch | Tensor) or is_one(inputs):
        return _joined([model.tokenize(inputs)], pad)
    parts = one_or_several(inputs)
    if len(parts) <= AT_ONCE or (all(is_one(part) for part in parts) and not isinstance(parts[0], str)):
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


def checked_positions(positions: Any, lengths: Int[Tensor, " example"]) -> tuple[int, ...] | None:
    """Return the numbers of positions that some text has; None for all of them, "last" for each text's last.

    Raises:
        InputError: they are no numbers, or no text has one of them.
    """
    if positions is None:
        return None
    try:
        asked = (-1,) if isinstance(positions, str) and positions == "last" else tuple(whole_numbers(positions))
    except TypeError:
        raise InputError(f"positions={shown(positions)} does not name positions by whole numbers.") from None
    if not asked:
        raise InputError("positions= names no position.")
    longest = int(lengths.max())
    if outside := [position for position in asked if not -longest <= position < longest]:
        raise InputError(f"No sequence has a position {outside[0]}; the longest has {longest} tokens.")
    return asked
