"""Sweeps: layer × position or layer × head as a heat map, a curve over one axis, or a dot for each ablated set.

The colour scale diverges symmetrically from 0. Cells without a value (edges that no layer could see) are hatched, never
shown as zero. Several examples are averaged; curves and dots have bootstrap intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import headwater.figures.style as st
from headwater.calls import checked_call
from headwater.colors import FAINT, SETS, UNSEEN
from headwater.errors import InputError
from headwater.figure_options import Size, apply_title_and_size
from headwater.options import checked_kind, checked_number
from headwater.patching.runners import AttributionRunner
from headwater.patching.summaries import ROLES, MeasureName, NormalizeName, chosen_rows, grid_of, measure_of, summarize
from headwater.patching.sweep import Sweep
from headwater.runs.result import DRAWINGS

HATCH = "#cfcfcf"
DONE = {"patch": "patched", "ablate": "ablated"}
"""Words in titles for what was done at the sites of a sweep, by analysis; other analyses have none."""
TITLES = {
    "edges": "attention severed",
    "ablation": "sets ablated",
    "complement": "all but the set ablated",
    "together": "nodes patched together",
}
LABELS = {
    "layer": "Layer",
    "position": "Position",
    "role": "Role",
    "head": "Head",
    "kv_head": "Key-value head",
    "key": "Key",
    "key_role": "Role of the key",
    "feature": "Feature",
    "set": "Set",
    "from_layer": "Source layer",
}
CURVE = SETS[0][0]
NARROWEST, WIDEST = 2.8, 9.0
TOKEN = 0.13
"""Inches per token along an axis."""
UNORDERED = ("head", "kv_head", "feature")
"""Axes whose order means nothing: their places are not joined by lines."""
NAMED = ("set", *ROLES)
"""Axes whose places have names instead of numbers."""


@DRAWINGS.add(Sweep)
def plot_sweep(
    sweep: Sweep,
    ax: Axes | None = None,
    *,
    site: str | None = None,
    metric: str | None = None,
    value: MeasureName = "effect",
    normalize: NormalizeName | None = None,
    **fixed: object,
) -> Axes | Figure:
    """Draw layer × position or layer × head as a heat map centred at 0, or the curve over layers.

    Args:
        sweep: the sweep.
        ax: where to draw; only for a single panel.
        site: draw only this site; default: a panel for each.
        metric: draw only this metric; default: a panel for each.
        value: `effect` or `normalized_effect`.
        normalize: see `Sweep.summary`.
        **fixed: `layer=`, `position=`, `role=`, `head=`, `kv_head=`, `key=` or `key_role=`: draw only this one (needed
            if there are three axes; roles have a panel each).

    Warns:
        UserWarning: see `Sweep.summary`.
    """
    table = sweep.table
    named = {"site": site, "metric": metric, **fixed}
    table = chosen_rows(table, {column: wanted for column, wanted in named.items() if wanted is not None})
    measure = measure_of(table, value, normalize)
    sweep.warn_of_averages(table, measure)
    panels = panels_of(table, fixed)
    title = st.label(title_of(sweep, panels, fixed))
    with st.several_panels(ax, *_layout(panels, fixed), title, instead="choose one with site= and metric=") as axes:
        for one, (name, part) in zip(axes, panels, strict=True):
            _panel(one, part, name, measure, sweep, fixed)
        if len(panels) == 1:
            axes[0].set_title(title)
        for shared in {name[:2] for name, _ in panels if len(name) > 2 and len(panels) > 1}:
            # One colour scale for the panels of one site and metric, one per role.
            meshes = [one.collections[0] for one, (name, _) in zip(axes, panels, strict=True) if name[:2] == shared]
            limit = max(mesh.get_clim()[1] or 0.0 for mesh in meshes)
            for mesh in meshes:
                mesh.set_clim(-limit, limit)
    return st.plot_of(axes)


def panels_of(table: pd.DataFrame, fixed: dict[str, Any]) -> list[tuple[Any, pd.DataFrame]]:
    """Split a sweep into panels: one per site and metric, and per role if there are two more axes besides roles.

    If both queries and keys are named by role and there is a third axis, a panel shows one query and one key.
    """
    panels: list[tuple[Any, pd.DataFrame]] = []
    for name, part in table.groupby(["site", "metric"], sort=False):
        axes = panel_axes(part, fixed)
        roles = [axis for axis in ROLES if axis in axes][: max(0, len(axes) - 2)]
        if roles and len(axes) - len(roles) <= 2:
            for named, rows in part.groupby(roles, sort=False):
                panels.append(((*name, " ← ".join(map(str, named))), rows))
        else:
            panels.append((name, part))
    return panels


def title_of(sweep: Sweep, panels: Sequence[tuple[Any, pd.DataFrame]], fixed: dict[str, Any]) -> str:
    """Return the title of a sweep's figure as plain text: the subject of all panels, or a single panel's."""
    analysis, options, (name, part) = sweep.run.analysis, sweep.run.options, panels[0]
    is_estimated, noise = sweep.engine == AttributionRunner.name, options.get("corruption")
    drawn = f", noise of SD {noise['std']:.2g} in {noise['samples']:,} draws" if noise else ""
    if len(panels) > 1 and is_estimated:
        seen = f"effect of patching, estimated from gradients{drawn}"
    elif len(panels) > 1:
        way = f" {st.WAYS[options['direction']]}" if "direction" in options else ""
        seen = {"patch": f"effect of patching{way}", "ablate": "effect of ablation"}.get(analysis, "effects") + drawn
    elif name[0] in TITLES or analysis not in DONE:
        seen = _seen(part, name, fixed)
    else:
        done = f"{name[0]} {DONE[analysis]}{', estimated' * is_estimated}{drawn}"
        seen = done + _seen(part, name, fixed).removeprefix(name[0])
    return st.plain_title(sweep.run.model, seen)


def _layout(panels: list[Any], fixed: dict[str, Any]) -> tuple[tuple[float, float], int, int]:
    """Return a fitting size of the figure, and the number of panels and of columns."""
    n_metrics = len({name[1] for name, _ in panels})
    sizes = [_size(part, fixed) for _, part in panels]
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
    needed = width if any("position" in panel_axes(part, fixed) for _, part in panels) else NARROWEST
    rows = -(-len(panels) // (n_metrics if n_metrics > 1 else max(1, int(WIDEST // needed))))
    columns = -(-len(panels) // rows)
    width = min(width, max(WIDEST / columns, NARROWEST))
    return (columns * width, rows * height), len(panels), columns


def _size(part: pd.DataFrame, fixed: dict[str, object]) -> tuple[float, float]:
    """Return a panel's width and height in inches: cells of one size within limits, curves of the usual shape."""
    axes = panel_axes(part, fixed)
    if len(axes) == 1 and axes[0] in NAMED:
        longest = part[axes[0]].str.len().clip(upper=st.LONGEST).max()
        return max(4.4, 2.8 + 0.065 * longest), max(1.6, 0.9 + 0.22 * part[axes[0]].nunique())
    if len(axes) != 2:
        return 3.4, 2.4
    across = part[axes[1]].nunique()
    down = part[axes[0]].nunique()
    return float(np.clip(1.4 + 0.24 * across, NARROWEST, WIDEST)), float(np.clip(1.1 + 0.17 * down, 2.2, 7))


