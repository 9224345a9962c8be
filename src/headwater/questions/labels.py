"""Is an answer right? Rules that compare it with accepted answers, and judges' scores from 1 to 5."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.kernels.devices import failures_named
from headwater.options import checked_name
from headwater.questions.endpoint import ChatEndpoint, FailureLimit, asked_at_once, json_object, workers_of
from headwater.questions.words import MARKS, Span, Word, normalised_words
from headwater.runs.analysis import Run

# Right or wrong: the comparison of an answer with the accepted answers, used everywhere.
#
# 1. The answer and every accepted answer are split into normalised words (`words`), in both readings of marks.
# 2. The answer is right if, in one reading, the words of an accepted answer occur in it consecutively:
#
#    contains    anywhere (default): Orgad et al. 2025 and PopQA (Mallen et al. 2023) search for the accepted text in
#                the answer; here as whole words, as in DrQA (Chen et al. 2017), so that "England" is not "land"
#    starts      at its beginning
#    exact       and nothing else occurs: the exact match of SQuAD and TriviaQA
#
#    A judge can decide instead: any function of question, accepted answers and answer that returns True or False, or
#    None if it is undecided.
# 3. z = 1 marks a wrong answer (a hallucination), z = 0 a right answer.
# 4. An answer that declines to answer is a refusal, neither right nor wrong.
#
# Limits. "contains" has no understanding: "not Paris but Lyon" is right for Paris, "one of the largest" for "one".
# "starts" and "exact" are stricter and miss "It is Paris". No rule handles other orders or wordings ("December 14,
# 1972" is not "14 December 1972"), word endings ("Helsingissä"; Korean particles are handled), or the ends of Chinese,
# Japanese or Thai words inside a run of letters (大 is in 大阪). If these matter, pass a judge.


Label: TypeAlias = str | Callable[[str, Sequence[str], str], bool | None]
"""One of `RULES`, or a judge: a function of a question, its accepted answers and an answer that returns whether the
answer is right; None if it is undecided."""
CONTAINS, EXACT, STARTS = RULES = ("contains", "exact", "starts")

_NOT = r"(do\snot|don['’]?t|did\snot|didn['’]?t|can\s?not|can['’]?t|could\snot|couldn['’]?t)"
_VERBS = r"(know|find|answer|provide|determine|recall|confirm|verify|assist|have\s(any|enough|access|the|information))"
_KOREAN = re.compile(
    "(?:에서|에게|한테|께서?|으?로|와|과|하고|이?랑|까지|부터|보다|처럼)?"
    "(?:은|는|이|가|을|를|의|에|도|만|요|이?다|입니다|입니까|이?에요|예요|이?야|이었습니다|였습니다|이?었?다|였다|이?며|이?라고|이?라는)?"
)
"""Korean suffixes that follow a noun without a space: particles and forms of "to be"."""
_POSSESSIVE = re.compile(r"(?<=[^\W\d_])['’]s\b", re.IGNORECASE)
_REFUSALS = re.compile(
    rf"""\b(i|we)\s(really\s|just\s|actually\s)?{_NOT}\s(\w+\s)?{_VERBS}\b
    | \b(i['’]?m|i\sam)\s(not\s(sure|certain|aware|familiar|able)|unable)\b
    | \b(i\shave|there\s(is|['’]?s))\sno\s(idea|information|answer|record|data)\b
    | \bas\san?\s(ai|artificial\sintelligence|(large\s)?language\smodel)\b
    | ^\W*(i['’]?m|i\sam)\s(very\s|so\s)?sorry\b
    | ^\W*(sorry,|unanswerable|no\sidea|no\sanswer|not\s(known|sure|available|applicable)|n/a|my\sapologies)(?!\w)
    | ^\W*(i\sapologi[sz]e|it\sis\s(not\s(known|clear|possible)|unclear|unknown|impossible))\b
    | ^\W*(nobody|no\sone)\s(really\s)?knows\b
    | ^\W*(that|this|it)\s(is|was|has)\s(not|never)\s(been\s)?(known|told|recorded)\b
    | (^\W*|\b(is|are|was|were|remains?)\s((currently|still)\s)?)(unknown|not\sknown)\W*$
    """,
    re.IGNORECASE | re.VERBOSE,
)


class Match(NamedTuple):
    """An accepted answer found in a model's answer."""

    alias: str
    span: Span
    """Its span in the model's answer."""


class Verdict(NamedTuple):
    """Whether an answer is right, by a rule or a judge."""

    is_right: bool | None
    """None if a judge was undecided."""
    alias: str = ""
    """The accepted answer that was found; empty if none was found, or if a judge decided."""


NO_VERDICT = Verdict(None)


def match(answer: str, accepted: Iterable[str], rule: str = CONTAINS) -> Match | None:
    """Return the accepted answer that occurs in an answer, by one of `RULES`, or None.

    Of several matches it is the one that begins first; of these, the longest.
    """
    checked_name("rule", rule, RULES)
    matches, aliases = list[Match](), tuple(accepted)
    # A word with 's is read with it ("McDonald's") and without it ("Shakespeare's").
    readings = [*((marks, answer) for marks in MARKS), ("apart", _POSSESSIVE.sub("  ", answer))]
    for marks, text in dict.fromkeys(readings):
        words = normalised_words(text, marks)
        for alias in aliases:
            run = _run(words, normalised_words(alias, marks), rule)
            if run:
                matches.append(Match(alias, (run[0].start, run[-1].end)))
    for alias in () if matches else aliases:
        if not normalised_words(alias) and (span := _as_written(answer, alias.strip(), rule)):
            matches.append(Match(alias, span))
    return min(matches, key=lambda match: (match.span[0], -match.span[1]), default=None)


def verdict(label: Label, question: str, accepted: Sequence[str], answer: str) -> Verdict:
    """Decide by a rule, or by a judge, whether an answer is right."""
    if isinstance(label, str):
        found = match(answer, accepted, label)
        return Verdict(found is not None, found.alias if found else "")
    what = f"The judge failed on the question {question!r} and the answer {answer!r}"
    with failures_named(what, in_a_run=False):
        judged = label(question, accepted, answer)
    if judged is not None and not isinstance(judged, bool | np.bool_):
        raise InputError(
            f"The judge returned {judged!r} for the answer {answer!r}; it must return True (right), False, or None "
            "where it cannot say."
        )
    return Verdict(None if judged is None else bool(judged))


def verdicts_of(run: Run, label: Label, keys: Sequence[Key]) -> list[Verdict]:
    """Decide about each question, accepted answers and answer; `NO_VERDICT` without an answer."""
    if isinstance(label, str):
        return [
            NO_VERDICT if answer is None else verdict(label, question, accepted, answer)
            for question, accepted, answer in keys
        ]
    found = _judged(run, label, keys, lambda *key: verdict(label, *key).is_right)
    return [Verdict(None if math.isnan(value) else bool(value)) for value in found]


def is_refusal(answer: str) -> bool:
    """Return whether an answer declines to answer."""
    return bool(_REFUSALS.search(answer))


def _run(words: Sequence[Word], alias: Sequence[Word], rule: str) -> Sequence[Word]:
    """Return the first run of `words` that matches an alias where the rule allows it; empty without a match."""
    # The answer may omit articles of the alias; an alias of articles only ("The The") must match completely.
    sought = [word for word in alias if not word.may_be_article] or list(alias)
    # A cheap test before trying runs from every word, because a question may have dozens of aliases.
    if not sought or not any(word.text.startswith(sought[0].text) for word in words):
        return ()
    for start in range(len(words) if rule == CONTAINS else 1):
        run: list[Word] = []
        for word in words[start:]:
            if len(run) < len(sought) and _is_same(word, sought, len(run), rule):
                run.append(word)
            elif len(run) == len(sought) and rule != EXACT:
                break
            elif not word.may_be_article:
                run = []
                break
        if len(run) == len(sought):
            return run
    return ()


def _is_same(word: Word, sought: Sequence[Word], place: int, rule: str) -> bool:
    """Return whether a word matches the sought word at an index."""
    other = sought[place]
    if word.unit and other.unit and word.unit != other.unit:
        return False
    if not word.may_be_letter and (len(sought) == 1 or (word.may_be_article and other.may_be_letter)):
        return False
    if word.text == other.text or rule == EXACT or place < len(sought) - 1:
        return word.text == other.text
    is_korean = "가" <= other.text[-1] <= "힣"
    return is_korean and word.text.startswith(other.text) and bool(_KOREAN.fullmatch(word.text, len(other.text)))


def _as_written(answer: str, alias: str, rule: str) -> Span | None:
    """Return the span of an alias of symbols alone in an answer, as a separate word."""
    if not alias:
        return None
    found = re.search(rf"(?<![^\s\"'“‘(\[*]){re.escape(alias)}(?!\w|{re.escape(alias[-1])})", answer)
    if not found or (rule != CONTAINS and answer[: found.start()].strip()):
        return None
    return None if rule == EXACT and answer[found.end() :].strip() else found.span()


# Scores of answers, from 1 to 5. Judges may be slow, or cost money, so each distinct answer is judged once, and with
# `out=` the scores are saved.


LABEL = "label"
JUDGING = (
    "You score answers. You are given a question, a reference answer that deserves 5, and an answer to score for being "
    "correct, accurate and factual: 1 is wrong throughout, 2 mostly wrong, 3 half right, 4 right with small mistakes, "
    '5 right throughout. Neither length nor style counts. Reply with one JSON object: {"score": N}.'
)
LOWEST_SCORE, HIGHEST_SCORE = 1, 5

Scorer: TypeAlias = Callable[[str, Sequence[str], str], float | None]
"""Function of a question, its accepted answers and an answer that returns a score from 1 to 5, or None."""
Judge: TypeAlias = str | Scorer | None
"""A scorer; "label" for label match; None for the scores in the data, else label match if accepted answers are
short."""
Key: TypeAlias = tuple[str, Sequence[str], str | None]
"""A question, its accepted answers, and the answer to judge (None without an answer)."""


def label_score(question: str, accepted: Sequence[str], answer: str) -> float:
    """Return 5 if an accepted answer occurs in the answer, else 1."""
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
    """Asks a chat model for a score from 1 to 5, given the accepted answers, at most `tries` times per answer.

    Ko et al., EMNLP 2024, let GPT-4 score in this way, at temperature 1; here it is 0. If a reply has no whole number
    from 1 to 5 the model is asked again; an answer without any valid reply has no score, and is counted.
    """

    def __call__(self, question: str, accepted: Sequence[str], answer: str) -> float | None:
        """Return the score; None if no reply had one."""
        text = f"Question: {question}\nReference answer: {' / '.join(accepted)}\nAnswer to score: {answer}"
        messages = [{"role": "system", "content": JUDGING}, {"role": "user", "content": text}]

        def read(reply: str) -> tuple[float | None, str]:
            score = score_in(reply)
            return score, "" if score is not None else 'Reply with one JSON object such as {"score": 3}, from 1 to 5.'

        return self.ask(messages, read)


def score_in(reply: str) -> float | None:
    """Return the score in a judge's reply: in its JSON object, else the number after "score", else a lone number."""
    parsed = json_object(reply)
    score = parsed.get("score") if parsed is not None else None
    if score is None:
        stated = re.search(r"score[^\d\n]{0,12}(\d+(?:\.\d+)?)", reply, re.IGNORECASE)
        score = stated[1] if stated else reply.strip().rstrip(".")
    try:
        number = float(str(score))
    except ValueError:
        return None
    return number if number in range(LOWEST_SCORE, HIGHEST_SCORE + 1) else None


def scores_of(run: Run, scorer: Scorer, keys: Sequence[Key]) -> list[float]:
    """Return the score of each key, NaN without one."""

    def score(question: str, accepted: Sequence[str], answer: str) -> float:
        with failures_named(f"The judge failed on the question {question!r}", in_a_run=False):
            return checked_score(scorer(question, accepted, answer), f"The judge's answer to {question!r}")

    return _judged(run, scorer, keys, score)


def _judged(
    run: Run, judge: object, keys: Sequence[Key], ask: Callable[[str, Sequence[str], str], float | None]
) -> list[float]:
    """Return what `ask` returns for each key, NaN for nothing; reuse the judgements of an interrupted run."""
    # In order, unlike a set: pieces are numbered, and a resumed run must split them in the same way.
    different, size, failures = list(dict.fromkeys(keys)), asked_at_once(judge), FailureLimit()
    parts = [different[start : start + size] for start in range(0, len(different), size)]
    with run.bar("Judging", "answer", len(different)) as bar:

        def compute(part: Sequence[Key]) -> dict[str, Tensor]:
            def judged(key: Key) -> float | None:
                question, accepted, answer = key
                found = None if answer is None else ask(question, accepted, answer)
                bar.update()
                return found

            values = failures.map(judged, part, workers_of(judge))
            return {"score": torch.tensor([math.nan if x is None else x for x in values], dtype=torch.float64)}

        scores = [x for piece in run.pieces("judged", parts, compute, bar, len) for x in piece["score"].tolist()]
    by_key = dict(zip(different, scores, strict=True))
    return [by_key[key] for key in keys]
