"""The view of a result that has none of its own: what it says, its figure as a picture, and its summary."""

from __future__ import annotations

from io import BytesIO

import matplotlib.pyplot as plt
from PIL import Image

from headwater.circuits.circuit import Circuit
from headwater.errors import HeadwaterError
from headwater.figures.style import figure_of, png_of
from headwater.runs.result import VIEWS, Result
from headwater.runs.view import View
from headwater.views.page import page_of, picture_of, table_of, text_of

DPI = 144
"""Dots per inch of the picture below a view: a notebook holds it twice."""
COLORS = 128


@VIEWS.add(Result)
def picture(result: Result) -> View:
    """Show what a result reports, its main figure and its summary."""
    said = "".join(f"<p>{text_of(sentence)}</p>" for sentence in result.report())
    figure = drawn(result)
    body = said + picture_in(figure, caption_of(result)) + table_of(result.summary())
    return View(page_of(repr(result), body, result.run), picture=None if isinstance(figure, str) else figure)


def drawn(result: Result | Circuit) -> bytes | str:
    """Return the figure of a result or circuit as a PNG, or the reason for which there is none; none is left open."""
    try:
        figure = result.plot()
    except HeadwaterError as error:
        return str(error)
    try:
        return _light(png_of(figure, DPI))
    finally:
        plt.close(figure_of(figure))


def _light(png: bytes) -> bytes:
    """Return a picture in so few colours that it takes a quarter; those far from the others, as a legend's, stay."""
    written = BytesIO()
    with Image.open(BytesIO(png)) as held:
        few = held.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(written, "png", optimize=True)
    return written.getvalue()


def picture_in(figure: bytes | str, caption: str) -> str:
    """Return what `drawn` gave as HTML."""
    if isinstance(figure, str):
        return f'<p class="failed">{text_of(figure)}</p>'
    return picture_of(figure, caption, DPI)


def caption_of(result: Result) -> str:
    """Return what stands below a result's figure."""
    return f"{type(result).__name__} of {result.run.model}"
