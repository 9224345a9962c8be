"""A claim, as a result: what was found of a set of cells, heads or edges, and the run that it was found in.

What is measured, and when a claim holds, is said in `headwater.stats.claims`; `Sweep.claim`, `Circuit.claim`,
`CircuitRuns.claim` and `hw.heads.claim` make them. A claim's record is that of the run which measured the set, with
what was claimed as one more option.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd

from headwater.runs.identity import describe
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, Size
from headwater.stats.claims import Judgement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Claim(Result):
    """What was found of a claim."""

    table: pd.DataFrame
    """One row: `effect, low, high, placebo, placebo_high, p_value, other_ablation, split_half, held_out, margin,
    holds`; NaN where nothing was given to measure it by."""
    what: str
    """The set that it is about, in words."""
    sentences: list[str]
    """What was measured, and whether the claim holds."""
    notes: list[str]
    """What weakens the claim, such as prompts that discovery and test share; its last sentence ends with them."""
    run: RunRecord
    """That of the run, with the option `claim`: what was claimed, and beside what."""

    @classmethod
    def of(cls, judged: Judgement, run: RunRecord, asked: Mapping[str, object]) -> Claim:
        """Return what was judged of a run, as a result; its record says what was claimed, and beside what."""
        given = {name: _identity(one) if isinstance(one, RunRecord) else one for name, one in asked.items()}
        record = replace(run, options=run.options | {"claim": describe(given | {"level": judged.level})})
        return cls(judged.table, judged.what, [judged.measured, judged.verdict], list(judged.notes), record)

    @property
    def holds(self) -> bool:
        """Whether the claim holds; see the first lines of `headwater.stats.claims`."""
        return bool(self.table["holds"].iloc[0])

    @property
    def sentence(self) -> str:
        """All of the report in one line."""
        return " ".join(self.sentences)

    def summary(self) -> pd.DataFrame:
        """Return the one row of the table."""
        return self.table.copy()

    def report(self) -> list[str]:
        """Return what was measured, and whether the claim holds."""
        return list(self.sentences)

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes | Figure:
        """Draw the effect with its interval above all that it is compared with, and the margin."""
        return self._drawn(ax, title, figsize)

    def __repr__(self) -> str:
        row = self.table.iloc[0]
        verdict = "holds" if self.holds else "does not hold"
        return f"Claim({self.what}: effect {row['effect']:.3g}, p = {row['p_value']:.2g}; {verdict})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.sentence, quote=False)}</p>{self.table.to_html(index=False)}"


def _identity(run: RunRecord) -> dict[str, object]:
    """Return what of another run's record tells it from others."""
    return {"fingerprint": run.fingerprint, "seed": run.seed, "options": run.options}
