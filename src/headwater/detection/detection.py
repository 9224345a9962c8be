"""Hallucination detection: how well do scores of an answer separate wrong answers from right ones?

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §5 and Table 3. For every question set and seed:

1. Half of the answers train, half test; a question text is never on both sides (published: 2,000 and 2,000).
2. Probes are fitted on the training half, and l* is the layer that does best on a fifth of it.
3. Modes of the training answers: E_Q is knocked out, and the answer is Q-anchored if the probe's prediction at l*
   flips. By default the probe that decides this was fitted on other answers (`cross_fit`; published: on the same).
4. The gate predicts the mode from the ordinary state at l*; the experts are probes trained on the answers of one mode.
   All are logistic regressions on the standardized state. `reweighting` trains PR on training answers weighted by a
   gate that was also fitted on other answers.
5. AUC on the test half, averaged over seeds; intervals resample questions, each with all its answers and seeds. `gain`
   is the AUC minus the AUC of the single probe on the same resamples.

The methods are described in `methods`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headwater.calls import checked_call
from headwater.detection.methods import (
    COUNTS,
    METHODS,
    NAMES,
    AnswerSet,
    Detector,
    DetectorSetup,
    relations_of,
)
from headwater.detection.reweighting import Reweighting
from headwater.models.hooked import HookedModel
from headwater.options import checked_layer, checked_name, checked_names
from headwater.patching.edge_knockout import VariantName
from headwater.pathways.effects import usable_sets
from headwater.pathways.tables import span_logits
from headwater.questions.answers import AnsweredQuestions, check_answered
from headwater.questions.sources import HasDatasets
from headwater.questions.states import ProbeSiteName, TokenName
from headwater.questions.words import span_shapes
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text
from headwater.stats.discrimination import against_chance, auc
from headwater.stats.resample import Bootstrap, percentile_interval

ONE_KIND = "in some mode all training answers are right, or all wrong: that expert is a constant"


@dataclass(frozen=True, eq=False, repr=False)
class Detection(HasDatasets, Result):
    """How well each method detects wrong answers, and the detectors fitted on the first seed."""

    table: pd.DataFrame
    """A row per question set and method: `dataset, method, auc, low, high` (95 %), `gain, gain_low, gain_high` over the
    single probe (NaN without one), `answers` and `wrong` of the test halves (mean over seeds), and a `note`."""
    scores: pd.DataFrame
    """A row per test answer and seed: `dataset, seed, example` (the row of the answers' table), `z`, and a column of
    scores per method, higher = more likely wrong."""
    fits: pd.DataFrame
    """A row per question set and seed: `dataset, seed, layer` (l*); answers of the training half, `train` in all and by
    mode and label `q_right, q_wrong, a_right, a_wrong`; `gate_auc, gate_low, gate_high`, of the gate for the modes of
    the test half, with the 95 % interval over its questions."""
    weight: Float[Tensor, "dataset classifier d_model"]
    bias: Float[Tensor, "dataset classifier"]
    alpha: Float[Tensor, "dataset pathway layer head"]
    """α of PR; NaN beyond l*, and where PR was not trained."""
    question_weight: Float[Tensor, "dataset feature"]
    relations: list[str]
    """Relations that `question` knows."""
    dropped: pd.DataFrame
    """`dataset, cause, answers`: question sets that have too few right or wrong answers."""
    run: RunRecord

    def detector(self, dataset: str | None = None) -> Detector:
        """Return the detector fitted on a question set (with the first seed), which scores new answers.

        Args:
            dataset: the question set; optional if there is only one.
        """
        names = self.datasets
        name = checked_name("dataset", names[0] if dataset is None and len(names) == 1 else dataset, names)
        place = names.index(name)
        layer = int(self.fits.loc[self.fits["dataset"] == name, "layer"].iloc[0])
        usable = self.table[(self.table["dataset"] == name) & self.table["auc"].notna()]
        return Detector(
            dataset=name,
            fingerprint=self.run.fingerprint,
            site=self.run.options["site"],
            token=self.run.options["token"],
            layer=layer,
            weight=self.weight[place],
            bias=self.bias[place],
            alpha=self.alpha[place][:, : layer + 1],
            question_weight=self.question_weight[place],
            relations=tuple(self.relations),
            methods=tuple(usable["method"]),
        )

    def summary(self) -> pd.DataFrame:
        """Return a row per question set and method: AUC and gain over the single probe, each with its interval.

        `dataset, method, answers, wrong, auc, low, high, gain, gain_low, gain_high`.
        """
        measures = ["auc", "low", "high", "gain", "gain_low", "gain_high"]
        return self.table[["dataset", "method", "answers", "wrong", *measures]].reset_index(drop=True)

    def report(self) -> list[str]:
        """Return one paragraph per question set, in plain sentences computed from the numbers."""
        left_out = [f"{row['dataset']} was left out: {row['cause']}." for row in self.dropped.to_dict("records")]
        return left_out + [paragraph(str(name), part) for name, part in self.table.groupby("dataset", sort=False)]


@checked_call
def detect(
    model: HookedModel,
    answered: AnsweredQuestions,
    *,
    methods: Sequence[str] = METHODS,
    site: ProbeSiteName = "mlp_out",
    token: TokenName = "exact_answer_last",
    layer: int | None = None,
    variant: VariantName = "mask",
    cross_fit: bool = True,
    reweighting: Reweighting | None = None,
    seeds: int = 3,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> Detection:
    """Fit detectors of wrong answers on half of each question set, and measure them on the other half.

    Higher scores mean that an answer is more likely wrong; detectors are compared by AUC (Luo et al., ACL 2026, §5).

    Args:
        model: the model that answered.
        answered: what `hw.answer` returned; every question set is fitted and measured separately.
        methods: which detectors, by default all: `question, p_true, logit_mean, logit_min, probe, random_gate,
            vanilla_experts, mop, pr` (`headwater.detection.methods`).
        site: what probes read: `mlp_out`, `attn_out` or `resid_post`.
        token: where probes read; see `headwater.pathways.trace_pathways`.
        layer: l*; default: the layer whose probe does best on a fifth of the training half.
        variant: the knockout that determines the modes, `mask` (before the softmax) or `zero` (after it).
        cross_fit: whether the mode of a training answer, and the gate used to train PR on it, come from probes fitted
            on other answers.
        reweighting: how PR is trained.
        seeds: number of splits into halves, at most 1,000.
        batch_size: answers in one run.

    Example:
        >>> import headwater as hw
        >>> model = hw.load()
        >>> answered = hw.answer(model, hw.load_questions("natural", sample=80), progress=False)
        >>> detection = hw.detect(model, answered, methods=["logit_min", "probe"], seeds=1, progress=False)
        >>> detection.table["method"].tolist()
        ['logit_min', 'probe']
        >>> detection.detector("natural").score(model, answered, progress=False).columns.tolist()
        ['dataset', 'example', 'logit_min', 'probe']
    """
    methods = tuple(checked_names("methods", methods, METHODS))
    check_answered(model, answered)
    layer = None if layer is None else checked_layer("layer", layer, model.shape.n_layers)
    reweighting = Reweighting() if reweighting is None else reweighting
    reweighting.check()
    recipe = DetectorSetup(site, token, variant, "after", batch_size, methods, layer, cross_fit, reweighting)
    gate = "cross-fitted" if recipe.cross_fit else "fitted on the same"
    options = {"answered": answered, **asdict(recipe), "seeds": seeds, "gate": gate}

    def work(run: Run) -> Detection:
        usable, dropped = usable_sets(answered, seeds)
        parts = []
        with run.bar("Detecting", "fit", len(usable) * seeds) as bar:
            for number, name in enumerate(usable):
                # A set's states, which take gigabytes for a large model, are dropped with it before the next set.
                one = AnswerSet.of(model, answered, name, recipe)
                pieces = list(run.part(f"{number:02d}").pieces("fit", range(seeds), one.fit, bar))
                parts.append((*_tables(one, pieces, list(recipe.methods)), pieces[0]))
        tables, scores, fits, first = zip(*parts, strict=True)
        # l* differs between sets; beyond it α is NaN.
        pad, n_layers = torch.nn.functional.pad, model.shape.n_layers
        alphas = [pad(p["alpha"], (0, 0, 0, n_layers - p["alpha"].shape[1]), value=torch.nan) for p in first]
        return Detection(
            table=pd.concat(tables, ignore_index=True),
            scores=pd.concat(scores, ignore_index=True),
            fits=pd.concat(fits, ignore_index=True),
            **{name: torch.stack([piece[name] for piece in first]) for name in ("weight", "bias", "question_weight")},
            alpha=torch.stack(alphas),
            relations=list(relations_of(answered.table)),
            dropped=dropped.rename(columns={"examples": "answers"}),
            run=run.record,
        )

    return run_or_resume(Detection, "detect", model, options, work, out=out, progress=progress)


def _tables(
    answer_set: AnswerSet, pieces: Sequence[Mapping[str, Tensor]], methods: Sequence[str]
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return the rows of `table`, `scores` and `fits` of a question set, from the results of `fit` for each seed."""
    z, table = answer_set.answered.z, answer_set.answered.table
    scores, fits = [], []
    for seed, piece in enumerate(pieces):
        named, rows = {"dataset": answer_set.dataset, "seed": seed}, piece["test"].numpy()
        of_test = {"example": rows, "z": z[np.searchsorted(answer_set.rows, rows)]}
        scores.append(pd.DataFrame(named | of_test | dict(zip(methods, piece["scores"].numpy(), strict=True))))
        counts = dict(zip(COUNTS, piece["counts"].tolist(), strict=True))
        gate = dict(zip(("gate_auc", "gate_low", "gate_high"), piece["gate_auc"].tolist(), strict=True))
        fits.append({**named, "layer": int(piece["layer"]), **counts, **gate})
    scored, questions = pd.concat(scores), pd.Series(table["question"].to_numpy(), index=answer_set.rows)
    one_kind = any(bool((piece["counts"][1:] == 0).any()) for piece in pieces)
    notes = {"mop": ONE_KIND, "random_gate": ONE_KIND} if one_kind else {}
    notes |= answer_set.notes() | _span_note(answer_set, scored, questions)
    return evaluate(scored, questions, methods, notes), scored, pd.DataFrame(fits)


def _span_note(answer_set: AnswerSet, scored: pd.DataFrame, questions: pd.Series) -> dict[str, str]:
    """Return a note on the probe if length and place of the exact answer alone are not clearly worse than it."""
    if "probe" not in scored:
        return {}
    places, seeds = np.searchsorted(answer_set.rows, scored["example"]), scored["seed"].to_numpy()
    half = np.zeros((seeds.max() + 1, len(answer_set.rows)), dtype=np.int64)
    # The halves of the detectors, so that spans are fitted on the same answers as the probe.
    half[seeds, places] = 1
    alone = span_logits(span_shapes(answer_set.answered.table), answer_set.answered.z, half)[seeds, places]
    row = evaluate(scored.assign(spans=alone), questions, ["probe", "spans"], {}).iloc[1]
    if not (row["low"] > 0.5 and row["gain_high"] >= 0):
        return {}
    return {
        "probe": f"the length and position of the exact answer alone give AUC {interval_text(row, 'auc', '.3f')}: this "
        "is no evidence that the states encode which answer is wrong"
    }


def evaluate(
    scores: pd.DataFrame, questions: pd.Series, methods: Sequence[str], notes: Mapping[str, str]
) -> pd.DataFrame:
    """Return rows of `Detection.table` from a set's rows of `Detection.scores`, and the questions of all examples."""
    draws = Bootstrap.of(questions)
    places = pd.Series(np.arange(len(questions)), index=questions.index)
    seeds = [part for _, part in scores.groupby("seed")]

    def aucs(method: str) -> NDArray[np.float64]:
        """Return the AUC in every resample, averaged over seeds."""
        per_seed = [
            auc(
                part[method].to_numpy(),
                part["z"].to_numpy(),
                counts=draws.per_example(places.loc[part["example"]].to_numpy()),
            )
            for part in seeds
            if part[method].notna().all()
        ]
        return np.mean(per_seed, axis=0) if per_seed else np.full(len(draws.counts), np.nan)

    drawn = np.stack([aucs(method) for method in methods], axis=1)
    probe = drawn[:, [methods.index("probe")]] if "probe" in methods else np.full((len(drawn), 1), np.nan)
    columns = dict(zip(("auc", "low", "high"), (drawn[0], *percentile_interval(drawn)), strict=True))
    gain = drawn - probe
    columns |= dict(zip(("gain", "gain_low", "gain_high"), (gain[0], *percentile_interval(gain)), strict=True))
    sizes = {"answers": len(scores) / len(seeds), "wrong": scores["z"].sum() / len(seeds)}
    named = {"dataset": scores["dataset"].iloc[0], "method": methods}
    return pd.DataFrame(named | columns | sizes | {"note": [notes.get(method, "") for method in methods]})


def paragraph(dataset: str, table: pd.DataFrame) -> str:
    """Say which method is best on one question set, and what the modes add to a single probe."""
    measured = table[table["auc"].notna()].sort_values("auc", ascending=False)
    if measured.empty:
        return f"{dataset}: no method could be measured."
    best = measured.iloc[0]
    chance = against_chance(best["low"], best["high"])
    many = f"of {len(measured)} methods, " if len(measured) > 1 else ""
    sentences = [
        f"{dataset}: {best['wrong']:,.0f} of {best['answers']:,.0f} test answers are wrong; {many}"
        f"{NAMES[best['method']]} has the highest AUC, {interval_text(best, 'auc', '.3f')}"
        f"{f', {chance}' if chance else ''}."
    ]
    rows: dict[str, Any] = {row["method"]: row for row in measured.to_dict("records")}
    # Only the first letter changes case, so that abbreviations at the start of a sentence stay in capitals.
    sentences += [
        f"{NAMES[name][:1].upper()}{NAMES[name][1:]} {_verdict(rows[name])} the single probe: AUC difference "
        f"{interval_text(rows[name], 'gain', '+.3f')}."
        for name in ("mop", "pr")
        if name in rows and np.isfinite(rows[name]["gain"])
    ]
    if "question" in rows and "probe" in rows:
        alone = rows["question"]
        sentences.append(
            f"The baseline of relation and popularity has AUC {interval_text(alone, 'auc', '.3f')} and "
            f"{_verdict(alone)} the probe: AUC difference {interval_text(alone, 'gain', '+.3f')}."
        )
    notes = table[table["note"] != ""]
    sentences += [f"Note on {NAMES[row['method']]}: {row['note'].rstrip('.')}." for row in notes.to_dict("records")]
    return " ".join(sentences)


def _verdict(row: Mapping[str, Any]) -> str:
    if row["gain_low"] > 0:
        return "does better than"
    return "does worse than" if row["gain_high"] < 0 else "is indistinguishable from"
