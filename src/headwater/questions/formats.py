"""The public question sets, each in its own file format, brought to the columns of a plain question table.

| format | told by | question | accepted answers | kept |
|---|---|---|---|---|
| popqa | subj and prop, or s_pop | question | possible_answers (a list, or its JSON text) | prop as relation, s_pop as popularity, s_pop, o_pop, subj, obj; the exact tokens from its 16 wordings |
| triviaqa | Question, Answer (also unfiltered and reading comprehension: an array under "Data") | Question | Answer.Value, Answer.Aliases | QuestionId as id |
| triviaqa | question, answer: an object with value and aliases (or its JSON text) | question | answer.value, answer.aliases | question_id as id |
| triviaqa | question, value, aliases | question | value, aliases | question_id as id |
| hotpotqa | answer, one text, beside type, level or supporting_facts | question | answer | _id as id, type, level |
| nq_open | answer, a list (or its JSON text), and no other column | question | answer | |
| table | anything else | question | answers, answer or golden_answers | all columns |

A copy that keeps a set's own fields under "metadata" and its answers under "golden_answers" is read like the original.
Columns that somebody added to a set's rows (`ADDED`) are kept, and go before what the format says itself.
PopQA: Mallen et al., ACL 2023. TriviaQA: Joshi et al., ACL 2017. HotpotQA: Yang et al., EMNLP 2018. NQ-open: Lee et
al., ACL 2019.

PopQA asks each of its 16 properties in one wording, so the exact tokens of its questions can be read off.

Mallen et al., "When Not to Trust Language Models", ACL 2023. In each wording below, `{s}` is where the subject is
and square brackets mark the words that name the property.
"""  # noqa: E501

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean
from headwater.options import shown
from headwater.questions.words import Span, find_words

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


ANSWER_COLUMNS = ("answers", "answer", "golden_answers", "possible_answers")
POPULARITY = ("s_pop", "o_pop")
ADDED = ("dataset", "subject", "property")
"""What a row may say beside the fields of its set: another name of the set, the exact words of the question."""
WITHHELD = "<unk>"
"""What represents the answer where a set is distributed without its answers."""


def detect_format(row: Mapping[str, object]) -> str:
    """Say which format a file has, by its first row."""
    fields = flat(row).keys()
    if {"Question", "Answer"} <= fields or _has_value_and_aliases(flat(row)):
        return "triviaqa"
    if {"subj", "prop"} <= fields or "s_pop" in fields:
        return "popqa"
    if "answers" in fields or "answer" not in fields:
        return "table"
    is_list = isinstance(row["answer"], list) or str(row["answer"]).lstrip().startswith("[")
    if is_list:
        return "nq_open" if fields <= {"id", "question", "answer", *ADDED} else "table"
    return "hotpotqa" if {"type", "level", "supporting_facts"} & fields else "table"


def check_format(name: str) -> None:
    """Refuse a format that does not exist."""
    if not isinstance(name, str) or name not in FORMATS:
        raise InputError(f"There is no question format {shown(name)}.{did_you_mean(name, FORMATS)}")


def adapt(name: str, row: Mapping[str, object], where: str) -> dict[str, object]:
    """Bring a row of a format to the columns of a plain table."""
    fields = flat(row)
    return FORMATS[name](fields, where) | {key: fields[key] for key in ADDED if fields.get(key) not in (None, "", [])}


def flat(row: Mapping[str, object]) -> dict[str, object]:
    """Bring the fields under "metadata" up to the others."""
    metadata = row.get("metadata")
    if not isinstance(metadata, Mapping):
        return dict(row)
    return {key: value for key, value in row.items() if key != "metadata"} | dict(metadata)


def columns_found(row: Mapping[str, object], *missing: str) -> str:
    """Say which columns a row has, and which of them may be meant by one that is missing."""
    names = [str(name) for name in flat(row)]
    others = [name for name in names if name not in missing]
    near = [(found, name) for name in missing for found in difflib.get_close_matches(name, others, n=1)]
    meant = "".join(f" Is {found!r} meant to be {name!r}?" for found, name in near)
    return f"Columns found: {_listed(names)}.{meant}"


def _listed(names: Iterable[str], shown: int = 20) -> str:
    listed = [name if len(name) <= 40 else f"{name[:40]}..." for name in names]
    return ", ".join(listed[:shown]) + (", ..." if len(listed) > shown else "") or "none"


def _table(row: dict[str, object], where: str) -> dict[str, object]:
    found = next((name for name in ANSWER_COLUMNS if name in row), None)
    if found is None:
        return row
    others = {key: value for key, value in row.items() if key != found}
    answers = _answers(row[found], where, found)
    if found == "golden_answers":
        others["question"] = unquoted(row.get("question"))
    return others | {"answers": answers}


