"""Progress bars: one way to open them, so that `progress=` means the same everywhere.

A bar needs a terminal, or a notebook that draws it: written into a file or a pipe it would be hundreds of lines that
overwrite nothing. In a notebook it goes when the work is done, so that a saved notebook holds results alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm.auto import tqdm

from headwater.options import checked_flag
from headwater.waiting import on_terminal

if TYPE_CHECKING:
    Bar: TypeAlias = tqdm[Any]
else:
    Bar = tqdm


def progress_bar(progress: bool, *args: Any, **options: Any) -> Bar:
    """Open a bar of tqdm's with these arguments; it counts without being shown where progress is False.

    It is not shown either where stderr is neither a terminal nor a notebook's.
    """
    shown = checked_flag("progress", progress) and (in_notebook() or on_terminal())
    options.setdefault("leave", not in_notebook())
    return tqdm(*args, **options | {"disable": not shown})


def say(progress: bool, text: str, *, anywhere: bool = False) -> None:
    """Write a line to stderr where a bar would be shown, or `anywhere`."""
    if checked_flag("progress", progress) and (anywhere or in_notebook() or on_terminal()):
        print(f"headwater: {text}", file=sys.stderr, flush=True)  # noqa: T201


def said_time(seconds: float) -> str:
    """Say how long something takes, in two digits."""
    if seconds < 100:
        return f"{max(seconds, 1):.2g} seconds" if seconds >= 1.5 else "a second"
    return f"{seconds / 3600:,.2g} hours" if seconds > 3600 else f"{seconds / 60:.2g} minutes"


def in_notebook() -> bool:
    """Whether a notebook draws the bars."""
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell" or "google.colab" in type(shell).__module__
