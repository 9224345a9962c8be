"""What is asked of a device: whether it is there, that numbers come to it, Triton, and float32 products in float32."""

import contextlib
import importlib.util
import operator
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.errors import InputError

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
    """Whether what is on the device `here` is on the one that is meant: "cuda" means any card, "cuda:1" that one."""
    return device.type == here.type and (device.type == "cpu" or device.index in (None, here.index))


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
