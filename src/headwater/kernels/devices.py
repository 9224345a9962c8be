"""What is asked of a device: whether it is there, its memory, Triton, products in float32; and what failed on it."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import operator
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from headwater.errors import HeadwaterError, InputError

GIVE = "Give cpu, cuda, or cuda:1."
TAKE_A_COPY_FIRST = frozenset({"cuda"})
"""Devices to which a copy of pageable memory is made of a copy: what it came from may change or go at once."""
COPIED_AT_ONCE = 2**16
"""Bytes up to which that is so without waiting; more goes by way of pinned memory, which torch keeps for the next."""


def usable_device(device: str | torch.device) -> torch.device:
    """The device that is meant."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # a text, something else, a number beyond all
        raise InputError(f"device={str(device)!r} cannot be used: torch knows none of this name. {GIVE}") from None
    try:
        # torch.device takes any index of any backend; only an allocation asks whether the device is there.
        torch.empty(0, device=parsed)
    except NotImplementedError:  # its message lists every kernel of torch
        reason = f"this torch computes nothing on {parsed.type}"
        raise InputError(f"device={str(device)!r} cannot be used: {reason}. {GIVE}") from None
    # A torch built without CUDA raises an AssertionError here.
    except (RuntimeError, AssertionError, ImportError) as error:
        if parsed.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"device={str(device)!r} cannot be used: torch {torch.__version__} finds no CUDA device here. Give cpu,"
                " or leave it out."
            ) from None
        # CUDA's messages go on with advice on debugging environment variables.
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise InputError(f"device={str(device)!r} cannot be used: {reason}. {GIVE}") from None
    return parsed


def is_on(device: torch.device, here: torch.device) -> bool:
    """Whether what is on the device `here` is on the one that is meant: "cuda:1" is that card, "cuda" is any."""
    any_index = device.type == "cpu" or device.index is None or here.index is None
    return device.type == here.type and (any_index or device.index == here.index)


def to_device(host: Tensor | np.ndarray, device: torch.device | str) -> Tensor:
    """Return numbers of the host on a device, which receives them after what it was given to do before.

    `tensor.to(device)`, `torch.tensor(..., device=device)` and an index by a list wait until all of that is done.
    """
    host = torch.from_numpy(host) if isinstance(host, np.ndarray) else host
    asynchronous = host.device.type == "cpu" and torch.device(device).type in TAKE_A_COPY_FIRST
    if asynchronous and host.nbytes > COPIED_AT_ONCE:
        # Pageable memory of this size would be staged by the driver, which makes the host wait for it.
        host = host.pin_memory()
    return host.to(device, non_blocking=asynchronous)


def to_device_many(parts: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Return several vectors of the host on a device, in one copy."""
    return to_device(torch.cat([*parts]), device).split([len(part) for part in parts]) if parts else ()


def runs_triton(tensor: Tensor) -> bool:
    """Whether the Triton twin of a kernel is the one for this tensor's device."""
    return tensor.is_cuda and is_ampere(tensor.device) and _triton_works()


@lru_cache
def is_ampere(device: torch.device) -> bool:
    """Whether a CUDA device is of the Ampere generation or later: its tensor cores take bfloat16 and TF32."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache
def _triton_works() -> bool:
    """Whether Triton is there, and the C compiler that it builds its launchers with."""
    # Triton alone is not enough: without a compiler its first launch fails, not its import.
    compilers = ("cc", "gcc", "clang")
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, compilers))


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32 inside, even where the caller lets torch use fewer bits (TF32, bfloat16)."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch answers so once its newer switch, one per backend, has been used
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
    """Hold one backend's own switch, `torch.backends.{backend}.matmul.fp32_precision`, at float32 inside.

    A switch at "none" reads as whatever `torch.backends.fp32_precision` says, and must follow that again afterwards.
    """
    before = backend.fp32_precision
    # Reading does not tell a switch that is set from one that follows: cleared, one that follows keeps its value.
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
    if a.is_cuda and is_half and is_ampere(a.device) and torch.__version__ >= "2.8":  # earlier ones cannot give float32
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# What fits in memory: refuse what is known to be too large before it starts, and go on in halves where it ran out.
#
# What has a known size (a model's weights, a cache, a table) and would not fit is refused with the figures, because a
# machine that begins to swap, or a process that the system ends, says nothing. What a run takes is not forecast: where
# memory runs out, `in_halves` takes the same items in two parts, and those again, down to single ones.


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
