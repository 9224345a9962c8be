"""The mask that an attention of transformers has of its own, when it is called with rows that begin anywhere.

GPT-Neo keeps a matrix of which key each query may see (causal, local in every second layer) and reads it by the count
of keys. Rows that share recorded keys count otherwise: what the matrix says goes into the mask that such rows are
given, and while they pass it says nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor


def own_mask(attention: Any, length: int) -> Bool[Tensor, "query key"] | None:
    """Which key each query may see by an attention's own matrix; None where it has none."""
    mask = getattr(getattr(attention, "original_component", None), "bias", None)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
        return None
    return mask[0, 0, :length, :length]


@contextlib.contextmanager
def without_own_mask(attention: Any, n_keys: int) -> Iterator[None]:
    """Let an attention's own matrix allow every key for the length of a call."""
    if own_mask(attention, 1) is None:
        yield
        return
    buffers = attention.original_component._buffers
    kept = buffers["bias"]
    buffers["bias"] = kept.new_ones(1, 1, 1, 1).expand(1, 1, n_keys, n_keys)
    try:
        yield
    finally:
        buffers["bias"] = kept