def _popqa(row: dict[str, Any], where: str) -> dict[str, Any]:
    question, relation, subject = (row.get(name) for name in ("question", "prop", "subj"))
    _require(row, where, "popqa", *(("prop",) if "subj" in row else ()))
    for name in ("prop", "subj"):
        if not isinstance(row.get(name), str | None):
            raise InputError(f"{where}: {name} is not a text: {row[name]!r}.")
    accepted = next((name for name in ("possible_answers", *ANSWER_COLUMNS) if name in row), "possible_answers")
    kept: dict[str, object] = {name: row[name] for name in ("id", "subj", "obj") if name in row}
    kept |= {name: number_of(row[name], where, name) for name in POPULARITY if name in row}
    if "s_pop" in kept:
        kept["popularity"] = kept["s_pop"]
    match = match_wording(question, relation) if isinstance(question, str) else None
    if match and subject in (None, question[slice(*match.subject)]):  # type: ignore[index]
        kept |= {"subject": [list(match.subject)], "property": [list(span) for span in match.property]}
    elif isinstance(question, str) and isinstance(subject, str) and find_words(question, subject):
        kept |= {"subject": subject}
    kept["relation"] = relation or (match.relation if match else None)
    return kept | {"question": question, "answers": _answers(row.get(accepted), where, accepted)}


def _triviaqa(row: dict[str, object], where: str) -> dict[str, object]:
    row = _in_original_names(row, where) if _has_value_and_aliases(row) else row
    _require(row, where, "triviaqa", "Question", "Answer")
    answer = row["Answer"]
    if not isinstance(answer, Mapping):
        raise InputError(f"{where}: Answer is not an object with Value and Aliases.")
    aliases = answer.get("Aliases") or []
    if not isinstance(aliases, list):
        raise InputError(f"{where}: Answer.Aliases is not a list.")
    answers = [text for text in (answer.get("Value"), *aliases) if isinstance(text, str) and text.strip()]
    answers = [text for text in answers if text != WITHHELD]
    if not answers:
        raise InputError(f"{where}: Answer has neither a Value nor Aliases.")
    kept = {"id": row["QuestionId"]} if "QuestionId" in row else {}
    return kept | {"question": unquoted(row["Question"]), "answers": list(dict.fromkeys(answers))}


def _has_value_and_aliases(row: Mapping[str, object]) -> bool:
    """Whether the answer is an object, such as {value, aliases}, or these are beside the question."""
    answer = row.get("answer")
    is_object = isinstance(answer, Mapping) or (isinstance(answer, str) and answer.lstrip().startswith("{"))
    return is_object or (
        {"question", "value", "aliases"} <= row.keys() and not row.keys() & {*ANSWER_COLUMNS, "Answer"}
    )


def _in_original_names(row: dict[str, object], where: str) -> dict[str, object]:
    """Bring a row with value and aliases in small letters to the names of the original files."""
    _require(row, where, "triviaqa", "question")
    answer = row.get("answer", row)
    if isinstance(answer, str):
        try:
            answer = parse_json(answer)
        except ValueError as error:
            raise InputError(f"{where}: answer is not JSON ({error}).") from None
    assert isinstance(answer, Mapping)  # of a text that begins with a brace, as of what is an object
    found = {name.capitalize(): answer[name] for name in ("value", "aliases") if name in answer}
    if "Aliases" in found:
        found["Aliases"] = _answers(found["Aliases"], where, "aliases")
    name = next((name for name in ("question_id", "id") if name in row), None)
    return ({"QuestionId": row[name]} if name else {}) | {"Question": row["question"], "Answer": found}


def _hotpotqa(row: dict[str, object], where: str) -> dict[str, object]:
    _require(row, where, "hotpotqa", "question", "answer")
    kept: dict[str, object] = {name: row[name] for name in ("type", "level") if name in row}
    if "_id" in row or "id" in row:
        kept["id"] = row.get("_id", row.get("id"))
    return kept | {"question": row["question"], "answers": [row["answer"]]}


def _nq_open(row: dict[str, object], where: str) -> dict[str, object]:
    _require(row, where, "nq_open", "question", "answer")
    kept = {"id": row["id"]} if "id" in row else {}
    return kept | {"question": row["question"], "answers": _answers(row["answer"], where, "answer")}


FORMATS: Mapping[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "popqa": _popqa,
    "triviaqa": _triviaqa,
    "hotpotqa": _hotpotqa,
    "nq_open": _nq_open,
    "table": _table,
}


def unquoted(text: object) -> object:
    """Undo a CSV writer's quotation marks around a whole text, where they were left standing."""
    if not isinstance(text, str) or len(text) < 3 or not text.startswith('"') or not text.endswith('"'):
        return text
    inner = text[1:-1]
    return text if '"' in inner.replace('""', "") else inner.replace('""', '"')


def _answers(value: object, where: str, name: str) -> object:
    """Read the accepted answers of a row: a list, its JSON text, or one text with " | " between them."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return parse_json(value)
        except ValueError as error:
            raise InputError(f"{where}: {name} is not JSON ({error}): json.dumps writes a list so.") from None
    return value.split(" | ")


def number_of(value: Any, where: str, name: str) -> float:
    """Read a number, or say in which row and column there is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: {name} is not a number: {value!r}.") from None


def _require(row: Mapping[str, object], where: str, format_name: str, *names: str) -> None:
    for name in names:
        if name not in row:
            raise InputError(
                f"{where}: the field {name} is missing, which every row of format {format_name!r} has. "
                f"{columns_found(row, name)}"
            )