def panel_axes(part: pd.DataFrame, fixed: dict[str, Any]) -> list[str]:
    """Return the axes that a panel runs over; roles, if there are several, represent positions and keys."""
    columns = [name for name in LABELS if name in part.columns and name not in fixed]
    for role, tokens in ROLES.items():
        if role in part.columns and part[role].notna().any():
            columns = [name for name in columns if name != tokens and (name != role or part[role].nunique() > 1)]
    columns = [name for name in columns if part[name].notna().any()]
    if {"feature", "layer"} <= {*columns} and part["layer"].nunique() == 1:  # a dictionary belongs to one layer
        columns.remove("layer")
    if "from_layer" in columns and part["from_layer"].nunique() == 1:
        columns.remove("from_layer")
    return columns


def _panel(ax: Axes, part: pd.DataFrame, name: Any, measure: str, sweep: Sweep, fixed: dict[str, object]) -> None:
    axes = panel_axes(part, fixed)
    label = metric_label(str(name[1]), measure)
    if len(axes) == 2:
        _heat_map(ax, part, axes, measure, label, sweep)
    elif not axes or (len(axes) == 1 and axes[0] in NAMED):  # without an axis, the one mean of the site
        _dots(ax, part, axes[0] if axes else "site", measure, label)
    elif len(axes) == 1:
        _curve(ax, part, axes[0], measure, label, sweep)
    else:
        raise InputError(
            f"This sweep runs over {len(axes)} axes; a figure shows one or two. Fix one, as in sweep.plot(head=0)."
        )
    ax.set_title(st.label(_seen(part, name, fixed)))


def _seen(part: pd.DataFrame, name: Any, fixed: dict[str, object]) -> str:
    """Return a panel's title: its site, the fixed indices, and the number of examples."""
    axes = panel_axes(part, fixed)
    settings = f", {name[2]}" if len(name) > 2 else ""
    settings += "".join(f", {LABELS.get(column, column).lower()} {index}" for column, index in fixed.items())
    for column, before in (("values", ""), ("window", "window ")):
        settings += "".join(f", {before}{one}" for one in (part[column].unique() if column in part.columns else ()))
    band = "" if len(axes) != 1 else "; 95 %" if axes[0] in ("set", *UNORDERED) else "; band: 95 %"
    counted = ""
    if part["example"].nunique() > 1:
        # The examples per cell: a number, or the least and the most.
        found = part.dropna(subset=["effect"]).groupby(axes or ["site"])["example"].nunique()
        ends = dict.fromkeys((int(found.min()), int(found.max())) if len(found) else (0,))
        counted = f" (n = {' to '.join(f'{n:,}' for n in ends)}{band})"
    return f"{TITLES.get(name[0], name[0])}{settings}{counted}"


