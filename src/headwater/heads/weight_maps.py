"""What parameters alone say of heads: which of them compose, and the tokens along a circuit's singular vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.effective_embedding import KINDS, EmbeddingName
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.part_names import HeadName, head_named
from headwater.models.tokens import token_strings
from headwater.models.weights import HeadWeights, WeightSource
from headwater.options import checked_count, checked_flag, checked_name, one_or_several
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, Size, each_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Composition of heads: how much of what a later head reads is what an earlier head writes, from parameters alone.
#
# Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021. With rows as vectors, W_OV = W_V W_O of the
# earlier head (the writer) and W_QK = W_Q W_Kᵀ, W_OV of the later one (the reader):
#
# q   ‖W_OV W_QK‖ / ‖W_OV‖ ‖W_QK‖
# k   ‖W_OV W_QKᵀ‖ / ‖W_OV‖ ‖W_QK‖
# v   ‖W_OV W_OV'‖ / ‖W_OV‖ ‖W_OV'‖
#
# in Frobenius norms: between 0 and 1, and 1 where the reader reads the one direction that the writer writes.
#
# 1. A product A B of d_model × d_head factors keeps its norm when A's columns are made orthonormal: with A = Q R, ‖A B‖
#    = ‖R B‖. So a writer is its R W_O (d_head × d_model), a reader its W_Q L (d_model × d_head), and a score the norm
#    of one d_head × d_head product; nothing of size d_model × d_model is formed.
# 2. The reader reads through its norm: the gain is folded in. A writer's values are read through its own norm likewise.
#    What norms do beside their gain (scales, centring, a norm after the attention), rotation and biases are left out.
# 3. Null: the same two matrices, one turned at random against the other in the residual stream. With g an entry of a
#    random rotation of d dimensions, E g² = 1/d, so the squared score has the mean 1/d whatever the singular values;
#    its variance follows from theirs and from the fourth moments of g (Collins & Śniady 2006): E g⁴ = 3/(d(d+2)), of
#    two in a row or column 1/(d(d+2)), of two apart (d+1)/((d-1)d(d+2)). `expected` is 1/√d and `z` how many standard
#    deviations the squared score lies from 1/d.


READERS = ("q", "k", "v")
LONG = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True, repr=False)
class Composition(Result):
    """How strongly later heads read what earlier heads write."""

    table: pd.DataFrame
    """A row per kind, earlier head and later head: `kind` (q, k or v: by what the later head reads), `writer_layer,
    writer_head, reader_layer, reader_head, score, expected` (of matrices turned at random), `z`."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return the ten pairs of each kind that differ most from chance: the largest `z`."""
        strongest = self.table.sort_values(["kind", "z"], ascending=[True, False]).groupby("kind", sort=False).head(10)
        return strongest.reset_index(drop=True)

    def report(self) -> list[str]:
        """Return the strongest pair of each kind."""
        sentences = []
        for kind, part in self.table.groupby("kind", sort=False):
            row = max(each_row(part), key=lambda one: one["z"])
            above = float((part["z"] > 3).mean())
            sentences.append(
                f"By their {LONG[str(kind)]}: head {row['reader_head']} of layer {row['reader_layer']} reads head "
                f"{row['writer_head']} of layer {row['writer_layer']} most for chance, with a score of "
                f"{row['score']:.3f} where {row['expected']:.3f} is expected; of {len(part):,} pairs {above:.0%} are "
                "more than three standard deviations above it."
            )
        return [
            *sentences,
            "Trained heads share directions of the residual stream: a score above chance is not yet a path.",
        ]

    def plot(
        self, ax: Axes | None = None, *, kind: str | None = None, title: str | None = None, figsize: Size | None = None
    ) -> Axes | Figure:
        """Draw the scores of one kind ("q", "k" or "v") as a map, earlier heads by later; by default a panel each."""
        return self._drawn(ax, title, figsize, kind=kind)


