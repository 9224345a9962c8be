"""The look that all figures share: type, lines, colours, and how a figure is written to disk.

Nothing here is global. `style()` is a context: what is drawn inside it has the look, and the caller's settings come
back at its end.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#262626"
FAINT = "#8a8a8a"
RULES: dict[Any, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "headwater",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw with the shared look; the settings of the caller come back afterwards.

    These settings alone: what matplotlib sets when it draws for the first time, as in a notebook, stays.
    """
    before = {name: mpl.rcParams[name] for name in RULES}
    mpl.rcParams.update(RULES)
    try:
        yield
    finally:
        mpl.rcParams.update(before)


def save_figure(plot: Axes | Figure, stem: str | Path, formats: Iterable[str] = ("png", "pdf")) -> list[Path]:
    """Write a figure in several formats, cropped to what it holds; the same figure gives the same bytes.

    Args:
        plot: what a result's `plot` returned; of axes, the figure they are in.
        stem: the path without its suffix; folders on the way are made.
        formats: suffixes that matplotlib knows: png, pdf, svg.

    Returns:
        The files written.
    """
    figure = plot if isinstance(plot, Figure) else plot.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    Path(stem).parent.mkdir(parents=True, exist_ok=True)
    files = [Path(f"{stem}.{name}") for name in formats]
    dates: dict[str, dict[str, str | None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with style():
        for file in files:
            metadata = dates.get(file.suffix[1:])
            figure.savefig(file, bbox_inches="tight", pad_inches=0.05, metadata=metadata)
    return files
