"""What this machine can do, measured now: the floors that no program here can go below."""

import contextlib
import ctypes
import gc
import multiprocessing
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CLEAR_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Work:
    """What a job takes at least, in operations (two per multiply-add) and bytes, and how many things it gets done."""

    operations: float
    moved: float
    done: float = 0
    unit: str = ""
    half: bool = False
    """Whether its matrices are bfloat16, for which a GPU has a rate of its own."""


@dataclass(frozen=True)
class Machine:
    """Measured rates of one device."""

    device: str
    threads: int
    matrix_rate: float
    """Float32 multiply-adds in a large matrix product, in operations (two per multiply-add) a second."""
    bandwidth: float
    """Bytes a second, read and written, of a copy too large for any cache."""
    half_rate: float | None = None
    """The same as `matrix_rate` in bfloat16 with float32 sums; measured on a GPU only."""

    def floor(self, operations: float, moved: float) -> float:
        """Seconds that so many float32 operations and so many bytes take at least."""
        return max(operations / self.matrix_rate, moved / self.bandwidth)

    def rate(self, work: Work) -> float:
        """The matrix rate that bounds a job."""
        return self.half_rate or self.matrix_rate if work.half else self.matrix_rate

    def floor_of(self, work: Work) -> float:
        """Seconds that a job takes at least."""
        return max(work.operations / self.rate(work), work.moved / self.bandwidth)


def on_gpu(device: str) -> bool:
    """Whether a device is a GPU: it has a clock and a memory of its own, and the host does not wait for it."""
    return torch.device(device).type != "cpu"


def measure_machine(device: str, size: int = 4096) -> Machine:
    """Measure the matrix rates and the bandwidth of a device."""
    a, b = torch.randn(2, size, size, device=device)
    gpu = on_gpu(device)
    half = _matrix_rate(*torch.randn(2, 2 * size, 2 * size, device=device).bfloat16(), device) if gpu else None
    source = torch.ones((64 if gpu else 16) * size**2, device=device)
    target = torch.empty_like(source)
    copy = min(seconds(lambda: target.copy_(source), device) for _ in range(5))
    bandwidth = 2 * source.nbytes / copy
    return Machine(device_name(device), torch.get_num_threads(), _matrix_rate(a, b, device), bandwidth, half)


def _matrix_rate(a: torch.Tensor, b: torch.Tensor, device: str) -> float:
    a @ b
    return 2 * len(a) ** 3 / min(seconds(lambda: a @ b, device) for _ in range(3))


def device_name(device: str) -> str:
    """Return the name of a device for the report."""
    return torch.cuda.get_device_name(device) if on_gpu(device) else f"{platform.machine()} CPU"


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Return how long `work` takes; on a GPU by its own clock, from the first launch until everything is done."""
    if on_gpu(device):
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1000
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def best_in_turns(
    theirs: Callable[[], object], ours: Callable[[], object], device: str, rounds: int
) -> tuple[float, float]:
    """Return the shortest time of each, run in turns: what is short is disturbed easily."""
    taken = [(seconds(theirs, device), seconds(ours, device)) for _ in range(rounds)]
    return min(peer for peer, _ in taken), min(own for _, own in taken)


def synchronize(device: str) -> None:
    """Wait until the device has done what it was asked."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


def peak_bytes(work: Callable[[], object], device: str = "cpu") -> int | None:
    """Return how far memory rises above where it stood while `work` runs; None where the system does not tell.

    On a CPU this is the process's resident memory (Linux). Memory freed before goes back first where the C library can
    (glibc); what `work` still reuses of it is not seen, so measure in a process that has done nothing large.
    """
    gc.collect()
    if on_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR_PEAK.write_text("5")
        before = _status("VmRSS")
    except (OSError, StopIteration):
        work()
        return None
    work()
    return max(0, _status("VmHWM") - before)


def in_fresh_process(work: Callable[..., Any], *given: Any) -> Any:
    """Return what `work` returns in a process that has done nothing else yet: where peak memory is to be measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_with_threads, torch.get_num_threads(), work, given).result()


def _with_threads(threads: int, work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    torch.set_num_threads(threads)
    with torch.inference_mode():
        return work(*given)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])
