"""Tokens of many texts, one text after the other, and which of them `positions=` means.

Nothing is padded, so that one long text costs no more than itself; a `Batch` is made of whichever texts run together.
Numbers in `positions=` count from each text's own beginning or end; words and roles are looked for in each text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import InputError
from headwater.models.positions import Prompt, checked_roles, positions_of, roles_of
from headwater.models.tokens import Batch, Inputs, note_on_chats, pad_id, refuse_what_has_no_order
from headwater.options import has_no_order, is_one, one_or_several, whole_numbers

if TYPE_CHECKING:
    from headwater.models.model import Model
    from headwater.models.sites import Site

AT_ONCE = 256
"""Texts that are tokenized together."""


@checked_calls
@dataclasses.dataclass(frozen=True, eq=False)
class TokenizedTexts:
    """Tokens of texts, and which of them are kept."""

    table: pd.DataFrame
    """A row per token that is kept, in the order given: `example, position, token`, and `role` where positions were
    asked for by role. Also as `frame`."""
    tokens: pd.DataFrame
    """A row per token of every text: `example, position, token_id, token`, and for texts `start, end`, its
    characters."""
    texts: pd.DataFrame
    """A row per text: `example, tokens` (how many), `text` (None where token ids were given)."""
    asked: list[int] | None
    """The positions requested, where they were asked for by numbers."""
    pad: int
    """The token id at padding, where `batch` has any."""

    @cached_property
    def lengths(self) -> Int[Tensor, " example"]:
        """How many tokens each text has."""
        return torch.tensor(self.texts["tokens"].to_numpy(dtype=np.int64))

    @cached_property
    def counts(self) -> Int[Tensor, " example"]:
        """How many tokens of each text are kept."""
        counts = np.bincount(self.table["example"].to_numpy(dtype=np.int64), minlength=len(self.texts))
        return torch.tensor(counts.astype(np.int64))

    @cached_property
    def positions(self) -> Int[Tensor, "batch position"]:
        """Which token of its text each entry of the padded position (or query) axis is; -1 where there is none."""
        if self.asked is not None:
            return _columns_of(self.asked, self.lengths)
        columns = torch.full((len(self.counts), int(self.counts.max())), -1)
        kept = torch.tensor(self.table["position"].to_numpy())
        columns[torch.arange(columns.shape[1]) < self.counts[:, None]] = kept
        return columns

    @property
    def mask(self) -> Bool[Tensor, "batch position"]:
        """True where the padded position (or query) axis holds a real token."""
        return self.positions >= 0

    @property
    def batch(self) -> Batch:
        """The tokens that were run, padded; its positions are the key axis."""
        return self.batch_of(range(len(self.texts)))

    @cached_property
    def strings(self) -> tuple[tuple[str, ...], ...]:
        """The text of each row's real tokens."""
        words, ends = self.tokens["token"].tolist(), self.lengths.cumsum(0).tolist()
        return tuple(tuple(words[start:end]) for start, end in zip([0, *ends], ends, strict=False))

    def labels(self, row: int) -> tuple[str, ...]:
        """Return the text of the tokens along the padded position axis of one row; empty strings at padding."""
        return tuple(self.strings[row][p] if p >= 0 else "" for p in self.positions[row].tolist())

    def batch_of(self, examples: Sequence[int]) -> Batch:
        """Return some of the texts as a batch; errors call its rows by their numbers here."""
        starts, lengths = self._starts[list(examples)].tolist(), self.lengths[list(examples)].tolist()
        rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        batch, offsets, texts = Batch.of([self._ids[row].tolist() for row in rows], self.pad), None, None
        if self._spans is not None:
            offsets = tuple(tuple((a, b) for a, b in self._spans[row].tolist()) for row in rows)
        if (given := self.texts["text"].iloc[list(examples)]).notna().all():
            texts = tuple(given)
        return dataclasses.replace(batch, offsets=offsets, names=tuple(examples), texts=texts)

    @cached_property
    def _starts(self) -> Int[Tensor, " example"]:
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def _ids(self) -> np.ndarray:
        return self.tokens["token_id"].to_numpy()

    @cached_property
    def _spans(self) -> np.ndarray | None:
        spans = self.tokens[["start", "end"]]
        return None if spans.isna().any(axis=None) else spans.to_numpy(dtype=np.int64)


def kept_at(positions: Any, texts: TokenizedTexts) -> TokenizedTexts:
    """Return texts with the tokens kept that `positions=` means: see `headwater.models.positions`.

    A list or a tuple of whole numbers is several positions of every text; one that a text is too short for is left out
    there.
    """
    if positions is None:
        return texts
    numbers = _numbers(positions)
    if numbers is None:
        rows, roles = _found_in_each(positions, texts)
        table = _rows(texts, torch.tensor(rows))
        return dataclasses.replace(texts, table=table.assign(role=roles) if isinstance(positions, Mapping) else table)
    if not numbers:
        raise InputError("positions= names no position.")
    longest = int(texts.lengths.max())
    if outside := [number for number in numbers if not -longest <= number < longest]:
        raise InputError(f"No sequence has a position {outside[0]}; the longest has {longest} tokens.")
    columns = _columns_of(numbers, texts.lengths)
    table = _rows(texts, (columns + texts._starts[:, None])[columns >= 0])
    return dataclasses.replace(texts, table=table, asked=numbers)


