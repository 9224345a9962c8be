"""What is known of the answers to a depth graph: a model's answers, and their scores from 1 to 5.

1. Answers are those in the data, or the model's own: greedy, to the end of the first line in a raw context, to the end
   of the message in a chat.
2. Scores are those in the data, a judge's (any function), or by label match: 5 where an accepted answer stands in the
   answer (`headwater.questions.labels`), else 1. Label match needs short accepted answers.
3. An answer of the model's own that had not ended at the token limit is not judged: it has no score, and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.errors import HeadwaterError, InputError
from headwater.likelihood.framing import Frame
from headwater.likelihood.graph import HIGHEST_SCORE, LOWEST_SCORE, DepthGraph, checked_score
from headwater.models.generation import end_tokens, generate
from headwater.models.tokens import encode
from headwater.options import checked_name, shown
from headwater.questions.labels import match
from headwater.runs.analysis import Run

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

Judge: TypeAlias = str | Callable[[str, Sequence[str], str], float | None] | None
"""A function of the question, the accepted answers and the answer to judge, which gives a score from 1 to 5 or None;
"label" for label match; None for the scores in the data, else label match where accepted answers are short."""

DATA, MODEL = SOURCES = ("data", "model")
LABEL = "label"
SHORT = 10
"""Words up to which accepted answers (their median) are short enough for label match."""
JUDGED_AT_ONCE = 64
"""How many answers are judged, and their scores kept, at a time."""


class Written(NamedTuple):
    """An answer of the model's own."""

    text: str
    ended: bool
    """By itself, not at the token limit."""


class Plan(NamedTuple):
    """Where answers and scores come from."""

    answers: str
    """ "data", "model", or "" for none."""
    scores: str
    """ "data", "label", "judge", or "" for none."""


def plan_of(graph: DepthGraph, answers: str | None, judge: Judge, span: str) -> Plan:
    """Decide where answers and scores come from.

    Raises:
        InputError: there is no such source, or the data lack what is asked of them.
    """
    if answers is not None:
        checked_name("answers", answers, SOURCES)
    if not (judge is None or callable(judge) or (isinstance(judge, str) and judge == LABEL)):
        raise InputError(
            f"judge={shown(judge)} is neither 'label' nor a function of question, accepted answers and answer."
        )
    has_answers, has_scores = graph.table["model_answer"].notna().any(), graph.table["score"].notna().any()
    if answers == DATA and not has_answers:
        raise InputError("answers='data': the graph has no answers of a model; give answers='model'.")
    if judge is None and has_scores and answers != MODEL:
        scores = DATA
    else:
        short = graph.table["answers"].map(lambda accepted: len(accepted[0].split())).median() <= SHORT
        scores = "judge" if callable(judge) else LABEL if judge == LABEL or short else ""
    if scores in (LABEL, "judge") or span == "model_answer" or answers == MODEL:
        return Plan(answers or (DATA if has_answers else MODEL), scores)
    return Plan(DATA if has_answers else "", scores)


def answered_and_scored(
    run: Run,
    model: HookedModel,
    graph: DepthGraph,
    plan: Plan,
    judge: Judge,
    frame: Frame,
    options: dict[str, Any],
) -> pd.DataFrame:
    """Return `model_answer`, `cut` (it had not ended at the token limit) and `score` of every node.

    The options are those of `_answers`.
    """
    table = graph.table
    given, cut = table["model_answer"].tolist(), [False] * len(table)
    if plan.answers == MODEL:
        by_question = _answers(model, list(dict.fromkeys(table["question"])), frame, options, run)
        written = [by_question[question] for question in table["question"]]
        given = [one.text if one else None for one in written]
        cut = [one is not None and not one.ended for one in written]
    scores = table["score"].to_numpy(float)
    if plan.scores != DATA:
        asked = label_score if plan.scores == LABEL else judge if callable(judge) else None
        whole = [None if is_cut else answer for answer, is_cut in zip(given, cut, strict=True)]
        keys = list(zip(table["question"], table["answers"], whole, strict=True))
        known = _scores(asked, list(dict.fromkeys(keys)), run)
        scores = np.array([known[key] for key in keys])
    if not plan.answers:
        given = [None] * len(table)
    return pd.DataFrame({"model_answer": given, "cut": cut, "score": scores}, index=table.index)


