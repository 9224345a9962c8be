"""How much of a head map hangs on its options: the heads of each category for other thresholds, rules and settings.

A label is a yes or no of a number that changes smoothly: how many heads have one depends on where the line is drawn.
The counts are those that `categories.apply_rule` would give at each threshold, from the same scores. Given the model,
the heads are scored again, with one setting changed at a time: what later heads read (`embedding`), half and twice the
published k, and the norms' gains.
"""

from __future__ import annotations

from collections.abc import Mapping
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
AS_MAPPED = "as mapped"
"""The setting of the map itself."""


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivity(Result):
    """What `HeadMap.sensitivity` returns."""

    table: pd.DataFrame
    """A row per setting, rule and threshold: `setting, rule, threshold, heads` (in any category), `kept`, how many of
    those have a category in common with what the map's own setting calls them under the same rule and threshold, and a
    column per category, in which a head of several categories counts in each."""
    run: RunRecord
    """That of the head map."""

    def summary(self) -> pd.DataFrame:
        """Return the heads in any category: a row per threshold and a column per rule; then rows of other settings."""
        heads = self.table.pivot(index=["setting", "threshold"], columns="rule", values="heads")
        order = dict.fromkeys(self.table["setting"])
        heads = heads[[rule for rule in RULES if rule in heads]].rename_axis(columns=None)
        return heads.loc[list(order)].reset_index()

    def report(self) -> list[str]:
        """Return what is left of the classified heads at the highest threshold, and what other settings make of it."""
        said = []
        for rule, rows in self.as_mapped.groupby("rule", sort=False):
            first, last = rows.iloc[0], rows.iloc[-1]
            said.append(
                f"Under the {rule} rule {first['heads']} heads are in a category at a threshold of "
                f"{first['threshold']:.2f}, and {last['heads']} at {last['threshold']:.2f}."
            )
        own, *others = (row for _, row in self.at_own_threshold.iterrows())
        said += [
            f"With {row['setting']}, else as mapped: {row['heads']} heads, {row['kept']} of them among the map's "
            f"{own['heads']} with a category in common."
            for row in others
        ]
        return said

    @property
    def as_mapped(self) -> pd.DataFrame:
        """The rows of the map's own setting."""
        return self.table[self.table["setting"] == AS_MAPPED]

    @property
    def at_own_threshold(self) -> pd.DataFrame:
        """A row per setting: at the threshold of `THRESHOLDS` nearest to the map's, under the map's rule."""
        nearest = min(THRESHOLDS, key=lambda one: abs(one - float(self.run.options["threshold"])))  # type: ignore[arg-type]
        own = self.table["rule"] == self.run.options["rule"]
        return self.table[own & (self.table["threshold"] == nearest)]

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw the number of heads against the threshold, a line per category and a panel per rule.

        Where other settings were scored, a further panel has how many heads each calls, and how many of the map's.
        """
        return self._drawn(ax, title, figsize)


def heads_by_threshold(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return how many heads each rule puts into each category, for thresholds from 0.10 to 0.30.

    Args:
        tables: a score table for each setting, the map's own first; without a null model one has no numbers for the
            controlled rule.

    Returns:
        The table of a `Sensitivity`.
    """
    rows, own = [], dict[tuple[str, float], pd.DataFrame]()
    for setting, table in tables.items():
        for rule in RULES:
            if rule != "published" and not table["q_value"].notna().any():
                continue
            for threshold in THRESHOLDS:
                flags = apply_rule(table, rule, threshold)
                found = table[(flags["implemented"] | flags["suppressed"]) & table["category"].notna()]
                found = found[["layer", "head", "category"]].drop_duplicates()
                counts = found["category"].value_counts()
                common = found.merge(own.setdefault((rule, threshold), found))
                heads, kept = (len(one[["layer", "head"]].drop_duplicates()) for one in (found, common))
                by_category = (int(counts.get(name, 0)) for name in CATEGORIES)
                rows.append((setting, rule, threshold, heads, kept, *by_category))
    return pd.DataFrame(rows, columns=["setting", "rule", "threshold", "heads", "kept", *CATEGORIES])
