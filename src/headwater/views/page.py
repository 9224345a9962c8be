"""The parts of a self-contained page: its frame and style, escaped text, tables, and pictures held as data.

The view of a result that has none of its own: what it says, its figure as a picture, and its summary.
"""

from __future__ import annotations

import base64
import html
from io import BytesIO
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image

from headwater.circuits.circuit import Circuit
from headwater.errors import HeadwaterError
from headwater.figures.style import figure_of, image_of
from headwater.runs.record import RunRecord
from headwater.runs.result import VIEWS, Result
from headwater.runs.view import View

STYLE = """
:root{color-scheme:light dark;--ink:#262626;--paper:#fff;--faint:#5a5a5a;--line:#e4e4e4;--accent:#2b6cb8}
@media (prefers-color-scheme:dark){:root{--ink:#e8e8e8;--paper:#1b1b1d;--faint:#a8a8a8;--line:#444448;--accent:#7db4f0}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2.5rem 0 .3rem}
nav ol{padding-left:1.4rem}
.asks{color:var(--faint);margin-top:0}nav li p{margin:0 0 .5rem}a{color:var(--accent)}
.failed{border-left:4px solid #c0392b;padding-left:.8rem}
figure{margin:1rem 0}figure img{max-width:100%;height:auto;background:#fff}
figcaption{font-size:.85rem;color:var(--faint)}
.beside{display:flex;flex-wrap:wrap;gap:1rem}.beside figure{flex:1 1 22rem;margin:0}
iframe{width:100%;border:1px solid var(--line)}details{margin:.4rem 0}
a:focus-visible,summary:focus-visible,iframe:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:1rem 0}
th,td{padding:.15rem .6rem .15rem 0;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{white-space:normal;max-width:7rem;vertical-align:bottom}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}summary{cursor:pointer;color:var(--accent)}
code{font-size:.9em}footer{margin-top:3rem;font-size:.8rem;color:var(--faint)}
""".replace("\n", "")


def page_of(title: str, body: str, run: RunRecord | None = None) -> str:
    """Return a page of HTML with a heading and, where there is a run, a line at its end that says what made it."""
    foot = f"<footer>{text_of(made_by(run))}</footer>" if run is not None else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{text_of(title)}</h1>{body}{foot}</body></html>\n"
    )


def text_of(text: str) -> str:
    """Return text as HTML."""
    return html.escape(text, quote=True)


def short_of(text: str) -> str:
    """Return a text on one line: whole, or how it begins and how it ends, where prompts of one kind differ."""
    line = " ".join(text.split())
    return line if len(line) <= 47 else f"{line[:26]} … {line[-18:]}"


def picture_of(png: bytes, caption: str, dpi: int = 300) -> str:
    """Return a picture of so many dots per inch as HTML that holds it, a little larger than print."""
    data = base64.b64encode(png).decode()
    # The first number of a PNG's header is its width.
    width = int.from_bytes(png[16:20], "big") * 126 / dpi
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width:.0f}" alt="{text_of(caption)}">'
        f"<figcaption>{text_of(caption)}</figcaption></figure>\n"
    )


def made_by(run: RunRecord) -> str:
    """Say what made a result."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"Model {run.model} ({run.dtype} on {run.device}); {versions}; {run.created}."


def table_of(table: pd.DataFrame) -> str:
    """Return a table as HTML."""
    numeric = [pd.api.types.is_numeric_dtype(table[name]) for name in table]
    kinds = [' class="n"' if is_number else "" for is_number in numeric]
    head = "".join(f"<th{kind}>{text_of(str(name))}</th>" for name, kind in zip(table, kinds, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{text_of(_cell(v))}</td>" for v, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in table.itertuples(index=False)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n'


def _cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if pd.isna(value):
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


DPI = 144
"""Dots per inch of the picture below a view: a notebook holds it twice."""
COLORS = 128


@VIEWS.add(Result)
def picture(result: Result) -> View:
    """Show what a result reports, its main figure and its summary."""
    report = "".join(f"<p>{text_of(sentence)}</p>" for sentence in result.report())
    figure = drawn(result)
    body = report + picture_in(figure, caption_of(result)) + table_of(result.summary())
    return View(page_of(repr(result), body, result.run), picture=None if isinstance(figure, str) else figure)


def drawn(result: Result | Circuit) -> bytes | str:
    """Return the figure of a result or circuit as a PNG, or the reason for which there is none; none is left open."""
    try:
        figure = result.plot()
    except HeadwaterError as error:
        return str(error)
    try:
        return _light(image_of(figure, DPI))
    finally:
        # pyplot keeps every figure until it is closed, and warns when more than 20 are open.
        plt.close(figure_of(figure))


def _light(picture: Image.Image) -> bytes:
    """Return a picture as a PNG of few colours, a quarter as large; those far from the others, as a legend's, stay."""
    written = BytesIO()
    few = picture.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(written, "png", optimize=True)
    return written.getvalue()


def picture_in(figure: bytes | str, caption: str) -> str:
    """Return what `drawn` gave as HTML."""
    if isinstance(figure, str):
        return f'<p class="failed">{text_of(figure)}</p>'
    return picture_of(figure, caption, DPI)


def caption_of(result: Result) -> str:
    """Return what is below a result's figure."""
    return f"{type(result).__name__} of {result.run.model}"
