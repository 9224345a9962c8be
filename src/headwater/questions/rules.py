"""Exact words by rules, without a model: which words of an English question name its entity and what is asked of it.

1. The subject (the entity) is what stands in quotation marks; else the names: words with a capital, which small words
   may join ("Duke of Wellington"), and all that stands behind the last "of" if it holds one; else numbers; else the
   last noun phrase.
2. The property is the noun behind a possessive ("Ann's job"); else the verb behind "who"; else the nouns behind "what",
   "which", "how many", or behind the verb that follows them ("what is the capital of ..."), and what stands behind the
   entity ("In what city was she born?").
3. The answer is what stands in quotation marks; else a date; else the first name that is not the question's; else a
   number; else the first noun phrase behind "is", "was", ...; short answers are taken whole. "I think" and the like do
   not belong to it. Whether it is right does not matter.

`headwater.questions.agreement` says how often these are the words that a question set names itself. Rules know nothing:
titles without a capital, questions of several clauses and other languages are beyond them.
"""

from __future__ import annotations

import re

from headwater.questions.extract import EXTRACTORS
from headwater.questions.words import Span

ASKING = frozenset("who whom whose what which when where why how".split())  # noqa: SIM905
COPULAS = frozenset("is are was were be been being".split())  # noqa: SIM905
AUXILIARIES = COPULAS | frozenset(
    "'s do does did has have had can could will would shall should may might must".split()  # noqa: SIM905
)
ARTICLES = frozenset("a an the this that these those his her its their".split())  # noqa: SIM905
LINKS = frozenset("of for in on at by to from with about into as".split())  # noqa: SIM905
JOINING = frozenset("of the de la le von van der den al bin and & du da del di".split())  # noqa: SIM905
"""Small words that may stand inside a name."""
ENDS = LINKS | frozenset("who which that where when and or but because so".split())  # noqa: SIM905
FILLERS = ARTICLES | frozenset("it he she they there this that yes no i we you".split())  # noqa: SIM905
"""Words that begin an answer with a capital and name nothing."""
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATES = re.compile(
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)? )?\b(?:{MONTHS})\b(?: \d{{1,2}}\b)?(?:,? \d{{3,4}})|\b\d{{1,2}} (?:{MONTHS})\b"
)
COUNTED = (
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|"
    "nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|billion"
)
NUMBERS = re.compile(rf"\d[\d,.:/-]*\d%?|\d%?|\b(?:{COUNTED})\b(?:[ -](?:{COUNTED}))*", re.IGNORECASE)
QUOTED = re.compile(r"[\"“”«]([^\"“”«»]+)[\"”»]|(?<!\w)['‘]([^'’‘]+)['’](?!\w)")
WORDS = re.compile(r"[^\W_]+(?:[-.’'][^\W\d_]+)*\.?(?=\s|$|[^\w])|&|'s\b", re.UNICODE)
OPINIONS = re.compile(
    r"^I (?:think|believe|guess|suppose|would say)(?: that)?,? |,? I (?:think|believe|guess|suppose|would say)$"
)
"""What says of an answer that somebody gives it."""
SHORT = 3
"""An answer of so many words and no verb is taken whole."""


class _Word(str):
    """A word of a text, and where it stands."""

    start: int
    end: int

    @classmethod
    def all(cls, text: str) -> list[_Word]:
        """Take a text apart into words; a possessive is a word of its own."""
        found = []
        for match in WORDS.finditer(text.replace("’", "'")):
            whole, start = match[0].rstrip("."), match.start()
            if len(whole) == 1 and whole.isupper() and match[0].endswith("."):
                whole = match[0]  # an initial
            cut = len(whole) - 2 if whole.endswith("'s") and len(whole) > 2 else len(whole)
            for piece, at in ((whole[:cut], start), (whole[cut:], start + cut)):
                if piece:
                    word = cls(piece)
                    word.start, word.end = at, at + len(piece)
                    found.append(word)
        return found

    @property
    def is_name(self) -> bool:
        """Whether it begins with a capital."""
        return self[0].isupper()


