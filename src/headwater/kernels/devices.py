"""Devices: availability, memory, Triton, float32 products; and error messages for failures on them."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import operator
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from headwater.errors import HeadwaterError, InputError, ModelError

TAKE_A_COPY_FIRST = frozenset({"cuda"})
"""Devices to which pageable memory is sent from a copy of it: the source may be changed or freed at once."""
COPIED_AT_ONCE = 2**16
"""Most bytes for which this needs no wait; larger arrays go through pinned memory, which torch caches for reuse."""
PINNED_AT_MOST = 2**29
"""Most bytes of an array that goes through pinned memory; the host waits for a larger one."""


def usable_device(device: str | torch.device) -> torch.device:
    """Return the named device, or refuse one that cannot be used."""
    try:
        parsed = torch.device(device)
        # torch.device accepts any index of any backend; only an allocation checks that the device exists.
        torch.empty(0, device=parsed)
    # A torch built without CUDA raises an AssertionError; what is not a name, a TypeError.
    except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
        # CUDA's messages continue with advice on debugging, and others with the list of all kernels.
        reason = str(error).split("\n", 1)[0].split(". ", 1)[0].rstrip(".")
        devices = "cpu, cuda, or cuda:1" if torch.cuda.is_available() else "cpu: torch finds no CUDA device here"
        raise InputError(f"device={str(device)!r} cannot be used: {reason}. Give {devices}.") from None
    return parsed


def is_on(device: torch.device, here: torch.device) -> bool:
    """Return whether the device `here` is the specified one: "cuda:1" is that card, "cuda" is any."""
    any_index = device.type == "cpu" or device.index is None or here.index is None
    return device.type == here.type and (any_index or device.index == here.index)


def to_device(host: Tensor | np.ndarray, device: torch.device | str) -> Tensor:
    """Copy numbers from the host to a device without waiting (up to 512 MiB); they arrive after its earlier work.

    `tensor.to(device)`, `torch.tensor(..., device=device)` and an index by a list wait until all of that work is done.
    """
    host = torch.from_numpy(host) if isinstance(host, np.ndarray) else host
    asynchronous = host.device.type == "cpu" and torch.device(device).type in TAKE_A_COPY_FIRST
    if asynchronous and COPIED_AT_ONCE < host.nbytes <= PINNED_AT_MOST:
        # The driver would stage pageable memory of this size, which makes the host wait for it.
        host = host.pin_memory()
    return host.to(device, non_blocking=asynchronous)


def to_device_many(parts: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Copy several vectors from the host to a device, in one copy."""
    return to_device(torch.cat([*parts]), device).split([len(part) for part in parts]) if parts else ()


def runs_triton(tensor: Tensor) -> bool:
    """Return whether this tensor's device runs the Triton version of a kernel."""
    return tensor.is_cuda and is_ampere(tensor.device) and _triton_works()


@lru_cache
def is_ampere(device: torch.device) -> bool:
    """Return whether a CUDA device is of the Ampere generation or later: its tensor cores take bfloat16 and TF32."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def _triton_works() -> bool:
    """Return whether Triton is installed, and the C compiler that it builds its launchers with."""
    # Triton alone is not enough: without a compiler its first launch fails, not its import.
    compilers = ("cc", "gcc", "clang")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside, even if the caller lets torch use fewer bits (TF32, bfloat16)."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch raises this once its newer switch, one per backend, has been used
        with contextlib.ExitStack() as stack:
            for backend in operator.attrgetter("cuda.matmul", "mkldnn.matmul")(torch.backends):
                stack.enter_context(_ieee_products(backend))
            yield
        return
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _ieee_products(backend: Any) -> Iterator[None]:
    """Keep one backend's switch, `torch.backends.{backend}.matmul.fp32_precision`, at float32 inside.

    A switch at "none" reads as the value of `torch.backends.fp32_precision`, and must follow that again afterwards.
    """
    before = backend.fp32_precision
    # A read does not show whether the switch is set or follows: one that follows keeps its value when cleared.
    backend.fp32_precision = "none"
    follows = backend.fp32_precision == before
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = "none" if follows else before


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in float32.

    On CUDA the product of two bfloat16 (or float16) matrices runs on the tensor cores: there the products of the
    entries are exact, and their sums are taken in float32.
    """
    is_half = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    # torch.__version__ compares as a version, not as text: "2.10" comes after "2.8".
    if a.is_cuda and is_half and is_ampere(a.device) and torch.__version__ >= "2.8":  # earlier: no float32 output
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# Memory. Data of known size (weights, a cache, a table) that would not fit are refused with the figures, because a
# machine that begins to swap, or a process that the system kills, reports nothing. The memory of a run is not forecast:
# when it runs out, `in_halves` processes the same items in two parts, and again, down to single ones.


Value = TypeVar("Value")


def available_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch, reusable
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    return int(psutil.virtual_memory().available)


def refuse_too_large(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Refuse anything that needs more bytes than a device has free."""
    available = available_memory(device)
    if needed > available:
        raise InputError(
            f"{what} would take {spelled_bytes(needed)}; {device} has {spelled_bytes(available)} free. {advice}"
        )


def refuse_too_large_for_disk(what: str, needed: int, folder: Path, advice: str) -> None:
    """Refuse what needs more bytes than the disk has free; safetensors files already in the folder count as written."""
    there = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) if folder.is_dir() else 0
    above = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path())
    free = shutil.disk_usage(above).free
    if needed > free + there:
        raise InputError(
            f"{what} would take {spelled_bytes(needed)}; the disk of {folder} has {spelled_bytes(free)} free. {advice}"
        )


def spelled_bytes(count: int) -> str:
    """Format a number of bytes in GiB, or if that would be close to zero in MiB."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:,.1f} MiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or a CPU."""
    # torch's allocator on the CPU raises a plain RuntimeError, which only its text identifies.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def failures_named(what: str, *, kind: type[HeadwaterError] = InputError, in_a_run: bool = True) -> Iterator[None]:
    """Report what failed, such as a caller's function or the reading of a file, and how; the exception is chained.

    Running out of memory in a run of the model is not the function's failure: the run is repeated in halves.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, HeadwaterError) or (in_a_run and is_out_of_memory(error)):
            raise
        message = " ".join(str(error).split()) or "no message"
        raise kind(f"{what}: {type(error).__name__}: {message}") from error


unreadable = partial(failures_named, kind=ModelError, in_a_run=False)
"""Report that a model or its files cannot be read, and why."""


def in_halves(items: Any, work: Callable[[Any], Value]) -> list[Value]:
    """Do the work on all items at once; if memory runs out, on one half and then the other, and so on.

    Items may be anything with a length and slices. The work must undo its effects when it fails. Returns the results
    of each part of the work, in order.
    """
    try:
        return [work(items)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error)
    # After the except clause: until it ends, the traceback keeps alive the tensors that are to be freed.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(items) < 2:
        raise HeadwaterError(f"Memory ran out even with one sequence at a time: {reason}")
    middle = len(items) // 2
    return [*in_halves(items[:middle], work), *in_halves(items[middle:], work)]


def in_tiles(items: Any, at_once: int, work: Callable[[Any], object]) -> int:
    """Do the work on at most `at_once` items at a time, and on fewer from the first tile on that exceeds memory.

    Returns the number of items that fit in memory. Items and work are as for `in_halves`.
    """
    while len(items):
        tile, items = items[:at_once], items[at_once:]
        at_once = max(1, at_once // len(in_halves(tile, work)))
    return at_once
