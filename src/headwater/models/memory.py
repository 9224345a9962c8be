"""What fits in memory: refuse what is known to be too large before it starts, and go on in halves where it ran out.

What has a known size (a model's weights, a cache, a table) and would not fit is refused with the figures, because a
machine that begins to swap, or a process that the system ends, says nothing. What a run takes is not forecast: where
memory runs out, `in_halves` takes the same items in two parts, and those again, down to single ones.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from headwater.errors import HeadwaterError, InputError

Value = TypeVar("Value")


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, to be used again
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)


def refuse_too_large(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Refuse what needs more bytes than a device has left."""
    available = available_memory(device)
    if needed > available:
        raise InputError(
            f"{what} would take {spelled_bytes(needed)}; {device} has {spelled_bytes(available)} free. {advice}"
        )


def refuse_too_large_for_disk(what: str, needed: int, folder: Path, advice: str) -> None:
    """Refuse what needs more bytes than the disk has left; what the folder holds already counts as written."""
    there = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) if folder.is_dir() else 0
    above = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path())
    free = shutil.disk_usage(above).free
    if needed > free + there:
        raise InputError(
            f"{what} would take {spelled_bytes(needed)}; the disk of {folder} has {spelled_bytes(free)} free. {advice}"
        )


def spelled_bytes(count: int) -> str:
    """Name a number of bytes in GiB, or where that would be hardly any in MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:,.1f} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or a CPU."""
    # torch's allocator on the CPU raises a plain RuntimeError, which only its text identifies.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def failures_named(what: str, *, in_a_run: bool = True) -> Iterator[None]:
    """Say which of the functions that a caller gave failed, and how; what it raised is chained.

    Memory that runs out in a run of the model is not the function's failure: the run is made again in halves.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HeadwaterError) or (in_a_run and is_out_of_memory(error)):
            raise
        message = " ".join(str(error).split()) or "no message"
        raise InputError(f"{what}: {type(error).__name__}: {message}") from error


def in_halves(items: Any, work: Callable[[Any], Value]) -> list[Value]:
    """Do the work on all items at once; when memory runs out, on one half and then the other, and so on.

    Items are whatever has a length and gives parts of it by slices. The work must undo what it did when it fails.

    Returns:
        What each part of the work returned, in order.
    """
    try:
        return [work(items)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    # After the except clause: until it ends, the traceback keeps alive the tensors that are to go.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(items) < 2:
        raise HeadwaterError(f"Memory ran out even with one sequence at a time: {reason}")
    middle = len(items) // 2
    return [*in_halves(items[:middle], work), *in_halves(items[middle:], work)]
