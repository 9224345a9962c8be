"""The shared style of all figures: type, lines, colours, and writing figures to disk.

Nothing here is global. `style()` is a context manager: figures drawn inside it have the style, and the caller's
settings are restored at its end.

Text of any script is drawn in the installed fonts that cover it, with a placeholder for characters that none covers:
matplotlib's default font has no Chinese, Korean, Thai or Hindi, and would draw boxes and warn at each character.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.transforms import Bbox
from PIL import Image

from headwater.calls import checked_call
from headwater.colors import DIVERGING, INK, UNSEEN
from headwater.errors import InputError
from headwater.figure_options import Size, checked_size, requested_size
from headwater.options import checked_names, checked_path
from headwater.runs.storage import make_folder

if TYPE_CHECKING:
    from headwater.runs.record import RunRecord

OTHERS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "Droid Sans Fallback", "Microsoft YaHei", "Malgun Gothic", "PingFang SC", "Hiragino Sans GB",
    "Apple SD Gothic Neo", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Thai", "Noto Sans Devanagari",
    "Noto Sans Bengali", "Nirmala UI", "Noto Emoji", "Segoe UI Symbol", "Symbola", "Arial Unicode MS",
)  # fmt: skip
"""Fonts to try, in this order, where the usual one has no glyph."""
UNKNOWN = "▯"
LONGEST = 40
"""Most characters of a name in a tick."""


@cache
def others() -> tuple[str, ...]:
    """Return which of the `OTHERS` are installed."""
    installed = {font.name for font in fontManager.ttflist}
    return tuple(name for name in OTHERS if name in installed)


def label(text: str) -> str:
    """Return a text from the data as a label for a title, tick or legend: one line, without mathematics markup."""
    return drawable(" ".join(text.split())).replace("$", r"\$")


def ticks(names: Iterable[str], most: int = LONGEST) -> list[str]:
    """Return names from the data as tick labels, each of at most `most` characters.

    A longer name keeps its beginning and ends in "…". Names that would then look the same lose their middle instead, so
    that their different ends are visible.
    """
    listed = [" ".join(name.split()) for name in names]
    shortened = [name if len(name) <= most else f"{name[: most - 1].rstrip()}…" for name in listed]
    ambiguous = {name for name, times in Counter(shortened).items() if times > 1}
    end = (most - 1) // 2
    with_their_ends = [f"{name[: most - 1 - end].rstrip()}…{name[-end:].lstrip()}" for name in listed]
    return [
        label(longer if short in ambiguous and short != name else short)
        for name, short, longer in zip(listed, shortened, with_their_ends, strict=True)
    ]


def drawable(text: str, family: str = "sans-serif") -> str:
    """Return a text with a placeholder for each character that no font has; joiners without a glyph are dropped."""
    if text.isascii() and text.isprintable():
        return text
    fonts = [get_font(findfont(FontProperties(family=[name]))) for name in (family, *others())]  # type: ignore[arg-type]
    return "".join(
        c if c == "\n" or any(font.get_char_index(ord(c)) for font in fonts) else "" if _is_joined(c) else UNKNOWN
        for c in text
    )


def columns(text: str) -> int:
    """Return the number of monospaced columns of a text: Chinese characters take two, combining marks none."""
    return sum(0 if _is_joined(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _is_joined(character: str) -> bool:
    """Whether a character modifies its neighbour instead of having a glyph itself."""
    return unicodedata.category(character) in ("Mn", "Me", "Cf")


DASHED: Any = (0, (4, 1.6))
LINES_ARE = "lines: 95 % intervals"
BANDS_ARE = "bands: 95 % intervals"
DAGGER, DAGGER_IS = "†", "† the probe is not above chance"
WAYS = {"denoise": "clean into corrupted", "noise": "corrupted into clean"}
"""What is patched into what, by direction."""
MOST_TICKS = 16
"""Most layer or head numbers along an axis of a map."""
MARKS_ONLY: dict[str, Any] = {"handlelength": 0.9, "handletextpad": 0.4, "columnspacing": 1.0}
"""Options of legends whose entries are markers without lines."""
RULES: dict[Any, Any] = {
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
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
    "legend.frameon": False,
    # Without a salt the ids in an SVG are random, and the same figure would not give the same bytes.
    "svg.hashsalt": "headwater",
}
SIZES: dict[Any, float] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7.5,
    "legend.title_fontsize": 7.5,
}
"""Font sizes in points. If the caller set `font.size`, sizes that the caller did not set scale with it."""
UNLESS_SET: dict[Any, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    # TrueType, since many journals refuse matplotlib's default Type 3 fonts. Text in an SVG stays text.
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}
"""Defaults that apply only where the caller's settings equal matplotlib's own."""


class Drawing(Figure):
    """A headwater figure: it lays itself out, and is saved with its own type whoever saves it."""

    laid_out: tuple[float, ...] = ()
    """The size of the last layout."""

    def draw(self, renderer: Any) -> None:
        """Draw; after a change of size, lay out twice, because broken lines of text need a different space."""
        size, engine = tuple(self.bbox.size), self.get_layout_engine()
        if engine is not None and size != self.laid_out:
            self.laid_out = size
            engine.execute(self)
        super().draw(renderer)

    def savefig(self, *args: Any, **options: Any) -> None:
        """Write the figure as matplotlib does, with PDF fonts that journals accept."""
        with style():
            super().savefig(*args, **options)


@contextmanager
def style(ax: Axes | None = None) -> Iterator[None]:
    """Draw with the shared style, also on the caller's axes; restore the caller's settings afterwards.

    Only these settings are restored: settings that matplotlib changes on its first drawing, as in a notebook, stay.
    Fonts and sizes that the caller chose are kept.
    """
    # Sizes that the caller has not set scale with the font size if the caller set that.
    is_set = {name: mpl.rcParams[name] != mpl.rcParamsDefault[name] for name in SIZES | UNLESS_SET}
    size = mpl.rcParams["font.size"] if is_set["font.size"] else SIZES["font.size"]
    sizes = {name: points * size / SIZES["font.size"] for name, points in SIZES.items()}
    rules = RULES | {name: value for name, value in (sizes | UNLESS_SET).items() if not is_set[name]}
    rules |= {"font.family": [*dict.fromkeys([*mpl.rcParams["font.family"], *others()])]}
    before = {name: mpl.rcParams[name] for name in rules}
    mpl.rcParams.update(rules)
    try:
        if ax is not None:
            for axis, of in ((ax.xaxis, "xtick"), (ax.yaxis, "ytick")):
                length, width = rules[f"{of}.major.size"], rules[f"{of}.major.width"]
                axis.set_tick_params(length=length, width=width, labelsize=rules.get(f"{of}.labelsize"))
                if "axes.labelsize" in rules:
                    axis.label.set_fontsize(rules["axes.labelsize"])
            ax.spines[["top", "right"]].set_visible(False)
            ax.spines[:].set_linewidth(rules["axes.linewidth"])
        yield
    finally:
        mpl.rcParams.update(before)


def new_figure(width: float, height: float) -> Figure:
    """Make a figure of a size in inches, or of the size passed to `plot(figsize=)`."""
    return plt.figure(figsize=requested_size() or (width, height), layout="constrained", FigureClass=Drawing)


def panel_grid(figure: Any, panels: int, columns: int, **shared: Any) -> list[Axes]:
    """Return axes for `panels` panels in `columns` columns; remove places without a panel."""
    axes: list[Axes] = figure.subplots(-(-panels // columns), columns, squeeze=False, **shared).ravel().tolist()
    for spare in axes[panels:]:
        spare.remove()
    return axes[:panels]


@contextmanager
def one_panel(ax: Axes | None, width: float, height: float) -> Iterator[Axes]:
    """Draw with the shared style on the caller's axes, or on axes of a new figure of a size in inches."""
    with style(ax):
        yield ax or new_figure(width, height).add_subplot()


