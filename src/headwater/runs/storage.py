"""Files that are whole or absent: written under another name, forced to the disk, then renamed.

1. `write_atomically` writes a temporary file in the same folder, flushes it to the disk, renames it, and flushes the
   folder, so that neither a killed process nor a power cut leaves a half-written file under the real name.
2. A disk that is full, or a folder that may not be written, is one clear error; the temporary file is removed.
3. What is read again later carries a seal, the hash of its content: JSON of headwater's own under the key `sha256`,
   named tensors in the header of their safetensors file. What does not fit its seal is refused.
4. `one_writer` holds a folder for this thread. The operating system lets go of it when the process ends, however it
   ends; a thread that was interrupted may take its own folder again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.errors import RunFolderError
from headwater.runs.identity import hash_of_tensor, hashed

LOCK = ".lock"
SEAL = "sha256"
"""The key of the hash, in JSON and in the header of a file of tensors."""


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, then rename: readers see the old file or the whole new one, also after a crash."""
    # In the same folder, since a rename is atomic within one file system alone.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(6)}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        temporary.replace(file)
        # The name is in the folder, which a power cut may lose although the file itself is on the disk.
        _flush(file.parent)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RunFolderError(
            f"{file} cannot be written: {reason}. Make room or choose another folder, and run the same command again; "
            "what is finished is kept."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(file: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object atomically; a path that is not UTF-8 is written with the escapes of JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_atomically(file, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="backslashreplace"))


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(f"{file} is damaged ({error}). Delete the folder and run again.") from None
    if not isinstance(value, dict):
        raise RunFolderError(
            f"{file} is damaged: it holds a {type(value).__name__}, not an object. Delete the folder and run again."
        )
    return value


def write_sealed(file: Path, value: Mapping[str, object]) -> None:
    """Write a JSON object atomically, with the hash of its content in it."""
    write_json(file, {**value, SEAL: _hash_of_json(value)})


def read_sealed(file: Path) -> dict[str, Any]:
    """Read a JSON object that `write_sealed` wrote."""
    value = read_json(file)
    if value.pop(SEAL, None) != _hash_of_json(value):
        raise RunFolderError(f"{file} was changed since headwater wrote it. Delete the folder and run again.")
    return value


def _hash_of_json(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def write_tensors(file: Path, tensors: Mapping[str, Tensor], about: str = "") -> None:
    """Write named tensors atomically, with what they are and the hash of their content."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # One entry: safetensors writes several in an order that differs from process to process.
    seal = {SEAL: f"{about} {_hash_of_tensors(contiguous)}"}
    write_atomically(file, lambda temporary: save_file(contiguous, temporary, seal))


def read_tensors(file: Path, about: str | None = None) -> dict[str, Tensor]:
    """Read what `write_tensors` wrote about this, or about anything (None).

    The tensors lie in the mapped file and must not be written into.
    """
    tensors = load_tensors(file)
    written, _, content = seal_of(file).rpartition(" ")
    if content != _hash_of_tensors(tensors):
        raise RunFolderError(f"{file} was changed since headwater wrote it. Delete the folder and run again.")
    if about not in (None, written):
        raise RunFolderError(f"{file} is of another run. Delete the folder and run again.")
    return tensors


def load_tensors(file: Path) -> dict[str, Tensor]:
    """Read named tensors as they are; see `read_tensors`."""
    with _readable(file):
        return load_file(file)


def seal_of(file: Path) -> str:
    """Return what a file of tensors says that it is, and the hash of its content, from its header alone."""
    with _readable(file), safe_open(file, "pt") as opened:
        return (opened.metadata() or {}).get(SEAL, "")


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise RunFolderError(f"{file} cannot be read ({error}). Delete the folder and run again.") from None


def _hash_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    # Sorted, since safetensors keeps an order of its own.
    parts = (part for name in sorted(tensors) for part in (name.encode(), hash_of_tensor(tensors[name])))
    return hashed("tensors", *parts).hex()


def refuse_foreign(path: Path, marker: str, names: Iterable[str]) -> None:
    """Refuse to write files of these names into a folder that has one, and lacks the file that is headwater's own."""
    # lexists: a dangling link of the user's would be overwritten, too.
    found = next((path / name for name in names if os.path.lexists(path / name)), None)
    if found is not None and not (path / marker).exists():
        raise RunFolderError(
            f"{found} would be overwritten, and {path} has no {marker} of headwater: choose another folder."
        )


def make_folder(path: Path) -> None:
    """Make a folder and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file; choose another name" if path.is_file() else error.strerror
        raise RunFolderError(f"Cannot make the output folder {path}: {reason}.") from None


def remove_folder(path: Path) -> None:
    """Remove a folder, or the link that is in its place and not what it leads to."""
    # rmtree refuses links, and what they lead to is not ours to remove.
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


LEFTOVERS = (".*.tmp", ".tmp??????")
"""Names of temporary files: those of `write_atomically`, and those that safetensors writes under before it renames."""


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; only whoever holds the folder may."""
    for pattern in LEFTOVERS:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def one_writer(folder: Path) -> FileLock | None:
    """Hold a folder for this thread until `release_writer`, or until the holder is forgotten; None if another has it.

    The lock is the operating system's (`flock`), so one that a dead process held is free.
    """
    lock = FileLock(folder / LOCK, is_singleton=True)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as error:
        raise RunFolderError(f"The output folder {folder} cannot be written: {error.strerror}.") from None
    return lock


def release_writer(lock: FileLock) -> None:
    """Let a folder go and remove its lock file."""
    # Before it is released: afterwards the file may be another writer's.
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Tensors in parts: what is too large to be kept is a row of files, read memory-mapped when it is requested.
#
# A part is named tensors. In memory the parts are lists of them; on disk each is a safetensors file of one folder, in
# the order of the files' names. A run makes such files one by one (`Run.stored`), and the finished result takes them
# over where they lie, by a link, so that nothing is written twice. Each carries the hash of its content, which is
# checked when it is read for the first time.


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
        """Name the files of parts; until `write` makes them, parts lie in `pieces`, as this run wrote or read them."""
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
        if not isinstance(other, Shards) or len(self) != len(other):
            return False
        pairs = zip(self, other, strict=True)
        return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)

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
