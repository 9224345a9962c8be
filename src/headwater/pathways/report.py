"""What holds on this model and what does not, as sentences made of the numbers.

Each sentence names its measure, the control beside it, and 95 % intervals over questions. l* is each fit's own best
layer; the report names the one chosen most often. Two intervals that do not overlap count as different.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from headwater.pathways.bootstrap import FEWEST
from headwater.pathways.controls import ALL
from headwater.pathways.interventions import EXACT, RANDOM
from headwater.pathways.modes import BEST_LAYER, CROSSED, MODES, RANDOM_SPLIT, TOO_FEW, TWO
from headwater.pathways.swap import ANSWER_ONLY, RANDOM_SWAP, SWAP
from headwater.pathways.tables import (
    AFTER,
    AFTER_RANDOM,
    ANY_MODE,
    AWARE,
    BY_LOGIT,
    MARGIN,
    PROBE,
    RELATION,
    SPANS,
    WRONG_ANSWER,
)

if TYPE_CHECKING:
    from headwater.pathways.trace import Pathways


def report_of(pathways: Pathways) -> list[str]:
    """Return the sentences, question set by question set, and what to conclude for the model."""
    sentences = [f"{row['dataset']} was left out: {row['cause']}." for row in pathways.dropped.to_dict("records")]
    if pathways.run.options["token"] == "before_answer":
        sentences.append(
            "The probe reads the token before the answer: nothing there can come from the answer, so A-anchored means "
            "no more here than that no prediction flips."
        )
    for dataset in pathways.datasets:
        view = _View(pathways, dataset)
        for part in (_probe, _spans, _knockout, _modes, _shape, _direction, _awareness, _swaps, _properties):
            sentences += [f"{dataset}: {sentence}" for sentence in part(view)]
    surviving = [name for name in pathways.datasets if survives(pathways, name)]
    where = ", ".join(surviving) if surviving else "none of the question sets"
    tested = ", ".join(pathways.datasets)
    return [*sentences, f"Two modes survive the controls on {where} (tested on {tested})."]


def summary_of(pathways: Pathways) -> dict[str, Any]:
    """Return the numbers worth a glance, as JSON values."""
    sets = []
    for dataset in pathways.datasets:
        view = _View(pathways, dataset)
        flips, random = (view.control(name, ALL, "flip_rate")[0] for name in (EXACT, RANDOM))
        sets.append(
            {
                "dataset": dataset,
                "examples": view.n_examples,
                "best_layer": view.layer,
                "auc": _round(view.baseline(WRONG_ANSWER, PROBE)[0]),
                "auc_relation": _round(view.baseline(WRONG_ANSWER, RELATION)[0]),
                "auc_spans": _round(view.baseline(WRONG_ANSWER, SPANS)[0]),
                "auc_after_knockout": _round(view.baseline(WRONG_ANSWER, AFTER)[0]),
                "flip_rate": _round(flips),
                "flip_rate_random": _round(random),
                "delta_p": {mode: _round(view.curve(BEST_LAYER, mode)[0]) for mode in MODES},
                "components": view.verdict(EXACT, "all"),
                "two_modes_survive": survives(pathways, dataset),
            }
        )
    return {"model": pathways.run.model, "best_layer": pathways.best_layer, "datasets": sets}


def survives(pathways: Pathways, dataset: str) -> bool:
    """Say whether two modes survive the controls.

    1. The logit changes of E_Q's knockout have two modes, and so have those of one prediction (right or wrong) alone:
       a shift of every example to one point has two peaks only because two predictions start from two sides.
    2. Predictions flip more often than when random question tokens are knocked out.
    3. With modes taken from another seed's probe, ΔP of Q-anchored examples lies below that of A-anchored ones.
    4. The probe tells more than the length and place of the exact answer, where these tell the label at all.
    """
    view = _View(pathways, dataset)
    if view.told_by_spans:
        return False
    within = [view.verdict(EXACT, f"predicted {side}") for side in ("right", "wrong")]
    exact, random = view.control(EXACT, ALL, "flip_rate"), view.control(RANDOM, ALL, "flip_rate")
    q, a = (view.curve(CROSSED, mode) for mode in MODES)
    return view.verdict(EXACT, "all") == TWO and TWO in within and exact[1] > random[2] and q[2] < a[1]


class _View:
    """One question set's numbers at l*."""

    def __init__(self, pathways: Pathways, dataset: str):
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

    def curve(self, split_by: str, mode: str, column: str = "delta_p") -> tuple[float, float, float]:
        """Value, low, high of a curve at l*."""
        table = self._own(self.pathways.curves_at_best)
        chosen = (table["split_by"] == split_by) & (table["mode"] == mode)
        return _triple(table[chosen], column, f"{column}_low", f"{column}_high")

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
    def told_by_spans(self) -> bool:
        """Whether the exact answer's length and place tell the label, and the probe no better than these."""
        difference = self.baseline(WRONG_ANSWER, f"{PROBE} − {SPANS}")
        return self.baseline(WRONG_ANSWER, SPANS)[1] > 0.5 and not difference[1] > 0

    def verdict(self, intervention: str, population: str) -> str:
        """One mode or two."""
        table = self._own(self.pathways.components)
        chosen = (table["intervention"] == intervention) & (table["population"] == population)
        return str(table.loc[chosen, "verdict"].iloc[0]) if chosen.any() else TOO_FEW


