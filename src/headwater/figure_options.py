"""Options of every figure of a result: another title, another size.

They are applied to the finished figure, so that drawing functions, also users' own, need not handle them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
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
LARGEST_SIDE = 100.0
"""Largest side in inches; the largest picture that can be written has 65,536 dots: 218 inches at 300 dots per inch."""


def checked_size(figsize: object, ax: Axes | None) -> Size | None:
    """Return the validated size of a new figure, None if none was passed; raise if `ax` is not a matplotlib axes."""
    if ax is not None and not hasattr(ax, "get_subplotspec"):
        raise InputError(
            f"ax={shown(ax)} is not a matplotlib axes: give one, such as plt.subplots()[1], or leave it out for a new "
            "figure. plot().savefig(path) writes it."
        )
    if figsize is None:
        return None
    if ax is not None:
        raise InputError("figsize= sizes a new figure, but ax= already belongs to one: give only one of them.")
    sides = checked_several("figsize", figsize, "(width, height) in inches, as figsize=(7, 3)")
    if len(sides) != 2:
        raise InputError(f"figsize={shown(figsize)} must be (width, height) in inches.")
    width, height = (checked_number("figsize", side, 0.0, LARGEST_SIDE, up_to=True) for side in sides)
    return width, height


_REQUESTED_SIZE: ContextVar[Size | None] = ContextVar("size", default=None)
"""The size requested for the figure that is being drawn (if any)."""


def requested_size() -> Size | None:
    """Return the size requested for the figure that is being drawn (if any)."""
    return _REQUESTED_SIZE.get()


@contextlib.contextmanager
def size_requested(size: Size | None) -> Iterator[None]:
    """Let `requested_size` return this size while a figure is drawn."""
    token = _REQUESTED_SIZE.set(size)
    try:
        yield
    finally:
        _REQUESTED_SIZE.reset(token)


def apply_title_and_size(drawn: Axes | Figure, title: str | None, size: Size | None) -> Axes | Figure:
    """Apply the caller's title and size to a drawn figure or axes, and wrap texts that are too long for their space."""
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
        # Wrap titles at the next panel or the figure's edge, and labels at the ends of their axes.
        for place in _titles(ax):
            _break(place, _to_the_right, ax)
        _break(ax.xaxis.label, _around, ax)
        _break(ax.yaxis.label, _share, ax, "height", 1.05)
    return drawn


def _bars(ax: Any) -> list[Any]:
    return [one.colorbar.ax for one in (*ax.collections, *ax.images) if getattr(one, "colorbar", None)]


def _to_the_right(ax: Any) -> float:
    """Return the pixels from the left end of axes to the next panel or the edge of the figure."""
    box = ax.get_window_extent()
    level = [one.get_window_extent() for one in ax.figure.axes if one is not ax and one.get_subplotspec()]
    ends = [one.x0 for one in level if one.x0 > box.x1 and one.y0 < box.y1 and box.y0 < one.y1]
    return float(min([box.x1 + 0.8 * (end - box.x1) for end in ends] or [ax.figure.bbox.x1]) - box.x0)


def _around(ax: Any) -> float:
    """Return the pixels for a label below axes: a little more than their width, within the figure."""
    box, page = ax.get_window_extent(), ax.figure.bbox
    middle = (box.x0 + box.x1) / 2
    return float(min(1.15 * box.width, 1.96 * min(middle - page.x0, page.x1 - middle)))


def _share(of: Any, side: str, share: float) -> float:
    return float(share * getattr(of.get_window_extent(), side))


def _break(text: Any, room: Callable[..., float], *of: object) -> None:
    """Let matplotlib wrap a text whenever it draws it, at a width that depends on where the text then is."""
    text.set_wrap(True)
    # matplotlib itself wraps only at the figure's edge, and would write a title over the next panel.
    text._get_wrap_line_width = partial(_narrowest, text, {}, room, *of)


def _narrowest(text: Any, least: dict[tuple[float, ...], float], room: Callable[..., float], *of: object) -> float:
    """Return the least space so far in a figure of the same size, so that wrapping and layout do not alternate."""
    size = tuple(text.figure.bbox.size)
    least[size] = min(room(*of), least.get(size, math.inf))
    return least[size]


def _title(ax: Any, title: str) -> None:
    """Replace the axes' own title (left, centre or right), at the same distance above them."""
    for place in _titles(ax):
        if place.get_text():
            place.set_text(title)
            return
    ax.set_title(title)


def _titles(ax: Any) -> tuple[Any, Any, Any]:
    return ax._left_title, ax.title, ax._right_title
