"""The parts of a self-contained page: its frame and style, escaped text, tables, and pictures held as data.

The view of a result that has none of its own: what it says, its figure as a picture, and its summary.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from io import BytesIO
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from PIL import Image

from headwater.circuits.circuit import Circuit
from headwater.errors import HeadwaterError, InputError
from headwater.figures.style import figure_of, image_of
from headwater.runs.record import RunRecord
from headwater.runs.result import VIEWS, Result, View

STYLE = """
:root{color-scheme:light dark;--ink:#262626;--paper:#fff;--faint:#5a5a5a;--line:#e4e4e4;--accent:#2b6cb8}
@media (prefers-color-scheme:dark){:root{--ink:#e8e8e8;--paper:#1b1b1d;--faint:#a8a8a8;--line:#444448;--accent:#7db4f0}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:62rem;margin:2rem auto 1rem;
padding:0 1rem}
h1{font-size:1.6rem;line-height:1.25;overflow-wrap:anywhere}h2{font-size:1.2rem;margin:2.5rem 0 .3rem}
nav ol{padding-left:1.4rem}
.asks{color:var(--faint);margin-top:0}nav li p{margin:0 0 .5rem}a{color:var(--accent)}
.failed{border-left:4px solid #c0392b;padding-left:.8rem}
figure{margin:1rem 0}figure img{max-width:100%;height:auto;background:#fff}
figcaption{font-size:.85rem;color:var(--faint)}
.beside{display:flex;flex-wrap:wrap;gap:1rem}.beside figure{flex:1 1 22rem;margin:0}
iframe{outline:1px solid var(--line)}details{margin:.4rem 0}
a:focus-visible,summary:focus-visible,iframe:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:1rem 0}
th,td{padding:.15rem .6rem .15rem 0;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{white-space:normal;max-width:7rem;vertical-align:bottom}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}summary{cursor:pointer;color:var(--accent)}
code{font-size:.9em}footer{margin-top:3rem;font-size:.8rem;color:var(--faint)}
""".replace("\n", "")


def page_of(title: str, body: str, run: RunRecord | None = None, policy: str = "") -> str:
    """Return a page of HTML with a heading and, where there is a run, a line at its end that says what made it."""
    foot = f"<footer>{escape(made_by(run))}</footer>" if run is not None else ""
    return _document(escape(title), STYLE, f"<h1>{escape(title)}</h1>{body}{foot}", policy)


def _document(title: str, style: str, body: str, policy: str) -> str:
    """Return a page whose title and body are HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


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
        f'<figure><img src="data:image/png;base64,{data}" width="{width:.0f}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def made_by(run: RunRecord) -> str:
    """Say what made a result."""
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"Model {run.model} ({run.dtype} on {run.device}); {versions}; {run.created}."


def table_of(table: pd.DataFrame) -> str:
    """Return a table as HTML."""
    numeric = [pd.api.types.is_numeric_dtype(table[name]) for name in table]
    kinds = [' class="n"' if is_number else "" for is_number in numeric]
    head = "".join(f"<th{kind}>{escape(str(name))}</th>" for name, kind in zip(table, kinds, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(_cell(v))}</td>" for v, kind in zip(row, kinds, strict=True)) + "</tr>"
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


@VIEWS.add(Result)
def picture(result: Result) -> View:
    """Show what a result reports, its main figure and its summary."""
    report = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.report())
    figure = drawn(result)
    height = f"<script>{asset('height.js')}</script>"
    body = report + picture_in(figure, caption_of(result)) + table_of(result.summary()) + height
    return View(page_of(repr(result), body, result.run, POLICY), picture=None if isinstance(figure, str) else figure)


def drawn(result: Result | Circuit) -> bytes | str:
    """Return the figure of a result or circuit as a PNG, or the reason for which there is none; none is left open."""
    try:
        figure = result.plot()
    except HeadwaterError as error:
        return str(error)
    try:
        whole = image_of(figure, DPI).convert("RGB")
    finally:
        # pyplot keeps every figure until it is closed, and warns when more than 20 are open.
        plt.close(figure_of(figure))
    # A quarter as large in few colours; those far from the others, as a legend's, stay.
    written = BytesIO()
    few = whole.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(written, "png", optimize=True)
    return written.getvalue()


def picture_in(figure: bytes | str, caption: str) -> str:
    """Return what `drawn` gave as HTML."""
    if isinstance(figure, str):
        return f'<p class="failed">{escape(figure)}</p>'
    return picture_of(figure, caption, DPI)


# An interactive view: a page with its numbers, the script that draws them, and the picture shown without it.
#
# 1. Numbers go into the page as base64 of deflated bytes, all else as JSON that no text can break out of. Lines with
#    their intervals against one number are charts that the page's switches choose among.
# 2. The script draws on canvas and puts texts in as text. It may reach for nothing outside: the page says so to the
#    browser (content security policy), and a notebook shows it in a frame of its own (`headwater.runs.result.View`).
# 3. Below is what every view has: what the result reports, its figure as a picture, and its summary. The script hides
#    the picture once it has drawn; where scripts do not run it is what one sees.


Encoding = Literal["u1", "u2", "f2", "f4"]
"""How numbers travel: whole numbers of 8 or 16 bits, floats of 16 or 32."""
LARGEST = 64 * 2**20
"""Bytes of a page."""
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">"
)
"""What a page with a script may load: nothing."""


def caption_of(result: Result) -> str:
    """Return what is below a result's figure."""
    return f"{type(result).__name__} of {result.run.model}"


def packed(values: np.ndarray, encoding: Encoding) -> dict[str, object]:
    """Return numbers as JSON: base64 of their little-endian bytes, deflated where that makes them smaller."""
    kind = np.dtype(f"<{encoding}")
    if kind.kind == "u" and values.size and not (values.min() >= 0 and values.max() <= np.iinfo(kind).max):
        raise InputError(f"Numbers from {values.min()} to {values.max()} do not fit {encoding}.")
    # Above 65,504 a float16 is infinite, which the page shows as a dash.
    with np.errstate(over="ignore"):
        raw = np.ascontiguousarray(values, dtype=kind).tobytes()
    # In single bytes runs repeat and little else does: looking for more took five times as long, for larger pages.
    strategy = zlib.Z_RLE if kind.itemsize == 1 else zlib.Z_DEFAULT_STRATEGY
    writer = zlib.compressobj(6, strategy=strategy)
    small = writer.compress(raw) + writer.flush()
    deflate = len(small) < 0.95 * len(raw)
    data = base64.b64encode(small if deflate else raw).decode("ascii")
    return {"dtype": encoding, "shape": list(values.shape), "deflate": deflate, "data": data}


def interactive(result: Result, scripts: str | Sequence[str], spec: Mapping[str, object], height: int = 620) -> View:
    """Return the page of a result that is drawn by a script: files in `assets/`, after `core.js`; the last one draws.

    `spec` is what the script reads: JSON values, and numbers as `packed` gives them. Its `title` heads the page, that
    of the figure where one draws the same; its `note`, if there is one, is below. The frame in a notebook has `height`
    pixels until the page says its own.
    """
    report = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.report())
    below = f'{report}{table_of(result.summary())}<p class="faint">{escape(made_by(result.run))}</p>'
    return page_around(spec, scripts, (drawn(result), caption_of(result)), below, height)


def page_around(
    spec: Mapping[str, object],
    scripts: str | Sequence[str],
    figure: tuple[bytes | str, str],
    below: str,
    height: int = 620,
) -> View:
    """Return a page that is drawn by a script, as `interactive` says.

    `figure` is shown where scripts do not run: a PNG, or why there is none, and its caption. `below` is HTML that
    unfolds below the view.
    """
    # ASCII alone, whatever encoding the page is served in; a browser's JSON.parse refuses NaN.
    text = json.dumps(spec, ensure_ascii=True, allow_nan=False)
    if len(text) > LARGEST:
        raise InputError(f"This view would take {len(text) / 2**20:.0f} MB: choose fewer layers, heads or examples.")
    # "</script>" in a text would end the block. In JSON these marks occur only in strings, where an escape is the same.
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    drawing = "".join(map(asset, [scripts] if isinstance(scripts, str) else scripts))
    title, picture = escape(str(spec["title"])), figure[0]
    body = (
        f'<div id="look"></div><div id="still"><h1>{title}</h1>{picture_in(*figure)}</div>'
        f"<details><summary>what it says</summary>{below}</details>\n"
        f'<script type="application/json" id="spec">{text}</script>\n'
        f"<script>{asset('core.js')}{asset('height.js')}</script>\n<script>{drawing}</script>"
    )
    page = _document(title, asset("core.css"), body, POLICY)
    return View(page, height, None if isinstance(picture, str) else picture)


def asset(name: str) -> str:
    """Return a file of `assets/`: a script or a style of our own, put into the page whole."""
    return files("headwater.views").joinpath("assets", name).read_text(encoding="utf-8")


def line_of(
    rows: pd.DataFrame,
    columns: tuple[str, str, str, str],
    *,
    name: str,
    look: tuple[str, str],
    dashed: bool = False,
    control: bool = False,
    count: str | None = None,
) -> dict[str, object]:
    """Return one line as the script draws it, in a colour and with a mark: its `look`.

    `columns` of its points are where each is, its value, and the ends of its interval; `count` is the one that says
    over how many each is. A control is drawn in grey, and left beside a line that is looked at alone.
    """
    at, *values = columns
    curve = {key: rounded(rows[column]) for key, column in zip(("value", "low", "high"), values, strict=True)}
    line = {"name": name, "color": look[0], "shape": look[1], "dashed": dashed, "control": control}
    counted = {} if count is None else {"count": rounded(rows[count])}
    return line | {"at": rows[at].tolist()} | curve | counted


def rounded(numbers: pd.Series | np.ndarray) -> list[float | None]:
    """Return numbers as JSON has them: to seven digits, and None where there is none."""
    return [float(f"{one:.7g}") if math.isfinite(one) else None for one in map(float, numbers)]
