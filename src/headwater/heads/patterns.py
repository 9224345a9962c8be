"""How much of its attention each head gives to the keys of every behaviour, and what keys drawn at random would get.

    score     the share of a query's attention on the behaviour's keys, averaged over the queries that have such keys
    expected  the same for as many keys, drawn at random from those that the query can see: shuffled positions

TransformerLens's detector divides by all queries instead (`detector_scores`).

1. The model runs on a few sequences at a time. A hook at each layer's pattern reduces it at once to sums over queries:
   of no more than one layer there is a pattern in memory.
2. Of n keys drawn from the N that a query sees, whose attention has the mean a and the variance s², the sum has the
   mean n a and the variance n s² (N - n) / (N - 1).
3. `position`: on tokens in random order a score before the softmax is a part that the two positions decide, its mean
   over sequences, and what the tokens add. Up to a constant per query these scores are the logarithm of the pattern.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from headwater.axes import Pattern, Tokens
from headwater.calls import checked_call
from headwater.colors import INK, SETS
from headwater.errors import InputError, ModelError
from headwater.heads.relations import load_relations, word_tokens
from headwater.kernels.devices import in_halves, to_device
from headwater.models.edits import read_hook
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES, sites_named
from headwater.models.tokens import Batch, token_strings
from headwater.models.weights import WeightSource
from headwater.options import checked_count, checked_number, checked_seed, shown
from headwater.progress import Bar
from headwater.registry import Registry

ATTENTION_CLASSES = ("previous_token", "duplicate_token", "induction")
"""The behaviours that TransformerLens's detector has."""
MOST_SEQUENCES = 10_000
"""The score of a head, from 0 to 1, is then exact to 0.005 however much sequences differ."""
SEQUENCES_AT_ONCE = 64
"""How many are in one run of the model: so memory does not grow with their number."""
PATTERN_FLOATS = 1 << 28
"""About how many numbers the patterns of one run may hold, and what is made of them."""
SUMS = ("on", "expected", "variance")
"""What is summed over the queries of each sequence, by class and head."""
POSITION = ("count", "first", "second")
"""What is summed over sequences, by head, query and key."""


@checked_call
def attention_classes(
    model: HookedModel, *, sequences: int = 16, length: int = 24, threshold: float = 0.4, seed: int = 0
) -> pd.DataFrame:
    """Score every head as previous-token, duplicate-token and induction head, on random tokens said twice.

    These are three of the behaviours of `attention_behaviour`, without its null.

    Args:
        model: the model.
        sequences: how many random sequences, at most 10,000.
        length: how many tokens before they are said again; fewer where the vocabulary or the context is small.
        threshold: the score from which on a head is called by a class.
        seed: of the random tokens.

    Returns:
        A row per layer and head: `layer, head, previous_token, duplicate_token, induction` (scores, 0 to 1) and
        `attention_class` (one of these names, or "none").

    Raises:
        ModelError: the model is none that runs.
        InputError: the vocabulary or the context is too small for a repeated sequence, or an option is not a number.
    """
    if not isinstance(model, HookedModel):
        raise ModelError(f"model={shown(model)} cannot be run: give what hw.load returns.")
    sequences = checked_count("sequences", sequences, most=MOST_SEQUENCES)
    length = checked_count("length", length, least=2)
    threshold = checked_number("threshold", threshold, above=0.0, below=1.0, up_to=True)
    kinds = token_kinds(model)
    batch = Batch.of(repeated_tokens(model, sequences, length, checked_seed(seed), kinds).tolist(), pad=0)
    layers = layers_read(model)
    on = torch.zeros(len(BEHAVIOURS), len(layers), model.shape.n_heads, dtype=torch.double)
    queries = torch.zeros(len(BEHAVIOURS), dtype=torch.double)
    for start in range(0, sequences, SEQUENCES_AT_ONCE):
        for part in pattern_sums(model, batch.rows(start, min(start + SEQUENCES_AT_ONCE, sequences)), kinds):
            on += part["on"].sum(0, dtype=torch.double)
            queries += part["queries"].sum(0)
    scores = dict(zip(BEHAVIOURS, on / queries.clamp(min=1)[:, None, None], strict=True))
    columns = {name: scores[name].flatten().numpy() for name in ATTENTION_CLASSES}
    table = heads_of(layers, model.shape.n_heads).assign(**columns)
    best = table[list(ATTENTION_CLASSES)]
    return table.assign(attention_class=best.idxmax(axis=1).where(best.max(axis=1) >= threshold, "none"))


