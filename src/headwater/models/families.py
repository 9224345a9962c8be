"""The families of models: the differences between architectures, one row per architecture.

An analysis that reads a checkpoint without building the model uses the row of its family: the names of tensors, how
heads are joined in them, which norms a block has and where. Models of other families can be loaded too, but only a row
lets `hw.classify_heads` read a folder layer by layer. Any code can add a row:

    FAMILIES.add("starcoder2", Family("Starcoder2ForCausalLM"))

Names are relative to the base model, such as `h.0.attn.c_attn.weight`. The prefix of these names in a checkpoint
(`transformer.`, `model.`, `language_model.model.`, or none) is determined when it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headwater.errors import ModelError
from headwater.registry import Registry


@dataclass(frozen=True)
class FusedQKV:
    """Queries, keys and values of all heads in one tensor.

    Attributes:
        name: the module that holds them.
        order: "parts" for all queries, then all keys, then all values; "groups" for one group per key-value head: the
            queries of its query heads, its key, its value.
        d_model_first: whether the weight is stored with the input axis first, as in GPT-2's Conv1D.
    """

    name: str
    order: Literal["parts", "groups"]
    d_model_first: bool = False


@dataclass(frozen=True)
class Norms:
    """The norms of a block, by the names of their modules; None for a missing norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class Family:
    """The names of one architecture's parts, and its special properties. The defaults are Llama's.

    Attributes:
        architecture: the model's class in transformers, such as "LlamaForCausalLM".
        blocks: the list of blocks.
        embedding: the token embedding.
        embedding_norm: a LayerNorm between the embedding and the first block (Bloom).
        final_norm: the norm before the unembedding; None if there is none.
        attention: the attention module of a block.
        mlp: the MLP, or mixture of experts, of a block; its parts in order, if they are directly in the block.
        norms: the norms of a block.
        output: the output projection of attention.
        fused: how queries, keys and values are joined; None if `q_proj`, `k_proj`, `v_proj` are separate.
        gain_offset: 1 if the norm multiplies by 1 + weight (Gemma), else 0.
        embedding_scale: factor of the embedding when it enters the residual stream, from the config.
        residual_scale: the config entry by which a block multiplies the outputs of attention and MLP (Granite).
        logit_scale: factor of the logits after the unembedding, from the config (Cohere, Granite).
        kv_heads: number of key-value heads of a block, from the config; default: its `num_key_value_heads`.
        mlp_width: the config entry for the width of the hidden layer of the MLP (or of an expert); 4 d_model if the
            config has no value.
        context: the config entry for the longest sequence the model was made for.
        parallel: whether attention and MLP of a block both read the block's input, or the config option that specifies
            it.
        positions_by_place: whether attention takes positions from the batch's columns (ALiBi), not from position ids.
        rotates_in_float32: whether queries and keys are rotated in float32, then cast to the dtype of the weights.
        not_in_one_pass: config options with which transformers' one-pass attention computes something else.
        cannot: by kind of effective embedding ("raw", "mlp0", "embed+mlp0", "layer0"), why it cannot be read from a
            folder.
        varies: the fields of this row that differ with some configs, as a function of the config.
    """

    architecture: str
    blocks: str = "layers"
    embedding: str = "embed_tokens"
    embedding_norm: str | None = None
    final_norm: str | None = "norm"
    attention: str = "self_attn"
    mlp: str | tuple[str, ...] = "mlp"
    norms: Norms = Norms()
    output: str = "o_proj"
    fused: FusedQKV | None = None
    gain_offset: float = 0.0
    embedding_scale: Callable[[Any], float] | None = None
    residual_scale: str | None = None
    logit_scale: Callable[[Any], float] | None = None
    kv_heads: Callable[[Any], int] | None = None
    mlp_width: str = "intermediate_size"
    context: str = "max_position_embeddings"
    parallel: bool | str = False
    positions_by_place: bool = False
    rotates_in_float32: bool = False
    not_in_one_pass: tuple[str, ...] = ()
    cannot: Mapping[str, str] = field(default_factory=dict)
    varies: Callable[[Any], Mapping[str, Any]] | None = None

    def of(self, config: object) -> Family:
        """Return the row for a config."""
        return self if self.varies is None else replace(self, **self.varies(config))

    def block(self, layer: int) -> str:
        """Return the prefix of one block's tensors."""
        return f"{self.blocks}.{layer}."


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def _falcon(config: Any) -> dict[str, Any]:
    # transformers treats None as 2 (40B, 180B); Falcon 2 (11B) has 1.
    two_norms = config.new_decoder_architecture and config.num_ln_in_parallel_attn in (None, 2)
    return {
        "norms": Norms("ln_attn", None, "ln_mlp") if two_norms else ONE_NORM if config.parallel_attn else Norms(),
        "parallel": config.new_decoder_architecture or config.parallel_attn,
        "positions_by_place": config.alibi,
    }