class _Side(NamedTuple):
    """Half of a product of two factors, and the norm of the whole, for every head of a layer."""

    factor: Float[Tensor, "head d_head d_model"]
    """Of a writer what it writes; of a reader, transposed, what it reads."""
    norm: Float[Tensor, " head"]
    evenness: Float[Tensor, " head"]
    """Σ s⁴ / (Σ s²)² over the singular values: 1 for one direction, 1 / d_head for as many alike."""


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
        model: a loaded model; or a checkpoint folder or hub name, read straight from safetensors, one layer at a time.
            What every layer writes is kept: d_model² numbers of a layer.
        kinds: by what the later head reads: its queries ("q"), keys ("k"), values ("v"), or several of these.
        norm_gain: fold the gain of the norm in front of a head's attention into what it reads.
        progress: show a bar over layers.
        out: a folder for the result. An interrupted run, repeated with it, continues.
        device: where the weights are read to.

    Raises:
        InputError: there is no such kind.
        ModelError: the model cannot be read, or has no factors of single heads.
    """
    wanted = [checked_name("kinds", kind, READERS) for kind in one_or_several(kinds)]
    chosen = tuple(kind for kind in READERS if kind in wanted) or (checked_name("kinds", kinds, READERS),)
    norm_gain = checked_flag("norm_gain", norm_gain)
    weights = weights_of(model, device)

    def work(run: Run) -> Composition:
        writers: list[_Side] = []
        parts: dict[str, list[dict[str, np.ndarray]]] = {kind: [] for kind in chosen}
        n_layers = weights.shape.n_layers
        with run.bar("Composing heads", "layer", n_layers) as bar:
            for layer in range(n_layers):
                factors = weights.layer(layer)
                gain: Tensor | float = factors.norm_gain[:, None] if norm_gain else 1.0
                for kind in chosen:
                    reader = _reader(factors, kind, gain)
                    parts[kind] += [_rows(kind, earlier, one, layer, reader) for earlier, one in enumerate(writers)]
                # After the layer's own readers: heads of one layer do not read one another.
                # What a head writes is R W_O, with W_V = Q R.
                writers.append(_side(factors.expand_kv(factors.W_V * gain), factors.W_O))
                bar.update()
        if n_layers < 2:
            raise InputError("A model of one layer has no head after another: there is nothing to compose.")
        every = [part for of_kind in parts.values() for part in of_kind]
        table = pd.DataFrame({name: np.concatenate([part[name] for part in every]) for name in every[0]})
        return Composition(table, run.record)

    options = {"kinds": list(chosen), "norm_gain": norm_gain}
    return run_or_resume(Composition, "composition_scores", weights, options, work, out=out, progress=progress)


def _reader(factors: HeadWeights, kind: str, gain: Float[Tensor, "d_model 1"] | float) -> _Side:
    """What each head reads for one kind, as the transposed product: what it does with it comes first."""
    if kind == "v":
        return _side(factors.W_O.transpose(1, 2), factors.expand_kv(factors.W_V * gain).transpose(1, 2))
    W_Q, W_K = factors.W_Q * gain, factors.expand_kv(factors.W_K * gain)
    inner, outer = (W_K, W_Q) if kind == "q" else (W_Q, W_K)
    return _side(inner, outer.transpose(1, 2))


def _side(inner: Float[Tensor, "head d_model d_head"], outer: Float[Tensor, "head d_head d_model"]) -> _Side:
    """Make half of the product `inner outer`: the same norm and singular values, and only d_head rows."""
    # inner = Q R and Q keeps lengths: R outer has the norm and singular values of the product, in d_head rows.
    factor = torch.linalg.qr(inner, mode="r").R @ outer
    gram = factor @ factor.transpose(1, 2)
    square = gram.diagonal(dim1=1, dim2=2).sum(-1)
    # From the Gram matrix: Σ s⁴ is its squared norm, and no singular value is computed.
    evenness = gram.square().sum((1, 2)) / square.square().clamp(min=torch.finfo(gram.dtype).tiny)
    return _Side(factor, square.clamp(min=0).sqrt(), evenness)


def scores_of(writer: _Side, reader: _Side) -> Float[Tensor, "sender receiver"]:
    """Return the score of every head of one layer with every head of a later one; 0 where a head does nothing."""
    # d_head × d_head for each pair of heads, never d_model × d_model.
    products = torch.einsum("w i d, r j d -> w r i j", writer.factor, reader.factor)
    norms = writer.norm[:, None] * reader.norm[None]
    return torch.where(norms > 0, products.square().sum((2, 3)).sqrt() / norms.clamp(min=1e-30), 0.0)


def null_deviation(p: np.ndarray, q: np.ndarray, d: int) -> np.ndarray:
    """Return the standard deviation of the squared score under random rotations; `p` and `q` are both `evenness`."""
    same, beside, apart = 3 / (d * (d + 2)), 1 / (d * (d + 2)), (d + 1) / ((d - 1) * d * (d + 2))
    second = p * q * same + (p * (1 - q) + (1 - p) * q) * beside + (1 - p) * (1 - q) * apart
    return np.sqrt(np.clip(second - 1 / d**2, 0, None))


def _rows(kind: str, earlier: int, writer: _Side, layer: int, reader: _Side) -> dict[str, np.ndarray]:
    scores = scores_of(writer, reader).double().cpu().numpy()
    d, (n_writers, n_readers) = writer.factor.shape[-1], scores.shape
    p, q = (side.evenness.double().cpu().numpy() for side in (writer, reader))
    spread = null_deviation(p[:, None], q[None], d)
    # Of the square, whose mean and variance under random rotations are known exactly; the score's are not.
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
# circuits after Elhage et al. 2021. With rows as vectors and x what the head reads (its effective embedding):
#
# ov    x W_V W_O = Σ s (x · u) v        a token along u is written as the tokens along v, each v read by W_U
# qk    x W_Q W_Kᵀ y = Σ s (x · u)(y · v)   a query along u attends to keys along v
#
# 1. The factors are d_model × d_head: with W_V = Q R and W_Oᵀ = P S the decomposition is that of R Sᵀ, d_head × d_head.
# 2. u and v have their sign in common: + lists the tokens with the largest products with both, - the smallest.
# 3. Every vector has length 1. `share` is s² of all s²: how much of the circuit it is. Beside it, what a product of
#    random factors of this shape would give (the mean of a few).
#
# The gain of the head's norm is folded in where `norm_gain` says so, and then the final norm's into W_U; biases and
# rotation are left out.


CIRCUITS = {"ov": ("reads", "writes"), "qk": ("query", "key")}
"""The two sides of each circuit."""
SIGNS = ("+", "-")
RANDOM_DRAWS = 8
PIECE = 8192
"""Tokens in memory at a time."""


@dataclass(frozen=True, repr=False)
class SingularVectors(Result):
    """The strongest directions of a head's circuit, and the tokens along them."""

    table: pd.DataFrame
    """A row per vector, side, sign and place: `layer, head, circuit, vector` (from 1), `side` ("reads", "writes";
    "query", "key"), `sign` ("+", "-"), `place` (from 1), `token, token_id, product` (of the token with the vector)."""
    values: pd.DataFrame
    """A row per singular value of the circuit: `vector, singular_value, share, random_share`."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return a row per vector and sign: `vector, sign, singular_value, share`, and the tokens of each side."""
        by_side = self.table.groupby(["vector", "sign", "side"], sort=False)["token"].agg(", ".join).unstack()
        sides = list(self.table["side"].unique())
        values = self.values.drop(columns="random_share")
        return by_side[sides].reset_index().merge(values)[["vector", "sign", "singular_value", "share", *sides]]

    def report(self) -> list[str]:
        """Return how concentrated the circuit is, and what its strongest direction does."""
        first = self.table.iloc[0]
        sides = CIRCUITS[str(first["circuit"])]
        share, random = self.values.iloc[0][["share", "random_share"]]
        sentences = [
            f"The strongest direction of the {str(first['circuit']).upper()} circuit of head {first['head']} in layer "
            f"{first['layer']} is {share:.0%} of it; of random factors it would be {random:.0%}."
        ]
        for sign in SIGNS:
            of = self.table[(self.table["vector"] == 1) & (self.table["sign"] == sign)]
            listed = [", ".join(repr(one) for one in of.loc[of["side"] == side, "token"].head(4)) for side in sides]
            sentences.append(f"Along it ({sign}): {sides[0]} {listed[0]}; {sides[1]} {listed[1]}.")
        return [*sentences, "Tokens with large products are those that lie along it most, not all that it is used for."]

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes:
        """Draw the share of each singular value beside that of random factors, and the tokens of the first ones."""
        return cast("Axes", self._drawn(ax, title, figsize))


