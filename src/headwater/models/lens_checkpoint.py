"""Checkpoints that a HookedTransformer wrote: its state dict and its config.

The state dict (.safetensors, or where it is allowed .pth and .pt; tensors only, never code) lies in a folder with the
config as JSON (`HookedTransformerConfig.to_dict()`), or is a file beside that JSON. TransformerLens's converter turns
the names and shapes into those of its own native model. That model rotates neighbouring coordinates of queries and
keys where a HookedTransformer rotates the two halves against each other, so here the coordinates are reordered alike in
queries and keys: scores, patterns and everything after are the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import ModelError, first_line

WEIGHTS = (".safetensors", ".pth", ".pt")
COMPUTED = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")
"""Buffers of a HookedTransformer that follow from its config."""
ROTATED = ("W_Q", "W_K", "b_Q", "b_K")
UNSUPPORTED = {
    "parallel_attn_mlp": False,
    "use_local_attn": False,
    "use_qk_norm": False,
    "use_normalization_before_and_after": False,
    "post_embedding_ln": False,
    "scale_attn_by_inverse_layer_idx": False,
    "use_NTK_by_parts_rope": False,
    "num_experts": None,
    "rmsnorm_uses_offset": False,
}
"""What TransformerLens's native model does not do: each must have this value, or be absent."""


def is_lens_checkpoint(path: Path) -> bool:
    """Whether a folder or file is a state dict with a HookedTransformer's config."""
    return _config_file(path) is not None


def read_lens_checkpoint(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    device: str | torch.device,
    dtype: torch.dtype | None,
    *,
    pickled: bool = False,
) -> object:
    """Build the model of a HookedTransformer's checkpoint.

    Returns:
        A TransformerBridge around TransformerLens's native model; under transformer-lens 3.9 a HookedTransformer.
    """
    config_file = _config_file(path)
    if config_file is None:
        raise ModelError(f"{path} has no config of a HookedTransformer.")
    config: dict[str, object] = json.loads(config_file.read_text(encoding="utf-8"))
    for field, plain in UNSUPPORTED.items():
        if config.get(field, plain) != plain:
            raise ModelError(
                f"{path}: a HookedTransformer with {field}={config[field]} cannot be rebuilt from its state dict."
            )
    state = _read_state(_weights_file(path), pickled)
    dtype = dtype or next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
    config = config | {"dtype": dtype, "device": str(device), "init_weights": False, "trust_remote_code": False}
    try:
        return _build(config, state, tokenizer)
    except Exception as error:  # a config may hold anything, and TransformerLens believes it
        raise ModelError(f"{path}: the state dict does not fit its config: {first_line(error)}") from error


def _build(config: dict[str, Any], state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase | None) -> object:
    try:
        from transformer_lens.utilities.tl_checkpoint_conversion import convert_tl_checkpoint
    except ImportError:
        return _build_hooked_transformer(config, state, tokenizer)
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge.sources.native import boot

    if config.get("positional_embedding_type") == "rotary" and not config.get("rotary_adjacent_pairs"):
        state = _interleave_rotary(state, config.get("rotary_dim") or config["d_head"])
    native_config = TransformerBridgeConfig.from_dict(config | {"architecture": None})
    where = {"device": config["device"], "dtype": config["dtype"]}
    raw = boot(native_config, tokenizer=tokenizer, model_name="HookedTransformer checkpoint", **where)
    # The native model has biases everywhere; a checkpoint without them has zeros there.
    wanted = raw.state_dict()
    converted = convert_tl_checkpoint(state, native_config)
    for name, tensor in converted.items():
        if name not in wanted and bool(tensor.any()):
            raise ValueError(f"{name} is not zero, and the rebuilt model has no place for it")
    missing = sorted(name for name in set(wanted) - set(converted) if not name.endswith(".bias"))
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    zeros = {name: torch.zeros_like(wanted[name]) for name in wanted if name not in converted}
    raw.load_state_dict({name: converted.get(name, zeros.get(name)) for name in wanted}, strict=True)
    return raw.eval().requires_grad_(False)


def _interleave_rotary(state: dict[str, Tensor], rotary_dim: int) -> dict[str, Tensor]:
    """Put the two halves of the rotated coordinates of queries and keys side by side: 0, n/2, 1, n/2 + 1, ..."""
    pairs = torch.arange(rotary_dim).reshape(2, -1).T.flatten()

    def reorder(tensor: Tensor) -> Tensor:
        return torch.cat([tensor[..., pairs], tensor[..., rotary_dim:]], dim=-1)

    return {name: reorder(tensor) if name.endswith(ROTATED) else tensor for name, tensor in state.items()}


def _build_hooked_transformer(
    config: dict[str, object], state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase | None
) -> object:
    import transformer_lens

    cfg = transformer_lens.HookedTransformerConfig.from_dict(config)
    model = transformer_lens.HookedTransformer(cfg, tokenizer=tokenizer, move_to_device=True)
    result = model.load_state_dict(state, strict=False)
    if result.unexpected_keys:
        raise ValueError(f"{result.unexpected_keys[0]} is not a parameter of this config")
    if missing := [name for name in result.missing_keys if not name.endswith((*COMPUTED, "b_U"))]:
        raise ValueError(f"{missing[0]} is missing")
    return model.eval().requires_grad_(False)


def _read_state(file: Path, pickled: bool) -> dict[str, Tensor]:
    if file.suffix != ".safetensors" and not pickled:
        raise ModelError(
            f"The weight file {file} is pickled: pass pickled=True to read its tensors (never code), or save it as "
            "safetensors."
        )
    try:
        state = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # a damaged pickle leads torch to errors of every kind
        raise ModelError(
            f"The weight file {file} is damaged or holds more than tensors ({first_line(error)})."
        ) from None
    state = state.get("state_dict", state) if isinstance(state, dict) else {}
    tensors = {str(n): t for n, t in state.items() if isinstance(t, Tensor) and not str(n).endswith(COMPUTED)}
    if not any(tensor.is_floating_point() for tensor in tensors.values()):
        raise ModelError(f"The weight file {file} holds no weights.")
    return tensors


def _weights_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = [file for suffix in WEIGHTS for file in sorted(path.glob(f"*{suffix}"))]
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelError(
            f"{path} must hold one state dict ({', '.join(WEIGHTS)}); found: {found}. Or give the file itself."
        )
    return files[0]


def _config_file(path: Path) -> Path | None:
    """Find the JSON with a HookedTransformer's config: in the folder, or beside the file (its own name first)."""
    if path.is_file() and path.suffix in WEIGHTS:
        candidates = [path.with_suffix(".json"), *sorted(path.parent.glob("*.json"))]
    else:
        candidates = sorted(path.glob("*.json")) if path.is_dir() else []
    for file in candidates:
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(config, dict) and {"d_model", "n_layers", "d_head", "n_ctx"} <= config.keys():
            return file
    return None
