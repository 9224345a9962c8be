"""Pathways: how a truthfulness probe changes when answers cannot attend to the question's exact words, and controls.

ΔP against the layer: a panel per model; ΔP in percentage points against the layer of the probe. Each question set has a
colour and marker; Q-anchored examples are solid, A-anchored ones dashed with open markers. 95 % bands over examples;
one legend below all panels, with the number of examples in each mode at l*, and a dagger if the probe is not above
chance. The published form (Luo et al., ACL 2026, Figure 2) has no markers, and draws A-anchored examples in separate
colours: orange, red, brown and grey; the number of examples and the probe's AUC are below its legend. A curve of fewer
than ten examples is thin, with open markers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

import headwater.figures.style as st
from headwater.calls import checked_call
from headwater.colors import BLUE, BROWN, FAINT, GREEN, ORANGE, PURPLE, RED, SETS, places_of_sets
from headwater.errors import InputError
from headwater.figure_options import Size, apply_title_and_size, size_requested
from headwater.figures.published import StyleName, in_order, model_name, set_name, set_names
from headwater.options import checked_name
from headwater.pathways.interventions import ANSWER_ONLY, EXACT, EXACT_ON_RANDOM_ROWS, RANDOM, RANDOM_SWAP, SWAP
from headwater.pathways.modes import ALL, BEST_LAYER, CROSSED, FEWEST, MODES, PER_LAYER, RANDOM_SPLIT, WITHIN, SplitName
from headwater.pathways.refusal_rates import Refusals
from headwater.pathways.report import SetAtBest
from headwater.pathways.tables import PROBE
from headwater.pathways.tables import WRONG_ANSWER as WRONG
from headwater.pathways.trace import Pathways
from headwater.runs.result import DRAWINGS, whole_summary, with_interval

PUBLISHED = (ORANGE, RED, BROWN, FAINT)
"""The published colours of A-anchored examples, by question set."""
DASHES: dict[str, Any] = {"Q-anchored": "-", "A-anchored": st.DASHED}
HOLLOW: dict[str, Any] = {"linewidth": 0.5, "markerfacecolor": "white", "markersize": 3.2}
SHORT = {"delta_p": "ΔP", "delta_logit": "change of the probe's logit"}
VALUES = {"delta_p": "ΔP (percentage points)", "delta_logit": "Change of the probe's logit"}
SPLIT_BY = {
    PER_LAYER: "modes at each layer",
    BEST_LAYER: "modes at l*",
    CROSSED: "modes by another probe",
    RANDOM_SPLIT: "modes by random tokens (control)",
}
"""How modes are distinguished, as in titles."""
COUNTED = "examples in this mode at l*, the probe's best layer"
SPELLED = f"ΔP: the question's exact words severed; {st.BANDS_ARE}"
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
        style: "headwater", or "published": models, series and axes by their published names, without counts.
        ax: axes for a single model, with the legend below; default: a new figure.
        title: above all panels; for a single panel, replaces its title.
        figsize: width and height of a new figure, in inches.
    """
    shown, as_published = list(pathways), style == "published"
    size = st.checked_place(ax, len(shown), figsize)
    if not shown:
        raise InputError("delta_p needs a list of results of trace_pathways; the list is empty.")
    checked_name("value", value, tuple(VALUES))
    splits = [default_split(one) for one in shown]
    if split_by is not None:
        splits = [checked_name("split_by", split_by, list(dict.fromkeys(one.curves["split_by"]))) for one in shown]
    titles = [st.model_title(result.run, SPLIT_BY[split]) for result, split in zip(shown, splits, strict=True)]
    if as_published:
        titles = [model_name(st.short_name(result.run.model)) for result in shown]
    elif len(shown) == 1:
        titles = [st.label(title_of(shown[0], splits[0], value))]
    names = list(dict.fromkeys(name for one in shown for name in one.datasets))
    if len(names) > MOST_SETS:
        raise InputError(f"A figure shows at most {MOST_SETS} question sets; these results have {len(names)}.")
    names = in_order(names) if as_published else names
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    axis_name = VALUES[value].partition(" (")[0] if as_published else VALUES[value]
    with st.style(ax):
        handles, labels = _legend(shown, names, split_by, as_published)
        look: dict[str, Any] = {"loc": "upper center", "ncols": 2}
        if not as_published:
            marked = f"\n{st.DAGGER_IS}" if chance_note(shown) else ""
            each = ", panel by panel" if len(shown) > 1 else ""
            look["title"] = f"In brackets{each}: {COUNTED}\n{SPELLED}{marked}"
        if ax is not None:
            _draw(ax, shown[0], names, splits[0], value, as_published)
            ax.set(ylabel=axis_name, title=titles[0])
            ax.legend(handles, labels, bbox_to_anchor=(0.5, -0.2), **look, **ROOMY)
            return apply_title_and_size(ax, title, None)
        entries = 1 + len(shown) * len(names) if as_published else 4 + bool(chance_note(shown))
        below = LINE * (len(names) + entries) + 0.1
        figure = st.new_figure(max(PANEL[0] * columns, 3.6), PANEL[1] * rows + below)
        height = (size or figure.get_size_inches())[1]
        above, legend = figure.subfigures(2, 1, height_ratios=(max(height - below, below), below))  # type: ignore[misc]
        axes = st.panel_grid(above, len(shown), columns)
        for panel, result, split, name in zip(axes, shown, splits, titles, strict=True):
            _draw(panel, result, names, split, value, as_published)
            panel.set_title(name)
        for panel in axes[::columns]:
            panel.set_ylabel(axis_name)
        legend.legend(handles, labels, **look, **ROOMY)
        if as_published:
            legend.text(0.5, 0.0, _counts_note(shown), ha="center", va="bottom", fontsize=6)
        elif len(shown) > 1:
            st.set_figure_title(figure, f"{SHORT[value]} without the question's exact words")
    return apply_title_and_size(figure, title, size)


