"""What lower precision changes: every analysis on the embedded model in bfloat16 and float16, beside float32.

    python tools/numerics.py            writes docs/numerics.md

Each analysis runs on the same inputs in each dtype; of its numbers the largest and the median absolute difference to
float32 are listed, the rank correlation, and of what it decides (a label, an answer, a mode) the share that agrees.
float32 runs twice: the second run must give the same bytes.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from tqdm import tqdm

import headwater as hw
from headwater.runs.record import library_versions

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"
QUESTIONS = 120
DTYPES = ("float32", "float32", "bfloat16", "float16")
Found = tuple[np.ndarray, np.ndarray]
"""The numbers of an analysis, and what it decided."""


@dataclass(frozen=True)
class Inputs:
    """What every dtype is given: questions, the float32 model's answers to them, and its probe."""

    questions: Any
    answered: Any
    probe: Any

    def answers_for(self, model: Any) -> Any:
        """The same answers, as if this model had given them: what is compared is how they are read."""
        return replace(self.answered, run=replace(self.answered.run, fingerprint=model.fingerprint))


def heads(model: Any, _: Inputs) -> Found:
    """Score heads on twelve relations."""
    chosen = [r for r in hw.load_relations() if r.category in ("linguistic", "knowledge")][:12]
    found = hw.classify_heads(model, relations=chosen, progress=False)
    return found.table["score"].to_numpy(), found.categories["label"].to_numpy(dtype=str)


def answers(model: Any, given: Inputs) -> Found:
    """Answer the questions: a row for each, empty where the model declined or its answer did not end."""
    table = hw.answer(model, given.questions, progress=False).table
    found = table.set_index("question").reindex(given.questions.table["question"])
    first = np.array([row[0] if isinstance(row, list | tuple | np.ndarray) else np.nan for row in found["log_probs"]])
    return first, found["answer"].fillna("").to_numpy(dtype=str)


def likelihood(model: Any, given: Inputs) -> Found:
    """Score the questions as texts."""
    stats = hw.token_statistics(model, list(given.questions.table["question"]), progress=False)
    wide = hw.memorization_scores(stats, k=(0.2,)).wide()
    return wide["min_k_0.2"].to_numpy(), (wide["min_k_0.2"] > wide["min_k_0.2"].median()).to_numpy()


def sweep(model: Any, _: Inputs) -> Found:
    """Patch one pair everywhere."""
    pairs = ("The capital of France is", "The capital of Italy is")
    metric = hw.logit_difference(" Paris", " Rome")
    found = hw.patch(model, *pairs, sites=["resid_pre", "z"], metric=metric, progress=False).table
    return found["effect"].to_numpy(), np.array([found["effect"].abs().idxmax()])


def pathways(model: Any, given: Inputs) -> Found:
    """Fit probes and sever E_Q."""
    found = hw.trace_pathways(
        model, given.answers_for(model), token="before_answer", seeds=1, controls=False, progress=False
    ).table.sort_values(["dataset", "example", "layer"])
    return found["delta_p"].to_numpy(), found["mode"].to_numpy(dtype=str)


def saliency(model: Any, given: Inputs) -> Found:
    """Follow the gradient of one probe."""
    found = hw.saliency(model, given.answers_for(model), given.probe, target="logit", progress=False).of("logit")
    numbers = found["saliency_all"].to_numpy()
    return numbers, numbers > np.nanmedian(numbers)


ANALYSES: dict[str, tuple[str, str, Callable[[Any, Inputs], Found]]] = {
    "classify_heads": ("relation scores (0 to 1)", "label of a head", heads),
    "answer": ("log p of the first token, nats", "the answer, letter by letter", answers),
    "memorization_scores": ("Min-K% at 20 %, nats", "above or below the median", likelihood),
    "patch": ("effect on the logit difference", "strongest cell", sweep),
    "trace_pathways": ("ΔP, percentage points", "mode, per layer and example", pathways),
    "saliency": ("S(E_Q→*)", "above or below the median", saliency),
}


def measure() -> list[dict[str, Any]]:
    """Run every analysis in every dtype."""
    plain = hw.load(device="cpu")
    questions = hw.load_questions("properties", sample=QUESTIONS)
    answered = hw.answer(plain, questions, progress=False)
    probe = hw.trace_pathways(plain, answered, token="before_answer", seeds=1, controls=False, progress=False).probe
    given, rows = Inputs(questions, answered, probe), []
    for name, (what, decision, run) in tqdm(ANALYSES.items()):
        found = [run(hw.load(device="cpu", dtype=dtype), given) for dtype in DTYPES]
        base = found[0]
        again = all(digest(a) == digest(b) for a, b in zip(base, found[1], strict=True))
        for dtype, (numbers, decided) in zip(DTYPES[2:], found[2:], strict=True):
            row = {"analysis": f"`{name}`", "dtype": dtype, "number": what, "decides": decision, "repeats": again}
            rows.append(row | compare(base, (numbers, decided)))
    return rows


def compare(base: Found, other: Found) -> dict[str, Any]:
    """Say how far two runs lie apart."""
    same_rows = len(base[0]) == len(other[0])
    if not same_rows:
        return {"median": "-", "largest": "-", "rank": "-", "agree": f"{len(other[0])} rows instead of {len(base[0])}"}
    both = np.isfinite(base[0]) & np.isfinite(other[0])
    gap = np.abs(base[0] - other[0])[both]
    agree = float(np.mean(base[1] == other[1])) if len(base[1]) == len(other[1]) else float("nan")
    rank = spearmanr(base[0][both], other[0][both]).statistic
    return {
        "median": f"{np.median(gap):.2g}",
        "largest": f"{gap.max():.2g}",
        "rank": f"{rank:.4f}",
        "agree": f"{agree:.1%}",
    }


def digest(values: np.ndarray) -> str:
    """Hash an array."""
    content = values.tobytes() if values.dtype.kind != "O" else repr(values.tolist()).encode()
    return hashlib.sha256(content).hexdigest()


def main() -> None:
    """Measure, and write the table into the page."""
    torch.set_num_threads(1)
    rows = measure()
    table = pd.DataFrame(rows)
    columns = ["analysis", "number", "dtype", "median", "largest", "rank", "decides", "agree"]
    head = [
        "analysis",
        "its number",
        "dtype",
        "median diff.",
        "largest diff.",
        "rank corr.",
        "what it decides",
        "agrees",
    ]
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(str(row[name]) for name in columns) for row in table[columns].to_dict("records")]
    repeated = sorted({row["analysis"] for row in rows if row["repeats"]})
    differed = sorted({row["analysis"] for row in rows if not row["repeats"]})
    versions = ", ".join(f"{name} {version}" for name, version in library_versions().items() if name != "headwater")
    about = f"Measured on {platform.machine()}, one thread, {versions}; {QUESTIONS} questions of the set `properties`."
    end = f"Repeated in float32 with the same bytes: {', '.join(repeated) or 'none'}."
    end += f" Not the same bytes: {', '.join(differed)}." if differed else ""
    start, stop = "<!-- measured -->", "<!-- end -->"
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(start)[0], page.split(stop)[1]
    block = "\n".join([start, about, "", *(f"| {line} |" for line in lines), "", end, stop])
    PAGE.write_text(before + block + after, encoding="utf-8")


if __name__ == "__main__":
    main()
