"""The folder of an unfinished run: each finished piece is written at once, so that an interrupted run can resume.

With several processes (below), each writes its own pieces, and the main process writes the result.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import os
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch import Tensor

from headwater.errors import HeadwaterError, InputError, RunFolderError
from headwater.options import checked_path
from headwater.runs.record import FORMAT, RUN_FILE, RunRecord, refuse_other_run
from headwater.runs.result import Result, file_names, write_result
from headwater.runs.storage import (
    LOCK,
    make_folder,
    one_writer,
    read_sealed,
    read_tensors,
    release_writer,
    remove_folder,
    remove_leftovers,
    write_sealed,
    write_tensors,
)

PIECES = "pieces"
LONGEST_DELAY = 120.0
"""Seconds after which every machine sees a file that one has written; NFS caches file attributes for up to 60."""
Value = TypeVar("Value")
Compute: TypeAlias = Callable[[], Mapping[str, Tensor]]
"""Computes a piece: named tensors, independent of all other pieces."""


class RunFolder:
    """The folder of an unfinished run. Finished pieces survive an interrupt; another run's folder is refused.

    One process (or thread) may write to a folder at a time, or the processes of one launch together.
    """

    def __init__(self, path: str | Path, run: RunRecord, kind: type[Result] = Result):
        self.path = checked_path("out", path)
        if run.unknown:
            raise InputError(
                f"out={str(path)!r} cannot be used: an input of this run cannot be identified, {run.unknown}, or omit "
                "out=."
            )
        self._pieces = self.path / PIECES
        self._processes = processes()
        self._count = 0
        self._lock: Any = None
        if self._processes.count > 1:
            records = self._processes.together("the options of a run", run)
            for number, other in enumerate(records):
                if differences := records[0].differences(other):
                    raise HeadwaterError(
                        f"The processes of one run must have the same inputs; process {number} (there) and process 0 "
                        f"(here) differ in {'; '.join(differences[:4])}."
                    )
        # The identity of this call, not of the earlier record: a piece is identified by what would compute it now.
        self._identity, self._names = run.identity, (PIECES, *file_names(kind))
        self.run = self._processes.on_main(f"opening the folder of {run.analysis}", lambda: self._open(run))
        if self._processes.count > 1:
            written = self._processes.on_main("the record of a run", lambda: read_sealed(self.path / RUN_FILE))
            is_there = _await(lambda: self._has_record(written) or None)
            where = (
                None if is_there else f"process {self._processes.index} on {platform.node()}, {self.path.absolute()}"
            )
            if missing := list(filter(None, self._processes.together("the folder", where))):
                raise RunFolderError(
                    f"The processes do not share the output folder of process 0: {missing[0]}, does not hold its run. "
                    "Give every process the same folder, on a file system that all machines see."
                )

    @property
    def finished(self) -> bool:
        """Whether the folder already contains the whole result, ready to `load`."""
        return bool(read_sealed(self.path / RUN_FILE).get("finished"))

    def piece(self, name: str, compute: Compute) -> dict[str, Tensor]:
        """Return the named piece: from the folder if it exists, else computed and written now."""
        return next(self.pieces([(name, compute)]))

    def pieces(self, work: Iterable[tuple[str, Compute]]) -> Iterator[dict[str, Tensor]]:
        """Yield every piece in order; with several processes, each computes its own before reading the others'."""
        if self._processes.count == 1:
            yield from (self._made(name, compute) for name, compute in work)
            return
        names = []
        for name, compute in work:
            names.append(name)
            if self._processes.owns(self._count):
                self._made(name, compute)
            self._count += 1
        # The number is part of the step's name, so that processes that split the work differently do not mix.
        self._processes.together(f"{len(names)} pieces of {self.run.analysis}", None)
        for name in names:
            tensors = _await(functools.partial(self._read, name))
            if tensors is None:
                raise RunFolderError(
                    f"{self.piece_file(name)} was written by another process and cannot be read by process "
                    f"{self._processes.index}. Is the folder on a file system that all machines see?"
                )
            yield tensors

    def finish(self, result: Result) -> None:
        """Write the whole result and delete its pieces, except the parts that it keeps."""
        self._processes.together(f"the result of {self.run.analysis}", None)
        self._processes.on_main(f"writing the result of {self.run.analysis}", lambda: self._close(result))

    def _has_record(self, written: dict[str, Any]) -> bool:
        with contextlib.suppress(RunFolderError):
            return read_sealed(self.path / RUN_FILE) == written
        return False

    def _open(self, run: RunRecord) -> RunRecord:
        earlier = refuse_other_run(self.path, run, self._names)
        if earlier is not None and self.finished:
            self._tidy()
            return earlier
        make_folder(self.path)
        # Read the record before and after taking the lock: another run may have begun or ended in between.
        self._lock = one_writer(self.path)
        earlier = refuse_other_run(self.path, run, self._names)
        if self._lock is None:
            writer = read_sealed(self.path / RUN_FILE).get("writer", "unknown") if earlier else "just begun"
            raise RunFolderError(
                f"Another run is writing to {self.path} ({writer}). Wait for it, or choose another folder."
            )
        if earlier is not None and self.finished:
            self._let_go()
            return earlier
        # Only now that this process holds the folder: another writer's temporary files would be in use.
        remove_leftovers(self.path)
        if earlier is None or self._pieces.is_symlink():
            remove_folder(self._pieces)
        here = f"process {os.getpid()} on {platform.node()}"
        record = dataclasses.asdict(earlier or run)
        about = {"format": FORMAT, "run": record, "finished": False, "writer": here}
        write_sealed(self.path / RUN_FILE, about)
        make_folder(self._pieces)
        for name in self._names:
            remove_leftovers(self.path / name)
        return earlier or run

    def _close(self, result: Result) -> None:
        write_result(self.path, result)
        remove_folder(self._pieces)
        self._let_go()

    def _tidy(self) -> None:
        """Remove the leftovers of a process that was killed after the result was complete."""
        if not (self._pieces.exists() or (self.path / LOCK).exists()):
            return
        with contextlib.suppress(RunFolderError):
            self._lock = one_writer(self.path)
        if self._lock is not None:
            remove_leftovers(self.path)
            remove_folder(self._pieces)
            self._let_go()

    def _let_go(self) -> None:
        release_writer(self._lock)
        self._lock = None

    def _made(self, name: str, compute: Compute) -> dict[str, Tensor]:
        found = self._read(name)
        if found is not None:
            return found
        if (file := self.piece_file(name)).exists():
            # Not an error: recomputing a piece costs only its own time, and the rest of the run is valid.
            warnings.warn(f"{file} is not the file that this run wrote: it is recomputed.", stacklevel=2)
        tensors = {key: value.contiguous() for key, value in compute().items()}
        write_tensors(file, tensors, self._sealed(name))
        return tensors

    def _read(self, name: str) -> dict[str, Tensor] | None:
        """Return a piece if it exists and this run wrote it, else None."""
        try:
            return read_tensors(self.piece_file(name), self._sealed(name))
        except RunFolderError:
            return None

    def _sealed(self, name: str) -> str:
        return f"{name} of {self._identity}"

    def piece_file(self, name: str) -> Path:
        """Return the file of a piece.

        A piece such as `activations/000000` is a part of the result and stays; others exist until it is complete.
        """
        if re.fullmatch(r"\w+/\d{6,}", name):
            return self.path / f"{name}.safetensors"
        if not re.fullmatch(r"[\w-][\w.-]*", name):
            raise ValueError(f"A piece cannot be named {name!r}: it must be usable in a file name.")
        return self._pieces / f"{name}.safetensors"


