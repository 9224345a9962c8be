"""Relations as the token ids of one model, and which of their pairs fall out.

Words are written without the leading space that they get before they are tokenized. A pair survives for a tokenizer
when its source is exactly one token and at least one of its targets is. Two more kinds of pair fall out, because they
would count evidence that is none:

- a pair that says again, token for token, what an earlier one says;
- outside copying relations, a pair whose only target is the source's own token. A head that copies hits it, and words
  of several tokens may well begin alike. The published rule keeps those whose two words are the same (cut, cut).

A relation is used when at least 30 pairs survive.

`multi_token` says what represents words of several tokens. "first" is their first token; many begin alike, and then it
says little of the word. "distinguishing" is for targets alone, sources stay single tokens: the first token of the
target that is in no target which the item does not accept ("York" of "New York" beside "New Delhi", however each is
cut), and, outside copying relations, not the source's own token. A target of one token represents itself; a target
without such a token falls out.

The same relations so mean different items on different models; `relation_coverage` counts what survives of each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, ModelError
from headwater.heads.relations import Pair, Relation, Relations, load_relations
from headwater.models.tokenizers import panics_are_errors
from headwater.options import shown

MIN_PAIRS = 30
MultiTokenName: TypeAlias = Literal["first", "distinguishing"]
MULTI_TOKEN = (None, *get_args(MultiTokenName))
REPEATED = "says again, token for token, what an earlier pair says"
OWN_TARGET = "its target is the token of its source"


@dataclass(frozen=True, eq=False)
class TokenRelation:
    """The items of a relation that survive for one tokenizer, as token ids, and those that do not, with the reason."""

    relation: Relation
    source: Int[Tensor, "item"]
    targets: tuple[tuple[int, ...], ...]
    """The accepted target ids of each item, each id once."""
    dropped: pd.DataFrame
    """source, target, reason: a row per pair that fell out."""
    words: tuple[Pair, ...] = ()
    """The source of each item and the accepted targets that are left, as words."""

    @property
    def usable(self) -> bool:
        """Whether enough pairs survive for the score to mean something."""
        return len(self.targets) >= MIN_PAIRS

    @property
    def distinct_sources(self) -> int:
        """How many sources the items have: what their number counts for where a source comes several times."""
        return len(self.source.unique())

    @property
    def note(self) -> str:
        """Why the relation is left out, and how many of its pairs fell out for another reason than their length."""
        kept, given = len(self.targets), len(self.relation.pairs)
        left_out = "" if self.usable else f"left out: {kept} of {given} pairs survive, {MIN_PAIRS} are needed"
        fallen = self.dropped["reason"].value_counts()
        counts = {
            "repeated {} merged": fallen.get(REPEATED, 0),
            "{} left out whose target is the token of its source": fallen.get(OWN_TARGET, 0),
        }
        counted = [f"{n} {what.format('pair' if n == 1 else 'pairs')}" for what, n in counts.items() if n]
        return "; ".join(filter(None, [left_out, *counted]))


def tokenize_relations(
    relations: Iterable[Relation],
    tokenizer: Any,
    *,
    multi_token: MultiTokenName | None = None,
    same_words: bool = False,
) -> tuple[TokenRelation, ...]:
    """Turn words into token ids, and say which pairs fall out.

    Args:
        relations: the relations, all of them kept in the result, however few of their pairs survive.
        tokenizer: the model's tokenizer.
        multi_token: None drops a word of several tokens; "first" keeps its first token that is more than the space;
            "distinguishing" keeps, of targets, the first token that tells them from all others, as the module says.
        same_words: keep, as the published rule does, pairs of a word with itself also outside copying relations.
    """
    if not isinstance(multi_token, str | None) or multi_token not in MULTI_TOKEN:
        raise InputError(f'multi_token={shown(multi_token)} is not known: it is None, "first" or "distinguishing".')
    relations = tuple(relations)
    pairs = [pair for relation in relations for pair in relation.pairs]
    words = sorted({word for source, targets in pairs for word in (source, *targets)})
    tokens = dict(zip(words, word_tokens(tokenizer, words), strict=True))
    if multi_token is not None:
        spaces = set(tokenizer.convert_tokens_to_ids(["▁", "Ġ"]))
        most = 1 if multi_token == "first" else None
        tokens = {word: [token for token in ids if token not in spaces][:most] for word, ids in tokens.items()}
    telling = multi_token == "distinguishing"
    return tuple(
        _tokenize(relation, RelationWords(tokens, _holders(relation, tokens) if telling else None), same_words)
        for relation in relations
    )


def shared_relations(
    relations: Iterable[Relation], tokenizers: Sequence[Any], *, multi_token: MultiTokenName | None = None
) -> tuple[Relation, ...]:
    """Return the relations with the pairs, and of each the targets, that survive for every one of several tokenizers.

    All relations are kept, however few of their pairs survive; `multi_token` is that of `tokenize_relations`.
    """
    # Until nothing changes: a pair that falls out changes which tokens tell targets apart.
    shared, before = tuple(relations), None
    while shared != before:
        before = shared
        for tokenizer in tokenizers:
            tokenized = tokenize_relations(shared, tokenizer, multi_token=multi_token)
            shared = tuple(replace(tokens.relation, pairs=tokens.words) for tokens in tokenized)
    return shared


def word_tokens(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each word as they are inside a sentence: after a space, without special tokens.

    A tokenizer that itself begins every text with a space (SentencePiece's dummy prefix) is given the bare word. A word
    with a piece that the vocabulary lacks has no tokens.
    """
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise ModelError(
            f"Relations are words, and tokenizer={shown(tokenizer)} is not a tokenizer: load the model with its own."
        )
    if not words:
        return []
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))
    # SentencePiece writes a space before any text: a second one would be a token of its own.
    space = "" if pieces and pieces[0].startswith(("▁", "Ġ")) else " "
    with panics_are_errors(InputError, "The tokenizer fails on the words of a relation"):
        encoded = tokenizer([space + word for word in words], add_special_tokens=False)["input_ids"]
    return [[] if tokenizer.unk_token_id in ids else ids for ids in encoded]


