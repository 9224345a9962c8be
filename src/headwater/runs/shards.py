"""Tensors in parts: what is too large to be kept is a row of files, read memory-mapped when it is requested.

A part is named tensors. In memory the parts are lists of them; on disk each is a safetensors file of one folder, in
the order of the files' names. A run makes such files one by one (`Run.stored`), and the finished result takes them over
where they lie, by a link, so that nothing is written twice. Each carries the hash of its content, which is checked when
it is read for the first time.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headwater.runs.storage import load_tensors, make_folder, read_tensors, write_atomically, write_tensors

NAME = re.compile(r"\d{6,}\.safetensors")


def shard_name(number: int) -> str:
    """Return the name of the file of a part."""
    return f"{number:06d}.safetensors"


class Shards:
    """Parts, each of named tensors: in memory, or files that are opened when a part is requested."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]] = ()):
        self._parts = [dict(part) for part in parts]
        self._files: list[Path] = []
        self._pieces: list[Path] = []
        self._checked: set[int] = set()

    @classmethod
    def of_files(cls, files: Sequence[Path], pieces: Sequence[Path] = ()) -> Shards:
        """Name the files of parts.

        Args:
            files: where they are, or will be once `write` has been called.
            pieces: where they lie until then, as this run wrote or read them.
        """
        made = cls()
        # Pieces were hashed when this run wrote or read them, and are not read a second time for it.
        made._files, made._pieces, made._checked = list(files), list(pieces), set(range(len(pieces)))
        return made

    @property
    def in_memory(self) -> bool:
        """Whether the tensors are kept, and not read from files."""
        return not self._files

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors take, or their files."""
        if self.in_memory:
            return sum(tensor.nbytes for part in self._parts for tensor in part.values())
        return sum(self._place(number).stat().st_size for number in range(len(self)))

    def __len__(self) -> int:
        return len(self._parts) or len(self._files)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return a part; of a file, tensors that are read when they are looked at, and must not be written into."""
        if self.in_memory:
            return self._parts[number]
        read = load_tensors if number in self._checked else read_tensors
        tensors = read(self._place(number))
        self._checked.add(number)
        return tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shards) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Shards({len(self)} parts, {self.nbytes / 2**20:,.1f} MiB{'' if self.in_memory else ' in files'})"

    def write(self, folder: Path) -> list[str]:
        """Write the parts into a folder and return the names of their files; what is there already stays."""
        make_folder(folder)
        names = [shard_name(number) for number in range(len(self))]
        for number, name in enumerate(names):
            if self.in_memory:
                write_tensors(folder / name, self._parts[number])
            else:
                self._copy(number, folder / name)
        for file in folder.iterdir():
            # Parts of an earlier, longer result in the same folder.
            if NAME.fullmatch(file.name) and file.name not in names:
                file.unlink()
        return names

    def _copy(self, number: int, target: Path) -> None:
        piece = self._pieces[number] if self._pieces else None
        source = piece if piece and piece.exists() else self._place(number)
        if target.exists() and source.samefile(target):
            return
        # A link of this run's own piece only, which is removed soon; two results must not share a file.
        put = _linked if source in self._pieces else shutil.copyfile
        write_atomically(target, lambda temporary: put(source, temporary))

    def _place(self, number: int) -> Path:
        file = self._files[number]
        return file if not self._pieces or file.exists() else self._pieces[number]


def _linked(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