def _await(look: Callable[[], Value | None]) -> Value | None:
    """Poll until `look` returns a value: a file of another machine may take a while to appear."""
    # Monotonic: setting the clock meanwhile must neither shorten nor lengthen the wait.
    end, pause = time.monotonic() + LONGEST_DELAY, 0.01
    while (value := look()) is None and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return value


# Several processes on one run, as `accelerate launch` starts them: who computes which piece, and who writes the result.
#
# Of N processes, process p computes pieces p, p + N, ... and reads the others' from the run's folder. Every process
# computes the rest from the pieces in the same way, so all return the same result, and the main process writes it.
#
# Processes form a group if torch's process group is initialised: `accelerate.Accelerator()` or `PartialState()` does
# this, and so does `accelerate launch -m headwater`. Without one there is a single process, and all this is a no-op.


LONGEST_WAIT = datetime.timedelta(days=7)
"""How long a process waits for the slowest one; torch's own 10 to 30 minutes are too short for a part of a run."""


@dataclass(frozen=True)
class Processes:
    """The number of processes of a run, and the index of this one."""

    index: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes everything that is written only once."""
        return self.index == 0

    def owns(self, piece: int) -> bool:
        """Whether this process computes piece number `piece`."""
        return piece % self.count == self.index

    def together(self, step: str, value: Value) -> list[Value]:
        """Wait until every process reaches this step, and return the values of all processes, in their order."""
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
        """Run `work` in the main process while others wait; every process returns its value or raises its error."""
        if self.count == 1:
            return work()
        outcome: tuple[Any, HeadwaterError | None] = None, None
        failure: BaseException | None = None
        if self.is_main:
            try:
                outcome = work(), None
            # Also an interrupt: the others have to end with it.
            except BaseException as error:
                failure = error
                # Sent to all processes, which would wait otherwise; an error of another library might not pickle.
                outcome = None, error if isinstance(error, HeadwaterError) else HeadwaterError(f"Process 0: {error!r}")
        value, failed = self.together(step, outcome)[0]
        if failure is not None:
            raise failure
        if failed is not None:
            raise failed
        return value  # type: ignore[no-any-return]


def processes() -> Processes:
    """Return the processes that work on this run together: one, unless a process group is initialised."""
    if dist.is_available() and dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size())
    return Processes()


@functools.cache
def _lasting_group(world: object) -> object:
    """Return a group of all processes that fails at once when one of them ends, and otherwise waits for days."""
    # gloo, since only small Python objects are exchanged; NCCL would need a device for them.
    return dist.new_group(backend="gloo", timeout=LONGEST_WAIT)


# A group kept until interpreter shutdown aborts the process, because its threads are never joined.
atexit.register(_lasting_group.cache_clear)
