"""How each architecture names and arranges the tensors of a checkpoint.

Names are relative to the base model, as in `h.0.attn.c_attn.weight`; the prefix that a checkpoint puts in front of them
(`transformer.`, `model.`, `language_model.model.`, or none) is found when it is opened. A new architecture whose heads
are stored in one of the ways below is one more line of `LAYOUTS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers import AutoModelForCausalLM

from headwater.models.shape import ModelShape, text_config

UNEMBEDDING = "lm_head.weight"
UNEMBEDDING_NAMES = (UNEMBEDDING, "embed_out.weight")
"""What checkpoints call the unembedding, wherever its prefix ends. A head's bias (Phi) is no part of W_U."""

Read = Callable[[str], Tensor]
"""Reads one tensor by its name relative to the base model."""


@dataclass(frozen=True)
class FusedQKV:
    """Queries, keys and values of all heads in one tensor.

    Attributes:
        name: the module that holds them.
        axes: the order of the joined axis, for einops; `three` counts query, key, value.
        d_model_first: whether the weight is stored as GPT-2's Conv1D stores it, input axis first.
    """

    name: str
    axes: str
    d_model_first: bool

    def pattern(self) -> str:
        """The weight's axes in the checkpoint."""
        return f"d_model {self.axes}" if self.d_model_first else f"{self.axes} d_model"


@dataclass(frozen=True)
class Layout:
    """Where one architecture keeps what the analyses read.

    Attributes:
        blocks: the list of blocks.
        embedding: the token embedding.
        final_norm: the norm in front of the unembedding.
        attention: the attention module within a block.
        attention_norm: the norm in front of attention.
        mlp_norms: the norm in front of the MLP and, where there is one, the norm behind it.
        output: the output projection within attention.
        fused: how queries, keys and values are joined; None when `q_proj`, `k_proj`, `v_proj` are apart.
        gain_offset: 1 where the norm multiplies by 1 + weight (Gemma), else 0.
        scaled_embedding: whether the residual stream receives the embedding times √d_model (Gemma).
    """

    blocks: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    mlp_norms: tuple[str, ...] = ("post_attention_layernorm",)
    output: str = "o_proj"
    fused: FusedQKV | None = None
    gain_offset: float = 0.0
    scaled_embedding: bool = False

    def block(self, layer: int) -> str:
        """The prefix of one block's tensors."""
        return f"{self.blocks}.{layer}."


LLAMA = Layout()
GEMMA = Layout(
    mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"), gain_offset=1.0, scaled_embedding=True
)
LAYOUTS = {
    "gpt2": Layout(
        blocks="h",
        embedding="wte",
        final_norm="ln_f",
        attention="attn",
        attention_norm="ln_1",
        mlp_norms=("ln_2",),
        output="c_proj",
        fused=FusedQKV("c_attn", "(three head d_head)", d_model_first=True),
    ),
    "gpt_neox": Layout(
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        output="dense",
        fused=FusedQKV("query_key_value", "(head three d_head)", d_model_first=False),
    ),
    "phi": Layout(final_norm="final_layernorm", mlp_norms=("input_layernorm",), output="dense"),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
}


def layout_of(config: Any) -> Layout:
    """The layout of a supported architecture (`shape_of` refuses the others)."""
    return LAYOUTS[text_config(config).model_type]


def expected_tensors(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter a checkpoint with this config holds; a tied unembedding is not stored."""
    config = text_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {
        name.removeprefix(f"{model.base_model_prefix}."): tuple(parameter.shape)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    if config.tie_word_embeddings:
        del shapes[UNEMBEDDING]
    return shapes


def query_key_value(read: Read, layout: Layout, attention: str, heads: tuple[int, int, int], part: str) -> list[Tensor]:
    """Weights or biases of the queries, keys and values of one attention module, each split into its heads.

    Args:
        read: reads a tensor by name.
        layout: the architecture's.
        attention: the prefix of the attention module's tensors.
        heads: the number of query, key and value heads.
        part: "weight" or "bias".
    """
    if layout.fused:
        joined = read(f"{attention}{layout.fused.name}.{part}")
        if part == "bias":
            return list(rearrange(joined, f"{layout.fused.axes} -> three head d_head", three=3, head=heads[0]))
        split = f"{layout.fused.pattern()} -> three head d_model d_head"
        return list(rearrange(joined, split, three=3, head=heads[0]))
    pattern = "(head d_head) -> head d_head" if part == "bias" else "(head d_head) d_model -> head d_model d_head"
    return [
        rearrange(read(f"{attention}{name}.{part}"), pattern, head=count)
        for name, count in zip(("q_proj", "k_proj", "v_proj"), heads, strict=True)
    ]


def head_factors(
    read: Read, names: frozenset[str], layout: Layout, shape: ModelShape, layer: int
) -> dict[str, Tensor | None]:
    """The factors of one layer's heads, by the field names of `HeadWeights`; a bias the model lacks is None.

    Args:
        read: reads a tensor by name.
        names: the names of all tensors there are.
        layout: the architecture's.
        shape: the model's sizes.
        layer: which block.
    """
    attention = f"{layout.block(layer)}{layout.attention}."
    heads = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
    W_Q, W_K, W_V = query_key_value(read, layout, attention, heads, "weight")
    first_bias = f"{attention}{layout.fused.name if layout.fused else 'q_proj'}.bias"
    has_bias = first_bias in names
    b_Q, b_K, b_V = query_key_value(read, layout, attention, heads, "bias") if has_bias else (None, None, None)
    output_bias = f"{attention}{layout.output}.bias"
    return {
        "W_Q": W_Q,
        "W_K": W_K,
        "W_V": W_V,
        "W_O": _output(read, layout, shape, layer),
        "b_Q": b_Q,
        "b_K": b_K,
        "b_V": b_V,
        "b_O": read(output_bias) if output_bias in names else None,
        "norm_gain": _attention_gain(read, layout, layer),
    }


def ov_factors(read: Read, layout: Layout, shape: ModelShape, layer: int) -> dict[str, Tensor]:
    """W_V, W_O and the gain of the norm in front, by the field names of `OVWeights`; nothing else that is stored apart.

    Args:
        read: reads a tensor by name.
        layout: the architecture's.
        shape: the model's sizes.
        layer: which block.
    """
    attention = f"{layout.block(layer)}{layout.attention}."
    if layout.fused:
        W_V = query_key_value(read, layout, attention, (shape.n_heads,) * 3, "weight")[2]
    else:
        stored = read(f"{attention}v_proj.weight")
        W_V = rearrange(stored, "(head d_head) d_model -> head d_model d_head", head=shape.n_kv_heads)
    gain = _attention_gain(read, layout, layer)
    return {"W_V": W_V, "W_O": _output(read, layout, shape, layer), "norm_gain": gain}


def _output(read: Read, layout: Layout, shape: ModelShape, layer: int) -> Tensor:
    d_model_last = layout.fused is not None and layout.fused.d_model_first
    stored = "(head d_head) d_model" if d_model_last else "d_model (head d_head)"
    weight = read(f"{layout.block(layer)}{layout.attention}.{layout.output}.weight")
    return rearrange(weight, f"{stored} -> head d_head d_model", head=shape.n_heads)


def _attention_gain(read: Read, layout: Layout, layer: int) -> Tensor:
    return read(f"{layout.block(layer)}{layout.attention_norm}.weight") + layout.gain_offset
