"""ΔP against the layer: what becomes of a truthfulness probe when its answers may not look at the question's words.

The published form (Luo et al., ACL 2026, Figure 2): a panel per model; ΔP in percentage points against the layer whose
probe is read; Q-anchored examples solid in blue, green, purple and pink for the first to fourth question set,
A-anchored ones dashed in orange, red, brown and grey; 95 % bands over examples; one legend below all panels, with the
number of examples in each mode at l*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.colors import BROWN, FAINT, ORANGE, RED, SETS
from headwater.errors import InputError, did_you_mean
from headwater.figures.fonts import label
from headwater.figures.pathway_controls import main_layer
from headwater.figures.published import is_published, set_name
from headwater.figures.style import BANDS_ARE, DASHED, checked_place, model_title, whole_numbers
from headwater.figures.style import style as shared_look
from headwater.names import SplitName, StyleName
from headwater.options import shown as written
from headwater.pathways.modes import BEST_LAYER, CROSSED, MODES, PER_LAYER, RANDOM_SPLIT
from headwater.pathways.trace import Pathways
from headwater.runs.dressing import Size, dressed
from headwater.runs.result import DRAWINGS

COLORS = {
    "Q-anchored": tuple(color for color, _ in SETS[:4]),
    "A-anchored": (ORANGE, RED, BROWN, FAINT),
}
"""By mode, for the first to fourth question set; the marks say the same."""
MARKS = tuple(mark for _, mark in SETS[:4])
DASHES: dict[str, Any] = {"Q-anchored": "-", "A-anchored": DASHED}
VALUES = {"delta_p": "ΔP (percentage points)", "delta_logit": "Change of the probe's logit"}
SPLIT_BY = {
    PER_LAYER: "modes at each layer",
    BEST_LAYER: "modes at l*",
    CROSSED: "modes by another probe",
    RANDOM_SPLIT: "control, modes by random tokens",
}
"""What a title says of how the modes are told apart."""
COUNTED = "In brackets: examples in this mode at l*"
MOST_SETS = 4
PANEL = (2.9, 2.3)
LINE = 0.17
ROOMY: dict[str, Any] = {"handlelength": 2.6, "columnspacing": 2.0, "title_fontsize": 7}


def delta_p(
    pathways: Sequence[Pathways],
    *,
    split_by: SplitName | None = None,
    value: str = "delta_p",
    titles: Sequence[str] | None = None,
    columns: int | None = None,
    style: StyleName = "headwater",
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw ΔP against the layer, a panel per model, with one legend for all.

    Args:
        pathways: results of `hw.trace_pathways`.
        split_by: how the modes are defined: "per layer" (published), "best layer", "cross-fitted" or "random tokens".
        value: `delta_p` or `delta_logit`.
        titles: of the panels; by default the models' names.
        columns: panels in a row; up to three by default.
        style: "headwater", or "published": series and axes by their published names, without counts.
        ax: where to draw a single model's; default: a new figure.
        title: above all panels; of a single one, in place of its own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there is nothing to draw, or no such split, value or style; or `ax` was given for several.
    """
    shown, as_published = list(pathways), is_published(style)
    size = checked_place(ax, len(shown), figsize)
    if not shown:
        raise InputError("delta_p was given nothing: give it a list of results of trace_pathways.")
    if titles is None:
        seen = [SPLIT_BY.get(_split(one, split_by), "") for one in shown]
        titles = [model_title(one.run, "" if as_published else said) for one, said in zip(shown, seen, strict=True)]
    else:
        titles = [label(title) for title in titles]
    if len(titles) != len(shown):
        raise InputError(f"{len(titles)} titles were given for {len(shown)} panels.")
    columns = columns or min(len(shown), 3)
    rows = -(-len(shown) // columns)
    names = _names(shown)
    if ax is not None:
        plot_delta_p(shown[0], ax, split_by=split_by, value=value)
        with shared_look():
            ax.set_title(titles[0])
        return dressed(ax, title, None)
    with shared_look():
        below = LINE * (len(names) + (1 if as_published else 3)) + 0.1
        figure = plt.figure(figsize=(max(PANEL[0] * columns, 3.6), PANEL[1] * rows + below), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(PANEL[1] * rows, below))
        panels, legend = halves
        axes = panels.subplots(rows, columns, squeeze=False).ravel()
        for spare in axes[len(shown) :]:
            spare.remove()
        for panel, one, name in zip(axes, shown, titles, strict=False):
            _draw(panel, one, names, _split(one, split_by), value)
            panel.set_title(name)
        for panel in axes[: len(shown) : columns]:
            panel.set_ylabel(VALUES[value].partition(" (")[0] if as_published else VALUES[value])
        if as_published:
            legend.legend(*_published_legend(names), loc="upper center", ncols=2, **ROOMY)
        else:
            handles, labels = _legend(shown, names, split_by)
            legend.legend(handles, labels, loc="upper center", ncols=2, title=_counted(shown), **ROOMY)
    return dressed(figure, title, size)


@DRAWINGS.add(Pathways)
def plot_delta_p(
    pathways: Pathways, ax: Axes | None = None, *, split_by: SplitName | None = None, value: str = "delta_p"
) -> Axes | Figure:
    """Draw one model's ΔP against the layer: on `ax` with a small legend below, or as a figure of its own.

    Args:
        pathways: a result of `hw.trace_pathways`.
        ax: where to draw.
        split_by: see `delta_p`.
        value: `delta_p` or `delta_logit`.
    """
    if ax is None:
        return delta_p([pathways], split_by=split_by, value=value)
    names = _names([pathways])
    with shared_look():
        _draw(ax, pathways, names, _split(pathways, split_by), value)
        ax.set_ylabel(VALUES[value])
        handles, labels = _legend([pathways], names, split_by)
        look: dict[str, Any] = {"bbox_to_anchor": (0.5, -0.2), "title": _counted([pathways]), **ROOMY}
        ax.legend(handles, labels, loc="upper center", ncols=2, **look)
    return ax


def _split(pathways: Pathways, split_by: str | None) -> str:
    held = list(dict.fromkeys(pathways.curves["split_by"]))
    if split_by is None:
        return PER_LAYER if PER_LAYER in held else BEST_LAYER
    if not isinstance(split_by, str) or split_by not in held:
        raise InputError(f"There are no curves split by {written(split_by)}.{did_you_mean(split_by, held)}")
    return split_by


def _names(shown: Sequence[Pathways]) -> list[str]:
    """The question sets of all panels, in order; each has its colours."""
    names = list(dict.fromkeys(name for one in shown for name in one.datasets))
    if len(names) > MOST_SETS:
        raise InputError(f"A figure shows at most {MOST_SETS} question sets; these results hold {len(names)}.")
    return names


def _draw(ax: Axes, pathways: Pathways, names: Sequence[str], split_by: str, value: str) -> None:
    if not isinstance(value, str) or value not in VALUES:
        raise InputError(f"value={written(value)} cannot be drawn.{did_you_mean(value, VALUES)}")
    curves = pathways.curves[pathways.curves["split_by"] == split_by]
    ax.axhline(0, color=FAINT, linewidth=0.6)
    for mode in MODES:
        for name in pathways.datasets:
            line = curves[(curves["dataset"] == name) & (curves["mode"] == mode)].sort_values("layer")
            place = names.index(name)
            color = COLORS[mode][place]
            bounds = line[f"{value}_low"], line[f"{value}_high"]
            ax.fill_between(line["layer"], *bounds, color=color, alpha=0.15, linewidth=0)
            ax.plot(line["layer"], line[value], color=color, **_look(mode, place))
    ax.set_xlabel("Layer" if pathways.run.options["window"] is None else "Layer around which edges are severed")
    whole_numbers(ax.xaxis)
    ax.margins(x=0.04)


def _look(mode: str, place: int) -> dict[str, Any]:
    return {"linestyle": DASHES[mode], "marker": MARKS[place], "markersize": 2.6}


def _legend(shown: Sequence[Pathways], names: Sequence[str], split_by: str | None) -> tuple[list[Line2D], list[str]]:
    """A column per mode: its name, then its question sets."""
    handles, labels = [], []
    for mode in MODES:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(mode)
        for place, name in enumerate(names):
            counts = ", ".join(_count(one, name, mode, split_by) for one in shown)
            handles.append(Line2D([], [], color=COLORS[mode][place], **_look(mode, place)))
            labels.append(f"{label(name)} ({counts})")
    return handles, labels


def _published_legend(names: Sequence[str]) -> tuple[list[Line2D], list[str]]:
    """The published series, a column per mode."""
    found = [(mode, place, name) for mode in MODES for place, name in enumerate(names)]
    handles = [Line2D([], [], color=COLORS[mode][place], **_look(mode, place)) for mode, place, _ in found]
    return handles, [f"{mode.replace('anchored', 'Anchored')} ({set_name(name)})" for mode, _, name in found]


def _counted(shown: Sequence[Pathways]) -> str:
    return f"{COUNTED}{', panel by panel' if len(shown) > 1 else ''}; {BANDS_ARE}"


def _count(pathways: Pathways, name: str, mode: str, split_by: str | None) -> str:
    """How many examples of a question set are in a mode at l*, averaged over seeds (crossed modes are as many)."""
    modes = pathways.modes[pathways.modes["dataset"] == name]
    if modes.empty:
        return "–"
    if split_by == RANDOM_SPLIT:
        curves = pathways.curves[(pathways.curves["dataset"] == name) & (pathways.curves["split_by"] == split_by)]
        at_best = curves[(curves["mode"] == mode) & (curves["layer"] == main_layer(pathways, name))]
        return f"{at_best['share'].sum() * modes['example'].nunique():,.0f}"
    return f"{(modes['mode'] == mode).sum() / modes['seed'].nunique():,.0f}"
