"""Figures of head validation: static–dynamic correlations per relation, and accuracy as heads are removed."""

from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from headwater.figures.style import FAINT, INK, style

if TYPE_CHECKING:
    from headwater.heads.ablation import HeadAblation
    from headwater.heads.validation import DynamicScores

BLUE, ORANGE = "#2b6cb8", "#f08c1a"
CONTEXT_LOOKS = {"without": (BLUE, "o"), "with": (ORANGE, "s")}


def plot_correlations(scores: "DynamicScores", ax: Axes | None = None) -> Axes:
    """Draw the correlation of static and dynamic scores with its interval, a line per relation and context.

    Args:
        scores: a result of `dynamic_scores`.
        ax: where to draw; by default a new figure.
    """
    rows = scores.correlations[scores.correlations["sign"] == "score"]
    names = list(dict.fromkeys(rows["relation"]))
    with style():
        if ax is None:
            ax = plt.figure(figsize=(4.5, 0.6 + 0.22 * len(names)), layout="constrained").add_subplot()
        for shift, (context, (color, mark)) in zip((-0.15, 0.15), CONTEXT_LOOKS.items(), strict=True):
            found = rows[rows["context"] == context].set_index("relation").loc[names]
            y = [place + shift for place in range(len(names))]
            ax.hlines(y, found["low"], found["high"], colors=color, linewidths=1)
            ax.plot(found["pearson"], y, mark, color=color, markersize=4, label=f"{context} context")
        ax.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
        ax.set(xlim=(min(0.0, rows["low"].min(skipna=True) or 0.0), 1.02), xlabel="Pearson, static and dynamic score")
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    return ax


def plot_ablation(ablation: "HeadAblation", ax: Axes | None = None) -> Axes:
    """Draw accuracy against the number of heads removed.

    Args:
        ablation: a result of `ablate_heads`.
        ax: where to draw; by default a new figure.
    """
    table = ablation.table
    base = table[(table["role"] == "relation") & (table["removed"] == "none")]
    with style():
        if ax is None:
            ax = plt.figure(figsize=(3.6, 2.6), layout="constrained").add_subplot()
        for removed, color, look in (("relation heads", BLUE, "o-"), ("random heads", FAINT, "s--")):
            rows = table[(table["role"] == "relation") & (table["removed"] == removed)]
            if rows.empty:
                continue
            means = rows.groupby("n_heads")["accuracy"].agg(["mean", "min", "max"])
            x = [0, *means.index]
            start = base["accuracy"].iloc[0]
            ax.fill_between(x, [start, *means["min"]], [start, *means["max"]], color=color, alpha=0.2, linewidth=0)
            ax.plot(x, [start, *means["mean"]], look, color=color, markersize=3, label=removed)
        controls = table[(table["role"] == "control") & (table["removed"] == "relation heads")]
        if len(controls):
            ax.plot(
                controls["n_heads"], controls["accuracy"], "x", color=INK, markersize=5, label="on control relations"
            )
        ax.set(ylim=(-0.03, 1.03), xlabel="heads removed", ylabel="accuracy")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title(f"{ablation.relation.replace('_', ' ')} ({base['items'].iloc[0]:,} items)")
        ax.legend()
    return ax
