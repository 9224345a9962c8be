"""Attention of rows at any positions, where a model takes no keys and values of the positions before.

Step by step (`OwnAttention`). TransformerLens's own models and HookedTransformers compute attention of whole prompts:
they take no keys and values of positions before, or count positions from the first token they are given. So that a row
can begin anywhere, the steps are taken one by one, through the model's own projections and hooks:

    q, k, v = projections of the normed residual stream           hook_q, hook_k, hook_v
    q, k    = rotated by their own positions                      where positions are rotary
    scores  = cap(q · k / scale) - slope (query - key)            the slopes where positions are ALiBi
    pattern = softmax(scores + mask)                              hook_pattern
    z       = pattern · v                                         hook_z
    out     = z · W_O + b_O

What a model does besides is seen by comparison: a sweep sends a row without edits through, whose logits must be those
of the model's own run.

Without a mask of its own (`without_own_mask`). GPT-Neo keeps a matrix of which key each query may see (causal, local in
every second layer) and reads it by the count of keys. Rows that share recorded keys count otherwise: what the matrix
says goes into the mask that such rows are given, and while they pass it says nothing.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.kernels.elementwise import softmax


class OwnAttention(ABC):
    """The attention of one layer.

    Attributes:
        module: what computes attention when the model runs: the same, or what a bridge wraps.
    """

    scale: float
    soft_cap: float

    def __init__(self, attention: Any):
        self.attention = self.module = attention

    def __call__(
        self,
        normed: Float[Tensor, "row position d_model"],
        positions: Int[Tensor, "row position"],
        mask: Float[Tensor, "row head_or_one position key"],
        prefix: Any,
        kept: Int[Tensor, "row kept"] | None = None,
    ) -> Float[Tensor, "row _ d_model"]:
        """Return what attention gives, before a norm after it; with `kept` at these of a row's places only.

        `prefix` is the keys and values of the positions before a row (`headwater.models.blocks.SharedPrefix`), if any.
        """
        queries_of, queries_at = normed, positions
        if kept is not None:
            queries_of = normed.gather(1, kept[:, :, None].expand(-1, -1, normed.shape[2]))
            queries_at = positions.gather(1, kept)
            mask = mask.gather(2, kept[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        q, k, v = self.project(queries_of, normed)
        q, keys, values = self.turned(q, queries_at).transpose(1, 2), *self.remembered(k, v, positions)
        if prefix is not None:
            keys, values = prefix.update(keys, values)
        repeats = q.shape[1] // keys.shape[1]
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        scores = q @ keys.transpose(-2, -1) / self.scale
        if self.soft_cap > 0:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if (slopes := self.slopes()) is not None:
            n_before = keys.shape[2] - positions.shape[1]
            before = torch.arange(n_before, device=positions.device).expand(len(positions), -1)
            keys_at = torch.cat([before, positions], 1)[:, None, None, :]
            # Later keys, where attention sees them at all, get no slope, as in TransformerLens.
            scores = scores + slopes[:, None, None] * (keys_at - queries_at[:, None, :, None]).clamp_max(0)
        pattern = self.attention.hook_pattern(softmax(scores + mask)).to(values.dtype)
        return self.output((pattern @ values).transpose(1, 2))

    def of_prompts(self, normed: Float[Tensor, "row position d_model"]) -> Float[Tensor, "row position d_model"]:
        """Return what attention gives of whole prompts."""
        n_rows, length, _ = normed.shape
        seen = self.visible(length)
        mask = torch.zeros(seen.shape, dtype=normed.dtype, device=normed.device)
        mask = mask.masked_fill_(~seen, torch.finfo(mask.dtype).min).expand(n_rows, 1, -1, -1)
        return self(normed, torch.arange(length, device=normed.device).expand(n_rows, -1), mask, None)

    @abstractmethod
    def forward(self, *args: Any, **options: Any) -> Any:
        """Stand in for the forward of `module`, called with whole prompts as the model calls it."""

    def remembered(
        self,
        k: Float[Tensor, "row position kv_head d_head"],
        v: Float[Tensor, "row position kv_head d_head"],
        positions: Int[Tensor, "row position"],
    ) -> tuple[Float[Tensor, "row kv_head position d_head"], Float[Tensor, "row kv_head position d_head"]]:
        """Return keys and values as queries read them, and as a prefix keeps them."""
        return self.turned(k, positions).transpose(1, 2), v.transpose(1, 2)

    @abstractmethod
    def project(
        self, queries_of: Float[Tensor, "row kept d_model"], normed: Float[Tensor, "row position d_model"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and keys and values of all places, `row position head d_head`, through their hooks."""

    @abstractmethod
    def turned(self, x: Float[Tensor, "row position head d_head"], positions: Int[Tensor, "row position"]) -> Tensor:
        """Rotate queries or keys by their positions; where positions are not rotary, return them."""

    def past_hook(self, k: Float[Tensor, "row position kv_head d_head"]) -> Tensor:
        """Return keys, as they pass at their hook, as `project` gives them."""
        return k

    def slopes(self) -> Float[Tensor, " head"] | None:
        """By how much the score of each head falls per token of distance; None without ALiBi."""
        return None

    @abstractmethod
    def output(self, z: Float[Tensor, "row position head d_head"]) -> Float[Tensor, "row position d_model"]:
        """Return what the outputs of the heads add, by way of the hook of `z`."""

    @abstractmethod
    def visible(self, length: int) -> Bool[Tensor, "query key"]:
        """Which keys each query of a prompt sees."""


