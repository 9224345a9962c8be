"""Densities of saliency, as published (Luo et al. 2026, Fig. 1): one panel per model, each with its own scales.

Each question set has a colour and marker; S(E_Q→E_A) is solid and filled, S(E_Q→*) dashed and hatched: no pair is
distinguished by colour alone. The published form has neither hatches nor markers, and other colours: light blue and
light green for S(E_Q→E_A) of the first and the second set, light orange and light red for S(E_Q→*).
The densities are scipy's `gaussian_kde`, reflected at 0: saliency has no values below 0, and a density that leaks there
would hide the peak at 0 that the figure is about. An axis ends just beyond the 98th percentile of its widest density.
With more than two sets, every two further sets get another row of panels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from scipy.stats import gaussian_kde

import headwater.figures.style as st
from headwater.calls import checked_call
from headwater.colors import looks_of_sets
from headwater.errors import InputError
from headwater.figure_options import Size, apply_title_and_size
from headwater.figures.published import StyleName, in_order, model_name, set_names
from headwater.options import checked_names
from headwater.pathways.attention_saliency import LossName, Saliency
from headwater.runs.result import DRAWINGS, with_interval
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, Interval, interval

KINDS = {"saliency_exact_answer": "$E_Q$→$E_A$", "saliency_all": "$E_Q$→*"}
ARROWS = {"saliency_exact_answer": "E_Q \\to E_A", "saliency_all": "E_Q \\to *"}
FILLS = {
    "saliency_exact_answer": ("#a6cee3", "#b2df8a", "#9fd8cf", "#c9d2f0"),
    "saliency_all": ("#fdbf6f", "#fb9a99", "#f3c5d9", "#e3cfa4"),
}
LINES = {
    "saliency_exact_answer": ("#1f78b4", "#33802a", "#11786d", "#4a5fb0"),
    "saliency_all": ("#d95f02", "#c2222a", "#b0437c", "#8a6a1f"),
}
DASHES: dict[str, Any] = {"saliency_exact_answer": "-", "saliency_all": st.DASHED}
HATCHES = {"saliency_exact_answer": "", "saliency_all": "////"}
FILLED = {"saliency_exact_answer": 0.3, "saliency_all": 0.12}
"""Opacity of the filled areas."""
SEEN = "attention saliency"
SPELLED = "$E_Q$: the question's exact words\n$E_A$: the answer's; *: all later tokens"
TARGET_NAMES = {"cross_entropy": "probe cross-entropy", "logit": "probe logit"}
PAIRS = {"sum": "total over pairs", "mean": "mean over pairs"}
MAX_SETS = 4


@checked_call
def saliency(
    results: Sequence[Saliency],
    *,
    target: LossName | None = None,
    datasets: Sequence[str] | None = None,
    style: StyleName = "headwater",
    ax: Axes | None = None,
    title: str | None = None,
    figsize: Size | None = None,
) -> Axes | Figure:
    """Draw the densities of several runs, a panel per model.

    Args:
        results: results of `hw.saliency`, for one or more models; runs of one model share a panel.
        target: `cross_entropy` or `logit`; default: the target of the first run.
        datasets: which question sets; default: all.
        style: "headwater", or "published": models, series and axes by their published names, without counts.
        ax: axes for a single model; default: a new figure with a panel for every two question sets.
        title: above all panels; for a single panel, replaces its title.
        figsize: width and height of a new figure, in inches.
    """
    listed = list(results)
    if not listed:
        raise InputError("hw.figures.saliency needs at least one result of hw.saliency; the list is empty.")
    chosen = target or listed[0].target
    tables, names = _tables(listed, chosen, datasets)
    as_published = style == "published"
    names = in_order(names) if as_published else names
    groups = [names] if ax is not None else [names[i : i + 2] for i in range(0, len(names), 2)]
    size = st.checked_place(ax, len(tables), figsize)
    axis = ", ".join(filter(None, (PAIRS.get(str(listed[0].run.options.get("pairs"))), TARGET_NAMES[chosen])))
    width = max(3.4, 2.7 * len(tables))
    with st.style(ax):
        if ax is None:
            figure = st.new_figure(width, 1.9 * len(groups) + 0.15 * len(names) + (0.6 if as_published else 0.9))
            axes = figure.subplots(len(groups), len(tables), squeeze=False)
        else:
            axes = np.array([[ax]])
        found: list[tuple[tuple[int, int], str, Any, str]] = []
        for column, (model, table) in enumerate(tables.items()):
            for panel, group in zip(axes[:, column], groups, strict=True):
                found += _panel(panel, table[table["dataset"].isin(group)], names, axis, as_published)
                panel.set_ylabel("" if column else "Density")
            shown = model_name(st.short_name(model)) if as_published else st.short_name(model)
            axes[0, column].set_title(f"{shown}: {SEEN}" if len(tables) == 1 and not as_published else shown)
        if not found:
            raise InputError("No example has a saliency to draw: every value is NaN.")
        # By kind of edge, then by question set; each with the counts of all models.
        entries: dict[str, tuple[Any, list[str]]] = {}
        for _, entry, drawn, count in sorted(found, key=lambda one: one[0]):
            entries.setdefault(entry, (drawn, []))[1].append(count)
        texts = list(entries)
        if not as_published:
            texts = [f"{entry} (n = {', '.join(counts)})" for entry, (_, counts) in entries.items()]
        marked = [st.DAGGER_IS] if any(st.DAGGER in text for text in texts) else []
        look: dict[str, Any] = {"handlelength": 2.4, "title_fontsize": 7}
        handles = [drawn for drawn, _ in entries.values()]
        if ax is not None:
            ax.legend(handles, texts, title=marked[0] if marked else None, **look)
            return apply_title_and_size(ax, title, None)
        spelled = None if as_published else "\n".join([SPELLED, *marked])
        st.legend_below(figure, len(groups) * 2, handles=handles, labels=texts, title=spelled, **look)
        if len(tables) > 1 and not as_published:
            st.set_figure_title(figure, SEEN.capitalize())
    return apply_title_and_size(figure, title, size)


def _tables(
    listed: Sequence[Saliency], target: LossName, datasets: Sequence[str] | None
) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Return the values to draw by model, and the question sets."""
    pairs_by = listed[0].run.options.get("pairs")
    for other in listed:
        if other.run.options.get("pairs") != pairs_by:
            raise InputError(
                f"One axis cannot show saliency of pairs={pairs_by!r} and of pairs={other.run.options.get('pairs')!r}: "
                "draw these runs in separate figures."
            )
    models: dict[str, list[pd.DataFrame]] = {}
    for result in listed:
        models.setdefault(result.run.model, []).append(result.of(target))
    tables = {model: pd.concat(parts) for model, parts in models.items()}
    names = list(dict.fromkeys(name for table in tables.values() for name in table["dataset"]))
    if datasets is not None:
        names = checked_names("datasets", datasets, names)
        tables = {model: table[table["dataset"].isin(names)] for model, table in tables.items()}
    if len(names) > MAX_SETS:
        raise InputError(f"A figure shows at most {MAX_SETS} question sets; {len(names)} were passed: draw fewer.")
    return tables, names