def _heat_map(ax: Axes, part: pd.DataFrame, axes: list[str], measure: str, label: str, sweep: Sweep) -> None:
    means = grid_of(part, axes[0], axes[1], measure)
    mesh = st.heat_map(ax, means)
    if means.isna().to_numpy().any():
        ax.patch.set(edgecolor=HATCH, hatch="//////", linewidth=0)
    tokens = _shared_tokens(part, sweep)
    across, down = st.inches(ax)
    down_tokens = tokens if axes[0] == "position" and TOKEN * len(means) <= down else None
    across_tokens = tokens if axes[1] in ("position", "key") and TOKEN * means.shape[1] <= across else None
    _ticks(ax.yaxis, axes[0], means.index.to_numpy(), part, down_tokens)
    if axes[0] == "position":
        ax.invert_yaxis()
    _ticks(ax.xaxis, axes[1], means.columns.to_numpy(), part, across_tokens)
    ax.set_ylabel("Query" if axes[0] in ("position", "role") and {"key", "key_role"} & {*axes} else LABELS[axes[0]])
    ax.set_xlabel("" if across_tokens is not None and axes[1] == "position" else LABELS[axes[1]])
    st.color_bar(mesh, ax, label)


def _curve(ax: Axes, part: pd.DataFrame, axis: str, measure: str, label: str, sweep: Sweep) -> None:
    columns = [name for name in (axis, "window") if name in part.columns]
    summary = summarize(part, columns, measure).sort_values(axis)
    places = summary[axis].to_numpy(dtype=float)
    ax.axhline(0, color=FAINT, linewidth=0.6)
    is_ordered = axis not in UNORDERED
    if summary["low"].notna().any():
        bounds = summary["low"].to_numpy(dtype=float), summary["high"].to_numpy(dtype=float)
        if is_ordered:
            ax.fill_between(places, *bounds, color=CURVE, alpha=0.18, linewidth=0)
        else:
            ax.vlines(places, *bounds, color=CURVE, alpha=0.4, linewidth=2)
    line = "-" if is_ordered else "none"
    ax.plot(places, summary["mean"], color=CURVE, marker="o", markersize=2.6, linestyle=line)
    missing = summary["mean"].isna().to_numpy()
    for i, place in enumerate(places[missing]):
        look: dict[str, Any] = {"facecolor": UNSEEN, "edgecolor": HATCH, "hatch": "//////", "linewidth": 0}
        ax.axvspan(place - 0.5, place + 0.5, label="edges not visible" if i == 0 else None, **look)
    if missing.any():
        ax.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)
    tokens = _shared_tokens(part, sweep) if axis == "position" else None
    if tokens is not None and TOKEN * len(places) <= st.inches(ax)[0]:
        names = [shown(tokens[int(i)]) for i in places]
        st.cell_ticks(ax.xaxis, places, names, rotation=60, ha="right", rotation_mode="anchor")
    else:
        st.whole_numbers(ax.xaxis)
        # No tick beyond the last layer, but some room beside a few features with large numbers.
        room = max(0.5, 0.02 * (places.max() - places.min()))
        ax.set_xlim(places.min() - room, places.max() + room)
        ax.set_xlabel(LABELS[axis])
    ax.set_ylabel(label)


def _dots(ax: Axes, part: pd.DataFrame, axis: str, measure: str, label: str) -> None:
    """Draw a dot for the mean effect of each set or role, with its interval, the first at the top."""
    summary = summarize(part, [axis], measure)
    places = np.arange(len(summary))
    ax.axvline(0, color=FAINT, linewidth=0.6)
    if summary["low"].notna().any():
        ax.hlines(places, summary["low"], summary["high"], color=CURVE, alpha=0.4, linewidth=2)
    ax.plot(summary["mean"], places, color=CURVE, marker="o", markersize=3.5, linestyle="none")
    st.name_rows(ax, _names(summary[axis], axis, part))
    ax.set_xlabel(label)


def _names(names: Iterable[str], axis: str, part: pd.DataFrame) -> list[str]:
    """Return names of sets or roles as labels, long ones cut; with the number of prompts of each, if these differ."""
    counts = part.dropna(subset=["effect"]).groupby(axis)["example"].nunique()
    listed = list(dict.fromkeys(names))
    cut = st.ticks(listed)
    if counts.nunique() <= 1:
        return cut
    return [f"{short} (n = {counts.get(name, 0):,})" for name, short in zip(listed, cut, strict=True)]


