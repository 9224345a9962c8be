"""How the factors of a block's heads are cut from the tensors of a checkpoint, as the row of its family says.

Queries, keys and values of all heads in one tensor: taken apart by head, and put together again.

    parts     all queries, then all keys, then all values                        q q q q | k k | v v
    groups    each key-value head with the query heads that read it              q q k v | q q k v

One axis of the tensor is joined so, the other is d_model; a bias has the joined axis alone. Where every query head has
its own key and value, "groups" is (head three d_head).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from headwater.models.families import Family, FusedQKV
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


Read: TypeAlias = Callable[[str], Tensor]
"""Reads one tensor by its name relative to the base model."""


def query_key_value(read: Read, family: Family, shape: ModelShape, attention: str, part: str) -> list[Tensor]:
    """Weights or biases of the queries, keys and values of one attention module, each split into its heads.

    Args:
        read: reads a tensor by name.
        family: the architecture's.
        shape: the model's sizes.
        attention: the prefix of the attention module's tensors.
        part: "weight" or "bias".
    """
    if family.fused:
        return taken_apart(read(f"{attention}{family.fused.name}.{part}"), family.fused, shape)
    heads = shape.n_heads, shape.n_kv_heads, shape.n_kv_heads
    pattern = "(head d_head) -> head d_head" if part == "bias" else "(head d_head) d_model -> head d_model d_head"
    return [
        rearrange(read(f"{attention}{name}.{part}"), pattern, head=count)
        for name, count in zip(("q_proj", "k_proj", "v_proj"), heads, strict=True)
    ]


def head_factors(
    read: Read, names: frozenset[str], family: Family, shape: ModelShape, layer: int
) -> dict[str, Tensor | None]:
    """The factors of one layer's heads, by the field names of `HeadWeights`; a bias the model lacks is None.

    Args:
        read: reads a tensor by name.
        names: the names of all tensors there are.
        family: the architecture's.
        shape: the model's sizes.
        layer: which block.
    """
    attention = f"{family.block(layer)}{family.attention}."
    W_Q, W_K, W_V = query_key_value(read, family, shape, attention, "weight")
    first_bias = f"{attention}{family.fused.name if family.fused else 'q_proj'}.bias"
    has_bias = first_bias in names
    b_Q, b_K, b_V = query_key_value(read, family, shape, attention, "bias") if has_bias else (None, None, None)
    output_bias = f"{attention}{family.output}.bias"
    W_O = _output(read, family, shape, layer)
    return {
        "W_Q": W_Q,
        "W_K": W_K,
        "W_V": W_V,
        "W_O": W_O,
        "b_Q": b_Q,
        "b_K": b_K,
        "b_V": b_V,
        "b_O": read(output_bias) if output_bias in names else None,
        "norm_gain": _attention_gain(read, names, family, layer, W_O),
    }


def ov_factors(read: Read, names: frozenset[str], family: Family, shape: ModelShape, layer: int) -> dict[str, Tensor]:
    """W_V, W_O and the gain of the norm in front, by the field names of `OVWeights`; nothing else that is stored apart.

    Args:
        read: reads a tensor by name.
        names: the names of all tensors there are.
        family: the architecture's.
        shape: the model's sizes.
        layer: which block.
    """
    attention = f"{family.block(layer)}{family.attention}."
    if family.fused:
        W_V = query_key_value(read, family, shape, attention, "weight")[2]
    else:
        stored = read(f"{attention}v_proj.weight")
        W_V = rearrange(stored, "(head d_head) d_model -> head d_model d_head", head=shape.n_kv_heads)
    W_O = _output(read, family, shape, layer)
    return {"W_V": W_V, "W_O": W_O, "norm_gain": _attention_gain(read, names, family, layer, W_O)}


def _output(read: Read, family: Family, shape: ModelShape, layer: int) -> Tensor:
    d_model_last = family.fused is not None and family.fused.d_model_first
    stored = "(head d_head) d_model" if d_model_last else "d_model (head d_head)"
    weight = read(f"{family.block(layer)}{family.attention}.{family.output}.weight")
    return rearrange(weight, f"{stored} -> head d_head d_model", head=shape.n_heads)


def _attention_gain(read: Read, names: frozenset[str], family: Family, layer: int, like: Tensor) -> Tensor:
    """The gain of the norm in front of attention; ones like a W_O where there is no norm (OLMo 2), or no gain."""
    norm = family.norms.before_attention
    return norm_gain(read, names, family, None if norm is None else f"{family.block(layer)}{norm}", like)


def norm_gain(read: Read, names: frozenset[str], family: Family, norm: str | None, like: Tensor) -> Tensor:
    """The gain of a norm; ones, as many as the last axis of `like` has, where there is none or it has none (OLMo 1)."""
    if norm is None or f"{norm}.weight" not in names:
        return like.new_ones(like.shape[-1])
    return read(f"{norm}.weight") + family.gain_offset
