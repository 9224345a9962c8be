"""The tokens that attention heads promote: the OV maps of one layer's heads, and the rank of a target in them.

A head that attends to a source s writes m_s = x_s W_V W_O W_U, one logit for each token of the vocabulary (Elhelo &
Geva, ACL 2025). This file states the formula: the whole map in float64, then counts. `ov_blocked` and `ov_sweep`
compute the same without the map.

    rank of t in m_s        greater = #{v != t : m_s[v] > m_s[t]},   smaller = #{v != t : m_s[v] < m_s[t]}
    t in the top k          greater < k
    t in the bottom k       smaller < k

Ties. Tokens with equal logits must tie in whatever order the sums are taken, so "greater" means greater by more than
the rounding of the formula itself in float64, `tie` = 2^-46 |x_s| |W_V| |W_O| max_v |W_U[:, v]|. A token that ties with
the target is neither greater nor smaller.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

HeadNumber = TypeVar("HeadNumber", int, Tensor)
TIE = 2.0**-46
"""Float64 rounding of the OV formula, relative to the product of its factors' norms."""


@dataclass(frozen=True)
class OVMaps:
    """The OV maps x W_V W_O W_U of one layer's heads, as their factors, in the model's dtype."""

    x: Float[Tensor, "source d_model"]
    """Input of the heads for each source token."""
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    W_U: Float[Tensor, "d_model d_vocab"]
    longest: float
    """The norm of W_U's longest column (`longest_column`), the same for every layer of a model."""
    first: Int[Tensor, " token"]
    """Tokens to compare first (`first_tokens`), the same for every layer."""

    @property
    def n_heads(self) -> int:
        """Number of query heads."""
        return self.W_O.shape[0]

    @property
    def d_vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.W_U.shape[1]

    def value_head(self, head: HeadNumber) -> HeadNumber:
        """Return the value head that a query head, or each of several, reads; grouped query heads share one."""
        return head * self.W_V.shape[0] // self.n_heads

    @cached_property
    def scale(self) -> Float[Tensor, "head source"]:
        """|x_s| |W_V| |W_O| max_v |W_U[:, v]| in float64: an upper bound on each term of the formula's sums."""
        # Frobenius norms: no factor lengthens a row by more than its norm, so that no logit is larger.
        values = torch.linalg.vector_norm(self.W_V, dim=(1, 2), dtype=torch.float64)
        outputs = torch.linalg.vector_norm(self.W_O, dim=(1, 2), dtype=torch.float64)
        # Query heads that share a value head are neighbours.
        heads = values.repeat_interleave(len(outputs) // len(values)) * outputs * self.longest
        return heads[:, None] * torch.linalg.vector_norm(self.x, dim=1, dtype=torch.float64)

    @property
    def tie(self) -> Float[Tensor, "head source"]:
        """Largest difference at which two logits of a row count as equal."""
        return TIE * self.scale


def longest_column(W_U: Float[Tensor, "d_model d_vocab"]) -> float:
    """Return the norm of the longest column of the unembedding."""
    # Tile by tile: W_U as float32 would take twice the memory of a bfloat16 model's W_U.
    tiles = W_U.split(8192, dim=1)
    return max(torch.linalg.vector_norm(tile.float(), dim=0).max().item() for tile in tiles)


def first_tokens(W_U: Float[Tensor, "d_model d_vocab"], n: int) -> Int[Tensor, " token"]:
    """Choose tokens that often have the largest and smallest logits: half of them those farthest from the mean column.

    The mean column is subtracted because it shifts all logits equally. The other half are evenly spaced, since the
    farthest may all lie in one direction (tokens that were never trained).
    """
    n, mean = min(n, W_U.shape[1]), W_U.mean(1, keepdim=True, dtype=torch.float32)
    lengths = torch.cat([torch.linalg.vector_norm(tile.float() - mean, dim=0) for tile in W_U.split(8192, dim=1)])
    farthest = lengths.topk(n // 2).indices
    # Without the farthest, so that no token is compared twice.
    others = torch.ones_like(lengths, dtype=torch.bool).index_fill(0, farthest, False).nonzero()[:, 0]
    n_others = n - len(farthest)
    return torch.cat([farthest, others[:: max(1, len(others) // max(1, n_others))][:n_others]])


def ov_logits(maps: OVMaps) -> Float[Tensor, "head source d_vocab"]:
    """Return the whole maps in float64: m = x W_V W_O W_U."""
    W_V = maps.W_V.repeat_interleave(maps.n_heads // maps.W_V.shape[0], dim=0)
    z = einsum(maps.x.double(), W_V.double(), "source d_model, head d_model d_head -> head source d_head")
    y = einsum(z, maps.W_O.double(), "head source d_head, head d_head d_model -> head source d_model")
    return einsum(y, maps.W_U.double(), "head source d_model, d_model d_vocab -> head source d_vocab")


def ranks(
    maps: OVMaps, source: Int[Tensor, " pair"], target: Int[Tensor, " pair"]
) -> tuple[Int[Tensor, "head pair"], Int[Tensor, "head pair"]]:
    """Count the tokens with a greater and a smaller logit than each pair's target; `source` are rows of `maps.x`."""
    rows = ov_logits(maps)[:, source]
    index = target.expand(maps.n_heads, -1)[..., None]
    own, tie = rows.gather(-1, index), maps.tie[:, source, None]
    # NaN is neither greater nor smaller, so that no target counts itself.
    rows = rows.scatter(-1, index, torch.nan)
    return (rows > own + tie).sum(-1), (rows < own - tie).sum(-1)


def topk_membership(
    maps: OVMaps, source: Int[Tensor, " pair"], target: Int[Tensor, " pair"], k: Int[Tensor, " pair"]
) -> tuple[Bool[Tensor, "head pair"], Bool[Tensor, "head pair"]]:
    """Return whether each pair's target is among the k largest, and among the k smallest, logits of its source."""
    greater, smaller = ranks(maps, source, target)
    return greater < k, smaller < k


def topk_hits(
    maps: OVMaps, source: Int[Tensor, " item"], target: Int[Tensor, " pair"], k: int
) -> tuple[Bool[Tensor, "head item pair"], Bool[Tensor, "head item pair"]]:
    """Return the same for every source with every target of a relation: the hits of shuffled targets."""
    n, m = len(source), len(target)
    top, bottom = topk_membership(
        maps, source.repeat_interleave(m), target.repeat(n), torch.full((n * m,), k, device=target.device)
    )
    return top.unflatten(-1, (n, m)), bottom.unflatten(-1, (n, m))
