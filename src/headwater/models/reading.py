"""What a run of a model reads: which token of which text is in each column, and whose logits are wanted.

A hook is handed an activation whose columns are tokens. Which tokens, it may ask here while it is called:

    reading = now_reading()
    reading.positions[row, column]       # of that token in its text, from 0; -1 at padding
    reading.prompts[row]                 # the length of the prompt: tokens from there on are new, written by the model

In a run of whole texts column c is token c. While a model writes (`headwater.models.generation.loop`), the first run
reads the prompts in the same way, and each one after it a single new token per row.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.tokens import Batch
from headwater.options import shown

Keep: TypeAlias = Literal["last"] | Sequence[int] | Int[Tensor, " kept"] | None
"""The positions whose logits are wanted: all (None), each row's last real token, or these columns."""


@dataclass(frozen=True)
class Reading:
    """The tokens that one run reads.

    Attributes:
        positions: of each column, the position of its token in its text; -1 at padding.
        prompts: how many tokens of each row the caller gave; the model wrote those after them.
        rows: the number (or the name) of each row among all that the caller gave.
    """

    positions: Int[Tensor, "row position"]
    prompts: Int[Tensor, " row"]
    rows: tuple[int | str, ...]

    @classmethod
    def of(cls, batch: Batch) -> Reading:
        """Say what a run of whole texts reads."""
        columns = torch.arange(batch.tokens.shape[1]).expand(len(batch), -1)
        names = tuple(batch.name(row) for row in range(len(batch)))
        return cls(torch.where(batch.mask, columns, -1), batch.lengths, names)


_NOW: ContextVar[Reading | None] = ContextVar("reading", default=None)


def now_reading() -> Reading | None:
    """Return what the model reads now, in this thread; None outside a run of `HookedModel`."""
    return _NOW.get()


@contextlib.contextmanager
def reads(reading: Reading) -> Iterator[None]:
    """Let `now_reading` return this for as long as the context lasts."""
    before = _NOW.set(reading)
    try:
        yield
    finally:
        _NOW.reset(before)


def columns_kept(keep: Keep, batch: Batch) -> Int[Tensor, " kept"] | None:
    """Return the columns of a batch whose logits must be computed, or None for all."""
    if keep is None:
        return None
    width = batch.tokens.shape[1]
    if isinstance(keep, str) and keep == "last":
        # transformers takes columns for all rows alike; each row's own are picked from these.
        return torch.unique(batch.lengths - 1)
    try:
        columns = torch.tensor([operator.index(i) for i in keep], dtype=torch.long)
    except TypeError:
        raise InputError(f"keep={shown(keep)} is neither 'last' nor a list of positions.") from None
    if columns.ndim != 1 or not len(columns) or not -width <= int(columns.min()) <= int(columns.max()) < width:
        raise InputError(f"keep={shown(keep)} is not a list of positions of sequences of {width} tokens.")
    return columns % width
