"""The view of a result that has none of its own: what it says, its figure as a picture, and its summary."""

from __future__ import annotations

import matplotlib.pyplot as plt

from headwater.errors import HeadwaterError
from headwater.figures.style import figure_of, png_of
from headwater.runs.result import VIEWS, Result
from headwater.runs.view import View
from headwater.views.page import page_of, picture_of, table_of, text_of


@VIEWS.add(Result)
def picture(result: Result) -> View:
    """Show what a result reports, its main figure and its summary."""
    said = "".join(f"<p>{text_of(sentence)}</p>" for sentence in result.report())
    figure = drawn(result)
    body = said + picture_in(figure, result) + table_of(result.summary())
    return View(page_of(repr(result), body, result.run), picture=None if isinstance(figure, str) else figure)


def drawn(result: Result) -> bytes | str:
    """Return the result's figure as a PNG, or the reason for which there is none; no figure is left open."""
    try:
        figure = result.plot()
    except HeadwaterError as error:
        return str(error)
    try:
        return png_of(figure)
    finally:
        plt.close(figure_of(figure))


def picture_in(figure: bytes | str, result: Result) -> str:
    """Return what `drawn` gave as HTML."""
    if isinstance(figure, str):
        return f'<p class="failed">{text_of(figure)}</p>'
    return picture_of(figure, f"{type(result).__name__} of {result.run.model}")
