"""Prompts, pairs of prompts, and positions in them.

A position is named by a number, a range, a text, a function of the tokens, or one of "last", "first", "all". Pairs must
align token by token; where they do not, the error shows the two tokenizations side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from torch import Tensor

from headwater.data.rows import read_rows
from headwater.errors import InputError
from headwater.models.memory import failures_named
from headwater.models.tokens import Batch, Offsets, token_span, token_strings
from headwater.options import shown, whole_numbers

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

Prompts: TypeAlias = str | Iterable[str] | Sequence[Sequence[int]] | Tensor | Batch
Where: TypeAlias = int | str | range | slice | tuple[int, int] | AbstractSet[int] | Callable[..., Any] | list[Any]
"""Positions: a number (negative counts from the end), a span (start, stop), a range, a set, "last", "first", "all", a
text that the prompt holds once, a function of the token strings giving any of these, or a list with one per prompt."""


@dataclass(frozen=True)
class Prompt:
    """One tokenized prompt."""

    ids: tuple[int, ...]
    strings: tuple[str, ...]
    offsets: Offsets | None = None
    text: str | None = None

    def __len__(self) -> int:
        return len(self.ids)


def read_prompts(model: HookedModel, inputs: Prompts) -> tuple[Prompt, ...]:
    """Tokenize prompts by the model's own rule (token ids are taken as they are)."""
    batch = model.tokenize(inputs)
    prompts = []
    for i, length in enumerate(batch.lengths.tolist()):
        ids = tuple(batch.tokens[i, :length].tolist())
        offsets = batch.offsets[i] if batch.offsets is not None else None
        text = batch.texts[i] if batch.texts is not None else None
        prompts.append(Prompt(ids, token_strings(model.tokenizer, ids), offsets, text))
    return tuple(prompts)


def read_pairs(model: HookedModel, clean: Any, corrupted: Any) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...] | None]:
    """Tokenize pairs of prompts, given side by side or as a table (see `read_table`).

    Raises:
        InputError: the numbers of prompts differ, a table lacks a column, or a pair does not align.
    """
    if corrupted is None and isinstance(clean, Path | pd.DataFrame):
        clean, corrupted = read_table(clean)
    first = read_prompts(model, clean)
    if corrupted is None:
        return first, None
    second = read_prompts(model, corrupted)
    if len(first) != len(second):
        raise InputError(f"{len(first)} clean prompts were given and {len(second)} corrupted ones: they must be pairs.")
    for example, (a, b) in enumerate(zip(first, second, strict=True)):
        if len(a) != len(b):
            raise InputError(
                f"Pair {example} does not align: {len(a)} tokens in the clean prompt, {len(b)} in the corrupted one. "
                f"Choose prompts that differ token for token.\n{side_by_side(a, b)}"
            )
        if a.ids == b.ids:
            raise InputError(f"Pair {example} holds the same prompt twice: there is nothing to patch.")
    return first, second


def read_table(table: Path | pd.DataFrame) -> tuple[list[Any], list[Any]]:
    """Return the prompts in the columns `clean` and `corrupted` of a data frame, or of a file (`headwater.data.rows`).

    Raises:
        InputError: the file cannot be read, or a row lacks one of the two, or has something that is no prompt.
    """
    rows: Iterable[tuple[Any, Mapping[Any, Any]]]
    if isinstance(table, Path):
        where, rows = str(table), read_rows(table, "pairs of prompts")
    else:
        where, rows = "The table of pairs", zip(table.index, table.to_dict("records"), strict=True)
    pairs = [
        (_cell(row, "clean", f"{where}, row {number}"), _cell(row, "corrupted", f"{where}, row {number}"))
        for number, row in rows
    ]
    if not pairs:
        raise InputError(f"{where} has no rows.")
    return [clean for clean, _ in pairs], [corrupted for _, corrupted in pairs]


def _cell(row: Mapping[Any, Any], name: str, where: str) -> Any:
    if name not in row:
        raise InputError(f"{where} has no {name!r}; it has {', '.join(map(str, row)) or 'nothing'}.")
    cell = row[name]
    if not isinstance(cell, str | list | tuple | np.ndarray | Tensor) or not len(cell):
        raise InputError(f"{where}: {name} must be a text or a list of token ids, found {shown(cell)}.")
    return cell if isinstance(cell, str) else list(cell)


