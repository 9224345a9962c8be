"""What holds on this model and what does not, as sentences computed from the numbers.

Each sentence names its measure, the control beside it, and 95 % intervals over questions. l* is each fit's own best
layer; the report names the one chosen most often. Two intervals that do not overlap count as different.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from headwater.pathways import modes, tables
from headwater.pathways.interventions import ANSWER_ONLY, EXACT, EXACT_ON_RANDOM_ROWS, RANDOM, RANDOM_SWAP, SWAP
from headwater.pathways.modes import ALL, BEST_LAYER, FEWEST_FOR_COMPONENTS, MODES, WITHIN
from headwater.pathways.tables import ANY_MODE, PROBE, WRONG_ANSWER
from headwater.questions.states import BEFORE
from headwater.runs.result import with_interval
from headwater.stats.discrimination import against_chance
from headwater.stats.resample import NOTHING, Interval, mean_interval

Traced: TypeAlias = Any
"""A `Pathways`; its module imports this one."""


def report_of(pathways: Traced) -> list[str]:
    """Return the sentences, question set by question set, and what to conclude for the model."""
    sentences = [f"{row['dataset']} was left out: {row['cause']}." for row in pathways.dropped.to_dict("records")]
    if pathways.run.options["token"] in BEFORE:
        sentences.append(
            "The probe reads a token before the answer, so A-anchored only means that the prediction does not flip."
        )
    views = [SetAtBest(pathways, dataset) for dataset in pathways.datasets]
    for view in views:
        parts = (_probe(view), _knockout(view, pathways.run.options["controls"]), _modes(view), _tests(view))
        sentences += [f"{view.dataset}: {sentence}" for sentence in chain(*parts, _controls(view))]
    verdicts = {view.dataset: view.component(WITHIN)["verdict"] for view in views}
    tested = [name for name, verdict in verdicts.items() if verdict not in (modes.TOO_FEW, modes.NO_RELATIONS)]
    tests = [f"tested within each relation on {', '.join(tested)}" if tested else "tested on none"]
    tests += [f"{name}: {modes.TOO_FEW}" for name, verdict in verdicts.items() if verdict == modes.TOO_FEW]
    where = ", ".join(view.dataset for view in views if view.survives) or "none of the question sets"
    conclusion = f"Two modes survive the controls on {where} ({'; '.join(tests)})."
    if unknown := [name for name, verdict in verdicts.items() if verdict == modes.NO_RELATIONS]:
        conclusion += (
            f" The questions of {', '.join(unknown)} have no relations: two peaks may be two kinds of question, so two "
            "modes cannot be tested there."
        )
    return [*sentences, conclusion]


def _probe(view: SetAtBest) -> Iterator[str]:
    """Yield the probe's AUC, and the AUC of baselines that do not read its states."""
    auc = view.baseline(WRONG_ANSWER, PROBE)
    chance = against_chance(auc.low, auc.high)
    note = f" This is {chance}: the results below are not informative." if chance else ""
    if view.explained_by_spans:
        note = (
            " The length and position of the exact answer alone are not clearly worse, so this is no evidence that the "
            "states encode which answer is wrong: the results below are not informative."
        )
    yield (
        f"the probe at l* ({view.layers}) detects the wrong ones among {view.n_examples:,} answers with AUC "
        f"{_interval(auc)}.{note}"
    )
    shapes = [
        f"{rows['exact_length'].mean():.1f} tokens ({rows['exact_share'].mean():.0%} of the answer)"
        for rows in (view.modes[view.modes["correct"]], view.modes[~view.modes["correct"]])
    ]
    baselines = {
        tables.RELATION: "the question's relation alone gives",
        tables.RELATION_ANSWER: "the relation and the answer's words alone give",
        tables.SPANS: f"the exact answer has on average {shapes[0]} in right answers and {shapes[1]} in wrong ones. "
        "Its length and position alone give",
    }
    for name, information in baselines.items():
        alone, difference = (view.baseline(WRONG_ANSWER, score) for score in (name, f"{PROBE} − {name}"))
        if np.isfinite(alone.value):
            verdict = _against_zero(difference, "exceeds it", "is lower", "does not differ clearly")
            yield (f"{information} AUC {_interval(alone)}; the probe {verdict}: difference {_interval(difference)}.")


