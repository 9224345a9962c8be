"""Salient operations of a head: the tokens it writes most strongly about, and what it maps them to.

Elhelo & Geva (ACL 2025), beside the predefined relations. With x_t what the head reads for token t (its effective
embedding) and W_V, W_O the head's factors:

1. Every token of the vocabulary gets the gain sigma_t = |x_t W_V W_O| / |x_t|.
2. The tokens with the largest gains are the head's salient sources.
3. Each is described by the n largest entries of x_t W_V W_O W_U (what the head writes) and by the n smallest (what it
   suppresses).

W_V W_O is never formed: with z = x_t W_V, |z W_O|² = z (W_O W_Oᵀ) zᵀ, and W_O W_Oᵀ is d_head × d_head. The vocabulary
is read in pieces.
"""

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.tokens import token_strings
from headwater.models.weights.effective_embedding import KINDS
from headwater.models.weights.weight_source import WeightSource
from headwater.options import checked_count, checked_name

SIGNS = ("writes", "suppresses")


def salient_operations(
    weights: WeightSource, layer: int, head: int, *, embedding: str = "raw", sources: int = 15, targets: int = 5
) -> pd.DataFrame:
    """Return what a head does to the tokens it writes most strongly about.

    Args:
        weights: the model's parameters.
        layer: the head's layer.
        head: the head.
        embedding: what the head reads: "raw", "mlp0", "embed+mlp0" or "layer0".
        sources: how many salient tokens.
        targets: how many tokens to list for each, on either side.

    Returns:
        A row per source, sign and place: `rank` of the source (from 1), `sigma` (how many times longer the head's
        output is than what it reads), `source, source_id`, `sign` ("writes", "suppresses"), `place` (from 1),
        `target, target_id`, `logit`.

    Raises:
        InputError: the head or the embedding does not exist, or less than one token is asked for.
    """
    shape = weights.shape
    checked_name("embedding", embedding, KINDS)
    sources, targets = checked_count("sources", sources), checked_count("targets", targets)
    layer, head = checked_count("layer", layer, least=0), checked_count("head", head, least=0)
    if not (layer < shape.n_layers and head < shape.n_heads):
        raise InputError(
            f"Head {head} of layer {layer} was asked for; {weights.name} has {shape.n_layers} layers of "
            f"{shape.n_heads} heads."
        )
    with torch.inference_mode():
        factors = weights.ov(layer)
        W_V, W_O = factors.W_V[factors.value_head(head)], factors.W_O[head]
        gains = source_gains(weights, W_V, W_O, embedding)
        strongest = gains.topk(min(sources, len(gains)))
        x = weights.effective_embedding(strongest.indices, embedding)
        logits = (x @ W_V @ W_O @ weights.unembedding())[:, : len(gains)]
        ends = [logits.topk(min(targets, len(gains)), largest=largest) for largest in (True, False)]
    return _table(weights, strongest.values, strongest.indices, ends)


def source_gains(
    weights: WeightSource,
    W_V: Float[Tensor, "d_model d_head"],
    W_O: Float[Tensor, "d_head d_model"],
    embedding: str,
    piece: int = 8192,
) -> Float[Tensor, "token"]:
    """Return sigma_t = |x_t W_V W_O| / |x_t| of every token the tokenizer knows; 0 where x_t is 0.

    Args:
        weights: where effective embeddings come from.
        W_V: the head's value factor.
        W_O: the head's output factor.
        embedding: the kind of effective embedding.
        piece: how many tokens are in memory at a time.
    """
    gram = (W_O @ W_O.T).double()
    gains = []
    known = min(len(weights.tokenizer), weights.shape.d_vocab)
    for tokens in torch.arange(known, device=W_V.device).split(piece):
        x = weights.effective_embedding(tokens, embedding)
        z = (x @ W_V).double()
        written = torch.linalg.vecdot(z @ gram, z).clamp(min=0).sqrt()
        read = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
        gains.append(torch.where(read > 0, written / read, 0.0))
    return torch.cat(gains).float()


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
    columns = ["rank", "sigma", "source", "source_id", "sign", "place", "target", "target_id", "logit"]
    return pd.DataFrame(rows, columns=columns)
