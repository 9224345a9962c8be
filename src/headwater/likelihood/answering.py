"""What is known of the answers to a depth graph: a model's answers, and their scores from 1 to 5.

1. Answers are those in the data, or the model's own: greedy, to the end of the first line in a raw context, to the end
   of the message in a chat.
2. Scores are those in the data, a judge's (any function), or by label match: 5 where an accepted answer is in the
   answer (`headwater.questions.labels`), else 1. Label match needs short accepted answers.
3. An answer of the model's own that had not ended at the token limit is not judged: it has no score, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pandas as pd

from headwater.errors import InputError
from headwater.likelihood.graph import DepthGraph
from headwater.models.tokens import encode
from headwater.options import checked_name
from headwater.questions.asking import Frame, ask, plain_text
from headwater.questions.judge import LABEL, Judge, check_judge, label_score, scores_of
from headwater.runs.analysis import Run

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

DATA, MODEL = SOURCES = ("data", "model")
SHORT = 10
"""Words up to which accepted answers (their median) are short enough for label match."""


class AnsweringOptions(NamedTuple):
    """How a model is asked for its own answers."""

    max_new_tokens: int
    until: Literal["line", "end"]
    batch_size: int


class Own(NamedTuple):
    """An answer of the model's own."""

    text: str
    ended: bool
    """By itself, not at the token limit."""


class AnswerSources(NamedTuple):
    """Where answers and scores come from."""

    answers: str
    """ "data", "model", or "" for none."""
    scores: str
    """ "data", "label", "judge", or "" for none."""


def plan_of(graph: DepthGraph, answers: str | None, judge: Judge, span: str, alone: bool = True) -> AnswerSources:
    """Decide where answers and scores come from.

    Args:
        graph: what is asked.
        answers: "data", "model", or None for the first that there is.
        judge: see `hw.memorization`.
        span: what is scored.
        alone: questions are asked alone. Answers in the data are taken for such: after other questions they count only
            where "data" is requested.
    """
    if answers is not None:
        checked_name("answers", answers, SOURCES)
    check_judge(judge)
    usable = alone or answers == DATA
    has_answers = usable and graph.table["model_answer"].notna().any()
    has_scores = usable and graph.table["score"].notna().any()
    if answers == DATA and not has_answers:
        raise InputError("answers='data': the graph has no answers of a model; give answers='model'.")
    if judge is None and has_scores and answers != MODEL:
        scores = DATA
    else:
        # Long reference answers are never in a model's own word for word: label match would call all of them wrong.
        short = graph.table["answers"].map(lambda accepted: len(accepted[0].split())).median() <= SHORT
        scores = "judge" if callable(judge) else LABEL if judge == LABEL or short else ""
    if scores in (LABEL, "judge") or span == "model_answer" or answers == MODEL:
        return AnswerSources(answers or (DATA if has_answers else MODEL), scores)
    return AnswerSources(DATA if has_answers else "", scores)


def answered_and_scored(
    run: Run,
    model: HookedModel,
    graph: DepthGraph,
    plan: AnswerSources,
    judge: Judge,
    asking: AnsweringOptions,
    frames: Sequence[Frame | None],
    known: dict[str, Own | None],
) -> pd.DataFrame:
    """Return `model_answer`, `cut` (it had not ended at the token limit) and `score` of every node, in its frame."""
    table = graph.table
    answers, cut = table["model_answer"].tolist(), [False] * len(table)
    if plan.answers == MODEL:
        prompted = {place: frame for place, frame in enumerate(frames) if frame is not None}
        prompts = [frame.asking(table["question"].iloc[place]) for place, frame in prompted.items()]
        by_place = dict(zip(prompted, own_answers(run, model, prompts, asking, known), strict=True))
        written = [by_place.get(place) for place in range(len(table))]
        answers = [one.text if one else None for one in written]
        cut = [one is not None and not one.ended for one in written]
    scores = table["score"].to_numpy(float)
    if plan.scores != DATA:
        scorer = label_score if plan.scores == LABEL else judge if callable(judge) else None
        # An answer that had not ended at the limit may have come to it yet: not judged.
        whole = [None if is_cut else answer for answer, is_cut in zip(answers, cut, strict=True)]
        keys = list(zip(table["question"], table["answers"], whole, strict=True))
        scores = np.array(scores_of(run, scorer, keys)) if scorer else np.full(len(table), np.nan)
    if not plan.answers:
        answers = [None] * len(table)
    return pd.DataFrame({"model_answer": answers, "cut": cut, "score": scores}, index=table.index)


def own_answers(
    run: Run,
    model: HookedModel,
    prompts: Iterable[str],
    asking: AnsweringOptions,
    known: dict[str, Own | None],
    stage: str = "answers",
) -> list[Own | None]:
    """Let the model answer, after each different prompt once; None where one leaves no room for an answer.

    Args:
        run: the analysis that asks.
        model: with a tokenizer.
        prompts: a question each, in its frame.
        asking: how.
        known: what was written after prompts that were asked before; those asked now are added.
        stage: of the run's pieces.
    """
    listed = list(prompts)
    # Each different prompt once: depth graphs share questions.
    new = dict(enumerate(one for one in dict.fromkeys(listed) if one not in known))
    known.update(dict.fromkeys(new.values()))
    ids = {place: encode(model.tokenizer, text, model.bos)[0] for place, text in new.items()}  # type: ignore[arg-type]
    for batch in ask(run, model, ids, asking.max_new_tokens, asking.until, asking.batch_size, stage=stage):
        for place, written in batch:
            text = plain_text(model, ids[place], written.tokens)
            line = text.split("\n", 1)[0] if asking.until == "line" else text
            known[new[place]] = Own(line.strip(), written.ended)
    return [known[one] for one in listed]
