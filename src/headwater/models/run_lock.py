"""The lock that a model runs under: one thread at a time, and what becomes of it in a forked process.

A fork copies the memory and one thread. What the others held stays held for ever, so the copy of a model that another
thread was running is refused there: its hooks are halfway, and nobody will take them off. OpenMP's threads are gone
too, and its next parallel loop would wait for them for ever; so, as in the workers of torch's data loaders, a forked
process computes with one thread.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch

from headwater.errors import ModelError


class RunLock:
    """Held while a model runs; the thread that holds it may take it again.

    Raises:
        ModelError: on entering, in a process that was forked while another thread held it.
    """

    def __init__(self) -> None:
        self._lock, self._torn = threading.RLock(), False
        _LOCKS.add(self)

    def __enter__(self) -> None:
        if self._torn:
            raise ModelError(
                "This process was forked while another thread was running the model, so its copy of the model is "
                "halfway through that run; fork while no thread runs it, or load the model in the new process."
            )
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def forked(self) -> None:
        """Find out, in a new process, whether a thread that is not there holds the lock."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._torn = True


_LOCKS: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forked() -> None:
    if _LOCKS:
        torch.set_num_threads(1)
    for lock in _LOCKS:
        lock.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forked)
