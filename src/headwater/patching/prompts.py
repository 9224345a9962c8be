"""Prompts and pairs of prompts as sweeps read them, and where what is named in one of a pair is in the other.

Pairs must align token by token; where they do not, the error shows the two tokenizations side by side. Only where
positions are named by role (`models.positions`) may pairs be of any two lengths: each prompt is resolved by itself, and
the tokens of a role in one prompt are those of the same role in the other, one for one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from torch import Tensor

from headwater.data.rows import read_rows, refuse_repeated
from headwater.errors import InputError
from headwater.models.positions import AbsentError, Prompt, checked_roles, hangs_on_length, positions_of, role_in
from headwater.models.tokenizers import spelled_tokens
from headwater.models.tokens import Inputs, note_on_chats, token_strings
from headwater.options import shown

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

Prompts: TypeAlias = Inputs
NAMED_BY_ROLE = "Name positions by role, as in positions={'subject': (' Rome', ' New York'), 'end': 'last'}. "


def read_prompts(model: HookedModel, inputs: Prompts) -> tuple[Prompt, ...]:
    """Tokenize prompts by the model's own rule (token ids are taken as they are)."""
    batch = model.tokenize(inputs)
    prompts = []
    for i, (tokens, length) in enumerate(zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True)):
        ids = tuple(tokens[:length])
        offsets = batch.offsets[i] if batch.offsets is not None else None
        text = batch.texts[i] if batch.texts is not None else None
        prompts.append(Prompt(ids, token_strings(model.tokenizer, ids), offsets, text))
    return tuple(prompts)


def read_pairs(
    model: HookedModel, clean: Any, corrupted: Any, *, by_role: bool | None = None
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...] | None]:
    """Tokenize pairs of prompts, given side by side or as a table (see `read_table`).

    Args:
        model: the model.
        clean: the clean prompts, or a table of pairs.
        corrupted: the others.
        by_role: whether pairs may be of two lengths, since positions in them are named by role; None where naming them
            would not help.
    """
    if corrupted is None and isinstance(clean, Path | pd.DataFrame):
        clean, corrupted = read_table(clean)
    first = read_prompts(model, clean)
    if corrupted is None:
        return first, None
    second = read_prompts(model, corrupted)
    if len(first) != len(second):
        raise InputError(f"{len(first)} clean prompts were given and {len(second)} corrupted ones: they must be pairs.")
    # Also of a model that begins with nothing: token ids may bring the tokenizer's own.
    bos = model.bos or model.resolve_bos(model.tokenizer is not None and model.tokenizer.bos_token is not None)
    for example, (a, b) in enumerate(zip(first, second, strict=True)):
        if bos and (a.ids[: len(bos)] == bos) != (b.ids[: len(bos)] == bos):
            first_tokens = spelled_tokens(model.tokenizer, bos)
            raise InputError(
                f"Pair {example} does not align: of its prompts one begins with {first_tokens} and the other does not. "
                "Texts get model.bos, token ids stay as they are: give both prompts with it, or "
                "both without."
            )
        # Positions would mean other words after the first difference, and every cell be off.
        if len(a) != len(b) and not by_role:
            raise InputError(
                f"Pair {example} does not align: {len(a)} tokens in the clean prompt, {len(b)} in the corrupted one. "
                f"{'' if by_role is None else NAMED_BY_ROLE}Choose prompts that differ token for token.\n"
                f"{side_by_side(a, b)}"
            )
        # Every normalized effect would be 0 / 0.
        if a.ids == b.ids:
            raise InputError(f"Pair {example} holds the same prompt twice: there is nothing to patch.")
    return first, second


def read_table(table: Path | pd.DataFrame) -> tuple[list[Any], list[Any]]:
    """Return the prompts in the columns `clean` and `corrupted` of a data frame or a file (`headwater.data.rows`)."""
    rows: Iterable[tuple[Any, Mapping[Any, Any]]]
    if isinstance(table, Path):
        where, rows = str(table), read_rows(table, "pairs of prompts")
    else:
        refuse_repeated("The table of pairs", table.columns)
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


@dataclass(frozen=True)
class AlignedSpan:
    """What a name represents in the two prompts of a pair, token for token."""

    base: tuple[int, ...]
    """Positions in the prompt that is edited."""
    other: tuple[int, ...]
    """The same in the other prompt; without one, those of `base`."""


def places_among(prompts: Sequence[Sequence[int]], seen: Iterable[Sequence[int]]) -> list[int]:
    """Return which prompts, by number, are among others, token for token."""
    known = {tuple(ids) for ids in seen}
    return [number for number, ids in enumerate(prompts) if tuple(ids) in known]


def aligned_positions(
    where: object, base: Prompt, other: Prompt | None, example: int, n: int, base_side: int = 0
) -> tuple[int, ...]:
    """Return the positions a name represents in both prompts of a pair; a text may be in one of them only."""
    if other is None:
        return positions_of(where, base, example, n)
    by_prompt = []
    for prompt, side in ((base, base_side), (other, 1 - base_side)):
        try:
            by_prompt.append(positions_of(where, prompt, example, n, side))
        except InputError:
            if prompt is other and not by_prompt:
                raise
    if len(by_prompt) == 2 and by_prompt[0] != by_prompt[1]:
        raise InputError(
            f"{shown(where)} falls on different tokens in the two prompts of pair {example}: {by_prompt[0]} and "
            f"{by_prompt[1]}.\n{side_by_side(base, other)}"
        )
    return by_prompt[0]


