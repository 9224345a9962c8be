"""Right or wrong: the one rule by which an answer is compared with the accepted answers, everywhere.

1. The answer and every accepted answer are taken apart into normalised words (`words`), in both readings of marks.
2. The answer is right when, in one reading, the words of an accepted answer occur in it, one after the other:

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
"14 December 1972"), endings of words ("Helsingissä"; Korean particles are known), or where a Chinese, Japanese or Thai
word ends inside a run of letters (大 is in 大阪). Where that matters, give a judge.
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
_KOREAN = re.compile(
    "(?:에서|에게|한테|께서?|으?로|와|과|하고|이?랑|까지|부터|보다|처럼)?"
    "(?:은|는|이|가|을|를|의|에|도|만|요|이?다|입니다|입니까|이?에요|예요|이?야|이었습니다|였습니다|이?었?다|였다|이?며|이?라고|이?라는)?"
)
"""What Korean writes after a noun without a space: particles and forms of "to be"."""
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
    """Return the accepted answer that occurs in a given one, or None.

    Args:
        answer: the given answer.
        accepted: every accepted answer.
        rule: one of `RULES`. Of several that occur in the answer, the first to begin is taken, of these the longest.
    """
    checked_name("rule", rule, RULES)
    found, aliases = list[Match](), tuple(accepted)
    for marks in MARKS:
        words = normalised_words(answer, marks)
        for alias in aliases:
            run = _run(words, normalised_words(alias, marks), rule)
            if run:
                found.append(Match(alias, (run[0].start, run[-1].end)))
    for alias in () if found else aliases:
        if not normalised_words(alias) and (span := _as_written(answer, alias.strip(), rule)):
            found.append(Match(alias, span))
    return min(found, key=lambda match: (match.span[0], -match.span[1]), default=None)


def verdict(label: Label, question: str, accepted: Sequence[str], answer: str) -> Verdict:
    """Say by a rule, or by a judge, whether an answer is right."""
    if isinstance(label, str):
        found = match(answer, accepted, label)
        return Verdict(found is not None, found.alias if found else "")
    try:
        judged = label(question, accepted, answer)
    except HeadwaterError:
        raise
    except Exception as error:
        raise InputError(
            f"The judge failed on the question {question!r} and the answer {answer!r}: {type(error).__name__}: {error}"
        ) from error
    if judged is not None and not isinstance(judged, bool | np.bool_):
        raise InputError(
            f"The judge returned {judged!r} for the answer {answer!r}; it must return True (right), False, or None "
            "where it cannot say."
        )
    return Verdict(None if judged is None else bool(judged))


def check_label(label: object) -> None:
    """Refuse what is neither a rule nor a judge."""
    if callable(label) or (isinstance(label, str) and label in RULES):
        return
    raise InputError(
        f"label={shown(label)} is neither one of {', '.join(RULES)} nor a function of question, accepted answers and "
        f"answer.{did_you_mean(label, RULES)}"
    )


def is_refusal(answer: str) -> bool:
    """Say whether an answer declines to give one."""
    return bool(_REFUSALS.search(answer))


def _run(words: Sequence[Word], alias: Sequence[Word], rule: str) -> Sequence[Word]:
    """The first run of `words` that are those of an alias, where the rule lets it be; empty without one."""
    # Articles of the alias need not be in the answer; one that is all articles ("The The") is sought whole.
    sought = [word for word in alias if not word.may_be_article] or list(alias)
    # A cheap look before runs are tried from every word: a question may have dozens of aliases.
    if not sought or not any(word.text.startswith(sought[0].text) for word in words):
        return ()
    runs = (_run_from(words[start:], sought, rule) for start in range(len(words) if rule == CONTAINS else 1))
    return next(filter(None, runs), ())


def _run_from(words: Sequence[Word], sought: Sequence[Word], rule: str) -> Sequence[Word]:
    run: list[Word] = []
    for word in words:
        if len(run) < len(sought) and _is_same(word, sought, len(run), rule):
            run.append(word)
        elif len(run) == len(sought) and rule != EXACT:
            break
        elif not word.may_be_article:
            return ()
    return run if len(run) == len(sought) else ()


def _is_same(word: Word, sought: Sequence[Word], place: int, rule: str) -> bool:
    """Whether a word is the one at a place of those sought."""
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
    """Where an alias of symbols alone is, in an answer, as a word of its own."""
    if not alias:
        return None
    found = re.search(rf"(?<![^\s\"'“‘(\[*]){re.escape(alias)}(?!\w|{re.escape(alias[-1])})", answer)
    if not found or (rule != CONTAINS and answer[: found.start()].strip()):
        return None
    return None if rule == EXACT and answer[found.end() :].strip() else found.span()
