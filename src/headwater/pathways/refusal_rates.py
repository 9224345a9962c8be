"""How often does a model, when allowed, decline questions whose first answers were Q-anchored or A-anchored?

Luo et al., "Two Pathways to Truthfulness", ACL 2026, report more right answers and fewer "I don't know" in Q-anchored
examples.

1. The questions of a trace are asked again with a prompt that allows "I don't know"; an answer that declines
   (`questions.labels.is_refusal`) is a refusal. An answer that had not ended at the token limit is left out.
2. The mode of an example is the mode of its first answer at l*: by the probe's own flips ("best layer"), and by the
   flips of another seed's probe ("cross-fitted", if any).
3. The rate of refusals by mode, and the difference A-anchored less Q-anchored, averaged over seeds; intervals resample
   questions.
4. Controls: the difference among examples of similar margin |logit| (fifths of a question set and seed), since
   predictions of an unsure probe flip easily; and among right and among wrong answers alone, since modes differ in
   accuracy. Each is the mean over strata, weighted by the smaller group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.pathways.modes import BEST_LAYER, CROSSED, MODES
from headwater.pathways.trace import Pathways
from headwater.questions.answers import AnsweredQuestions, check_answered
from headwater.questions.asking import CHAT, SLOT, answer_texts, limit_of, question_frame
from headwater.questions.labels import is_refusal
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import describe
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text, whole_summary
from headwater.stats.resample import NOTHING, Bootstrap, interval

ALLOWED = 'If you do not know the answer, say "I don\'t know".'
PROMPT = f"{ALLOWED}\nQ: {SLOT}\nA:"
COLUMNS = {BEST_LAYER: "mode", CROSSED: "crossed_mode"}
ALL, MARGIN, RIGHT, WRONG = CONTROLS = ("all answers", "same margin", "right answers", "wrong answers")
RATES = ("q_refused", "a_refused", "difference")
FIFTHS = 5


@dataclass(frozen=True, eq=False, repr=False)
class Refusals(Result):
    """How often a model declines, by the mode of its first answer."""

    table: pd.DataFrame
    """A row per question set, way to split the modes (`split_by`) and `control`: `answers` (with an answer that ended),
    `q_refused, a_refused` (shares) and `difference` (A-anchored less Q-anchored), each with `_low, _high` (95 %)."""
    replies: pd.DataFrame
    """A row per example: `dataset, example, question, reply, refused, ended`."""
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return the rows of all answers: rates by mode and their difference, with intervals."""
        return self.table[self.table["control"] == ALL].drop(columns="control").reset_index(drop=True)

    def report(self) -> list[str]:
        """Return how often each mode is declined, and whether margin and accuracy explain the difference."""
        lines = [] if len(self.table) else ["No reply ended within max_new_tokens, so nothing can be compared."]
        for row in whole_summary(self).to_dict("records"):
            where = f"{row['dataset']}, modes by {row['split_by']}"
            if not math.isfinite(row["difference"]):
                lines.append(f"{where}: one mode has no answers, so nothing can be compared.")
                continue
            q, a = (interval_text(row, name, ".3f") for name in ("q_refused", "a_refused"))
            lines.append(
                f"{where}: on {int(row['answers']):,} questions asked again, the refusal rate is {q} for Q-anchored "
                f"and {a} for A-anchored answers."
            )
            here = self.table[(self.table[["dataset", "split_by"]] == [row["dataset"], row["split_by"]]).all(axis=1)]
            measured = here[here["difference"].notna()].to_dict("records")
            controlled = [f"{one['control']} {interval_text(one, 'difference', '.3f')}" for one in measured]
            lines.append(f"{where}: refusal rate, A-anchored minus Q-anchored: {'; '.join(controlled)}.")
        return lines


