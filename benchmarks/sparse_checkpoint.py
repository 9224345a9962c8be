"""A checkpoint of a real model's shape on disk, of which only what is read is there.

Every tensor stands in the headers of the safetensors files in its full shape, so that the checkpoint opens like any
other. Random bfloat16 numbers are written for the embeddings and for the attention of the layers asked for; the rest
are holes in sparse files, which take no space.
"""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
import transformers

from benchmarks import outliers
from headwater.models.conversion import expected_tensors

ITEM = 2
UNEMBEDDING = "lm_head.weight"
NUMBERS_AT_ONCE = 2**24


def write_checkpoint(folder: Path, config: Any, layers: Iterable[int], seed: int = 0) -> None:
    """Write a Llama-like checkpoint: a file for the embeddings and one for each layer.

    Args:
        folder: an empty folder.
        config: a transformers config.
        layers: the layers whose attention is filled.
        seed: of the random weights, of standard deviation 1/√d_model, with outliers in the embeddings.
    """
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(config) | {UNEMBEDDING: (config.vocab_size, config.hidden_size)}
    filled = {f"layers.{layer}" for layer in layers}
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        files.setdefault(".".join(name.split(".")[:2]) if name.startswith("layers.") else "rest", {})[name] = shape
    weight_map = {}
    for number, (part, tensors) in enumerate(files.items()):
        file = folder / f"model-{number:05d}.safetensors"
        wanted = {name for name in tensors if part == "rest" or ("self_attn" in name and part in filled)}
        _write(file, {_stored(name): shape for name, shape in tensors.items()}, set(map(_stored, wanted)), generator)
        weight_map |= {_stored(name): file.name for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _stored(name: str) -> str:
    return name if name == UNEMBEDDING else f"model.{name}"


def _write(file: Path, shapes: dict[str, tuple[int, ...]], filled: set[str], generator: torch.Generator) -> None:
    """Write one safetensors file: the length of the header, the header, then the tensors one after the other."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + ITEM * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in filled:
            stream.seek(8 + len(text) + header[name]["data_offsets"][0])
            _write_random(stream, name, shapes[name], generator)
        stream.truncate(8 + len(text) + end)


def _write_random(stream: IO[bytes], name: str, shape: tuple[int, ...], generator: torch.Generator) -> None:
    width = shape[-1]
    n_rows, at_once = torch.Size(shape).numel() // width, max(1, NUMBERS_AT_ONCE // width)
    for first in range(0, n_rows, at_once):
        numbers = torch.randn(min(at_once, n_rows - first), width, generator=generator).mul_(width**-0.5)
        if name == UNEMBEDDING:
            outliers.in_unembedding(numbers, first)
        elif "embed_tokens" in name:
            outliers.in_embeddings(numbers)
        stream.write(numbers.bfloat16().view(torch.uint8).numpy().tobytes())
