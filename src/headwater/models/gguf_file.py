"""Read a GGUF file as transformers represents it: the config, and every tensor with its name and layout.

llama.cpp stores some tensors differently. This module undoes that, so that weights equal the original checkpoint's:

    Llama     rows of q and k, and their biases, taken pairwise from both halves of a head
    Gemma     1 + weight of each norm
    GPT-2     the transposed weights of its Conv1D modules

Contents that headwater does not read (scaled rotary frequencies other than Llama 3's and linear ones, tensors and
entries without a name here) raise ModelError: the model would compute something else.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.devices import unreadable
from headwater.models.conversion import Conversion
from headwater.models.families import refuse_impossible_sizes
from headwater.models.fingerprint import fingerprint_of_files
from headwater.models.transformers_names import AutoConfig

RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
ENTRIES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
"""Entries that every file has, and their names in transformers."""
READ = ENTRIES.keys() | {
    "vocab_size", "feed_forward_length", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", RMS, LAYER_NORM,
}  # fmt: skip
"""Entries that are read for every family, or (the context before scaling) that matter for no supported family."""
ROPE_FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class Kind:
    """How transformers represents an architecture of llama.cpp.

    Attributes:
        model_type: the config's model type.
        norm: the entry for the epsilon of its norms, and its name in the config.
        entries: other entries read from the file, and their names in the config; "" if `_complete` reads the entry.
        partial: whether only a part of each head may be rotated.
    """

    model_type: str
    norm: tuple[str, str] = (RMS, "rms_norm_eps")
    entries: tuple[tuple[str, str], ...] = ()
    partial: bool = False


WINDOW = ("attention.sliding_window", "sliding_window")
SCORE_CAP = ("attn_logit_softcapping", "attn_logit_softcapping")
LOGIT_CAP = ("final_logit_softcapping", "final_logit_softcapping")
NEAR_AND_FAR = (("rope.freq_base_swa", ""), ("attention.sliding_window_pattern", ""))
KINDS = {
    "llama": Kind("llama"),
    "qwen2": Kind("qwen2"),
    "qwen3": Kind("qwen3"),
    "gemma": Kind("gemma"),
    "gemma2": Kind("gemma2", entries=(WINDOW, SCORE_CAP, LOGIT_CAP)),
    "gemma3": Kind("gemma3_text", entries=(WINDOW, LOGIT_CAP, *NEAR_AND_FAR)),
    "phi3": Kind("phi3", entries=(WINDOW,), partial=True),
    "gpt2": Kind("gpt2", norm=(LAYER_NORM, "layer_norm_epsilon")),
    "stablelm": Kind(
        "stablelm", norm=(LAYER_NORM, "layer_norm_eps"), entries=(("use_parallel_residual", ""),), partial=True
    ),
}
"""Kinds by the architecture name in the file."""


def _complete(file: GGUFFile, config: dict[str, Any]) -> None:
    """Complete a config's entries with what only its architecture has."""
    architecture, has_bias = file.architecture, "blk.0.attn_q.bias" in file.tensors
    if architecture == "llama":
        config["attention_bias"] = has_bias
    elif architecture == "gpt2":
        config["n_inner"] = config.pop("intermediate_size")
        for name in ("rope_parameters", "num_key_value_heads"):
            del config[name]
    elif architecture == "stablelm":
        parallel = _entry(file, "use_parallel_residual", "blk.0.ffn_norm.weight" not in file.tensors)
        config |= {"use_parallel_residual": bool(parallel), "use_qkv_bias": has_bias}
    elif architecture == "phi3":
        config["sliding_window"] = config.get("sliding_window") or None
    elif architecture in ("gemma2", "gemma3"):
        # Scores are scaled by 1/√d_head, except in 27B models, which llama.cpp also finds by their number of layers.
        is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[architecture]
        by_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = by_head if is_27b else config["head_dim"]
    if architecture == "gemma3":
        near = {"rope_type": "default", "rope_theta": float(_entry(file, "rope.freq_base_swa", 10000.0))}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": near}
        # The file of Gemma 3 270M contains neither this nor the base above; the defaults are transformers' own.
        pattern = _entry(file, "attention.sliding_window_pattern", 6)
        layers = range(config["num_hidden_layers"])
        is_near = pattern if isinstance(pattern, list) else [layer % pattern < pattern - 1 for layer in layers]
        config["layer_types"] = ["sliding_attention" if near_only else "full_attention" for near_only in is_near]
    if architecture in ("gpt2", "stablelm", "phi3", "qwen2"):
        del config["head_dim"]


