"""Words and their positions in a text: exact matches, and normalisation for the comparison of answers.

Normalisation follows the evaluation scripts of SQuAD (Rajpurkar et al., EMNLP 2016) and TriviaQA (Joshi et al., ACL
2017): it ignores letter case, punctuation and the articles a, an, the. Unlike these scripts it also ignores accents and
compatibility forms of Unicode ("São Paulo" is "Sao Paulo", "Łódź" is "Lodz"), and zero-width marks. Marks inside a word
have two readings: as nothing, as in these scripts ("U.S." is "us"), and as a space ("New-York" is "new york"); `MARKS`
names the two readings. Normalisation also differs from the scripts where a mark carries meaning:

    numbers     "-5", "3.5", "1/2", "1:30" and "10^6" are one word each, "3,677" is "3677". "$5" is "5" and is not "€5".
    symbols     "C++", "C#", "A+" and "O-" are words; so is an operator between two words ("x > y").
    letters     an "a" with no word after it is not an article ("The answer is A.", "Vitamin A").
    no spaces   each Chinese character and hiragana is a word, each run of katakana, and each consonant of Thai, Lao,
                Khmer and Burmese with its vowels.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import pandas as pd

from headwater.models.tokens import Offsets, Tokenizer, token_span

Span: TypeAlias = tuple[int, int]
"""Characters from `start` to `end`, excluding `end`."""
MARKS = ("joined", "apart")
ARTICLES = frozenset(("a", "an", "the"))

_SILENT = "'’‘`´\u02bb\u02bc\u02bd\u02be\u02bf\u0640"
"""Apostrophes, and the stroke that lengthens an Arabic word."""
_LETTERS = {"æ": "ae", "œ": "oe", "þ": "th", "ð": "d", "ı": "i"}
"""Replacements of letters that Unicode does not decompose, except those whose name is a letter "with" ... (ł, ø, đ)."""
_AS = str.maketrans("−‐‑—―⁄∕∶♯♭٫٬", "---––//:#b.,", _SILENT)
_SCRIPTS = {"CJK": "h", "IDEOGRAPHIC": "h", "HIRAGANA": "h", "KATAKANA": "k", "KATAKANA-HIRAGANA": "k", "HANGUL": "g"}
_SCRIPTS |= dict.fromkeys(("THAI", "LAO", "KHMER", "MYANMAR"), "t")
_CHINESE_NUMBERS = "〇一二三四五六七八九十百千万億萬亿兆"
_NUMBERS = (
    r"(?<![0:])0{1,2}(?::00){1,2}(?![:0])",
    r"0+\^-?0+",
    r"(?<![/0])0{1,3}/0{1,3}(?![/0])",
    r"(?<!0[.,])0{1,3}(?:,000)+(?:\.0+)?(?![,.]?0)",
    r"(?<!0[.,])0{1,3}(?:\.000){2,}(?![,.]?0)",
    r"(?<!0[.,])0+[.,]0+(?![.,]?0)",
    r"(?<![a0hnkgtm.,])\.0+",
)
_SIGN = r"(?<![a0hnkgtm)$+#.–-])[–-]\$?"
_WORD = re.compile(
    rf"(?P<number>(?:{_SIGN})?(?:{'|'.join(_NUMBERS)})|{_SIGN}0+)|(?P<charged>(?<![a0])a{{1,2}}-(?![a0hnkgt$-]))"
    r"|(?P<alone>v?t(?:m|jt)*|n+|[hvmj])|[a0]*a(?:[+#]{2,}(?!a)|[+#](?![a0]))|[a0]+|k+|g+"
)
"""Pattern of a word, over the kinds of its characters (`_kind`)."""
_LETTER_FOLLOWS = re.compile(r"(?!\s)|\s*$|[^\S\n]*\n|\s(?:is|was|because|and|or)\b")
_BEGINNING = re.compile(r"(?:^|[.!?:;\n])\W*$")


class Word(NamedTuple):
    """A normalised word and the span of its characters in the text."""

    text: str
    start: int
    end: int
    unit: str = ""
    """The currency or percent sign at a number (if any)."""
    may_be_article: bool = False
    may_be_letter: bool = True
    """Whether it may be anything other than an article or the pronoun I."""


def find_words(text: str, words: str) -> Span | None:
    """Return the span of `words` in a text: the first match as whole words, else the first match, else None."""
    if not words.strip():
        return None
    whole = re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text)
    start = whole.start() if whole else text.find(words)
    return (start, start + len(words)) if start >= 0 else None


@lru_cache(maxsize=4096)
def normalised_words(text: str, marks: str = "joined") -> tuple[Word, ...]:
    """Split a text into normalised words, including articles; punctuation alone yields no words.

    With marks "joined", punctuation inside a word is removed; with "apart", it separates words.
    """
    words = tuple(_words(text, marks))
    if all(word.text in ARTICLES for word in words):  # so that "The The" stays comparable
        return tuple(word._replace(may_be_article=False, may_be_letter=True) for word in words)
    return words


def _words(text: str, marks: str) -> Iterator[Word]:
    """Yield the words of a text, each as soon as nothing more can be joined to it."""
    folded, places = _folded(text)
    # As long as the folded text, so that indices agree.
    kinds = "".join(map(_kind, re.sub("[東东]京", "一一", folded)))  # one word: Kyoto (京都) is not in 東京都
    begun: tuple[int, int] | None = None
    written, was_alone, end = "", False, 0
    for match in _WORD.finditer(kinds):
        start, gap = match.start(), kinds[end : match.start()]
        stops = match.end() - (match["charged"] is not None and not text[places[start][0]].isupper())
        new = _number(folded[start:stops], kinds[start:stops]) if match["number"] else folded[start:stops]
        is_alone = match["alone"] is not None
        joins = marks == "joined" and bool(gap) and not set(" =+") & set(gap) and not was_alone and not is_alone
        if begun and joins and not (kinds[end - 1] == "0" and kinds[start] in "0."):
            begun, written = (begun[0], stops), written + new
        else:
            if begun:
                yield _word(text, folded, kinds, places, begun, written)
            for place in range(end, start):
                parts = was_alone and is_alone and folded[place] in "、。,;!?."
                compares = folded[place] in "<>≤≥±√" and place + 1 == start and kinds[start] in "0."
                if compares or (begun and (parts or kinds[place] in "=+")):
                    yield Word(folded[place], *places[place])
            begun, written = (start, stops), new
        was_alone, end = is_alone, stops
    if begun:
        yield _word(text, folded, kinds, places, begun, written)


def _word(text: str, folded: str, kinds: str, places: list[Span], span: Span, written: str) -> Word:
    """Make a word from the folded characters in a span."""
    start, end = span
    characters = places[start][0], places[end - 1][1]
    if "a" not in kinds[start:end] and "0" in kinds[start:end]:
        sign = kinds.find("$", max(start - 1, 0), end + 1)
        sign = end + 1 if sign < 0 and kinds[end : end + 2] == " $" else sign
        return Word(written, *characters, unit=folded[sign] if sign >= 0 else "")
    if written not in ARTICLES | {"i"}:
        return Word(written, *characters)
    is_letter = written in "ai" and _LETTER_FOLLOWS.match(folded, end) is not None
    in_capitals = text[characters[0]].isupper() and not _BEGINNING.search(folded[:start])
    may_be_letter = is_letter or (written != "i" and in_capitals)
    return Word(written, *characters, may_be_article=written != "i" and not is_letter, may_be_letter=may_be_letter)


def _number(number: str, kinds: str) -> str:
    """Return a number in canonical form."""
    first = min(place for place in (kinds.find("0"), kinds.find(".")) if place >= 0)
    sign, digits = "-" * (kinds[0] in "-–"), number[first:]
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits):
        digits = digits.replace(",", "")
    elif digits.count(".") > 1:
        digits = digits.replace(".", "")
    return sign + "0" * digits.startswith(".") + digits.replace(",", ".")


def _folded(text: str) -> tuple[str, list[Span]]:
    """Return a text without case, accents and zero-width marks, and the original span of each of its characters."""
    folded, places, start = "", list[Span](), 0
    while start < len(text):
        end = start + 1
        while end < len(text) and (unicodedata.combining(text[end]) or text[end] in "\uff9e\uff9f"):
            end += 1
        piece = _fold(text[start:end])
        if folded[-1:].isdecimal():  # 10⁶ is not 106, 1½ is not 11/2
            form, before = (unicodedata.decomposition(text[place])[:6] for place in (start, start - 1))
            piece = {"<super": "^", "<fract": " "}.get(form if form != before else "", "") + piece
        folded += piece
        places += [(start, end)] * len(piece)
        start = end
    return folded, places


@lru_cache(maxsize=4096)
def _fold(cluster: str) -> str:
    """Fold a character and its accents."""
    character = cluster[0]
    if character.isspace():
        return "\n" if character in "\n\r" else " "
    if unicodedata.category(character)[0] in "PS":
        mark = unicodedata.normalize("NFKC", character).translate(_AS)
        return mark if len(mark) < 2 else "·"
    if unicodedata.category(character) == "Cf" or character in _SILENT:
        return ""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", cluster).casefold())
    return unicodedata.normalize("NFC", "".join(map(_plain, folded))).translate(_AS)


def _plain(character: str) -> str:
    """Return a decomposed character as plain letters and digits."""
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    kind = unicodedata.combining(character)
    if 0 < kind < 8 or 9 < kind < 37 or kind >= 200 or "\ufe00" <= character <= "\ufe0f":
        return ""  # accents; other combining marks determine a consonant or vowel
    other = re.match("LATIN SMALL LETTER ([A-Z]) WITH ", unicodedata.name(character, ""))
    return other[1].lower() if other else _LETTERS.get(character, character)


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    """Return the kind of a folded character, as one character.

    0 a digit, a a letter, g Korean, k katakana, h other Chinese or Japanese, n a Chinese number; in scripts without
    spaces t a consonant, v a vowel before it, m a mark or vowel after it, j a mark that joins the next consonant to it;
    = an operator, $ a currency or percent sign, · a mark without meaning; other marks are their own kind.
    """
    category, script = unicodedata.category(character), unicodedata.name(character, "").partition(" ")[0]
    if character.isspace():
        return " "
    if character in ".,:/-–+#^":
        return character
    if category == "Sc" or character in "%‰":
        return "$"
    if category[0] in "PSC":
        return "=" if category == "Sm" and character not in "|~" else "·"
    if category == "Nd":
        return "0"
    if character in _CHINESE_NUMBERS:
        return "n"
    kind = _SCRIPTS.get(script, "a")
    if kind != "t":
        return kind
    if "เ" <= character <= "ไ" or "ເ" <= character <= "ໄ":
        return "v"  # a vowel before its consonant
    return "j" if character in "\u1039\u17d2" else "m" if category[0] == "M" or character in "ะาະາ" else "t"


# From characters to tokens. The tokens of a text are the tokenized prompt and the generated tokens, each with its span
# of characters: nothing is tokenized a second time.


def shifted(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Move spans `by` characters to the right."""
    return tuple((start + by, end + by) for start, end in spans)


