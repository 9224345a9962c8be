"""A checkpoint read whole, as a transformers model: every weight that the config asks for, and no other.

The weights go to a CUDA device tensor by tensor (`device_map={"": device}` of transformers, which wants accelerate):
the host holds as many tensors at once as transformers reads side by side, four, and not the whole model. A multimodal
model, of which a part is thrown away, and one that brings its own code are read whole on the host first, and so is what
goes to any other device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from headwater.errors import InputError, ModelError
from headwater.models.families import text_config
from headwater.models.memory import refuse_too_large
from headwater.models.weights.checkpoint import (
    INDEX,
    lacking,
    one_line,
    open_checkpoint,
    tensor_shapes,
    weight_files,
    without_use,
)
from headwater.models.weights.conversion import Conversion, quiet_transformers
from headwater.models.weights.gguf_file import is_gguf, read_gguf

STRAIGHT = ("cuda",)
"""Kinds of devices to which weights go one by one as they are read."""


def refuse_unless_it_fits(folder: Path, config: object, dtype: torch.dtype | None, device: torch.device) -> None:
    """Refuse a checkpoint that is larger than what is free on a device, before a weight is read."""
    stored = getattr(config, "dtype", None)
    kind = dtype or (stored if isinstance(stored, torch.dtype) else torch.float32)
    if is_gguf(folder):
        shapes = [one.shape for one in read_gguf(folder).tensors.values()]
    else:
        shapes = [shape for file in weight_files(folder) for shape in tensor_shapes(file).values()]
    count = sum(map(math.prod, shapes))
    advice = (
        'Use dtype="bfloat16", device="auto" with several GPUs, or another machine; hw.classify_heads(folder) needs '
        "one layer at a time."
    )
    refuse_too_large(f"The model in {folder}", count * kind.itemsize, device, advice)


def read_pretrained(
    folder: Path, config: object, dtype: torch.dtype | None, trust_remote_code: bool, device: torch.device | None
) -> PreTrainedModel:
    """Read a checkpoint: straight to a device where that is safe, else into the host's memory.

    A GGUF file is dequantised on the host, tensor by tensor.
    """
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    kind = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    where: str | dict[str, torch.device] | None = "auto"
    if device is not None:
        straight = device.type in STRAIGHT and not multimodal and not trust_remote_code
        where = {"": device} if straight else None
    if is_gguf(folder):
        return _read_gguf(folder, dtype or torch.float32, where)
    try:
        with quiet_transformers():
            hf, report = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype or "auto",
                trust_remote_code=trust_remote_code,
                attn_implementation="eager",
                use_safetensors=True,
                output_loading_info=True,
                device_map=where,
            )
    except Exception as error:  # each model class believes its config, and fails on what it says in its own way
        raise ModelError(_unreadable(folder, kind, config, error)) from error
    # Under all their names: a checkpoint may store a tied matrix under either.
    parameters = [name for name, _ in hf.named_parameters(remove_duplicate=False)]
    _check_report(folder, report, text_config(config).num_hidden_layers, parameters)
    if away := next((name for name, parameter in hf.named_parameters() if parameter.is_meta), None):
        raise InputError(
            f"All devices together are too small for the model in {folder}: {away} is not in memory. Use more or "
            'larger ones, or dtype="bfloat16"; hw.classify_heads(folder) needs one layer at a time.'
        )
    return hf


def _read_gguf(path: Path, dtype: torch.dtype, where: str | dict[str, torch.device] | None) -> PreTrainedModel:
    """Read the model of a GGUF file; that its tensors are all there, and no others, is seen when it is opened."""
    checkpoint = open_checkpoint(path)
    conversion = Conversion(checkpoint.config)
    weights = {conversion.full_name(name): checkpoint.read(name).to(dtype) for name in checkpoint.names}
    with quiet_transformers():
        return type(conversion.model).from_pretrained(
            None,
            config=checkpoint.config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            device_map=where,
        )


def _unreadable(folder: Path, kind: Any, config: object, error: Exception) -> str:
    """Why transformers could not read a checkpoint: a tensor of another shape than the config's, or what it says."""
    try:
        with torch.device("meta"):
            expected = {name: tuple(parameter.shape) for name, parameter in kind.from_config(config).named_parameters()}
    except Exception as reason:  # as above
        return f"The model of {folder} cannot be loaded: by its config it cannot be built, {one_line(reason)}"
    for file in weight_files(folder):
        for name, shape in tensor_shapes(file).items():
            if shape != expected.get(name, shape):
                return (
                    f"Tensor {name!r} in {file} has shape {shape}, but the config says {expected[name]}; config.json "
                    "and weights do not belong together."
                )
    if isinstance(error, KeyError) and (folder / INDEX).is_file():
        return f"{folder / INDEX} has no {error}, which transformers asks for; save the checkpoint again."
    return f"The weights in {folder} cannot be loaded: {one_line(error)}"


def _check_report(folder: Path, report: dict[str, Any], n_layers: int, parameters: Collection[str]) -> None:
    """Transformers fills what a checkpoint lacks with random numbers and drops what it has besides; refuse both."""
    if missing := sorted(report["missing_keys"]):
        raise ModelError(lacking(folder, missing[0], f" and {len(missing) - 1} others" if missing[1:] else ""))
    for name in sorted(report["unexpected_keys"]):
        layer = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
        if layer and int(layer[1]) >= n_layers:
            raise ModelError(
                f"The config in {folder} says {n_layers} layers, but {_file_of(folder, name)} holds {name!r}; "
                "config.json and weights do not belong together."
            )
    if (unused := without_use(report["unexpected_keys"], parameters)) is not None:
        raise ModelError(
            f"Tensor {unused!r} in {_file_of(folder, unused)} is used by no module that the config describes; "
            "config.json and weights do not belong together."
        )


def _file_of(folder: Path, name: str) -> Path:
    """The file that holds a tensor; the folder where transformers calls the tensor otherwise than the files do."""
    return next((file for file in weight_files(folder) if name in tensor_shapes(file)), folder)
