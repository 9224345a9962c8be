"""The few numbers of a result that are worth a glance: as JSON values, as a data frame, as words in a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd


def rounded(value: float) -> float | None:
    """Return a number as JSON has it, with four places; None where it was not measured."""
    return round(float(value), 4) if math.isfinite(value) else None


def each_row(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table, by the names of its columns."""
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


def records_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """Return the rows of a table as JSON values; None where there is no value."""
    return each_row(table.astype(object).where(table.notna(), None))


def frame_of(rows: Iterable[Mapping[str, object]]) -> pd.DataFrame:
    """Return findings as a data frame, a row each; NaN where there is no value."""
    table = pd.DataFrame(list(rows))
    return table.where(table.notna(), np.nan).infer_objects()


def with_interval(value: float, low: float = math.nan, high: float = math.nan, places: int = 2) -> str:
    """Write a number with its interval, where it has one: "0.52 (0.41 to 0.60)"."""
    if not math.isfinite(value):
        return "not measured"
    interval = f" ({low:.{places}f} to {high:.{places}f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{value:.{places}f}{interval}"


def plain_text(text: str) -> str:
    """Return text with what no terminal prints spelled out: line breaks, controls, what turns the writing direction."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