def label_score(question: str, accepted: Sequence[str], answer: str) -> float:
    """Return 5 where an accepted answer stands in the answer, else 1."""
    return float(HIGHEST_SCORE if match(answer, accepted) else LOWEST_SCORE)


def _scores(judge: Any, keys: Sequence[tuple[Any, ...]], run: Run) -> dict[tuple[Any, ...], float]:
    """Ask a judge about each different answer; what it said is kept, because judges may be slow, or cost money."""
    parts = [keys[start : start + JUDGED_AT_ONCE] for start in range(0, len(keys), JUDGED_AT_ONCE)]
    with run.bar("Judging", "answer", len(keys)) as bar:

        def compute(part: Sequence[tuple[Any, ...]]) -> dict[str, Tensor]:
            scores = []
            for key in part:
                scores.append(_judged(judge, *key))
                bar.update()
            return {"score": torch.tensor(scores, dtype=torch.float64)}

        made = run.pieces("judged", parts, compute, bar, len)
        found = [score for piece in made for score in piece["score"].tolist()]
    return dict(zip(keys, found, strict=True))


def _judged(judge: Any, question: str, accepted: Sequence[str], answer: str | None) -> float:
    """Ask a judge; an answer that is missing has no score."""
    if judge is None or answer is None:
        return math.nan
    try:
        score = judge(question, accepted, answer)
    except Exception as error:
        if isinstance(error, HeadwaterError):
            raise
        raise InputError(f"The judge failed on the question {question!r}: {type(error).__name__}: {error}") from error
    return checked_score(score, f"The judge's answer to {question!r}")


def _answers(
    model: HookedModel, questions: Sequence[str], frame: Frame, options: dict[str, Any], run: Run
) -> dict[str, Written | None]:
    """Let the model answer; None where a question leaves no room for an answer.

    The options are `max_new_tokens`, `first_line` and `batch_size`.
    """
    room = model.shape.n_ctx - options["max_new_tokens"]
    ids = {question: encode(model.tokenizer, frame.asking(question), model.bos)[0] for question in questions}  # type: ignore[arg-type]
    order = sorted((question for question in questions if len(ids[question]) <= room), key=lambda q: len(ids[q]))
    size = options["batch_size"]
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    written: dict[str, Written | None] = dict.fromkeys(questions)

    def compute(part: list[str]) -> dict[str, Tensor]:
        return _generated(model, [ids[question] for question in part], options)

    with run.bar("Answering", "question", len(order)) as bar:
        for part, piece in zip(parts, run.pieces("answers", parts, compute, bar, len), strict=True):
            for row, question in enumerate(part):
                tokens = piece["tokens"][row, : piece["lengths"][row]].tolist()
                text = _text(model, ids[question], tokens, options["first_line"])
                written[question] = Written(text, bool(piece["stopped"][row]))
    return written


def _generated(model: HookedModel, prompts: Sequence[list[int]], options: dict[str, Any]) -> dict[str, Tensor]:
    ends = end_tokens(model)
    tokenizer: Any = model.tokenizer

    def stops(token: int) -> bool:
        return token in ends or (options["first_line"] and "\n" in tokenizer.decode([token]))

    batch = model.tokenize(list(prompts))
    made = generate(model, batch, max_new_tokens=options["max_new_tokens"], stop=stops)
    return {"tokens": made.tokens, "lengths": made.lengths, "stopped": made.stopped}


def _text(model: HookedModel, prompt: Sequence[int], tokens: Sequence[int], first_line: bool) -> str:
    """Write tokens out as they continue the prompt, without special ones."""
    tokenizer: Any = model.tokenizer
    before = tokenizer.decode(prompt[-1:], skip_special_tokens=True)
    text = tokenizer.decode([*prompt[-1:], *tokens], skip_special_tokens=True)[len(before) :]
    return str(text.split("\n", 1)[0] if first_line else text).strip()
