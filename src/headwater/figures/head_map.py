"""The head map: layer by head, a marker per head in the colour of its category (Elhelo & Geva, ACL 2025).

Grey, blue, orange, green and red are unclassified, algorithmic, knowledge, linguistic and translation; increasingly
dark purples are two, three and four categories. Shapes encode the same as colours. A marker's area grows with the
head's best excess: the chance-corrected score of its best relation. In a map without a null model, which has no excess,
every marker has the size of excess 1. A ring around a marker means that the running model uses the head for one of its
relations (`HeadMap.validate`). The legend counts the heads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

import headwater.figures.style as st
from headwater.calls import checked_call
from headwater.colors import INK, PURPLE
from headwater.errors import InputError
from headwater.figure_options import Size, apply_title_and_size, size_requested
from headwater.figures.published import StyleName, model_name
from headwater.heads.categories import CATEGORIES, UNCLASSIFIED, best_excess, label_counts, labels
from headwater.heads.head_map import HeadMap
from headwater.options import checked_count
from headwater.runs.result import DRAWINGS

NONE = ("#d4d4d4", "o")
SEVERAL = (("#b08fd8", "p"), (PURPLE, "h"), ("#45156e", "*"), ("#1f0833", "P"))
"""Colour and shape of two, three, four, and five or more categories."""
AREAS = {"o": 1.0, "s": 0.82, "^": 1.0, "D": 0.62, "p": 1.1, "h": 1.1, "*": 1.6}
"""Areas, relative to a disc, at which the shapes appear equally large."""
PUBLISHED_SEVERAL = ("2 categories", "3 categories", "4 categories")
UNCLASSIFIED_AREA = 0.25
NO_EXCESS_AREA = 0.3
"""Area of a marker of excess 0, relative to one of excess 1."""
SIZES_ARE = "area: excess over chance"
USED = "used"
RING = 0.96
"""Diameter of a ring, in distances between heads."""
RING_LINE = 0.7
LARGEST_MARK = 0.8
"""Width of a marker of excess 1, in cells."""
SMALLEST = 0.7
"""Smallest visible area of a marker, in square points."""
TELLABLE = 3.0
"""Smallest size of a cell, in points, at which shapes are distinguishable."""

# Inches.
CELL = 0.2
LARGEST = (6.0, 4.2)
PANEL_HEIGHT = 2.2
LEFT, BOTTOM, TOP, GAP, LEGEND, LINE = 0.5, 0.45, 0.35, 0.25, 1.6, 0.165
LETTER, HEADING, LEGEND_WIDTH = 0.085, 0.3, 4.6
SEEN = "heads by category"


@DRAWINGS.add(HeadMap)
def plot_head_map(head_map: HeadMap, ax: Axes | None = None) -> Axes:
    """Draw one head map on a new figure of fitting size, with its legend at the right; or on `ax`, with it below."""
    legend, is_alone, (n_layers, n_heads) = _legend([head_map]), ax is None, extent(head_map.categories)
    cell = min(CELL, LARGEST[0] / n_layers, LARGEST[1] / n_heads)
    width, height = max(n_layers * cell, 2 * CELL), max(n_heads * cell, (len(legend["labels"]) + 3) * LINE)
    with st.one_panel(ax, LEFT + width + LEGEND, BOTTOM + height + TOP) as ax:
        _draw(head_map, ax)
        ax.set_title(st.label(title_of([head_map])))
        st.legend_beside(ax, is_alone, **legend)
    return ax


@checked_call
def head_maps(
    maps: Sequence[HeadMap],
    columns: int | None = None,
    *,
    style: StyleName = "headwater",
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw several head maps in one figure, each with its ranges of layers and heads, and one legend for all.

    Args:
        maps: results of `classify_heads`.
        columns: maps in a row; by default up to four, or two in the published style.
        style: "headwater" or "published": panels and markers of one size, and a legend with the published words and no
            counts.
        ax: axes for a single map, with its legend below; default: a new figure.
        title: above all maps, replaces the figure's title; for a single map on `ax`, replaces its title.
        figsize: width and height of a new figure, in inches.
    """
    maps = list(maps) if isinstance(maps, Sequence) else []
    if not maps or not all(hasattr(head_map, "categories") for head_map in maps):
        raise InputError("head_maps needs a list of results of classify_heads.")
    size, as_published = st.checked_place(ax, len(maps), figsize), style == "published"
    if len(maps) == 1 and not as_published:
        return maps[0].plot(ax, title=title, figsize=size)
    names = [model_name(name) if as_published else name for name in names_of(maps)]
    columns = min(len(maps), 2 if as_published else 4) if columns is None else checked_count("columns", columns)
    with st.style(ax), size_requested(size):
        axes = [ax] if ax is not None else _panels(maps, names, min(columns, len(maps)), as_published)
        for head_map, name, panel in zip(maps, names, axes, strict=True):
            _draw(head_map, panel, sized=not as_published)
            panel.set_title(st.label(name))
        look = _legend(maps, as_published) | {"columnspacing": 1.2, "handletextpad": 0.3}
        if ax is not None:
            st.legend_beside(ax, False, **look)
            return apply_title_and_size(ax, title, None)
        figure = st.figure_of(axes[0])
        st.legend_below(figure, 8 if as_published else 4, **look)
        if len(maps) > 1 and not as_published:
            st.set_figure_title(figure, title_of(maps))
    return apply_title_and_size(figure, title, size)