def _opt(config: Any) -> dict[str, Any]:
    if config.do_layer_norm_before and config.word_embed_proj_dim == config.hidden_size:
        return {}
    reason = "its embedding is projected before it enters the residual stream, or norms follow its attention and MLP."
    return {
        "final_norm": None if not config.do_layer_norm_before else OPT.final_norm,
        "norms": OPT.norms if config.do_layer_norm_before else Norms(None, None, None, None),
        "cannot": dict.fromkeys(("raw", "mlp0", "embed+mlp0", "layer0"), reason),
    }


FAMILIES: Registry[str, Family] = Registry("family of models")
"""The rows, by the config's `model_type`."""
SANDWICH = Norms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
POST_NORM = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
ONE_NORM = Norms(before_mlp="input_layernorm")
GRANITE = Family(
    "GraniteForCausalLM",
    embedding_scale=lambda config: config.embedding_multiplier,
    residual_scale="residual_multiplier",
    logit_scale=lambda config: 1 / config.logits_scaling,
)
COHERE = Family("CohereForCausalLM", norms=ONE_NORM, parallel=True, logit_scale=lambda config: config.logit_scale)
GEMMA = Family("GemmaForCausalLM", gain_offset=1.0, embedding_scale=lambda config: math.sqrt(config.hidden_size))
OPT = Family(
    "OPTForCausalLM",
    blocks="decoder.layers",
    embedding="decoder.embed_tokens",
    final_norm="decoder.final_layer_norm",
    mlp=("fc1", "activation_fn", "fc2"),
    norms=Norms(before_attention="self_attn_layer_norm", before_mlp="final_layer_norm"),
    output="out_proj",
    mlp_width="ffn_dim",
    varies=_opt,
)

