"""The families of models: what differs from one architecture to the next, one row each.

What an analysis reads from a checkpoint without building the model, it finds by the row of its family: the names of
tensors, how heads are joined in them, which norms a block has and where. A family that is not here can be loaded all
the same; a row is what lets `hw.classify_heads` read its folder, layer by layer. Another one, from anywhere:

    from headwater.models.families import FAMILIES, Family

    FAMILIES.add("starcoder2", Family("Starcoder2ForCausalLM"))

Names are relative to the base model, as in `h.0.attn.c_attn.weight`; the prefix that a checkpoint puts in front of them
(`transformer.`, `model.`, `language_model.model.`, or none) is found when it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import ModelError
from headwater.registry import Registry


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
class Norms:
    """The norms of a block, by the names of their modules; None where there is none."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Family:
    """What one architecture calls its parts, and what is special about it. The defaults are Llama's.

    Attributes:
        architecture: the class in transformers whose model it is, such as "LlamaForCausalLM".
        blocks: the list of blocks.
        embedding: the token embedding.
        final_norm: the norm in front of the unembedding.
        attention: the attention module within a block.
        mlp: the MLP, or mixture of experts, within a block.
        norms: the norms of a block.
        output: the output projection within attention.
        fused: how queries, keys and values are joined; None when `q_proj`, `k_proj`, `v_proj` are apart.
        gain_offset: 1 where the norm multiplies by 1 + weight (Gemma), else 0.
        embedding_scale: by what the embedding is multiplied on its way into the residual stream, from the config.
        mlp_width: the entry of the config that is the width of the MLP's (an expert's) hidden layer.
        parallel: whether attention and MLP of a block both read the block's input, or the option of the config that
            says so.
        not_in_one_pass: options of the config with which transformers' one-pass attention computes something else.
        cannot: by kind of effective embedding ("mlp0", "embed+mlp0", "layer0"), why it cannot be read from a folder.
    """

    architecture: str
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: Norms = Norms()
    output: str = "o_proj"
    fused: FusedQKV | None = None
    gain_offset: float = 0.0
    embedding_scale: Callable[[Any], float] | None = None
    mlp_width: str = "intermediate_size"
    parallel: bool | str = False
    not_in_one_pass: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)

    def block(self, layer: int) -> str:
        """The prefix of one block's tensors."""
        return f"{self.blocks}.{layer}."

    def is_parallel(self, config: Any) -> bool:
        """Whether attention and MLP of a block both read the block's input."""
        return bool(getattr(config, self.parallel, False)) if isinstance(self.parallel, str) else self.parallel


def root_of_width(config: Any) -> float:
    """√d_model, by which Gemma multiplies its embedding."""
    return math.sqrt(config.hidden_size)


FAMILIES: Registry[str, Family] = Registry("family of models")
"""By the config's `model_type`."""
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
BEHIND = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

FAMILIES.add(
    "gpt2",
    Family(
        "GPT2LMHeadModel",
        blocks="h",
        embedding="wte",
        final_norm="ln_f",
        attention="attn",
        norms=Norms(before_attention="ln_1", before_mlp="ln_2"),
        output="c_proj",
        fused=FusedQKV("c_attn", "(three head d_head)", d_model_first=True),
        mlp_width="n_inner",
        not_in_one_pass=("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
    ),
)
FAMILIES.add(
    "gpt_neox",
    Family(
        "GPTNeoXForCausalLM",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        output="dense",
        fused=FusedQKV("query_key_value", "(head three d_head)", d_model_first=False),
        parallel="use_parallel_residual",
    ),
)
FAMILIES.add(
    "phi",
    Family(
        "PhiForCausalLM",
        final_norm="final_layernorm",
        norms=Norms(before_mlp="input_layernorm"),
        output="dense",
        parallel=True,
    ),
)
FAMILIES.add("llama", Family("LlamaForCausalLM"))
FAMILIES.add("mistral", Family("MistralForCausalLM"))
FAMILIES.add("mixtral", Family("MixtralForCausalLM"))
FAMILIES.add("qwen2", Family("Qwen2ForCausalLM"))
FAMILIES.add("qwen3", Family("Qwen3ForCausalLM"))
FAMILIES.add("qwen3_moe", Family("Qwen3MoeForCausalLM", mlp_width="moe_intermediate_size"))
FAMILIES.add("gemma", Family("GemmaForCausalLM", gain_offset=1.0, embedding_scale=root_of_width))
FAMILIES.add(
    "gemma2",
    Family(
        "Gemma2ForCausalLM",
        norms=SANDWICH,
        gain_offset=1.0,
        embedding_scale=root_of_width,
        not_in_one_pass=("attn_logit_softcapping",),
    ),
)
FAMILIES.add("gemma3_text", Family("Gemma3ForCausalLM", norms=SANDWICH, gain_offset=1.0, embedding_scale=root_of_width))
FAMILIES.add("olmo2", Family("Olmo2ForCausalLM", norms=BEHIND))


def text_config(config: Any) -> Any:
    """The config of the language model: a multimodal config's text part, any other config itself."""
    return config.get_text_config(decoder=True)


def family_of(config: Any) -> Family:
    """The family of a transformers config.

    Raises:
        ModelError: there is no row for it.
    """
    model_type = text_config(config).model_type
    if model_type not in FAMILIES:
        raise ModelError(f"The model type {model_type!r} is not supported; headwater reads {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]


def family_named(architecture: str) -> Family | None:
    """The family whose models are of this class in transformers; None where there is no row for it."""
    return next((family for family in FAMILIES.values() if family.architecture == architecture), None)
