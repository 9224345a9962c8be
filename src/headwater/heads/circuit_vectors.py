"""The singular vectors of a head's circuits, and the tokens along them.

Millidge & Black, "The Singular Value Decompositions of Transformer Weight Matrices are Highly Interpretable", 2022;
circuits after Elhage et al. 2021. With rows as vectors and x what the head reads (its effective embedding):

    ov    x W_V W_O = Σ s (x · u) v        a token along u is written as the tokens along v, each v read by W_U
    qk    x W_Q W_Kᵀ y = Σ s (x · u)(y · v)   a query along u attends to keys along v

1. The factors are d_model × d_head: with W_V = Q R and W_Oᵀ = P S the decomposition is that of R Sᵀ, d_head × d_head.
2. u and v have their sign in common: + lists the tokens with the largest products with both, - the smallest.
3. Every vector has length 1. `share` is s² of all s²: how much of the circuit it is. Beside it, what a product of
   random factors of this shape would give (the mean of a few).

The gain of the head's norm is folded in where `norm_gain` says so, and then the final norm's into W_U; biases and
rotation are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.part_names import HeadName, head_named
from headwater.models.tokens import token_strings
from headwater.models.weights.effective_embedding import KINDS, EmbeddingName
from headwater.models.weights.weight_source import WeightSource
from headwater.options import checked_count, checked_flag, checked_name
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.figure_options import Size
from headwater.runs.findings import each_row
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        rows, values = [], {one["vector"]: one for one in each_row(self.values)}
        for (vector, sign), part in self.table.groupby(["vector", "sign"], sort=False):
            sides = {str(side): ", ".join(tokens["token"]) for side, tokens in part.groupby("side", sort=False)}
            value = values[int(str(vector))]
            rows.append({"vector": vector, "sign": sign, **value, **sides})
        return pd.DataFrame(rows).drop(columns="random_share")

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
        sides = CIRCUITS[circuit]
        along = [_embedded(weights, embedding, u[:, :vectors])]
        along.append(
            _unembedded(weights, v[:, :vectors], norm_gain)
            if circuit == "ov"
            else _embedded(weights, embedding, v[:, :vectors])
        )
        listed = [_listed(weights, products, side, tokens) for side, products in zip(sides, along, strict=True)]
        table = pd.concat(listed).sort_values(["vector", "order", "sign_order", "place"], kind="stable")
        table = table.drop(columns=["order", "sign_order"]).reset_index(drop=True)
        for place, (name, value) in enumerate((("layer", layer), ("head", head), ("circuit", circuit))):
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
    gain = factors.norm_gain[:, None] if norm_gain else torch.ones_like(factors.norm_gain)[:, None]
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


def _listed(weights: WeightSource, products: Float[Tensor, "k token"], side: str, tokens: int) -> pd.DataFrame:
    """The tokens at both ends of every vector."""
    rows = []
    count = min(tokens, products.shape[1])
    for order, (sign, largest) in enumerate(zip(SIGNS, (True, False), strict=True)):
        found = products.topk(count, dim=1, largest=largest)
        for vector, (values, ids) in enumerate(zip(found.values.tolist(), found.indices.tolist(), strict=True), 1):
            words = token_strings(weights.tokenizer, ids)
            rows += [
                (vector, side, sign, place, word, one, value, order)
                for place, (word, one, value) in enumerate(zip(words, ids, values, strict=True), 1)
            ]
    columns = ["vector", "side", "sign", "place", "token", "token_id", "product", "sign_order"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(order=[side for pair in CIRCUITS.values() for side in pair].index(side))


def _values(s: Float[Tensor, " d_head"], d_model: int) -> pd.DataFrame:
    """The singular values with their shares, and the shares of random factors."""
    generator = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(RANDOM_DRAWS):
        left, right = (torch.randn(d_model, len(s), generator=generator) for _ in range(2))
        # R of both sides: the singular values of a d_model² product from d_head² numbers.
        random = torch.linalg.svdvals(
            torch.linalg.qr(left.double(), mode="r").R @ torch.linalg.qr(right.double(), mode="r").R.T
        ).square()
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
