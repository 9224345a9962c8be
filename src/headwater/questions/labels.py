"""Right or wrong: the one rule by which an answer is compared with the accepted answers, everywhere.

1. The answer and every accepted answer are taken apart into normalised words (`words`), in both readings of marks.
2. The answer is right when, in one reading, the words of an accepted answer stand in it, one after the other:

       contains    anywhere (default): Orgad et al. 2025 and PopQA (Mallen et al. 2023) look for the accepted text in
                   the answer; as whole words, as DrQA does (Chen et al. 2017), so that "England" is not "land"
       starts      at its beginning
       exact       and nothing else does: the exact match of SQuAD and TriviaQA

   or when a judge says so: any function of question, accepted answers and answer that returns True or False, or None
   where it cannot say.
3. z = 1 marks a wrong answer (a hallucination), z = 0 a right one.
4. An answer that says that it gives none is a refusal, and is neither.

Limits. "contains" does not read: "not Paris but Lyon" is right for Paris, "one of the largest" for "one". "starts" and
"exact" are stricter and miss "It is Paris". No rule knows other orders or wordings ("December 14, 1972" is not
"14 December 1972"), and marks do not count, in numbers neither ("3.5" is "35", "U.S." is "us"). Where that matters,
give a judge.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from headwater.errors import HeadwaterError, InputError, did_you_mean
from headwater.options import checked_name, shown
from headwater.questions.words import MARKS, Span, Word, normalised_words

Label: TypeAlias = str | Callable[[str, Sequence[str], str], bool | None]
"""One of `RULES`, or a judge: a function that says of a question, its accepted answers and an answer whether that is
right; None where it cannot say."""
CONTAINS, EXACT, STARTS = RULES = ("contains", "exact", "starts")

_NOT = r"(do\snot|don['’]?t|did\snot|didn['’]?t|can\s?not|can['’]?t|could\snot|couldn['’]?t)"
_VERBS = r"(know|find|answer|provide|determine|recall|confirm|verify|assist|have\s(any|enough|access|the|information))"
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
    | ^\W*unknown\W*$
    """,
    re.IGNORECASE | re.VERBOSE,
)


class Match(NamedTuple):
    """An accepted answer found in a given one."""

    alias: str
    span: Span
    """The characters of the given answer."""


class Verdict(NamedTuple):
    """What a label says of an answer."""

    is_right: bool | None
    """None where a judge could not say."""
    alias: str = ""
    """The accepted answer that was found; empty where none was, and where a judge decided."""


NO_VERDICT = Verdict(None)


def match(answer: str, accepted: Iterable[str], rule: str = CONTAINS) -> Match | None:
    """Return the accepted answer that stands in a given one, or None.

    Args:
        answer: the given answer.
        accepted: every accepted answer.
        rule: one of `RULES`. Of several that stand in the answer, the first to begin is taken, of these the longest.

    Raises:
        InputError: there is no such rule.
    """
    checked_name("rule", rule, RULES)
    found = []
    aliases = tuple(accepted)
    for marks in MARKS:
        words = normalised_words(answer, marks)
        for alias in aliases:
            run = _run(words, normalised_words(alias, marks), rule)
            if run:
                found.append(Match(alias, (run[0].start, run[-1].end)))
    if not found:
        literal = next((a for a in aliases if not normalised_words(a) and a.strip() == answer.strip()), None)
        return Match(literal, (0, len(answer))) if literal else None
    return min(found, key=lambda match: (match.span[0], -match.span[1]))


def verdict(label: Label, question: str, accepted: Sequence[str], answer: str) -> Verdict:
    """Say by a rule, or by a judge, whether an answer is right.

    Raises:
        InputError: the judge failed, or returned something else than True, False or None.
    """
    if isinstance(label, str):
        found = match(answer, accepted, label)
        return Verdict(found is not None, found.alias if found else "")
    try:
        said = label(question, accepted, answer)
    except HeadwaterError:
        raise
    except Exception as error:
        raise InputError(
            f"The judge failed on the question {question!r} and the answer {answer!r}: {type(error).__name__}: {error}"
        ) from error
    if said is not None and not isinstance(said, bool | np.bool_):
        raise InputError(
            f"The judge returned {said!r} for the answer {answer!r}; it must return True (right), False, or None where "
            "it cannot say."
        )
    return Verdict(None if said is None else bool(said))


def check_label(label: object) -> None:
    """Refuse what is neither a rule nor a judge.

    Raises:
        InputError: it is neither.
    """
    if callable(label) or (isinstance(label, str) and label in RULES):
        return
    raise InputError(
        f"label={shown(label)} is neither one of {', '.join(RULES)} nor a function of question, accepted answers and "
        f"answer.{did_you_mean(str(label), RULES)}"
    )


def is_refusal(answer: str) -> bool:
    """Say whether an answer declines to give one."""
    return bool(_REFUSALS.search(answer))


def _run(words: Sequence[Word], wanted: Sequence[Word], rule: str) -> Sequence[Word]:
    """The first run of `words` that has the texts of `wanted`, where the rule lets it stand; empty without one."""
    texts, sought = [word.text for word in words], [word.text for word in wanted]
    if not sought or (rule == EXACT and texts != sought):
        return ()
    starts = range(len(texts) - len(sought) + 1) if rule == CONTAINS else range(1)
    for start in starts:
        if texts[start : start + len(sought)] == sought:
            return words[start : start + len(sought)]
    return ()