def _probe(view: _View) -> Iterator[str]:
    found = view.baseline(WRONG_ANSWER, PROBE)
    at_chance = "" if found[1] > 0.5 else " It is not told from chance, and nothing below says much."
    if view.told_by_spans:
        at_chance = (
            " Length and place of the exact answer alone tell them as well: this is no sign that the states know which "
            "answer is wrong, and nothing below says much."
        )
    yield (
        f"of {view.n_examples:,} answers, the probe at l* ({view.layers}) tells the wrong ones with AUC "
        f"{_interval(found)}.{at_chance}"
    )
    relation = view.baseline(WRONG_ANSWER, RELATION)
    if np.isfinite(relation[0]):
        difference = view.baseline(WRONG_ANSWER, f"{PROBE} − {RELATION}")
        yield (
            f"knowing only the question's relation gives AUC {_interval(relation)}; the probe "
            f"{_against_zero(difference, 'beats it', 'is worse', 'is not told apart from it')} "
            f"(difference {_interval(difference)})."
        )


def _spans(view: _View) -> Iterator[str]:
    """Compare the exact answer's length and place in right and wrong answers, and what these alone tell."""
    found = view.baseline(WRONG_ANSWER, SPANS)
    if np.isfinite(found[0]):
        sides = (view.modes[view.modes["correct"] == side] for side in (True, False))
        right, wrong = (
            f"{side['exact_length'].mean():.1f} tokens, {side['exact_share'].mean():.0%} of the answer,"
            for side in sides
        )
        difference = view.baseline(WRONG_ANSWER, f"{PROBE} − {SPANS}")
        yield (
            f"the exact answer has {right} where it is right, and {wrong} where it is wrong. Its length and place "
            f"alone give AUC {_interval(found)}; the probe "
            f"{_against_zero(difference, 'beats this', 'is worse', 'is not told apart from this')} "
            f"(difference {_interval(difference)})."
        )


def _knockout(view: _View) -> Iterator[str]:
    after, random = (view.baseline(WRONG_ANSWER, name) for name in (AFTER, AFTER_RANDOM))
    beside = f"; of random question tokens, {_interval(random)}" if np.isfinite(random[0]) else ""
    yield f"after the knockout of the exact question tokens the probe's AUC is {_interval(after)}{beside}."
    exact, other = (view.control(name, ALL, "flip_rate") for name in (EXACT, RANDOM))
    if np.isfinite(other[0]):
        more = "more often than" if exact[1] > other[2] else "not clearly more often than"
        yield (
            f"the knockout flips {_percent(exact)} of the predictions at l*, {more} that of as many random question "
            f"tokens ({_percent(other)})."
        )


def _modes(view: _View) -> Iterator[str]:
    q, a = (view.curve(BEST_LAYER, mode) for mode in MODES)
    yield (
        f"with modes by the probe's own flips, as published, ΔP at l* is {_points(q)} for Q-anchored and {_points(a)} "
        "for A-anchored examples."
    )
    for mode in MODES:
        if view.members(mode) < FEWEST:
            yield f"only {view.members(mode)} examples are {mode} at l*: too few for a 95 % band."
    q, a = (view.curve(CROSSED, mode) for mode in MODES)
    if np.isfinite(q[0]) and np.isfinite(a[0]):
        holds = "the two stay apart" if q[2] < a[1] else "the two are not told apart"
        yield f"with modes taken from another seed's probe it is {_points(q)} and {_points(a)}: {holds}."
    null = view.curve(RANDOM_SPLIT, MODES[0])
    if np.isfinite(null[0]):
        yield (
            f"those that random question tokens flip have ΔP {_points(null)}: a gap of this size comes from splitting "
            "by the flip itself."
        )


