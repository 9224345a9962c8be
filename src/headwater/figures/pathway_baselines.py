"""What would overturn the finding: the probe's AUC beside relation, answer words, span length, and the margin.

Above, which answers are wrong; below, which examples are Q-anchored: a mark and 95 % interval per score.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.calls import checked_call
from headwater.colors import BLUE, FAINT, ORANGE
from headwater.errors import InputError
from headwater.figures.style import LINES_ARE, checked_place, entitle, label, model_title, new_figure, style
from headwater.pathways.tables import ANY_MODE, AWARE, BY_LOGIT, MARGIN, PROBE, RELATION, RELATION_ANSWER, SPANS
from headwater.pathways.tables import WRONG_ANSWER as WRONG
from headwater.pathways.trace import Pathways
from headwater.runs.figure_options import Size, apply_title_and_size

SHOWN = {WRONG: (PROBE, RELATION, RELATION_ANSWER, SPANS), ANY_MODE: (AWARE, MARGIN, BY_LOGIT)}
"""By question: what is measured, and what it is compared with."""


@checked_call
def baselines(
    pathways: Pathways, *, ax: Axes | None = None, title: str | None = None, figsize: Size | None = None
) -> Axes | Figure:
    """Draw the AUC of the probe and of the probe of the mode beside their baselines: a column per question set.

    Args:
        pathways: a result of `hw.trace_pathways` with its controls.
        ax: refused, as there are two panels for each question set.
        title: in place of the figure's own.
        figsize: width and height, in inches.

    Raises:
        InputError: no baseline was measured, or `ax` was given.
    """
    size = checked_place(ax, 2 * len(pathways.datasets), figsize)
    table = pathways.baselines[~pathways.baselines["difference"] & pathways.baselines["value"].notna()]
    if not table["score"].isin([*SHOWN[WRONG][1:], *SHOWN[ANY_MODE][1:]]).any():
        raise InputError("This trace measured no baseline: there is nothing to draw.")
    sets = pathways.datasets
    with style(ax):
        figure = new_figure(1.9 * len(sets) + 1.8, 2.9)
        axes = figure.subplots(2, len(sets), squeeze=False, sharex=True, sharey="row", height_ratios=(4, 3))
        for row, (question, scores) in zip(axes, SHOWN.items(), strict=True):
            for ax, name in zip(row, sets, strict=True):
                _panel(ax, table[(table["dataset"] == name) & (table["question"] == question)], scores)
        for ax, name in zip(axes[0], sets, strict=True):
            examples = pathways.modes.loc[pathways.modes["dataset"] == name, "example"].nunique()
            ax.set_title(f"{label(name)} (n = {examples:,})", fontsize=8)
        for ax in axes[1]:
            ax.set_xlabel("AUC")
        axes[0][0].set_ylabel("wrong answers")
        axes[1][0].set_ylabel("Q-anchored")
        entitle(figure, f"{model_title(pathways.run, 'probes and baselines')} ({LINES_ARE})")
    return apply_title_and_size(figure, title, size)


def _panel(ax: Axes, rows: object, scores: tuple[str, ...]) -> None:
    found = rows.set_index("score").reindex(scores)  # type: ignore[attr-defined]
    colors = [BLUE, *[ORANGE] * (len(scores) - 1)]
    y = range(len(scores))
    ax.axvline(0.5, color=FAINT, linewidth=0.7, linestyle=(0, (3, 2)))
    ax.hlines(y, found["low"], found["high"], colors=colors, linewidths=1.2)
    for place, value, color in zip(y, found["value"], colors, strict=True):
        ax.plot([value], [place], "o", color=color, markersize=3.4)
    ax.set_yticks(y, scores)
    ax.set_ylim(len(scores) - 0.5, -0.5)