@checked_call
def singular_vectors(
    model: HookedModel | WeightSource | str | Path,
    layer: int | HeadName,
    head: int | None = None,
    *,
    circuit: str = "ov",
    embedding: EmbeddingName = "raw",
    norm_gain: bool = False,
    vectors: int = 5,
    tokens: int = 8,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
) -> SingularVectors:
    """Decompose a head's OV or QK circuit, and list the tokens along its strongest directions.

    Args:
        model: a loaded model; or a checkpoint folder or hub name, read straight from safetensors.
        layer: the head's layer, or the head by its name, as "9.2" or (9, 2).
        head: the head, where it is not named; with grouped heads its key-value head is found.
        circuit: "ov" (what it writes for what it reads) or "qk" (what attends to what).
        embedding: what the head reads for a token: "raw", "mlp0", "embed+mlp0" or "layer0".
        norm_gain: fold the gain of the head's norm, and that of the final norm, in.
        vectors: how many of the strongest directions.
        tokens: how many tokens of each side and sign.
        out: a folder for the result.
        device: where the weights are read to.

    Raises:
        InputError: the head, circuit or embedding does not exist.
        ModelError: the model cannot be read, or has no factors of single heads.
    """
    checked_name("circuit", circuit, tuple(CIRCUITS))
    checked_name("embedding", embedding, KINDS)
    norm_gain, tokens = checked_flag("norm_gain", norm_gain), checked_count("tokens", tokens)
    weights = weights_of(model, device)
    shape = weights.shape
    vectors = checked_count("vectors", vectors, most=shape.d_head)
    layer, head = head_named(layer, head, shape)

    @torch.inference_mode()
    def work(run: Run) -> SingularVectors:
        left, right = _factors(weights, layer, head, circuit, norm_gain)
        u, s, v = decomposed(left, right)
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

    The sign of each pair makes the larger half of v's weight positive, so that it is the same everywhere.
    """
    Q, R = torch.linalg.qr(left.double())
    P, S = torch.linalg.qr(right.double().T)
    u, s, vt = torch.linalg.svd(R @ S.T)
    u, v = Q @ u, P @ vt.T
    sign = torch.where((v**3).sum(0) < 0, -1.0, 1.0)
    return u * sign, s, v * sign


def _factors(
    weights: WeightSource, layer: int, head: int, circuit: str, norm_gain: bool
) -> tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_head d_model"]]:
    """The two factors of a circuit of one head."""
    factors = weights.layer(layer)
    group = factors.value_head(head)
    gain: Tensor | float = factors.norm_gain[:, None] if norm_gain else 1.0
    if circuit == "ov":
        return factors.W_V[group] * gain, factors.W_O[head]
    return factors.W_Q[head] * gain, (factors.W_K[group] * gain).T


def _embedded(weights: WeightSource, embedding: str, vectors: Float[Tensor, "d_model k"]) -> Float[Tensor, "k token"]:
    """The products of every known token's embedding with the vectors."""
    known = min(len(weights.tokenizer), weights.shape.d_vocab)
    parts = [
        weights.effective_embedding(tokens, embedding).double() @ vectors
        for tokens in torch.arange(known, device=vectors.device).split(PIECE)
    ]
    return torch.cat(parts).T