@DRAWINGS.add(Pathways)
def plot_delta_p(
    pathways: Pathways, ax: Axes | None = None, *, split_by: SplitName | None = None, value: str = "delta_p"
) -> Axes | Figure:
    """Draw one model's ΔP by layer, see `delta_p`: on `ax` with a small legend below, or as a separate figure."""
    return delta_p([pathways], split_by=split_by, value=value, ax=ax)


def default_split(pathways: Pathways) -> str:
    """Return the default way to distinguish modes: as published if the trace has it, else at l*."""
    return PER_LAYER if (pathways.curves["split_by"] == PER_LAYER).any() else BEST_LAYER


def title_of(pathways: Pathways, split_by: str, value: str = "delta_p") -> str:
    """Return the title of one model's curves as plain text: the value drawn and how the examples were split."""
    return st.plain_title(pathways.run.model, f"{SHORT[value]}, {SPLIT_BY[split_by]}")


def _draw(ax: Axes, pathways: Pathways, names: Sequence[str], split_by: str, value: str, as_published: bool) -> None:
    curves = pathways.curves[pathways.curves["split_by"] == split_by]
    ax.axhline(0, color=FAINT, linewidth=0.6)
    for mode in MODES:
        for name in pathways.datasets:
            line = curves[(curves["dataset"] == name) & (curves["mode"] == mode)].sort_values("layer")
            look = look_of(name, mode, names, as_published)
            if 0 < line["examples"].max() < FEWEST:
                look |= HOLLOW | {"marker": SETS[places_of_sets(names)[name]][1]}
            st.draw_line(ax, line["layer"], *(line[f"{value}{end}"] for end in ("", "_low", "_high")), **look)
    ax.set_xlabel(layer_label(pathways))
    st.whole_numbers(ax.xaxis)
    ax.margins(x=0.04)


def layer_label(pathways: Pathways) -> str:
    """Return the label of the axis of layers."""
    return "Layer" if pathways.run.options["window"] is None else "Layer around which edges are severed"


def look_of(name: str, mode: str, names: Sequence[str], as_published: bool = False) -> dict[str, Any]:
    """Return the line style of a question set and mode in a figure with the sets `names`."""
    place = places_of_sets(names)[name]
    color, mark = SETS[place]
    mark = "" if as_published else mark
    look: dict[str, Any] = {"color": color, "linestyle": DASHES[mode], "marker": mark, "markersize": 2.6}
    if mode == MODES[0]:
        return look
    return look | ({"color": PUBLISHED[place]} if as_published else {"markerfacecolor": "white", "markersize": 3.2})


