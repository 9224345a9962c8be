"""The share of each head's attention on the keys of every behaviour, compared with keys drawn at random.

    score     the share of a query's attention on the behaviour's keys, averaged over the queries that have such keys
    expected  the same for as many keys, drawn at random from those that the query can see: shuffled positions

TransformerLens's detector divides by all queries instead.

1. The model runs on a few sequences at a time. A hook on each layer's pattern immediately reduces it to sums over
   queries, so only one layer's pattern is in memory at a time.
2. Let the attention on the N keys that a query sees have mean a and variance s². The attention on n keys drawn from
   these has mean n a and variance n s² (N - n) / (N - 1).
3. `position`: on tokens in random order, a pre-softmax score splits into a part that depends only on the two positions
   (its mean over sequences) and a part from the tokens. Up to a constant per query it is the logarithm of the pattern.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Inexact, Int
from torch import Tensor

from headwater.axes import Pattern, Tokens
from headwater.colors import INK, SETS
from headwater.errors import InputError, ModelError
from headwater.heads.relations import load_relations, word_tokens
from headwater.heads.weight_maps import PIECE
from headwater.kernels.devices import in_halves, to_device
from headwater.models.edits import read_hook
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, token_strings
from headwater.models.weights import WeightSource
from headwater.progress import Bar
from headwater.registry import Registry

MOST_SEQUENCES = 10_000
"""With this many, a head's score (0 to 1) has a standard error of at most 0.005, however much sequences differ."""
PATTERN_FLOATS = 1 << 28
"""Approximate limit on the numbers in the patterns of one forward pass and in what is computed from them."""
SUMS = ("on", "expected", "variance")
"""Names of the sums over the queries of each sequence, by class and head."""
POSITION = ("count", "first", "second")
"""Names of the sums over sequences, by head, query and key."""


