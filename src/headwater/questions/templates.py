"""PopQA asks each of its 16 properties in one wording, so the exact tokens of its questions can be read off.

Mallen et al., "When Not to Trust Language Models", ACL 2023. In each wording below, `{s}` is where the subject stands
and square brackets mark the words that name the property.
"""

import re
from typing import NamedTuple

from headwater.questions.words import Span

WORDINGS = {
    "author": "Who is the [author] of {s}?",
    "capital": "What is the [capital] of {s}?",
    "capital of": "What is {s} the [capital of]?",
    "color": "What [color] is {s}?",
    "composer": "Who was the [composer] of {s}?",
    "country": "In what [country] is {s}?",
    "director": "Who was the [director] of {s}?",
    "father": "Who is the [father] of {s}?",
    "genre": "What [genre] is {s}?",
    "mother": "Who is the [mother] of {s}?",
    "occupation": "What is {s}'s [occupation]?",
    "place of birth": "In what [city] was {s} [born]?",
    "producer": "Who was the [producer] of {s}?",
    "religion": "What is the [religion] of {s}?",
    "screenwriter": "Who was the [screenwriter] for {s}?",
    "sport": "What [sport] does {s} [play]?",
}


class QuestionWording(NamedTuple):
    """A question in a known wording."""

    relation: str
    subject: Span
    property: tuple[Span, ...]


def match_wording(question: str, relation: str | None = None) -> QuestionWording | None:
    """Find the wording of a question, and in it the characters of the subject and of the property.

    Args:
        question: a question, maybe of PopQA.
        relation: PopQA's name of the property, when known; otherwise the first wording that fits.
    """
    for name, pattern in _PATTERNS.items():
        if relation in (None, name) and (found := pattern.fullmatch(question.strip())):
            shift = len(question) - len(question.lstrip())
            spans = {key: (start + shift, end + shift) for key in found.groupdict() for start, end in [found.span(key)]}
            return QuestionWording(name, spans.pop("subject"), tuple(spans.values()))
    return None


def _pattern(wording: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{s\}|\[[^]]*\])", wording)
    names = iter(("property", "property_too"))
    written = (
        "(?P<subject>.+)"
        if piece == "{s}"
        else f"(?P<{next(names)}>{re.escape(piece[1:-1])})"
        if piece.startswith("[")
        else re.escape(piece)
        for piece in pieces
    )
    return re.compile("".join(written), re.DOTALL)


_PATTERNS = {relation: _pattern(wording) for relation, wording in WORDINGS.items()}
