"""The numbers of a trace that are worth a glance, question set by question set, and whether two modes survive."""

from __future__ import annotations

from typing import Any, TypeAlias

import pandas as pd

from headwater.pathways.interventions import EXACT, EXACT_ON_RANDOM_ROWS, RANDOM
from headwater.pathways.mean_effects import ALL
from headwater.pathways.modes import (
    BEST_LAYER,
    MODES,
    TOO_FEW,
    TWO,
    WITHIN,
)
from headwater.pathways.tables import (
    AFTER,
    ANY_MODE,
    AWARE,
    MARGIN,
    PROBE,
    RELATION,
    RELATION_ANSWER,
    SPANS,
    WRONG_ANSWER,
)
from headwater.runs.findings import frame_of, rounded

Traced: TypeAlias = Any
"""A `Pathways`, whose file imports this one."""


class SetAtBest:
    """One question set's numbers at l*."""

    def __init__(self, pathways: Traced, dataset: str):
        self.pathways = pathways
        self.dataset = dataset
        self.auc = self._own(pathways.auc)
        self.modes = self._own(pathways.modes)
        self.layer = int(self.auc.loc[self.auc["best"], "layer"].mode().iloc[0])
        chosen = self.auc[self.auc["best"]]
        counts = chosen["layer"].value_counts()
        self.layers = (
            f"layer {self.layer}" if len(counts) == 1 else f"layer {self.layer} in {counts.max()} of {len(chosen)} fits"
        )
        self.n_examples = self.modes["example"].nunique()

    def _own(self, table: pd.DataFrame) -> pd.DataFrame:
        return table[table["dataset"] == self.dataset]

    def control(self, intervention: str, group: str, column: str) -> tuple[float, float, float]:
        """Value, low, high of an intervention at l*."""
        table = self._own(self.pathways.controls_at_best)
        chosen = (table["intervention"] == intervention) & (table["group"] == group)
        return _triple(table[chosen], column, f"{column}_low", f"{column}_high")

    def curve(self, split_by: str, mode: str) -> tuple[float, float, float]:
        """Value, low, high of the curve of ΔP at l*."""
        table = self._own(self.pathways.curves_at_best)
        chosen = (table["split_by"] == split_by) & (table["mode"] == mode)
        return _triple(table[chosen], "delta_p", "delta_p_low", "delta_p_high")

    def members(self, mode: str) -> int:
        """How many examples are in a mode at l*."""
        table = self._own(self.pathways.curves_at_best)
        chosen = (table["split_by"] == BEST_LAYER) & (table["mode"] == mode)
        return int(table.loc[chosen, "examples"].sum())

    def baseline(self, question: str, score: str) -> tuple[float, float, float]:
        """Value, low, high of an AUC, or of a difference of two."""
        table = self._own(self.pathways.baselines)
        return _triple(table[(table["question"] == question) & (table["score"] == score)], "value", "low", "high")

    @property
    def explained_by_spans(self) -> bool:
        """Whether the exact answer's length and place predict the label, and the probe no better than these."""
        difference = self.baseline(WRONG_ANSWER, f"{PROBE} − {SPANS}")
        return self.baseline(WRONG_ANSWER, SPANS)[1] > 0.5 and not difference[1] > 0

    @property
    def controlled(self) -> int:
        """How many examples have as many random question tokens as exact ones."""
        table = self._own(self.pathways.controls_at_best)
        return int(table.loc[(table["intervention"] == RANDOM) & (table["group"] == ALL), "examples"].sum())

    def component(self, intervention: str, population: str) -> pd.Series | None:
        """The test of one population, if there is one."""
        table = self._own(self.pathways.components)
        chosen = (table["intervention"] == intervention) & (table["population"] == population)
        return table[chosen].iloc[0] if chosen.any() else None

    def verdict(self, intervention: str, population: str) -> str:
        """What the test says."""
        found = self.component(intervention, population)
        return TOO_FEW if found is None else str(found["verdict"])


def findings_of(pathways: Traced) -> list[dict[str, Any]]:
    """Return the numbers worth a glance of every question set, as JSON values."""
    sets = []
    for dataset in pathways.datasets:
        view = SetAtBest(pathways, dataset)
        flips, beside, random = (
            view.control(name, ALL, "flip_rate")[0] for name in (EXACT, EXACT_ON_RANDOM_ROWS, RANDOM)
        )
        sets.append(
            {
                "dataset": dataset,
                "examples": view.n_examples,
                "best_layer": view.layer,
                "auc": rounded(view.baseline(WRONG_ANSWER, PROBE)[0]),
                "auc_relation": rounded(view.baseline(WRONG_ANSWER, RELATION)[0]),
                "auc_relation_answer": rounded(view.baseline(WRONG_ANSWER, RELATION_ANSWER)[0]),
                "auc_spans": rounded(view.baseline(WRONG_ANSWER, SPANS)[0]),
                "auc_after_knockout": rounded(view.baseline(WRONG_ANSWER, AFTER)[0]),
                "auc_mode": rounded(view.baseline(ANY_MODE, AWARE)[0]),
                "auc_mode_margin": rounded(view.baseline(ANY_MODE, MARGIN)[0]),
                "flip_rate": rounded(flips),
                "flip_rate_same_rows": rounded(beside),
                "flip_rate_random": rounded(random),
                "random_control_examples": view.controlled,
                "delta_p": {mode: rounded(view.curve(BEST_LAYER, mode)[0]) for mode in MODES},
                "components": view.verdict(EXACT, WITHIN),
                "two_modes_survive": survives(pathways, dataset),
            }
        )
    return sets


def summary_of(pathways: Traced) -> pd.DataFrame:
    """Return the findings as a data frame, a row per question set."""
    rows = []
    for found in findings_of(pathways):
        flat = {"layer" if name == "best_layer" else name: value for name, value in found.items() if name != "delta_p"}
        by_mode = {f"delta_p_{mode[0].lower()}_anchored": found["delta_p"][mode] for mode in MODES}
        rows.append(flat | by_mode)
    return frame_of(rows)


def survives(pathways: Traced, dataset: str) -> bool:
    """Say whether two modes survive the controls.

    1. Within relations and predictions, the logit changes of E_Q's knockout have two modes (`modes.decided`): all
       changes together have two peaks also because relations differ, or because two predictions start from two sides.
    2. Predictions flip more often than when as many random question tokens are knocked out, on the rows that have as
       many.
    3. The probe predicts better than the exact answer's length and place, where these predict at all.

    That the groups stay apart under another seed's probe is not a criterion: it reads the same states, and one
    population stays apart as well.
    """
    view = SetAtBest(pathways, dataset)
    if view.explained_by_spans:
        return False
    exact, random = view.control(EXACT_ON_RANDOM_ROWS, ALL, "flip_rate"), view.control(RANDOM, ALL, "flip_rate")
    return view.verdict(EXACT, WITHIN) == TWO and exact[1] > random[2]


def _triple(rows: pd.DataFrame, *columns: str) -> tuple[float, float, float]:
    if not len(rows):
        return float("nan"), float("nan"), float("nan")
    value, low, high = (float(rows[column].iloc[0]) for column in columns)
    return value, low, high
