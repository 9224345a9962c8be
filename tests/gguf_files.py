"""GGUF files written of transformers models, as llama.cpp's converter writes them, with a tiny tokenizer."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tiny import WORDS

TYPES = gguf.GGMLQuantizationType
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
WHOLE = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "wte": "token_embd",
    "wpe": "position_embd", "ln_f": "output_norm",
}  # fmt: skip
ARCHITECTURES = {"gemma3_text": "gemma3"}


def written(
    model: tf.PreTrainedModel,
    file: Path,
    types: Sequence[gguf.GGMLQuantizationType] = (TYPES.Q8_0, TYPES.Q4_0),
    extra: Mapping[str, np.ndarray] | None = None,
    **about: object,
) -> Path:
    """Write a model as a GGUF file, and change it to what the file then stands for.

    Args:
        model: changed in place: its parameters become what those of the file are dequantised to.
        file: the file.
        types: of the matrices, in turn; rows of them have whole blocks of 32.
        extra: further tensors.
        **about: entries that are written otherwise, or besides; None for none.
    """
    config = model.config
    arch = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(file, str(about.pop("general.architecture", arch)))
    for key, value in (entries(config, arch) | tokenizer_entries() | about).items():
        add(writer, key, value)
    tied = config.tie_word_embeddings
    state = {name: one for name, one in model.state_dict().items() if not (tied and name.startswith("lm_head"))}
    for number, (name, tensor) in enumerate(state.items()):
        own, stored = name_of(name, arch), as_llama_cpp(tensor.detach().numpy(), name, arch, config)
        kind = types[number % len(types)] if stored.ndim == 2 else TYPES.F32
        packed = gguf.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(own, packed, raw_dtype=kind)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(as_transformers(gguf.dequantize(packed, kind), name, arch, config)))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    """Write one entry, by the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def entries(config: tf.PretrainedConfig, arch: str) -> dict[str, object]:
    """What the converter says of a model."""
    is_gpt2, heads = arch == "gpt2", config.num_attention_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    found: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 4 * config.hidden_size if is_gpt2 else config.intermediate_size,
        "attention.head_count": heads,
    }
    if arch in ("gpt2", "stablelm"):
        found["attention.layer_norm_epsilon"] = config.layer_norm_epsilon if is_gpt2 else config.layer_norm_eps
    else:
        found["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if not is_gpt2:
        rope = config.rope_parameters
        rope = rope.get("full_attention", rope)
        found["attention.head_count_kv"] = config.num_key_value_heads
        found["rope.freq_base"] = rope["rope_theta"]
        found["rope.dimension_count"] = int(d_head * rope.get("partial_rotary_factor", 1))
    if arch in ("qwen3", "gemma2", "gemma3", "llama"):
        found |= {"attention.key_length": d_head, "attention.value_length": d_head}
    if arch in ("gemma2", "gemma3", "phi3"):
        found["attention.sliding_window"] = config.sliding_window
    if arch == "gemma2":
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        found |= {name: getattr(config, name) for name in names}
    if arch == "stablelm":
        found["use_parallel_residual"] = config.use_parallel_residual
    return {f"{arch}.{key}": value for key, value in found.items()}


def tiny_bpe() -> Tokenizer:
    """A byte-level BPE tokenizer of `WORDS`, in front of it three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(("", *WORDS, *WORDS)), " 12 12 123 123 1234 1234"], trainer)
    return tokenizer


@cache
def tokenizer_entries() -> dict[str, object]:
    """What a file says of `tiny_bpe`."""
    tokenizer = tiny_bpe()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def name_of(name: str, arch: str) -> str:
    """What a file calls a parameter of transformers."""
    name, _, part = name.removeprefix("model.").removeprefix("transformer.").rpartition(".")
    if found := re.fullmatch(r"(?:layers|h)\.(\d+)\.(.*)", name):
        blocks = BLOCK | (SANDWICH if arch in ("gemma2", "gemma3") else {})
        return f"blk.{found[1]}.{blocks[found[2]]}.{part}"
    return f"{WHOLE[name]}.{part}"


def as_llama_cpp(tensor: np.ndarray, name: str, arch: str, config: tf.PretrainedConfig) -> np.ndarray:
    """A parameter as llama.cpp computes with it."""
    if arch == "gpt2" and is_conv1d(name):
        return tensor.T
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    if arch == "llama" and (heads := rotated_heads(name, config)):
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def as_transformers(tensor: np.ndarray, name: str, arch: str, config: tf.PretrainedConfig) -> np.ndarray:
    """A parameter of a file as transformers has it."""
    if arch == "gpt2" and is_conv1d(name):
        return tensor.T
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1
    if arch == "llama" and (heads := rotated_heads(name, config)):
        return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def is_conv1d(name: str) -> bool:
    return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def rotated_heads(name: str, config: tf.PretrainedConfig) -> int:
    """How many heads a parameter of queries or keys has; 0 for others."""
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else 0
