"""Analyses of heads from parameters alone: composition scores, and the tokens along a circuit's singular vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.effective_embedding import EmbeddingName
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.part_names import HeadName, head_named
from headwater.models.tokens import token_strings
from headwater.models.weights import WeightSource
from headwater.options import checked_count, checked_names
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

PIECE = 8192
"""Tokens of a vocabulary in memory at a time."""


def tokens_at_ends(weights: WeightSource, products: Float[Tensor, " token"], n: int) -> list[tuple[Any, ...]]:
    """Return the n largest products, then the n smallest: `end` (0 or 1), `place` (from 1), token, its id, product."""
    rows = []
    for end in range(2):
        values, ids = products.topk(min(n, len(products)), largest=end == 0)
        words = token_strings(weights.tokenizer, ids.tolist())
        listed = zip(words, ids.tolist(), values.tolist(), strict=True)
        rows += [(end, place, *of_token) for place, of_token in enumerate(listed, start=1)]
    return rows


def known_tokens(weights: WeightSource) -> int:
    """Return the number of tokens that the tokenizer knows: vocabularies are padded, and rows beyond are no tokens."""
    return min(len(weights.tokenizer), weights.shape.d_vocab)


# Composition of heads: how strongly a later head reads the output of an earlier head, from parameters alone.
#
# Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021. With rows as vectors, W_OV = W_V W_O of the
# earlier head (the writer), and W_QK = W_Q W_Kᵀ and W_OV' of the later head (the reader):
#
# q   ‖W_OV W_QK‖ / ‖W_OV‖ ‖W_QK‖
# k   ‖W_OV W_QKᵀ‖ / ‖W_OV‖ ‖W_QK‖
# v   ‖W_OV W_OV'‖ / ‖W_OV‖ ‖W_OV'‖
#
# in Frobenius norms: between 0 and 1, and 1 if the reader reads exactly the single direction that the writer writes.
#
# 1. A product A B of d_model × d_head factors keeps its norm if Q is dropped from A = Q R: ‖A B‖ = ‖R B‖. So a writer
#    is reduced to R W_O (d_head × d_model), a reader to W_Q L (d_model × d_head), and a score is the norm of one
#    d_head × d_head product; no d_model × d_model matrix is formed.
# 2. The gain of the norm in front of the attention is folded into the reader's input, and into the writer's values.
#    All else in norms (scales, centring, a norm after the attention), rotation and biases are left out.
# 3. Null: the same two matrices, one rotated at random in the residual stream. With g an entry of a random rotation in
#    d dimensions, E g² = 1/d, so the squared score has mean 1/d for any singular values. Its variance follows from the
#    singular values and from the fourth moments of g (Collins & Śniady 2006): E g⁴ = 3/(d(d+2)), for two entries in one
#    row or column 1/(d(d+2)), for two in neither (d+1)/((d-1)d(d+2)). `expected` is 1/√d; `z` is the number of standard
#    deviations between the squared score and 1/d.


READERS = ("q", "k", "v")
LONG = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True, repr=False)
class Composition(Result):
    """How strongly later heads read the outputs of earlier heads."""

    table: pd.DataFrame
    """A row per kind, earlier head and later head: `kind` (q, k or v: the input of the later head), `writer_layer,
    writer_head, reader_layer, reader_head, score, expected` (for randomly rotated matrices), `z`."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return the ten pairs of each kind that are furthest above chance: the largest `z`."""
        strongest = self.table.sort_values(["kind", "z"], ascending=[True, False]).groupby("kind", sort=False).head(10)
        return strongest.reset_index(drop=True)

    def report(self) -> list[str]:
        """Report the strongest pair of each kind."""
        sentences = []
        for kind, part in self.table.groupby("kind", sort=False):
            row = max(part.to_dict("records"), key=lambda one: one["z"])
            above = float((part["z"] > 3).mean())
            sentences.append(
                f"Through its {LONG[str(kind)]}, head {row['reader_layer']}.{row['reader_head']} reads head "
                f"{row['writer_layer']}.{row['writer_head']} most strongly relative to chance (score "
                f"{row['score']:.3f}, expected {row['expected']:.3f}); {above:.0%} of {len(part):,} pairs are more "
                "than three standard deviations above chance."
            )
        return [
            *sentences,
            "Trained heads share directions of the residual stream: a score above chance is not yet a path.",
        ]


class _Side(NamedTuple):
    """The reduced circuit of every head of a layer, as writer or reader, and the norm of the full circuit."""

    factor: Float[Tensor, "head d_head d_model"]
    """The writer's output side, or the transposed input side of the reader."""
    norm: Float[Tensor, " head"]
    evenness: Float[Tensor, " head"]
    """Σ s⁴ / (Σ s²)² over the singular values: 1 for a single direction, 1 / d_head for d_head equal ones."""


