"""Which keys a behaviour of attention is about, and random tokens on which every one of them can be seen.

    current_token     the query's own position, but for the first
    first_token       the first position, often a resting place (Xiao et al. 2024)
    previous_token    the position before
    delimiter         earlier punctuation and line breaks
    duplicate_token   earlier positions with the query's token
    induction         the positions after those (Olsson et al. 2022)
    successor         earlier positions with what follows the query's token in a series: letters, numbers, days, years

The third, fifth and sixth are those of TransformerLens's head detector, which takes text, one prompt at a time, and
caches all of a model for it. Another behaviour, from anywhere, is one more row of `BEHAVIOURS`:

    BEHAVIOURS.add("two_before", Behaviour("two positions before", two_before, color="#8c5a3c", mark="X"))

Random tokens: a sequence of different ordinary tokens, drawn at random, said twice in the same order. Where the
tokenizer has such tokens, a sixth of them are delimiters and a quarter a piece of a series, all in random order.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from headwater.axes import Tokens
from headwater.colors import PURPLE, SETS
from headwater.errors import InputError
from headwater.heads.relation_tokens import word_tokens
from headwater.heads.relations import load_relations
from headwater.kernels.devices import to_device
from headwater.models.hooked import HookedModel
from headwater.models.tokens import Tokenizer, token_strings
from headwater.registry import Registry

SERIES = ("letter_to_next", "number_to_next", "sequence_to_next", "year_to_next")
"""The relations of headwater's suite that say what follows what."""


@dataclass(frozen=True, eq=False)
class TokenKinds:
    """What is known of the tokens of a vocabulary."""

    ordinary: Bool[Tensor, " d_vocab"]
    """Whether a text can hold it: the tokenizer knows it, and it is not a special token."""
    delimiter: Bool[Tensor, " d_vocab"]
    """Whether it is punctuation alone, or a line break."""
    series: Int[Tensor, " d_vocab"]
    """Its number among the members of series; 0 of what is none."""
    follows: Bool[Tensor, "source target"]
    """By these numbers, whether the second comes right after the first in a series."""


@dataclass(frozen=True)
class Behaviour:
    """One kind of keys that a head may attend to."""

    says: str
    """Which keys, as words of a sentence."""
    keys: Callable[[Tokens, TokenKinds], Bool[Tensor, "batch query key"]]
    """Says of each query and key whether it is one of them; padding need not be minded."""
    color: str
    mark: str


