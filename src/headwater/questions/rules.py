"""Exact words by rules, without a model: the words of an English question that name its entity and the property asked.

1. The subject (the entity) is the text in quotation marks; else the names: words with a capital, which small words may
   join ("Duke of Wellington"), and everything after the last "of" if it contains a name. In a question without a
   capital it is everything after the property, or before the question word.
2. The property is the noun after a possessive ("Ann's job"); else the verb after "who"; else the nouns after "what",
   "which", "how many", or after the verb that follows them ("what is the capital of ..."), and the words after the
   entity ("In what city was she born?").
3. The answer: a short answer is used whole. For "Is ...?" it is yes or no, for "when" and "how many" the first date or
   number that is not in the question, for "this or that" the alternative that is named. In a sentence with a verb one
   side only repeats the question: the exact answer is the first new title, name or noun phrase of the other side; for
   occupations, sports, genres and other kinds a noun phrase is preferred to a name. "I think" and the like are
   excluded. Whether the answer is right does not matter.

`headwater.questions.extract` measures how often these are the words that a question set itself marks. Rules have no
knowledge: they fail on titles without a capital, questions of several clauses and other languages.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from functools import lru_cache
from unicodedata import combining, normalize

from headwater.questions.extract import EXTRACTORS
from headwater.questions.words import Span


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ASKING = _words("who whom whose what which when where why how")
COPULAS = _words("is are was were be been being")
AUXILIARIES = COPULAS | _words("'s do does did has have had can could will would shall should may might must")
ARTICLES = _words("a an the this that these those his her its their")
LINKS = _words("of for in on at by to from with about into as")
JOINING = _words("of the de la le von van der den al bin and & du da del di")
"""Small words that may be inside a name."""
SHORTENED = _words("St Mt Dr Mr Mrs Ms Jr Sr")
ENDS = LINKS | _words(
    "who which that where when and or but because so during after before between under over through within"
)
FILLERS = ARTICLES | _words("it he she they there this that yes no i we you")
"""Words that may begin an answer with a capital but are not names."""
SMALL = ARTICLES | AUXILIARIES | ENDS | JOINING | FILLERS | {"not"}
GENERAL = _words(
    "city country state county town province member part place both two one first type kind example term genre "
    "subgenre game form located known name made written given found original"
)
"""Words that introduce an answer but are not part of it."""
PARTICIPLES = _words("written known made born found held set created")
ADVERBS = GENERAL - {"member", "part", "place"} | _words(
    "currently also often usually approximately about around actually"
)
KINDS = _words(
    "occupation profession job sport genre type types kind color colour material animal instrument activity "
    "nationality relation"
)
"""Words in a question that ask for something without a proper name."""
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATES = re.compile(
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)? )?\b(?:{MONTHS})\b(?: \d{{1,2}}\b)?(?:,? \d{{3,4}})|\b\d{{1,2}} (?:{MONTHS})\b"
)
COUNTED = (
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen|"
    "nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|million|billion"
)
NUMBERS = re.compile(rf"\d[\d,.:/-]*\d%?|\d%?|\b(?:{COUNTED})\b(?:[ -](?:{COUNTED}))*", re.IGNORECASE)
AMOUNTS = re.compile(rf"(?:{NUMBERS.pattern})(?:(?:st|nd|rd|th)(?: century)?|s\b)?", re.IGNORECASE)
QUOTED = re.compile(r"[\"“”«]([^\"“”«»]+)[\"”»]|(?<!\w)['‘]([^'’‘]+)['’](?!\w)")
WORDS = re.compile(r"[^\W_]+(?:[-.’'][^\W\d_]+)*\.?(?=\s|$|[^\w])|&|'s\b", re.UNICODE)
OPINIONS = re.compile(
    r"^I (?:think|believe|guess|suppose|would say)(?: that)?,? |,? I (?:think|believe|guess|suppose|would say)$"
)
"""Phrases that mark an answer as an opinion."""
SHORT, LONG = 3, 8
"""An answer of at most `SHORT` words without a verb is used whole; up to `LONG`, if none of them is in the question."""
ALIKE = 0.8
"""Two words with a larger ratio (`difflib`) count as spellings of one word."""


class _Word(str):
    """A word of a text with its span."""

    start: int
    end: int

    @classmethod
    def all(cls, text: str) -> list[_Word]:
        """Split a text into words; a possessive is a separate word."""
        words = []
        for match in WORDS.finditer(text.replace("’", "'")):
            whole, start = match[0].rstrip("."), match.start()
            if len(whole) == 1 and whole.isupper() and match[0].endswith("."):
                whole = match[0]  # an initial
            cut = len(whole) - 2 if whole.endswith("'s") and len(whole) > 2 else len(whole)
            for piece, at in ((whole[:cut], start), (whole[cut:], start + cut)):
                if piece:
                    word = cls(piece)
                    word.start, word.end = at, at + len(piece)
                    words.append(word)
        return words

    @property
    def is_name(self) -> bool:
        """Whether the word begins with a capital."""
        return self[0].isupper()


@EXTRACTORS.add("rules")
def by_rules(question: str, answer: str) -> dict[str, object]:
    """Return the words of a question that name its subject and property, and the exact words of an answer, if found."""
    words = _Word.all(question)
    subjects = _subjects(question, words)
    subjects, properties = (subjects, _properties(words, subjects)) if subjects else _without_names(words)
    parts: dict[str, object] = {}
    if subjects:
        parts["subject"] = [question[start:end] for start, end in subjects]
    if properties:
        parts["property"] = [question[start:end] for start, end in properties]
    if exact := _answer(question, answer):
        parts["answer"] = exact
    return parts


def _subjects(text: str, words: list[_Word]) -> list[Span]:
    """Return the spans of the entity of a question."""
    if quoted := _quoted(text):
        return quoted
    # Whether the first word is capitalized only because it begins the sentence.
    first = words[0].lower() if words else ""
    opens = first in ASKING | AUXILIARIES | LINKS | ARTICLES or (len(words) > 1 and not words[1].is_name)
    names = _names(words[1:] if opens else words)
    return _to_the_end(words, names) if names else []


def _without_names(words: list[_Word]) -> tuple[list[Span], list[Span]]:
    """Return subject and property of a question without a capital: the property comes first, then the subject.

    "who wrote the novel middlemarch", "how many seasons of rules of engagement are there", "perth is in which state".
    """
    lower = [word.lower() for word in words]
    asking = next((n for n, word in enumerate(lower) if word in ASKING), -1)
    before, after = _stripped(words[: max(asking, 0)]), words[asking + 1 :]
    has_auxiliary = bool(after) and after[0].lower() in AUXILIARIES
    if asking >= 0 and lower[asking] in ("who", "whom") and after and not has_auxiliary:
        head = 1
    elif asking >= 0 and lower[asking] in ("when", "where", "why", "how") and has_auxiliary:
        head = 0
    else:
        start = next((n for n, word in enumerate(after) if word.lower() not in SMALL | {"many", "much"}), len(after))
        is_kind = len(after) > 1 and after[0].lower() in GENERAL and after[1] == "of"  # "what kind of thing is ..."
        ends = (
            n
            for n, word in enumerate(after)
            if n > start and word.lower() in AUXILIARIES | (LINKS - {"of"} if is_kind else LINKS)
        )
        head = next(ends, len(after))
    prop, rest = _stripped(after[:head]), _stripped(after[head:])
    if not prop and len(rest) > 1 and after[0].lower() in ("do", "does", "did") and not LINKS & {*rest}:
        prop, rest = rest[-1:], rest[:-1]  # "where does a gardener work"
    if head < len(after) and after[head] == "'s":
        prop, rest = rest, prop
    subjects = [part for part in (before, rest) if part]
    if not subjects:
        prop, subjects = [], [prop] if prop else []
    return [(part[0].start, part[-1].end) for part in subjects], [(prop[0].start, prop[-1].end)] if prop else []


def _stripped(words: list[_Word]) -> list[_Word]:
    """Return words without small words at either end."""
    content = [n for n, word in enumerate(words) if word.lower() not in SMALL | {"many", "much"}]
    return words[content[0] : content[-1] + 1] if content else []


def _to_the_end(words: list[_Word], names: list[Span]) -> list[Span]:
    """Extend the entity after the last "of" or "for" to everything there: "the composer of Ma vlast?"."""
    start = next((words[n + 1].start for n in reversed(range(len(words) - 1)) if words[n] in ("of", "for")), None)
    if start is None or not any(begin >= start for begin, _ in names):
        return names
    after = [word for word in words if word.start >= start]
    holds = any(begin < start < end for begin, end in names) or any(
        word.lower() in AUXILIARIES | LINKS for word in after
    )
    return names if holds else [span for span in names if span[1] <= start] + [(start, after[-1].end)]


def _quoted(text: str) -> list[Span]:
    return [match.span(1) if match[1] is not None else match.span(2) for match in QUOTED.finditer(text)]


def _names(words: list[_Word]) -> list[Span]:
    """Return runs of words with a capital, including numbers and the small words between them."""
    spans: list[Span] = []
    run: list[_Word] = []
    for word in words:
        starts = word.is_name and word.lower() not in ASKING
        touches = bool(run) and word.start - run[-1].end <= 1 + (run[-1] in SHORTENED)
        if touches and (starts or word in JOINING or word == "'s" or word[0].isdigit()):
            run.append(word)
            continue
        spans += _trimmed(run)
        run = [word] if starts else []
    return spans + _trimmed(run)


def _trimmed(run: list[_Word]) -> list[Span]:
    """Return the span of a run without the small words at its end."""
    while run and not (run[-1].is_name or run[-1][0].isdigit()):
        run = run[:-1]
    return [(run[0].start, run[-1].end)] if run else []


def _properties(words: list[_Word], subjects: list[Span]) -> list[Span]:
    """Return the spans of the property that is asked of the entity."""
    free = [not any(start < word.end and word.start < end for start, end in subjects) for word in words]
    lower = [word.lower() for word in words]
    end = len(words)
    for n, word in enumerate(words):  # a possessive: "Ann's job"
        if word == "'s" and n and not free[n - 1] and n + 1 < end and free[n + 1]:
            return _nouns(words, lower, free, n + 1)
    asking = next((n for n, word in enumerate(lower) if word in ASKING), None)
    start = 0 if asking is None else asking + 1
    if start >= end or not free[start]:
        return _after_entity(words, lower, free)
    if asking is not None and lower[asking] == "who" and lower[start] not in AUXILIARIES:
        return [(words[start].start, words[start].end)]
    if lower[start] not in AUXILIARIES:
        begin = start + 1 if lower[start] in ("many", "much") else start
        return _nouns(words, lower, free, begin) + _after_entity(words, lower, free)
    return _nouns(words, lower, free, start + 1) or _after_entity(words, lower, free)


def _nouns(words: list[_Word], lower: list[str], free: list[bool], at: int) -> list[Span]:
    """Return the noun at an index, and nouns joined to it by "of": "the capital of the native country of Ann"."""
    spans = _noun(words, lower, free, at)
    while spans:
        at = next(n for n, word in enumerate(words) if word.end == spans[-1][1]) + 1
        more = _noun(words, lower, free, at + 1) if at < len(words) and lower[at] == "of" else []
        if not more:
            break
        spans += more
    return spans


def _noun(words: list[_Word], lower: list[str], free: list[bool], at: int) -> list[Span]:
    """Return the words from an index up to a link, an auxiliary or the entity, without leading articles."""
    while at < len(words) and lower[at] in ARTICLES:
        at += 1
    stop = at
    while stop < len(words) and free[stop] and lower[stop] not in LINKS | AUXILIARIES | {"'s"}:
        stop += 1
    return [(words[at].start, words[stop - 1].end)] if stop > at else []


def _after_entity(words: list[_Word], lower: list[str], free: list[bool]) -> list[Span]:
    """Return the words after the entity in a question with an auxiliary: "In what city was she born?"."""
    if all(free) or not any(word in AUXILIARIES for word in lower):
        return []
    last = max(n for n, one in enumerate(free) if not one)
    places = [n for n in range(last + 1, len(words)) if lower[n] not in ARTICLES]
    if all(lower[n] in LINKS | AUXILIARIES for n in places):
        return []
    return [(words[places[0]].start, words[places[-1]].end)]


def _answer(question: str, answer: str) -> str | None:
    """Return the exact words of an answer, by the same rules for right and wrong answers."""
    text = OPINIONS.sub("", answer.strip().rstrip(".!? "))
    text = re.sub(r"\s+\([^()]*\)?$", "", text)
    words, question_words = _Word.all(text), _Word.all(question)
    if not words:
        return None
    lower = [word.lower() for word in question_words]
    if words[0].lower() in ("yes", "no") and lower and lower[0] in AUXILIARIES:
        return text[words[0].start : words[0].end]
    verb = next((n for n, word in enumerate(words) if word.lower() in AUXILIARIES and word != "'s"), None)
    in_question = _Known(lower)
    is_new = [not in_question(word) for word in words]
    if verb is None and (len(words) <= SHORT or (len(words) <= LONG and all(is_new))):
        begin = next((n for n, word in enumerate(words) if word.lower() not in ARTICLES | {"in", "on", "at"}), 0)
        return text[words[begin].start : words[-1].end]
    names = (text[start:end] for start, end in _names(words))
    chosen = (name for name in names if f"{name} or " in question or f" or {name}" in question)
    if "or" in lower and (first := next(chosen, None)):
        return first
    asks_when = not {"when", "year", "date"}.isdisjoint(lower)
    if asks_when and (date := DATES.search(text)):
        return date[0]
    if asks_when or "how" in lower:
        # The first amount that is not in the question.
        amounts = (match[0].rstrip(",.:/-") for match in AMOUNTS.finditer(text))
        if amount := next((amount for amount in amounts if amount not in question_words), None):
            return amount
    sides = [words] if verb is None else [words[verb + 1 :], words[:verb]]
    # "X was written by Y": the new words follow "by", although a name precedes the verb.
    is_passive = verb is not None and any(word == "by" for word in sides[0][:3])
    comes_after = is_passive or KINDS & {*lower} or lower[:1] in (["in"], ["where"])
    if verb is not None and not comes_after and _tells(words[:verb], is_new[:verb]):
        sides.reverse()
    sides = [part for part in sides if part]
    # First words that are not in the question; only if there are none, any name or phrase.
    for is_known in (in_question, _Known([])):  # the answer may choose among words of the question
        for part in sides if not KINDS & {*lower} else ():
            if name := _new_name(text, part, is_known, is_after=verb is not None and part[0].start > words[verb].start):
                return name
        for part in sides:
            if phrase := _new_phrase(text, part, is_known):
                return phrase
    return None


class _Known:
    """Tests whether a word adds nothing new: it is small, general, or similar to a word of the question."""

    def __init__(self, asked: list[str]):
        self.asked = [_folded(word) for word in asked]

    def __call__(self, word: str) -> bool:
        says_nothing = (word.lower() in SMALL | GENERAL and word != "May") or _is_participle(word)
        return says_nothing or any(_alike(one, _folded(word)) for one in self.asked)


def _is_participle(word: str) -> bool:
    return word.islower() and word.endswith("ed")


@lru_cache(maxsize=100_000)
def _alike(one: str, other: str) -> bool:
    """Return whether two words are the same, perhaps misspelled."""
    # Cheap tests first, because difflib's time grows with the product of the lengths.
    near = min(len(one), len(other)) > 3 and one[0] == other[0] and abs(len(one) - len(other)) < 3
    return one == other or (near and SequenceMatcher(None, one, other).ratio() > ALIKE)


def _folded(word: str) -> str:
    """Return a word without capitals, accents and the plural ending."""
    plain = "".join(letter for letter in normalize("NFKD", word.lower()) if not combining(letter))
    # Not for short words: "gas" would become "ga".
    return plain[:-1] if plain.endswith("s") and len(plain) > 3 else plain


def _tells(words: list[_Word], is_new: list[bool]) -> bool:
    """Return whether the words before the verb are the answer, rather than a repetition of the question."""
    content = [new for word, new in zip(words, is_new, strict=True) if word.lower() not in SMALL]
    names = any(word.is_name and new for word, new in zip(words, is_new, strict=True))
    return names and 2 * sum(content) > len(content)


def _new_name(text: str, words: list[_Word], is_known: _Known, is_after: bool) -> str | None:
    """Return the first new title in quotation marks, or new name, with the noun that it modifies."""
    low, high = words[0].start, words[-1].end
    for start, end in (*((low + start, low + end) for start, end in _quoted(text[low:high])), *_names(words)):
        name_words = [word for word in words if start <= word.start < end]
        if not name_words or all(is_known(word) for word in name_words):
            continue
        if name_words[0].lower() in ARTICLES | FILLERS and len(name_words) > 1:
            start = name_words[1].start
        before = next((word.lower() for word in reversed(words) if word.end < start), "")
        after = next((word for word in words if word.start == end + 1), None)
        describes = before in ("a", "an") or (before == "the" and is_after and len(name_words) == 1)
        if after is not None and describes and after.islower() and after not in ENDS | SMALL:
            return _new_phrase(text, [word for word in words if word.start >= start], is_known)
        return text[start:end]
    return None


def _new_phrase(text: str, words: list[_Word], is_known: _Known) -> str | None:
    """Return the first noun phrase with a new word, without small or general words at its beginning."""
    phrase: list[_Word] = []
    for word in [*words, None]:
        gap = text[phrase[-1].end : word.start] if phrase and word is not None else ""
        ends = word is None or (gap.strip(" \"'“”") and not (gap in (".", ",") and word[0].isdigit()))
        if phrase and (ends or (word is not None and word.lower() in ENDS | AUXILIARIES | PARTICIPLES)):
            if not all(is_known(one) for one in phrase):
                return text[phrase[0].start : phrase[-1].end]
            phrase = []
        if word is not None and (phrase or not (word.lower() in SMALL | ADVERBS or _is_participle(word))):
            phrase.append(word)
    return None