@DRAWINGS.add(Saliency)
def plot_saliency(result: Saliency, ax: Axes | None = None) -> Axes | Figure:
    """Draw one run, on `ax` or on a new figure."""
    return saliency([result], ax=ax)


def _panel(
    ax: Axes, table: pd.DataFrame, names: list[str], axis: str, as_published: bool
) -> list[tuple[tuple[int, int], str, Any, str]]:
    """Draw the densities of one model; return the legend's entries: order, text, handles, number of examples."""
    drawn = {
        (kind, name): values
        for name in dict.fromkeys(table["dataset"])
        for kind in KINDS
        if len(values := _values(table, name, kind))
    }
    if not drawn:
        ax.text(0.5, 0.5, "not measured", ha="center", va="center", transform=ax.transAxes)
        return []
    stop = max(float(np.quantile(values, 0.98)) for values in drawn.values())
    grid = np.linspace(0.0, 1.08 * stop, 400)
    entries = []
    for (kind, name), values in drawn.items():
        density = gaussian_kde(values)
        height = density(grid) + density(-grid)
        color, mark = looks_of_sets(names)[name]
        fill, alpha, hatch = color, FILLED[kind], HATCHES[kind]
        if as_published:
            place = names.index(name)
            color, mark, fill, alpha, hatch = LINES[kind][place], "", FILLS[kind][place], 0.45, ""
        area: dict[str, Any] = {"facecolor": fill, "alpha": alpha, "hatch": hatch, "edgecolor": color, "linewidth": 0}
        line: dict[str, Any] = {
            "color": color,
            "linestyle": DASHES[kind],
            "linewidth": 1.1,
            "marker": mark,
            "markersize": 2.4,
        }
        ax.fill_between(grid, height, **area)
        ax.plot(grid, height, markevery=40, **line)
        counted = f"{len(values):,}{st.DAGGER * bool(_at_chance(table[table['dataset'] == name]))}"
        # Math text, unless that would lose letters of the question set's name.
        edges = KINDS[kind] if name.isascii() else KINDS[kind].replace("$", "")
        entry = f"$S_{{{ARROWS[kind]}}}$ ({set_names(names)[name]})" if as_published else f"{st.label(name)}, {edges}"
        order = list(KINDS).index(kind), names.index(name)
        entries.append((order, entry, (Patch(**area), Line2D([], [], **line)), counted))
    exponent = int(np.floor(np.log10(stop)))
    unit = f" / $10^{{{exponent}}}$" if exponent else ""
    ax.set(xlim=(0.0, grid[-1]), ylim=(0, None), xlabel=f"Saliency ({axis}){unit}")
    ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value / 10.0**exponent:.3g}")
    ax.yaxis.set_major_formatter(lambda density, _: f"{density * 10.0**exponent:.3g}")
    if as_published:  # the published name, and powers of ten at the ends of both axes
        ax.set_xlabel(f"Saliency Score ({PAIRS['mean']})" if axis.startswith(PAIRS["mean"]) else "Saliency Score")
        at: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 6, "ha": "right"}
        if exponent:
            ax.annotate(f"$\\times 10^{{{exponent}}}$", (1, 0), (0, -14), va="top", **at)
            ax.annotate(f"$\\times 10^{{{-exponent}}}$", (0, 1), (-3, 0), va="bottom", **at)
    return entries