for _model_type, _family in {
    "gpt2": Family(
        "GPT2LMHeadModel",
        blocks="h",
        embedding="wte",
        final_norm="ln_f",
        attention="attn",
        norms=Norms(before_attention="ln_1", before_mlp="ln_2"),
        output="c_proj",
        fused=FusedQKV("c_attn", "parts", d_model_first=True),
        mlp_width="n_inner",
        not_in_one_pass=("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        output="dense",
        fused=FusedQKV("query_key_value", "groups"),
        parallel="use_parallel_residual",
    ),
    "phi": Family("PhiForCausalLM", final_norm="final_layernorm", norms=ONE_NORM, output="dense", parallel=True),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        blocks="h",
        embedding="wte",
        final_norm="ln_f",
        attention="attn.attention",
        norms=Norms(before_attention="ln_1", before_mlp="ln_2"),
        output="out_proj",
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        blocks="h",
        embedding="wte",
        final_norm="ln_f",
        attention="attn",
        norms=Norms(before_attention="ln_1", before_mlp="ln_1"),
        output="out_proj",
        mlp_width="n_inner",
        parallel=True,
    ),
    "opt": OPT,
    "bloom": Family(
        "BloomForCausalLM",
        blocks="h",
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        final_norm="ln_f",
        attention="self_attention",
        output="dense",
        fused=FusedQKV("query_key_value", "groups"),
        context="seq_length",
        positions_by_place=True,
    ),
    "mpt": Family(
        "MptForCausalLM",
        blocks="blocks",
        embedding="wte",
        final_norm="norm_f",
        attention="attn",
        mlp="ffn",
        norms=Norms(before_attention="norm_1", before_mlp="norm_2"),
        output="out_proj",
        fused=FusedQKV("Wqkv", "parts"),
        context="max_seq_len",
        positions_by_place=True,
    ),
    "falcon": Family(
        "FalconForCausalLM",
        blocks="h",
        embedding="word_embeddings",
        final_norm="ln_f",
        attention="self_attention",
        output="dense",
        fused=FusedQKV("query_key_value", "groups"),
        kv_heads=_falcon_kv_heads,
        mlp_width="ffn_hidden_size",
        not_in_one_pass=("alibi",),
        varies=_falcon,
    ),
    "phi3": Family("Phi3ForCausalLM", fused=FusedQKV("qkv_proj", "parts")),
    "llama": Family("LlamaForCausalLM"),
    # transformers runs these two model types with Llama's class.
    "internlm3": Family("LlamaForCausalLM"),
    "iquestcoder": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM"),
    "mixtral": Family("MixtralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", mlp_width="moe_intermediate_size"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", mlp_width="moe_intermediate_size"),
    "smollm3": Family("SmolLM3ForCausalLM"),
    "stablelm": Family(
        "StableLmForCausalLM",
        parallel="use_parallel_residual",
        varies=lambda config: {"norms": ONE_NORM} if config.use_parallel_residual else {},
    ),
    "granite": GRANITE,
    "granitemoe": replace(GRANITE, architecture="GraniteMoeForCausalLM", mlp="block_sparse_moe"),
    "granitemoehybrid": replace(
        GRANITE,
        architecture="GraniteMoeHybridForCausalLM",
        mlp_width="shared_intermediate_size",
        cannot=dict.fromkeys(("mlp0", "embed+mlp0", "layer0"), "its first block may be Mamba, or have experts too."),
    ),
    "cohere": COHERE,
    "cohere2": replace(COHERE, architecture="Cohere2ForCausalLM"),
    "gpt_oss": Family("GptOssForCausalLM"),
    "gemma": GEMMA,
    "gemma2": replace(
        GEMMA, architecture="Gemma2ForCausalLM", norms=SANDWICH, not_in_one_pass=("attn_logit_softcapping",)
    ),
    "gemma3_text": replace(GEMMA, architecture="Gemma3ForCausalLM", norms=SANDWICH),
    "olmo": Family("OlmoForCausalLM", rotates_in_float32=True),
    "olmo2": Family("Olmo2ForCausalLM", norms=POST_NORM, rotates_in_float32=True),
    "olmo3": Family("Olmo3ForCausalLM", norms=POST_NORM, rotates_in_float32=True),
    "flex_olmo": Family("FlexOlmoForCausalLM", norms=POST_NORM, rotates_in_float32=True),
    "olmoe": Family("OlmoeForCausalLM"),
}.items():
    FAMILIES.add(_model_type, _family)


def text_config(config: Any) -> Any:
    """Return the config of the language model: the text part of a multimodal config, any other config unchanged."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def family_of(config: Any) -> Family:
    """Return the family of a transformers config."""
    if (family := known_family(config)) is None:
        kind = text_config(config).model_type
        raise ModelError(f"The model type {kind!r} is not supported; headwater reads {', '.join(FAMILIES)}.")
    return family


def known_family(config: Any) -> Family | None:
    """Return the family of a config; None if there is no row for it, and for a config that is not of transformers."""
    config = text_config(config)
    kind = getattr(config, "model_type", None)
    return FAMILIES[kind].of(config) if kind in FAMILIES else None


def clip_limit(config: Any) -> float | None:
    """Return the size to which queries, keys and values are clipped (OLMo, MPT, DBRX), from any config; None if not."""
    config = text_config(config)
    parts = (config, getattr(config, "attn_config", None))
    return next((limit for part in parts if (limit := getattr(part, "clip_qkv", None))), None)


# The sizes of a model, read from its transformers config, under the same names for every architecture.


SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip
"""Config entries that are sizes, in every model that has them."""
DEFAULT_CONTEXT = 2048
"""The longest sequence if a config does not specify it (Bloom); TransformerLens uses the same default."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        architecture: the name of its class in transformers, such as "LlamaForCausalLM".
        n_layers: number of blocks.
        n_heads: number of query heads in each block.
        n_kv_heads: number of key and value heads in each block; fewer than `n_heads` when heads are grouped.
        d_model: width of the residual stream.
        d_head: width of one head.
        d_mlp: width of the MLP's hidden layer.
        d_vocab: number of rows of the embedding, including padding rows.
        n_ctx: longest sequence the model was made for.
        parallel_blocks: whether attention and MLP of a block both read the block's input.
    """

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    n_ctx: int
    parallel_blocks: bool

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key and value head."""
        return self.n_heads // self.n_kv_heads


def refuse_impossible_sizes(config: object) -> None:
    """Refuse a config with an impossible size."""
    config = text_config(config)
    for name in SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value < 1:
            raise ModelError(f"The config says {name}={value}, which no model has; it must be at least 1.")


def longrope_length(config: object) -> int | None:
    """Return the length past which longrope rotates every token by other angles; None for all other embeddings.

    Longer texts are refused, because the start of a text would depend on its length.
    """
    rotary = getattr(config, "rope_parameters", None) or {}
    return rotary["original_max_position_embeddings"] if rotary.get("rope_type") == "longrope" else None


def shape_of(config: Any) -> ModelShape:
    """Read a model's shape from its transformers config."""
    family, config = family_of(config), text_config(config)
    parallel = family.parallel
    refuse_impossible_sizes(config)
    d_model, n_heads = config.hidden_size, config.num_attention_heads
    n_kv_heads = family.kv_heads(config) if family.kv_heads else getattr(config, "num_key_value_heads", None)
    return ModelShape(
        architecture=family.architecture,
        n_layers=config.num_hidden_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        d_model=d_model,
        d_head=getattr(config, "head_dim", None) or d_model // n_heads,
        d_mlp=getattr(config, family.mlp_width, None) or 4 * d_model,
        d_vocab=config.vocab_size,
        n_ctx=longrope_length(config) or getattr(config, family.context, None) or DEFAULT_CONTEXT,
        parallel_blocks=bool(getattr(config, parallel, False)) if isinstance(parallel, str) else parallel,
    )
