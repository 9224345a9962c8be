"""Detection of wrong answers: the AUC of every method with its 95 % interval, a mark per question set."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from headwater.colors import FAINT, looks_of_sets
from headwater.detection.detection import Detection
from headwater.detection.evaluation import NAMES
from headwater.errors import InputError
from headwater.figures.style import LINES_ARE, MARKS_ONLY, label, model_title, new_figure, style
from headwater.runs.result import DRAWINGS


@DRAWINGS.add(Detection)
def plot_detection(detection: Detection, ax: Axes | None = None) -> Axes:
    """Draw a row per method, a mark and interval per question set; chance is the dashed line."""
    table = detection.table[detection.table["auc"].notna()]
    if table.empty:
        raise InputError("No method of this detection could be measured: there is nothing to draw.")
    methods = [name for name in NAMES if (table["method"] == name).any()]
    sets = list(dict.fromkeys(table["dataset"]))
    shifts = np.linspace(-0.3, 0.3, len(sets)) if len(sets) > 1 else np.zeros(1)
    with style(ax):
        figure = None
        if ax is None:
            height = 0.7 + len(methods) * (0.13 + 0.065 * len(sets)) + 0.16 * -(-len(sets) // 2)
            figure = new_figure(3.9, height)
            ax = figure.add_subplot()
        for row in range(0, len(methods), 2):
            ax.axhspan(row - 0.5, row + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
        ax.axvline(0.5, color=FAINT, linewidth=0.8, linestyle=(0, (3, 2)), zorder=1)
        for (name, (color, marker)), shift in zip(looks_of_sets(sets).items(), shifts, strict=True):
            part = table[table["dataset"] == name].set_index("method")
            here = [method for method in methods if method in part.index]
            y = [methods.index(method) + shift for method in here]
            found = part.loc[here]
            ax.hlines(y, found["low"], found["high"], colors=color, linewidths=1, zorder=2)
            counted = f"{label(name)} ({found['answers'].iloc[0]:,.0f} answers, {found['wrong'].iloc[0]:,.0f} wrong)"
            ax.plot(found["auc"], y, marker, color=color, markersize=3.2, zorder=3, label=counted)
        ax.set_yticks(range(len(methods)), [NAMES[method] for method in methods])
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(methods) - 0.5, -0.5)
        ax.set_xlim(min(0.45, float(table["low"].min()) - 0.02), 1.0)
        ax.set_xlabel(f"AUC, wrong against right answers\n({LINES_ARE})")
        ax.set_title(model_title(detection.run, "wrong answers detected"))
        if figure is not None:
            figure.legend(loc="outside lower center", ncols=min(2, len(sets)), fontsize=7, **MARKS_ONLY)
        else:
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(2, len(sets)), **MARKS_ONLY)
    return ax
