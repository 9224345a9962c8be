"""Quantized checkpoints: which are read, one tensor at a time, and which are refused by name.

    fp8     W[i, j] = Q[i, j] · scale[i // b, j // b]        Q in float8, b × b blocks of one scale each

A weight `NAME.weight` in float8 lies beside its `NAME.weight_scale_inv`; torch alone unpacks it. What
bitsandbytes, GPTQ, AWQ and others store is packed, and only their own kernels unpack it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.errors import ModelError
from headwater.options import shown

SCALE = "_scale_inv"
"""What follows the name of a weight in that of its scales."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantization_of(config: object) -> str | None:
    """The method by which a checkpoint is quantized, as its config names it; None where it is not."""
    entry = getattr(config, "quantization_config", None)
    if not entry:
        return None
    if (
        isinstance(entry, dict)
        and "quant_method" not in entry
        and any(option.startswith("load_in_") for option in entry)
    ):
        return "bitsandbytes"  # as its configs were before they named the method
    method = entry.get("quant_method") if isinstance(entry, dict) else getattr(entry, "quant_method", None)
    return str(getattr(method, "value", method) or "an unnamed method")


def refuse_odd_quantization(file: Path) -> None:
    """Refuse a config file whose entry on quantization is not an object: transformers has an error of its own."""
    try:
        entry = json.loads(file.read_text(encoding="utf-8"))["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if not isinstance(entry, dict | None):
        raise ModelError(
            f"{file} says quantization_config={shown(entry)}, which describes no quantization: it is an object as "
            '{"quant_method": "fp8"}; take the entry out where the weights are plain numbers.'
        )


def refuse_packed(folder: Path, config: object) -> None:
    """Refuse quantized weights that are not read here."""
    method = quantization_of(config)
    if method not in (None, "fp8"):
        raise ModelError(
            f"{folder} holds weights quantized by {method}, which only its own library unpacks; headwater reads float "
            "weights: save a dequantized copy."
        )


def refuse_unread(name: str, kind: str, file: Path, float8: bool) -> None:
    """Refuse a tensor that encodes other numbers than it stores, where the config does not say so."""
    copy = "headwater reads float weights: save a dequantized copy."
    if name.endswith(".qweight"):
        raise ModelError(f"Tensor {name!r} in {file} is packed as GPTQ and AWQ pack weights; {copy}")
    whole_numbers, unscaled = not kind.startswith(("F", "BF")), kind.startswith("F8") and not float8
    if name.endswith(".weight") and (whole_numbers or unscaled):
        unread = f"Tensor {name!r} in {file} is stored as {kind}, and config.json names no quantization"
        raise ModelError(f"{unread}; {copy}")


def refuse_to_run(folder: Path, config: object) -> None:
    """Refuse to load a model of quantized weights."""
    refuse_packed(folder, config)
    if method := quantization_of(config):
        raise ModelError(
            f"{folder} holds weights quantized by {method}; headwater runs float weights: save a dequantized copy, or "
            "read its heads from the folder, hw.classify_heads(folder)."
        )


def without_quantization(config: Any) -> Any:
    """Return a config of the model whose weights are plain numbers."""
    if not quantization_of(config):
        return config
    config = copy.deepcopy(config)
    del config.quantization_config
    return config


def block_size(config: object) -> tuple[int, int]:
    """How many rows and columns share a scale, as the config says it."""
    entry = getattr(config, "quantization_config", None) or {}
    stored = entry.get("weight_block_size") if isinstance(entry, dict) else getattr(entry, "weight_block_size", None)
    sizes = stored or (128, 128)
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ModelError(
            f"The config says weight_block_size={sizes!r}; blocks of float8 have two sizes, as [128, 128]."
        )
    rows, columns = sizes
    return rows, columns


def dequantized(
    stored: Float[Tensor, "rows out"], scale: Tensor, block: tuple[int, int], name: str
) -> Float[Tensor, "rows out"]:
    """Return the values of a weight in float8, in float32."""
    if scale.numel() == 1:
        return stored.float() * scale.float().reshape(())
    expected = tuple(-(-length // size) for length, size in zip(stored.shape, block, strict=True))
    if tuple(scale.shape) != expected:
        raise ModelError(
            f"Tensor {name!r} of shape {tuple(stored.shape)} has {tuple(scale.shape)} scales; its blocks of "
            f"{block[0]} x {block[1]} take {expected}. The checkpoint is damaged."
        )
    for axis, (length, size) in enumerate(zip(stored.shape, block, strict=True)):
        # The last block of an axis may be cut off by its end.
        scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, length)
    return stored.float() * scale.float()