def tokens_of(offsets: Offsets, spans: Iterable[Span]) -> tuple[int, ...]:
    """Return the distinct positions of all tokens that contain characters of the spans, in ascending order."""
    return tuple(sorted({position for start, end in spans for position in token_span(offsets, start, end)}))


def continuation_offsets(tokenizer: Tokenizer, before: Sequence[int], tokens: Sequence[int]) -> tuple[str, Offsets]:
    """Return the text that generated tokens add to a prompt, and the span of each token in this text.

    A token's span is the text by which it extends the decoded text. If tokens hold bytes of one character, each has
    that character in its span, as in a tokenizer's offsets. `before` holds the last tokens of the prompt, because some
    decoders drop a space at the very beginning of a text.
    """

    def decode(count: int) -> str:
        ids = [*before, *tokens[:count]]
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    start = len(decode(0))
    whole = decode(len(tokens))[start:]
    offsets, reached = [], 0
    for count in range(1, len(tokens) + 1):
        grown = decode(count)[start:]
        least = min(len(grown), len(whole))
        solid = next((i for i in range(least) if grown[i] != whole[i]), least)
        shares = solid < least  # the bytes so far end within a character, which the next tokens complete
        offsets.append((reached, max(solid, reached) + shares))
        reached = max(reached, solid)
    return whole, tuple(offsets)


def span_shapes(table: pd.DataFrame) -> pd.DataFrame:
    """Return the length and position of E_A in each row of answered questions.

    Returns:
        `exact_length`, its number of tokens; `exact_before` and `exact_after`, the numbers of answer tokens before its
        first and after its last token; `exact_share`, its share of the answer's tokens.
    """
    exact, starts, lengths = table["exact_answer_tokens"], table["answer_start"], table["tokens"].map(len)
    sizes = exact.map(len)
    shapes = {
        "exact_length": sizes,
        "exact_before": exact.map(min) - starts,
        "exact_after": lengths - 1 - exact.map(max),
        "exact_share": sizes / (lengths - starts),
    }
    return pd.DataFrame(shapes, index=table.index)
