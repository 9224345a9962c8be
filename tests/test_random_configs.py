"""Models of odd sizes: one layer, one head, grouped heads, tied and untied, against Hugging Face and their folders."""

from typing import Any

import pytest
import torch
import transformers as tf

import headwater as hw
from headwater.models.weights import open_weights
from tests import chance
from tests.random_models import VISION
from tests.tiny import tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
SIZES = {"one-layer-one-head": (1, 1, 1), "odd": (3, 3, 1), "groups": (2, 6, 2), "every-head": (1, 5, 5)}
"""Layers, heads and key-value heads."""


def of_llamas_names(kind, per_head=6, **more):
    """A config that calls its sizes as Llama does."""

    def config(n_layers, n_heads, n_kv_heads, **options):
        sizes = {
            "vocab_size": VOCABULARY,
            "hidden_size": per_head * n_heads,
            "intermediate_size": 11,
            "num_hidden_layers": n_layers,
            "num_attention_heads": n_heads,
            "num_key_value_heads": n_kv_heads,
            "max_position_embeddings": 19,
        }
        return kind(**sizes | more, **options)

    return config


def of_gpt2s_names(kind, **more):
    """A config that calls its sizes as GPT-2 does."""

    def config(n_layers, n_heads, n_kv_heads, **options):
        sizes = {"n_embd": 6 * n_heads, "n_layer": n_layers, "n_head": n_heads, "n_positions": 19}
        return kind(vocab_size=VOCABULARY, **sizes, **more, **options)

    return config


def falcon(**more):
    """A config of Falcon: one key-value head, groups, or one for each head, by its decoder."""

    def config(n_layers, n_heads, n_kv_heads, **options):
        grouped = {"num_kv_heads": n_kv_heads} if more.get("new_decoder_architecture") else {}
        sizes = {"hidden_size": 6 * n_heads, "num_hidden_layers": n_layers, "num_attention_heads": n_heads}
        return tf.FalconConfig(vocab_size=VOCABULARY, **sizes, **grouped, **more, **options)

    return config


def with_vision(n_layers, n_heads, n_kv_heads, kind, text, vision, **options):
    held = text(n_layers, n_heads, n_kv_heads, **options)
    shown = {"tie_word_embeddings": options["tie_word_embeddings"]}
    return kind(text_config=held, vision_config=vision(**VISION), image_token_index=3, **shown)


EXPERTS: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "per_head": 8}
FEW: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 12, "per_head": 8}
"""Experts whose widths are multiples of 16 bytes: transformers' grouped product takes no others, by itself either."""

