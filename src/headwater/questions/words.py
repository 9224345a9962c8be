"""Words in a text and where they stand: found as they are written, or normalised as answers are compared.

Normalisation follows the evaluation scripts of SQuAD (Rajpurkar et al., EMNLP 2016) and TriviaQA (Joshi et al., ACL
2017): letter case, punctuation and the articles a, an, the do not count. Nor do accents and compatibility forms of
Unicode, which these scripts keep ("São Paulo" is "Sao Paulo"). Marks inside a word are read both ways, as nothing, as
these scripts do ("U.S." is "us"), and as a space ("New-York" is "new york"): `MARKS` holds the two readings.
"""

import re
import unicodedata
from functools import lru_cache
from typing import NamedTuple, TypeAlias

Span: TypeAlias = tuple[int, int]
"""Characters from `start` to `end`, the end not included."""
MARKS = ("joined", "apart")
ARTICLES = frozenset(("a", "an", "the"))


class Word(NamedTuple):
    """A normalised word and the characters of the text that it was made of."""

    text: str
    start: int
    end: int


def find_words(text: str, words: str) -> Span | None:
    """Return where `words` stand in a text: the first time as whole words, else the first time at all, else None."""
    if not words.strip():
        return None
    whole = re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text)
    start = whole.start() if whole else text.find(words)
    return (start, start + len(words)) if start >= 0 else None


def normalised_words(text: str, marks: str = "joined") -> tuple[Word, ...]:
    """Take a text apart into words as answers are compared.

    Args:
        text: any text.
        marks: "joined": punctuation vanishes; "apart": it parts words.

    Returns:
        The words without articles; with them, where there would be no others (so that "The The" stays comparable). A
        text of punctuation alone has none.
    """
    words = []
    for piece in re.finditer(r"\S+", text):
        words += _words_of_piece(piece[0], piece.start(), marks)
    return tuple(word for word in words if word.text not in ARTICLES) or tuple(words)


def _words_of_piece(piece: str, shift: int, marks: str) -> list[Word]:
    words: list[Word] = []
    is_open = False
    for place, character in enumerate(piece, start=shift):
        kept = _normalised(character)
        if kept is None:
            is_open = is_open and marks == "joined"
        elif is_open or (words and not kept):
            words[-1] = Word(words[-1].text + kept, words[-1].start, place + 1)
        elif kept:
            words.append(Word(kept, place, place + 1))
            is_open = True
    return words


@lru_cache(maxsize=4096)
def _normalised(character: str) -> str | None:
    """A character without case and accents; empty for an accent alone, None for a mark or symbol."""
    if character in "'’‘`´":
        return ""
    if unicodedata.category(character)[0] in "PSZ":
        return None
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", character).casefold())
    return "".join(c for c in folded if not unicodedata.combining(c))