@checked_call
def composition_scores(
    model: HookedModel | WeightSource | str | Path,
    *,
    kinds: str | Sequence[str] = READERS,
    norm_gain: bool = True,
    progress: bool = True,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> Composition:
    """Return the composition scores of every pair of an earlier and a later head.

    Args:
        model: a loaded model; or a checkpoint folder or hub name, read directly from safetensors, one layer at a time.
            The reduced writers of all layers stay in memory: d_model² numbers per layer.
        kinds: the input of the later head: its queries ("q"), keys ("k"), values ("v"), or several of these.
        norm_gain: fold the gain of the norm in front of a head's attention into its input.
        device: the device to read the weights to.

    Raises:
        ModelError: the model cannot be read, or has no factors of single heads.
    """
    chosen = sorted(checked_names("kinds", kinds, READERS), key=READERS.index)
    weights = weights_of(model, device)

    def work(run: Run) -> Composition:
        writers: list[_Side] = []
        parts: dict[str, list[dict[str, np.ndarray]]] = {kind: [] for kind in chosen}
        n_layers = weights.shape.n_layers
        with run.bar("Composing heads", "layer", n_layers) as bar:
            for layer in range(n_layers):
                factors = weights.layer(layer)
                gain: Tensor | float = factors.norm_gain[:, None] if norm_gain else 1.0
                W_Q, W_O = factors.W_Q * gain, factors.W_O
                W_K, W_V = (factors.expand_kv(factor * gain) for factor in (factors.W_K, factors.W_V))
                # The readers' circuits are transposed, so that `factor` is their input side.
                readers = {"q": (W_K, W_Q.mT), "k": (W_Q, W_K.mT), "v": (W_O.mT, W_V.mT)}
                for kind in chosen if layer else ():
                    reader = _side(*readers[kind])
                    parts[kind] += [_rows(kind, earlier, one, layer, reader) for earlier, one in enumerate(writers)]
                # Added after this layer's readers, because heads of one layer do not read each other.
                writers.append(_side(W_V, W_O))
                bar.update()
        if n_layers < 2:
            raise InputError("A model of one layer has no later head that could read an earlier one.")
        every = [part for of_kind in parts.values() for part in of_kind]
        table = pd.DataFrame({name: np.concatenate([part[name] for part in every]) for name in every[0]})
        return Composition(table, run.record)

    options = {"kinds": chosen, "norm_gain": norm_gain}
    return run_or_resume(Composition, "composition_scores", weights, options, work, out=out, progress=progress)


def _side(inner: Float[Tensor, "head d_model d_head"], outer: Float[Tensor, "head d_head d_model"]) -> _Side:
    """Reduce the product `inner outer` to d_head rows with the same norm and singular values."""
    # inner = Q R and Q preserves lengths, so R outer has the norm and singular values of the product.
    factor = torch.linalg.qr(inner, mode="r").R @ outer
    gram = factor @ factor.transpose(1, 2)
    square = gram.diagonal(dim1=1, dim2=2).sum(-1)
    # Σ s⁴ is the squared norm of the Gram matrix, so no singular values are computed.
    evenness = gram.square().sum((1, 2)) / square.square().clamp(min=torch.finfo(gram.dtype).tiny)
    return _Side(factor, square.clamp(min=0).sqrt(), evenness)


def scores_of(writer: _Side, reader: _Side) -> Float[Tensor, "sender receiver"]:
    """Return the score of every head of one layer with every head of a later layer; 0 if a circuit is zero."""
    # d_head × d_head for each pair of heads, not d_model × d_model.
    products = torch.einsum("w i d, r j d -> w r i j", writer.factor, reader.factor)
    norms = writer.norm[:, None] * reader.norm[None]
    return torch.where(norms > 0, products.square().sum((2, 3)).sqrt() / norms.clamp(min=1e-30), 0.0)


def null_deviation(p: np.ndarray, q: np.ndarray, d: int) -> np.ndarray:
    """Return the standard deviation of the squared score under random rotations; `p` and `q` are `evenness` values."""
    same, beside, apart = 3 / (d * (d + 2)), 1 / (d * (d + 2)), (d + 1) / ((d - 1) * d * (d + 2))
    second = p * q * same + (p * (1 - q) + (1 - p) * q) * beside + (1 - p) * (1 - q) * apart
    return np.sqrt(np.clip(second - 1 / d**2, 0, None))


def _rows(kind: str, earlier: int, writer: _Side, layer: int, reader: _Side) -> dict[str, np.ndarray]:
    scores = scores_of(writer, reader).double().cpu().numpy()
    d, (n_writers, n_readers) = writer.factor.shape[-1], scores.shape
    p, q = (side.evenness.double().cpu().numpy() for side in (writer, reader))
    spread = null_deviation(p[:, None], q[None], d)
    # z of the squared score, because its mean and variance under random rotations are known exactly.
    z = (scores**2 - 1 / d) / np.where(spread > 0, spread, np.nan)
    size = n_writers * n_readers
    return {
        "kind": np.full(size, kind, dtype=object), "writer_layer": np.full(size, earlier),
        "writer_head": np.repeat(np.arange(n_writers), n_readers), "reader_layer": np.full(size, layer),
        "reader_head": np.tile(np.arange(n_readers), n_writers), "score": scores.reshape(-1),
        "expected": np.full(size, d**-0.5), "z": z.reshape(-1),
    }  # fmt: skip


# The singular vectors of a head's circuits, and the tokens along them.
#
# Millidge & Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable", 2022;
# circuits as in Elhage et al. 2021. With rows as vectors and x the head's input (its effective embedding):
#
# ov    x W_V W_O = Σ s (x · u) v        a token along u is mapped to the tokens along v, with v projected by W_U
# qk    x W_Q W_Kᵀ y = Σ s (x · u)(y · v)   a query along u attends to keys along v
#
# 1. The factors are d_model × d_head: with W_V = Q R and W_Oᵀ = P S, only R Sᵀ, d_head × d_head, is decomposed.
# 2. u and v share their sign: + lists the tokens with the largest products on both sides, - the smallest.
# 3. Every vector has length 1. `share` is s² over the sum of all s²: the vector's share of the circuit. `random_share`
#    is the same for a product of random factors of this shape (the mean of a few).
#
# With `norm_gain`, the gain of the head's norm is folded in, and the final norm's into W_U; biases and rotation are
# left out.


CIRCUITS = {"ov": ("reads", "writes"), "qk": ("query", "key")}
"""The two sides of each circuit."""
SIGNS = ("+", "-")
RANDOM_DRAWS = 8


@dataclass(frozen=True, repr=False)
class SingularVectors(Result):
    """The strongest directions of a head's circuit, and the tokens along them; drawn with the share of each."""

    table: pd.DataFrame
    """A row per vector, side, sign and place: `layer, head, circuit, vector` (from 1), `side` ("reads", "writes";
    "query", "key"), `sign` ("+", "-"), `place` (from 1), `token, token_id, product` (of the token with the vector)."""
    values: pd.DataFrame
    """A row per singular value of the circuit: `vector, singular_value, share, random_share`."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per vector and sign: `vector, sign, singular_value, share`, and the tokens of each side."""
        table = self.table.sort_values("place")
        by_side = table.groupby(["vector", "sign", "side"])["token"].agg(", ".join).unstack()
        sides = list(CIRCUITS[str(table["circuit"].iloc[0])])
        values = self.values.drop(columns="random_share")
        return by_side[sides].reset_index().merge(values)[["vector", "sign", "singular_value", "share", *sides]]

    def report(self) -> list[str]:
        """Report how concentrated the circuit is, and the tokens of its strongest direction."""
        table, values = self.table.sort_values("place"), self.values.sort_values("vector")
        first = table.iloc[0]
        sides = CIRCUITS[str(first["circuit"])]
        share, random = values.iloc[0][["share", "random_share"]]
        sentences = [
            f"The strongest direction of the {str(first['circuit']).upper()} circuit of head {first['layer']}."
            f"{first['head']} makes up {share:.0%} of it, compared with {random:.0%} for random factors."
        ]
        for sign in SIGNS:
            of = table[(table["vector"] == 1) & (table["sign"] == sign)]
            listed = [", ".join(repr(one) for one in of.loc[of["side"] == side, "token"].head(4)) for side in sides]
            sentences.append(f"Along it ({sign}): {sides[0]} {listed[0]}; {sides[1]} {listed[1]}.")
        return [*sentences, "These tokens lie along it most; the direction may be used for others too."]


@checked_call
def singular_vectors(
    model: HookedModel | WeightSource | str | Path,
    layer: int | HeadName,
    head: int | None = None,
    *,
    circuit: Literal["ov", "qk"] = "ov",
    embedding: EmbeddingName = "raw",
    norm_gain: bool = False,
    vectors: int = 5,
    tokens: int = 8,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> SingularVectors:
    """Decompose a head's OV or QK circuit, and list the tokens along its strongest directions.

    Args:
        model: a loaded model; or a checkpoint folder or hub name, read directly from safetensors.
        layer: the head's layer, or the head itself as "9.2" or (9, 2).
        head: the head's index, if `layer` is a layer; with grouped heads its key-value head is looked up.
        circuit: "ov" (from input to output) or "qk" (from query to key).
        embedding: the head's input for a token: "raw", "mlp0", "embed+mlp0" or "layer0".
        norm_gain: fold in the gains of the head's norm and of the final norm.
        vectors: number of directions, the strongest first.
        tokens: number of tokens for each side and sign.
        device: the device to read the weights to.

    Raises:
        ModelError: the model cannot be read, or has no factors of single heads.
    """
    tokens = checked_count("tokens", tokens)
    weights = weights_of(model, device)
    shape = weights.shape
    vectors = checked_count("vectors", vectors, most=shape.d_head)
    layer, head = head_named(layer, head, shape)

    @torch.inference_mode()
    def work(run: Run) -> SingularVectors:
        factors = weights.layer(layer)
        group, gain = factors.value_head(head), factors.norm_gain[:, None] if norm_gain else 1.0
        if circuit == "ov":
            u, s, v = decomposed(factors.W_V[group] * gain, factors.W_O[head])
        else:
            u, s, v = decomposed(factors.W_Q[head] * gain, (factors.W_K[group] * gain).T)
        u, v = u[:, :vectors], v[:, :vectors]
        along = [_embedded(weights, embedding, u)]
        along.append(_unembedded(weights, v, norm_gain) if circuit == "ov" else _embedded(weights, embedding, v))
        table = _listed(weights, dict(zip(CIRCUITS[circuit], along, strict=True)), tokens)
        for place, (name, value) in enumerate({"layer": layer, "head": head, "circuit": circuit}.items()):
            table.insert(place, name, [value] * len(table))
        return SingularVectors(table, _values(s, shape.d_model), run.record)

    options = {"layer": layer, "head": head, "circuit": circuit, "embedding": embedding, "norm_gain": norm_gain}
    options |= {"vectors": vectors, "tokens": tokens}
    return run_or_resume(SingularVectors, "singular_vectors", weights, options, work, out=out)


def decomposed(
    left: Float[Tensor, "d_model d_head"], right: Float[Tensor, "d_head d_model"]
) -> tuple[Float[Tensor, "d_model d_head"], Float[Tensor, " d_head"], Float[Tensor, "d_model d_head"]]:
    """Return the singular vectors and values of a product of factors, (u, s, v), without forming it.

    Each pair's sign makes the sum of cubes of v positive, so that it is the same on every machine.
    """
    Q, R = torch.linalg.qr(left.double())
    P, S = torch.linalg.qr(right.double().T)
    u, s, vt = torch.linalg.svd(R @ S.T)
    u, v = Q @ u, P @ vt.T
    sign = torch.where((v**3).sum(0) < 0, -1.0, 1.0)
    return u * sign, s, v * sign


def _embedded(weights: WeightSource, embedding: str, vectors: Float[Tensor, "d_model k"]) -> Float[Tensor, "k token"]:
    """Return the products of every known token's embedding with the vectors."""
    tokens = torch.arange(known_tokens(weights), device=vectors.device)
    parts = [weights.effective_embedding(piece, embedding).double() @ vectors for piece in tokens.split(PIECE)]
    return torch.cat(parts).T


def _unembedded(
    weights: WeightSource, vectors: Float[Tensor, "d_model k"], norm_gain: bool
) -> Float[Tensor, "k token"]:
    """Return the logits of the vectors for every known token."""
    vectors = vectors * weights.final_norm_gain().double()[:, None] if norm_gain else vectors
    unembedding = weights.unembedding()
    return (vectors.to(unembedding.dtype).T @ unembedding)[:, : known_tokens(weights)].double()


def _listed(weights: WeightSource, along: Mapping[str, Float[Tensor, "k token"]], tokens: int) -> pd.DataFrame:
    """Return the tokens at both ends of every vector; `along` maps each side to the tokens' products with them."""
    rows = []
    for vector in range(len(next(iter(along.values())))):
        for side, products in along.items():
            ends = tokens_at_ends(weights, products[vector], tokens)
            rows += [(vector + 1, side, SIGNS[end], *of_token) for end, *of_token in ends]
    return pd.DataFrame(rows, columns=["vector", "side", "sign", "place", "token", "token_id", "product"])


def _values(s: Float[Tensor, " d_head"], d_model: int) -> pd.DataFrame:
    """Return the singular values with their shares, and the shares of random factors."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(RANDOM_DRAWS):
        left, right = (torch.randn(d_model, len(s), generator=generator).double() for _ in range(2))
        # The R factors of both sides yield the singular values of the d_model² product from d_head² numbers.
        left_R, right_R = (torch.linalg.qr(side, mode="r").R for side in (left, right))
        random = torch.linalg.svdvals(left_R @ right_R.T).square()
        shares.append(random / random.sum())
    squared = s.square().cpu()
    return pd.DataFrame(
        {
            "vector": range(1, len(s) + 1),
            "singular_value": s.cpu().numpy(),
            "share": (squared / squared.sum().clamp(min=1e-300)).numpy(),
            "random_share": torch.stack(shares).mean(0).numpy(),
        }
    )
