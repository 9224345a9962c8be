"""How many heads are classified, against the threshold: a line per category, a panel per rule.

The black line counts heads in any category; a head of several counts in the line of each. The dashed upright line is
the threshold of the head map itself, in the panel of its rule. Where other settings were scored, a last panel has the
heads that each calls, and how many of them the map calls alike.
"""

from __future__ import annotations

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from headwater.colors import FAINT, INK
from headwater.errors import InputError
from headwater.figures.style import DASHED, cell_ticks, entitle, label, model_title, new_figure, style, whole_numbers
from headwater.heads.categories import CATEGORIES
from headwater.heads.scoring import Sensitivity
from headwater.runs.result import DRAWINGS

PANEL = (2.7, 2.8)
ANY = "any category"


@DRAWINGS.add(Sensitivity)
def plot_sensitivity(sensitivity: Sensitivity, ax: Axes | None = None) -> Axes | Figure:
    """Draw what `HeadMap.sensitivity` returns.

    A given `ax` takes that of a map without a null model, which has one panel.
    """
    rules = list(dict.fromkeys(sensitivity.table["rule"]))
    n_settings = sensitivity.table["setting"].nunique()
    n_panels = len(rules) + (n_settings > 1)
    if ax is not None and n_panels > 1:
        raise InputError("The figure has several panels, a panel per rule and one of other settings: leave ax= out.")
    with style(ax):
        if ax is not None:
            _draw(sensitivity, rules[0], ax)
            ax.set_title(model_title(sensitivity.run, f"heads classified, {rules[0]} rule"))
            ax.legend(loc="upper right")
            return ax
        figure = new_figure(max(n_panels * PANEL[0], 3.6), max(PANEL[1], 1.4 + 0.2 * n_settings))
        panels = figure.subplots(1, n_panels, squeeze=False)[0]
        for panel, rule in zip(panels, rules, strict=False):
            _draw(sensitivity, rule, panel)
        for panel in panels[1 : len(rules)]:
            panel.sharey(panels[0])
            panel.set_ylabel("")
        handles, names = panels[0].get_legend_handles_labels()
        if n_panels > len(rules):
            handles += _draw_settings(sensitivity, panels[-1])
            names += ["called", "of these, in the map"]
        columns = max(2, int(figure.bbox_inches.width))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, title="dashed: the map's")
        entitle(figure, model_title(sensitivity.run, "heads classified, by threshold"))
    return figure


def _draw_settings(sensitivity: Sensitivity, ax: Axes) -> list[Artist | BarContainer]:
    """Draw the heads that each setting calls, and those of them that the map calls alike."""
    rows = sensitivity.at_own_threshold
    places = range(len(rows))
    bars = ax.barh(places, rows["heads"], color=FAINT, height=0.7)
    dots = ax.scatter(rows["kept"], places, color=INK, s=12, zorder=2)
    ax.set(xlabel="Heads", yticks=list(places), yticklabels=rows["setting"], ylim=(len(rows) - 0.5, -0.5))
    ax.set_title("other settings")
    whole_numbers(ax.xaxis)
    return [bars, dots]


def _draw(sensitivity: Sensitivity, rule: str, ax: Axes) -> None:
    rows = sensitivity.as_mapped[sensitivity.as_mapped["rule"] == rule]
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
    ax.set(xlabel=f"Threshold of the {what}", ylabel="Heads", ylim=(0, 1.05 * most))
    cell_ticks(ax.xaxis, rows["threshold"], [f"{one:g}" for one in rows["threshold"]])
    ax.set_title(f"{rule} rule")
    whole_numbers(ax.yaxis)
