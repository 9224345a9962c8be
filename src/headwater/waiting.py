"""Says on a terminal what is being done when it takes longer than two seconds: first calls load several libraries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""After so many seconds somebody who sees nothing wonders whether anything happens."""
LIBRARIES = "Loading PyTorch, transformers and TransformerLens, once in a process ..."


@contextmanager
def announce_if_slow(doing: str, *, after: float = PATIENCE) -> Iterator[None]:
    """Say on stderr what is being done, if it is not done after some seconds; only where stderr is a terminal."""
    if not on_terminal():
        yield
        return
    timer = threading.Timer(after, lambda: print(f"headwater: {doing}", file=sys.stderr, flush=True))  # noqa: T201
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def on_terminal() -> bool:
    """Whether what goes to stderr is seen as it comes, line over line."""
    return bool(getattr(sys.stderr, "isatty", bool)())
