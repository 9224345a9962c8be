"""Which effective embedding: what heads from layer 1 on read for a token, chosen by what the first block really writes.

The publication reads MLP₀(LN(E)) in every model. How near that comes to the residual stream after block 0 differs from
model to model, and where it is far off a map of heads can come out empty. So every choice is compared with that stream,
at the token in [BOS, token] ("layer0"), on the relations' own source tokens:

    agreement = mean over source tokens of cos(x_s, resid_post of block 0)

`embedding="auto"` takes the published choice unless another one agrees better by more than `LEVEL`; docs/heads.md shows
which choice predicts causes on three models. "layer0" itself is not a candidate: it agrees by definition, costs a block
and predicts no better.
"""

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError
from headwater.models.weights.effective_embedding import published_embedding
from headwater.models.weights.weight_source import WeightSource

LEVEL = 0.02
"""How much better another embedding than the published one must agree to be taken."""
LOW = 0.6
"""Below this agreement reports warn."""
TOKENS = 512
"""How many source tokens are compared, evenly spaced; all where there are fewer."""


def compare_embeddings(
    weights: WeightSource, tokens: Int[Tensor, "token"], embedding: str | None
) -> tuple[str, pd.DataFrame]:
    """Compare what heads could read with what the first block writes, and choose.

    Args:
        weights: the model.
        tokens: the source tokens of the relations.
        embedding: "auto" for the best one, None for the published one, or the name of one.

    Returns:
        The chosen one, and a row per embedding but "layer0": `embedding, agreement` (NaN where it cannot be computed)
        and `chosen`. Where "layer0" was chosen no row is.
    """
    tokens = tokens.unique()
    tokens = tokens[:: -(-len(tokens) // TOKENS)]
    written = _read(weights, tokens, "layer0")
    agreement = {
        kind: torch.cosine_similarity(_read(weights, tokens, kind), written, dim=-1).mean().item()
        for kind in ("mlp0", "embed+mlp0", "raw")
    }
    published = published_embedding(weights.shape)
    if embedding is None:
        embedding = published
    if embedding == "auto":
        best = max(agreement, key=lambda kind: agreement[kind] + LEVEL * (kind == published))
        embedding = published if pd.isna(agreement[published]) else best
    rows = [(kind, value, kind == embedding) for kind, value in agreement.items()]
    return embedding, pd.DataFrame(rows, columns=["embedding", "agreement", "chosen"])


def _read(weights: WeightSource, tokens: Int[Tensor, "token"], kind: str) -> Float[Tensor, "token d_model"]:
    """An effective embedding in float64; NaN where this model has none (no token to put in front, for instance)."""
    try:
        return weights.effective_embedding(tokens, kind).double()
    except InputError:
        return torch.full((len(tokens), weights.shape.d_model), torch.nan, dtype=torch.float64, device=weights.device)


def sentences_of_embedding(embedding: str, agreement: pd.DataFrame) -> list[str]:
    """Say what heads from layer 1 on were read with, and how that agrees with what the first block writes."""
    found = dict(agreement.dropna().set_index("embedding")["agreement"].astype(float))
    if embedding == "layer0":
        return ["Heads from layer 1 on read what the first block writes for [BOS, token] (embedding='layer0')."]
    if embedding not in found:
        return [f"How well embedding={embedding!r} agrees with what the first block writes cannot be computed here."]
    others = ", ".join(f"{kind!r} {value:.2f}" for kind, value in found.items() if kind != embedding)
    said = [
        f"Heads from layer 1 on read embedding={embedding!r}: mean cosine {found[embedding]:.2f} to what the first "
        f"block writes for the relations' sources ({others})."
    ]
    if found[embedding] < LOW:
        said.append(
            f"That is low (below {LOW}): what these heads read in a text may be something else, and scores may miss "
            "what they do there."
        )
    return said
