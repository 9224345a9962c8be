"""How many heads are classified, against the threshold: a line per category, a panel per rule.

The black line counts heads in any category; a head of several counts in the line of each. The dashed upright line is
the threshold of the head map itself, in the panel of its rule.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.colors import FAINT, INK
from headwater.errors import InputError
from headwater.figures.fonts import label
from headwater.figures.style import DASHED, entitle, model_title, style, whole_numbers
from headwater.heads.categories import CATEGORIES
from headwater.heads.sensitivity import Sensitivity
from headwater.runs.result import DRAWINGS

PANEL = (2.1, 2.3)
LEGEND = 1.2
ANY = "any category"


@DRAWINGS.add(Sensitivity)
def plot_sensitivity(sensitivity: Sensitivity, ax: Axes | None = None) -> Axes | Figure:
    """Draw what `HeadMap.sensitivity` returns.

    Args:
        sensitivity: the counts.
        ax: where to draw those of a map without a null model, which has one panel; by default a new figure.

    Raises:
        InputError: `ax` was given, and there are two rules.
    """
    rules = list(dict.fromkeys(sensitivity.table["rule"]))
    if ax is not None and len(rules) > 1:
        raise InputError("The figure of both rules has two panels: leave ax= out.")
    with style():
        if ax is not None:
            _draw(sensitivity, rules[0], ax)
            ax.set_title(model_title(sensitivity.run, f"heads classified, {rules[0]} rule"))
            ax.legend(loc="upper right")
            return ax
        size = (len(rules) * PANEL[0] + LEGEND, PANEL[1])
        figure = plt.figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(rules), sharey=True, squeeze=False)[0]
        for panel, rule in zip(panels, rules, strict=True):
            _draw(sensitivity, rule, panel)
        for panel in panels[1:]:
            panel.set_ylabel("")
        panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="dashed: the map's")
        entitle(figure, model_title(sensitivity.run, "heads classified, by threshold"))
    return figure


def _draw(sensitivity: Sensitivity, rule: str, ax: Axes) -> None:
    rows = sensitivity.table[sensitivity.table["rule"] == rule]
    ax.plot(rows["threshold"], rows["heads"], color=INK, marker="o", markersize=3, clip_on=False, label=ANY)
    for name, category in CATEGORIES.items():
        if name in rows:
            ax.plot(
                rows["threshold"], rows[name], color=category.color, marker=category.mark, markersize=3, linewidth=0.9,
                clip_on=False, label=label(name),
            )  # fmt: skip
    if rule == sensitivity.run.options["rule"]:
        ax.axvline(sensitivity.run.options["threshold"], color=FAINT, linewidth=0.8, linestyle=DASHED, zorder=0)
    most = max(1, int(sensitivity.table["heads"].max()))
    what = "excess\n(score beyond chance)" if rule == "controlled" else "score"
    ax.set(xlabel=f"Threshold of the {what}", ylabel="Heads", ylim=(0, 1.05 * most), xticks=rows["threshold"].tolist())
    ax.set_title(f"{rule} rule")
    whole_numbers(ax.yaxis)