def positions_of(where: Any, prompt: Prompt, example: int, n_examples: int) -> tuple[int, ...]:
    """Return the positions that a name stands for in one prompt, ascending.

    Raises:
        InputError: it names nothing, or something outside the prompt.
    """
    if isinstance(where, list):
        if len(where) != n_examples:
            raise InputError(
                f"A list of positions holds one entry per prompt; {len(where)} were given for {n_examples} prompts. "
                "For several positions of every prompt give a range, a set or a (start, stop) tuple."
            )
        where = where[example]
        if isinstance(where, list):
            where = set(where)
    if callable(where):
        with failures_named("The function that names positions"):
            where = where(prompt.strings)
    found = _positions(where, prompt)
    outside = [position for position in found if not 0 <= position < len(prompt)]
    if outside or not found:
        raise InputError(
            f"Position {outside[0] if outside else shown(where)} is not in prompt {example} of {len(prompt)} tokens: "
            f"{_numbered(prompt)}"
        )
    return tuple(sorted(set(found)))


def aligned_positions(where: Any, base: Prompt, other: Prompt | None, example: int, n: int) -> tuple[int, ...]:
    """Return the positions a name stands for in both prompts of a pair; a text may stand in one of them only.

    Raises:
        InputError: it stands for different positions in the two.
    """
    if other is None:
        return positions_of(where, base, example, n)
    found = []
    for prompt in (base, other):
        try:
            found.append(positions_of(where, prompt, example, n))
        except InputError:
            if prompt is other and not found:
                raise
    if len(found) == 2 and found[0] != found[1]:
        raise InputError(
            f"{shown(where)} falls on different tokens in the two prompts of pair {example}: {found[0]} and "
            f"{found[1]}.\n{side_by_side(base, other)}"
        )
    return found[0]


def first_difference(a: Prompt, b: Prompt) -> int:
    """Return the first position at which two aligned prompts differ: until there, their runs are one."""
    return next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), len(a))


def side_by_side(a: Prompt, b: Prompt) -> str:
    """Lay two tokenizations out in columns, with a mark where they differ."""
    width = max([len(repr(s)) for s in a.strings] + [9])
    rows = [
        f"  {i:>3}  {repr(x) if x is not None else '-':<{width}}  {'  ' if x == y else '<>'}  "
        f"{repr(y) if y is not None else '-'}"
        for i, (x, y) in enumerate(zip_longest(a.strings, b.strings))
    ]
    return "\n".join(rows)


def _positions(where: Any, prompt: Prompt) -> list[int]:
    length = len(prompt)
    if isinstance(where, bool) or where is None:
        return []
    if isinstance(where, str):
        return _named(where, prompt)
    if isinstance(where, slice):
        return list(range(length))[where]
    if isinstance(where, tuple) and len(where) != 2:
        raise InputError(
            f"A tuple of positions is a span (start, stop); this one is {shown(where)}. Give a set instead."
        )
    try:
        numbers = whole_numbers(range(*where) if isinstance(where, tuple) else where)
    except TypeError:
        raise InputError(
            f"{shown(where)} does not name positions. Give a number, a span, a set, 'last', or a text."
        ) from None
    return [number + length if number < 0 else number for number in numbers]


def _named(name: str, prompt: Prompt) -> list[int]:
    fixed = {"last": [len(prompt) - 1], "first": [0], "all": list(range(len(prompt)))}
    if name in fixed:
        return fixed[name]
    if prompt.text is None or prompt.offsets is None:
        raise InputError(
            f"The text {name!r} cannot be looked for in token ids. Give positions, or the prompts as text."
        )
    count = prompt.text.count(name)
    if count != 1:
        raise InputError(
            f"The text {name!r} stands {count} times in the prompt {prompt.text!r}; it must stand there once. "
            "Give positions instead."
        )
    start = prompt.text.index(name)
    return list(token_span(prompt.offsets, start, start + len(name)))


def _numbered(prompt: Prompt) -> str:
    shown = [f"{i}:{s!r}" for i, s in enumerate(prompt.strings[:24])]
    return " ".join(shown) + (" ..." if len(prompt) > 24 else "")
