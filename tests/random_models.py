"""Small random models of over forty configurations, most of which headwater has no table for."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny import tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GATED = SIZES | {"intermediate_size": 48}
GROUPED = GATED | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 8}
EXPERTS = HEADS | {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SCALED = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
OPT = {
    **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
    "ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


LATENT = GATED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}


def gemma3_vision() -> tf.PretrainedConfig:
    text = tf.Gemma3TextConfig(
        **HEADS, query_pre_attn_scalar=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    return tf.Gemma3Config(
        text_config=text, vision_config=tf.SiglipVisionConfig(**VISION), mm_tokens_per_image=4, image_token_index=3
    )


def llava() -> tf.PretrainedConfig:
    return tf.LlavaConfig(
        text_config=tf.LlamaConfig(**HEADS), vision_config=tf.CLIPVisionConfig(**VISION), image_token_index=3
    )


CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "bitnet": lambda: tf.BitNetConfig(**GROUPED),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "codegen": lambda: tf.CodeGenConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_ctx=64, rotary_dim=4
    ),
    "cohere": lambda: tf.CohereConfig(**GROUPED, logit_scale=0.25),
    "cohere2": lambda: tf.Cohere2Config(**HEADS, logit_scale=0.25, sliding_window=8),
    "deepseek-v2": lambda: tf.DeepseekV2Config(**LATENT),
    "deepseek-v3": lambda: tf.DeepseekV3Config(**LATENT),
    "exaone4": lambda: tf.Exaone4Config(**HEADS, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "falcon": lambda: tf.FalconConfig(**SIZES, multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon-rw": lambda: tf.FalconConfig(
        **SIZES, multi_query=False, parallel_attn=False, new_decoder_architecture=False, alibi=True, bias=True
    ),
    "falcon-new-decoder": lambda: tf.FalconConfig(**SIZES, num_kv_heads=2, new_decoder_architecture=True),
    "falcon-2": lambda: tf.FalconConfig(
        **SIZES, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon-h1": lambda: tf.FalconH1Config(
        **HEADS,
        **MAMBA2,
        attention_out_multiplier=0.3,
        mamba_d_ssm=64,
    ),
    "gemma1": lambda: tf.GemmaConfig(**HEADS),
    "gemma3-looks-ahead": lambda: tf.Gemma3TextConfig(
        **HEADS,
        query_pre_attn_scalar=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
    ),
    "gemma3-with-vision": gemma3_vision,
    "gemma4": lambda: tf.Gemma4TextConfig(
        **HEADS | {"num_hidden_layers": 4},
        global_head_dim=8,
        num_global_key_value_heads=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt-neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **HEADS | {"intermediate_size": 32}, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "gpt1": lambda: tf.OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt2-unscaled": lambda: tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, scale_attn_weights=False
    ),
    "gptj": lambda: tf.GPTJConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "granite": lambda: tf.GraniteConfig(**GROUPED, **SCALED),
    "granite4": lambda: tf.GraniteMoeHybridConfig(
        **GROUPED,
        **SCALED,
        **MAMBA2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention"],
    ),
    "granite-moe": lambda: tf.GraniteMoeConfig(**GROUPED, **SCALED, num_local_experts=4, num_experts_per_tok=2),
    "jamba": lambda: tf.JambaConfig(
        **GROUPED,
        num_experts=2,
        num_experts_per_tok=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=4,
        mamba_d_conv=4,
        mamba_expand=2,
        use_mamba_kernels=False,
        mamba_dt_rank=4,
    ),
    "lfm2": lambda: tf.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
    "llava": llava,
    "mamba": lambda: tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
    "mixtral": lambda: tf.MixtralConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2),
    "mpt": lambda: tf.MptConfig(vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "mpt-clipped": lambda: tf.MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, attn_config={"clip_qkv": 0.3}
    ),
    "olmo": lambda: tf.OlmoConfig(**GROUPED),
    "olmo-clipped": lambda: tf.OlmoConfig(**GROUPED, clip_qkv=0.3),
    "olmo2": lambda: tf.Olmo2Config(**GROUPED),
    "olmo3": lambda: tf.Olmo3Config(**GROUPED, sliding_window=8),
    "olmoe": lambda: tf.OlmoeConfig(**GROUPED, num_experts=4, num_experts_per_tok=2),
    "opt": lambda: tf.OPTConfig(**OPT),
    "opt-350m": lambda: tf.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "phi-qk-norm": lambda: tf.PhiConfig(**GATED, qk_layernorm=True),
    "phi3": lambda: tf.Phi3Config(**GROUPED),
    "phi3-longrope": lambda: tf.Phi3Config(
        **GROUPED,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0, 6.0, 8.0, 12.0],
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "qwen3-moe": lambda: tf.Qwen3MoeConfig(**EXPERTS, num_experts=4),
    "qwen3-moe-mixed": lambda: tf.Qwen3MoeConfig(
        **EXPERTS | {"intermediate_size": 32, "moe_intermediate_size": 32}, num_experts=4, mlp_only_layers=[0]
    ),
    "qwen3-next": lambda: tf.Qwen3NextConfig(
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
    ),
    "smollm3": lambda: tf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0]),
    "stablelm": lambda: tf.StableLmConfig(**GROUPED),
    "stablelm-parallel": lambda: tf.StableLmConfig(**GROUPED, use_parallel_residual=True, qk_layernorm=True),
    "starcoder2": lambda: tf.Starcoder2Config(**GROUPED, sliding_window=8),
    "xglm": lambda: tf.XGLMConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        num_layers=2,
        attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
    ),
}


RECIPE = EXPERTS | {
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "shared_expert_intermediate_size": 16,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 8,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "state_size": 8, "lru_width": 32,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
"""Small values of what configurations call otherwise, each taken where a configuration has it."""
LOW_RANK = {"num_key_value_heads": 4, "head_dim": 4, "kv_lora_rank": 16, "q_lora_rank": 12, "v_head_dim": 8} | {
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
PLAIN = (
    "afmoe", "apertus", "arcee", "ernie4_5", "ernie4_5_moe", "falcon_mamba", "flex_olmo", "glm", "glm4",
    "glm4_moe", "gpt_bigcode", "hunyuan_v1_dense", "internlm3", "iquestcoder", "jais2", "jetmoe",
    "laguna", "llama4_text", "minimax_m2", "ministral3", "nemotron", "nemotron_h", "rwkv", "seed_oss",
    "vaultgemma",
)  # fmt: skip
TAIL: dict[str, dict[str, Any]] = {name: {} for name in PLAIN} | {
    "bamba": {"attn_layer_indices": [1]},
    "glm4_moe_lite": LOW_RANK,
    "glm_moe_dsa": LOW_RANK,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "olmo_hybrid": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "youtu": LOW_RANK,
}
"""Further families that TransformerLens wraps, by model type, and what the recipe does not say of each."""


def small_config(model_type: str, **special: Any) -> tf.PretrainedConfig:
    """A small configuration of any model type, by the recipe."""
    kind = CONFIG_MAPPING[model_type]
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in RECIPE.items() if name in known} | special)


def random_model(name: str, seed: int = 0) -> tf.PreTrainedModel:
    """Return a model whose every parameter, norms and biases too, is drawn afresh."""
    config = CONFIGS[name]() if name in CONFIGS else small_config(name, **TAIL.get(name, {}))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        part.bos_token_id = part.eos_token_id = 0
        part.pad_token_id = 1
        part._attn_implementation = "eager"
    multimodal = hasattr(config, "vision_config")
    torch.manual_seed(seed)
    model = (tf.AutoModelForImageTextToText if multimodal else tf.AutoModelForCausalLM).from_config(config)
    generator = torch.Generator().manual_seed(seed)
    gemma = name.startswith(("gemma1", "gemma3", "qwen3-next"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if key.endswith(("A_log", ".D", "dt_bias", "dt_proj.bias")):
                continue  # a state space is stable for some values only
            is_norm_gain = parameter.ndim == 1 and key.endswith("weight")
            parameter.copy_((0 if gemma else 1) + 0.2 * noise if is_norm_gain else 0.2 * noise)
    return model.eval()
