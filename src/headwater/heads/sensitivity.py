"""How much of a head map hangs on its threshold: the heads of each category for several thresholds, under both rules.

A label is a yes or no of a number that changes smoothly: how many heads have one depends on where the line is drawn.
The counts are those that `categories.apply_rule` would give at each threshold, from the same scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from headwater.heads.categories import CATEGORIES, RULES, apply_rule
from headwater.runs.figure_options import Size
from headwater.runs.record import RunRecord
from headwater.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THRESHOLDS = (0.10, 0.15, 0.20, 0.25, 0.30)


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivity(Result):
    """What `HeadMap.sensitivity` returns."""

    table: pd.DataFrame
    """A row per rule and threshold: `rule, threshold, heads` (in any category), and a column per category, in which a
    head of several categories counts in each."""
    run: RunRecord
    """That of the head map."""

    def summary(self) -> pd.DataFrame:
        """Return the heads in any category, a row per threshold and a column per rule."""
        heads = self.table.pivot(index="threshold", columns="rule", values="heads")
        return heads[[rule for rule in RULES if rule in heads]].rename_axis(columns=None).reset_index()

    def report(self) -> list[str]:
        """Return what is left of the classified heads at the highest threshold, under each rule."""
        said = []
        for rule, rows in self.table.groupby("rule", sort=False):
            first, last = rows.iloc[0], rows.iloc[-1]
            said.append(
                f"Under the {rule} rule {first['heads']} heads are in a category at a threshold of "
                f"{first['threshold']:.2f}, and {last['heads']} at {last['threshold']:.2f}."
            )
        return said

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw the number of heads against the threshold, a line per category and a panel per rule."""
        return self._drawn(ax, title, figsize)


def heads_by_threshold(table: pd.DataFrame) -> pd.DataFrame:
    """Return how many heads each rule puts into each category, for thresholds from 0.10 to 0.30.

    Args:
        table: a score table; without a null model it has no numbers for the controlled rule.

    Returns:
        A row per rule and threshold: `rule, threshold, heads` (in any category), and a column per category, in which a
        head of several categories counts in each.
    """
    rules = [rule for rule in RULES if rule == "published" or table["q_value"].notna().any()]
    rows = []
    for rule in rules:
        for threshold in THRESHOLDS:
            flags = apply_rule(table, rule, threshold)
            found = table[(flags["implemented"] | flags["suppressed"]) & table["category"].notna()]
            counts = found.drop_duplicates(["layer", "head", "category"])["category"].value_counts()
            heads = len(found[["layer", "head"]].drop_duplicates())
            rows.append((rule, threshold, heads, *(int(counts.get(name, 0)) for name in CATEGORIES)))
    return pd.DataFrame(rows, columns=["rule", "threshold", "heads", *CATEGORIES])