def layers_read(model: HookedModel) -> tuple[int, ...]:
    """Return the layers that have attention patterns."""
    (pattern,) = sites_named("pattern", model)
    return pattern.among(range(model.shape.n_layers), model)


def heads_of(layers: Sequence[int], n_heads: int) -> pd.DataFrame:
    """Return a row per layer and head: `layer, head`."""
    each = [layer for layer in layers for _ in range(n_heads)]
    return pd.DataFrame({"layer": each, "head": list(range(n_heads)) * len(layers)})


def rows_at_once(model: HookedModel, length: int) -> int:
    """Return how many sequences of a length are run at once: one layer's pattern and what is made of it are kept."""
    return max(1, PATTERN_FLOATS // (3 * (model.shape.n_heads + len(BEHAVIOURS)) * length**2))


def pattern_sums(
    model: HookedModel, batch: Batch, kinds: TokenKinds, *, said_once: range | None = None
) -> list[dict[str, Tensor]]:
    """Run the model on sequences, in parts where memory runs out, and sum what heads attend to over queries of each.

    `said_once` has, of random tokens, the positions of those that the sequence has not said before; what
    `position_share` takes is summed over these too.

    Returns:
        For each part `on, expected, variance` (example class layer head), sums over the queries that have keys of the
        class; `queries, keys` (example class), how many such queries there are and keys of them; `tokens`, the length
        of each; and with `said_once` `count, first, second` (layer head query key): over the sequences the number, the
        sum and the sum of squares of centred scores.
    """
    return in_halves(range(len(batch)), lambda rows: _sums(model, batch.rows(rows[0], rows[-1] + 1), kinds, said_once))


def _sums(model: HookedModel, batch: Batch, kinds: TokenKinds, said_once: range | None) -> dict[str, Tensor]:
    keys, visible = attended_keys(batch.tokens, batch.mask, kinds, looks_ahead=model.looks_ahead)
    collected: dict[str, list[Tensor]] = {}
    on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def reduce(pattern: Pattern, hook: object) -> None:
        device = pattern.device
        # Once per device: a model over several GPUs has its patterns on each of them.
        if device not in on_device:
            on_device[device] = (to_device(keys, device), to_device(visible, device))
        for name, values in attention_on(pattern, *on_device[device]).items():
            collected.setdefault(name, []).append(values)
        if said_once is not None:
            scores = centred_scores(pattern, on_device[device][1], said_once)
            moved = torch.stack(list(scores.values())).cpu()  # of one layer at a time: these are large
            for name, values in zip(scores, moved, strict=True):
                collected.setdefault(name, []).append(values)

    pattern, layers = SITES["pattern"], range(model.shape.n_layers)
    hooks = [(pattern.hook_name(layer), read_hook(reduce)) for layer in layers if not pattern.lacks(model, layer)]
    model.run(batch, hooks, stop_at=model.shape.n_layers)
    sums = {
        name: torch.stack([part.to(values[0].device) for part in values], dim=2 if name in SUMS else 0).cpu()
        for name, values in collected.items()
    }
    counts = keys.sum(-1)
    sums |= {"queries": (counts > 0).sum(-1).T.contiguous(), "keys": counts.sum(-1).T.contiguous()}
    return sums | {"tokens": batch.lengths}


def attention_on(
    pattern: Pattern, keys: Bool[Tensor, "class batch query key"], visible: Bool[Tensor, "batch query key"]
) -> dict[str, Float[Tensor, "batch class head"]]:
    """Sum over queries the attention on the keys of each class, and its mean and variance for keys drawn at random."""
    # Sums over queries in bfloat16 would stop growing.
    a = pattern.float()
    on = torch.einsum("b h q k, c b q k -> b c h", a, keys.float())
    n, N = keys.sum(-1).float()[:, :, None], visible.sum(-1).float()[:, None]  # class b 1 q, b 1 q
    mean = (a * visible[:, None]).sum(-1) / N.clamp(min=1)
    spread = ((a - mean[..., None]) * visible[:, None]).square().sum(-1) / N.clamp(min=1)
    # n keys drawn at random without replacement: mean n · mean, variance n (N - n) / (N - 1) · spread.
    expected = (n * mean).sum(-1)
    variance = (n * (N - n) / (N - 1).clamp(min=1) * spread).sum(-1)
    return {"on": on, "expected": expected.transpose(0, 1), "variance": variance.transpose(0, 1)}


def centred_scores(
    pattern: Pattern, visible: Bool[Tensor, "batch query key"], positions: range
) -> dict[str, Float[Tensor, "head kept kept"]]:
    """Sum over sequences the scores before the softmax, less their mean over a query's keys, and their squares."""
    span = slice(positions.start, positions.stop)
    # Scores from the pattern, since log A is the score but for a number per query, which centring takes off.
    block = pattern[:, :, span, span].double()
    # A weight that rounded to 0 has no score to read.
    mask = visible[:, None, span, span] & (block > 0)
    logs = torch.where(mask, block, 1).log()
    mean = logs.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    centred = torch.where(mask, logs - mean, 0)
    return {"count": mask.double().sum(0), "first": centred.sum(0), "second": centred.square().sum(0)}


def position_share(
    count: Float[Tensor, "layer head query key"],
    first: Float[Tensor, "layer head query key"],
    second: Float[Tensor, "layer head query key"],
) -> Float[Tensor, "layer head"]:
    """Return the share of the variance of scores before the softmax that the two positions decide alone.

    Estimated without bias, from what `centred_scores` gives, summed over sequences: the mean square of the means over n
    sequences, less the n-th part of the variance within them. Pairs that not all sequences have are left out. NaN where
    scores do not vary, or there is one sequence.
    """
    n = count.amax((-1, -2), keepdim=True)
    used = (count == n) & (count.sum(-1, keepdim=True) > n)  # a query that sees one key has nothing to choose
    mean = first / n.clamp(min=1)
    within = (second - n * mean.square()).clamp(min=0) / (n - 1)
    cells = used.sum((-1, -2)).clamp(min=1)
    content = torch.where(used, within, 0).sum((-1, -2)) / cells
    position = torch.where(used, mean.square() - within / n, 0).sum((-1, -2)).clamp(min=0) / cells
    whole = content + position
    return torch.where(whole > 1e-10, position / whole, torch.nan)


def detector_scores(sums: Mapping[str, Tensor]) -> dict[str, Float[Tensor, "class layer head"]]:
    """Return what TransformerLens's detector gives for its two error measures, averaged over sequences.

    Of a pattern A and keys D (0 or 1) of a sequence of T tokens, with ΣA = T:

        mul   Σ A D / ΣA              the score times the share of queries that have such keys
        abs   1 - Σ |A - D| / T       = 2 mul - ΣD / T

    The sums are those of `pattern_sums`, with all sequences along the first axis.
    """
    tokens = sums["tokens"].double()
    mul = (sums["on"].double() / tokens[:, None, None, None]).mean(0)
    per_query = (sums["keys"].double() / tokens[:, None]).mean(0)
    return {"mul": mul, "abs": 2 * mul - per_query[:, None, None]}


# Which keys a behaviour of attention is about, and random tokens on which every one of them can be seen.
#
# The first position is often a resting place (Xiao et al. 2024); induction is that of Olsson et al. 2022. Previous and
# duplicate token, and induction, are those of TransformerLens's head detector. Another behaviour, from anywhere, is one
# more row of `BEHAVIOURS`:
#
# BEHAVIOURS.add("two_before", Behaviour("two positions before", two_before, color="#8c5a3c", mark="X"))
#
# Random tokens: a sequence of different ordinary tokens, drawn at random, said twice in the same order. Where the
# tokenizer has such tokens, a sixth of them are delimiters and a quarter a piece of a series, all in random order.


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
BEHAVIOURS.add("current_token", Behaviour("their own position", _current, *SETS[4]))
BEHAVIOURS.add("first_token", Behaviour("the first position", _first, *SETS[5]))
BEHAVIOURS.add("previous_token", Behaviour("the position before", _previous, *SETS[0]))
BEHAVIOURS.add("delimiter", Behaviour("earlier punctuation and line breaks", _delimiter, *SETS[3]))
BEHAVIOURS.add("duplicate_token", Behaviour("earlier positions with the same token", _duplicate, *SETS[2]))
BEHAVIOURS.add("induction", Behaviour("what followed earlier positions with the same token", _induction, *SETS[1]))
BEHAVIOURS.add("successor", Behaviour("earlier tokens that follow theirs in a series", _successor, INK, "*"))


def attended_keys(
    tokens: Tokens, mask: Bool[Tensor, "batch position"], kinds: TokenKinds, *, looks_ahead: bool = False
) -> tuple[Bool[Tensor, "class batch query key"], Bool[Tensor, "batch query key"]]:
    """Return the keys of every behaviour for each query, and all keys that the query can see; none at padding.

    Tokens are right-padded. With `looks_ahead` a query sees later keys too; the keys of a behaviour stay the same.
    """
    real = mask[:, :, None] & mask[:, None]
    visible = real if looks_ahead else real.tril()
    return torch.stack([row.keys(tokens, kinds) & visible for row in BEHAVIOURS.values()]), visible


def _is_delimiter(text: str) -> bool:
    stripped = text.strip()
    return all(unicodedata.category(sign).startswith("P") for sign in stripped) if stripped else "\n" in text


def token_kinds(model: HookedModel) -> TokenKinds:
    """Find delimiters and members of series in a model's vocabulary; without a tokenizer there are none."""
    size, tokenizer = model.shape.d_vocab, model.tokenizer
    delimiter, series = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    if tokenizer is None:
        return TokenKinds(~delimiter, delimiter, series, torch.zeros(1, 1, dtype=torch.bool))
    n_tokens = min(len(tokenizer), size)
    ordinary = torch.arange(size) < n_tokens
    ordinary[[token for token in tokenizer.all_special_ids if token < size]] = False
    # Pieces first: decoding a whole vocabulary token by token takes longer than looking for letters.
    pieces = enumerate(tokenizer.convert_ids_to_tokens(list(range(n_tokens))))
    known = [(token, str(piece)) for token, piece in pieces if piece is not None]
    candidates = [token for token, piece in known if not any(sign.isascii() and sign.isalnum() for sign in piece)]
    texts = token_strings(tokenizer, candidates)
    delimiter[[token for token, text in zip(candidates, texts, strict=True) if _is_delimiter(text)]] = True
    listed = [pair for relation in load_relations(SERIES) for pair in relation.pairs]
    named = {(source, target) for source, targets in listed for target in targets}
    words = sorted({word for pair in named for word in pair})
    ids = dict(zip(words, word_tokens(tokenizer, words), strict=True))
    whole = {word for word in words if len(ids[word]) == 1 and ids[word][0] < size and ordinary[ids[word][0]]}
    pairs = {(ids[one][0], ids[other][0]) for one, other in named if one in whole and other in whole}
    members = sorted({token for pair in pairs for token in pair})
    series[members] = torch.arange(1, len(members) + 1)
    follows = torch.zeros(len(members) + 1, len(members) + 1, dtype=torch.bool)
    for one, other in pairs:
        follows[series[one], series[other]] = True
    return TokenKinds(ordinary, delimiter & ordinary, series, follows)


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
    drawn: list[int] = []
    while len(drawn) < length and at not in drawn:
        drawn.append(at)
        onward = kinds.follows[at].nonzero()[:, 0]
        at = int(onward[torch.randint(len(onward), (1,), generator=generator)]) if len(onward) else at
    token_of = torch.zeros(len(members) + 1, dtype=torch.long)
    token_of[kinds.series[members]] = members
    return token_of[drawn]


# Whether a head writes what it reads: the eigenvalues of its OV circuit, from token to token.
#
# Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021. With E the embedding that a head reads and U
# the unembedding, it maps tokens to logits by M = E W_V W_O U, d_vocab × d_vocab. The eigenvectors of M are mixtures of
# tokens that are written as themselves, times the eigenvalue: positive where it copies, negative where it suppresses.
#
# copying = Σ λ / Σ |λ|        1 where all is copied, -1 where all is suppressed
#
# 1. M has the eigenvalues of the product in the other order, W_O (U E) W_V, and zeros: U E is d_model × d_model and the
#    same for all heads of a layer, the product d_head × d_head.
# 2. E is the raw embedding at layer 0 and the effective embedding after it (`models.effective_embedding`).
# 3. Null: heads of this shape whose W_V and W_O are drawn at random, with the same E and U.
#
# Biases, norms, and a norm after the attention are left out.


PIECE = 8192
"""Tokens in memory at a time."""
ROUNDING = 1e-5
"""Eigenvalues that together are smaller than this part of those of random factors as large are 0."""
RANDOM_HEADS = 200
LEVEL = 0.95
"""Of random heads lies within the bounds that are given."""


def copying_scores(
    weights: WeightSource, embedding: str, seed: int, bar: Bar | None = None, layers: Sequence[int] | None = None
) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer 2"]]:
    """Return Σ λ / Σ |λ| of every head of some layers, or all, and the bounds within which 95 % of random heads lie.

    `embedding` is what heads from layer 1 on read. NaN of a head that writes nothing of what it reads.
    """
    scores, bounds, before = [], [], ""
    for layer in range(weights.shape.n_layers) if layers is None else layers:
        # Layer 0 reads the raw embedding; those after it share U E and the random heads.
        if (kind := embedding if layer else "raw") != before:
            joined, before = _read_and_written(weights, kind), kind
            of_random = _bounds(joined, weights.shape.d_head, seed)
        factors = weights.ov(layer)
        W_V, W_O = factors.expand_kv(factors.W_V), factors.W_O
        scores.append(eigenvalue_share(W_O, joined, W_V))
        bounds.append(of_random)
        if bar is not None:
            bar.update()
    return torch.stack(scores), torch.stack(bounds)


def eigenvalue_share(
    W_O: Float[Tensor, "head d_head d_model"],
    joined: Float[Tensor, "d_model d_model"],
    W_V: Float[Tensor, "head d_model d_head"],
) -> Float[Tensor, " head"]:
    """Return Σ λ / Σ |λ| of W_O · joined · W_V, head by head; NaN where all eigenvalues are 0 but for rounding."""
    # d_head × d_head: the same eigenvalues but zeros as the circuit over the whole vocabulary (Elhage et al. 2021).
    products = W_O.double() @ joined @ W_V.double()
    sizes = [factor.double().square().sum((-1, -2)).sqrt().expand(len(W_O)) for factor in (W_O, joined, W_V)]
    both = torch.cat([products.flatten(1), torch.stack(sizes, 1)], dim=1).cpu()  # a GPU's host waits once
    twins, norms = both[:, : -len(sizes)].view(products.shape), both[:, -len(sizes) :].T
    values: Inexact[Tensor, "head d_head"] = torch.linalg.eigvals(twins)
    size = values.abs().sum(-1)
    nothing = ROUNDING * norms[0] * norms[1] * norms[2] / len(joined)
    # Σ λ as the trace: exact, where the sum of eigenvalues adds up their rounding.
    return torch.where(size > nothing, twins.diagonal(dim1=1, dim2=2).sum(-1) / size, torch.nan)


def _read_and_written(weights: WeightSource, kind: str) -> Float[Tensor, "d_model d_model"]:
    """Return U E, summed over the vocabulary a piece at a time."""
    U = weights.unembedding()
    if U.shape[1] != weights.shape.d_vocab:
        raise ModelError(
            f"{weights.name} reads {weights.shape.d_vocab:,} tokens and answers in {U.shape[1]:,} others: from token "
            "to token it has no eigenvalues."
        )
    tokens = torch.arange(weights.shape.d_vocab, device=U.device)
    whole = torch.zeros(len(U), weights.shape.d_model, dtype=torch.double, device=U.device)
    for piece in tokens.split(PIECE):
        # Products in the weights' own precision, their sum in float64: vocabularies are long.
        whole += (U[:, piece] @ weights.effective_embedding(piece, kind)).double()
    return whole


def _bounds(joined: Float[Tensor, "d_model d_model"], d_head: int, seed: int) -> Float[Tensor, 2]:
    """Return the bounds within which 95 % of random heads lie."""
    generator = torch.Generator().manual_seed(seed)
    d_model = len(joined)
    # Drawn on the CPU, so that a seed gives the same heads on every device.
    W_O = torch.randn(RANDOM_HEADS, d_head, d_model, generator=generator)
    W_V = torch.randn(RANDOM_HEADS, d_model, d_head, generator=generator)
    parts = zip(W_O.split(8), W_V.split(8), strict=True)
    on_device = ((to_device(one, joined.device), to_device(other, joined.device)) for one, other in parts)
    shares = torch.cat([eigenvalue_share(one, joined, other) for one, other in on_device])
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=shares.dtype)
    return torch.nanquantile(shares, ends)
