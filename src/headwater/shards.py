"""Several processes on one run, as `accelerate launch` starts them: who computes which piece, and who writes.

A run is a list of pieces that do not depend on one another. Of N processes, process p computes pieces p, p + N, ...
and writes them into the run's folder, which all can reach; the pieces of the others are read from there. What follows
from the pieces is computed by every process alike, so all return the same result, and the main one writes it.

Processes belong together when torch's process group is there: `accelerate.Accelerator()` or `PartialState()` makes it,
and so does `accelerate launch -m headwater`. Without one there is one process, and nothing here does anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from headwater.errors import HeadwaterError

Value = TypeVar("Value")
LONGEST_PAUSE = 1.0
"""Seconds between two looks at the folder."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run, and which one this is."""

    index: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.index == 0

    def owns(self, piece: int) -> bool:
        """Whether this process computes piece number `piece`."""
        return piece % self.count == self.index

    def on_main(self, work: Callable[[], Value]) -> Value:
        """Do something in the main process while the others wait; every process returns its value or raises its error.

        Raises:
            HeadwaterError: what `work` raised in the main process.
        """
        if self.count == 1:
            return work()
        outcome: list[Any] = [None, None]
        failure: BaseException | None = None
        if self.is_main:
            try:
                outcome[0] = work()
            except BaseException as error:
                failure = error
                outcome[1] = error if isinstance(error, HeadwaterError) else HeadwaterError(f"Process 0: {error!r}")
        dist.broadcast_object_list(outcome, src=0)
        if failure is not None or outcome[1] is not None:
            raise failure or outcome[1]
        return outcome[0]

    def wait_for_all(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            dist.barrier()


def processes() -> Processes:
    """Return the processes that work on this run together: one, unless a process group is there."""
    if dist.is_available() and dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size())
    return Processes()


def wait_for(found: Callable[[], Value | None]) -> Value:
    """Ask again and again, ever more slowly, until there is something.

    It waits without end: whoever started the processes ends them all when one of them dies.
    """
    pause = 0.01
    while (value := found()) is None:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return value
