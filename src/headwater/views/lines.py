"""Curves in a page: lines with their intervals against one number, as charts that the page's switches choose among."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

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
    held = {key: rounded(rows[column]) for key, column in zip(("value", "low", "high"), values, strict=True)}
    line = {"name": name, "color": look[0], "shape": look[1], "dashed": dashed, "control": control}
    counted = {} if count is None else {"count": rounded(rows[count])}
    return line | {"at": rows[at].tolist()} | held | counted


def rounded(numbers: pd.Series | np.ndarray) -> list[float | None]:
    """Return numbers as JSON has them: to seven digits, and None where there is none."""
    return [float(f"{one:.{DIGITS}g}") if math.isfinite(one) else None for one in map(float, numbers)]
