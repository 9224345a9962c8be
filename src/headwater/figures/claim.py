"""A claim: the effect of the set with its interval, above what it is compared with, from top to bottom.

Of random sets the line ends at the 95 % quantile of their sizes, on the side of the effect, and the mark is their mean
size. The dashed line is the margin, beyond which the whole interval must lie.
"""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headwater.colors import BLUE, FAINT, INK
from headwater.figures.style import DASHED, label, model_title, new_figure, style
from headwater.runs.claim import Claim
from headwater.runs.result import DRAWINGS

SIZE = (4.8, 2.0)
TITLE = 52
"""Characters of a line of the title."""


@DRAWINGS.add(Claim)
def plot_claim(claim: Claim, ax: Axes | None = None) -> Axes | Figure:
    """Draw a claim: what `Claim.plot` says."""
    row = claim.table.iloc[0]
    side = 1.0 if row["effect"] >= 0 else -1.0
    level = 100 * float(claim.run.options["claim"]["level"])
    name = "the set, of one prompt" if np.isnan(row["low"]) else f"the set, with its\n{level:g} % interval"
    rows: list[tuple[str, float, tuple[float, float] | None, str, str]]
    rows = [(name, row["effect"], (row["low"], row["high"]), BLUE, "o")]
    if not np.isnan(row["placebo"]):
        to = (0.0, side * row["placebo_high"])
        rows.append(("random sets like it:\nmean, 95 % quantile", side * row["placebo"], to, FAINT, "s"))
    if not np.isnan(row["other_ablation"]):
        rows.append(("under another ablation", row["other_ablation"], None, INK, "D"))
    if not np.isnan(row["held_out"]):
        rows.append(("on held-out prompts", row["held_out"], None, INK, "^"))
    with style(ax):
        if ax is None:
            ax = new_figure(*SIZE).add_subplot()
        ax.axvline(0, color=FAINT, linewidth=0.6, zorder=0)
        if not np.isnan(row["margin"]):
            ax.axvline(side * row["margin"], color=INK, linewidth=0.8, linestyle=DASHED, zorder=0, label="margin")
            ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for place, (_, value, ends, color, mark) in enumerate(rows):
            if ends is not None:
                ax.hlines(place, *ends, colors=color, linewidths=1.4)
            ax.plot(value, place, mark, color=color, markersize=5)
        ax.set_yticks(range(len(rows)), [name for name, *_ in rows])
        ax.set(ylim=(len(rows) - 0.5, -0.5), xlabel="Effect")
        what = claim.what[:1].lower() + claim.what[1:]
        seen = f"the claim about {what} {'holds' if claim.holds else 'does not hold'}"
        ax.set_title("\n".join(textwrap.wrap(label(model_title(claim.run, seen)), TITLE)))
    return ax