def _legend(
    shown: Sequence[Pathways], names: Sequence[str], split_by: str | None, as_published: bool
) -> tuple[list[Line2D], list[str]]:
    """Return the entries of the legend, a column per mode: unless published its name, then its question sets."""
    handles, labels, called = [], [], set_names(names)
    for mode in MODES:
        if not as_published:
            handles.append(Line2D([], [], linestyle="none"))
            labels.append(mode)
        for name in names:
            handles.append(Line2D([], [], **look_of(name, mode, names, as_published)))
            if as_published:
                labels.append(f"{mode.replace('anchored', 'Anchored')} ({called[name]})")
            else:
                counts = ", ".join(
                    _count(one, name, mode, split_by) + st.DAGGER * _at_chance(one, name) for one in shown
                )
                labels.append(f"{st.label(name)} ({counts})")
    return handles, labels


def _counts_note(shown: Sequence[Pathways]) -> str:
    """Return a line per panel and question set: the number of examples in each mode at l*, and the probe's AUC."""
    lines = []
    for result in shown:
        for name in result.datasets:
            view, counts = SetAtBest(result, name), [_count(result, name, mode, BEST_LAYER) for mode in MODES]
            auc = with_interval(*view.baseline(WRONG, PROBE))
            note = f"n = {counts[0]} Q-anchored + {counts[1]} A-anchored; probe's AUC {auc}"
            lines.append(st.label(f"{model_name(st.short_name(result.run.model))}, {set_name(name)}: {note}"))
    return "\n".join(lines)


def chance_note(shown: Sequence[Pathways]) -> str:
    """Name the runs and question sets whose probe is not above chance, so their curves mean nothing; "" if none."""
    found = [
        f"{st.short_name(one.run.model)}, {name}" for one in shown for name in one.datasets if _at_chance(one, name)
    ]
    return f"The probe is not above chance, so its curves are not informative: {'; '.join(found)}." if found else ""


def _at_chance(pathways: Pathways, name: str) -> bool:
    """Whether the probe of a question set is not above chance."""
    return name in pathways.datasets and not SetAtBest(pathways, name).baseline(WRONG, PROBE)[1] > 0.5


def _count(pathways: Pathways, name: str, mode: str, split_by: str | None) -> str:
    """Return the mean number over seeds of a set's examples in a mode at l* (the same for crossed modes)."""
    modes = pathways.modes[pathways.modes["dataset"] == name]
    if modes.empty:
        return "–"
    if split_by == RANDOM_SPLIT:
        curves = pathways.curves[(pathways.curves["dataset"] == name) & (pathways.curves["split_by"] == split_by)]
        at_best = curves[(curves["mode"] == mode) & (curves["layer"] == SetAtBest(pathways, name).layer)]
        return f"{at_best['share'].sum() * modes['example'].nunique():,.0f}"
    return f"{(modes['mode'] == mode).sum() / modes['seed'].nunique():,.0f}"


# The controls: how often predictions flip, by layer and intervention, and ΔP at l* by mode.
#
# A knockout of E_Q is informative only beside the same knockout of equally many random question tokens, on the rows
# that have enough of them: titles count these. A mode is informative only if it comes from another probe than the one
# whose ΔP is shown. What would overturn the finding: the probe's AUC compared with relation, answer words, span length,
# and the margin.

LOOKS: dict[str, dict[str, Any]] = {
    EXACT: {"color": BLUE, "linestyle": "-", "marker": "o"},
    EXACT_ON_RANDOM_ROWS: {"color": BLUE, "linestyle": st.DASHED, "marker": "D"},
    RANDOM: {"color": FAINT, "linestyle": st.DASHED, "marker": "o"},
    SWAP: {"color": RED, "linestyle": "-", "marker": "s"},
    RANDOM_SWAP: {"color": ORANGE, "linestyle": st.DASHED, "marker": "s"},
    ANSWER_ONLY: {"color": PURPLE, "linestyle": (0, (1, 1.2)), "marker": "^"},
}
MODE_LOOKS = {"Q-anchored": (BLUE, "o"), "A-anchored": (ORANGE, "s")}
CONTROLS_PANEL = (2.5, 1.9)
RANDOM_ARE = "random: examples with as many random tokens"


