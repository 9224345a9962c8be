"""An interactive view: a page with its numbers, the script that draws them, and the picture shown without it.

1. Numbers go into the page as base64 of deflated bytes, all else as JSON that no text can break out of. Lines with
   their intervals against one number are charts that the page's switches choose among.
2. The script draws on canvas and puts texts in as text. It may reach for nothing outside: the page says so to the
   browser (content security policy), and a notebook shows it in a frame of its own (`headwater.runs.view.View`).
3. Below is what every view has: what the result reports, its figure as a picture, and its summary. The script hides
   the picture once it has drawn; where scripts do not run it is what one sees.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Literal

import numpy as np
import pandas as pd

from headwater.errors import InputError
from headwater.runs.result import Result
from headwater.runs.view import View
from headwater.views.page import caption_of, drawn, made_by, picture_in, table_of, text_of

Encoding = Literal["u1", "u2", "f2", "f4"]
"""How numbers travel: whole numbers of 8 or 16 bits, floats of 16 or 32."""
LARGEST = 64 * 2**20
"""Bytes of a page."""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def packed(values: np.ndarray, encoding: Encoding) -> dict[str, object]:
    """Return numbers as JSON: base64 of their little-endian bytes, deflated where that makes them smaller."""
    kind = np.dtype(f"<{encoding}")
    if kind.kind == "u" and values.size and not (values.min() >= 0 and values.max() <= np.iinfo(kind).max):
        raise InputError(f"Numbers from {values.min()} to {values.max()} do not fit {encoding}.")
    # Above 65,504 a float16 is infinite, which the page shows as a dash.
    with np.errstate(over="ignore"):
        raw = np.ascontiguousarray(values, dtype=kind).tobytes()
    small = zlib.compress(raw, 6)
    deflate = len(small) < 0.95 * len(raw)
    data = base64.b64encode(small if deflate else raw).decode("ascii")
    return {"dtype": encoding, "shape": list(values.shape), "deflate": deflate, "data": data}


def interactive(result: Result, scripts: str | Sequence[str], spec: Mapping[str, object], height: int = 620) -> View:
    """Return the page of a result that is drawn by a script.

    Args:
        result: what is shown.
        scripts: the files in `assets/` that draw it, the last one of all; `core.js` is before them.
        spec: what the script reads: JSON values, and numbers as `packed` gives them. Its `title` heads
            the page, that of the figure where one draws the same; its `note`, if there is one, is below.
        height: of the frame in a notebook, in pixels.
    """
    report = "".join(f"<p>{text_of(sentence)}</p>" for sentence in result.report())
    below = f'{report}{table_of(result.summary())}<p class="faint">{text_of(made_by(result.run))}</p>'
    return page_around(spec, scripts, (drawn(result), caption_of(result)), below, height)


def page_around(
    spec: Mapping[str, object],
    scripts: str | Sequence[str],
    figure: tuple[bytes | str, str],
    below: str,
    height: int = 620,
) -> View:
    """Return a page that is drawn by a script.

    Args:
        spec: see `interactive`.
        scripts: see `interactive`.
        figure: the picture shown where scripts do not run, as PNG, or why there is none; and its caption.
        below: HTML that unfolds below the view.
        height: of the frame in a notebook, in pixels.
    """
    # ASCII alone, whatever encoding the page is served in; a browser's JSON.parse refuses NaN.
    text = json.dumps(spec, ensure_ascii=True, allow_nan=False)
    if len(text) > LARGEST:
        raise InputError(f"This view would take {len(text) / 2**20:.0f} MB: choose fewer layers, heads or examples.")
    # "</script>" in a text would end the block. In JSON these marks occur only in strings, where an escape is the same.
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    drawing = "".join(map(asset, [scripts] if isinstance(scripts, str) else scripts))
    title, picture = text_of(str(spec["title"])), figure[0]
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{asset('core.css')}</style></head>\n"
        f'<body><div id="look"></div><div id="still"><h1>{title}</h1>{picture_in(*figure)}</div>'
        f"<details><summary>what it says</summary>{below}</details>\n"
        f'<script type="application/json" id="spec">{text}</script>\n'
        f"<script>{asset('core.js')}</script>\n<script>{drawing}</script></body></html>\n"
    )
    return View(page, height, None if isinstance(picture, str) else picture)


def asset(name: str) -> str:
    """Return a file of `assets/`: a script or a style of our own, put into the page whole."""
    return files("headwater.views").joinpath("assets", name).read_text(encoding="utf-8")


DIGITS = 7
"""Of a number in a page; those shown have fewer."""


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
    """Return one line as the script draws it.

    Args:
        rows: its points.
        columns: the names of where each is, its value, and the ends of its interval.
        name: what the line is called.
        look: colour and mark.
        dashed: whether it is drawn with dashes.
        control: whether it is one: drawn in grey, and left beside a line that is looked at alone.
        count: the column that says over how many each is.
    """
    at, *values = columns
    curve = {key: rounded(rows[column]) for key, column in zip(("value", "low", "high"), values, strict=True)}
    line = {"name": name, "color": look[0], "shape": look[1], "dashed": dashed, "control": control}
    counted = {} if count is None else {"count": rounded(rows[count])}
    return line | {"at": rows[at].tolist()} | curve | counted


def rounded(numbers: pd.Series | np.ndarray) -> list[float | None]:
    """Return numbers as JSON has them: to seven digits, and None where there is none."""
    return [float(f"{one:.{DIGITS}g}") if math.isfinite(one) else None for one in map(float, numbers)]
