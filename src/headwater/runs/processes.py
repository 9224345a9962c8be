"""Several processes on one run, as `accelerate launch` starts them: who computes which piece, and who writes.

A run is a list of pieces that do not depend on one another. Of N processes, process p computes pieces p, p + N, ...
and writes them into the run's folder, which all can reach; the pieces of the others are read from there. What follows
from the pieces is computed by every process alike, so all return the same result, and the main one writes it.

Processes belong together when torch's process group is there: `accelerate.Accelerator()` or `PartialState()` makes it,
and so does `accelerate launch -m headwater`. Without one there is one process, and nothing here does anything.

They meet at named steps (`Processes.together`): one that has ended, or that is at another step, is an error of all.
"""

from __future__ import annotations

import atexit
import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from headwater.errors import HeadwaterError

Value = TypeVar("Value")
LONGEST_WAIT = datetime.timedelta(days=7)
"""How long a process waits for the slowest one; torch's own 10 to 30 minutes are too short for a share of a run."""


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

    def together(self, step: str, value: Value) -> list[Value]:
        """Wait until every process is at this step, and return the value that each brings, in their order."""
        if self.count == 1:
            return [value]
        brought: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(brought, (step, value), group=_lasting_group(dist.group.WORLD))
        except RuntimeError as error:
            raise HeadwaterError(
                f"Another process of this run has ended, while process {self.index} waited for it ({step}); its own "
                "message says why. What is finished is kept: the same command continues."
            ) from error
        other = next((number for number, (theirs, _) in enumerate(brought) if theirs != step), None)
        if other is not None:
            raise HeadwaterError(
                f"The processes of this run do different things: process {self.index} is at {step!r}, process {other} "
                f"at {brought[other][0]!r}. Each must make the same calls in the same order."
            )
        return [value for _, value in brought]

    def on_main(self, step: str, work: Callable[[], Value]) -> Value:
        """Do something in the main process while others wait; every process returns its value or raises its error."""
        if self.count == 1:
            return work()
        outcome: tuple[Any, HeadwaterError | None] = None, None
        failure: BaseException | None = None
        if self.is_main:
            try:
                outcome = work(), None
            # An interrupt too: the others have to end with it.
            except BaseException as error:
                failure = error
                # Sent to all, who would wait otherwise; an error of another library might not pickle.
                outcome = None, error if isinstance(error, HeadwaterError) else HeadwaterError(f"Process 0: {error!r}")
        value, failed = self.together(step, outcome)[0]
        if failure is not None:
            raise failure
        if failed is not None:
            raise failed
        return value  # type: ignore[no-any-return]


def processes() -> Processes:
    """Return the processes that work on this run together: one, unless a process group is there."""
    if dist.is_available() and dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size())
    return Processes()


@functools.cache
def _lasting_group(world: object) -> object:
    """Return a group of all processes that is told at once when one of them ends, and otherwise waits for days."""
    # gloo, as what is exchanged are small Python objects; NCCL would need a device for them.
    return dist.new_group(backend="gloo", timeout=LONGEST_WAIT)


# A group that is kept until the interpreter takes itself apart aborts the process: its threads are never joined.
atexit.register(_lasting_group.cache_clear)