FAMILIES = {
    "bloom": lambda layers, heads, _, **options: tf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=6 * heads, n_layer=layers, n_head=heads, **options
    ),
    "cohere": of_llamas_names(tf.CohereConfig),
    "falcon": falcon(multi_query=True, parallel_attn=True, new_decoder_architecture=False),
    "falcon-new-decoder": falcon(new_decoder_architecture=True),
    "falcon-rw": falcon(multi_query=False, parallel_attn=False, new_decoder_architecture=False, alibi=True, bias=True),
    "gemma": of_llamas_names(tf.GemmaConfig, head_dim=6),
    "gemma3-with-vision": lambda *sizes, **options: with_vision(
        *sizes, tf.Gemma3Config, of_llamas_names(tf.Gemma3TextConfig, head_dim=6, sliding_window=4),
        tf.SiglipVisionConfig, **options,
    ),
    "gpt-neo": lambda layers, heads, _, **options: tf.GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=6 * heads, num_layers=layers, num_heads=heads, intermediate_size=11,
        max_position_embeddings=19, window_size=3, attention_types=[[["local"], layers]], **options,
    ),
    "gpt-oss": of_llamas_names(tf.GptOssConfig, head_dim=8, sliding_window=4, **FEW),
    "gptj": of_gpt2s_names(tf.GPTJConfig, rotary_dim=4),
    "granite": of_llamas_names(tf.GraniteConfig),
    "llama": of_llamas_names(tf.LlamaConfig),
    "llava": lambda *sizes, **options: with_vision(
        *sizes, tf.LlavaConfig, of_llamas_names(tf.LlamaConfig), tf.CLIPVisionConfig, **options
    ),
    "mistral": of_llamas_names(tf.MistralConfig),
    "mixtral": of_llamas_names(tf.MixtralConfig, **FEW),
    "mpt": lambda layers, heads, _, **options: tf.MptConfig(
        vocab_size=VOCABULARY, d_model=6 * heads, n_layers=layers, n_heads=heads, max_seq_len=19, **options
    ),
    "olmo": of_llamas_names(tf.OlmoConfig),
    "olmo2": of_llamas_names(tf.Olmo2Config),
    "olmo3": of_llamas_names(tf.Olmo3Config, sliding_window=4),
    "opt": lambda layers, heads, _, **options: tf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=6 * heads, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=11,
        max_position_embeddings=19, dropout=0.0, **options,
    ),
    "phi3": of_llamas_names(tf.Phi3Config),
    "qwen2": of_llamas_names(tf.Qwen2Config),
    "qwen2-moe": of_llamas_names(tf.Qwen2MoeConfig, shared_expert_intermediate_size=11, **EXPERTS),
    "qwen3-moe": of_llamas_names(tf.Qwen3MoeConfig, head_dim=6, **EXPERTS),
    "smollm3": of_llamas_names(tf.SmolLM3Config),
    "stablelm": of_llamas_names(tf.StableLmConfig, partial_rotary_factor=2 / 3),
    "stablelm-parallel": of_llamas_names(
        tf.StableLmConfig, partial_rotary_factor=2 / 3, use_parallel_residual=True, qk_layernorm=True
    ),
}  # fmt: skip
QUICK = (
    ("llama", "odd", True), ("phi3", "groups", False), ("granite", "one-layer-one-head", True),
    ("bloom", "odd", True), ("gptj", "one-layer-one-head", False),
    ("falcon-new-decoder", "groups", True), ("opt", "every-head", False), ("gemma3-with-vision", "odd", True),
    ("falcon-rw", "odd", False), ("gpt-neo", "groups", True), ("gpt-oss", "odd", True), ("mixtral", "groups", False),
    ("mpt", "one-layer-one-head", True), ("qwen3-moe", "odd", False), ("stablelm", "groups", True),
)  # fmt: skip
CASES = [(family, sizes, tied) for family in FAMILIES for sizes in SIZES for tied in (True, False)]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "sizes", "tied"), [pytest.param(*c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES]
)
def test_an_odd_model_gives_hugging_faces_logits_and_its_folder_the_factors_it_computes_with(
    family, sizes, tied, tmp_path
):
    config = FAMILIES[family](*SIZES[sizes], tie_word_embeddings=tied, **ENDS)
    kind = tf.AutoModelForImageTextToText if hasattr(config, "vision_config") else tf.AutoModelForCausalLM
    with chance.apart("odd model"):
        hf = kind.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in hf.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
    hf.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, streamed, memory = hw.load(tmp_path), open_weights(tmp_path), hw.load(hf, tokenizer=tiny_tokenizer())
    tokens = torch.randint(2, VOCABULARY, (2, 7))
    with torch.inference_mode():
        expected = hf(tokens).logits
        torch.testing.assert_close(model.run(tokens), expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(memory.run(tokens), expected, rtol=0, atol=1e-4)
    assert streamed.fingerprint == model.fingerprint == memory.fingerprint
    n_layers = SIZES[sizes][0]
    there = vars(open_weights(memory).layer(n_layers - 1))
    for name, factor in vars(streamed.layer(n_layers - 1)).items():
        torch.testing.assert_close(factor, there[name], msg=name)
    assert torch.equal(streamed.unembedding(), open_weights(model).unembedding())