@EXTRACTORS.add("rules")
def by_rules(question: str, answer: str) -> dict[str, object]:
    """Return the words of a question that name its subject and property, and the exact words of an answer.

    An extractor as `headwater.questions.extract` describes them: a part that no rule finds is left out.
    """
    words = _Word.all(question)
    subjects = _subjects(question, words)
    properties = _properties(words, subjects)
    found: dict[str, object] = {}
    if subjects:
        found["subject"] = [question[start:end] for start, end in subjects]
    if properties:
        found["property"] = [question[start:end] for start, end in properties]
    if exact := _answer(question, answer):
        found["answer"] = exact
    return found


def _subjects(text: str, words: list[_Word]) -> list[Span]:
    """Return where the entity of a question stands."""
    if quoted := _quoted(text):
        return quoted
    asks = words[1:] if words and _opens(words) else words
    if names := _names(asks):
        return _to_the_end(text, words, names)
    if numbers := [match.span() for match in NUMBERS.finditer(text)]:
        return numbers
    return _last_noun_phrase(words)


def _to_the_end(text: str, words: list[_Word], names: list[Span]) -> list[Span]:
    """Let the entity behind the last "of" or "for" be all that stands there: "the composer of Ma vlast?"."""
    start = next((words[n + 1].start for n in reversed(range(len(words) - 1)) if words[n] in ("of", "for")), None)
    if start is None or not any(begin >= start for begin, _ in names):
        return names
    behind = [word for word in words if word.start >= start]
    holds = any(begin < start < end for begin, end in names) or any(
        word.lower() in AUXILIARIES | LINKS for word in behind
    )
    return names if holds else [span for span in names if span[1] <= start] + [(start, behind[-1].end)]


def _opens(words: list[_Word]) -> bool:
    """Whether the first word has its capital from the sentence that it begins."""
    first = words[0].lower()
    return first in ASKING | AUXILIARIES | LINKS | ARTICLES or (len(words) > 1 and not words[1].is_name)


def _quoted(text: str) -> list[Span]:
    return [match.span(1) if match[1] is not None else match.span(2) for match in QUOTED.finditer(text)]


def _names(words: list[_Word]) -> list[Span]:
    """Return runs of words with a capital, with the small words and numbers that stand between such."""
    spans: list[Span] = []
    run: list[_Word] = []
    for word in words:
        starts = word.is_name and word.lower() not in ASKING
        touches = bool(run) and word.start - run[-1].end <= 1
        if touches and (starts or word in JOINING or word == "'s" or word[0].isdigit()):
            run.append(word)
            continue
        spans += _trimmed(run)
        run = [word] if starts else []
    return spans + _trimmed(run)


def _trimmed(run: list[_Word]) -> list[Span]:
    """A run without the small words at its end."""
    while run and not (run[-1].is_name or run[-1][0].isdigit()):
        run = run[:-1]
    return [(run[0].start, run[-1].end)] if run else []


def _last_noun_phrase(words: list[_Word]) -> list[Span]:
    """The words behind the last link or auxiliary, without articles and a verb at the end."""
    borders = [n for n, word in enumerate(words) if word.lower() in LINKS | AUXILIARIES | ASKING]
    last = next((n for n in reversed(borders) if n + 1 < len(words)), -1)
    phrase = [word for word in words[last + 1 :] if word.lower() not in ARTICLES]
    if last >= 0 and words[last].lower() in ("does", "did", "do") and len(phrase) > 1:
        phrase = phrase[:-1]
    return [(phrase[0].start, phrase[-1].end)] if phrase else []


