"""Atomic file writes: a file is written under another name, flushed to the disk, then renamed.

1. `write_atomically` writes a temporary file in the same folder, flushes it to the disk, renames it, and flushes the
   folder, so that neither a killed process nor a power cut leaves a half-written file under the real name.
2. A full disk, or a folder without write permission, raises one clear error; the temporary file is removed.
3. Files that are read again later carry a seal, the hash of their content: headwater's own JSON under the key `sha256`,
   named tensors in the header of their safetensors file. A file that does not match its seal is refused.
4. `one_writer` locks a folder for this thread. The operating system releases the lock when the process ends, however
   it ends; an interrupted thread may lock its own folder again.
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
from functools import partial
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
"""The key of the hash, in JSON and in the header of a tensor file."""


def write_atomically(file: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, then rename: readers see the old file or the whole new one, also after a crash."""
    # In the same folder, since a rename is atomic only within one file system.
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(6)}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        temporary.replace(file)
        # The name is stored in the folder: a power cut may lose it although the file itself is on the disk.
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
    """Write a JSON object atomically; a path that is not valid UTF-8 is written with JSON escapes."""
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
    """Write a JSON object atomically, including the hash of its content."""
    write_json(file, {**value, SEAL: _hash_of_json(value)})


def read_sealed(file: Path) -> dict[str, Any]:
    """Read a JSON object that `write_sealed` wrote, and check its hash."""
    value = read_json(file)
    if value.pop(SEAL, None) != _hash_of_json(value):
        raise RunFolderError(f"{file} was changed since headwater wrote it. Delete the folder and run again.")
    return value


def _hash_of_json(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def write_tensors(file: Path, tensors: Mapping[str, Tensor], about: str = "") -> None:
    """Write named tensors atomically, with a description (`about`) and the hash of their content."""
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # One entry, since safetensors writes several in an order that differs between processes.
    seal = {SEAL: f"{about} {_hash_of_tensors(contiguous)}"}
    write_atomically(file, lambda temporary: save_file(contiguous, temporary, seal))


def read_tensors(file: Path, about: str | None = None, *, check: bool = True) -> dict[str, Tensor]:
    """Read the tensors that `write_tensors` wrote with this description, or with any (None), and check their hash.

    The tensors are views of the mapped file and must not be modified.
    """
    with _readable(file):
        tensors = load_file(file)
    if not check:
        return tensors
    written, _, content = seal_of(file).rpartition(" ")
    if content != _hash_of_tensors(tensors):
        raise RunFolderError(f"{file} was changed since headwater wrote it. Delete the folder and run again.")
    if about not in (None, written):
        raise RunFolderError(f"{file} belongs to another run. Delete the folder and run again.")
    return tensors


def seal_of(file: Path) -> str:
    """Return a tensor file's description and the hash of its content, from its header alone."""
    with _readable(file), safe_open(file, "pt") as opened:
        return (opened.metadata() or {}).get(SEAL, "")


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise RunFolderError(f"{file} cannot be read ({error}). Delete the folder and run again.") from None


def _hash_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    # Sorted, since safetensors uses its own order.
    parts = (part for name in sorted(tensors) for part in (name.encode(), hash_of_tensor(tensors[name])))
    return hashed("tensors", *parts).hex()


def refuse_foreign(path: Path, marker: str, names: Iterable[str]) -> None:
    """Raise RunFolderError if a folder contains one of these names but not `marker`, the file that headwater writes."""
    # lexists: a user's dangling link would also be overwritten.
    found = next((path / name for name in names if os.path.lexists(path / name)), None)
    if found is not None and not (path / marker).exists():
        raise RunFolderError(
            f"{found} would be overwritten, and {path} has no {marker} of headwater: choose another folder."
        )


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file; choose another name" if path.is_file() else error.strerror
        raise RunFolderError(f"Cannot make the output folder {path}: {reason}.") from None


def remove_folder(path: Path) -> None:
    """Remove a folder; if it is a link, remove only the link, not its target."""
    # rmtree refuses links, and their targets are not ours to remove.
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


LEFTOVERS = (".*.tmp", ".tmp??????")
"""Name patterns of temporary files: of `write_atomically`, and of safetensors, which also renames after writing."""


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of killed writers; only the holder of the folder's lock may call this."""
    for pattern in LEFTOVERS:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def one_writer(folder: Path) -> FileLock | None:
    """Lock a folder for this thread until `release_writer` or the lock is garbage-collected; None if another holds it.

    It is an operating system lock (`flock`), so the lock of a dead process is free.
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
    """Release a folder and remove its lock file."""
    # Remove the file before releasing: afterwards it may be another writer's.
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Tensors in parts: data too large for memory is a sequence of files, memory-mapped on request.
#
# A part is a dict of named tensors. In memory the parts are a list; on disk each is a safetensors file in one folder,
# in the order of the file names. A run writes each file where it stays (`Run.stored`). Each file carries the hash of
# its content, which is checked at the first read.


NAME = re.compile(r"\d{6,}\.safetensors")


class Shards:
    """A sequence of parts, each a dict of named tensors: in memory, or in files that are opened on request."""

    def __init__(self, parts: Sequence[Mapping[str, Tensor]] = ()):
        self._parts = [dict(part) for part in parts]
        self._files: list[Path] = []
        self._checked: set[int] = set()

    @classmethod
    def of_files(cls, files: Sequence[Path], checked: bool = False) -> Shards:
        """Return parts in files; `checked` if this process wrote them, or has already checked their hashes."""
        made = cls()
        made._files, made._checked = list(files), set(range(len(files))) if checked else set()
        return made

    @property
    def in_memory(self) -> bool:
        """Whether the tensors are in memory rather than in files."""
        return not self._files

    def __len__(self) -> int:
        return len(self._parts) or len(self._files)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return a part; tensors of a file are memory-mapped and must not be modified."""
        if self.in_memory:
            return self._parts[number]
        tensors = read_tensors(self._files[number], check=number not in self._checked)
        self._checked.add(number)
        return tensors

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shards) or len(self) != len(other):
            return False
        pairs = zip(self, other, strict=True)
        return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Shards({len(self)} parts{'' if self.in_memory else ' in files'})"

    def digest(self) -> str:
        """Return a hash of the content of all parts, the same in memory and in files; files are not read for it."""
        contents = [_hash_of_tensors(part) for part in self._parts]
        contents += [seal_of(file).rpartition(" ")[2] for file in self._files]
        return hashed("shards", *(content.encode() for content in contents)).hex()

    def write(self, folder: Path) -> list[str]:
        """Write the parts into a folder and return the names of their files; files already in place are kept."""
        make_folder(folder)
        names = [f"{number:06d}.safetensors" for number in range(len(self))]
        for number, name in enumerate(names):
            target = folder / name
            if self.in_memory:
                write_tensors(target, self._parts[number])
            elif not (target.exists() and target.samefile(self._files[number])):
                write_atomically(target, partial(shutil.copyfile, self._files[number]))
        for file in folder.iterdir():
            # It belongs to an earlier, longer result in the same folder.
            if NAME.fullmatch(file.name) and file.name not in names:
                file.unlink()
        return names
