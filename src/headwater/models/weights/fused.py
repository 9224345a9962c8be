"""Queries, keys and values of all heads in one tensor: taken apart by head, and put together again.

    parts     all queries, then all keys, then all values                        q q q q | k k | v v
    groups    each key-value head with the query heads that read it              q q k v | q q k v

One axis of the tensor is joined so, the other is d_model; a bias has the joined axis alone. Where every query head has
its own key and value, "groups" is (head three d_head).
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from headwater.models.families import FusedQKV
from headwater.models.shape import ModelShape


def taken_apart(joined: Tensor, fused: FusedQKV, shape: ModelShape) -> list[Tensor]:
    """Return queries, keys and values, each by head: `head d_model d_head`, of a bias `head d_head`.

    Args:
        joined: the weight or bias as stored.
        fused: how it is joined.
        shape: the model's sizes.
    """
    if joined.ndim == 2 and fused.d_model_first:
        joined = joined.T
    parts = _split(joined, fused, shape)
    return parts if joined.ndim == 1 else [part.transpose(1, 2) for part in parts]


def _split(joined: Float[Tensor, "rows ..."], fused: FusedQKV, shape: ModelShape) -> list[Tensor]:
    heads = shape.n_heads, shape.n_kv_heads, shape.n_kv_heads
    if fused.order == "parts":
        parts = joined.split([count * shape.d_head for count in heads])
        return [part.unflatten(0, (count, shape.d_head)) for part, count in zip(parts, heads, strict=True)]
    groups = joined.unflatten(0, (shape.n_kv_heads, shape.group_size + 2, shape.d_head))
    return [groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]]


def put_together(parts: list[Tensor], fused: FusedQKV, shape: ModelShape) -> Tensor:
    """Return the tensor that `taken_apart` takes apart into these."""
    parts = [part if part.ndim == 2 else part.transpose(1, 2) for part in parts]
    if fused.order == "parts":
        joined = torch.cat([part.flatten(0, 1) for part in parts])
    else:
        queries = rearrange(parts[0], "(group one) ... -> group one ...", group=shape.n_kv_heads)
        joined = torch.cat([queries, *(part[:, None] for part in parts[1:])], 1).flatten(0, 2)
    return joined.T if joined.ndim == 2 and fused.d_model_first else joined