@checked_call
def refusals(
    model: HookedModel,
    answered: AnsweredQuestions,
    pathways: Pathways,
    *,
    prompt: str | None = None,
    max_new_tokens: int | None = None,
    batch_size: int = 64,
    progress: bool = True,
    out: str | Path | None = None,
) -> Refusals:
    """Ask the questions of a trace again, allow the model to decline, and count refusals by mode.

    Args:
        model: the model that answered.
        answered: what `hw.answer` returned.
        pathways: what `hw.trace_pathways` returned for these answers.
        prompt: a text with one `{question}` that allows a refusal. Default: 'If you do not know the answer, say "I
            don't know".' before the question, in the chat template where the tokenizer has one.
        max_new_tokens: an answer that has not ended after this many tokens is left out.
        batch_size: prompts in one run.
    """
    check_answered(model, answered)
    if pathways.run.options["answered"] != describe(answered):
        raise InputError("pathways was traced on other answers. Pass the answers that it was traced on.")
    chat = prompt is None and bool(getattr(model.tokenizer, "chat_template", None))
    prompts: Any = [{"role": "user", "content": f"{ALLOWED}\n{SLOT}"}] if chat else PROMPT if prompt is None else prompt
    frame = question_frame(model, CHAT if chat else "raw", prompts)
    limit = limit_of(model, frame, max_new_tokens)
    options = {"answered": answered, "pathways": pathways, "prompt": frame.asking(SLOT), "max_new_tokens": limit}

    def work(run: Run) -> Refusals:
        rows = answered.table.iloc[sorted(pathways.modes["example"].unique())]
        # Each question is asked once, even if it was answered several times: greedy decoding would repeat itself.
        questions = list(dict.fromkeys(rows["question"]))
        prompts = [frame.asking(question) for question in questions]
        texts = answer_texts(run, model, prompts, limit, "line", batch_size)
        answers = [texts.get(frame.asking(question), ("", False)) for question in rows["question"]]
        replies = pd.DataFrame(
            {
                "dataset": rows["dataset"].to_numpy(),
                "example": rows.index.to_numpy(),
                "question": rows["question"].to_numpy(),
                "reply": [text for text, _ in answers],
                "refused": [is_refusal(text) for text, _ in answers],
                "ended": [ended for _, ended in answers],
            }
        )
        return Refusals(rates(pathways.modes, replies), replies, run.record)

    return run_or_resume(Refusals, "refusals", model, options, work, out=out, progress=progress)


def rates(modes: pd.DataFrame, replies: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `Refusals.table`, from `Pathways.modes` and `Refusals.replies`."""
    ended = replies[replies["ended"]][["dataset", "example", "refused"]]
    joined = modes.merge(ended, on=["dataset", "example"])
    rows = []
    for dataset, (split_by, column) in product(replies["dataset"].unique(), COLUMNS.items()):
        subset = joined[joined["dataset"] == dataset]
        if not subset[column].isna().all():
            named = {"dataset": dataset, "split_by": split_by}
            rows += [named | {"control": control} | _row(subset, column, control) for control in CONTROLS]
    numbers = [f"{name}{end}" for name in RATES for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["dataset", "split_by", "control", "answers", *numbers])


def _row(subset: pd.DataFrame, column: str, control: str) -> dict[str, int | float]:
    """Compare the modes on the rows of one control: the rate of each, and the mean difference within strata."""
    if control in (RIGHT, WRONG):
        subset = subset[subset["correct"] == (control == RIGHT)]
    strata = np.zeros(len(subset), dtype=np.int64)
    if control == MARGIN:
        # By seed, since the logits of each probe have a different scale.
        share = subset.groupby("seed")["margin"].rank(pct=True).to_numpy()
        # The largest margin has rank 1.0, which would start a sixth fifth.
        strata = np.minimum((share * FIFTHS).astype(np.int64), FIFTHS - 1)
    is_q, refused = (subset[column] == MODES[0]).to_numpy(), subset["refused"].to_numpy(dtype=float)
    row: dict[str, int | float] = {"answers": subset["example"].nunique()}
    q = a = difference = NOTHING
    if is_q.any() and not is_q.all():
        draws = Bootstrap.of(subset["question"])
        q, a = (interval(draws.mean(np.where(mode, refused, np.nan))) for mode in (is_q, ~is_q))
        difference = interval(draws.difference_within(strata, refused, is_q, ~is_q))
    for name, estimate in zip(RATES, (q, a, difference), strict=True):
        row |= estimate.named(name)
    return row