def _values(table: pd.DataFrame, dataset: str, kind: str) -> NDArray[np.float64]:
    """Return the values of one density; empty if this kind was not measured for the set."""
    values = table.loc[table["dataset"] == dataset, kind].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) == 1 or (len(values) > 1 and np.ptp(values) == 0):
        found = "one example" if len(values) == 1 else f"{len(values):,} examples, all with the value {values[0]:.3g}"
        raise InputError(f"{dataset}: {kind} has {found}: no density can be drawn. Give more examples.")
    return values


def _at_chance(rows: pd.DataFrame) -> Interval | None:
    """Return the AUC of the probe behind a question set's saliency if it is not above chance, else None."""
    counts = Bootstrap.of(rows["example"]).counts
    found = interval(auc(rows["logit"].to_numpy(), rows["z"].to_numpy(), counts=counts))
    return None if found.low > 0.5 else found


def chance_note(shown: Sequence[Saliency]) -> str:
    """Name the runs and question sets whose probe is not above chance, so their saliency means nothing; "" if none."""
    entries = []
    for result in shown:
        for name, rows in result.of().groupby("dataset", sort=False):
            if at := _at_chance(rows):
                entries.append(f"{st.short_name(result.run.model)}, {name} ({with_interval(*at)})")
    return (
        f"The probe is not above chance, so its saliency is not informative: {'; '.join(entries)}." if entries else ""
    )
