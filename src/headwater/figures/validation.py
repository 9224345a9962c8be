"""Figures of head validation: static–dynamic correlations per relation, and accuracy as heads are removed."""

from matplotlib.axes import Axes

from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.figures.style import (
    LINES_ARE,
    MARKS_ONLY,
    label,
    legend_above,
    model_title,
    new_figure,
    style,
    ticks,
    whole_numbers,
)
from headwater.heads.ablation import HeadAblation
from headwater.heads.validation import DynamicScores
from headwater.runs.result import DRAWINGS

CONTEXT_LOOKS = {"without": (BLUE, "o"), "with": (ORANGE, "s")}


@DRAWINGS.add(DynamicScores)
def plot_correlations(scores: DynamicScores, ax: Axes | None = None) -> Axes:
    """Draw the correlation of static and dynamic scores with its interval, a line per relation and context."""
    rows = scores.correlations[scores.correlations["sign"] == "score"]
    names = list(dict.fromkeys(rows["relation"]))
    heads = f"{int(rows['heads'].max()):,}"
    with style(ax):
        if ax is None:
            ax = new_figure(4.5, 0.95 + 0.22 * len(names)).add_subplot()
        for shift, (context, (color, mark)) in zip((-0.15, 0.15), CONTEXT_LOOKS.items(), strict=True):
            found = rows[rows["context"] == context].set_index("relation").loc[names]
            y = [place + shift for place in range(len(names))]
            ax.hlines(y, found["low"], found["high"], colors=color, linewidths=1)
            ax.plot(found["pearson"], y, mark, color=color, markersize=4, label=f"{context} context")
        ax.set_yticks(range(len(names)), ticks(name.replace("_", " ") for name in names))
        ax.set(
            xlim=(min(0.0, rows["low"].min(skipna=True) or 0.0), 1.02),
            xlabel=f"Pearson correlation over {heads} heads ({LINES_ARE})",
        )
        ax.set_ylim(len(names) - 0.4, -0.6)
        legend_above(ax, 2, model_title(scores.run, "scores of heads, static and dynamic"), **MARKS_ONLY)
    return ax


@DRAWINGS.add(HeadAblation)
def plot_ablation(ablation: HeadAblation, ax: Axes | None = None) -> Axes:
    """Draw accuracy against the number of heads removed."""
    table = ablation.table
    base = table[(table["role"] == "relation") & (table["removed"] == "none")]
    with style(ax):
        if ax is None:
            ax = new_figure(3.6, 3.0).add_subplot()
        for removed, color, look in (("relation heads", BLUE, "o-"), ("random heads", FAINT, "s--")):
            rows = table[(table["role"] == "relation") & (table["removed"] == removed)]
            if rows.empty:
                continue
            means = rows.groupby("n_heads")["accuracy"].agg(["mean", "min", "max"])
            x = [0, *means.index]
            start = base["accuracy"].iloc[0]
            ax.fill_between(x, [start, *means["min"]], [start, *means["max"]], color=color, alpha=0.2, linewidth=0)
            draws = rows["draw"].nunique()
            name = f"{removed} ({draws} draws, band: all)" if draws > 1 else removed
            ax.plot(x, [start, *means["mean"]], look, color=color, markersize=3, label=name)
        controls = table[(table["role"] == "control") & (table["removed"] == "relation heads")]
        if len(controls):
            ax.plot(
                controls["n_heads"], controls["accuracy"], "x", color=INK, markersize=5, label="on control relations"
            )
        ax.set(ylim=(-0.03, 1.03), xlabel="Heads removed", ylabel="Accuracy")
        whole_numbers(ax.xaxis)
        items = base["items"].iloc[0]
        seen = f"{label(ablation.relation.replace('_', ' '))} ({items:,} items)"
        legend_above(ax, 1, model_title(ablation.run, f"heads removed,\n{seen}"))
    return ax
