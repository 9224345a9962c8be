"""What is set right in TransformerLens's adapters, which say how a model is wrapped, and in what they wrap.

Falcon with `new_decoder_architecture` (40B, 180B, Falcon 2): each key-value head stands with its query heads in one
matrix (`weights.fused`), whatever `multi_query` says; TransformerLens 4.3 takes it for queries, keys and
values one after the other, and its one norm, where there is one, for two.

Granite 4 without positions (`position_embedding_type` is not "rope"): TransformerLens 4.3 looks for a rotary
embedding, which transformers does not make.

OLMo 1 to 3 and FlexOlmo turn queries and keys in float32 and go on in the dtype of the weights; TransformerLens 4.3
goes on in float32, and fails in bfloat16 and float16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from headwater.models.families import family_of
from headwater.models.shape import ModelShape, shape_of
from headwater.models.weights.fused import taken_apart


def config_for_adapter(config: Any) -> Any:
    """Return the config from which TransformerLens is to make its adapter: the model's own, or one that says more."""
    if not _is_new_falcon(config):
        return config
    config = copy.deepcopy(config)
    config.multi_query, config.num_key_value_heads = False, config.num_kv_heads
    return config


def setter_right(config: Any) -> Callable[[Any], None] | None:
    """Return what sets an adapter right; None where nothing has to be."""
    if config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope":
        return _without_positions
    if not _is_new_falcon(config):
        return None
    family, shape = family_of(config), shape_of(config)

    def set_right(adapter: Any) -> None:
        parts = adapter.component_mapping["blocks"].submodules
        parts["ln1"].name = family.norms.before_attention
        parts["attn"].split_qkv_matrix = lambda attention: _split(attention.query_key_value, family.fused, shape)

    return set_right


def keep_dtype_when_turned(raw: Any, hf: Any) -> None:
    """Let queries and keys of OLMo have the dtype of the weights, as in transformers, once they are turned."""
    if hf.config.model_type not in ("olmo", "olmo2", "olmo3", "flex_olmo"):
        return

    def cast(point: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(one.to(hf.dtype) for one in given)

    for block in raw.blocks:
        for point in (block.attn.hook_rot_q, block.attn.hook_rot_k):
            point.register_forward_pre_hook(cast)


def _without_positions(adapter: Any) -> None:
    adapter.component_mapping.pop("rotary_emb")
    adapter.cfg.positional_embedding_type = "none"


def _is_new_falcon(config: Any) -> bool:
    return config.model_type == "falcon" and config.new_decoder_architecture


def _split(joined: nn.Linear, fused: Any, shape: ModelShape) -> tuple[nn.Linear, ...]:
    """Return a linear map each for queries, keys and values."""
    weights = [part.transpose(1, 2).flatten(0, 1) for part in taken_apart(joined.weight.detach(), fused, shape)]
    biases: list[Any] = [None] * 3
    if joined.bias is not None:
        biases = [part.flatten() for part in taken_apart(joined.bias.detach(), fused, shape)]
    return tuple(map(_linear, weights, biases))


def _linear(weight: Any, bias: Any) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.contiguous())
    return made