def config_of(file: GGUFFile) -> Any:
    """Return the transformers config of a GGUF file."""
    if (parts := file.metadata.get("split.count", 0)) > 1:
        raise ModelError(
            f"{file.path} is one of {parts} parts; join them: llama-gguf-split --merge {file.path} WHOLE.gguf."
        )
    if file.architecture not in KINDS:
        raise ModelError(
            f"{file.path} holds a model of architecture {file.architecture!r}; headwater reads GGUF files of "
            f"{', '.join(KINDS)}. Give the checkpoint that it was converted from."
        )
    kind = KINDS[file.architecture]
    beyond = READ | {key for key, _ in kind.entries}
    prefix = f"{file.architecture}."
    for key, value in file.metadata.items():
        if key.startswith(prefix) and key.removeprefix(prefix) not in beyond and value not in (0, "none", "", []):
            raise ModelError(f"{file.path} says {key}={value!r}, which headwater does not read; {ORIGINAL}")
    # The file may say anything, and each config class checks it in its own way.
    with unreadable(f"The metadata of {file.path} describe no model; fetch it again"):
        config = AutoConfig.for_model(kind.model_type, **_config_entries(file, kind))
    refuse_impossible_sizes(config)
    return config


ORIGINAL = "give the checkpoint that it was converted from."


def _config_entries(file: GGUFFile, kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {name: _entry(file, key) for key, name in ENTRIES.items()}
    config |= {name: entry for key, name in kind.entries if name and (entry := _entry(file, key, None)) is not None}
    config[kind.norm[1]] = _entry(file, kind.norm[0])
    heads = config["num_attention_heads"]
    config["intermediate_size"] = _entry(file, "feed_forward_length")
    config["num_key_value_heads"] = _entry(file, "attention.head_count_kv", heads)
    config["head_dim"] = d_head = _entry(file, "attention.key_length", config["hidden_size"] // heads)
    rotated = _entry(file, "rope.dimension_count", d_head)
    if rotated != d_head and not kind.partial:
        raise ModelError(f"{file.path} rotates {rotated} of the {d_head} dimensions of a head; {ORIGINAL}")
    config["rope_parameters"] = {"rope_theta": float(_entry(file, "rope.freq_base", 10000.0))} | _scaling(file, d_head)
    if kind.partial:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / d_head
    config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    special = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    # The token that ends a chat turn is named separately from the token that ends a document.
    ends = list(dict.fromkeys(special[name] for name in ("eos", "eot") if special[name] is not None))
    config |= {"bos_token_id": special["bos"], "pad_token_id": special["padding"]}
    config["eos_token_id"] = ends if len(ends) > 1 else next(iter(ends), None)
    _complete(file, config)
    return config


_REQUIRED = object()


def _entry(file: GGUFFile, key: str, default: Any = _REQUIRED) -> Any:
    """Return one architecture entry: a list with the same number for all layers as one number, floats as written."""
    entry = file.metadata.get(f"{file.architecture}.{key}", default)
    if entry is _REQUIRED:
        raise ModelError(f"{file.path} does not say {file.architecture}.{key}, which its model needs; fetch it again.")
    if isinstance(entry, list) and len(set(entry)) == 1:
        entry = entry[0]
    if isinstance(entry, list) and key != "attention.sliding_window_pattern":
        raise ModelError(
            f"{file.path} says {file.architecture}.{key}={entry!r}, not the same for each layer; {ORIGINAL}"
        )
    # Stored as float32, 1e-5 reads as 9.999999747378752e-06, which would change the config and the fingerprint.
    return float(str(np.float32(entry))) if isinstance(entry, float) else entry


def _scaling(file: GGUFFile, d_head: int) -> dict[str, Any]:
    method, theta = _entry(file, "rope.scaling.type", "none"), float(_entry(file, "rope.freq_base", 10000.0))
    stored = next((name for name in file.tensors if name.startswith(("rope_factors", "rope_freqs"))), None)
    if stored is None and method in ("none", "linear"):
        factor = float(_entry(file, "rope.scaling.factor", 1.0)) if method == "linear" else 1.0
        return {"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"}
    if stored == ROPE_FREQUENCIES and method == "none":
        # Llama 3's divisor of each rotary frequency: 1 for short waves, `longest` for long ones, else blended.
        factors = file.read(stored).flatten()
        longest = round(float(factors.max()), 3)
        waves = 2 * math.pi * theta ** (torch.arange(0, d_head, 2, dtype=torch.float64) / d_head)
        share = ((8192 / waves - 1) / 3).clamp(0, 1)
        expected = (1 / ((1 - share) / longest + share)).float()
        if factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-5):
            return {
                "rope_type": "llama3", "factor": longest, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }  # fmt: skip
    raise ModelError(
        f"{file.path} scales rotary frequencies by the method {method!r} and the tensor {stored!r}, not linearly or as "
        f"Llama 3; {ORIGINAL}"
    )


def names_in(file: GGUFFile, config: Any) -> dict[str, str]:
    """Map each tensor of a checkpoint with this config (named relative to the base model) to its name in the file."""
    gguf, conversion = gguf_package(), Conversion(config)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == file.architecture)
    name_map = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    names: dict[str, str] = {}
    for name, shape in conversion.tensors.items():
        module, _, part = conversion.full_name(name).rpartition(".")
        full_name = f"{name_map.get_name(module)}.{part}"
        if full_name not in file.tensors:
            raise ModelError(
                f"{file.path} has no tensor {full_name!r} (expected shape {shape}); the file is incomplete."
            )
        stored = file.tensors[full_name].shape
        if stored != (shape[::-1] if _is_turned(file, full_name) else shape):
            raise ModelError(
                f"Tensor {full_name!r} in {file.path} has shape {stored}, but its metadata imply {shape}; fetch it "
                "again."
            )
        names[name] = full_name
    if unread := sorted(file.tensors.keys() - names.values() - {ROPE_FREQUENCIES}):
        raise ModelError(f"Tensor {unread[0]!r} in {file.path} is used by no module that headwater builds; {ORIGINAL}")
    return names