def _found_in_each(positions: Any, texts: TokenizedTexts) -> tuple[list[int], list[str]]:
    """Look for what is named in each text by itself; return which tokens of all it is, and their roles."""
    n_texts = len(texts.texts)
    if isinstance(positions, Mapping):
        checked_roles(positions)
    rows: list[int] = []
    roles: list[str] = []
    for example, start in enumerate(texts._starts.tolist()):
        batch = texts.batch_of([example])
        offsets, text = (batch.offsets or [None])[0], (batch.texts or [None])[0]
        prompt = Prompt(tuple(batch.tokens[0].tolist()), texts.strings[example], offsets, text)
        if isinstance(positions, Mapping):
            by_role = roles_of(positions, prompt, example, n_texts)
        else:
            by_role = {"": positions_of(positions, prompt, example, n_texts)}
        for role, found in by_role.items():
            rows += [start + position for position in found]
            roles += [role] * len(found)
    return rows, roles


def _rows(texts: TokenizedTexts, rows: Int[Tensor, " token"]) -> pd.DataFrame:
    return texts.tokens[["example", "position", "token"]].iloc[rows.numpy()].reset_index(drop=True)


def seen_by(sites: Sequence[Site], texts: TokenizedTexts) -> TokenizedTexts:
    """Keep of texts no token that some of these sites leaves out.

    Raises:
        InputError: nothing is left of a text.
    """
    if not any(site.leaves_out for site in sites):
        return texts
    ids, kept = np.split(texts._ids, texts._starts[1:].numpy()), texts.table["position"].to_numpy()
    is_seen: list[bool] = []
    for example, positions in enumerate(np.split(kept, texts.counts.cumsum(0)[:-1].numpy())):
        left_out = frozenset[int]().union(*(site.left_out(ids[example].tolist()) for site in sites))
        is_seen += [position not in left_out for position in positions.tolist()]
        if left_out.issuperset(positions.tolist()):
            raise InputError(
                f"Nothing of text {example} is left to keep: {sites[0].name} was trained without its tokens."
            )
    if all(is_seen):
        return texts
    return dataclasses.replace(texts, table=texts.table[is_seen].reset_index(drop=True), asked=None)


def read_texts(inputs: Inputs, model: Model) -> tuple[TokenizedTexts, dict[str, str]]:
    """Tokenize inputs, all of whose tokens are kept; return with them what a record says of chats."""
    batches = _batches(inputs, model)
    lengths = torch.cat([batch.lengths for batch in batches])
    # Each different token is decoded once, however often the texts hold it.
    ids, back = np.unique(np.concatenate([batch.tokens[batch.mask].numpy() for batch in batches]), return_inverse=True)
    words = np.array(model.token_strings(ids.tolist()), dtype=object)
    # Where any text has no characters known, as token ids have none, no text has.
    known = all(batch.offsets is not None for batch in batches)
    spans = (
        [span for batch in batches for row in batch.offsets or () for span in row]
        if known
        else [(None, None)] * len(back)
    )
    given = [text for batch in batches for text in batch.texts or [None] * len(batch)]
    tokens = pd.DataFrame(
        {
            "example": torch.arange(len(lengths)).repeat_interleave(lengths).numpy(),
            "position": np.concatenate([np.arange(length) for length in lengths.tolist()]),
            "token_id": ids[back].astype(np.int64),
            "token": words[back],
            "start": pd.array([start for start, _ in spans], dtype="Int32"),
            "end": pd.array([end for _, end in spans], dtype="Int32"),
        }
    )
    texts = pd.DataFrame({"example": range(len(lengths)), "tokens": lengths.numpy(), "text": given})
    read = TokenizedTexts(tokens[["example", "position", "token"]], tokens, texts, None, pad_id(model.tokenizer))
    return read, note_on_chats(given)


def _batches(inputs: Inputs, model: Model) -> list[Batch]:
    """Tokenize inputs, texts some hundred at a time."""
    refuse_what_has_no_order(inputs)
    if isinstance(inputs, Batch | Tensor) or is_one(inputs):
        return [model.tokenize(inputs)]
    parts = one_or_several(inputs)
    is_chat = any(isinstance(part, Mapping) for part in parts[:1])
    is_ids = all(map(is_one, parts)) and not any(isinstance(part, str) for part in parts[:1])
    if len(parts) <= AT_ONCE or is_chat or is_ids:  # these are one row together
        return [model.tokenize(parts)]
    try:
        return [model.tokenize(parts[start : start + AT_ONCE]) for start in range(0, len(parts), AT_ONCE)]
    except InputError:
        model.tokenize(parts)  # the error counts rows from the first of all
        raise


def rows_of(texts: Sequence[int] | Int[Tensor, " text"], counts: Int[Tensor, " example"]) -> Int[Tensor, " row"]:
    """Return which rows some texts have, where each has so many and they come one after the other."""
    texts = torch.as_tensor(texts)
    first, sizes = (counts.cumsum(0) - counts)[texts], counts[texts]
    return torch.arange(int(sizes.sum())) + (first - sizes.cumsum(0) + sizes).repeat_interleave(sizes)


def _columns_of(numbers: Sequence[int], lengths: Int[Tensor, " example"]) -> Int[Tensor, "example position"]:
    """Return which token of each text numbers mean; -1 where a text is too short. Negative ones count from its end."""
    wanted = torch.tensor(list(numbers), dtype=torch.long)
    columns = torch.where(wanted < 0, lengths[:, None] + wanted, wanted.expand(len(lengths), -1))
    return torch.where((columns >= 0) & (columns < lengths[:, None]), columns, -1)


def _numbers(positions: object) -> list[int] | None:
    """Return positions that are numbers, of every text alike; None where they are named in another way."""
    if isinstance(positions, str):
        return [-1] if positions == "last" else None
    if has_no_order(positions):
        return None
    try:
        return whole_numbers(positions)
    except TypeError:
        return None
