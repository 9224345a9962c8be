"""Work in forked processes: these have what is imported already, for which a process of its own takes ten seconds."""

import contextlib
import os
import sys
import tempfile
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


def printed_afresh(code: str, *arguments: str) -> str:
    """What some code prints where headwater is not imported yet and no hook checks shapes, as in a user's process.

    Libraries stay imported: reading PyTorch and transformers anew takes ten seconds.
    """

    def run() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("headwater", "tests")]:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("jaxtyping")]
        sys.argv = ["-c", *arguments]
        with contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
        printed.flush()

    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        assert ended(started(run)) == 0
        printed.seek(0)
        return printed.read()


def shared(count: int, work: Callable[[], object], meeting: Path) -> list[int]:
    """Do some work in several processes that share a run and meet at a new file; return how each ended."""

    def joined(index: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=index, world_size=count)
        work()

    return [ended(child) for child in [started(partial(joined, index)) for index in range(count)]]