@checked_call
def flip_rates(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw how often the probe's prediction flips, by layer, for every intervention: a panel per question set.

    Args:
        pathways: a result of `hw.trace_pathways`. The dotted line is at the layer chosen most often as l*.
        ax: axes for a single question set; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.
    """
    table = pathways.controls[pathways.controls["group"] == ALL]

    def draw(panel: Axes, name: str) -> None:
        for intervention, look in LOOKS.items():
            line = table[(table["dataset"] == name) & (table["intervention"] == intervention)]
            line = line[line["examples"] > 0].sort_values("layer")
            rates = (100 * line[f"flip_rate{end}"] for end in ("", "_low", "_high"))
            if len(line):
                st.draw_line(panel, line["layer"], *rates, markersize=2.6, label=intervention, **look)
        panel.axvline(SetAtBest(pathways, name).layer, color=FAINT, linewidth=0.7, linestyle=":")
        panel.set(xlabel="Layer", ylim=(0, None))
        st.whole_numbers(panel.xaxis)

    note = f"{st.BANDS_ARE}; dotted: l*, the probe's best layer\n{RANDOM_ARE}"
    subject, y = "predictions that flip", "Predictions that flip (%)"
    return _by_set(pathways, draw, ax, figsize, title, subject=subject, y=y, note=note)


@checked_call
def controls(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw ΔP at l* after every intervention, for examples of each mode: a panel per question set.

    Modes come from another seed's probe (if any).

    Args:
        pathways: a result of `hw.trace_pathways`.
        ax: axes for a single question set; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.
    """
    table = pathways.controls_at_best
    shown = [name for name in LOOKS if (table["intervention"] == name).any()]

    def draw(panel: Axes, dataset: str) -> None:
        panel.axvline(0, color=FAINT, linewidth=0.6)
        for shift, (mode, (color, marker)) in zip((-0.14, 0.14), MODE_LOOKS.items(), strict=True):
            own = table[(table["dataset"] == dataset) & (table["group"] == mode)].set_index("intervention")
            rows, y = own.reindex(shown), np.arange(len(shown)) + shift
            low, high = (rows[f"delta_p_{end}"] for end in ("low", "high"))
            st.draw_points(panel, rows["delta_p"], y, low, high, color, marker, label=mode)
        panel.set_xlabel("ΔP at l* (percentage points)")
        st.name_rows(panel, shown)
        panel.xaxis.set_major_locator(MaxNLocator(4))

    note = f"{st.LINES_ARE}; l*: the probe's best layer\n{RANDOM_ARE}"
    return _by_set(pathways, draw, ax, figsize, title, subject="ΔP and controls", note=note, names=1.7, sharey=True)


def _by_set(
    pathways: Pathways,
    draw: Callable[[Axes, str], None],
    ax: Axes | None,
    figsize: Size | None,
    title: str | None,
    *,
    subject: str,
    y: str = "",
    note: str = "",
    names: float = 0.0,
    sharey: bool = False,
) -> Axes | Figure:
    """Let `draw` fill a panel per question set, on `ax` for a single one, with the model and the subject above.

    With a `note`, titles count the examples, and a legend below all panels has the note as its title. `names` are
    inches for names at the left.
    """
    n = len(pathways.datasets)
    size, across = st.checked_place(ax, n, figsize), 2 if n == 4 else min(n, 4)
    heading = st.model_title(pathways.run, subject)
    usual = max(CONTROLS_PANEL[0] * across, 3.4) + names, CONTROLS_PANEL[1] * -(-n // across) + 0.4
    with size_requested(size), st.several_panels(ax, usual, n, across, heading, sharey=sharey) as axes:
        for panel, name in zip(axes, pathways.datasets, strict=True):
            draw(panel, name)
            seen, at_best = st.label(name), SetAtBest(pathways, name)
            if note:
                # With the number of examples that have as many random tokens as exact ones.
                beside = f"; random: {at_best.controlled:,}" if at_best.controlled else ""
                seen += (" " if n == 1 else "\n") + f"(n = {at_best.n_examples:,}{beside})"
            panel.set_title(f"{heading}\n{seen}" if n == 1 else seen)
        for panel in axes[::across] if y else ():
            panel.set_ylabel(y)
        if note:
            marks = {text: mark for one in axes for mark, text in zip(*one.get_legend_handles_labels(), strict=True)}
            columns = 3 if len(marks) > 2 else 2
            look: dict[str, Any] = {"loc": "outside lower center", "ncols": columns}
            if ax is not None:
                look = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22), "fontsize": 6}
                look["ncols"] = 1 if ax.get_window_extent().width / ax.figure.dpi < 2.4 else 2
            look |= {"handlelength": 2.6, "title": note, "title_fontsize": 7}
            (ax or st.figure_of(axes[0])).legend([*marks.values()], [*marks], **look)
    with st.style():  # the caller's title in the size of the figure's own
        return apply_title_and_size(ax or st.figure_of(axes[0]), title, None)


