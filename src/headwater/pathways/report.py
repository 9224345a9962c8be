"""What holds on this model and what does not, as sentences made of the numbers.

Each sentence names its measure, the control beside it, and 95 % intervals over questions. l* is each fit's own best
layer; the report names the one chosen most often. Two intervals that do not overlap count as different.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pandas as pd

from headwater.errors import InputError
from headwater.pathways.controls import ALL
from headwater.pathways.interventions import BESIDE, EXACT, RANDOM
from headwater.pathways.modes import (
    BEST_LAYER,
    CROSSED,
    FEWEST,
    FEWEST_FOR_COMPONENTS,
    LEVEL,
    MODES,
    NO_RELATIONS,
    RANDOM_SPLIT,
    TOO_FEW,
    TWO,
    TWO_PEAKS,
    WITHIN,
)
from headwater.pathways.swap import ANSWER_ONLY, RANDOM_SWAP, SWAP
from headwater.pathways.tables import (
    AFTER,
    AFTER_BESIDE,
    AFTER_RANDOM,
    ANY_MODE,
    AWARE,
    BY_LOGIT,
    MARGIN,
    PROBE,
    RELATION,
    RELATION_ANSWER,
    SPANS,
    WRONG_ANSWER,
)
from headwater.runs.findings import frame_of, rounded
from headwater.runs.record import RunRecord


@runtime_checkable
class Traced(Protocol):
    """What a report reads of a trace: the tables of `Pathways`."""

    @property
    def modes(self) -> pd.DataFrame:
        """A row per example and seed, at l*."""

    @property
    def auc(self) -> pd.DataFrame:
        """AUCs of every fit."""

    @property
    def curves_at_best(self) -> pd.DataFrame:
        """Mean changes at l* of each fit."""

    @property
    def controls_at_best(self) -> pd.DataFrame:
        """Flip rates and changes of every intervention at l*."""

    @property
    def baselines(self) -> pd.DataFrame:
        """AUCs with intervals, and their differences."""

    @property
    def components(self) -> pd.DataFrame:
        """One mode or two."""

    @property
    def dropped(self) -> pd.DataFrame:
        """Question sets left out."""

    @property
    def run(self) -> RunRecord:
        """What made it."""

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the question sets."""


def report_of(pathways: Traced) -> list[str]:
    """Return the sentences, question set by question set, and what to conclude for the model.

    Raises:
        InputError: the result is of a version that did not test one mode within relations.
    """
    _refuse_untested(pathways)
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
    return [*sentences, _conclusion(pathways)]


def _conclusion(pathways: Traced) -> str:
    """Say where two modes are found, and where that could not be asked."""
    verdicts = {name: _View(pathways, name).verdict(EXACT, WITHIN) for name in pathways.datasets}
    tested = [name for name, verdict in verdicts.items() if verdict not in (TOO_FEW, NO_RELATIONS)]
    surviving = [name for name in tested if survives(pathways, name)]
    untested = [f"{name}: {verdict}" for name, verdict in verdicts.items() if name not in tested]
    where = ", ".join(surviving) if surviving else "none of the question sets"
    said = f"tested within each relation on {', '.join(tested)}" if tested else "tested on none"
    return f"Two modes survive the controls on {where} ({'; '.join([said, *untested])})."


