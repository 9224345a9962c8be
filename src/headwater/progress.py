"""Progress bars: one way to open them, so that `progress=` means the same everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tqdm.auto import tqdm

from headwater.options import checked_flag

if TYPE_CHECKING:
    Bar: TypeAlias = tqdm[Any]
else:
    Bar = tqdm


def progress_bar(progress: bool, *args: Any, **options: Any) -> Bar:
    """Open a bar of tqdm's with these arguments; it counts without being shown where progress is False.

    Raises:
        InputError: `progress` is neither True nor False.
    """
    options["disable"] = not checked_flag("progress", progress)
    return tqdm(*args, **options)
