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
    body = said + _drawn(result) + table_of(result.summary())
    return View(page_of(repr(result), body, result.run))


def _drawn(result: Result) -> str:
    """Return the figure as HTML, or the reason for which there is none."""
    try:
        drawn = result.plot()
    except HeadwaterError as error:
        return f'<p class="failed">{text_of(str(error))}</p>'
    try:
        return picture_of(png_of(drawn), f"{type(result).__name__} of {result.run.model}")
    finally:
        plt.close(figure_of(drawn))
