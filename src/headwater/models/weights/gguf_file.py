"""A GGUF file, the format of llama.cpp: its metadata, and its tensors, dequantised as they are read.

    "GGUF", version, number of tensors, number of entries
    entries: key, type, value                                   what the model is, and its tokenizer
    tensors: name, sizes (the fastest first), type, offset
    data, from the next multiple of the alignment on

The header is read here; the package `gguf` knows how many bytes a block of each type takes and which values it encodes
(`gguf.dequantize`). A matrix is dequantised in blocks of rows, so that beside the result little is in memory.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.models.weights.fingerprint import fingerprint_of_files

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of entries of a fixed size, as `struct` names them; 8 is a text, 9 an array."""
TEXT, ARRAY = 8, 9
AT_A_TIME = 2**18
"""How many values are dequantised at a time."""
INSTALL = 'pip install "headwater[gguf]"'


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies in a file.

    Attributes:
        shape: as PyTorch has it, the fastest axis last.
        type: of its numbers, as the package gguf names it.
        start: where its bytes begin.
        nbytes: how many it takes.
    """

    shape: tuple[int, ...]
    type: Any
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file that was opened; tensors are read when they are asked for and never kept.

    Attributes:
        path: where it is.
        metadata: its entries by key; of an array of texts, as the tokens are, its length.
        tensors: where each tensor lies, by its name in the file.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]
    _bytes: np.ndarray[Any, np.dtype[np.uint8]] = field(repr=False, compare=False)

    @property
    def architecture(self) -> str:
        """What the file calls its kind of model, as "llama"."""
        return str(self.metadata.get("general.architecture"))

    @property
    def types(self) -> str:
        """How many tensors there are of each type, as "Q4_1 × 210, F32 × 61"."""
        counts = Counter(stored.type.name for stored in self.tensors.values())
        return ", ".join(f"{name} × {count}" for name, count in counts.most_common())

    @property
    def revision(self) -> str:
        """Which weights these are: the file's name, its types and its SHA-256."""

        def compute() -> str:
            with self.path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()

        return f"{self.path.name}, {self.types}, sha256 {fingerprint_of_files([self.path], 'sha256', compute)}"

    def read(self, name: str) -> Tensor:
        """One tensor as the file has it, in float32, in memory of its own."""
        gguf, stored = gguf_package(), self.tensors[name]
        *outer, width = stored.shape
        rows = math.prod(outer)
        packed = self._bytes[stored.start : stored.start + stored.nbytes].reshape(rows, -1)
        values = np.empty((rows, width), dtype=np.float32)
        step = max(1, AT_A_TIME // width)
        for start in range(0, rows, step):
            values[start : start + step] = gguf.dequantize(packed[start : start + step], stored.type)
        return torch.from_numpy(values).reshape(stored.shape)


def is_gguf(what: object) -> bool:
    """Whether a name is that of a GGUF file."""
    return isinstance(what, str | Path) and str(what).lower().endswith(".gguf")


def gguf_package() -> Any:
    """The package `gguf`."""
    try:
        import gguf
    except ImportError:
        raise ModelError(f"A GGUF file needs the package gguf, which is not installed: {INSTALL}.") from None
    return gguf


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, and see that all of its data is there."""
    gguf = gguf_package()
    if not path.is_file():
        raise ModelError(f"There is no file {path}; check the path.")
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}; fetch it again."
                )
            # The array keeps the map open after the file is closed.
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        metadata, listed = _Header(content.data).read(path)
    except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError, OSError) as error:
        raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again.") from error
    if (parts := metadata.get("split.count", 0)) > 1:
        raise ModelError(f"{path} is one of {parts} parts; join them: llama-gguf-split --merge {path} WHOLE.gguf.")
    tensors: dict[str, Stored] = {}
    for name, (shape, number, start) in listed.items():
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(
                f"{path} holds numbers of type {number}, which the package gguf does not know: pip install -U gguf."
            ) from None
        values, size = gguf.GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % values or 0 in shape:
            raise ModelError(
                f"{path} is damaged: tensor {name!r} of shape {shape} is not made of the blocks of {values} that "
                f"{kind.name} has; fetch it again."
            )
        try:
            # The package has no public list of the types that it dequantises: a block of zeros is tried.
            gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
        except NotImplementedError:
            raise ModelError(
                f"Tensor {name!r} in {path} is stored as {kind.name}, which the package gguf does not dequantise: "
                "quantise the model again, as Q8_0 or F16."
            ) from None
        tensors[name] = Stored(shape, kind, start, math.prod(shape) // values * size)
        if (end := start + tensors[name].nbytes) > len(content):
            raise ModelError(
                f"{path} is cut short: tensor {name!r} ends at byte {end:,} of {len(content):,}; fetch it again."
            )
    return GGUFFile(path, metadata, tensors, content)


class _Header:
    """Reads the header of a file, value by value."""

    def __init__(self, content: memoryview):
        self._content, self._at = content, len(MAGIC)

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, int]]]:
        """The entries; and of each tensor its shape, the number of its type, and where it begins."""
        version = self._number("I")
        if version not in VERSIONS:
            raise ModelError(
                f"{path} is of version {version} of GGUF (or of another byte order); headwater reads versions "
                f"{VERSIONS[0]} and {VERSIONS[1]}: convert the model again."
            )
        n_tensors, n_entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(n_entries):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        listed: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(n_tensors):
            name = self._text()
            # A file lists the fastest axis first.
            shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
            if name in listed:
                raise ValueError(f"two tensors are called {name!r}")
            listed[name] = shape, self._number("I"), self._number("Q")
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an alignment of {alignment}")
        begin = -(-self._at // alignment) * alignment
        return metadata, {name: (shape, kind, begin + start) for name, (shape, kind, start) in listed.items()}

    def _number(self, kind: str) -> Any:
        (number,) = struct.unpack_from(f"<{kind}", self._content, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return number

    def _text(self) -> str:
        length = self._number("Q")
        text = self._content[self._at : self._at + length]
        if len(text) < length:
            raise ValueError("a text goes on beyond the end")
        self._at += length
        return bytes(text).decode()

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            raise ValueError(f"an entry of type {kind}")
        inner, length = self._number("I"), self._number("Q")
        if inner in SCALARS:
            numbers = struct.unpack_from(f"<{length}{SCALARS[inner]}", self._content, self._at)
            self._at += struct.calcsize(f"<{length}{SCALARS[inner]}")
            return list(numbers)
        if inner != TEXT:
            raise ValueError(f"an array of type {inner}")
        for _ in range(length):
            size = self._number("Q")
            self._at += size
        return length
