"""A result as files for others: its figure as PNG, SVG and PDF, its tables as CSV beside the parquet that is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import pandas as pd

from headwater.figures.style import save_figure
from headwater.runs.processes import processes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from headwater.runs.result import Result

CSV_ROWS = 200_000
"""Tables with more rows are not written as CSV."""


def write(result: Result, out: Path, figure: str) -> list[str]:
    """Write a result's figure and, beside the parquet tables that are there already, the same tables as CSV.

    Tables that are too long to be read stay parquet alone. Of several processes the main one writes.
    """
    if not processes().is_main:
        return []
    mpl.use("Agg")
    files = write_figure(result.plot(), out / figure)
    for field in dataclasses.fields(result):  # type: ignore[arg-type]
        frame = getattr(result, field.name)
        if not isinstance(frame, pd.DataFrame):
            continue
        files.append(str(out / f"{field.name}.parquet"))
        if len(frame) <= CSV_ROWS:
            joined = frame.map(lambda cell: " ".join(map(str, cell)) if isinstance(cell, tuple) else cell)
            joined.to_csv(out / f"{field.name}.csv", index=False, lineterminator="\n")
            files.append(str(out / f"{field.name}.csv"))
    return files


def write_figure(drawn: Figure | Axes, stem: Path) -> list[str]:
    """Write a figure for the page and for print; of several processes the main one does."""
    if not processes().is_main:
        return []
    return [str(file) for file in save_figure(drawn, stem, ("png", "svg", "pdf"))]
