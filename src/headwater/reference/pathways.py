"""The published analysis of two pathways, measured again: ΔP by mode, saliency, refusals, detection of wrong answers.

Luo et al., "Two Pathways to Truthfulness", ACL 2026.

1. The published number of questions of each set (2,000 to train and 2,000 to test) is drawn and answered, and E_Q and
   E_A are located.
2. `hw.trace_pathways` (Figure 2) and `hw.saliency` with its probe (Figure 1); `hw.refusals`.
3. `hw.detect` with every published method (Tables 2 and 3); half of the answers train, half test. The AUC of the gate
   for the modes of the test half is the published "self-awareness"; the ends of its interval are averaged over seeds,
   which makes it wide.

Tables are compared number by number. Figures were published without numbers: `headwater figure` draws them as
published, from the folders `pathways` and `saliency` of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headwater.calls import checked_call
from headwater.detection.detection import Detection, detect
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.loading import hooked_of
from headwater.pathways.attention_saliency import Saliency, saliency
from headwater.pathways.refusal_rates import Refusals, refusals
from headwater.pathways.trace import Pathways, trace_pathways
from headwater.probes.linear import FOLDS
from headwater.questions.answers import AnsweredQuestions, answer
from headwater.questions.asking import Example
from headwater.questions.extract import Extractor
from headwater.questions.labels import CONTAINS, Label
from headwater.questions.sources import Questions, Source, load_questions
from headwater.questions.states import TokenName
from headwater.reference.published import Reproduction, announce_time, published_numbers, step, usual_first
from headwater.runs.analysis import Run, run_or_resume

METHODS = {
    "p_true": "P(True)",
    "logit_mean": "logits mean",
    "logit_min": "logits min",
    "probe": "probing",
    "random_gate": "MoP random gate",
    "vanilla_experts": "MoP vanilla experts",
    "mop": "MoP",
    "pr": "PR",
}
DATASETS = {"popqa": "PopQA", "triviaqa": "TriviaQA", "hotpotqa": "HotpotQA", "nq_open": "NQ"}
PARTS = {
    "answers": AnsweredQuestions,
    "pathways": Pathways,
    "saliency": Saliency,
    "refusals": Refusals,
    "detection": Detection,
}
"""The subfolders of a run, and the class of the result in each."""
QUESTIONS = 4000
PRACTICE = 24, 48
"""Numbers of questions that are timed."""
EACH = 2 * FOLDS
"""Right and wrong answers that a set needs so that probes can be fitted, as in `trace_pathways`."""
NOT_STATED = (
    "The publication does not state its label rule, prompt and exact token in full; its questions are a random draw, "
    "and its exact tokens come from GPT-4o."
)


@checked_call
def reproduce_pathways(
    model: HookedModel | str | Path,
    questions: Source | Sequence[Source],
    *,
    published: str | None = None,
    sample: int | None = QUESTIONS,
    methods: Sequence[str] = tuple(METHODS),
    token: TokenName = "exact_answer_last",
    seeds: int = 3,
    controls: bool = True,
    extractor: str | Extractor | None = None,
    prompt: str | None = None,
    examples: Sequence[Example] | None = None,
    label: Label = CONTAINS,
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> Reproduction:
    """Measure the published pathways, saliency, refusals and detection on a model.

    Args:
        model: a loaded model, or a checkpoint folder or hub name.
        questions: a question file, or several; see `load_questions`.
        published: the published model to compare with, such as "meta-llama/Meta-Llama-3-8B"; by default the one with
            the model's name.
        sample: number of questions of each set; None for all.
        methods: which detectors of `hw.detect`; by default all.
        token: where probes read; see `headwater.pathways.trace_pathways`.
        seeds: number of splits into halves.
        controls: run the controls of `hw.trace_pathways` too.
        extractor: finds the exact words in questions and answers that do not mark them; see `hw.answer`.
        prompt: see `hw.answer`.
        examples: see `hw.answer`.
        label: see `hw.answer`.
        max_new_tokens: see `hw.answer`.
        batch_size: rows in one run.
        out: a folder for the result, with a folder for each part (`PARTS`). Repeating an interrupted call resumes from
            it.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise InputError(f"{unknown[0]!r} was not published. Choose from {', '.join(METHODS)}.")
    model = hooked_of(model)
    drawn = load_questions(questions, sample=sample)  # type: ignore[arg-type]
    reference = published_numbers("pathways")
    name = reference.name_of(model.name, model.shape, published)
    probing: dict[str, Any] = {"token": token, "seeds": seeds, "batch_size": batch_size}
    asking: dict[str, Any] = {"extractor": extractor, "prompt": prompt, "examples": examples, "label": label}
    asking |= {"max_new_tokens": max_new_tokens}
    options = {"published": name, "questions": drawn.table, "methods": list(methods), "controls": controls}
    numbers = reference.models[name] if name else {}

    def detected(run: Run, subset: Questions, *, practice: bool = False) -> Detection:
        """Compute all parts (with `practice` on a few questions, for timing); return the last."""
        answered = step(run, "answers", answer, model, subset, **asking, batch_size=batch_size)
        if practice:
            answered = _for_practice(answered)
        traced = step(run, "pathways", trace_pathways, model, answered, **probing, controls=controls)
        deep = 3 * model.shape.n_layers // 4  # from few answers l* is arbitrary, and no layer above it is run
        step(run, "saliency", saliency, model, answered, traced.probes[deep] if practice else traced.probe)
        step(run, "refusals", refusals, model, answered, traced, batch_size=batch_size)
        return step(run, "detection", detect, model, answered, methods=methods, **probing)

    usual = usual_first(drawn.table["question"].str.len())

    def practise(trial: Run, places: Sequence[int]) -> None:
        detected(trial, Questions(drawn.table.iloc[usual[: len(places)]].reset_index(drop=True)), practice=True)

    def work(run: Run) -> Reproduction:
        announce_time(run, practise, len(drawn), "questions", PRACTICE, len(drawn.datasets))
        detection = detected(run, drawn)
        rows = compare_detection(detection, numbers)
        not_kept = "" if numbers.keys() & {"detection", "mode"} else str(name)
        return reference.reproduction(run, name, rows, [NOT_STATED], not_kept)

    whole = options | asking | probing
    return run_or_resume(Reproduction, "reproduce_pathways", model, whole, work, out=out, progress=progress)


