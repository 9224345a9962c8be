"""Prompts and pairs of prompts of sweeps, and the matching positions in the two prompts of a pair.

Pairs must align token by token; if they do not, the error shows the two tokenizations side by side. Only if positions
are named by role (`models.positions`) may the prompts of a pair differ in length: each prompt is resolved separately,
and the tokens of a role in one prompt match those of the same role in the other, one for one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.data.rows import read_rows, refuse_repeated
from headwater.errors import InputError
from headwater.models.edits import Hook, keeping, replace_hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import (
    AbsentError,
    Prompt,
    Where,
    checked_roles,
    needs_length,
    positions_of,
    refuse_two_meanings,
    role_in,
)
from headwater.models.sites import Site, hook_name
from headwater.models.tokens import Batch, Inputs, note_on_chats, pad_id, spelled_tokens, token_strings
from headwater.options import shown
from headwater.patching.edits import ReplacementSpec
from headwater.patching.metrics import Metric

Prompts: TypeAlias = Inputs
NAMED_BY_ROLE = (
    "If the words have different numbers of tokens, name roles: positions={'subject': "
    "hw.last_token_of((' Rome', ' New York')), 'end': 'last'}; or choose "
)


def read_prompts(model: HookedModel, inputs: Prompts) -> tuple[Prompt, ...]:
    """Tokenize prompts by the model's own rule (token ids are used unchanged)."""
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
    """Tokenize pairs of prompts, passed as two arguments or as a table (see `read_table`).

    `by_role`: whether positions are named by role, so lengths in a pair may differ; None: errors do not suggest it.
    """
    if corrupted is None and isinstance(clean, Path | pd.DataFrame):
        clean, corrupted = read_table(clean)
    first = read_prompts(model, clean)
    if corrupted is None:
        return first, None
    second = read_prompts(model, corrupted)
    if len(first) != len(second):
        raise InputError(f"{len(first)} clean prompts were given and {len(second)} corrupted ones: they must be pairs.")
    # Also for a model that adds no such tokens: token ids may contain the tokenizer's own.
    bos = model.bos or model.resolve_bos(model.tokenizer is not None and model.tokenizer.bos_token is not None)
    for example, (a, b) in enumerate(zip(first, second, strict=True)):
        if bos and (a.ids[: len(bos)] == bos) != (b.ids[: len(bos)] == bos):
            first_tokens = spelled_tokens(model.tokenizer, bos)
            raise InputError(
                f"Pair {example} does not align: one of its prompts begins with {first_tokens} and the other does not. "
                "Texts get model.bos, token ids stay as they are: give both prompts with it, or both without."
            )
        # After the first difference positions would mean other words, and every cell would be wrong.
        if len(a) != len(b) and not by_role:
            raise InputError(
                f"Pair {example} does not align: {len(a)} tokens in the clean prompt, {len(b)} in the corrupted one. "
                f"{'Choose ' if by_role is None else NAMED_BY_ROLE}prompts that differ token for token.\n"
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
    names = ("clean", "corrupted")
    pairs = [tuple(_cell(row, name, f"{where}, row {number}") for name in names) for number, row in rows]
    if not pairs:
        raise InputError(f"{where} has no rows.")
    return [clean for clean, _ in pairs], [corrupted for _, corrupted in pairs]


def refuse_columns_as_answers(table: object, metrics: Iterable[Metric]) -> None:
    """Refuse a metric whose answer is the name of a column of the table that the prompts come from."""
    words = [one for metric in metrics for one in metric.answers if isinstance(one, str)]
    columns: set[Any] = set(table.columns) if isinstance(table, pd.DataFrame) else set()
    if words and isinstance(table, Path):
        columns = {name for _, row in read_rows(table, "pairs of prompts") for name in row}
    if named := [word for word in words if word in columns]:
        raise InputError(
            f"The answer {named[0]!r} is the name of a column of the table: give the column, df[{named[0]!r}], or the "
            "id of a token of this text."
        )


def _cell(row: Mapping[Any, Any], name: str, where: str) -> Any:
    if name not in row:
        raise InputError(f"{where} has no {name!r}; it has {', '.join(map(str, row)) or 'nothing'}.")
    cell = row[name]
    if not isinstance(cell, str | list | tuple | np.ndarray | Tensor) or not len(cell):
        raise InputError(f"{where}: {name} must be a text or a list of token ids, found {shown(cell)}.")
    return cell if isinstance(cell, str) else list(cell)


@dataclass(frozen=True)
class AlignedSpan:
    """The positions of a name in the two prompts of a pair, token for token."""

    base: tuple[int, ...]
    """Positions in the prompt that is edited."""
    other: tuple[int, ...]
    """The matching positions in the other prompt; without one, those of `base`."""


def places_among(prompts: Sequence[Sequence[int]], seen: Iterable[Sequence[int]]) -> list[int]:
    """Return the indices of the prompts that are among others, token for token."""
    known = {tuple(ids) for ids in seen}
    return [number for number, ids in enumerate(prompts) if tuple(ids) in known]


def _found_in_pair(
    find: Callable[..., tuple[int, ...]], base: Prompt, other: Prompt | None, base_side: int, example: int, n: int
) -> AlignedSpan:
    """Return the positions that `find` names in each prompt of a pair.

    A word that is in only one of two prompts of one length has the same positions in the other.
    """
    if other is None:
        alone = find(base, example, n)
        return AlignedSpan(alone, alone)
    found: list[tuple[int, ...]] = []
    absent: InputError | None = None
    of_one_length = len(base) == len(other)
    for prompt, side in ((base, base_side), (other, 1 - base_side)):
        try:
            found.append(find(prompt, example, n, side))
        except InputError as error:
            # Token ids cannot be searched for a text: it counts as absent.
            if not (isinstance(error, AbsentError) or (prompt.text is None and of_one_length)):
                raise
            absent = error
    if absent is not None and not of_one_length:
        both = "name both words: (the clean prompt's, the corrupted one's)"
        raise InputError(f"{absent} If the lengths of a pair differ, {both}.")
    if absent is not None and not found:
        raise InputError(str(absent))
    return AlignedSpan(found[0], found[-1])


def seen_positions(site: Site, prompt: Prompt, positions: Sequence[int]) -> tuple[int, ...]:
    """Return positions without those that a site leaves out; refuse if none remains."""
    left_out = site.left_out(prompt.ids) if site.leaves_out else frozenset()
    editable = tuple(position for position in positions if position not in left_out)
    if not editable:
        raise InputError(
            f"{site.name} cannot be edited at any of the positions {list(positions)} of the prompt that begins with "
            f"{''.join(prompt.strings[:8])!r}: its dictionary was trained without such tokens. Name other positions."
        )
    return editable


def side_by_side(a: Prompt, b: Prompt) -> str:
    """Format two tokenizations in columns, with a mark where they differ."""
    width, rows = max([len(repr(s)) for s in a.strings] + [9]), []
    for i, (x, y) in enumerate(zip_longest(a.strings, b.strings)):
        first, second = ("-" if string is None else repr(string) for string in (x, y))
        rows.append(f"  {i:>3}  {first:<{width}}  {'  ' if x == y else '<>'}  {second}")
    return "\n".join(rows)


def prompt_options(*sets: Sequence[Prompt] | None) -> dict[str, object]:
    """Return the run's options of the prompts: their token ids, and a note if they are chats."""
    ids = [[list(prompt.ids) for prompt in prompts] if prompts is not None else None for prompts in sets]
    return {"prompts": ids, **note_on_chats(prompt.text for prompts in sets for prompt in prompts or ())}


# The two runs of each pair: which of them is edited, which is the other, and which positions match.
#
# A pair is two prompts; or one prompt, clean and with noise at the embeddings of some of its tokens, several times over
# (`headwater.patching.changes`); or, if values come from elsewhere, one prompt alone. Its two runs are called `base`,
# which is edited, and `other`, which values may come from.

DirectionName: TypeAlias = Literal["denoise", "noise"]
Side: TypeAlias = Literal["base", "other"]


class PromptPair:
    """The runs of a sweep: of the clean prompts and, if there are any, of the corrupted prompts.

    An example is one pair: a prompt of the caller's or, if noise (`corruption`) makes the corrupted runs from the clean
    prompts, one of its draws. The direction `denoise` edits the corrupted runs, `noise` the clean ones.
    """

    def __init__(
        self,
        clean: tuple[Prompt, ...],
        corrupted: tuple[Prompt, ...] | None = None,
        direction: DirectionName | str = "noise",
        corruption: Corruption | None = None,
    ):
        self.clean, self.corrupted, self.direction, self.corruption = clean, corrupted, direction, corruption
        self.draws = 1 if corruption is None else corruption.samples
        """Number of corrupted runs, each a pair, of every clean prompt."""
        self.base_is_clean = direction == "noise" or corrupted is None
        """Whether the clean runs are edited."""
        self.prompts = clean if self.base_is_clean or corrupted is None else corrupted
        """The prompts whose runs are edited, each of them once."""
        self.others = None if corruption is not None else corrupted if self.base_is_clean else clean
        """The other prompt of each pair, if it is another text."""
        self.base = tuple(prompt for prompt in self.prompts for _ in range(self.draws))
        """By example: the prompt whose run is edited."""
        self.other = self.others if corruption is None else self.base
        """By example: the other prompt; with noise the same text, in another run."""

    def is_clean(self, side: Side) -> bool:
        """Return whether a side is the clean one."""
        return (side == "base") == self.base_is_clean

    def spans(
        self, where: Where, *, in_base: bool = False, by_role: bool | None = None
    ) -> list[dict[str, AlignedSpan]]:
        """Return by prompt and role the positions in both runs; positions not named by role have an empty name.

        Prompts with the same positions share one object. `in_base`: only positions of the edited prompt. `by_role`: by
        default mappings name roles. Only by role may positions differ in two prompts of one length.
        """
        by_role = isinstance(where, Mapping) if by_role is None else by_role
        roles: Mapping[Any, Any] = cast("Any", where) if by_role else {"": where}
        if by_role:
            checked_roles(roles)
        others = self.others if self.others and not in_base else [None] * len(self.prompts)
        side, n, shared = 0 if self.base_is_clean else 1, len(self.prompts), dict[Hashable, dict[str, AlignedSpan]]()
        # If the lengths determine the positions, they are resolved once for all pairs of the same lengths.
        by_lengths: dict[tuple[int, int | None], dict[str, AlignedSpan]] = {}
        resolved, of_lengths = [], not by_role and needs_length(where)
        for i, (first, second) in enumerate(zip(self.prompts, others, strict=True)):
            lengths = (len(first), None if second is None else len(second))
            if not of_lengths or lengths not in by_lengths:
                spans: dict[str, AlignedSpan] = {}
                for role, place in roles.items():
                    find = partial(role_in, role, place) if by_role else partial(positions_of, place)
                    spans[role] = span = _found_in_pair(find, first, second, side, i, n)
                    name, at = f"The role {role!r}" if by_role else shown(where), f"{span.base} and {span.other}"
                    if second is not None and len(first) == len(second) and not by_role and span.base != span.other:
                        raise InputError(
                            f"{name} falls on different tokens in the two prompts of pair {i}: {at}.\n"
                            f"{side_by_side(first, second)}"
                        )
                    if len(span.base) != len(span.other):
                        raise InputError(
                            f"{name} is {len(span.base)} tokens of one prompt of pair {i} and {len(span.other)} of the "
                            f"other, {at}: they cannot be matched one for one. hw.last_token_of({shown(place)}) names "
                            "the last token of each."
                        )
                by_lengths[lengths] = shared.setdefault(tuple(spans.items()), spans)
            resolved.append(by_lengths[lengths])
        return resolved

    def matched(
        self,
        spans: Sequence[Mapping[str, AlignedSpan]],
        sites: Iterable[Site],
        keys: Sequence[Mapping[str, AlignedSpan]] | None = None,
    ) -> tuple[Mapping[int, int] | None, ...]:
        """Return by prompt the matching position in the other prompt of each editable position; None if all are equal.

        `keys`: the positions of the keys that may be edited, if these are named by role.
        """
        others = self.others or [None] * len(self.prompts)
        keyed = [site.name for site in sites if site.has_keys]
        of_keys = keys if keyed and keys is not None else [{}] * len(self.prompts)
        # Prompts that share their spans share the result, so that 500 prompts of one shape cost as much as one.
        cache: dict[tuple[int, int, bool], Mapping[int, int] | None] = {}
        matched = []
        for i, (at, to, base, other) in enumerate(zip(spans, of_keys, self.prompts, others, strict=True)):
            of_one_length = other is None or len(base) == len(other)
            if (same := (id(at), id(to), of_one_length)) not in cache:
                by_token: dict[int, tuple[str, int]] = {}
                for role, span in (*at.items(), *to.items()):
                    for in_base, in_other in zip(span.base, span.other, strict=True):
                        first, earlier = by_token.setdefault(in_base, (role, in_other))
                        if earlier != in_other:
                            raise InputError(
                                f"Token {in_base} of pair {i} is {first!r} and {role!r}, which are two different "
                                f"tokens ({earlier} and {in_other}) of the other prompt."
                            )
                pairs = {in_base: in_other for in_base, (_, in_other) in by_token.items()}
                in_place = of_one_length and all(in_base == in_other for in_base, in_other in pairs.items())
                cache[same] = None if in_place else pairs
            matched.append(cache[same])
        moved = [i for i, one in enumerate(matched) if one is not None]
        if moved and keyed and keys is None:
            raise InputError(
                f"The site {keyed[0]} holds every key of a prompt, and pair {moved[0]} does not align token by token: "
                "give pairs that do, or name the keys by role, as in keys={'subject': "
                "hw.last_token_of((' Rome', ' New York'))}."
            )
        for i in moved:
            # If a query can read a key in one prompt and comes before it in the other, its weight there is 0.
            for (reads, query), (read, key) in product(spans[i].items(), of_keys[i].items()):
                for in_base, in_other in zip(query.base, query.other, strict=True):
                    if any((in_base < of) != (in_other < to) for of, to in zip(key.base, key.other, strict=True)):
                        raise InputError(
                            f"The key {read!r} comes after the query {reads!r}, which cannot attend to it, in only one "
                            f"prompt of pair {i}. Give pairs in which both prompts have the same order."
                        )
        return tuple(matched)


# The corrupted run of causal tracing: the clean prompt with noise at the embeddings of some of its tokens.
#
# Meng et al. (2022), for every corrupted token i, such as those of a subject:
#
# embedding'_i = embedding_i + std · σ · ε_i,   ε ~ N(0, 1)
#
# where σ is the standard deviation of all entries of these embeddings, over all prompts. Each draw is a separate
# corrupted run, and every cell that restores a part of it uses the same draw.

BATCH = 16
"""Prompts per run, if a run is made only to read from it."""


def draw(seed: int, site: str, layer: int, example: int, sample: int, size: tuple[int, ...]) -> Tensor:
    """Return the standard normal numbers of one draw, the same on every machine that has the same torch."""
    # Seeded by the purpose of the draw: the same whichever other prompts, sites or samples are drawn, in any process.
    mixed = hashlib.sha256(f"{seed} {site} {layer} {example} {sample}".encode()).digest()
    # On the CPU, whose generator gives the same numbers whatever device the model is on.
    return torch.randn(size, generator=torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big")))


@dataclass(frozen=True)
class Corruption:
    """Noise at the embeddings of some tokens of each prompt."""

    at: tuple[tuple[int, ...], ...]
    """By prompt: the corrupted tokens."""
    std: float
    """Standard deviation of the noise, in the embeddings' own units."""
    samples: int
    """Number of draws of each prompt; draw s of prompt i is example i · samples + s of a plan."""
    seed: int

    def hook(self, examples: Sequence[int | None]) -> Hook:
        """Return the hook that corrupts a batch: each row gets the noise of its example; rows of None stay clean."""

        def corrupt(activation: Tensor, hook: object) -> Tensor:
            noisy = activation.clone()
            for row, example in enumerate(examples):
                if example is not None:
                    prompt, sample = divmod(example, self.samples)
                    at, width = list(self.at[prompt]), noisy.shape[-1]
                    drawn = self.std * draw(self.seed, "embed", 0, prompt, sample, (len(at), width))
                    noisy[row, at] += drawn.to(noisy)
            return noisy

        return hook_name("embed"), replace_hook(corrupt)


def read_prompt_pair(
    model: HookedModel,
    clean: Any,
    corrupted: object,
    direction: str,
    *,
    positions: Where = "all",
    by_role: bool | None = None,
) -> PromptPair:
    """Read the prompts of a sweep, as `read_pairs` does, or noise, which may name one of the roles of `positions`."""
    if not isinstance(corrupted, ReplacementSpec):
        first, second = read_pairs(model, clean, corrupted, by_role=by_role)
        refuse_two_meanings(positions, len(first), of_pairs=second is not None)
        return PromptPair(first, second, direction)
    prompts = read_prompts(model, clean)
    refuse_two_meanings(positions, len(prompts))
    arguments = corrupted.arguments
    std, where = arguments.get("std", 0), arguments.get("positions")
    if std == 0 or where is None:
        raise InputError(
            f"corrupted=hw.{corrupted.kind}(...) makes no corrupted runs: give the corrupted prompts, or "
            "hw.noise(3, positions=' France'), a std above 0 and the tokens to corrupt: a word, their numbers, or the "
            "name of a role of positions=."
        )
    if isinstance(positions, Mapping) and isinstance(where, str) and where in positions:
        where = positions[where]
    at = tuple(positions_of(where, prompt, i, len(prompts)) for i, prompt in enumerate(prompts))
    if not arguments["absolute"]:
        # In standard deviations of the entries of these embeddings, over all prompts.
        entries, embedded = list[Tensor](), dict[str, Tensor]()
        for start in range(0, len(prompts), BATCH):
            batch = Batch.of([prompt.ids for prompt in prompts[start : start + BATCH]], pad_id(model.tokenizer))
            model.run(batch, keeping([hook_name("embed")], embedded), stop_at=1)
            rows = zip(embedded[hook_name("embed")], at[start:], strict=False)
            entries += [row[list(places)].float().flatten().cpu() for row, places in rows]
        std *= float(torch.cat(entries).std())
    corruption = Corruption(at, std, arguments["samples"], arguments["seed"])
    return PromptPair(prompts, prompts, direction, corruption)