def read_as_stored(file: GGUFFile, config: Any, name: str) -> Tensor:
    """Return one tensor, identified by its name in the file, in the layout of transformers."""
    tensor = file.read(name)
    if file.architecture == "llama" and name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        rest = tensor.shape[1:]
        return tensor.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(-1, *rest)
    if file.architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor.sub_(1)
    return tensor.T.contiguous() if _is_turned(file, name) else tensor


def _is_turned(file: GGUFFile, own: str) -> bool:
    turned = (".attn_qkv.weight", ".attn_output.weight", ".ffn_up.weight", ".ffn_down.weight")
    return file.architecture == "gpt2" and own.endswith(turned)


# A GGUF file, the format of llama.cpp: its metadata, and its tensors, which are dequantised when read.
#
# "GGUF", version, number of tensors, number of entries
# entries: key, type, value                                   the model's architecture, and its tokenizer
# tensors: name, sizes (the fastest axis first), type, offset
# data, from the next multiple of the alignment on
#
# This module reads the header, since `gguf.GGUFReader` takes seconds for the lists of tokens. A matrix is dequantised
# in blocks of rows, to use little memory besides the result.


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` codes of the entry types of fixed size; 8 is a text, 9 an array."""
TEXT, ARRAY = 8, 9
AT_A_TIME = 2**18
"""Number of values dequantised at a time."""
INSTALL = 'pip install "headwater[gguf]"'


@dataclass(frozen=True, eq=False)
class Stored:
    """A stored tensor: its shape in PyTorch's order, its gguf type, and its bytes in the file."""

    shape: tuple[int, ...]
    type: Any
    packed: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file; tensors are read on request and never cached.

    Attributes:
        path: path of the file.
        metadata: entries by key; for an array of texts (such as the tokens), its length.
        tensors: each tensor's place in the file, by its name there.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]

    @property
    def architecture(self) -> str:
        """The file's name for its architecture, such as "llama"."""
        return str(self.metadata.get("general.architecture"))

    @property
    def revision(self) -> str:
        """Identifier of the weights: the file's name, its number of tensors of each type, and its SHA-256."""

        def compute() -> str:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        counts = Counter(stored.type.name for stored in self.tensors.values())
        types = ", ".join(f"{name} × {count}" for name, count in counts.most_common())
        return f"{self.path.name}, {types}, sha256 {fingerprint_of_files([self.path], 'sha256', compute)}"

    def read(self, name: str) -> Tensor:
        """Return one tensor in the file's layout, dequantised to float32, as a copy."""
        gguf, stored = gguf_package(), self.tensors[name]
        *outer, width = stored.shape
        rows = math.prod(outer)
        packed = stored.packed.reshape(rows, -1)
        values = np.empty((rows, width), dtype=np.float32)
        step = max(1, AT_A_TIME // width)
        try:
            for start in range(0, rows, step):
                values[start : start + step] = gguf.dequantize(packed[start : start + step], stored.type)
        except NotImplementedError:
            raise ModelError(
                f"Tensor {name!r} in {self.path} is stored as {stored.type.name}, which the package gguf does not "
                "dequantise: quantise the model again, as Q8_0 or F16."
            ) from None
        return torch.from_numpy(values).reshape(stored.shape)


def is_gguf(what: object) -> bool:
    """Whether this is the path of a GGUF file, by its suffix."""
    return isinstance(what, str | Path) and str(what).lower().endswith(".gguf")


def gguf_package() -> Any:
    """Import and return the package `gguf`."""
    try:
        import gguf
    except ImportError:
        raise ModelError(f"A GGUF file needs the package gguf, which is not installed: {INSTALL}.") from None
    return gguf


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and check that no data is missing."""
    gguf = gguf_package()
    if not path.is_file():
        raise ModelError(f"There is no file {path}; check the path.")
    metadata: dict[str, Any] = {}
    listed: dict[str, tuple[tuple[int, ...], Any, int]] = {}
    fix = "is damaged (fetch it again), or needs pip install -U gguf"
    with unreadable(f"{path} is not a GGUF file of version 2 or 3, {fix}"):
        with path.open("rb") as file:
            if (start := (file.read(4), _number(file, "I"))) not in ((b"GGUF", 2), (b"GGUF", 3)):
                raise ValueError(f"it begins with {start}")
            n_tensors, n_entries = _number(file, "Q"), _number(file, "Q")
            for _ in range(n_entries):
                key = _text(file)
                metadata[key] = _value(file, _number(file, "I"))
            for _ in range(n_tensors):
                name = _text(file)
                if name in listed:
                    raise ValueError(f"two tensors are called {name!r}")
                # A file lists the fastest axis first.
                shape = tuple(_number(file, "Q") for _ in range(_number(file, "I")))[::-1]
                listed[name] = shape, gguf.GGMLQuantizationType(_number(file, "I")), _number(file, "Q")
            alignment = metadata.get("general.alignment", 32)
            begin = -(-file.tell() // alignment) * alignment
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        tensors: dict[str, Stored] = {}
        for name, (shape, kind, offset) in listed.items():
            nbytes = math.prod(gguf.quant_shape_to_byte_shape(shape, kind))
            tensors[name] = Stored(shape, kind, content[begin + offset : begin + offset + nbytes])
            if len(tensors[name].packed) < nbytes:
                raise ValueError(f"tensor {name!r} ends beyond byte {len(content):,}")
    return GGUFFile(path, metadata, tensors)


def _number(file: BinaryIO, kind: str) -> Any:
    return _numbers(file, kind)[0]


def _numbers(file: BinaryIO, kinds: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{kinds}", file.read(struct.calcsize(f"<{kinds}")))


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    """Read the value of an entry; of an array of texts, its length."""
    if kind in SCALARS:
        return _number(file, SCALARS[kind])
    if kind == TEXT:
        return _text(file)
    if kind != ARRAY:
        raise ValueError(f"an entry is of type {kind}")
    inner, length = _number(file, "I"), _number(file, "Q")
    if inner in SCALARS:
        return list(_numbers(file, f"{length}{SCALARS[inner]}"))
    if inner != TEXT:
        raise ValueError(f"an array is of type {inner}")
    for _ in range(length):
        file.seek(_number(file, "Q"), 1)
    return length
