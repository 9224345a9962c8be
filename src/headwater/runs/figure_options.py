"""Title and size, which every figure of a result can be given, whatever it draws.

It is done to the figure that was drawn, so that what draws a result, also one of a user's own, need not know of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from headwater.errors import InputError
from headwater.options import checked_number, checked_several, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Size: TypeAlias = tuple[float, float]
"""Width and height, in inches."""
PLACES: tuple[Any, ...] = ("left", "center", "right")
LARGEST = 100.0
"""Inches; the largest picture that can be written has 65,536 dots, at 300 an inch 218 inches."""


def checked_size(figsize: object, ax: Axes | None) -> Size | None:
    """Return the size of a new figure, if one was given.

    Raises:
        InputError: it is no pair of numbers above 0, or what is drawn goes on axes of the caller's.
    """
    if figsize is None:
        return None
    if ax is not None:
        raise InputError("figsize= is of a new figure, and ax= is on one already: give one of the two.")
    sides = checked_several("figsize", figsize, "(width, height) in inches")
    if len(sides) != 2:
        raise InputError(f"figsize={shown(figsize)} must be (width, height) in inches.")
    width, height = (checked_number("figsize", side, 0.0, LARGEST, up_to=True) for side in sides)
    return width, height


def apply_title_and_size(drawn: Axes | Figure, title: str | None, size: Size | None) -> Axes | Figure:
    """Give what was drawn a title and a size of the caller's.

    Raises:
        InputError: the title is no text.
    """
    if title is not None and not isinstance(title, str):
        raise InputError(f"title={shown(title)} must be a text.")
    whole = hasattr(drawn, "savefig")
    figure: Any = drawn if whole else drawn.figure
    if size is not None:
        figure.set_size_inches(size)
    if title is not None and whole and len(figure.axes) != 1:
        figure.suptitle(title)
    elif title is not None:
        _title(figure.axes[0] if whole else drawn, title)
    return drawn


def _title(ax: Any, title: str) -> None:
    """Put a title where the axes' own stands, as far above them."""
    held = next((place for place in PLACES if ax.get_title(place)), None)
    if held is None:
        ax.set_title(title)
        return
    words = ax.get_title(held)
    for child in ax.get_children():
        if getattr(child, "get_text", str)() == words:
            child.set_text(title)
            return