def rows_at_once(model: HookedModel, length: int) -> int:
    """Return the number of sequences of a length per pass, such that one layer's pattern and its sums fit in memory."""
    return max(1, PATTERN_FLOATS // (3 * (model.shape.n_heads + len(BEHAVIOURS)) * length**2))


def pattern_sums(
    model: HookedModel, batch: Batch, kinds: TokenKinds, *, said_once: range | None = None
) -> list[dict[str, Tensor]]:
    """Run the model on sequences, split if memory runs out, and sum each head's attention over the queries of each.

    For repeated random tokens, `said_once` holds the positions of the first copy; the inputs of `position_share` are
    then summed over these positions too.

    Returns:
        For each part: `on, expected, variance` (example class layer head), sums over the queries that have keys of the
        class; `queries, keys` (example class), the numbers of such queries and of their keys;
        and with `said_once` also `count, first, second` (layer head query key): the number, sum and sum
        of squares of centred scores over sequences.
    """
    return in_halves(range(len(batch)), lambda rows: _sums(model, batch.rows(rows[0], rows[-1] + 1), kinds, said_once))


def _sums(model: HookedModel, batch: Batch, kinds: TokenKinds, said_once: range | None) -> dict[str, Tensor]:
    keys, visible = attended_keys(batch.tokens, batch.mask, kinds, is_bidirectional=model.is_bidirectional)
    collected: dict[str, list[Tensor]] = {}
    on_device: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def reduce(pattern: Pattern, hook: object) -> None:
        device = pattern.device
        # Copied once per device: a model spread over several GPUs has patterns on each of them.
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
    return sums | {"queries": (counts > 0).sum(-1).T.contiguous(), "keys": counts.sum(-1).T.contiguous()}


def attention_on(
    pattern: Pattern, keys: Bool[Tensor, "class batch query key"], visible: Bool[Tensor, "batch query key"]
) -> dict[str, Float[Tensor, "batch class head"]]:
    """Sum over queries the attention on each class's keys, and the mean and variance of this for random keys."""
    # In bfloat16, sums over many queries would stop growing.
    a = pattern.float()
    on = torch.einsum("b h q k, c b q k -> b c h", a, keys.float())
    n, N = keys.sum(-1).float()[:, :, None], visible.sum(-1).float()[:, None]  # class b 1 q, b 1 q
    mean = (a * visible[:, None]).sum(-1) / N.clamp(min=1)
    spread = ((a - mean[..., None]) * visible[:, None]).square().sum(-1) / N.clamp(min=1)
    # For n keys drawn at random without replacement: mean n · mean, variance n (N - n) / (N - 1) · spread.
    expected = (n * mean).sum(-1)
    variance = (n * (N - n) / (N - 1).clamp(min=1) * spread).sum(-1)
    return {"on": on, "expected": expected.transpose(0, 1), "variance": variance.transpose(0, 1)}


def centred_scores(
    pattern: Pattern, visible: Bool[Tensor, "batch query key"], positions: range
) -> dict[str, Float[Tensor, "head kept kept"]]:
    """Sum over sequences the pre-softmax scores, minus their mean over a query's keys, and the squares of these."""
    span = slice(positions.start, positions.stop)
    # log A is the score up to a constant per query, which centring removes.
    block = pattern[:, :, span, span].double()
    # The score of a weight that rounded to 0 is unknown.
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
    """Return the share of the variance of pre-softmax scores that the two positions alone explain.

    An unbiased estimate from the sums of `centred_scores` over n sequences: the mean square of the means over
    sequences, minus 1/n of the variance within them. Pairs that not all sequences have are left out. NaN where scores
    do not vary, or there is only one sequence.
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


# The keys of each attention behaviour, and random tokens in which every behaviour can occur.
#
# The first position is often a resting place (Xiao et al. 2024); induction is defined as in Olsson et al. 2022.
# Previous token, duplicate token and induction match TransformerLens's head detector. `BEHAVIOURS.add` adds one.
#
# Random tokens: a sequence of different ordinary tokens, drawn at random, and then repeated in the same order. If the
# tokenizer has such tokens, a sixth of them are delimiters and a quarter a piece of a series, all in random order.


SERIES = ("letter_to_next", "number_to_next", "sequence_to_next", "year_to_next")
"""The relations of headwater's suite that map a member of a series to the next one."""


@dataclass(frozen=True, eq=False)
class TokenKinds:
    """The kind of each token of a vocabulary."""

    ordinary: Bool[Tensor, " d_vocab"]
    """Whether the token can occur in a text: the tokenizer knows it, and it is not a special token."""
    delimiter: Bool[Tensor, " d_vocab"]
    """Whether the token is only punctuation, or a line break."""
    series: Int[Tensor, " d_vocab"]
    """Number of the token among the members of series; 0 for tokens in no series."""
    follows: Bool[Tensor, "source target"]
    """Whether the second member (by these numbers) comes right after the first in a series."""


@dataclass(frozen=True)
class Behaviour:
    """One kind of keys that a head may attend to."""

    says: str
    """A noun phrase that names the keys, for sentences."""
    keys: Callable[[Tokens, TokenKinds], Bool[Tensor, "batch query key"]]
    """Function that returns whether each key belongs to each query's keys; it may ignore padding."""
    color: str
    mark: str


def _current(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    found = torch.eye(tokens.shape[1], dtype=torch.bool, device=tokens.device)
    # Excluded, because the first query can only attend to itself.
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
    # The column that wraps around is empty: no query comes after the last key.
    return _duplicate(tokens, kinds).roll(1, 2)


def _successor(tokens: Tokens, kinds: TokenKinds) -> Bool[Tensor, "batch query key"]:
    members = to_device(kinds.series, tokens.device)[tokens]
    return to_device(kinds.follows, tokens.device)[members[:, :, None], members[:, None]].tril(-1)


BEHAVIOURS: Registry[str, Behaviour] = Registry("behaviour of attention")
"""The behaviours by name, in the order of tables and legends."""
BEHAVIOURS.add("current_token", Behaviour("the query's own position", _current, *SETS[4]))
BEHAVIOURS.add("first_token", Behaviour("the first position", _first, *SETS[5]))
BEHAVIOURS.add("previous_token", Behaviour("the position before", _previous, *SETS[0]))
BEHAVIOURS.add("delimiter", Behaviour("earlier punctuation and line breaks", _delimiter, *SETS[3]))
BEHAVIOURS.add("duplicate_token", Behaviour("earlier positions with the same token", _duplicate, *SETS[2]))
BEHAVIOURS.add("induction", Behaviour("the tokens after earlier positions with the same token", _induction, *SETS[1]))
BEHAVIOURS.add("successor", Behaviour("earlier tokens that come next in a series", _successor, INK, "*"))


def attended_keys(
    tokens: Tokens, mask: Bool[Tensor, "batch position"], kinds: TokenKinds, *, is_bidirectional: bool = False
) -> tuple[Bool[Tensor, "class batch query key"], Bool[Tensor, "batch query key"]]:
    """Return each behaviour's keys for each query, and all keys that the query can see; none at padding.

    Tokens are right-padded. With `is_bidirectional` a query sees later keys too, but a behaviour's keys stay the same.
    """
    real = mask[:, :, None] & mask[:, None]
    visible = real if is_bidirectional else real.tril()
    return torch.stack([row.keys(tokens, kinds) & visible for row in BEHAVIOURS.values()]), visible


def _is_delimiter(text: str) -> bool:
    stripped = text.strip()
    return all(unicodedata.category(sign).startswith("P") for sign in stripped) if stripped else "\n" in text


def token_kinds(model: HookedModel) -> TokenKinds:
    """Find the delimiters and members of series in a model's vocabulary; none without a tokenizer."""
    size, tokenizer = model.shape.d_vocab, model.tokenizer
    delimiter, series = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.long)
    if tokenizer is None:
        return TokenKinds(~delimiter, delimiter, series, torch.zeros(1, 1, dtype=torch.bool))
    n_tokens = min(len(tokenizer), size)
    ordinary = torch.arange(size) < n_tokens
    ordinary[[token for token in tokenizer.all_special_ids if token < size]] = False
    # Filter by the raw pieces first, because decoding a whole vocabulary token by token is slower.
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
    """Draw sequences of distinct ordinary tokens, each sequence repeated once, after the model's BOS if it uses one."""
    kinds = token_kinds(model) if kinds is None else kinds
    ordinary = kinds.ordinary.nonzero()[:, 0]
    length = min(length, len(ordinary), (model.shape.n_ctx - len(model.bos)) // 2)
    if length < 2:
        raise InputError(f"{model.name} has too small a vocabulary or context to repeat a sequence of tokens.")
    generator = torch.Generator().manual_seed(seed)
    # Distinct tokens, because a chance repeat within the sequence would add induction keys.
    delimiters, rows = kinds.delimiter.nonzero()[:, 0], []
    for _ in range(sequences):
        few = delimiters[torch.randperm(len(delimiters), generator=generator)[: length // 6]]
        special = torch.cat([few, _piece_of_a_series(kinds, length // 4, generator)])
        mixed = ordinary[torch.randperm(len(ordinary), generator=generator)]
        drawn = torch.cat([special, mixed[~torch.isin(mixed, special)][: length - len(special)]])
        rows.append(drawn[torch.randperm(len(drawn), generator=generator)])
    once = torch.stack(rows)
    bos = torch.tensor(model.bos, dtype=torch.long).expand(sequences, -1)
    return torch.cat([bos, once, once], dim=1)


def _piece_of_a_series(kinds: TokenKinds, length: int, generator: torch.Generator) -> Int[Tensor, " token"]:
    """Draw a random member of a series, then its successors, without repeats."""
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


# Whether a head copies its input: the eigenvalues of its token-to-token OV circuit.
#
# Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021. With E the head's input embedding and U the
# unembedding, the head maps tokens to logits by M = E W_V W_O U, d_vocab × d_vocab. M maps each eigenvector, a mixture
# of tokens, to itself times the eigenvalue: positive if the head copies it, negative if the head suppresses it.
#
# copying = Σ λ / Σ |λ|        1 if everything is copied, -1 if everything is suppressed
#
# 1. The nonzero eigenvalues of M are those of the product in the other order, W_O (U E) W_V. This is d_head × d_head,
#    and U E is d_model × d_model and shared by all heads of a layer.
# 2. E is the raw embedding at layer 0 and the effective embedding in later layers (`models.effective_embedding`).
# 3. Null distribution: heads of this shape with random W_V and W_O, and the same E and U.
#
# Biases, norms, and a norm after the attention are left out.


ROUNDING = 1e-5
"""Eigenvalues count as 0 if the sum of their sizes is below this fraction of that of random factors of equal norm."""
RANDOM_HEADS = 200
LEVEL = 0.95
"""Share of random heads within the returned bounds."""


def copying_scores(
    weights: WeightSource, embedding: str, seed: int, bar: Bar | None = None, layers: Sequence[int] | None = None
) -> tuple[Float[Tensor, "layer head"], Float[Tensor, "layer 2"]]:
    """Return Σ λ / Σ |λ| of every head of some layers (or all), and the bounds within which 95 % of random heads lie.

    `embedding` is the input of heads from layer 1 on. NaN for a head whose OV circuit is zero.
    """
    scores, bounds, before = [], [], ""
    for layer in range(weights.shape.n_layers) if layers is None else layers:
        # Layer 0 reads the raw embedding; later layers share U E and the random heads.
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
    """Return Σ λ / Σ |λ| of W_O · joined · W_V for each head; NaN where all eigenvalues are 0 up to rounding."""
    # d_head × d_head, with the same nonzero eigenvalues as the circuit over the vocabulary (Elhage et al. 2021).
    products = W_O.double() @ joined @ W_V.double()
    sizes = [factor.double().square().sum((-1, -2)).sqrt().expand(len(W_O)) for factor in (W_O, joined, W_V)]
    both = torch.cat([products.flatten(1), torch.stack(sizes, 1)], dim=1).cpu()  # a GPU's host waits once
    twins, norms = both[:, : -len(sizes)].view(products.shape), both[:, -len(sizes) :].T
    values: Inexact[Tensor, "head d_head"] = torch.linalg.eigvals(twins)
    size = values.abs().sum(-1)
    nothing = ROUNDING * norms[0] * norms[1] * norms[2] / len(joined)
    # Σ λ as the trace, which is exact; summing the eigenvalues would add up their rounding.
    return torch.where(size > nothing, twins.diagonal(dim1=1, dim2=2).sum(-1) / size, torch.nan)


def _read_and_written(weights: WeightSource, kind: str) -> Float[Tensor, "d_model d_model"]:
    """Return U E, summed over the vocabulary piece by piece."""
    U = weights.unembedding()
    if U.shape[1] != weights.shape.d_vocab:
        raise ModelError(
            f"{weights.name} reads {weights.shape.d_vocab:,} tokens and answers in {U.shape[1]:,} others: a map "
            "between different vocabularies has no eigenvalues. With copying=False the rest is computed."
        )
    tokens = torch.arange(weights.shape.d_vocab, device=U.device)
    whole = torch.zeros(len(U), weights.shape.d_model, dtype=torch.double, device=U.device)
    for piece in tokens.split(PIECE):
        # Products in the weights' dtype, their sum in float64, because vocabularies are large.
        whole += (U[:, piece] @ weights.effective_embedding(piece, kind)).double()
    return whole


def _bounds(joined: Float[Tensor, "d_model d_model"], d_head: int, seed: int) -> Float[Tensor, 2]:
    """Return the bounds within which 95 % of random heads lie."""
    generator = torch.Generator().manual_seed(seed)
    d_model = len(joined)
    # Drawn on the CPU, so that a seed yields the same heads on every device.
    W_O = torch.randn(RANDOM_HEADS, d_head, d_model, generator=generator)
    W_V = torch.randn(RANDOM_HEADS, d_model, d_head, generator=generator)
    parts = zip(W_O.split(8), W_V.split(8), strict=True)
    on_device = ((to_device(one, joined.device), to_device(other, joined.device)) for one, other in parts)
    shares = torch.cat([eigenvalue_share(one, joined, other) for one, other in on_device])
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=shares.dtype)
    return torch.nanquantile(shares, ends)