def _panels(maps: Sequence[HeadMap], names: Sequence[str], columns: int, as_published: bool) -> list[Axes]:
    """Make a figure with axes for each map; layers and heads are equally spaced, within limits."""
    sizes = [extent(one.categories) for one in maps]
    widths = [PANEL_HEIGHT * min(max(n_layers / n_heads, 0.4), 2.5) for n_layers, n_heads in sizes]
    widths = [max(width, LETTER * len(name)) for width, name in zip(widths, names, strict=True)]
    widths = [max(widths) if as_published else max(widths[column::columns]) for column in range(columns)]
    rows, legend = -(-len(maps) // columns), (2 + len(_legend(maps)["labels"]) // 4) * LINE
    width = max(sum(widths) + columns * (LEFT + GAP), LEGEND_WIDTH)
    figure = st.new_figure(width, rows * (BOTTOM + PANEL_HEIGHT + TOP) + legend + HEADING)
    return st.panel_grid(figure, len(maps), columns, width_ratios=widths)


def title_of(maps: Sequence[HeadMap]) -> str:
    """Return the title above maps as plain text: the model of a single map, and the subject."""
    return f"{maps[0].title}: {SEEN}" if len(maps) == 1 else SEEN.capitalize()


def names_of(maps: Sequence[HeadMap]) -> list[str]:
    """Return a name for each map: its model; if several maps share it, with the rule, else with their number."""
    for more in ("", "rule"):
        names = [f"{one.title}, {one.run.options.get(more)}" if more else one.title for one in maps]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, start=1)]


def extent(heads: pd.DataFrame) -> tuple[int, int]:
    """Return the number of layers and heads of a map of these heads."""
    return int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1


def frame(ax: Axes, heads: pd.DataFrame) -> None:
    """Set the limits of axes so that each layer and head has a place."""
    n_layers, n_heads = extent(heads)
    ax.set(xlim=(-0.7, n_layers - 0.3), ylim=(-0.7, n_heads - 0.3), xlabel="Layer", ylabel="Head")
    st.whole_numbers(ax.xaxis, ax.yaxis)


def mark_of(label: str) -> tuple[str, str]:
    """Return the colour and shape of a label."""
    if label in CATEGORIES:
        return CATEGORIES[label].color, CATEGORIES[label].mark
    return NONE if label == UNCLASSIFIED else SEVERAL[min(int(label.split()[0]), len(SEVERAL) + 1) - 2]


def _draw(head_map: HeadMap, ax: Axes, sized: bool = True) -> None:
    frame(ax, head_map.categories)
    excess = best_excess(head_map.table)
    for label, heads in head_map.categories.groupby("label"):
        color, shape = mark_of(str(label))
        best = pd.Series(1.0, index=heads.index)
        if sized:
            best = excess.reindex(pd.MultiIndex.from_frame(heads[["layer", "head"]]))
        area = mark_area(_area(str(label)), best)
        mark_heads(ax, heads, area, c=color, marker=shape, linewidths=0, label=str(label))
    used = _used(head_map)
    if len(used) and sized:
        ring: dict[str, Any] = {"facecolors": "none", "edgecolors": INK, "linewidths": RING_LINE, "label": USED}
        mark_heads(ax, used, np.full(len(used), RING**2), **ring)


