"""Whether a head writes what it reads: the eigenvalues of its OV circuit, from token to token.

Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021. With E the embedding that a head reads and U
the unembedding, it maps tokens to logits by M = E W_V W_O U, d_vocab × d_vocab. The eigenvectors of M are mixtures of
tokens that are written as themselves, times the eigenvalue: positive where it copies, negative where it suppresses.

    copying = Σ λ / Σ |λ|        1 where all is copied, -1 where all is suppressed

1. M has the eigenvalues of the product in the other order, W_O (U E) W_V, and zeros: U E is d_model × d_model and the
   same for all heads of a layer, the product d_head × d_head.
2. E is the raw embedding at layer 0 and the effective embedding after it (`models.weights.effective_embedding`).
3. Null: heads of this shape whose W_V and W_O are drawn at random, with the same E and U.

Biases, norms, and a norm after the attention are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.devices import to_device
from headwater.models.weights.weight_source import WeightSource
from headwater.progress import Bar

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
    """Return Σ λ / Σ |λ| of every head, and the bounds within which 95 % of random heads lie.

    Args:
        weights: the model's.
        embedding: what heads from layer 1 on read: "raw", "mlp0", "embed+mlp0" or "layer0".
        seed: of the random heads.
        bar: what counts the layers.
        layers: which; default: all.

    Returns:
        The scores, -1 to 1; NaN of a head that writes nothing of what it reads. Of each layer the two bounds.
    """
    scores, bounds = [], []
    layers = range(weights.shape.n_layers) if layers is None else layers
    for layer, (joined, of_random) in zip(layers, _joined(weights, embedding, seed, layers), strict=True):
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


def _joined(weights: WeightSource, embedding: str, seed: int, layers: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, layer by layer, U E and the bounds of random heads; each is computed once where layers share it."""
    by_kind: dict[str, tuple[Tensor, Tensor]] = {}
    for layer in layers:
        kind = embedding if layer else "raw"
        if kind not in by_kind:
            # Only layer 0 reads another embedding: d_model² numbers of one kind are kept at a time.
            by_kind.clear()
            joined = _read_and_written(weights, kind)
            by_kind[kind] = (joined, _bounds(joined, weights.shape.d_head, seed))
        yield by_kind[kind]


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
    shares = torch.cat(
        [
            eigenvalue_share(to_device(one, joined.device), joined, to_device(other, joined.device))
            for one, other in zip(W_O.split(8), W_V.split(8), strict=True)
        ]
    )
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=shares.dtype)
    return torch.nanquantile(shares, ends)
