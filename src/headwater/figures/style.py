"""The look that all figures share: type, lines, colours, and how a figure is written to disk.

Nothing here is global. `style()` is a context: what is drawn inside it has the look, and the caller's settings come
back at its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headwater.calls import checked_call
from headwater.colors import INK
from headwater.errors import InputError
from headwater.figures.fonts import label, others
from headwater.options import checked_name, checked_path, one_or_several
from headwater.runs.figure_options import Size, checked_size
from headwater.runs.storage import make_folder

if TYPE_CHECKING:
    from headwater.runs.record import RunRecord

DASHED: Any = (0, (4, 1.6))
LINES_ARE = "lines: 95 % intervals"
DEFAULT_FORMATS = ("png", "pdf")
BANDS_ARE = "bands: 95 % intervals"
WAYS = {"denoise": "clean into corrupted", "noise": "corrupted into clean"}
"""What is patched into what, by the direction."""
MARKS_ONLY: dict[str, Any] = {"handlelength": 0.9, "handletextpad": 0.4, "columnspacing": 1.0}
"""For legends whose entries are marks without lines."""
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


CROPPED: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.05}


@contextmanager
def style() -> Iterator[None]:
    """Draw with the shared look; the settings of the caller come back afterwards.

    These settings alone: what matplotlib sets when it draws for the first time, as in a notebook, stays.
    """
    before = {name: mpl.rcParams[name] for name in RULES}
    mpl.rcParams.update(RULES | {"font.family": ["sans-serif", *others()]})
    try:
        yield
    finally:
        mpl.rcParams.update(before)


def model_title(run: RunRecord, seen: str) -> str:
    """Return a title: the model's name, without the folders in front, and what is seen of it."""
    return f"{short_name(run.model)}: {seen}"


def plain_title(model: str, seen: str) -> str:
    """Return the same title as plain text: of a view, which shows what a figure draws and is no figure."""
    return f"{_last(model)}: {seen}"


def entitle(figure: Figure, title: str, **place: Any) -> None:
    """Put a title above all panels of a figure, where the title of a single one would stand."""
    figure.suptitle(title, x=0.01, ha="left", size=RULES["axes.titlesize"], weight="bold", **place)


def short_name(model: str) -> str:
    """Return a model's name as a figure writes it: without the folders in front."""
    return label(_last(model))


def _last(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers alone, also where there is a single one."""
    axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def legend_above(ax: Axes, columns: int, title: str, **options: object) -> None:
    """Put the legend between the plot and its title."""
    entries = len(ax.get_legend_handles_labels()[1])
    rows = -(-entries // columns)
    ax.set_title(title, pad=6 + 11.5 * rows)
    if entries:
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, **options)


def figure_of(plot: Axes | Figure) -> Figure:
    """Return the figure that axes are in, or the figure itself.

    Raises:
        InputError: it is neither.
    """
    if not isinstance(plot, Axes | Figure):
        hint = ": give what its plot() returns" if hasattr(plot, "plot") else ""
        raise InputError(f"A {type(plot).__name__} is no figure of matplotlib{hint}.")
    figure = plot if isinstance(plot, Figure) else plot.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    return figure


def checked_place(ax: Axes | None, panels: int, figsize: object) -> Size | None:
    """Return the size of a new figure, if one was given; see whether a figure of so many panels can be on `ax`.

    Raises:
        InputError: `ax` is no axes, or there are several panels; `figsize` is no size, or `ax` was given, too.
    """
    if not isinstance(ax, Axes | None):
        raise InputError(f"ax=, a {type(ax).__name__}, is no matplotlib axes: leave it out for a new figure.")
    if ax is not None and panels > 1:
        raise InputError(f"This figure has {panels} panels, and ax= holds one: leave it out for a new figure.")
    return checked_size(figsize, ax)


def png_of(plot: Axes | Figure, dpi: int | None = None) -> bytes:
    """Return a figure as a picture of 300 dots per inch, or of `dpi`, cropped to what it holds."""
    written = BytesIO()
    with style():
        _laid_out(figure_of(plot)).savefig(written, format="png", **CROPPED | ({} if dpi is None else {"dpi": dpi}))
    return written.getvalue()


def _laid_out(figure: Figure) -> Figure:
    """Draw once what arranges itself: where things stand settles with the first drawing, and is kept from then on."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
    return figure


@checked_call
def save_figure(plot: Axes | Figure, stem: str | Path, formats: str | Iterable[str] | None = None) -> list[Path]:
    """Write a figure in several formats, cropped to what it holds; the same figure gives the same bytes.

    Args:
        plot: what a result's `plot` returned; of axes, the figure they are in.
        stem: the path without its suffix; folders on the way are made.
        formats: one or more suffixes that matplotlib knows, such as png, pdf, svg; default: that of `stem` where it has
            one of them ("figure.png"), else png and pdf.

    Returns:
        The files written.

    Raises:
        InputError: what is given is no figure, no path, or no such format.
        RunFolderError: the folder cannot be made.
    """
    figure = figure_of(plot)
    path = checked_path("stem", stem)
    known = tuple(figure.canvas.get_supported_filetypes())
    if path.suffix[1:] in known:
        path, formats = path.with_suffix(""), path.suffix[1:] if formats is None else formats
    listed = DEFAULT_FORMATS if formats is None else one_or_several(formats)
    make_folder(path.parent)
    files = [Path(f"{path}.{checked_name('formats', name, known)}") for name in listed]
    dates: dict[str, dict[str, str | None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with style():
        _laid_out(figure)
        for file in files:
            metadata = dates.get(file.suffix[1:])
            figure.savefig(file, **CROPPED, metadata=metadata)
    return files