def aligned_span(
    where: object, base: Prompt, other: Prompt | None, example: int, n: int, base_side: int = 0
) -> AlignedSpan:
    """Return the positions a name represents in each prompt of a pair: in prompts of one length, the same ones."""
    if other is None or len(base) == len(other):
        at = aligned_positions(where, base, other, example, n, base_side)
        return AlignedSpan(at, at)
    sides = (base_side, 1 - base_side)
    a, b = (positions_of(where, p, example, n, side) for p, side in zip((base, other), sides, strict=True))
    if len(a) != len(b):
        raise InputError(
            f"{shown(where)} is {len(a)} and {len(b)} tokens of the two prompts of pair {example}, which are of "
            f"{len(base)} and {len(other)} tokens: name as many in each."
        )
    return AlignedSpan(a, b)


def aligned_spans(
    where: object, base: Sequence[Prompt], other: Sequence[Prompt | None], base_side: int = 0, draws: int = 1
) -> list[AlignedSpan]:
    """Return by pair what a name represents (`aligned_span`); once for all pairs of the same lengths where they decide.

    Args:
        where: the name.
        base: the prompts that are edited, each `draws` times.
        other: the other prompt of each pair, or None.
        base_side: 0 where the edited prompts are the clean ones, else 1.
        draws: how many pairs in turn are one of the caller's.
    """
    alike: dict[tuple[int, int | None], AlignedSpan] = {}
    spans, shared, n = [], hangs_on_length(where), len(base) // draws
    for i, pair in enumerate(zip(base, other, strict=True)):
        lengths = len(pair[0]), None if pair[1] is None else len(pair[1])
        span = alike.get(lengths) if shared else None
        if span is None:
            span = alike[lengths] = aligned_span(where, *pair, i // draws, n, base_side)
        spans.append(span)
    return spans


def spans_by_role(
    where: Mapping[Any, Any], base: Prompt, other: Prompt | None, example: int, n: int, base_side: int = 0
) -> dict[str, AlignedSpan]:
    """Return, by role, its tokens in both prompts of a pair, each prompt resolved by itself.

    A word that is in one prompt only represents, in the other of one length, the same positions.
    """
    checked_roles(where)
    spots: dict[str, AlignedSpan] = {}
    for role, place in where.items():
        span = spots[role] = _role_spot(role, place, base, other, example, n, base_side)
        if len(span.base) != len(span.other):
            raise InputError(
                f"The role {role!r} is {len(span.base)} tokens of one prompt of pair {example} and {len(span.other)} "
                f"of the other: they cannot be matched one for one. hw.last_token_of({shown(place)}) names the last "
                "token of each."
            )
    matched_tokens(spots, {}, example)
    return spots


def matched_tokens(spots: Mapping[str, AlignedSpan], keys: Mapping[str, AlignedSpan], example: int) -> dict[int, int]:
    """Return which token of the other prompt of a pair each token is, of positions and of keys, by role."""
    by_token: dict[int, tuple[str, int]] = {}
    for role, span in (*spots.items(), *keys.items()):
        for here, there in zip(span.base, span.other, strict=True):
            first, taken = by_token.setdefault(here, (role, there))
            if taken != there:
                raise InputError(
                    f"Token {here} of pair {example} is {first!r} and {role!r}, which are two tokens ({taken} and "
                    f"{there}) of the other prompt."
                )
    return {here: there for here, (_, there) in by_token.items()}


def refuse_other_order(queries: Mapping[str, AlignedSpan], keys: Mapping[str, AlignedSpan], example: int) -> None:
    """Refuse a pair in which a query can read a key in one prompt and comes before it in the other."""
    for (reads, query), (read, key) in product(queries.items(), keys.items()):
        for here, there in zip(query.base, query.other, strict=True):
            if any((here < of) != (there < to) for of, to in zip(key.base, key.other, strict=True)):
                raise InputError(
                    f"The key {read!r} lies behind the query {reads!r} in one prompt of pair {example} and not in the "
                    "other, where its weight is 0. Give pairs in which they have one order."
                )


def _role_spot(
    role: str, place: object, base: Prompt, other: Prompt | None, example: int, n: int, base_side: int
) -> AlignedSpan:
    """Resolve one role in a pair."""
    if other is None:
        at = role_in(role, place, base, example, n)
        return AlignedSpan(at, at)
    by_prompt: list[tuple[int, ...] | None] = []
    absent: AbsentError | None = None
    for prompt, side in ((base, base_side), (other, 1 - base_side)):
        try:
            by_prompt.append(role_in(role, place, prompt, example, n, side))
        except AbsentError as error:
            by_prompt.append(None)
            absent = error
    a, b = by_prompt
    if absent is not None and (len(base) != len(other) or (a is None and b is None)):
        raise InputError(
            f"{absent} Of a pair of two lengths, name both words: (the clean prompt's, the corrupted one's)."
            if len(base) != len(other)
            else str(absent)
        )
    return AlignedSpan(a if a is not None else b or (), b if b is not None else a or ())


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


def prompt_options(*sets: Sequence[Prompt] | None) -> dict[str, object]:
    """Name the prompts of a run by their token ids, and say where they were chats."""
    ids = [[list(prompt.ids) for prompt in prompts] if prompts is not None else None for prompts in sets]
    return {"prompts": ids, **note_on_chats(prompt.text for prompts in sets for prompt in prompts or ())}
