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
from pathlib import Path
from typing import Any

import pandas as pd

from headwater.calls import checked_call
from headwater.detection.detection import Detection, detect
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.loading import hooked_of
from headwater.pathways.attention_saliency import Saliency, saliency
from headwater.pathways.refusal_rates import Refusals, refusals
from headwater.pathways.trace import Pathways, trace_pathways
from headwater.questions.answers import AnsweredQuestions, answer
from headwater.questions.asking import Example
from headwater.questions.extract import Extractor
from headwater.questions.labels import CONTAINS, Label
from headwater.questions.sources import Source, load_questions
from headwater.questions.states import TokenName
from headwater.reference.published import Reproduction, published_numbers, step
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

    def work(run: Run) -> Reproduction:
        answered = step(run, "answers", answer, model, drawn, **asking, batch_size=batch_size)
        traced = step(run, "pathways", trace_pathways, model, answered, **probing, controls=controls)
        step(run, "saliency", saliency, model, answered, traced.probe)
        step(run, "refusals", refusals, model, answered, traced, batch_size=batch_size)
        detection = step(run, "detection", detect, model, answered, methods=methods, **probing)
        rows = compare_detection(detection, numbers)
        not_kept = "" if numbers.keys() & {"detection", "mode"} else str(name)
        return reference.reproduction(run, name, rows, [NOT_STATED], not_kept)

    whole = options | asking | probing
    return run_or_resume(Reproduction, "reproduce_pathways", model, whole, work, out=out, progress=progress)


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
