"""Processes that share runs, made by forking this one: as quick as threads, and none is ended when another ends.

A launcher ends all its processes when one ends; those on other machines it cannot. Here nobody does.
"""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist


def meet(folder: Path, jobs: Sequence[Callable[[], object]], seconds: float = 120) -> list[str]:
    """Run each job in a process of its own; return what each returned, or its error, or "" of one that was killed."""
    folder.mkdir()
    started = [_start(folder, number, len(jobs), job) for number, job in enumerate(jobs)]
    end, left = time.monotonic() + seconds, set(started)
    while left and time.monotonic() < end:
        left -= {process for process in left if os.waitpid(process, os.WNOHANG)[0]}
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    if left:
        pytest.fail(f"Process {[started.index(process) for process in left]} waits for ever.")
    said = [folder / f"said-{number}" for number in range(len(jobs))]
    return [file.read_text() if file.exists() else "" for file in said]


def _start(folder: Path, number: int, count: int, job: Callable[[], object]) -> int:
    process = os.fork()
    if process == 0:
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/here", rank=number, world_size=count)
            (folder / f"said-{number}").write_text(_outcome(job))
        finally:
            os._exit(0)
    return process


def _outcome(job: Callable[[], object]) -> str:
    try:
        return str(job())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