def _current(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    found = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    # The first query has nothing else to attend to.
    found[0, 0] = False
    return found.expand(len(tokens), -1, -1)


def _first(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    found = torch.zeros(*tokens.shape, tokens.shape[1], dtype=torch.bool, device=tokens.device)
    found[:, 1:, 0] = True
    return found


def _previous(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    length = tokens.shape[1]
    return torch.eye(length, dtype=torch.bool, device=tokens.device).roll(1, 0).tril(-1).expand(len(tokens), -1, -1)


def _delimiter(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    is_one = to_device(kinds.delimiter, tokens.device)[tokens]
    return is_one[:, None].expand(-1, tokens.shape[1], -1).tril(-1)


def _duplicate(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    return (tokens[:, :, None] == tokens[:, None]).tril(-1)


def _induction(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    # The column that comes round is empty: no query is after the last key.
    return _duplicate(tokens, kinds).roll(1, 2)


def _successor(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    members = to_device(kinds.series, tokens.device)[tokens]
    return to_device(kinds.follows, tokens.device)[members[:, :, None], members[:, None]].tril(-1)


BEHAVIOURS: Registry[str, Behaviour] = Registry("behaviour of attention")
"""By name, in the order of tables and legends."""
for _name, _behaviour in {
    "current_token": Behaviour("their own position", _current, *SETS[4]),
    "first_token": Behaviour("the first position", _first, *SETS[5]),
    "previous_token": Behaviour("the position before", _previous, *SETS[0]),
    "delimiter": Behaviour("earlier punctuation and line breaks", _delimiter, *SETS[3]),
    "duplicate_token": Behaviour("earlier positions with the same token", _duplicate, *SETS[2]),
    "induction": Behaviour("what followed earlier positions with the same token", _induction, *SETS[1]),
    "successor": Behaviour("earlier tokens that follow theirs in a series", _successor, PURPLE, "*"),
}.items():
    BEHAVIOURS.add(_name, _behaviour)

Attended: TypeAlias = tuple[Bool[Tensor, "class batch query key"], Bool[Tensor, "batch query key"]]


def attended_keys(
    tokens: Tokens, mask: Bool[Tensor, "batch position"], kinds: TokenKinds, *, looks_ahead: bool = False
) -> Attended:
    """Return the keys of every behaviour for each query, and all keys that the query can see; none at padding.

    Args:
        tokens: right-padded.
        mask: True at real tokens.
        kinds: what is known of these tokens.
        looks_ahead: whether a query sees later keys too. The keys of a behaviour do not change by it.
    """
    real = mask[:, :, None] & mask[:, None]
    visible = real if looks_ahead else real.tril()
    return torch.stack([row.keys(tokens, kinds) & visible for row in BEHAVIOURS.values()]), visible


def token_kinds(model: HookedModel) -> TokenKinds:
    """Find delimiters and members of series in a model's vocabulary; without a tokenizer there are none."""
    size, tokenizer = model.shape.d_vocab, model.tokenizer
    ordinary, delimiter = torch.zeros(2, size, dtype=torch.bool)
    known = size if tokenizer is None else min(len(tokenizer), size)
    ordinary[:known] = True
    series, follows = torch.zeros(size, dtype=torch.long), torch.zeros(1, 1, dtype=torch.bool)
    if tokenizer is None:
        return TokenKinds(ordinary, delimiter, series, follows)
    ordinary[[token for token in tokenizer.all_special_ids if token < size]] = False
    # Pieces first: decoding a whole vocabulary token by token takes longer than looking for letters.
    pieces = tokenizer.convert_ids_to_tokens(list(range(known)))
    candidates = [token for token, piece in enumerate(pieces) if piece is not None and not _has_letters(str(piece))]
    texts = token_strings(tokenizer, candidates)
    delimiter[[token for token, text in zip(candidates, texts, strict=True) if _is_delimiter(text)]] = True
    pairs = _series(tokenizer, ordinary)
    members = sorted({token for pair in pairs for token in pair})
    series[members] = torch.arange(1, len(members) + 1)
    follows = torch.zeros(len(members) + 1, len(members) + 1, dtype=torch.bool)
    for one, other in pairs:
        follows[series[one], series[other]] = True
    return TokenKinds(ordinary, delimiter & ordinary, series, follows)


def _has_letters(piece: str) -> bool:
    """Whether a piece of the vocabulary, as it is stored, holds what no delimiter does."""
    return any(sign.isascii() and sign.isalnum() for sign in piece)


def _is_delimiter(text: str) -> bool:
    stripped = text.strip()
    return all(unicodedata.category(sign).startswith("P") for sign in stripped) if stripped else "\n" in text


def _series(tokenizer: Tokenizer, ordinary: Bool[Tensor, " d_vocab"]) -> set[tuple[int, int]]:
    """Return the pairs of tokens of which the second follows the first."""
    pairs = {
        (source, target)
        for relation in load_relations(SERIES)
        for source, targets in relation.pairs
        for target in targets
    }
    words = sorted({word for pair in pairs for word in pair})
    whole = {
        word: ids[0]
        for word, ids in zip(words, word_tokens(tokenizer, words), strict=True)
        if len(ids) == 1 and ids[0] < len(ordinary) and ordinary[ids[0]]
    }
    return {(whole[one], whole[other]) for one, other in pairs if one in whole and other in whole}


def repeated_tokens(
    model: HookedModel, sequences: int, length: int, seed: int, kinds: TokenKinds | None = None
) -> Int[Tensor, "batch position"]:
    """Draw sequences of different ordinary tokens, each sequence said twice, after the model's BOS if it wants one."""
    kinds = token_kinds(model) if kinds is None else kinds
    ordinary = kinds.ordinary.nonzero()[:, 0]
    length = min(length, len(ordinary), (model.shape.n_ctx - len(model.bos)) // 2)
    if length < 2:
        raise InputError(f"{model.name} has too small a vocabulary or context to say a sequence of tokens twice.")
    generator = torch.Generator().manual_seed(seed)
    # Different tokens: a chance repeat inside would be an induction of its own.
    once = torch.stack([_drawn(ordinary, kinds, length, generator) for _ in range(sequences)])
    bos = torch.tensor(model.bos, dtype=torch.long).expand(sequences, -1)
    return torch.cat([bos, once, once], dim=1)


def _drawn(
    ordinary: Int[Tensor, " token"], kinds: TokenKinds, length: int, generator: torch.Generator
) -> Int[Tensor, " position"]:
    """Draw different tokens in random order, some of them delimiters and some a piece of a series."""
    delimiters = kinds.delimiter.nonzero()[:, 0]
    few = delimiters[torch.randperm(len(delimiters), generator=generator)[: length // 6]]
    special = torch.cat([few, _piece_of_a_series(kinds, length // 4, generator)])
    mixed = ordinary[torch.randperm(len(ordinary), generator=generator)]
    rest = mixed[~torch.isin(mixed, special)][: length - len(special)]
    drawn = torch.cat([special, rest])
    return drawn[torch.randperm(len(drawn), generator=generator)]


def _piece_of_a_series(kinds: TokenKinds, length: int, generator: torch.Generator) -> Int[Tensor, " token"]:
    """Draw a member of a series, and go on to what follows it, without coming back."""
    members = kinds.series.nonzero()[:, 0]
    if length < 2 or not len(members):
        return members[:0]
    at = int(torch.randint(len(members), (1,), generator=generator)) + 1
    found: list[int] = []
    while len(found) < length and at not in found:
        found.append(at)
        onward = kinds.follows[at].nonzero()[:, 0]
        at = int(onward[torch.randint(len(onward), (1,), generator=generator)]) if len(onward) else at
    token_of = torch.zeros(len(members) + 1, dtype=torch.long)
    token_of[kinds.series[members]] = members
    return token_of[found]