def _knockout(view: SetAtBest, has_controls: bool) -> Iterator[str]:
    """Yield the AUC after the knockout, and how many predictions flip, beside random tokens."""
    exact, matched, random = (
        view.baseline(WRONG_ANSWER, name) for name in (tables.AFTER, tables.AFTER_BESIDE, tables.AFTER_RANDOM)
    )
    yield f"after knockout of the exact question tokens, the probe's AUC is {_interval(exact)}."
    if np.isfinite(random.value):
        yield (
            f"{view.controlled:,} of {view.n_examples:,} examples have as many other question tokens as exact ones; on "
            f"these, the AUC is {_interval(matched)} after knockout of the exact tokens and {_interval(random)} after "
            "knockout of random ones."
        )
        exact, other = view.control(EXACT_ON_RANDOM_ROWS), view.control(RANDOM)
        more = "more than" if exact.low > other.high else "not clearly more than"
        yield (
            f"on these, knockout of the exact tokens flips {_percent(exact)} of the predictions at l*, {more} knockout "
            f"of as many random question tokens: {_percent(other)}."
        )
    elif has_controls:
        yield "no question has as many other tokens as exact ones, so there is no random control."


def _modes(view: SetAtBest) -> Iterator[str]:
    """Yield ΔP of the two modes, for each way to split, and the properties of their examples."""
    q, a = (view.curve(BEST_LAYER, mode) for mode in MODES)
    members = {mode: view.members(mode) for mode in MODES}
    n_q, n_a = members.values()
    yield (
        f"with modes defined by the probe's own flips, as published, ΔP at l* is {_points(q)} for {n_q:,} Q-anchored "
        f"and {_points(a)} for {n_a:,} A-anchored examples (an example counts in both if seeds disagree)."
    )
    for mode, count in members.items():
        if count < modes.FEWEST:
            yield f"{mode} examples at l*: {count}, too few for a 95 % band."
    q, a = (view.curve(modes.CROSSED, mode) for mode in MODES)
    if np.isfinite(q.value) and np.isfinite(a.value):
        holds = "the two groups differ" if q.high < a.low else "the two groups do not differ clearly"
        yield (
            f"with modes defined by another seed's probe, ΔP is {_points(q)} and {_points(a)}: {holds}. A single "
            "population would look the same, because both probes read the same states."
        )
    null = view.curve(modes.RANDOM_SPLIT, MODES[0])
    if np.isfinite(null.value):
        yield (
            f"for examples flipped by knockout of random question tokens, ΔP is {_points(null)}: splitting by the flip "
            "alone produces a gap of this size."
        )


def _tests(view: SetAtBest) -> Iterator[str]:
    """Yield whether the changes have one mode or two, over all relations and within each, and what flips."""
    verdicts = [view.component(name)["verdict"] for name in ("all", "predicted right", "predicted wrong")]
    yield (
        f"over all relations, the distribution of changes of the probe's logit has {verdicts[0]} for all examples, "
        f"{verdicts[1]} for predictions 'right' and {verdicts[2]} for predictions 'wrong'."
    )
    if verdicts[0] == modes.TWO_PEAKS and modes.TWO_PEAKS not in verdicts[1:]:
        yield "the two peaks reflect the two predictions, not two mechanisms."
    test = view.component(WITHIN)
    if test["verdict"] == modes.TOO_FEW:
        yield (
            f"no relation has {FEWEST_FOR_COMPONENTS} questions with one prediction, so two modes within relations "
            "cannot be tested."
        )
    elif test["verdict"] != modes.NO_RELATIONS:
        found = "does not reject a single mode"
        if test["q"] <= modes.LEVEL:
            fit = (
                "and two Gaussians fit better" if test["verdict"] == modes.TWO else "though two Gaussians fit no better"
            )
            found = f"rejects a single mode, {fit} than one"
        yield (
            f"within relations and predictions ({test['cells']:.0f} group{'s' if test['cells'] != 1 else ''} of at "
            f"least {FEWEST_FOR_COMPONENTS} questions, {test['examples']:,.0f} in all; {test['left_out']:,.0f} left "
            f"out), the dip test {found} (q = {test['q']:.2g})."
        )
    flips, is_wrong = view.modes.assign(flips=view.modes["mode"] == MODES[0]), view.modes["predicted_wrong"]
    sides = {name: rows for name, rows in (("right", flips[~is_wrong]), ("wrong", flips[is_wrong])) if len(rows)}
    shares = {name: share_of(rows, "flips") for name, rows in sides.items()}
    listed = [f"{_percent(share)} of {len(sides[name]):,} predictions '{name}'" for name, share in shares.items()]
    values, note = [share.value for share in shares.values()], ""
    if len(values) == 2 and max(values) > 3 * min(values) + 0.02:
        note = (
            " The knockout shifts predictions in one direction: examples already on that side cannot flip, and count "
            "as A-anchored whatever they depend on."
        )
    yield f"flipped over seeds: {' and '.join(listed)}.{note}"