@dataclass(frozen=True)
class RelationWords:
    """The tokens of a relation's words, and which of a target's tokens represent it."""

    tokens: Mapping[str, Sequence[int]]
    holders: Mapping[int, set[str]] | None
    """Of each token the targets that hold it; None where only targets of one token are taken."""

    def of_target(self, target: str, accepted: Sequence[str], own: Sequence[int]) -> Sequence[int]:
        """Return the token that represents a target, or those of it, or none, where no single one does.

        Args:
            target: the word.
            accepted: all targets of its item.
            own: tokens that represent no target: those of the source, outside copying relations.
        """
        ids = self.tokens[target]
        if self.holders is None or len(ids) < 2:
            return ids
        return [token for token in ids if token not in own and self.holders[token] <= set(accepted)][:1]


def _holders(relation: Relation, tokens: Mapping[str, Sequence[int]]) -> dict[int, set[str]]:
    """Return of each token the targets of the relation that hold it."""
    holders: dict[int, set[str]] = {}
    for target in {target for _, accepted in relation.pairs for target in accepted}:
        for token in tokens[target]:
            holders.setdefault(token, set()).add(target)
    return holders


def _tokenize(relation: Relation, words_of: RelationWords, same_words: bool) -> TokenRelation:
    items: dict[tuple[int, frozenset[int]], dict[int, str]] = {}
    words: list[Pair] = []
    dropped = []
    for source, accepted in relation.pairs:
        targets, reason = _targets(relation, source, accepted, words_of, same_words)
        item = (words_of.tokens[source][0], frozenset(targets)) if targets else None
        if item is None or item in items:
            dropped.append((source, " | ".join(accepted), reason or REPEATED))
        else:
            items[item] = targets
            words.append((source, tuple(targets.values())))
    table = pd.DataFrame(dropped, columns=["source", "target", "reason"])
    sources = torch.tensor([source for source, _ in items], dtype=torch.int64)
    return TokenRelation(relation, sources, tuple(map(tuple, items.values())), table, tuple(words))


def _targets(
    relation: Relation, source: str, accepted: Sequence[str], words_of: RelationWords, same_words: bool
) -> tuple[dict[int, str], str]:
    """Return the target tokens of a pair, each once, with their words, or none of them and the reason."""
    tokens = words_of.tokens
    own = tokens[source]
    standing = {target: words_of.of_target(target, accepted, () if relation.is_copying else own) for target in accepted}
    one_token = {target: ids[0] for target, ids in standing.items() if len(ids) == 1}
    if len(own) != 1 or not one_token:
        return {}, _why_not(source if len(own) != 1 else accepted[0], words_of, is_target=len(own) == 1)
    by_token: dict[int, str] = {}
    for target, token in one_token.items():
        if token != own[0] or relation.is_copying or (same_words and target == source):
            by_token.setdefault(token, target)
    return by_token, "" if by_token else OWN_TARGET


def _why_not(word: str, words_of: RelationWords, *, is_target: bool) -> str:
    """Say why no single token represents a word."""
    if not (ids := words_of.tokens[word]):
        return f"{word!r} is not in the vocabulary"
    if is_target and words_of.holders is not None:
        return f"no token of {word!r} tells it from the other targets"
    return f"{word!r} is {len(ids)} tokens"


@checked_call
def relation_coverage(
    relations: Relations, tokenizer: object, *, multi_token: MultiTokenName | None = None
) -> pd.DataFrame:
    """Count the pairs of each relation that survive a tokenizer.

    Args:
        relations: what represents relations (`load_relations`); a row each, in their order.
        tokenizer: the model's tokenizer.
        multi_token: None drops a word of several tokens; "first" keeps its first token, "distinguishing" of targets
            the first that no other target has.

    Returns:
        relation, category, items (pairs the relation has), kept, dropped, usable (whether enough are kept for a
        score), fallen_out (the sources of the pairs that are dropped; why, says `tokenize_relations`), note (whether it
        is left out, and how many pairs were repeated ones or had their own source as target).
    """
    rows = [
        (
            tokens.relation.name,
            tokens.relation.category,
            len(tokens.relation.pairs),
            len(tokens.targets),
            len(tokens.dropped),
            tokens.usable,
            tuple(tokens.dropped["source"]),
            tokens.note,
        )
        for tokens in tokenize_relations(load_relations(relations), tokenizer, multi_token=multi_token)
    ]
    columns = ["relation", "category", "items", "kept", "dropped", "usable", "fallen_out", "note"]
    return pd.DataFrame(rows, columns=columns)
