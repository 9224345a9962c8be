"""Small random models of TransformerLens's own: native ones behind a bridge, under 3.9 HookedTransformers.

`OWN` has those that the installed generation can build: parallel blocks, ALiBi and sliding windows are in 3.9 alone.
"""

import functools
import importlib.metadata
import warnings
from typing import Any

import torch

import headwater as hw

VERSION = tuple(map(int, importlib.metadata.version("transformer-lens").split(".")[:2]))
HAS_BRIDGE_ONLY = VERSION >= (4, 0)
D_VOCAB, N_CTX = 23, 16
SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "d_head": 4,
    "d_mlp": 24,
    "n_ctx": N_CTX,
    "d_vocab": D_VOCAB,
    "act_fn": "gelu_new",
    "normalization_type": "LN",
    "device": "cpu",
}
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 4}
BOTH: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms folded": {"normalization_type": "LNPre"},
    "without norms": {"normalization_type": None, "act_fn": "relu"},
    "rms, gated, grouped": {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu", "n_key_value_heads": 2},
    "attention alone": {"attn_only": True},
    "attention alone, one layer, without norms": {"attn_only": True, "n_layers": 1, "normalization_type": None},
    "looks ahead": {"attention_dir": "bidirectional"},
    "looks ahead, rotary": {"attention_dir": "bidirectional", **ROTARY},
    "answers in other tokens": {"d_vocab_out": 7},
    "rotary": ROTARY,
    "rotary in part": ROTARY | {"rotary_dim": 2},
    "capped": {"attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "without positions": {},
    "without biases": {},
}
EARLIER: dict[str, dict[str, Any]] = {
    "parallel": {"parallel_attn_mlp": True},
    "parallel, rotary": {"parallel_attn_mlp": True, **ROTARY},
    "alibi": {"positional_embedding_type": "alibi"},
    "sliding": {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 3},
    "norms of queries and keys": {"use_qk_norm": True, **ROTARY, "normalization_type": "RMS"},
}
OWN = BOTH if HAS_BRIDGE_ONLY else BOTH | EARLIER


def raw_model(name: str, seed: int = 0, **options: Any) -> Any:
    """Return a model of TransformerLens whose every parameter, norms and biases too, is drawn afresh."""
    given = SIZES | OWN[name] | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if HAS_BRIDGE_ONLY:
            from transformer_lens.config import TransformerBridgeConfig
            from transformer_lens.model_bridge.sources.native import boot

            raw = boot(TransformerBridgeConfig.from_dict(given))
        else:
            from transformer_lens import HookedTransformer, HookedTransformerConfig

            raw = HookedTransformer(HookedTransformerConfig.from_dict(given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in raw.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = parameter.ndim == 1 and key.endswith(("weight", ".w"))
            parameter.copy_(1 + 0.2 * noise if is_gain else 0.4 * noise)
            is_bias = key.endswith("bias") or key.rsplit(".", 1)[-1].startswith(("b_", "_b_"))
            is_place = "pos_embed" in key or key.startswith("pos.")
            if (name == "without biases" and is_bias) or (name == "without positions" and is_place):
                parameter.zero_()
    return raw.eval()


@functools.cache
def own_model(name: str) -> hw.HookedModel:
    """Return one of them, loaded; all that use it share it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*folded the norms")
        return hw.load(raw_model(name))
