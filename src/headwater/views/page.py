"""The parts of a self-contained page: its frame and style, escaped text, tables, and pictures embedded as data.

Also the default view of a result without a specific view: its report, its figure as a picture, and its summary.
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


def page_of(title: str, body: str, run: RunRecord | None = None, policy: str = "") -> str:
    """Return an HTML page with a heading and, if a run is given, a footer that describes the run."""
    foot = f"<footer>{escape(made_by(run))}</footer>" if run is not None else ""
    return _document(escape(title), asset("page.css"), f"<h1>{escape(title)}</h1>{body}{foot}", policy)


def _document(title: str, style: str, body: str, policy: str) -> str:
    """Return a page from a title and body that are already HTML."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{policy}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{style}</style></head>\n<body>{body}</body></html>\n"
    )


def short_of(text: str) -> str:
    """Return a text on one line: whole, or shortened to its beginning and its end, where similar prompts differ."""
    line = " ".join(text.split())
    return line if len(line) <= 47 else f"{line[:26]} … {line[-18:]}"


def picture_of(png: bytes, caption: str, dpi: int = 300) -> str:
    """Return HTML with an embedded picture of the given dots per inch, a little larger than in print."""
    data = base64.b64encode(png).decode()
    # The first number of a PNG header is the width.
    width = int.from_bytes(png[16:20], "big") * 126 / dpi
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width:.0f}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def made_by(run: RunRecord) -> str:
    """Return a sentence with the model, versions and time of a run."""
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
"""Dots per inch of the picture below a view; kept low because a notebook stores it twice."""


@VIEWS.add(Result)
def picture(result: Result) -> View:
    """Show the report of a result, its main figure and its summary."""
    report = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.report())
    figure = drawn(result)
    height = f"<script>{asset('height.js')}</script>"
    body = report + picture_in(figure, caption_of(result)) + table_of(result.summary()) + height
    return View(page_of(repr(result), body, result.run, POLICY), picture=None if isinstance(figure, str) else figure)


def drawn(result: Result | Circuit) -> bytes | str:
    """Return the figure of a result or circuit as a PNG, or the reason why there is none; close the figure."""
    try:
        figure = result.plot()
    except HeadwaterError as error:
        return str(error)
    try:
        whole = image_of(figure, DPI).convert("RGB")
    finally:
        # pyplot keeps every figure until it is closed, and warns when more than 20 are open.
        plt.close(figure_of(figure))
    # 128 colours make it a quarter as large; MAXCOVERAGE keeps colours that are far from the others, as in a legend.
    written = BytesIO()
    few = whole.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(written, "png", optimize=True)
    return written.getvalue()


def picture_in(figure: bytes | str, caption: str) -> str:
    """Return the result of `drawn` as HTML."""
    if isinstance(figure, str):
        return f'<p class="failed">{escape(figure)}</p>'
    return picture_of(figure, caption, DPI)


# An interactive view: a page with its numbers, the script that draws them, and a picture for use without the script.
#
# 1. Numbers are in the page as base64 of deflated bytes, everything else as JSON from which no text can break out.
#    Lines with intervals against one number are charts, and the page has switches to choose among them.
# 2. The script draws on a canvas and inserts texts as text. It may load nothing from outside: the page enforces this
#    (content security policy), and a notebook shows it in a separate frame (`headwater.runs.result.View`).
# 3. Below are the parts of every view: the report of the result, its figure as a picture, and its summary. The script
#    hides the picture once it has drawn; without scripts the picture stays visible.


Encoding = Literal["u1", "u2", "f2", "f4"]
"""The encodings of numbers: unsigned integers of 8 or 16 bits, floats of 16 or 32."""
LARGEST = 64 * 2**20
"""Largest size of a page's data, in bytes."""
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:\">"
)
"""The policy of a page with a script: it may load nothing from outside."""


def caption_of(result: Result) -> str:
    """Return the caption of a result's figure."""
    return f"{type(result).__name__} of {result.run.model}"


