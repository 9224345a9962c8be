"""The figure of answered questions: how many were answered rightly, wrongly, not to the end, or cannot be used."""

from matplotlib.axes import Axes

from headwater.colors import BLUE, FAINT, INK, ORANGE
from headwater.figures.style import legend_above, model_title, new_figure, style, ticks
from headwater.questions.answers import AnsweredQuestions
from headwater.runs.result import DRAWINGS

INKS = {"right": "white", "wrong": INK, "cut off": "white", "dropped": INK}
ROOM = 0.06
"""The least share that a number fits into."""
COLORS = {"right": BLUE, "wrong": ORANGE, "cut off": FAINT, "dropped": "#d0d0d0"}


@DRAWINGS.add(AnsweredQuestions)
def plot_answers(answered: AnsweredQuestions, ax: Axes | None = None) -> Axes:
    """Draw a bar per question set: the shares right, wrong, cut at the token limit, and dropped for other reasons."""
    sets = answered.findings()["datasets"]
    written = ticks(row["dataset"] for row in sets)
    names = [f"{name} ({row['questions']:,})" for name, row in zip(written, sets, strict=True)]
    used = [row["used"] / row["questions"] for row in sets]
    wrong = [share * (row["wrong"] or 0.0) for share, row in zip(used, sets, strict=True)]
    right = [share - part for share, part in zip(used, wrong, strict=True)]
    cut = [row["cut"] / row["questions"] for row in sets]
    dropped = [(sum(row["dropped"].values()) - row["cut"]) / row["questions"] for row in sets]
    with style(ax):
        if ax is None:
            ax = new_figure(4.5, 1.0 + 0.3 * len(names)).add_subplot()
        left = [0.0] * len(names)
        for name, shares in zip(COLORS, (right, wrong, cut, dropped), strict=True):
            if not any(shares):
                continue
            bars = ax.barh(range(len(names)), shares, left=left, height=0.6, color=COLORS[name], label=name)
            labels = [f"{share:.0%}" if share >= ROOM else "" for share in shares]
            ax.bar_label(bars, labels, label_type="center", color=INKS[name], fontsize=7)
            left = [start + share for start, share in zip(left, shares, strict=True)]
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set(xlim=(0, 1), xlabel="Share of the questions")
        legend_above(ax, 4, model_title(answered.run, "right and wrong answers"))
    return ax
