"""Relations: mappings from words to words that a head may implement, read from files and tables.

A relation is a list of pairs (source, accepted targets), e.g. ("France", ("Paris",)), in one of four categories. A
folder of relations holds a file `NAME.json` or `NAME/NAME.json` (the published layout) for each. The file contains

- a list of `[source, target]` rows. A source may occur twice, as two items. The category comes from `categories.json`
  (`{name: category}`), else it is the published category of that name, else none: scored, but it colours no head.
- or an object `{"name", "category", "description", "provenance", "licence", "pairs": [[source, [target, ...]], ...]}`,
  each source once. headwater's suite (Elhelo & Geva, ACL 2025, gathered anew) uses this format.

A relation can also be a table (a data frame, or a CSV or TSV file, with columns source and target and a row per pair),
a list of pairs, or a mapping {name: pairs or data frame}. A source with several rows has several accepted targets. Such
a relation has the category of its column `category` (the same in all rows), else the published category of its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.calls import checked_call, checked_calls
from headwater.data.rows import SEPARATORS, check_readable, read_rows, refuse_repeated
from headwater.data.strict_json import is_unicode, parse_json
from headwater.errors import InputError, ModelError, did_you_mean
from headwater.heads.categories import CATEGORIES, PUBLISHED_CATEGORIES
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Batch, Bos, make_batch, token_span
from headwater.options import checked_path, has_no_order, is_one, one_or_several, refuse_half_characters, shown
from headwater.runs.result import records_of

SUITE = Path(str(files("headwater.heads") / "suite"))
Pair = tuple[str, tuple[str, ...]]


@checked_calls
@dataclass(frozen=True, repr=False)
class Relation:
    """Pairs of a source word and its accepted targets, one target or several: `("France", "Paris")`."""

    name: str
    category: str | None
    pairs: tuple[Pair, ...]
    provenance: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError(f"The name of a relation is a text, not {shown(self.name)}.")
        refuse_half_characters(self.name)
        if self.category is not None and self.category not in CATEGORIES:
            hint = did_you_mean(self.category, CATEGORIES)
            raise InputError(f"Relation {self.name!r}: {shown(self.category)} is not a category.{hint}")
        object.__setattr__(self, "pairs", checked_pairs(self.name, self.pairs))

    @property
    def is_copying(self) -> bool:
        """Whether the target is the source itself (the published rule: the name contains "copying")."""
        return "copying" in self.name

    def __repr__(self) -> str:
        source, targets = self.pairs[0] if self.pairs else ("", ())
        return f"Relation({self.name}: {len(self.pairs):,} pairs, {source} → {' | '.join(targets)}, ...)"


def checked_pairs(name: str, pairs: Iterable[Any]) -> tuple[Pair, ...]:
    """Return the pairs of a relation, each with a tuple of targets; a single target may be passed as a word."""
    if is_one(pairs) or has_no_order(pairs):
        raise InputError(f"Relation {name!r}: pairs={shown(pairs)} is not a list of pairs (source, target).")
    checked = []
    for pair in pairs:
        try:
            source, targets = one_or_several(pair)
            accepted = (targets,) if isinstance(targets, str) else tuple(targets)
            # The first target is the one in prompts, so targets have an order.
            are_words = accepted and not has_no_order(targets)
            are_words = are_words and all(word and word == word.strip() for word in (source, *accepted))
        except (TypeError, ValueError, AttributeError):
            are_words = False
        if not are_words:
            raise InputError(
                f"Relation {name!r}: {shown(pair)} is not a pair (source, target) or (source, targets) of words "
                "without spaces around them."
            )
        for word in (source, *accepted):
            refuse_half_characters(word)
        checked.append((source, accepted))
    return tuple(checked)


Pairs: TypeAlias = pd.DataFrame | Sequence[Any]
Relations: TypeAlias = (
    str
    | Path
    | Relation
    | pd.DataFrame
    | Mapping[str, Pairs]
    | Sequence[str | Path | Relation | pd.DataFrame | Sequence[Any]]
    | None
)
"""The accepted forms of relations; see `load_relations`."""


@checked_call
def load_relations(relations: Relations = None) -> tuple[Relation, ...]:
    """Load relations from a folder (in the order of their names) or from any other accepted form.

    Args:
        relations: a folder with a file per relation, in the format of the module's docstring; one such file, or a CSV
            or TSV file with columns source and target; the name of a relation in headwater's suite; a relation object;
            a data frame with these columns, or a list of pairs, which is then named "own"; a mapping {name: list of
            pairs, or data frame}; or several of these. None is the whole suite.
    """
    if relations is None:
        return _suite_relations()
    if isinstance(relations, Relation):
        return (relations,)
    if isinstance(relations, pd.DataFrame):
        return (_named("own", relations),)
    if isinstance(relations, Mapping):
        return tuple(_named(str(name), pairs) for name, pairs in relations.items())
    if is_one(relations) or isinstance(relations, Path):
        loaded = _read_relations(checked_path("relations", relations))
    else:
        parts = list(relations)
        # What begins with a word, such as ("France", "Paris"), is a pair and not a relation.
        if parts and all(isinstance(part, list | tuple) and part and isinstance(part[0], str) for part in parts):
            return (_named("own", parts),)
        loaded = tuple(one for part in parts for one in load_relations(part))
    for name, times in Counter(relation.name for relation in loaded).items():
        if times > 1:
            raise InputError(f"{times} relations are named {name!r}: names must be unique. Rename or remove one.")
    return loaded


@cache
def _suite_relations() -> tuple[Relation, ...]:
    return _read_relations(SUITE)


def _read_relations(path: Path) -> tuple[Relation, ...]:
    """Read a folder or file; a path that does not exist may be the name of a relation in the suite."""
    if not path.exists():
        suite_files = {file.stem: file for file in SUITE.glob("*.json")}
        if str(path) not in suite_files:
            hint = did_you_mean(path, suite_files, or_all=False) or " hw.load_relations() has them all, by name."
            raise InputError(f"There is no relation or folder {path}.{hint}")
        path = suite_files[str(path)]
    if path.is_file():
        is_table = path.suffix in SEPARATORS
        return (_of_table(path.stem, read_rows(path, "pairs"), str(path)) if is_table else _read_relation(path, {}),)
    listed = path / "categories.json"
    if not isinstance(categories := _read_json(listed) if listed.exists() else {}, dict):
        raise InputError(f"{listed}: expected an object {{relation name: category}}.")
    paths = [file for file in path.glob("*.json") if file != listed]
    for folder in (one for one in path.iterdir() if any(one.glob("*.json"))):
        paths.append(folder / f"{folder.name}.json")
        if not paths[-1].is_file():
            raise InputError(f"{folder} has no {folder.name}.json: a relation's file has the name of its folder.")
    if not paths:
        raise InputError(f"{path} holds no relation: expected NAME/NAME.json or NAME.json files there.")
    return tuple(_read_relation(file, categories) for file in sorted(paths, key=lambda file: file.stem))


def _read_json(file: Path) -> Any:
    check_readable(file, "relations")
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise InputError(f"{file} is not a relation file in JSON ({error}).") from None


def _read_relation(file: Path, categories: Mapping[str, str]) -> Relation:
    """Read a file in one of the two layouts; a list of rows has the name of the file."""
    value, name = _read_json(file), file.stem
    is_list = isinstance(value, list)
    if is_list:
        value = {"name": name, "category": categories.get(name, PUBLISHED_CATEGORIES.get(name)), "pairs": value}
    if not isinstance(value, dict) or not {"name", "category", "pairs"} <= value.keys():
        raise InputError(f"{file}: expected rows [source, target], or an object with name, category and pairs.")
    try:
        relation = Relation(value["name"], value["category"], value["pairs"], str(value.get("provenance", "")))
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    times = Counter(source for source, _ in relation.pairs).most_common(1)
    if not times or (times[0][1] > 1 and not is_list):
        found = f"source {times[0][0]!r} is repeated: put its targets in one row" if times else "there are no pairs"
        raise InputError(f"{file}: {found}.")
    return relation


NumberedRows: TypeAlias = Iterable[tuple[int, Mapping[str, object]]]
"""Rows, each with the number under which a person finds it."""


def _of_table(name: str, rows: NumberedRows, where: str) -> Relation:
    """Make a relation from rows: each source with its accepted targets, and the one category that all rows have."""
    pairs: list[Pair] = []
    categories: dict[str | None, None] = {}
    for number, row in rows:
        source, target = row.get("source"), row.get("target")
        if not (isinstance(source, str) and source.strip() and isinstance(target, str) and target.strip()):
            raise InputError(
                f"{where}, row {number}: found {shown(source)} and {shown(target)}; a relation has columns source and "
                "target, with a word in each row."
            )
        pairs.append((source.strip(), (target.strip(),)))
        category = row.get("category")
        categories[None if category is None else str(category)] = None
    if len(categories) > 1:
        named = ", ".join(map(str, categories))
        raise InputError(f"{where} has several categories ({named}): a relation has one. Make a relation for each.")
    return _merged(name, pairs, next(iter(categories), None))


def _named(name: str, pairs: Pairs) -> Relation:
    if isinstance(pairs, pd.DataFrame):
        refuse_repeated("The data frame", pairs.columns)
        return _of_table(name, enumerate(records_of(pairs), start=1), f"the data frame of {name!r}")
    return _merged(name, checked_pairs(name, pairs))


def _merged(name: str, pairs: Iterable[Pair], category: str | None = None) -> Relation:
    """Make a relation from pairs: each source once, with the targets of all its pairs."""
    accepted: dict[str, dict[str, None]] = {}
    for source, targets in pairs:
        accepted.setdefault(source, {}).update(dict.fromkeys(targets))
    if not accepted:
        raise InputError(f"Relation {name!r} holds no pairs: give (source, target) for each.")
    merged = tuple((source, tuple(targets)) for source, targets in accepted.items())
    return Relation(name, category or PUBLISHED_CATEGORIES.get(name), merged)


# Relations as the token ids of one model, and which of their pairs are dropped.
#
# Words are written without a leading space; tokenization adds it. A pair is kept for a tokenizer if its source is
# exactly one token and at least one of its targets is. Two more kinds of pair are dropped, because counting them would
# inflate the evidence:
#
# - a pair with the same tokens as an earlier pair;
# - outside copying relations, a pair whose only target token is the source token. A head that copies hits it, and words
#   of several tokens may begin alike. The published rule keeps the pair if both words are the same (`same_words`).
#
# A relation is used if at least 30 pairs are kept.
#
# `multi_token` selects the token that represents a word of several tokens. "first" is its first token other than the
# bare space; many words begin alike, so it may say little about the word. "distinguishing" applies only to targets, and
# sources must be single tokens. It is the target's first token that occurs in no target which the item does not accept
# ("York" of "New York" beside "New Delhi", however each is split) and that, outside copying relations, is not the
# source token. A target of one token represents itself; a target without a distinguishing token is dropped.
#
# So a relation has different items on different models; `relation_coverage` counts the items that each keeps.


MIN_PAIRS = 30
MultiTokenName: TypeAlias = Literal["first", "distinguishing"]
MULTI_TOKEN = (None, *get_args(MultiTokenName))
REPEATED = "repeats an earlier pair, token for token"
OWN_TARGET = "its target is the same token as its source"


@dataclass(frozen=True, eq=False)
class TokenRelation:
    """The items of a relation kept for one tokenizer, as token ids, and the dropped pairs with the reason."""

    relation: Relation
    source: Int[Tensor, " item"]
    targets: tuple[tuple[int, ...], ...]
    """The accepted target ids of each item, each id once."""
    dropped: pd.DataFrame
    """`source, target, reason`: a row per dropped pair."""
    words: tuple[Pair, ...] = ()
    """The source of each item and its remaining accepted targets, as words; prompts are made of them."""

    @property
    def usable(self) -> bool:
        """Whether enough pairs are kept for a meaningful score."""
        return len(self.targets) >= MIN_PAIRS

    @property
    def distinct_sources(self) -> int:
        """Number of distinct sources: the effective number of items if sources repeat."""
        return len(self.source.unique())

    @property
    def note(self) -> str:
        """Why the relation is not used, and how many pairs were dropped for reasons other than their token count."""
        kept, given = len(self.targets), len(self.relation.pairs)
        notes = [] if self.usable else [f"left out: {kept} of {given} pairs survive, {MIN_PAIRS} are needed"]
        repeated, own = (int((self.dropped["reason"] == reason).sum()) for reason in (REPEATED, OWN_TARGET))
        if repeated:
            notes.append(f"{repeated} repeated pair{'s' * (repeated > 1)} merged")
        if own:
            notes.append(f"{own} pair{'s' * (own > 1)} left out whose target is the same token as its source")
        return "; ".join(notes)


def tokenize_relations(
    relations: Iterable[Relation],
    tokenizer: Any,
    *,
    multi_token: MultiTokenName | None = None,
    same_words: bool = False,
) -> tuple[TokenRelation, ...]:
    """Tokenize relations and record the dropped pairs; every relation is returned, even with few pairs left.

    For the options see the comment above `MIN_PAIRS`.
    """
    if not isinstance(multi_token, str | None) or multi_token not in MULTI_TOKEN:
        raise InputError(f'multi_token={shown(multi_token)} is not known: give None, "first" or "distinguishing".')
    relations = tuple(relations)
    pairs = [pair for relation in relations for pair in relation.pairs]
    words = sorted({word for source, targets in pairs for word in (source, *targets)})
    tokens = dict(zip(words, word_tokens(tokenizer, words), strict=True))
    if multi_token is not None:
        spaces = set(tokenizer.convert_tokens_to_ids(["▁", "Ġ"]))
        most = 1 if multi_token == "first" else None
        tokens = {word: [token for token in ids if token not in spaces][:most] for word, ids in tokens.items()}
    telling = multi_token == "distinguishing"
    return tuple(_tokenize(relation, tokens, telling, same_words) for relation in relations)


def shared_relations(
    relations: Iterable[Relation], tokenizers: Sequence[Any], *, multi_token: MultiTokenName | None = None
) -> tuple[Relation, ...]:
    """Return the relations, with only the pairs and targets that are kept for every one of the tokenizers."""
    # Repeated until nothing changes, because dropping a pair can change which tokens distinguish targets.
    shared, before = tuple(relations), None
    while shared != before:
        before = shared
        for tokenizer in tokenizers:
            tokenized = tokenize_relations(shared, tokenizer, multi_token=multi_token)
            shared = tuple(replace(tokens.relation, pairs=tokens.words) for tokens in tokenized)
    return shared


def word_tokens(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each word within a sentence: after a space, without special tokens.

    A tokenizer that itself adds a space before every text (SentencePiece's dummy prefix) gets the bare word. A word
    with a piece that is not in the vocabulary has no tokens.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise ModelError(
            f"Relations are words, and tokenizer={shown(tokenizer)} is not a tokenizer: load the model with one."
        )
    if not words:
        return []
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))
    # SentencePiece adds a space before any text; a second space would be a separate token.
    space = "" if pieces and pieces[0].startswith(("▁", "Ġ")) else " "
    encoded = tokenizer([space + word for word in words], add_special_tokens=False)["input_ids"]
    return [[] if tokenizer.unk_token_id in ids else ids for ids in encoded]


def _tokenize(
    relation: Relation, tokens: Mapping[str, Sequence[int]], telling: bool, same_words: bool
) -> TokenRelation:
    """Tokenize one relation; with `telling` a distinguishing token represents a target of several tokens."""
    holders: dict[int, set[str]] = {}  # of each token, the targets that contain it
    for target in {target for _, accepted in relation.pairs for target in accepted}:
        for token in tokens[target]:
            holders.setdefault(token, set()).add(target)
    items: dict[tuple[int, frozenset[int]], dict[int, str]] = {}
    words: list[Pair] = []
    dropped = []
    for source, accepted in relation.pairs:
        source_ids, represented = tokens[source], dict[str, int]()
        for target in accepted:
            ids = tokens[target]
            if telling and len(ids) > 1:
                distinct = [token for token in ids if holders[token] <= set(accepted)]
                # Outside copying relations the source's tokens cannot represent a target.
                ids = [token for token in distinct if relation.is_copying or token not in source_ids][:1]
            if len(ids) == 1:
                represented[target] = ids[0]
        if len(source_ids) != 1 or not represented:
            word = source if len(source_ids) != 1 else accepted[0]
            reason = f"{word!r} is {len(tokens[word])} tokens" if tokens[word] else f"{word!r} is not in the vocabulary"
            if tokens[word] and telling and len(source_ids) == 1:
                reason = f"no token of {word!r} distinguishes it from the other targets"
            dropped.append((source, " | ".join(accepted), reason))
            continue
        by_token: dict[int, str] = {}
        for target, token in represented.items():
            if token != source_ids[0] or relation.is_copying or (same_words and target == source):
                by_token.setdefault(token, target)
        item = source_ids[0], frozenset(by_token)
        if not by_token or item in items:
            dropped.append((source, " | ".join(accepted), REPEATED if by_token else OWN_TARGET))
        else:
            items[item] = by_token
            words.append((source, tuple(by_token.values())))
    table = pd.DataFrame(dropped, columns=["source", "target", "reason"])
    sources = torch.tensor([source for source, _ in items], dtype=torch.int64)
    return TokenRelation(relation, sources, tuple(map(tuple, items.values())), table, tuple(words))


@checked_call
def relation_coverage(
    relations: Relations, tokenizer: object, *, multi_token: MultiTokenName | None = None
) -> pd.DataFrame:
    """Count the pairs of each relation that are kept with a tokenizer.

    Args:
        relations: relations in any form that `load_relations` accepts; the result has a row for each, in this order.
        tokenizer: the model's tokenizer.
        multi_token: how to treat words of several tokens, as in `classify_heads`; None drops them.

    Returns:
        `relation, category, items` (number of pairs), `kept, dropped, usable` (whether enough are kept for a score),
        `fallen_out` (the sources of the dropped pairs; `tokenize_relations` returns the reasons), `note` (whether the
        relation is not used, and how many pairs were repeated or had the source token as their only target).
    """
    rows = []
    for tokens in tokenize_relations(load_relations(relations), tokenizer, multi_token=multi_token):
        given, dropped = tokens.relation, tokens.dropped
        counts = len(given.pairs), len(tokens.targets), len(dropped), tokens.usable
        rows.append((given.name, given.category, *counts, tuple(dropped["source"]), tokens.note))
    columns = ["relation", "category", "items", "kept", "dropped", "usable", "fallen_out", "note"]
    return pd.DataFrame(rows, columns=columns)


# Prompts for a relation's items: sentences that contain the source, or tasks with examples that ask for the target.


TEMPLATE = "Input: {source} Output:"
"""The default prompt that asks for a target."""


@dataclass(frozen=True, eq=False)
class SourcePrompts:
    """Sentences that contain a source; a row per template and item whose source is a single token there."""

    batch: Batch
    source: Int[Tensor, " row"]
    """The position of the source."""
    item: Int[Tensor, " row"]
    template: Int[Tensor, " row"]


@dataclass(frozen=True, eq=False)
class TaskPrompts:
    """Prompts that ask for an item's target; a row per item."""

    batch: Batch
    accepted: tuple[tuple[int, ...], ...]
    """The accepted target tokens of each row. A target of several tokens has one token that represents it; all of a
    row's accepted tokens follow the same preceding tokens, with which the prompt ends."""
    foil: Int[Tensor, " row"]
    """A target of another item that is not accepted here, for the logit difference."""


