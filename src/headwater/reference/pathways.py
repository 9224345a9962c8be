"""The published detection of wrong answers, measured again: AUC of every method, and of telling the mode.

Luo et al., "Two Pathways to Truthfulness", ACL 2026, Tables 2 and 3.

1. A question file at a time: as many questions as were published (2,000 to train and 2,000 to test) are drawn and
   answered, and E_Q and E_A located.
2. `hw.detect` with every published method; half of the answers train, half test.
3. AUC per question set and method; and that of the gate for the modes of the test half, which the publication calls
   self-awareness. Their intervals are over questions; the ends of the mode's are averaged over seeds, which is wide.
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
from headwater.models.loading import load
from headwater.options import checked_path
from headwater.questions.answers import answer
from headwater.questions.extract import Extractor
from headwater.questions.sources import Source, load_questions
from headwater.reference.published import Reproduction, compared, no_numbers, not_held, published_numbers
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest_of_file

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
    token: str = "exact_answer_last",
    seeds: int = 3,
    extractor: str | Extractor | None = None,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> Reproduction:
    """Measure the published numbers of detection on a model.

    Args:
        model: a loaded model, or a checkpoint folder or hub name.
        questions: a question file, or several; see `load_questions`.
        published: the published model to compare with, as "meta-llama/Meta-Llama-3-8B"; by default the one of the
            model's name.
        sample: how many questions of each set; None for all.
        methods: which detectors of `hw.detect`; by default all.
        token: where probes read; see `headwater.pathways.trace_pathways`.
        seeds: how many splits into halves.
        extractor: names the exact words of questions and answers that say nothing of them; see `hw.answer`.
        batch_size: rows in one run.
        progress: show progress bars.
        out: a folder for the result. An interrupted call, repeated, goes on from there.

    Raises:
        InputError: no such published model, or one of another shape; or the questions cannot be used.
    """
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise InputError(f"{unknown[0]!r} was not published: the methods are {', '.join(METHODS)}.")
    sources = [questions] if isinstance(questions, str | Path | pd.DataFrame) else list(questions)
    model = model if isinstance(model, HookedModel) else load(model)
    reference = published_numbers("pathways")
    name = reference.name_of(model.name, model.shape, published)
    options = {"sample": sample, "methods": list(methods), "token": token, "seeds": seeds}
    named = {"published": name, "questions": [_content(source) for source in sources], "extractor": extractor}

    def work(run: Run) -> Reproduction:
        numbers = reference.models[name] if name else {}
        shared: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
        fitting: dict[str, Any] = {"methods": methods, "token": token, "seeds": seeds}
        pieces = []
        for number, source in enumerate(sources):
            drawn, below = load_questions(source, sample=sample), f"set_{number}"
            answered = answer(model, drawn, extractor=extractor, out=run.below(f"{below}/answers"), **shared)
            detection = detect(model, answered, out=run.below(f"{below}/detection"), **fitting, **shared)
            pieces.append(compare_detection(detection, numbers))
        unknown = [not_held(name)] if name and not numbers.keys() & {"detection", "mode"} else []
        notes = [*unknown, NOT_STATED] if name else [no_numbers(model.name, reference), NOT_STATED]
        table = compared(pd.concat(pieces, ignore_index=True))
        return Reproduction(table, name, reference.source, notes, run.record)

    return run_or_resume(Reproduction, "reproduce_pathways", model, options | named, work, out=out, progress=progress)


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


def _content(source: Source) -> object:
    """Return what stands for a question set in the record of a run: its rows, or the hash of its file."""
    if isinstance(source, pd.DataFrame):
        return source
    path = checked_path("questions", source)
    return {"name": str(source), "file": digest_of_file(path) if path.is_file() else None}