def _shape(view: _View) -> Iterator[str]:
    found = [view.verdict(EXACT, name) for name in ("all", "predicted right", "predicted wrong")]
    yield (
        f"the changes of the probe's logit have {found[0]} over all examples, {found[1]} where it said right, "
        f"{found[2]} where it said wrong."
    )
    if found[0] == TWO and TWO not in found[1:]:
        yield "the two peaks are those of the two predictions, not of two mechanisms."


def _direction(view: _View) -> Iterator[str]:
    said_wrong = view.modes["predicted_wrong"]
    flips = (view.modes["mode"] == MODES[0]).groupby(said_wrong).mean()
    right, wrong = float(flips.get(False, np.nan)), float(flips.get(True, np.nan))
    note = ""
    if np.isfinite(right) and np.isfinite(wrong) and max(right, wrong) > 3 * min(right, wrong) + 0.02:
        note = (
            " Flips go one way: where a knockout moves every example to one side, the rule of hard flips calls those "
            "already there A-anchored, whatever they depend on."
        )
    yield f"{right:.0%} of the predictions 'right' flip and {wrong:.0%} of the predictions 'wrong'.{note}"


def _awareness(view: _View) -> Iterator[str]:
    aware, margin, logit = (view.baseline(ANY_MODE, name) for name in (AWARE, MARGIN, BY_LOGIT))
    if np.isfinite(aware[0]):
        difference = view.baseline(ANY_MODE, f"{AWARE} − {BY_LOGIT}")
        yield (
            f"a probe on untouched states tells Q-anchored examples with AUC {_interval(aware)}; the margin −|logit| "
            f"of the truth probe with {_interval(margin)}, its logit and |logit| with {_interval(logit)}: the states "
            f"{_against_zero(difference, 'know more', 'know less', 'do not know more')} about the mode than the truth "
            "probe's own output."
        )


def _swaps(view: _View) -> Iterator[str]:
    swap, random = (view.control(name, ALL, "flip_rate") for name in (SWAP, RANDOM_SWAP))
    if np.isfinite(swap[0]):
        q, a = (view.control(SWAP, mode, "flip_rate") for mode in MODES)
        yield (
            f"another subject in the question of right answers flips {_percent(swap)} of the predictions (Q-anchored "
            f"{_percent(q)}, A-anchored {_percent(a)}), random tokens {_percent(random)}."
        )
    alone = [view.control(ANSWER_ONLY, mode, "delta_p") for mode in MODES]
    if np.isfinite(alone[0][0]) or np.isfinite(alone[1][0]):
        yield (
            f"with the answer alone ΔP is {_points(alone[0])} for Q-anchored and {_points(alone[1])} for A-anchored "
            "examples."
        )


def _properties(view: _View) -> Iterator[str]:
    by_mode = view.modes.groupby("mode")
    accuracy = by_mode["correct"].mean()
    if len(accuracy) == 2:
        text = f"{accuracy[MODES[0]]:.0%} of Q-anchored and {accuracy[MODES[1]]:.0%} of A-anchored answers are right"
        if "popularity" in view.modes and view.modes["popularity"].notna().any():
            popularity = by_mode["popularity"].median()
            text += f"; median popularity {popularity[MODES[0]]:,.0f} and {popularity[MODES[1]]:,.0f}"
        yield f"{text}."


def _triple(rows: pd.DataFrame, *columns: str) -> tuple[float, float, float]:
    if not len(rows):
        return float("nan"), float("nan"), float("nan")
    value, low, high = (float(rows[column].iloc[0]) for column in columns)
    return value, low, high


def _against_zero(difference: tuple[float, float, float], above: str, below: str, neither: str) -> str:
    return above if difference[1] > 0 else below if difference[2] < 0 else neither


def _interval(found: tuple[float, float, float]) -> str:
    value, low, high = found
    return f"{value:.3f} ({low:.3f} to {high:.3f})" if np.isfinite(low) else f"{value:.3f}"


def _percent(found: tuple[float, float, float]) -> str:
    value, low, high = (100 * number for number in found)
    return f"{value:.0f} % ({low:.0f} to {high:.0f})" if np.isfinite(low) else f"{value:.0f} %"


def _points(found: tuple[float, float, float]) -> str:
    value, low, high = found
    if not np.isfinite(value):
        return "not measured"
    return f"{value:+.1f} points ({low:+.1f} to {high:+.1f})" if np.isfinite(low) else f"{value:+.1f} points"


def _round(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None