def source_prompts(
    model: HookedModel, tokens: TokenRelation, templates: Sequence[str], *, bos: Bos = None
) -> SourcePrompts:
    """Put each source into each template; drop rows where the tokenizer splits the source or merges it with more."""
    templates = checked_templates(templates)
    words = [text.strip() for text in model.token_strings(tokens.source.tolist())]
    shape = model.shape
    filled = [template.replace("{source}", word) for template in templates for word in words]
    begun = model.bos if bos is None else model.resolve_bos(bos)
    batch = make_batch(filled, model.tokenizer, bos=begun, d_vocab=shape.d_vocab, n_ctx=shape.n_ctx)
    if batch.offsets is None:
        raise InputError(f"The tokenizer of {model.name} gives no character offsets; load its fast version.")
    kept = []
    for row, (place, item) in enumerate(np.ndindex(len(templates), len(words))):
        start = templates[place].index("{source}")
        span = token_span(batch.offsets[row], start, start + len(words[item]))
        if len(span) == 1 and batch.tokens[row, span[0]] == tokens.source[item]:
            kept.append((row, span[0], item, place))
    used = {place for *_, place in kept}
    if lacking := [template for place, template in enumerate(templates) if place not in used]:
        raise InputError(
            f"In no prompt of {lacking[0]!r} is the source a single token ({tokens.relation.name}): "
            "put a space before it."
        )
    row, source, items, places = torch.tensor(kept).T
    return SourcePrompts(Batch(batch.tokens[row], batch.mask[row]), source, items, places)


