"""A result's figure and tables as files, as a command and the demonstration write them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import pandas as pd

from headwater.figures.style import save_figure
from headwater.runs.folder import processes
from headwater.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CSV_ROWS = 200_000
"""Tables with more rows are not written as CSV."""


def write_result(result: Result, out: Path, figure: str) -> list[str]:
    """Write a result's figure and, beside its existing parquet tables, the same tables as CSV.

    Tables too long for reading stay parquet only. Of several processes only the main one writes.
    """
    if not processes().is_main:
        return []
    mpl.use("Agg")
    files = write_figure(result.plot(), out / figure)
    for name in (one.name for one in fields(result)):  # type: ignore[arg-type]
        frame = getattr(result, name)
        if not isinstance(frame, pd.DataFrame):
            continue
        files.append(str(out / f"{name}.parquet"))
        if len(frame) <= CSV_ROWS:
            joined = frame.map(lambda cell: " ".join(map(str, cell)) if isinstance(cell, tuple) else cell)
            joined.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
            files.append(str(out / f"{name}.csv"))
    return files


def write_figure(drawn: Figure | Axes, stem: Path) -> list[str]:
    """Write a figure for the page and for print; of several processes only the main one writes."""
    if not processes().is_main:
        return []
    return [str(file) for file in save_figure(drawn, stem, ("png", "svg", "pdf"))]
