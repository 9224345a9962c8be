"""Work in forked processes: these have what is imported already, for which a process of its own takes ten seconds."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist


def started(work: Callable[[], object]) -> int:
    """Begin some work in a forked process and return its number."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            warnings.simplefilter("ignore")  # that a piece is computed anew
            work()
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """Wait for a process; return its exit code, 0 for well, or less than 0 where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shared(count: int, work: Callable[[], object], meeting: Path) -> list[int]:
    """Do some work in several processes that share a run and meet at a new file; return how each ended."""

    def joined(index: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=index, world_size=count)
        work()

    return [ended(child) for child in [started(partial(joined, index)) for index in range(count)]]