def packed(values: np.ndarray, encoding: Encoding) -> dict[str, object]:
    """Return numbers as JSON: base64 of their little-endian bytes, deflated if that makes them smaller."""
    kind = np.dtype(f"<{encoding}")
    if kind.kind == "u" and values.size and not (values.min() >= 0 and values.max() <= np.iinfo(kind).max):
        raise InputError(f"Numbers from {values.min()} to {values.max()} do not fit {encoding}.")
    # A float16 above 65,504 becomes infinite, which the page shows as a dash.
    with np.errstate(over="ignore"):
        raw = np.ascontiguousarray(values, dtype=kind).tobytes()
    # In single bytes little repeats except runs: a search for other matches took five times as long, for larger pages.
    strategy = zlib.Z_RLE if kind.itemsize == 1 else zlib.Z_DEFAULT_STRATEGY
    writer = zlib.compressobj(6, strategy=strategy)
    small = writer.compress(raw) + writer.flush()
    deflate = len(small) < 0.95 * len(raw)
    data = base64.b64encode(small if deflate else raw).decode("ascii")
    return {"dtype": encoding, "shape": list(values.shape), "deflate": deflate, "data": data}


def interactive(result: Result, scripts: str | Sequence[str], spec: Mapping[str, object], height: int = 620) -> View:
    """Return the page of a result that is drawn by a script: files in `assets/`, after `core.js`; the last one draws.

    `spec` is the input of the script: JSON values, and numbers from `packed`. Its `title` is the heading of the page;
    its `note`, if any, comes below. The frame in a notebook has `height`
    pixels until the page reports its own height.
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
    """Return a page that is drawn by a script, as in `interactive`.

    `figure` is shown if scripts do not run: a PNG, or the reason why there is none, and its caption. `below` is HTML
    that unfolds below the view.
    """
    # ASCII only, so that the page works in any encoding; a browser's JSON.parse refuses NaN.
    text = json.dumps(spec, ensure_ascii=True, allow_nan=False)
    if len(text) > LARGEST:
        raise InputError(f"This view would take {len(text) / 2**20:.0f} MB: choose fewer layers, heads or examples.")
    # "</script>" in a text would end the block. In JSON these characters occur only in strings, which may escape them.
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    drawing = "".join(map(asset, [scripts] if isinstance(scripts, str) else scripts))
    title, picture = escape(str(spec["title"])), figure[0]
    body = (
        f'<div id="look"></div><div id="still"><h1>{title}</h1>{picture_in(*figure)}</div>'
        f"<details><summary>findings in words</summary>{below}</details>\n"
        f'<script type="application/json" id="spec">{text}</script>\n'
        f"<script>{asset('core.js')}{asset('height.js')}</script>\n<script>{drawing}</script>"
    )
    page = _document(title, asset("core.css"), body, POLICY)
    return View(page, height, None if isinstance(picture, str) else picture)


def asset(name: str) -> str:
    """Return the content of a file of `assets/` (a script or a style), which is inserted into the page."""
    return files("headwater.views").joinpath("assets", name).read_text(encoding="utf-8")


def array_of(values: pd.Series, *axes: Sequence[Any]) -> np.ndarray:
    """Return values with an index level per axis as an array over these axes; NaN where there is no value."""
    whole = values.reindex(pd.Index(axes[0]) if len(axes) == 1 else pd.MultiIndex.from_product(axes))
    return whole.to_numpy(dtype=float).reshape([len(axis) for axis in axes])


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
    """Return one line for the script, in a colour and with a marker (`look`).

    `columns` name the x position of its points, the value, and the bounds of its interval; `count` names the column
    with the number of examples of each point. A control is grey, and stays visible when a single line is selected.
    """
    at, *values = columns
    curve = {key: rounded(rows[column]) for key, column in zip(("value", "low", "high"), values, strict=True)}
    line = {"name": name, "color": look[0], "shape": look[1], "dashed": dashed, "control": control}
    counted = {} if count is None else {"count": rounded(rows[count])}
    return line | {"at": rows[at].tolist()} | curve | counted


def rounded(numbers: pd.Series | np.ndarray) -> list[float | None]:
    """Return numbers for JSON: rounded to seven digits, with None for missing ones."""
    return [float(f"{one:.7g}") if math.isfinite(one) else None for one in map(float, numbers)]