def _for_practice(answered: AnsweredQuestions) -> AnsweredQuestions:
    """Return answers of one set, relabelled so that enough are right and enough wrong for probes to be fitted."""
    rows = answered.table
    rows = rows.iloc[np.resize(np.arange(len(rows)), max(len(rows), 2 * EACH))].reset_index(drop=True)
    names = [f"{text} {place}" for place, text in enumerate(rows["question"])]
    z = rows["z"].to_numpy(copy=True)
    for kind in (0, 1):
        others = np.flatnonzero(z != kind)
        z[others[: max(0, EACH - int((z == kind).sum()))]] = kind
    # Only right answers are run with swapped subjects, so answers relabelled as right must have no subject to swap.
    called = (z == 0) & (rows["z"] != 0)
    nothing, columns = pd.Series([()] * len(rows)), dict[str, Any]()
    for part in ("", "_tokens"):
        subject, other = (rows[f"{name}{part}"].map(tuple) for name in ("subject", "property"))
        columns[f"subject{part}"] = subject.mask(called, nothing)
        columns[f"property{part}"] = other.mask(called, subject + other)
    return replace(answered, table=rows.assign(question=names, z=z, dataset="practice", **columns))


def compare_detection(detection: Detection, numbers: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of every question set: `quantity, dataset, method, published, measured, low, high`."""
    rows: list[tuple[str, str, str, float | None, float, float, float]] = []
    published, modes = numbers.get("detection", {}), numbers.get("mode", {})
    for row in detection.table.to_dict("records"):
        name, method = DATASETS.get(row["dataset"], row["dataset"]), METHODS[row["method"]]
        measured = row["auc"], row["low"], row["high"]
        rows.append(("AUC of wrong answers", name, method, published.get(method, {}).get(name), *measured))
    for dataset, fits in detection.fits.groupby("dataset", sort=False):
        name = DATASETS.get(str(dataset), str(dataset))
        gate = fits[["gate_auc", "gate_low", "gate_high"]].mean().tolist()
        rows.append(("AUC of the mode", name, "gate", modes.get(name), *gate))
    return pd.DataFrame(rows, columns=["quantity", "dataset", "method", "published", "measured", "low", "high"])