class Marks(PathCollection):
    """Markers of heads, scaled to the cells of the map whenever they are drawn; in tiny cells, they fill the cells."""

    areas: np.ndarray
    shape: Path
    shares: np.ndarray
    """Filled share of each cell."""

    def draw(self, renderer: Any) -> None:
        """Draw the markers in the size for the current axes."""
        self.fit()
        super().draw(renderer)

    def fit(self) -> None:
        """Set the marker sizes from the current size of a cell."""
        ax: Any = self.axes
        box, across, up = ax.get_window_extent(), np.ptp(ax.get_xlim()), np.ptp(ax.get_ylim())
        wide, high = 72 / ax.figure.dpi * box.width / across, 72 / ax.figure.dpi * box.height / up
        if min(wide, high) < TELLABLE and len(self.get_facecolor()):
            self.set_paths([Path.unit_rectangle().transformed(Affine2D().translate(-0.5, -0.5).scale(wide, high))])
            self.set_sizes(np.minimum(self.shares, 1.0))
        else:
            self.set_paths([self.shape])
            self.set_sizes(np.maximum(self.areas * min(wide, high, 72 * CELL) ** 2, SMALLEST))


def mark_area(area: float, excess: pd.Series) -> np.ndarray:
    """Return marker areas relative to a cell's, which grow with the excess; a missing excess counts as 1."""
    grown: pd.Series = NO_EXCESS_AREA + (1 - NO_EXCESS_AREA) * excess.clip(0, 1).fillna(1)
    return area * LARGEST_MARK**2 * grown.to_numpy()


def mark_heads(ax: Axes, heads: pd.DataFrame, areas: np.ndarray, **look: Any) -> None:
    """Draw a marker at each layer and head, with areas relative to a cell's."""
    marks: Any = ax.scatter(heads["layer"], heads["head"], **look)
    # scatter returns a PathCollection and accepts no class; as Marks, it follows the size of the axes.
    marks.__class__, marks.areas, marks.shape = Marks, np.asarray(areas, dtype=float), marks.get_paths()[0]
    marks.shares = marks.areas / (LARGEST_MARK**2 * AREAS.get(look.get("marker", "o"), 1.0))
    marks.fit()


def _used(head_map: HeadMap) -> pd.DataFrame:
    """Return the heads that the running model uses for some relation: `layer, head`."""
    table = head_map.table
    rows = table[table["used"].fillna(False).astype(bool)] if head_map.is_validated else table.head(0)
    return rows[["layer", "head"]].drop_duplicates()


def _area(label: str) -> float:
    return UNCLASSIFIED_AREA if label == UNCLASSIFIED else AREAS.get(mark_of(label)[1], 1.0)


def legend_mark(color: str, shape: str, area: float, name: str = "") -> Line2D:
    """Return a legend marker with an area relative to a disc's."""
    look: dict[str, Any] = {"linestyle": "none", "markersize": 6.5 * area**0.5, "markeredgewidth": 0}
    return Line2D([], [], marker=shape, color=color, label=name, **look)


def _legend(maps: Sequence[HeadMap], as_published: bool = False) -> dict[str, Any]:
    """Return the legend's handles, labels and title; with the number of heads per map unless it is as published."""
    present = {label for head_map in maps for label in head_map.categories["label"]}
    # Always the single categories; several only if such a head exists, or as published.
    also = {UNCLASSIFIED, *CATEGORIES, *(PUBLISHED_SEVERAL if as_published else ())}
    shown = [label for label in labels() if label in present or label in also]
    handles = [legend_mark(*mark_of(label), _area(label)) for label in shown]
    if as_published:
        named = [label.capitalize() for label in shown]
        return {"handles": handles, "labels": named, "title": rule_note(maps) or None, "title_fontsize": 6.5}
    counts = [label_counts(head_map.categories) for head_map in maps]
    texts = [f"{label} ({' / '.join(f'{of_map[label]:,}' for of_map in counts)})" for label in shown]
    if any(head_map.is_validated for head_map in maps):
        look: dict[str, Any] = {"marker": "o", "markersize": 8.0, "markerfacecolor": "none", "markeredgecolor": INK}
        handles.append(Line2D([], [], linestyle="none", markeredgewidth=RING_LINE, **look))
        used = " / ".join(f"{len(_used(one)):,}" if one.is_validated else "–" for one in maps)
        texts.append(f"{USED} ({used})")
    rule = maps[0].run.options.get("rule")
    title = ["in brackets: heads, map by map"] if len(maps) > 1 else [f"{rule} rule"] * bool(rule)
    title += [SIZES_ARE] * any(one.table["excess"].notna().any() for one in maps)
    return {"handles": handles, "labels": texts, "title": ("; " if len(maps) > 1 else "\n").join(title) or None}


def rule_note(maps: Sequence[HeadMap]) -> str:
    """Return a note on the rule of classification if it is not the published one; else an empty string."""
    rules = {str(one.run.options.get("rule")) for one in maps}
    listed = " and ".join(sorted(rules))
    return (
        ""
        if rules == {"published"}
        else f"Heads classified by the {listed} rule; published maps, by the published one."
    )
