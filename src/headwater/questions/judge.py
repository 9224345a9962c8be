"""Scores of answers, from 1 to 5: what a judge says, or 5 where an accepted answer occurs in the answer, else 1.

A judge is any function of question, accepted answers and answer. Judges may be slow, or cost money: each different
answer is judged once, and with `out=` what was said is kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from headwater.errors import HeadwaterError, InputError
from headwater.options import shown
from headwater.questions.endpoint import ChatEndpoint, FailureLimit, json_object
from headwater.questions.labels import match
from headwater.runs.analysis import Run

LABEL = "label"
JUDGING = (
    "You score answers. You are given a question, a reference answer that deserves 5, and an answer to score for being "
    "correct, accurate and factual: 1 is wrong throughout, 2 mostly wrong, 3 half right, 4 right with small mistakes, "
    '5 right throughout. Neither length nor style counts. Reply with one JSON object: {"score": N}.'
)
LOWEST_SCORE, HIGHEST_SCORE = 1, 5
JUDGED_AT_ONCE = 64
"""How many answers are judged, and their scores kept, at a time."""

Scorer: TypeAlias = Callable[[str, Sequence[str], str], float | None]
"""Gives a question, its accepted answers and an answer a score from 1 to 5, or None."""
Judge: TypeAlias = str | Scorer | None
"""A scorer; "label" for label match; None for the scores in the data, else label match where accepted answers are
short."""
Key: TypeAlias = tuple[str, Sequence[str], str | None]
"""A question, its accepted answers, and the answer to judge; None where there is none."""


def check_judge(judge: object) -> None:
    """Refuse what is not a judge."""
    if not (judge is None or callable(judge) or (isinstance(judge, str) and judge == LABEL)):
        raise InputError(
            f"judge={shown(judge)} is neither 'label' nor a function of question, accepted answers and answer."
        )


def label_score(question: str, accepted: Sequence[str], answer: str) -> float:
    """Return 5 where an accepted answer occurs in the answer, else 1."""
    return float(HIGHEST_SCORE if match(answer, accepted) else LOWEST_SCORE)


def checked_score(score: object, where: str) -> float:
    """Return a judge's score as a number, NaN for none."""
    if score is None or (isinstance(score, float) and math.isnan(score)):
        return math.nan
    if isinstance(score, bool) or not isinstance(score, int | float) or not LOWEST_SCORE <= score <= HIGHEST_SCORE:
        raise InputError(f"{where}: the score must lie between {LOWEST_SCORE} and {HIGHEST_SCORE}, found {score!r}.")
    return float(score)


@dataclass(frozen=True)
class EndpointJudge(ChatEndpoint):
    """Asks a chat model for a score from 1 to 5 beside an accepted answer, at most `tries` times per answer.

    Ko et al., EMNLP 2024, let GPT-4 score so, at temperature 1; here it is 0. A reply without a whole number from 1 to
    5 is asked for again; an answer without a score after that has none, and is counted.
    """

    def __call__(self, question: str, accepted: Sequence[str], answer: str) -> float | None:
        """Return the score; None where no reply had one."""
        text = f"Question: {question}\nReference answer: {' / '.join(accepted)}\nAnswer to score: {answer}"
        messages = [{"role": "system", "content": JUDGING}, {"role": "user", "content": text}]

        def read(reply: str) -> tuple[float | None, str]:
            score = score_in(reply)
            return score, "" if score is not None else 'Reply with one JSON object such as {"score": 3}, from 1 to 5.'

        return self.ask(messages, read)


def score_in(reply: str) -> float | None:
    """Return the score of a judge's reply: of its JSON object, else the number after "score", else a lone number."""
    found = json_object(reply)
    given = found.get("score") if found is not None else None
    if given is None:
        stated = re.search(r"score[^\d\n]{0,12}(\d+(?:\.\d+)?)", reply, re.IGNORECASE)
        given = stated[1] if stated else reply.strip().rstrip(".")
    try:
        number = float(str(given))
    except ValueError:
        return None
    return number if number in range(LOWEST_SCORE, HIGHEST_SCORE + 1) else None


def scores_of(run: Run, scorer: Scorer, keys: Sequence[Key]) -> list[float]:
    """Return the score of each key, NaN where there is none, or what an earlier run was told."""
    # In order, unlike a set: pieces are numbered, and a resumed run must cut them in the same way.
    different, workers, failures = list(dict.fromkeys(keys)), max(1, getattr(scorer, "workers", 1)), FailureLimit()
    size = workers if workers > 1 else JUDGED_AT_ONCE
    parts = [different[start : start + size] for start in range(0, len(different), size)]
    with run.bar("Judging", "answer", len(different)) as bar:

        def compute(part: Sequence[Key]) -> dict[str, Tensor]:
            def one(key: Key) -> float:
                found = _score(scorer, *key)
                bar.update()
                return found

            verdicts = failures.map(one, part, workers)
            return {"score": torch.tensor([math.nan if one is None else one for one in verdicts], dtype=torch.float64)}

        made = run.pieces("judged", parts, compute, bar, len)
        found = [score for piece in made for score in piece["score"].tolist()]
    known = dict(zip(different, found, strict=True))
    return [known[key] for key in keys]


def _score(scorer: Scorer, question: str, accepted: Sequence[str], answer: str | None) -> float:
    """Ask for a score; an answer that is missing has none."""
    if answer is None:
        return math.nan
    try:
        score = scorer(question, accepted, answer)
    except Exception as error:
        if isinstance(error, HeadwaterError):
            raise
        raise InputError(f"The judge failed on the question {question!r}: {type(error).__name__}: {error}") from error
    return checked_score(score, f"The judge's answer to {question!r}")