@contextmanager
def several_panels(
    ax: Axes | None, size: Size, n: int, columns: int, title: str = "", *, instead: str = "", **shared: Any
) -> Iterator[list[Axes]]:
    """Draw `n` panels as `one_panel` draws one, with a title above them if there are several.

    The caller's axes can only be a single panel; `instead` is what else the caller can do.
    """
    refuse_panels(ax, n, instead)
    with style(ax):
        axes = [ax] if ax is not None else panel_grid(new_figure(*size), n, columns, **shared)
        yield axes
        if n > 1 and title:
            set_figure_title(figure_of(axes[0]), title)


def plot_of(axes: Sequence[Axes]) -> Axes | Figure:
    """Return what a drawing function returns: the axes of a single panel, or the figure of several."""
    return axes[0] if len(axes) == 1 else figure_of(axes[0])


def inches(ax: Axes) -> tuple[float, float]:
    """Return the approximate width and height of axes in inches, before labels take their space."""
    box = ax.get_window_extent()
    return 0.9 * box.width / ax.figure.dpi, 0.9 * box.height / ax.figure.dpi


def model_title(run: RunRecord, seen: str) -> str:
    """Return a title: the model's name, without parent folders, and the subject."""
    return f"{short_name(run.model)}: {seen}"


def plain_title(model: str, seen: str) -> str:
    """Return the same title as plain text, for a view, which shows the content of a figure without being one."""
    return f"{_last(model)}: {seen}"


