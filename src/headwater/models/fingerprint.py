"""One short name for a model's weights, the same wherever they are read from.

A checkpoint streamed from a folder and the same checkpoint loaded into a model have one fingerprint, in whatever dtype
they are held so long as it holds them exactly. It is the SHA-256 of

1. the facts of the config that change what the model computes;
2. per parameter, in sorted order: its name, its shape, and its values as float32: all of them up to `WHOLE` entries,
   of a larger one `SPANS` evenly spaced spans of `SPAN` entries. A 70B checkpoint costs under a gigabyte of reading.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from headwater.models.layouts import Layout, expected_tensors, layout_of
from headwater.models.shape import ModelShape, shape_of, text_config

WHOLE = 2**22
SPANS = 64
SPAN = 4096
BEHAVIOUR = (
    "activation_function",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layer_types",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "scale_attn_by_inverse_layer_idx",
    "sliding_window",
    "tie_word_embeddings",
)
"""The entries of a config, beside the sizes, that change what the model computes."""


def fingerprint(shape: ModelShape, config: Any, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash a model's sizes, behaviour and weights.

    Args:
        shape: the model's sizes.
        config: its config, of transformers or of transformer_lens.
        tensors: its parameters by name, in a fixed order.

    Returns:
        64 hexadecimal digits.
    """
    behaviour = {name: getattr(config, name) for name in BEHAVIOUR if hasattr(config, name)}
    digest = hashlib.sha256(json.dumps([asdict(shape), behaviour], sort_keys=True, default=str).encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample(tensor.detach()).float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def sample(tensor: Tensor) -> Tensor:
    """A small tensor itself; of a large one, evenly spaced spans of its entries."""
    if tensor.numel() <= WHOLE:
        return tensor
    flat = tensor.reshape(-1)
    starts = torch.linspace(0, flat.numel() - SPAN, SPANS, dtype=torch.float64).long().tolist()
    return torch.cat([flat[start : start + SPAN] for start in starts])


def fingerprint_of_model(model: Any) -> str:
    """The fingerprint of a model in memory.

    Args:
        model: a transformers model or a TransformerBridge around one, of a supported architecture.
    """
    huggingface = getattr(model, "original_model", model)
    config = text_config(huggingface.config)
    read = parameter_reader(model, huggingface, layout_of(config))
    return fingerprint(shape_of(config), config, ((name, read(name)) for name in sorted(expected_tensors(config))))


def parameter_reader(model: Any, huggingface: Any, layout: Layout) -> Callable[[str], Tensor]:
    """Read parameters by their checkpoint names from a transformers model or from a bridge around one.

    A bridge wraps each module, which shows in the names as `_original_component`. Where it has split GPT-NeoX's joined
    queries, keys and values, the split ones are what it computes with, so they are what is read.
    """
    prefix = f"{huggingface.base_model_prefix}."
    parameters = {
        name.replace("_original_component.", "").removeprefix(prefix): parameter
        for name, parameter in huggingface.named_parameters(remove_duplicate=False)
    }
    fused = layout.fused if huggingface is not model else None

    def read(name: str) -> Tensor:
        if fused is None or f".{fused.name}." not in name:
            return parameters[name]
        attention = model.blocks[int(name.split(".")[1])].attn
        if name.endswith("bias"):
            parts = torch.stack([attention.b_Q, attention.b_K, attention.b_V])
            return rearrange(parts, f"three head d_head -> {fused.axes}")
        parts = torch.stack([attention.W_Q, attention.W_K, attention.W_V])
        return rearrange(parts, f"three head d_model d_head -> {fused.pattern()}")

    return read