def _controls(view: SetAtBest) -> Iterator[str]:
    """Yield how well the mode is predicted, what other interventions do to each, and what its examples are like."""
    aware, margin, logit = (view.baseline(ANY_MODE, name) for name in (tables.AWARE, tables.MARGIN, tables.BY_LOGIT))
    if np.isfinite(aware.value):
        better = _against_zero(
            view.baseline(ANY_MODE, f"{tables.AWARE} − {tables.BY_LOGIT}"),
            "predict the mode better than",
            "predict the mode less well than",
            "do not predict the mode better than",
        )
        yield (
            f"a probe of the unmodified states detects Q-anchored examples with AUC {_interval(aware)}, the truth "
            f"probe's margin −|logit| with {_interval(margin)}, and its logit with |logit| with {_interval(logit)}: "
            f"the states {better} the truth probe's own output."
        )
    swap, random = view.control(SWAP), view.control(RANDOM_SWAP)
    if np.isfinite(swap.value):
        q, a = (view.control(SWAP, mode) for mode in MODES)
        yield (
            f"on right answers, another subject in the question flips {_percent(swap)} of the predictions (Q-anchored: "
            f"{_percent(q)}; A-anchored: {_percent(a)}); other random question tokens flip {_percent(random)}."
        )
    q, a = (view.control(ANSWER_ONLY, mode, "delta_p") for mode in MODES)
    if np.isfinite([q.value, a.value]).any():
        yield (
            f"with the answer alone as input, ΔP is {_points(q)} for Q-anchored and {_points(a)} for A-anchored "
            "examples."
        )
    sides = [view.modes[view.modes["mode"] == mode] for mode in MODES]
    if all(map(len, sides)):
        right = [_percent(share_of(side, "correct")) for side in sides]
        counts = " and ".join(f"{side['example'].nunique():,}" for side in sides)
        text = f"{right[0]} of Q-anchored and {right[1]} of A-anchored answers are right ({counts} answers)"
        if "popularity" in view.modes and view.modes["popularity"].notna().any():
            popular = " and ".join(f"{side['popularity'].median():,.0f}" for side in sides)
            text += f"; the median popularity is {popular}"
        yield f"{text}."


def share_of(rows: pd.DataFrame, column: str) -> Interval:
    """Return the share of rows where the column is true, with its interval over questions."""
    return mean_interval(rows[column].to_numpy(dtype=float), rows["question"])


def _against_zero(difference: Interval, above: str, below: str, neither: str) -> str:
    return above if difference.low > 0 else below if difference.high < 0 else neither


def _interval(found: Interval) -> str:
    return with_interval(*found, ".3f")


def _percent(found: Interval) -> str:
    return with_interval(100 * found.value, 100 * found.low, 100 * found.high, ".0f", " %")


def _points(found: Interval) -> str:
    return with_interval(*found, "+.1f", " points")