def set_figure_title(figure: Figure, title: str) -> None:
    """Put a title above all panels of a figure, in the place of a single panel's title."""
    figure.suptitle(title, x=0.01, ha="left", size=mpl.rcParams["axes.titlesize"], weight="bold")


def short_name(model: str) -> str:
    """Return a model's name as figures show it: without parent folders."""
    return label(_last(model))


def _last(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def whole_numbers(*axes: Axis) -> None:
    """Put ticks only at whole numbers, even if there is only one, and no more than are readable."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def cell_ticks(axis: Axis, places: Iterable[float], names: Sequence[str], most: int | None = None, **look: Any) -> None:
    """Put names at places: all if readable, else every second, fifth, tenth, ..., at any size of the figure."""
    at = [*map(float, places)]
    locator = Readable(at, names, most or len(names))
    axis.set_ticks(at, names, **look)
    # set_ticks styles the labels; its fixed locator is replaced by one that uses the size at drawing time.
    axis.set_major_locator(locator)
    axis.set_major_formatter(FuncFormatter(locator.name_at))


class Readable(FixedLocator):
    """Ticks at places, thinned so that their names do not overlap."""

    axis: Any

    def __init__(self, places: Sequence[float], names: Sequence[str], most: int) -> None:
        super().__init__(places)
        self.places = np.asarray(places, dtype=float)
        self.names = dict(zip(places, names, strict=True))
        self.longest, self.most = max(map(len, names), default=1), most

    def name_at(self, place: float, _: object) -> str:
        """Return the name at a place."""
        return self.names.get(float(place), "")

    def __call__(self) -> Any:
        """Return the places of the ticks."""
        places = self.places
        if len(places) < 2:
            return places
        low, high = self.axis.get_view_interval()
        box, is_x = self.axis.axes.get_window_extent(), self.axis.axis_name == "x"
        length = (box.width if is_x else box.height) * 72 / self.axis.figure.dpi
        spacing = length / abs(high - low) * np.diff(places).min()
        label = self.axis.get_major_ticks(1)[0].label1
        letter, turned = label.get_fontsize(), np.deg2rad(label.get_rotation() % 180)
        # A rotated label, or one at the y axis, needs the height of a line; others at the x axis need the width of the
        # longest name.
        needed = 1.2 * letter / (np.sin(turned) if is_x else 1.0) if turned or not is_x else np.inf
        if is_x:
            needed = min(needed, letter * (0.64 * self.longest + 0.6))
        steps = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
        least = min(max(needed / spacing, len(places) / self.most), len(places))
        return places[:: next(step for step in steps if step >= least)]


def legend_above(ax: Axes, columns: int, title: str, **options: Any) -> None:
    """Put the legend between the plot and its title, in at most `columns` columns, or as many as fit."""
    entries = ax.get_legend_handles_labels()[1]
    if entries:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
        box = _fitting(ax, columns, **place | options).get_window_extent()
    ax.set_title(title, pad=6 + (72 / ax.figure.dpi * box.height if entries else 0))


def legend_beside(ax: Axes, is_alone: bool = True, **options: Any) -> None:
    """Put the legend to the right of a plot, or below if it is too wide or too high for the right side.

    Only a figure of this plot alone (`is_alone`) may have room on the right.
    """
    options = {"alignment": "left", "handlelength": 1.2, "handletextpad": 0.3, "columnspacing": 1.0} | options
    figure = figure_of(ax)
    if is_alone:
        legend = ax.legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0.0, **options)
        box = legend.get_window_extent()
        if box.width < 0.36 * figure.bbox.width and box.height < 0.85 * figure.bbox.height:
            return
        legend.remove()
        if box.height > 0.4 * figure.bbox.height:  # in one column of a paper it would be larger than the plot
            small = 0.85 * mpl.rcParams["legend.fontsize"]
            options |= {"fontsize": small, "title_fontsize": small, "columnspacing": 0.6, "borderpad": 0.1}
            options["title"] = str(options.get("title") or "").replace("\n", ", ")
        legend_below(figure, 4, labelspacing=0.3, **options)
        return
    below = 3.4 * mpl.rcParams["axes.labelsize"] / mpl.rcParams["legend.fontsize"]
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": below}
    _fitting(ax, 4, labelspacing=0.3, **place | options)


def legend_below(figure: Figure, columns: int, **options: Any) -> None:
    """Put the legend below all panels of a figure, in at most `columns` columns, or as many as fit."""
    _fitting(figure, columns, loc="outside lower center", **options)


def _fitting(of: Axes | Figure, columns: int, **options: Any) -> Legend:
    """Give axes or a figure a legend in as many columns as their width allows, at most `columns`."""
    room = (1.1 if isinstance(of, Axes) else 0.98) * of.get_window_extent().width
    while True:
        legend: Legend = of.legend(ncols=columns, **options)
        if columns == 1 or legend.get_window_extent().width <= room:
            return legend
        columns -= 1
        if isinstance(of, Figure):
            legend.remove()


def draw_line(ax: Axes, x: Any, values: Any, low: Any, high: Any, *, color: str, **look: Any) -> None:
    """Draw a line with a band of its intervals."""
    ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    ax.plot(x, values, color=color, **look)


def draw_points(ax: Axes, values: Any, y: Any, low: Any, high: Any, color: str, mark: str, **look: Any) -> None:
    """Draw a marker at each height `y`, with a line for its interval."""
    ax.hlines(y, low, high, colors=color, linewidths=1.2)
    ax.plot(values, y, mark, color=color, markersize=3.6, linestyle="none", **look)


def name_rows(ax: Axes, names: Sequence[str], margin: float = 0.5) -> None:
    """Name the rows of a plot, the first at the top; at the height of its index."""
    cell_ticks(ax.yaxis, range(len(names)), names)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(names), 1) - 1 + margin, -margin)


def largest(grid: Any) -> float:
    """Return the largest size in a grid, the end of a symmetric colour scale; 1 if there is none above 0."""
    values: Any = np.ma.filled(np.ma.asarray(grid, dtype=float), np.nan)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) or 1.0


def heat_map(ax: Axes, grid: Any, shades: str = "", low: float = 0.0, high: float | None = None) -> QuadMesh:
    """Draw numbers as cells around their indices: symmetric around 0, or with `shades` from `low`; NaN stays grey."""
    values = np.ma.masked_invalid(np.asarray(grid, dtype=float))
    edges = [np.arange(n + 1) - 0.5 for n in values.shape]
    top = largest(values) if high is None else high
    scale: dict[str, Any] = {"cmap": shades or DIVERGING, "vmin": low if shades else -top, "vmax": top}
    mesh = ax.pcolormesh(edges[1], edges[0], values, rasterized=True, **scale)
    ax.set(facecolor=UNSEEN, xlim=edges[1][[0, -1]], ylim=edges[0][[0, -1]])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)
    return mesh


def color_bar(mesh: Any, beside: Any, text: str = "", **place: Any) -> None:
    """Put a colour bar with a label and without a frame beside one or several axes."""
    bar = mesh.axes.figure.colorbar(mesh, ax=beside, **{"fraction": 0.05, "pad": 0.02} | place)
    bar.outline.set_visible(False)
    bar.set_label(text)


def figure_of(plot: Axes | Figure) -> Figure:
    """Return the figure that axes are in, or the figure itself."""
    if not isinstance(plot, Axes | Figure):
        hint = ": pass what its plot() returns" if hasattr(plot, "plot") else ""
        raise InputError(f"A {type(plot).__name__} is not a matplotlib figure{hint}.")
    figure = plot if isinstance(plot, Figure) else plot.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    return figure


def checked_place(ax: Axes | None, panels: int, figsize: object) -> Size | None:
    """Return the size of a new figure (if any); raise if a figure of this many panels cannot be drawn on `ax`."""
    size = checked_size(figsize, ax)
    refuse_panels(ax, panels)
    return size


def refuse_panels(ax: Axes | None, panels: int, instead: str = "") -> None:
    """Raise if a figure of this many panels cannot be drawn on `ax`; `instead` is what else the caller can do."""
    if ax is not None and panels > 1:
        instead += ", or " if instead else ""
        raise InputError(f"This figure has {panels} panels, and ax= holds one: {instead}leave it out for a new figure.")


def image_of(plot: Axes | Figure, dpi: int) -> Image.Image:
    """Return a figure as an image at `dpi`, cropped to its page."""
    figure = figure_of(plot)
    with style():
        figure.set_dpi(dpi)
        # Drawn by a canvas, because savefig would lay the figure out again for each of three drawings.
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba()))


@checked_call
def save_figure(plot: Axes | Figure, stem: str | Path, formats: str | Iterable[str] | None = None) -> list[Path]:
    """Write a figure in several formats, at its size; equal figures give equal bytes.

    Args:
        plot: what a result's `plot` returned; for axes, their figure is written.
        stem: the path without its suffix; missing folders are created.
        formats: one or more suffixes that matplotlib knows, such as png, pdf, svg; default: the suffix of `stem` if it
            is one of them ("figure.png"), else png and pdf.

    Returns:
        The written files.
    """
    figure = figure_of(plot)
    path = checked_path("stem", stem)
    supported = tuple(figure.canvas.get_supported_filetypes())
    if path.suffix[1:] in supported:
        path, formats = path.with_suffix(""), path.suffix[1:] if formats is None else formats
    names = checked_names("formats", ("png", "pdf") if formats is None else formats, supported)
    make_folder(path.parent)
    files = [Path(f"{path}.{name}") for name in names]
    # Without dates, since the time of writing would make equal figures different files.
    dates: dict[str, dict[str, str | None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with style():
        figure.draw_without_rendering()
        engine = figure.get_layout_engine()
        # With its engine on, matplotlib lays a figure out twice more for each file: a head map takes 1.9 s, not 1.2.
        figure.set_layout_engine("none")
        try:
            whole = Bbox.union([figure.bbox_inches, figure.get_tightbbox()])  # includes parts outside its page
            for file in files:
                figure.savefig(file, bbox_inches=whole, metadata=dates.get(file.suffix[1:]))
        finally:
            figure.set_layout_engine(engine)
    return files