def _ticks(
    which: Any, axis: str, places: np.ndarray, part: pd.DataFrame, tokens: tuple[str, ...] | None = None
) -> None:
    """Label the cells along an axis: by their tokens, names or numbers."""
    is_named = axis in NAMED or tokens is not None
    turned = {"rotation": 30 if tokens is None else 60, "ha": "right", "rotation_mode": "anchor"}
    look = turned if is_named and which.axis_name == "x" else {}
    if tokens is not None:
        names = [shown(tokens[int(i)]) for i in places]
    else:
        names = _names(places, axis, part) if axis in NAMED else [str(i) for i in places]
    st.cell_ticks(which, range(len(places)), names, None if is_named else st.MOST_TICKS, **look)


def shown(token: str) -> str:
    """Return a token as an axis label, with visible spaces and line breaks; long ones are cut."""
    text = token.replace("\n", "↵").replace("\t", "⇥")
    text = "␣" if text == " " else text.strip() or repr(token)
    return st.drawable(text if len(text) <= 14 else text[:13] + "…").replace("$", r"\$")


def _shared_tokens(part: pd.DataFrame, sweep: Sweep) -> tuple[str, ...] | None:
    """Return the tokens of the drawn examples; where they differ, the first as an example ("e.g. France").

    None if the examples have different lengths.
    """
    drawn = dict.fromkeys(tuple(sweep.tokens[i]) for i in part["example"].unique()) if len(sweep.tokens) else {}
    if len({len(tokens) for tokens in drawn}) != 1:
        return None
    return tuple(
        column[0] if len(set(column)) == 1 else f"e.g. {shown(column[0])}" for column in zip(*drawn, strict=True)
    )


def metric_label(metric: str, measure: str) -> str:
    """Return the label of an axis of effects on a metric."""
    name = metric.replace("_", " ").replace("kl ", "KL ")
    kinds = {"effect": "Effect", "ratio of means": "Mean effect / mean gap,"}
    return f"{kinds.get(measure, 'Normalized effect')} on {name}"


# Dose–response of steering: the mean effect of a direction on a metric against the dose that was added.
#
# A sweep per dose, `hw.patch(model, prompts, over="layer", values=hw.add(dose * direction), ...)`; a line per layer,
# with its 95 % bootstrap interval over prompts as a band. The unit of the doses is the caller's.


@checked_call
def dose_response(
    sweeps: Mapping[float, Sweep], *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes:
    """Draw the effect of steering on a metric, by dose.

    Args:
        sweeps: by dose, the result of `hw.patch(..., over="layer", values=hw.add(dose * direction))`; all of one site
            and metric, and of the same prompts.
        ax: axes to draw on; default: a new figure.
        title: replaces the figure's title.
        figsize: width and height of a new figure, in inches.
    """
    size = st.checked_place(ax, 1, figsize)
    if not isinstance(sweeps, Mapping) or not sweeps:
        raise InputError("sweeps must map each dose to its result of hw.patch: {0: sweep, 4: sweep}.")
    doses = [
        checked_kind("a value of sweeps", sweep, Sweep).table.assign(dose=checked_number("a dose", dose, -math.inf))
        for dose, sweep in sweeps.items()
    ]
    table, run = pd.concat(doses), next(iter(sweeps.values())).run
    cells = table[["site", "metric"]].drop_duplicates()
    if len(cells) > 1 or set(panel_axes(table, {})) > {"layer"}:
        raise InputError("A dose–response shows one site and metric: measure with sites='...', over='layer'.")
    ((site, metric),) = cells.to_numpy()
    summary = summarize(table, ["layer", "dose"], "effect").sort_values("dose")
    layers = sorted(summary["layer"].unique())
    if len(layers) > len(SETS):
        raise InputError(
            f"These sweeps have {len(layers)} layers, but only {len(SETS)} can be distinguished: choose with layers=."
        )
    with st.one_panel(ax, 3.6, 2.6) as ax:
        ax.axhline(0, color=FAINT, linewidth=0.6)
        for layer, (color, mark) in zip(layers, SETS, strict=False):
            rows = summary[summary["layer"] == layer]
            values = (rows[name] for name in ("dose", "mean", "low", "high"))
            st.draw_line(ax, *values, color=color, marker=mark, markersize=2.6, label=f"layer {layer}")
        ax.set(xlabel="Dose", ylabel=metric_label(metric, "effect"))
        n = table["example"].nunique()
        seen = f"{site} steered (n = {n:,}" + "; bands: 95 %" * (n > 1) + ")"
        st.legend_above(ax, 4, st.model_title(run, seen))
    apply_title_and_size(ax, title, size)
    return ax
