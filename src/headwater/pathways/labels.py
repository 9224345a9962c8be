"""Right or wrong: an answer is right when an accepted answer stands in it, as whole words, after normalisation.

1. The answer and every accepted answer are taken apart into normalised words (`words`), in both readings of marks.
2. The answer is right when, in one reading, the words of an accepted answer follow one another in it. The match that
   begins first is taken, of these the longest: its characters are the answer's exact words (E_A).
3. z = 1 marks a wrong answer (a hallucination), z = 0 a right one.
4. An answer that says that it gives none is a refusal, and is neither.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headwater.pathways.words import MARKS, Span, Word, normalised_words

RULE = "an accepted answer as whole words of the answer, normalised"

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
    | ^\W*unknown\W*$
    """,
    re.IGNORECASE | re.VERBOSE,
)


class AliasMatch(NamedTuple):
    """An accepted answer found in a given one."""

    alias: str
    span: Span
    """The characters of the given answer."""


def match_alias(answer: str, accepted: Iterable[str]) -> AliasMatch | None:
    """Return the accepted answer that stands in a given one: the first to begin, of these the longest; or None."""
    found = []
    aliases = tuple(accepted)
    for marks in MARKS:
        words = normalised_words(answer, marks)
        for alias in aliases:
            run = _run(words, normalised_words(alias, marks))
            if run:
                found.append(AliasMatch(alias, (run[0].start, run[-1].end)))
    if not found:
        literal = next((a for a in aliases if not normalised_words(a) and a.strip() == answer.strip()), None)
        return AliasMatch(literal, (0, len(answer))) if literal else None
    return min(found, key=lambda match: (match.span[0], -match.span[1]))


def is_refusal(answer: str) -> bool:
    """Say whether an answer declines to give one."""
    return bool(_REFUSALS.search(answer))


def _run(words: Sequence[Word], wanted: Sequence[Word]) -> Sequence[Word]:
    """The first run of `words` that has the texts of `wanted`; empty when there is none."""
    texts, sought = [word.text for word in words], [word.text for word in wanted]
    for start in range(len(texts) - len(sought) + 1):
        if sought and texts[start : start + len(sought)] == sought:
            return words[start : start + len(sought)]
    return ()