def _unembedded(
    weights: WeightSource, vectors: Float[Tensor, "d_model k"], norm_gain: bool
) -> Float[Tensor, "k token"]:
    """What the unembedding makes of the vectors, for every known token."""
    known = min(len(weights.tokenizer), weights.shape.d_vocab)
    vectors = vectors * weights.final_norm_gain().double()[:, None] if norm_gain else vectors
    unembedding = weights.unembedding()
    return (vectors.to(unembedding.dtype).T @ unembedding)[:, :known].double()


def _listed(weights: WeightSource, along: Mapping[str, Float[Tensor, "k token"]], tokens: int) -> pd.DataFrame:
    """The tokens at both ends of every vector; `along` has by side the products of the tokens with the vectors."""
    ends = []
    for side, products in along.items():
        for sign in SIGNS:
            found = products.topk(min(tokens, products.shape[1]), dim=1, largest=sign == "+")
            ends.append((side, sign, found.values.tolist(), found.indices.tolist()))
    rows = []
    for vector in range(len(ends[0][2])):
        for side, sign, values, ids in ends:
            words = token_strings(weights.tokenizer, ids[vector])
            rows += [
                (vector + 1, side, sign, place, word, one, value)
                for place, (word, one, value) in enumerate(zip(words, ids[vector], values[vector], strict=True), 1)
            ]
    return pd.DataFrame(rows, columns=["vector", "side", "sign", "place", "token", "token_id", "product"])


def _values(s: Float[Tensor, " d_head"], d_model: int) -> pd.DataFrame:
    """The singular values with their shares, and the shares of random factors."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(RANDOM_DRAWS):
        left, right = (torch.randn(d_model, len(s), generator=generator).double() for _ in range(2))
        # R of both sides: the singular values of a d_model² product from d_head² numbers.
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