@DRAWINGS.add(Refusals)
def plot_refusals(refusals: Refusals, ax: Axes | None = None) -> Axes:
    """Draw a row per question set and way to split the modes, a marker and interval per mode."""
    rows = whole_summary(refusals)
    names = [f"{name}, {by}" for name, by in zip(st.ticks(rows["dataset"]), rows["split_by"], strict=True)]
    with st.one_panel(ax, 4.2, 0.9 + 0.28 * len(rows)) as ax:
        columns = zip((-0.12, 0.12), MODE_LOOKS.items(), ("q_refused", "a_refused"), strict=True)
        for shift, (mode, look), column in columns:
            value, low, high = (100 * rows[f"{column}{end}"] for end in ("", "_low", "_high"))
            st.draw_points(ax, value, np.arange(len(rows)) + shift, low, high, *look, label=mode)
        st.name_rows(ax, names)
        ax.set_xlim(min(0.0, ax.get_xlim()[0]), None)
        ax.set_xlabel(f"Refusals when asked again (%)\n({st.LINES_ARE})")
        st.legend_above(ax, 2, st.model_title(refusals.run, "refusals by mode"))
    return ax


# Differences between the modes, if any: the density of logit changes.
#
# Two mechanisms would show as two peaks of the logit change, even among the questions of one relation with one
# prediction; two peaks over all changes may be two relations, or two predictions. Each panel states the verdicts of the
# tests.

SIDES: dict[str, tuple[str, Any, str]] = {
    "predicted right": (GREEN, "-", ""),
    "predicted wrong": (RED, st.DASHED, "////"),
}
"""Colour, dashes and hatch."""


@checked_call
def logit_changes(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the density of the change of the probe's logit at l*, by prediction, with the verdicts on peaks and modes.

    Args:
        pathways: a result of `hw.trace_pathways`. Changes are in standard deviations of the probe's logit, averaged
            over seeds; negative is away from the original prediction.
        ax: axes for a single question set; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.
    """

    def draw(panel: Axes, name: str) -> None:
        # A row per example: its mean change in standard deviations of the logit, and the prediction.
        own = pathways.modes[pathways.modes["dataset"] == name]
        spread = own.groupby(["seed", "split"])["logit"].transform(lambda logit: logit.std(ddof=0) or 1.0)
        scaled = own.assign(change=own["delta_logit"] / spread).groupby("example")
        changes = pd.DataFrame({"change": scaled["change"].mean(), "predicted_wrong": scaled["logit"].mean() > 0})
        components = pathways.components
        tested = components[(components["dataset"] == name) & (components["intervention"] == EXACT)]
        verdicts = tested.set_index("population")["verdict"]
        panel.axvline(0, 0, 0.6, color=FAINT, linewidth=0.6)
        grid = np.linspace(changes["change"].min() - 0.4, changes["change"].max() + 0.4, 300)
        for side, (color, dash, hatch) in SIDES.items():
            part = changes.loc[changes["predicted_wrong"] == (side == "predicted wrong"), "change"].to_numpy()
            curve = _density(part, grid) * len(part) / len(changes)
            panel.fill_between(grid, curve, facecolor=color, edgecolor=color, hatch=hatch, alpha=0.3, linewidth=0)
            panel.plot(grid, curve, color=color, linestyle=dash, label=f"{side} ({len(part):,}): {verdicts[side]}")
        panel.plot([], [], linestyle="none", label=f"all ({len(changes):,}): {verdicts['all']}")
        if WITHIN in verdicts:
            panel.plot([], [], linestyle="none", label=f"{WITHIN}: {verdicts[WITHIN]}")
        panel.set(xlabel="Change of the probe's logit (SD)", yticks=[], ylim=(0, panel.get_ylim()[1] * 1.95))
        panel.legend(loc="upper left", fontsize=6.2, handlelength=1.6, borderaxespad=0.2, labelspacing=0.3)

    return _by_set(pathways, draw, ax, figsize, title, subject="modes of the logit changes", y="Density")


def _density(values: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a kernel density; a narrow peak if all values are nearly equal."""
    if len(values) < 2:
        return np.zeros_like(grid)
    # Scott's rule, but at least one grid step: a narrower peak would fall between the grid points.
    width = max(float(values.std()) * len(values) ** -0.2, float(grid[1] - grid[0]))
    if values.std() > 1e-9:
        return gaussian_kde(values, bw_method=width / values.std(ddof=1))(grid)
    return np.exp(-0.5 * ((grid - values.mean()) / width) ** 2) / (width * np.sqrt(2 * np.pi))
