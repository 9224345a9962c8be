"""ΔP against the layer: what becomes of a truthfulness probe when its answers may not look at the question's words.

A panel per model; ΔP in percentage points against the layer whose probe is read. A question set has its colour and
mark; Q-anchored examples are drawn solid, A-anchored ones dashed with open marks. 95 % bands over examples; one legend
below all panels, with the number of examples in each mode at l*, and a dagger where the probe is not above chance. The
published form (Luo et al., ACL 2026, Figure 2) has no marks, and A-anchored examples in colours of their own: orange,
red, brown and grey; how many examples there are and what the probe tells is said below its legend. A curve of fewer
than ten examples is thin, with open marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from headwater.calls import checked_call
from headwater.colors import BROWN, FAINT, ORANGE, RED, SETS, places_of_sets
from headwater.errors import InputError, did_you_mean
from headwater.figures.pathway_controls import main_layer
from headwater.figures.published import StyleName, in_order, is_published, model_name, set_name, set_names
from headwater.figures.style import (
    BANDS_ARE,
    DAGGER,
    DAGGER_IS,
    DASHED,
    checked_place,
    entitle,
    label,
    model_title,
    new_figure,
    plain_title,
    short_name,
    whole_numbers,
)
from headwater.figures.style import style as shared_look
from headwater.options import shown as written
from headwater.pathways.modes import BEST_LAYER, CROSSED, FEWEST, MODES, PER_LAYER, RANDOM_SPLIT, SplitName
from headwater.pathways.report import SetAtBest
from headwater.pathways.tables import PROBE, WRONG_ANSWER
from headwater.pathways.trace import Pathways
from headwater.runs.result import DRAWINGS, Size, apply_title_and_size, with_interval

PUBLISHED = (ORANGE, RED, BROWN, FAINT)
"""The published colours of A-anchored examples, by question set."""
DASHES: dict[str, Any] = {"Q-anchored": "-", "A-anchored": DASHED}
HOLLOW: dict[str, Any] = {"linewidth": 0.5, "markerfacecolor": "white", "markersize": 3.2}
SHORT = {"delta_p": "ΔP", "delta_logit": "change of the probe's logit"}
WHAT = {
    "delta_p": "ΔP without the question's exact words",
    "delta_logit": "change of the probe's logit without the question's exact words",
}
VALUES = {"delta_p": "ΔP (percentage points)", "delta_logit": "Change of the probe's logit"}
SPLIT_BY = {
    PER_LAYER: "modes at each layer",
    BEST_LAYER: "modes at l*",
    CROSSED: "modes by another probe",
    RANDOM_SPLIT: "modes by random tokens (control)",
}
"""What a title says of how the modes are distinguished."""
COUNTED = "examples in this mode at l*, the probe's best layer"
SPELLED = f"ΔP: the question's exact words severed; {BANDS_ARE}"
MOST_SETS = 4
PANEL = (2.9, 2.3)
LINE = 0.17
ROOMY: dict[str, Any] = {"handlelength": 2.6, "columnspacing": 2.0, "title_fontsize": 7, "borderpad": 0.1}


@checked_call
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
        style: "headwater", or "published": models, series and axes by their published names, without counts.
        ax: where to draw a single model's, with the legend below it; default: a new figure.
        title: above all panels; of a single one, in place of its own.
        figsize: width and height of a new figure, in inches.

    Raises:
        InputError: there is nothing to draw, or no such split, value or style; or `ax` was given for several.
    """
    shown, as_published = list(pathways), is_published(style)
    size = checked_place(ax, len(shown), figsize)
    if not shown:
        raise InputError("delta_p was given nothing: give it a list of results of trace_pathways.")
    if not isinstance(value, str) or value not in VALUES:
        raise InputError(f"value={written(value)} cannot be drawn.{did_you_mean(value, VALUES)}")
    splits = [_split(result, split_by) for result in shown]
    titles = _titles(shown, splits, value, as_published) if titles is None else [label(one) for one in titles]
    if len(titles) != len(shown):
        raise InputError(f"{len(titles)} titles were given for {len(shown)} panels.")
    columns = columns or min(len(shown), 3)
    rows = -(-len(shown) // columns)
    names = _names(shown)
    names = in_order(names) if as_published else names
    if ax is not None:
        with shared_look(ax):
            _draw(ax, shown[0], names, splits[0], value, as_published)
            ax.set(ylabel=_axis_name(value, as_published), title=titles[0])
            handles, labels = _published_legend(names) if as_published else _legend(shown, names, split_by)
            look: dict[str, Any] = {"bbox_to_anchor": (0.5, -0.2), "title": None if as_published else _counted(shown)}
            ax.legend(handles, labels, loc="upper center", ncols=2, **look, **ROOMY)
        return apply_title_and_size(ax, title, None)
    with shared_look(ax):
        entries = 1 + len(shown) * len(names) if as_published else 4 + bool(chance_note(shown))
        below = LINE * (len(names) + entries) + 0.1
        figure = new_figure(max(PANEL[0] * columns, 3.6), PANEL[1] * rows + below)
        height = (size or figure.get_size_inches())[1]
        halves: Any = figure.subfigures(2, 1, height_ratios=(max(height - below, below), below))
        panels, legend = halves
        axes = panels.subplots(rows, columns, squeeze=False).ravel()
        for spare in axes[len(shown) :]:
            spare.remove()
        for panel, result, split, name in zip(axes, shown, splits, titles, strict=False):
            _draw(panel, result, names, split, value, as_published)
            panel.set_title(name)
        for panel in axes[: len(shown) : columns]:
            panel.set_ylabel(_axis_name(value, as_published))
        if as_published:
            legend.legend(*_published_legend(names), loc="upper center", ncols=2, **ROOMY)
            legend.text(0.5, 0.0, _counts_note(shown), ha="center", va="bottom", fontsize=6)
        else:
            handles, labels = _legend(shown, names, split_by)
            legend.legend(handles, labels, loc="upper center", ncols=2, title=_counted(shown), **ROOMY)
            if len(shown) > 1:
                entitle(figure, WHAT[value])
    return apply_title_and_size(figure, title, size)


def _titles(shown: Sequence[Pathways], splits: Sequence[str], value: str, as_published: bool) -> list[str]:
    """The titles of panels that were given none."""
    if as_published:
        return [model_name(short_name(result.run.model)) for result in shown]
    if len(shown) == 1:
        return [label(title_of(shown[0], splits[0], value))]
    return [model_title(result.run, SPLIT_BY[split]) for result, split in zip(shown, splits, strict=True)]


@DRAWINGS.add(Pathways)
def plot_delta_p(
    pathways: Pathways, ax: Axes | None = None, *, split_by: SplitName | None = None, value: str = "delta_p"
) -> Axes | Figure:
    """Draw one model's ΔP against the layer: on `ax` with a small legend below, or as a figure of its own."""
    return delta_p([pathways], split_by=split_by, value=value, ax=ax)


def _axis_name(value: str, as_published: bool) -> str:
    return VALUES[value].partition(" (")[0] if as_published else VALUES[value]


def default_split(pathways: Pathways) -> str:
    """Return how modes are distinguished where nobody chose: as published where that was traced, else at l*."""
    return PER_LAYER if (pathways.curves["split_by"] == PER_LAYER).any() else BEST_LAYER


def _split(pathways: Pathways, split_by: str | None) -> str:
    splits = list(dict.fromkeys(pathways.curves["split_by"]))
    if split_by is None:
        return default_split(pathways)
    if not isinstance(split_by, str) or split_by not in splits:
        raise InputError(f"There are no curves split by {written(split_by)}.{did_you_mean(split_by, splits)}")
    return split_by


def _names(shown: Sequence[Pathways]) -> list[str]:
    """The question sets of all panels, in order; each has its colours."""
    names = list(dict.fromkeys(name for one in shown for name in one.datasets))
    if len(names) > MOST_SETS:
        raise InputError(f"A figure shows at most {MOST_SETS} question sets; these results hold {len(names)}.")
    return names


def title_of(pathways: Pathways, split_by: str, value: str = "delta_p") -> str:
    """Return the title of one model's curves as plain text: what is drawn, and what split the examples."""
    return plain_title(pathways.run.model, f"{SHORT[value]}, {SPLIT_BY[split_by]}")


def _draw(ax: Axes, pathways: Pathways, names: Sequence[str], split_by: str, value: str, as_published: bool) -> None:
    curves = pathways.curves[pathways.curves["split_by"] == split_by]
    ax.axhline(0, color=FAINT, linewidth=0.6)
    for mode in MODES:
        for name in pathways.datasets:
            line = curves[(curves["dataset"] == name) & (curves["mode"] == mode)].sort_values("layer")
            look = look_of(name, mode, names, as_published)
            if 0 < line["examples"].max() < FEWEST:
                look |= HOLLOW | {"marker": SETS[places_of_sets(names)[name]][1]}
            bounds = line[f"{value}_low"], line[f"{value}_high"]
            ax.fill_between(line["layer"], *bounds, color=look["color"], alpha=0.15, linewidth=0)
            ax.plot(line["layer"], line[value], **look)
    ax.set_xlabel("Layer" if pathways.run.options["window"] is None else "Layer around which edges are severed")
    whole_numbers(ax.xaxis)
    ax.margins(x=0.04)


def look_of(name: str, mode: str, names: Sequence[str], as_published: bool = False) -> dict[str, Any]:
    """Return how the line of a question set and mode is drawn beside those of other sets."""
    place = places_of_sets(names)[name]
    color, mark = SETS[place]
    mark = "" if as_published else mark
    look: dict[str, Any] = {"color": color, "linestyle": DASHES[mode], "marker": mark, "markersize": 2.6}
    if mode == MODES[0]:
        return look
    return look | ({"color": PUBLISHED[place]} if as_published else {"markerfacecolor": "white", "markersize": 3.2})


def _legend(shown: Sequence[Pathways], names: Sequence[str], split_by: str | None) -> tuple[list[Line2D], list[str]]:
    """A column per mode: its name, then its question sets."""
    handles, labels = [], []
    for mode in MODES:
        handles.append(Line2D([], [], linestyle="none"))
        labels.append(mode)
        for name in names:
            counts = ", ".join(_count(one, name, mode, split_by) + DAGGER * _at_chance(one, name) for one in shown)
            handles.append(Line2D([], [], **look_of(name, mode, names)))
            labels.append(f"{label(name)} ({counts})")
    return handles, labels


def _published_legend(names: Sequence[str]) -> tuple[list[Line2D], list[str]]:
    """The published series, a column per mode."""
    found = [(mode, name) for mode in MODES for name in names]
    handles = [Line2D([], [], **look_of(name, mode, names, as_published=True)) for mode, name in found]
    called = set_names(names)
    return handles, [f"{mode.replace('anchored', 'Anchored')} ({called[name]})" for mode, name in found]


def _counts_note(shown: Sequence[Pathways]) -> str:
    """A line per panel and question set: how many examples are in each mode at l*, and what the probe there tells."""
    lines = []
    for result in shown:
        for name in result.datasets:
            view, counts = SetAtBest(result, name), [_count(result, name, mode, BEST_LAYER) for mode in MODES]
            auc = with_interval(*view.baseline(WRONG_ANSWER, PROBE))
            note = f"n = {counts[0]} Q-anchored + {counts[1]} A-anchored; probe's AUC {auc}"
            lines.append(label(f"{model_name(short_name(result.run.model))}, {set_name(name)}: {note}"))
    return "\n".join(lines)


def chance_note(shown: Sequence[Pathways]) -> str:
    """Name the runs and question sets whose probe is not above chance: their curves are about nothing; "" without."""
    found = [f"{short_name(one.run.model)}, {name}" for one in shown for name in one.datasets if _at_chance(one, name)]
    return f"The probe is not above chance, so that its curves say nothing: {'; '.join(found)}." if found else ""


def _at_chance(pathways: Pathways, name: str) -> bool:
    """Whether the probe of a question set is not above chance."""
    return name in pathways.datasets and not SetAtBest(pathways, name).baseline(WRONG_ANSWER, PROBE)[1] > 0.5


def _counted(shown: Sequence[Pathways]) -> str:
    marked = f"\n{DAGGER_IS}" if chance_note(shown) else ""
    return f"In brackets{', panel by panel' if len(shown) > 1 else ''}: {COUNTED}\n{SPELLED}{marked}"


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