class _NativeAttention(OwnAttention):
    """Attention of a TransformerLens-native model, inside its bridge."""

    def __init__(self, attention: Any):
        super().__init__(attention)
        self.inner = self.module = attention.original_component
        self.scale, self.soft_cap = float(self.inner.scale), float(self.inner.attn_scores_soft_cap)

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return self.of_prompts(hidden_states), None  # in place of the pattern, at which nobody looks there

    def project(self, queries_of: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.attention.q(queries_of), self.attention.k(normed), self.attention.v(normed)
        split = (*normed.shape[:2], -1, self.inner.d_head)
        return q.view(*queries_of.shape[:2], -1, self.inner.d_head), k.view(split), v.view(split)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.inner.rotary is None:
            return x
        turned = x.transpose(1, 2)
        return self.inner.rotary.apply_rope(turned, turned, position_ids=positions)[0].transpose(1, 2)

    def output(self, z: Tensor) -> Tensor:
        return self.attention.o(z.flatten(2))

    def visible(self, length: int) -> Tensor:
        seen = torch.ones(length, length, dtype=torch.bool, device=self.inner.causal_mask.device)
        return ~self.inner.causal_mask[:length, :length] if self.inner.causal else seen


class _HookedAttention(OwnAttention):
    """Attention of a HookedTransformer (transformer-lens 3.9)."""

    def __init__(self, attention: Any):
        super().__init__(attention)
        self.scale, self.soft_cap = float(attention.attn_scale), float(attention.cfg.attn_scores_soft_cap)
        self._rotary = attention.cfg.positional_embedding_type == "rotary"
        self._alibi = attention.cfg.positional_embedding_type == "alibi"
        # All heads in one product, in the layout of a linear map; made once, since it is a copy of W_O.
        self._output = attention.W_O.flatten(0, 1).T.contiguous()

    def forward(self, query_input: Tensor, *_: Any, **__: Any) -> Any:
        return self.of_prompts(query_input)

    def project(self, queries_of: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.calculate_qkv_matrices(queries_of, normed, normed)

    def past_hook(self, k: Tensor) -> Tensor:
        return self.attention._apply_qk_norm(k, self.attention.k_norm) if self.attention.cfg.use_qk_norm else k

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        if not self._rotary:
            return x
        n = self.attention.cfg.rotary_dim
        cos, sin = (table[positions][:, :, None] for table in (self.attention.rotary_cos, self.attention.rotary_sin))
        part = x[..., :n]
        return torch.cat([part * cos + self.attention.rotate_every_two(part) * sin, x[..., n:]], -1)

    def slopes(self) -> Tensor | None:
        if not self._alibi:
            return None
        # For two tokens: the entry of the second query at the first key is one token's distance times minus the slope.
        bias = self.attention.create_alibi_bias(self.attention.cfg.n_heads, 2, self._output.device)
        return -bias[:, 1, 0]

    def output(self, z: Tensor) -> Tensor:
        z = self.attention.hook_z(z)
        return torch.nn.functional.linear(z.flatten(2), self._output, self.attention.b_O)

    def visible(self, length: int) -> Tensor:
        seen = torch.ones(length, length, dtype=torch.bool, device=self._output.device)
        if self.attention.cfg.attention_dir != "causal":
            return seen
        return self.attention._make_causal_mask(length, length, 0, self._output.device)[0, 0]


def own_attention(blocks: list[Any]) -> list[OwnAttention] | None:
    """Return the attention of each block of a model of TransformerLens's own; None for any other model."""
    inner = [getattr(block.attn, "original_component", None) for block in blocks]
    if all(getattr(attention, "accepts_pattern_fn", False) for attention in inner):
        return [_NativeAttention(block.attn) for block in blocks]
    if all(hasattr(block.attn, "calculate_qkv_matrices") for block in blocks):
        return [_HookedAttention(block.attn) for block in blocks]
    return None


def own_mask(attention: Any, length: int) -> Bool[Tensor, "query key"] | None:
    """Which key each query may see by an attention's own matrix; None where it has none."""
    mask = getattr(getattr(attention, "original_component", None), "bias", None)
    # A linear map calls its own vector `bias` too; GPT-Neo's matrix is boolean, with axes for batch and head.
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
    # GPT-Neo slices it by the number of keys on both axes; expanded, it takes one byte.
    buffers["bias"] = kept.new_ones(1, 1, 1, 1).expand(1, 1, n_keys, n_keys)
    try:
        yield
    finally:
        buffers["bias"] = kept