def findings_of(pathways: Traced) -> list[dict[str, Any]]:
    """Return the numbers worth a glance of every question set, as JSON values.

    Raises:
        InputError: the result is of a version that did not test one mode within relations.
    """
    _refuse_untested(pathways)
    sets = []
    for dataset in pathways.datasets:
        view = _View(pathways, dataset)
        flips, beside, random = (view.control(name, ALL, "flip_rate")[0] for name in (EXACT, BESIDE, RANDOM))
        sets.append(
            {
                "dataset": dataset,
                "examples": view.n_examples,
                "best_layer": view.layer,
                "auc": rounded(view.baseline(WRONG_ANSWER, PROBE)[0]),
                "auc_relation": rounded(view.baseline(WRONG_ANSWER, RELATION)[0]),
                "auc_spans": rounded(view.baseline(WRONG_ANSWER, SPANS)[0]),
                "auc_after_knockout": rounded(view.baseline(WRONG_ANSWER, AFTER)[0]),
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
    3. The probe tells more than the length and place of the exact answer, where these tell the label at all.

    That the groups stay apart under another seed's probe is no criterion: it reads the same states, and one population
    stays apart as well.
    """
    view = _View(pathways, dataset)
    if view.told_by_spans:
        return False
    exact, random = view.control(BESIDE, ALL, "flip_rate"), view.control(RANDOM, ALL, "flip_rate")
    return view.verdict(EXACT, WITHIN) == TWO and exact[1] > random[2]


def _refuse_untested(pathways: Traced) -> None:
    if "gain" not in pathways.components:
        raise InputError(
            "This result is of headwater 0.1.0, which said two modes of what one population shows too, and compared "
            "with fewer random tokens. Its tables can be read; trace again for a report."
        )


class _View:
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
    for name, known in (
        (RELATION, "the question's relation"),
        (RELATION_ANSWER, "the relation and the answer's words"),
    ):
        baseline = view.baseline(WRONG_ANSWER, name)
        if np.isfinite(baseline[0]):
            difference = view.baseline(WRONG_ANSWER, f"{PROBE} − {name}")
            yield (
                f"knowing only {known} gives AUC {_interval(baseline)}; the probe "
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
    exact, beside, random = (view.baseline(WRONG_ANSWER, name) for name in (AFTER, AFTER_BESIDE, AFTER_RANDOM))
    yield f"after the knockout of the exact question tokens the probe's AUC is {_interval(exact)}."
    if not np.isfinite(random[0]):
        if view.pathways.run.options["controls"]:
            yield "no question has as many other tokens as exact ones: there is no random control."
        return
    yield (
        f"{view.controlled:,} of {view.n_examples:,} examples have as many other question tokens as exact ones; on "
        f"these it is {_interval(beside)} after the knockout of the exact ones, {_interval(random)} after that of the "
        "others."
    )
    exact, other = (view.control(name, ALL, "flip_rate") for name in (BESIDE, RANDOM))
    more = "more often than" if exact[1] > other[2] else "not clearly more often than"
    yield (
        f"on these the knockout flips {_percent(exact)} of the predictions at l*, {more} that of as many random "
        f"question tokens ({_percent(other)})."
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
        yield (
            f"with modes taken from another seed's probe it is {_points(q)} and {_points(a)}: {holds}, which one "
            "population does as well, since both probes read the same states."
        )
    null = view.curve(RANDOM_SPLIT, MODES[0])
    if np.isfinite(null[0]):
        yield (
            f"those that random question tokens flip have ΔP {_points(null)}: a gap of this size comes from splitting "
            "by the flip itself."
        )


def _shape(view: _View) -> Iterator[str]:
    found = [view.verdict(EXACT, name) for name in ("all", "predicted right", "predicted wrong")]
    yield (
        f"all relations together, the changes of the probe's logit have {found[0]} over all examples, {found[1]} where "
        f"it said right, {found[2]} where it said wrong."
    )
    if found[0] == TWO_PEAKS and TWO_PEAKS not in found[1:]:
        yield "the two peaks are those of the two predictions, not of two mechanisms."
    test = view.component(EXACT, WITHIN)
    if test is not None:
        yield _within(test)


def _within(test: pd.Series) -> str:
    """Say what was tested within relations, and what came out."""
    if test["verdict"] == NO_RELATIONS:
        return (
            "the questions have no relations: two peaks may be two kinds of question, and two modes cannot be claimed."
        )
    if test["verdict"] == TOO_FEW:
        return (
            f"no relation has {FEWEST_FOR_COMPONENTS} questions with one prediction: two modes within relations cannot "
            "be tested."
        )
    tested = (
        f"within relations and predictions ({test['cells']:.0f} groups of {FEWEST_FOR_COMPONENTS} questions or more, "
        f"{test['examples']:,.0f} in all, {test['left_out']:,.0f} left out)"
    )
    if test["verdict"] == TWO:
        return f"{tested} the dip test rejects one mode (q = {test['q']:.2g}), and two Gaussians fit better than one."
    beside = ", though two Gaussians fit no better than one" if test["q"] <= LEVEL else ""
    rejects = "rejects" if test["q"] <= LEVEL else "does not reject"
    return f"{tested} the dip test {rejects} one mode (q = {test['q']:.2g}){beside}."


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