def _properties(words: list[_Word], subjects: list[Span]) -> list[Span]:
    """Return where what is asked of the entity stands."""
    free = [not any(start < word.end and word.start < end for start, end in subjects) for word in words]
    lower = [word.lower() for word in words]
    end = len(words)
    for n, word in enumerate(words):  # a possessive: "Ann's job"
        if word == "'s" and n and not free[n - 1] and n + 1 < end and free[n + 1]:
            return _nouns(words, lower, free, n + 1)
    asking = next((n for n, word in enumerate(lower) if word in ASKING), None)
    start = 0 if asking is None else asking + 1
    if start >= end or not free[start]:
        return _behind(words, lower, free)
    if asking is not None and lower[asking] == "who" and lower[start] not in AUXILIARIES:
        return [(words[start].start, words[start].end)]
    if lower[start] not in AUXILIARIES:
        begin = start + 1 if lower[start] in ("many", "much") else start
        return _nouns(words, lower, free, begin) + _behind(words, lower, free)
    return _nouns(words, lower, free, start + 1) or _behind(words, lower, free)


def _nouns(words: list[_Word], lower: list[str], free: list[bool], at: int) -> list[Span]:
    """The noun at a place, and those that follow it by "of": "the capital of the native country of Ann"."""
    found = _noun(words, lower, free, at)
    while found:
        at = next(n for n, word in enumerate(words) if word.end == found[-1][1]) + 1
        more = _noun(words, lower, free, at + 1) if at < len(words) and lower[at] == "of" else []
        if not more:
            break
        found += more
    return found


def _noun(words: list[_Word], lower: list[str], free: list[bool], at: int) -> list[Span]:
    """The words from a place on, up to a link, an auxiliary or the entity; articles in front left out."""
    while at < len(words) and lower[at] in ARTICLES:
        at += 1
    stop = at
    while stop < len(words) and free[stop] and lower[stop] not in LINKS | AUXILIARIES | {"'s"}:
        stop += 1
    return [(words[at].start, words[stop - 1].end)] if stop > at else []


def _behind(words: list[_Word], lower: list[str], free: list[bool]) -> list[Span]:
    """What stands behind the entity, of a question with an auxiliary: "In what city was she born?"."""
    if all(free) or not any(word in AUXILIARIES for word in lower):
        return []
    last = max(n for n, one in enumerate(free) if not one)
    places = [n for n in range(last + 1, len(words)) if lower[n] not in ARTICLES]
    if all(lower[n] in LINKS | AUXILIARIES for n in places):
        return []
    return [(words[places[0]].start, words[places[-1]].end)]


def _answer(question: str, answer: str) -> str | None:
    """Return the exact words of an answer, found in one way in right and wrong ones."""
    text = OPINIONS.sub("", answer.strip().rstrip(".!? "))
    words = _Word.all(text)
    if not words:
        return None
    if quoted := _quoted(text):
        return text[slice(*quoted[0])]
    verb = next((n for n, word in enumerate(words) if word.lower() in COPULAS), None)
    if verb is None and len(words) <= SHORT:
        first = 1 if words[0].lower() in ARTICLES and len(words) > 1 else 0
        return text[words[first].start :]
    if date := DATES.search(text):
        return date[0]
    behind = words if verb is None or verb + 1 == len(words) else words[verb + 1 :]
    asked = {word.lower() for word in _Word.all(question)} | JOINING | FILLERS
    for known in (asked, FILLERS):  # of names that the question has too, the answer may choose one
        for start, end in (span for part in (behind, words) for span in _names(part)):
            if not all(word.lower() in known for word in _Word.all(text[start:end])):
                return text[start:end]
    if number := NUMBERS.search(text):
        return number[0]
    phrase: list[_Word] = []
    for word in behind:
        if word.lower() in ARTICLES and not phrase:
            continue
        if phrase and (word.lower() in ENDS | AUXILIARIES or text[phrase[-1].end : word.start].strip()):
            break
        phrase.append(word)
    return text[phrase[0].start : phrase[-1].end] if phrase else None
