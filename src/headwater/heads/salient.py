"""Salient operations of a head: the tokens it writes most strongly about, and what it maps them to.

Elhelo & Geva (ACL 2025), beside the predefined relations. With x_t what the head reads for token t (its effective
embedding) and W_V, W_O the head's factors:

1. Every token of the vocabulary gets the gain sigma_t = |x_t W_V W_O| / |x_t|.
2. The tokens with the largest gains are the head's salient sources.
3. Each is described by the n largest entries of x_t W_V W_O W_U (what the head writes) and by the n smallest (what it
   suppresses).

W_V W_O is never formed: with z = x_t W_V, |z W_O|² = z (W_O W_Oᵀ) zᵀ, and W_O W_Oᵀ is d_head × d_head. The vocabulary
is read in pieces, and once for any number of heads.
"""

from collections.abc import Sequence
from typing import TypeAlias

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.models.part_names import HeadName, head_named
from headwater.models.tokens import token_strings
from headwater.models.weights.effective_embedding import KINDS, EmbeddingName
from headwater.models.weights.weight_source import WeightSource
from headwater.options import checked_count, checked_name

SIGNS = ("writes", "suppresses")
COLUMNS = ("rank", "sigma", "source", "source_id", "sign", "place", "target", "target_id", "logit")
PIECE = 8192
"""Tokens whose effective embeddings are in memory at a time."""
Factors: TypeAlias = tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_head d_model"]]
"""A head's W_V and W_O."""


@checked_call
def salient_operations(
    weights: WeightSource,
    layer: int | HeadName,
    head: int | None = None,
    *,
    embedding: EmbeddingName = "raw",
    sources: int = 15,
    targets: int = 5,
) -> pd.DataFrame:
    """Return what a head does to the tokens it writes most strongly about.

    Args:
        weights: the model's parameters.
        layer: the head's layer, or the head by its name, as "9.2" or (9, 2).
        head: the head, where it is not named.
        embedding: what the head reads: "raw", "mlp0", "embed+mlp0" or "layer0".
        sources: how many salient tokens.
        targets: how many tokens to list for each, on either side.

    Returns:
        A row per source, sign and place: `rank` of the source (from 1), `sigma` (how many times longer the head's
        output is than what it reads), `source, source_id`, `sign` ("writes", "suppresses"), `place` (from 1),
        `target, target_id`, `logit`.

    Raises:
        InputError: the head or the embedding does not exist, or less than one token is requested.
    """
    table = salient_of_heads(
        weights,
        [head_named(layer, head, weights.shape)],
        embedding=embedding,
        sources=sources,
        targets=targets,
    )
    return table.drop(columns=["layer", "head"])


def salient_of_heads(
    weights: WeightSource,
    heads: Sequence[HeadName],
    *,
    embedding: EmbeddingName = "raw",
    sources: int = 15,
    targets: int = 5,
) -> pd.DataFrame:
    """Return what several heads (layer, head) do to the tokens that each writes most strongly about.

    The vocabulary is read once. Options are those of `salient_operations`.

    Returns:
        The rows of `salient_operations` of each head, with `layer, head` in front.
    """
    checked_name("embedding", embedding, KINDS)
    sources, targets = checked_count("sources", sources), checked_count("targets", targets)
    places = [head_named(one, None, weights.shape) for one in heads]
    if not places:
        return pd.DataFrame(columns=["layer", "head", *COLUMNS])
    with torch.inference_mode():
        factors = [_factors(weights, *one) for one in places]
        gains = gains_of_heads(weights, factors, embedding)
        tables = _described(weights, factors, gains, embedding, targets, sources)
    for place, table in zip(places, tables, strict=True):
        table.insert(0, "head", place[1])
        table.insert(0, "layer", place[0])
    return pd.concat(tables, ignore_index=True)


def _factors(weights: WeightSource, layer: int, head: int) -> Factors:
    factors = weights.ov(layer)
    return factors.W_V[factors.value_head(head)], factors.W_O[head]


def _described(
    weights: WeightSource,
    factors: Sequence[Factors],
    gains: Sequence[Float[Tensor, "token"]],
    embedding: str,
    targets: int,
    sources: int,
) -> list[pd.DataFrame]:
    """Describe every head's salient sources by both ends of its map."""
    unembedding = weights.unembedding()  # once for all heads: each reading looks through it for NaN
    tables = []
    for (W_V, W_O), of_head in zip(factors, gains, strict=True):
        known = len(of_head)
        strongest = of_head.topk(min(sources, known))
        x = weights.effective_embedding(strongest.indices, embedding)
        logits = (x @ W_V @ W_O @ unembedding)[:, :known]
        ends = [logits.topk(min(targets, known), largest=largest) for largest in (True, False)]
        tables.append(_table(weights, strongest.values, strongest.indices, ends))
    return tables


def gains_of_heads(
    weights: WeightSource, factors: Sequence[Factors], embedding: str, piece: int = PIECE
) -> list[Float[Tensor, "token"]]:
    """Return sigma_t = |x_t W_V W_O| / |x_t| of every token the tokenizer knows, for each head; 0 where x_t is 0."""
    # |z W_O|² = z (W_O W_Oᵀ) zᵀ: d_head² numbers a head, and no token's output is made.
    grams = [(W_O @ W_O.T).double() for _, W_O in factors]
    gains: list[list[Tensor]] = [[] for _ in factors]
    # Vocabularies are padded: a row that no token has is not a word.
    known = min(len(weights.tokenizer), weights.shape.d_vocab)
    for tokens in torch.arange(known, device=factors[0][0].device if factors else None).split(piece):
        # For all heads at once: an MLP's output of the whole vocabulary costs more than they do.
        x = weights.effective_embedding(tokens, embedding)
        read = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        for of_head, (W_V, _), gram in zip(gains, factors, grams, strict=True):
            z = (x @ W_V).double()
            # Rounding can leave a length of nearly 0 below 0.
            written = torch.linalg.vecdot(z @ gram, z).clamp(min=0).sqrt()
            of_head.append(torch.where(read > 0, written / read, 0.0))
    return [torch.cat(of_head).float() for of_head in gains]


def _table(
    weights: WeightSource,
    sigma: Float[Tensor, "source"],
    source: Int[Tensor, "source"],
    ends: list[torch.return_types.topk],
) -> pd.DataFrame:
    """Lay the strongest sources and both ends of their maps out, a row per source, sign and place."""
    words = token_strings(weights.tokenizer, source.tolist())
    rows = []
    for index, word in enumerate(words):
        for sign, (logits, tokens) in zip(SIGNS, ends, strict=True):
            mapped = token_strings(weights.tokenizer, tokens[index].tolist())
            for place, (target, token, logit) in enumerate(
                zip(mapped, tokens[index].tolist(), logits[index].tolist(), strict=True), start=1
            ):
                head = (index + 1, float(sigma[index]), word, int(source[index]))
                rows.append((*head, sign, place, target, token, logit))
    return pd.DataFrame(rows, columns=list(COLUMNS))
