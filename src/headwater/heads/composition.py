"""Composition of heads: how much of what a later head reads is what an earlier head writes, from parameters alone.

Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021. With rows as vectors, W_OV = W_V W_O of the
earlier head (the writer) and W_QK = W_Q W_Kᵀ, W_OV of the later one (the reader):

    q   ‖W_OV W_QK‖ / ‖W_OV‖ ‖W_QK‖
    k   ‖W_OV W_QKᵀ‖ / ‖W_OV‖ ‖W_QK‖
    v   ‖W_OV W_OV'‖ / ‖W_OV‖ ‖W_OV'‖

in Frobenius norms: between 0 and 1, and 1 where the reader reads the one direction that the writer writes.

1. A product A B of d_model × d_head factors keeps its norm when A's columns are made orthonormal: with A = Q R,
   ‖A B‖ = ‖R B‖. So a writer is its R W_O (d_head × d_model), a reader its W_Q L (d_model × d_head), and a score the
   norm of one d_head × d_head product; nothing of size d_model × d_model is formed.
2. The reader reads through its norm: the gain is folded in. A writer's values are read through its own norm likewise.
   What norms do beside their gain (scales, centring, a norm after the attention), rotation and biases are left out.
3. Null: the same two matrices, one turned at random against the other in the residual stream. With g an entry of a
   random rotation of d dimensions, E g² = 1/d, so the squared score has the mean 1/d whatever the singular values; its
   variance follows from theirs and from the fourth moments of g (Collins & Śniady 2006):
   E g⁴ = 3/(d(d+2)), of two in a row or column 1/(d(d+2)), of two apart (d+1)/((d-1)d(d+2)).
   `expected` is 1/√d and `z` how many standard deviations the squared score lies from 1/d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.loading import weights_of
from headwater.models.weights.weight_source import HeadWeights, WeightSource
from headwater.options import checked_flag, checked_name, checked_several, one_or_several
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.figure_options import Size
from headwater.runs.findings import each_row
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("q", "k", "v")
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
        """Draw the scores of one kind as a map, earlier heads by later heads; by default a panel for each.

        Args:
            ax: where to draw one kind; default: a new figure.
            title: in place of the figure's own.
            figsize: of a new figure, width and height in inches.
            kind: "q", "k" or "v".
        """
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
    kinds: str | Sequence[str] = KINDS,
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
    wanted = [checked_name("kinds", kind, KINDS) for kind in checked_several("kinds", one_or_several(kinds), "a list")]
    chosen = tuple(kind for kind in KINDS if kind in wanted) or (checked_name("kinds", kinds, KINDS),)
    norm_gain = checked_flag("norm_gain", norm_gain)
    weights = weights_of(model, device)

    def work(run: Run) -> Composition:
        writers: list[_Side] = []
        parts = []
        n_layers = weights.shape.n_layers
        with run.bar("Composing heads", "layer", n_layers) as bar:
            for layer in range(n_layers):
                factors = weights.layer(layer)
                readers = {kind: _reader(factors, kind, norm_gain) for kind in chosen}
                parts += [
                    _rows(kind, earlier, writer, layer, reader)
                    for kind, reader in readers.items()
                    for earlier, writer in enumerate(writers)
                ]
                # After the layer's own readers: heads of one layer do not read one another.
                writers.append(_writer(factors, norm_gain))
                bar.update()
        return Composition(_table(parts, chosen), run.record)

    options = {"kinds": list(chosen), "norm_gain": norm_gain}
    return run_or_resume(Composition, "composition_scores", weights, options, work, out=out, progress=progress)


def _writer(factors: HeadWeights, norm_gain: bool) -> _Side:
    """What each head writes: R W_O, with W_V = Q R."""
    return _side(factors.expand_kv(_read_by(factors, factors.W_V, norm_gain)), factors.W_O)


def _reader(factors: HeadWeights, kind: str, norm_gain: bool) -> _Side:
    """What each head reads for one kind, as the transposed product: what it does with it comes first."""
    W_Q, W_K, W_V = (_read_by(factors, W, norm_gain) for W in (factors.W_Q, factors.W_K, factors.W_V))
    if kind == "v":
        return _side(factors.W_O.transpose(1, 2), factors.expand_kv(W_V).transpose(1, 2))
    one, other = (W_Q, factors.expand_kv(W_K)) if kind == "q" else (factors.expand_kv(W_K), W_Q)
    return _side(other, one.transpose(1, 2))


def _read_by(factors: HeadWeights, W: Float[Tensor, "head d_model d_head"], norm_gain: bool) -> Tensor:
    return W * factors.norm_gain[:, None] if norm_gain else W


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
    """Return the standard deviation of the squared score under random rotations of d dimensions.

    Args:
        p: the writers' Σ s⁴ / (Σ s²)².
        q: the readers'.
        d: the width of the residual stream.
    """
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


def _table(parts: Sequence[dict[str, np.ndarray]], kinds: Sequence[str]) -> pd.DataFrame:
    if not parts:
        raise InputError("A model of one layer has no head after another: there is nothing to compose.")
    table = pd.DataFrame({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    order = table["kind"].map({kind: place for place, kind in enumerate(kinds)})
    return table.iloc[np.argsort(order.to_numpy(), kind="stable")].reset_index(drop=True)
