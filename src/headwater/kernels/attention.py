"""Saliency of attention edges: how much a number L depends on each weight of an attention pattern (Wang et al. 2023).

    S(i, j) = |A(i, j) · ∂L/∂A(i, j)|        averaged over heads; i the query, j the key

`saliency_reference` is this formula, with the gradient from autograd at a stored pattern: T × T numbers per head,
twice. A head's output is z(i) = Σ_j A(i, j) v(j), so with g(i) = ∂L/∂z(i)

    A(i, j) · ∂L/∂A(i, j) = A(i, j) · ⟨g(i), v(j)⟩

and `edge_saliency` computes only the requested rows and columns. The keys and values of grouped heads are read without
copies: query heads h · group_size ... share key-value head h.

`reweighted` multiplies edges by 1 + s, differentiably in s; a gradient at an edge is the first-order effect of s.
"""

from typing import Literal, TypeAlias

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from headwater.axes import Pattern

Heads: TypeAlias = Literal["mean_abs", "abs_mean"]
"""How to reduce over heads: the mean of the absolute values, or the absolute value of the mean."""
Pairs: TypeAlias = Literal["mean", "sum"]


def saliency_reference(
    pattern: Pattern, gradient: Pattern, heads: Heads = "mean_abs"
) -> Float[Tensor, "batch query key"]:
    """Return S at every edge from stored patterns and the gradients at them."""
    flow = einsum(pattern, gradient, "batch head query key, batch head query key -> batch head query key")
    return _over_heads(flow, heads)


def edge_saliency(
    pattern: Float[Tensor, "batch head row column"],
    gradient: Float[Tensor, "batch row head d_head"],
    values: Float[Tensor, "batch kv_head column d_head"],
    heads: Heads = "mean_abs",
) -> Float[Tensor, "batch row column"]:
    """Return S at some rows (queries) and columns (keys), in float32 or wider.

    Args:
        pattern: A at these rows and columns.
        gradient: ∂L/∂z of each query head at the rows.
        values: v of each key-value head at the columns.
        heads: how heads are averaged.
    """
    wide = torch.promote_types(pattern.dtype, torch.float32)
    n_kv_heads = values.shape[1]
    # kv is the outer factor: the query heads of one key-value head are neighbours, as in transformers' repeat_kv.
    grouped = rearrange(gradient, "batch row (kv group) d_head -> batch kv group row d_head", kv=n_kv_heads)
    slopes = einsum(
        # float16 has nothing below 6e-8: products of small gradients with values would underflow to 0.
        grouped.to(wide),
        values.to(wide),
        "batch kv group row d_head, batch kv column d_head -> batch kv group row column",
    )
    flow = rearrange(slopes, "batch kv group row column -> batch (kv group) row column") * pattern
    return _over_heads(flow, heads)


def over_pairs(
    saliency: Float[Tensor, "batch row column"], edges: Bool[Tensor, "batch row column"], pairs: Pairs = "mean"
) -> Float[Tensor, " batch"]:
    """Return the mean or the sum of S over a set of edges; NaN where the set is empty."""
    # Not a product with the mask: a non-finite value outside the set would reach the sum as NaN.
    total, n_edges = torch.where(edges, saliency, 0).sum((1, 2)), edges.sum((1, 2))
    # Divided by True a sum is unchanged; divided by False an empty set is NaN, where its sum 0 would mean no saliency.
    return total / (n_edges if pairs == "mean" else n_edges > 0)


def reweighted(
    pattern: Pattern,
    rows: Bool[Tensor, "batch query"],
    columns: Bool[Tensor, "batch key"],
    scale: Float[Tensor, "#batch #head"] | float,
) -> Pattern:
    """Return a pattern whose edges from `columns` (read) to `rows` (reading) are multiplied by 1 + scale.

    The other weights are unchanged, and nothing is renormalised; gradients reach `scale`. As a hook:
    `(f"blocks.{layer}.attn.hook_pattern", lambda pattern, hook: reweighted(pattern, rows, columns, scale))`.

    Args:
        pattern: weights after the softmax; its queries may be only the last few positions.
        rows: True at the queries that read, among the queries of the pattern.
        columns: True at the keys that are read.
        scale: one number, one per example `[batch, 1]`, or one per example and head.
    """
    edges = rearrange(rows, "batch query -> batch 1 query 1") & rearrange(columns, "batch key -> batch 1 1 key")
    # Queries and keys are the last two axes of a pattern; [batch, 1] broadcasts over heads.
    factor = scale[..., None, None] if isinstance(scale, Tensor) else scale
    return pattern * (1 + factor * edges.to(pattern))


def _over_heads(flow: Float[Tensor, "batch head row column"], heads: Heads) -> Float[Tensor, "batch row column"]:
    return flow.abs().mean(1) if heads == "mean_abs" else flow.mean(1).abs()