class SetAtBest:
    """One question set's numbers at l*, each with its interval; NaN where there is none."""

    def __init__(self, pathways: Traced, dataset: str):
        def own(table: pd.DataFrame) -> pd.DataFrame:
            return table[table["dataset"] == dataset]

        def by(table: pd.DataFrame, *keys: str) -> dict[Any, dict[str, Any]]:
            return own(table).set_index(list(keys)).to_dict("index")  # type: ignore[return-value]

        auc = own(pathways.auc)
        chosen = auc.loc[auc["best"], "layer"]
        self.dataset = dataset
        self.modes = own(pathways.modes)
        self.layer = int(chosen.mode().iloc[0])
        at = int((chosen == self.layer).sum())
        self.layers = f"layer {self.layer}" + (f" in {at} of {len(chosen)} fits" if at < len(chosen) else "")
        self.n_examples = self.modes["example"].nunique()
        self._controls = by(pathways.controls_at_best, "intervention", "group")
        self._curves = by(pathways.curves_at_best, "split_by", "mode")
        self._baselines = by(pathways.baselines, "question", "score")
        self._components = by(pathways.components, "intervention", "population")

    def control(self, intervention: str, group: str = ALL, column: str = "flip_rate") -> Interval:
        """Return the effect of an intervention at l*."""
        return _interval_in(self._controls, (intervention, group), column, f"{column}_")

    def curve(self, split_by: str, mode: str) -> Interval:
        """Return ΔP at l*."""
        return _interval_in(self._curves, (split_by, mode), "delta_p", "delta_p_")

    def members(self, mode: str) -> int:
        """Return the number of examples in a mode at l*."""
        return int(self._curves.get((BEST_LAYER, mode), {"examples": 0})["examples"])

    def baseline(self, question: str, score: str) -> Interval:
        """Return an AUC, or a difference of two AUCs."""
        return _interval_in(self._baselines, (question, score), "value", "")

    @property
    def controlled(self) -> int:
        """Number of examples that have as many other question tokens as exact ones."""
        return int(self._controls.get((RANDOM, ALL), {"examples": 0})["examples"])

    def component(self, population: str) -> Mapping[str, Any]:
        """Return the test of one population after the knockout of E_Q."""
        return self._components.get((EXACT, population), {"verdict": modes.TOO_FEW})

    @property
    def explained_by_spans(self) -> bool:
        """Whether the exact answer's length and place predict the label, and the probe does not clearly beat them."""
        difference = self.baseline(WRONG_ANSWER, f"{PROBE} − {tables.SPANS}")
        return self.baseline(WRONG_ANSWER, tables.SPANS).low > 0.5 and not difference.low > 0

    @property
    def survives(self) -> bool:
        """Whether two modes survive the controls.

        1. Within relations and predictions, the logit changes of E_Q's knockout have two modes (`modes.decided`). All
           changes together can have two peaks merely because relations differ, or because the two predictions start
           from opposite sides.
        2. Predictions flip more often than after a knockout of an equal number of random question tokens, on the rows
           that have enough of them.
        3. The probe predicts better than the exact answer's length and place, if these predict at all.

        It is no criterion that the groups stay apart under another seed's probe: that probe reads the same states, and
        a single population stays apart as well.
        """
        if self.explained_by_spans:
            return False
        exact, random = self.control(EXACT_ON_RANDOM_ROWS), self.control(RANDOM)
        return self.component(WITHIN)["verdict"] == modes.TWO and exact.low > random.high


def _interval_in(rows: Mapping[Any, Mapping[str, Any]], key: tuple[str, str], column: str, ends: str) -> Interval:
    if key not in rows:
        return NOTHING
    return Interval(*(float(rows[key][name]) for name in (column, f"{ends}low", f"{ends}high")))


def summary_of(pathways: Traced) -> pd.DataFrame:
    """Return the main numbers, a row per question set."""
    rows = []
    for dataset in pathways.datasets:
        view = SetAtBest(pathways, dataset)
        aucs = {
            "auc": (WRONG_ANSWER, PROBE),
            "auc_relation": (WRONG_ANSWER, tables.RELATION),
            "auc_relation_answer": (WRONG_ANSWER, tables.RELATION_ANSWER),
            "auc_spans": (WRONG_ANSWER, tables.SPANS),
            "auc_after_knockout": (WRONG_ANSWER, tables.AFTER),
            "auc_mode": (ANY_MODE, tables.AWARE),
            "auc_mode_margin": (ANY_MODE, tables.MARGIN),
        }
        flips = {"flip_rate": EXACT, "flip_rate_same_rows": EXACT_ON_RANDOM_ROWS, "flip_rate_random": RANDOM}
        rows.append(
            {"dataset": dataset, "examples": view.n_examples, "layer": view.layer}
            | {name: view.baseline(*score).value for name, score in aucs.items()}
            | {name: view.control(knockout).value for name, knockout in flips.items()}
            | {"random_control_examples": view.controlled, "components": view.component(WITHIN)["verdict"]}
            | {"two_modes_survive": view.survives}
            | {f"delta_p_{mode[0].lower()}_anchored": view.curve(BEST_LAYER, mode).value for mode in MODES}
        )
    return pd.DataFrame(rows)