def checked_templates(templates: str | Sequence[str]) -> list[str]:
    """Return one template or several as a list."""
    checked = one_or_several(templates)
    if not checked:
        raise InputError("No templates were given; give sentences with {source} in them.")
    for template in checked:
        if not isinstance(template, str) or template.count("{source}") != 1 or not is_unicode(template):
            raise InputError(f"The template {shown(template)} must hold {{source}} once.")
    return checked


def task_prompts(model: HookedModel, tokens: TokenRelation, template: str, shots: int, seed: int) -> TaskPrompts:
    """Return prompts that ask for each item's target, after some other items with their targets.

    A target of several tokens has one token that represents it; the prompt ends with the tokens before that one. With
    several targets these are the tokens of the item's first target.
    """
    checked_templates([template])
    generator = np.random.default_rng(seed)
    words = [(source, accepted[0]) for source, accepted in tokens.words]
    targets = sorted({target for _, accepted in tokens.words for target in accepted})
    spelled = dict(zip(targets, word_tokens(model.tokenizer, targets), strict=True))
    every = {token for accepted in tokens.targets for token in accepted}
    begun: list[list[int]] = []  # of each item, the tokens before the one that represents its first target
    answers: list[tuple[int, ...]] = []
    texts, foils = [], []
    for item, (source, accepted) in enumerate(tokens.words):
        by_token = dict(zip(tokens.targets[item], (spelled[word] for word in accepted), strict=True))
        before = [ids[: ids.index(token)] for token, ids in by_token.items()]
        begun.append(before[0])
        answers.append(tuple(token for token, own in zip(by_token, before, strict=True) if own == before[0]))
        wrong = sorted(every - set(tokens.targets[item]))
        if not wrong:
            raise InputError(f"Every item of {tokens.relation.name} accepts the same targets: none is wrong.")
        others = [other for other in range(len(words)) if other != item]
        chosen = generator.choice(others, size=min(shots, len(others)), replace=False)
        # replace, not format, because a template may contain other braces.
        examples = [f"{template.replace('{source}', words[other][0])} {words[other][1]}\n" for other in chosen]
        texts.append("".join(examples) + template.replace("{source}", source))
        foils.append(int(generator.choice(wrong)))
    batch = model.tokenize(texts)
    if any(begun):
        rows = zip(batch.tokens, batch.lengths.tolist(), begun, strict=True)
        batch = model.tokenize([[*row[:length].tolist(), *own] for row, length, own in rows])
    return TaskPrompts(batch, tuple(answers), torch.tensor(foils))
