"""Progress bars, so that `progress=` means the same everywhere.

A bar needs a terminal or a notebook: in a file or a pipe it would be hundreds of lines, since nothing is overwritten.
There, work of more than half a minute writes lines to the logger `headwater` of the standard library. In a notebook a
bar disappears when the work is done, so that a saved notebook contains only results.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

LOG = logging.getLogger("headwater")
# The root logger's default would drop what `progress=True` asks for; a level that the caller has set remains.
LOG.setLevel(LOG.level or logging.INFO)
SELDOM = 30.0
"""Seconds before the first line, and least seconds between two lines."""
LINE = "{desc}: {n_fmt} of {total_fmt}{unit} after {elapsed}, about {remaining} left"
WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} after {elapsed}"


class _LogFile:
    """A file for tqdm whose texts are lines of the log."""

    def write(self, text: str) -> None:
        # A bar inside another also moves the cursor, which a log does not have.
        if text.startswith("\r") and (line := text.strip()):
            say(True, line)

    def flush(self) -> None:
        """Do nothing: a line is written at once."""


if TYPE_CHECKING:
    from tqdm import tqdm

    Bar: TypeAlias = tqdm[Any]
else:
    Bar = Any


def progress_bar(progress: bool, total: int | None, desc: str, unit: str, **options: Any) -> Bar:
    """Open a bar of tqdm with these options, or lines where none can be drawn; neither if progress is False."""
    from tqdm.auto import tqdm

    if progress and not is_seen():
        # tqdm's own thread would write a line after `maxinterval`, which is shorter by default.
        times = dict.fromkeys(("delay", "mininterval", "maxinterval"), SELDOM)
        lines: Any = {"file": _LogFile(), "bar_format": LINE if total else WITHOUT_TOTAL, **times}
        return tqdm(total=total, desc=desc, unit=f" {unit.strip().removesuffix('s')}s", **options | lines)
    options.setdefault("leave", not (progress and in_notebook()))
    return tqdm(total=total, desc=desc, unit=unit, disable=not progress, **options)


def say(progress: bool, text: str) -> None:
    """Write a line to the log, or to stderr if the caller has not configured logging; nothing without progress."""
    if not progress:
        return
    if LOG.hasHandlers():
        LOG.info(text)
    elif LOG.isEnabledFor(logging.INFO):
        print(f"headwater: {text}", file=sys.stderr, flush=True)  # noqa: T201


def spelled_time(seconds: float) -> str:
    """Return how long something takes, in two digits or whole numbers."""
    if seconds < 100:
        return f"{_two_digits(seconds)} seconds" if seconds >= 1.5 else "a second"
    return f"{_two_digits(seconds / 3600)} hours" if seconds > 3600 else f"{_two_digits(seconds / 60)} minutes"


def _two_digits(number: float) -> str:
    """Write a number in two digits, or as a whole number: 2g alone would write 99.6 as 1e+02."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def is_seen() -> bool:
    """Whether what is written is seen as it comes."""
    # A terminal shows what goes to stderr as it comes, line over line.
    return in_notebook() or bool(getattr(sys.stderr, "isatty", bool)())


def in_notebook() -> bool:
    """Whether a notebook draws the bars."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" or "google.colab" in type(shell).__module__
