"""What every figure of a result can be given, whatever it draws: another title, another size.

It is done to the figure that was drawn, so that what draws a result, also one of a user's own, need not know of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
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
    """Return the size of a new figure, if one was given."""
    if figsize is None:
        return None
    if ax is not None:
        raise InputError("figsize= is of a new figure, and ax= is on one already: give one of the two.")
    sides = checked_several("figsize", figsize, "(width, height) in inches, as figsize=(7, 3)")
    if len(sides) != 2:
        raise InputError(f"figsize={shown(figsize)} must be (width, height) in inches.")
    width, height = (checked_number("figsize", side, 0.0, LARGEST, up_to=True) for side in sides)
    return width, height


_ASKED: ContextVar[Size | None] = ContextVar("size", default=None)


@contextmanager
def asking_for(size: Size | None) -> Iterator[None]:
    """Let what is drawn meanwhile know the size of its figure, if one was given."""
    token = _ASKED.set(size)
    try:
        yield
    finally:
        _ASKED.reset(token)


def requested_size() -> Size | None:
    """Return the size that the figure now drawn was given."""
    return _ASKED.get()


def apply_title_and_size(drawn: Axes | Figure, title: str | None, size: Size | None) -> Axes | Figure:
    """Give what was drawn a title and a size of the caller's, and break lines that are longer than there is room."""
    if title is not None and not isinstance(title, str):
        raise InputError(f"title={shown(title)} must be a text.")
    whole = hasattr(drawn, "add_subplot")
    figure: Any = drawn if whole else drawn.figure
    if size is not None:
        figure.set_size_inches(size)
    if title is not None and whole and len(figure.axes) != 1:
        figure.suptitle(title)
    elif title is not None:
        _title(figure.axes[0] if whole else drawn, title)
    if whole and figure.get_suptitle():
        _break(figure._suptitle, _share, figure, "width", 0.98)
    for ax in figure.axes if whole else [drawn, *_bars(drawn)]:
        _break_lines(ax)
    return drawn


def _bars(ax: Any) -> list[Any]:
    """The axes of the colour bars of what is drawn on `ax`."""
    return [one.colorbar.ax for one in (*ax.collections, *ax.images) if getattr(one, "colorbar", None)]


def _break_lines(ax: Any) -> None:
    """Break the title where the next panel or the figure ends, labels where their axes do."""
    for place in (ax.title, ax._left_title, ax._right_title):
        _break(place, _to_the_right, ax)
    _break(ax.xaxis.label, _around, ax)
    _break(ax.yaxis.label, _share, ax, "height", 1.05)


def _to_the_right(ax: Any) -> float:
    """The pixels from the left end of axes to the next panel or the end of the figure."""
    box = ax.get_window_extent()
    level = [one.get_window_extent() for one in ax.figure.axes if one is not ax and one.get_subplotspec()]
    ends = [one.x0 for one in level if one.x0 > box.x1 and one.y0 < box.y1 and box.y0 < one.y1]
    return float(min([box.x1 + 0.8 * (end - box.x1) for end in ends] or [ax.figure.bbox.x1]) - box.x0)


def _around(ax: Any) -> float:
    """The pixels that a label below axes has: a little more than they are wide, as far as the figure reaches."""
    box, page = ax.get_window_extent(), ax.figure.bbox
    middle = (box.x0 + box.x1) / 2
    return float(min(1.15 * box.width, 1.96 * min(middle - page.x0, page.x1 - middle)))


def _share(of: Any, side: str, share: float) -> float:
    """A share of the width or height of axes or a figure, in pixels."""
    return float(share * getattr(of.get_window_extent(), side))


def _break(text: Any, room: Callable[..., float], *of: object) -> None:
    """Let matplotlib break a text whenever it draws it, into lines of a length that depends on where it then is."""
    text.set_wrap(True)
    # matplotlib wraps at the figure's edge alone, and would write a title over the next panel.
    text._get_wrap_line_width = partial(_narrowest, text, {}, room, *of)


def _narrowest(text: Any, least: dict[tuple[float, ...], float], room: Callable[..., float], *of: object) -> float:
    """The least room that a figure of the same size had: lines and layout do not change by turns."""
    size = tuple(text.figure.bbox.size)
    least[size] = min(room(*of), least.get(size, math.inf))
    return least[size]


def _title(ax: Any, title: str) -> None:
    """Put a title where the axes' own is, as far above them."""
    place_of_title = next((place for place in PLACES if ax.get_title(place)), None)
    if place_of_title is None:
        ax.set_title(title)
        return
    words = ax.get_title(place_of_title)
    for child in ax.get_children():
        if getattr(child, "get_text", str)() == words:
            child.set_text(title)
            return
