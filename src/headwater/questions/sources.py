"""Questions with their accepted answers, and the positions of the exact words in each question.

A question file is one of the public sets in its own format (below), or a plain table: JSON lines, a JSON array,
CSV, TSV or parquet. A plain table needs the columns `question` and `answers`; the other columns are optional.

| column | content |
|---|---|
| question | the text |
| answers | all accepted answers: a list, or one text with " | " between them |
| id, dataset | a name for the row and for its question set; derived from the file's name if missing |
| subject, property | the exact words of the question (E_Q): character spans [start, end], or the words themselves |
| popularity | a number: how well known the subject is |
| relation, depth, ... | kept unchanged |

Files are read row by row, and every row is checked before the next is read.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from headwater.calls import checked_call
from headwater.data.rows import Row, read_rows, refuse_repeated
from headwater.data.strict_json import HALF_A_CHARACTER, is_unicode, parse_json
from headwater.errors import InputError, did_you_mean
from headwater.models.packaged import world_folder
from headwater.options import checked_count, checked_name, checked_path, checked_seed, shown
from headwater.questions.words import Span, find_words
from headwater.runs.result import numbered_from_0, table_html

SPAN_COLUMNS = ("subject", "property")
FIRST_COLUMNS = ("dataset", "id", "question", "answers", *SPAN_COLUMNS)
WORLD_SETS = ("properties", "paraphrased", "natural", "multi_hop")
Source = str | Path | pd.DataFrame


class HasDatasets:
    """Base class of results with a table of one or several question sets."""

    table: pd.DataFrame

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the question sets, in the order of the table."""
        return tuple(self.table["dataset"].unique())


@dataclass(frozen=True)
class Questions(HasDatasets):
    """One or several question sets."""

    returned_by = "hw.load_questions(...)"

    table: pd.DataFrame
    """`dataset, id, question, answers` (tuple), `subject` and `property` (tuples of spans, empty if missing), and all
    other columns of the file."""
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", numbered_from_0(self.table))

    def select(self, dataset: str) -> Questions:
        """Return one of the question sets."""
        checked_name("dataset", dataset, self.datasets)
        return Questions(self.table[self.table["dataset"] == dataset].reset_index(drop=True), self.source)

    def sample(self, per_dataset: int, seed: int = 0) -> Questions:
        """Draw at most `per_dataset` questions of each set without replacement, kept in the order of the table."""
        checked_count("sample", per_dataset)
        checked_seed(seed)
        shuffled = self.table.sample(frac=1, random_state=seed)
        # One shuffle for all sets, so that a larger draw contains the questions of a smaller one.
        kept = shuffled.groupby("dataset", sort=False).head(per_dataset).sort_index()
        return Questions(kept.reset_index(drop=True), self.source)

    @classmethod
    def joined(cls, parts: Iterable[Questions]) -> Questions:
        """Concatenate question sets."""
        listed = list(parts)
        names = [name for questions in listed for name in questions.datasets]
        double = next((name for name in names if names.count(name) > 1), None)
        if double is not None:
            raise InputError(f"Two of the question sets are called {double!r}: give one of them a column dataset.")
        table = pd.concat([questions.table for questions in listed], ignore_index=True)
        return cls(table, ", ".join(questions.source for questions in listed))

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        sizes = self.table["dataset"].value_counts(sort=False)
        return f"Questions({', '.join(f'{name}: {size:,}' for name, size in sizes.items())})"

    def _repr_html_(self) -> str:
        return table_html(self, self.table)


@checked_call
def load_questions(
    source: Source | Sequence[Source] | None = None,
    *,
    format: Literal["popqa", "triviaqa", "hotpotqa", "nq_open", "table"] | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Questions:
    """Read questions from a public question set, from your own table, or from the embedded model's world.

    Args:
        source: a `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` file; a data frame; the name of one of the world's
            sets (`properties`, `paraphrased`, `natural`, `multi_hop`); a list of these; None for the world's four.
        format: "popqa", "triviaqa", "hotpotqa", "nq_open" or "table"; default: detected from the first row.
        sample: number of questions to draw from each set, without replacement; default: all.
        seed: seed of the draw.
    """
    if isinstance(source, list | tuple) and source:
        return Questions.joined(load_questions(one, format=format, sample=sample, seed=seed) for one in source)
    if source is None or (isinstance(source, str) and source in WORLD_SETS and not Path(source).exists()):
        world = world_folder() / "questions.jsonl"
        questions = Questions(_of_world(world, format).copy(), str(world))
        questions = questions if source is None else questions.select(str(source))
    else:
        name, rows = _open(source)
        questions = Questions(_read(name, rows, format), name)
    return questions if sample is None else questions.sample(sample, seed)


@functools.cache
def _of_world(world: Path, format: str | None) -> pd.DataFrame:
    """Return the world's ten thousand questions, read only once because checking them takes a second."""
    return _read(str(world), read_rows(world, "questions"), format)


def _read(name: str, rows: Iterator[tuple[int, Row]], format: str | None) -> pd.DataFrame:
    first = next(rows, None)
    if first is None:
        raise InputError(f"{name} holds no questions.")
    format = format or detect_format(first[1])
    stem = Path(name).stem if name != "the table" else "table"
    dataset = stem if format == "table" else format
    row_of: dict[tuple[str, str], int] = {}
    checked = []
    for number, row in chain([first], rows):
        where = f"{name}, row {number}"
        added = {key: row[key] for key in ADDED if row.get(key) not in (None, "", [])}
        checked.append(_checked(where, FORMATS[format](dict(row), where) | added, row, dataset, number))
        key = checked[-1]["dataset"], checked[-1]["id"]
        if key in row_of:
            raise InputError(f"{where}: row {row_of[key]} has the same id, {key[1]!r}; ids must be unique.")
        row_of[key] = number
    table = _tidy(pd.DataFrame(checked))
    return table[[*FIRST_COLUMNS, *(column for column in table if column not in FIRST_COLUMNS)]]


def _open(source: object) -> tuple[str, Iterator[tuple[int, Row]]]:
    """Return the name of the source, and its rows."""
    if isinstance(source, pd.DataFrame):
        refuse_repeated("The table", source.columns)
        records = [{str(key): _plain(cell) for key, cell in row.items()} for row in source.to_dict("records")]
        broken = next((row for row in records if not is_unicode(row)), None)
        if broken is not None:
            raise InputError(f"The table holds text that is not Unicode: {HALF_A_CHARACTER}, in {str(broken)[:80]!r}.")
        # A data frame fills missing cells; in a file they would be absent, so they are removed.
        there = (
            {key: cell for key, cell in row.items() if isinstance(cell, list) or not pd.isna(cell)} for row in records
        )
        return "the table", enumerate(there, start=1)
    if not isinstance(source, str | Path):
        raise InputError(f"Questions come from a file or a data frame, not from a {type(source).__name__}.")
    path = checked_path("source", source)
    if isinstance(source, str) and not path.suffix and not path.exists():
        raise InputError(f"There is no file and no question set {source!r}.{did_you_mean(source, WORLD_SETS)}")
    return str(path), read_rows(path, "questions")


def _plain(value: object) -> Any:
    """Convert a cell of a data frame to a form that a file can have: lists instead of tuples and arrays."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _checked(where: str, row: Mapping[str, object], written: Row, dataset: str, number: int) -> dict[str, Any]:
    """Check a row in the columns of a plain table; `written` is the original row of the file."""
    question, answers, popularity = row.get("question"), row.get("answers"), row.get("popularity")
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"{where}: the column question is missing or empty. {columns_found(written, 'question')}")
    answers = answers if isinstance(answers, list) else [answers]
    answers = [str(one) if type(one) is int else one for one in answers]  # a year
    if wrong := next((one for one in answers if one is not None and not isinstance(one, str)), None):
        raise InputError(f"{where}: the answer {shown(wrong)} is not a text: write it as one, in quotes.")
    if not answers or not all(isinstance(one, str) and one.strip() for one in answers):
        column = next((name for name in ANSWER_COLUMNS if name in written), "answers")
        column = "answer" if dataset in ("hotpotqa", "nq_open") else column  # these read no other
        raise InputError(
            f"{where}: the column {column} is missing or empty, or holds an empty answer. "
            f"{columns_found(written, column)}"
        )
    spans = {name: _spans(where, name, row.get(name) or [], question) for name in SPAN_COLUMNS}
    given = row.get("id")
    names = {
        "dataset": str(row.get("dataset") or dataset),
        "id": f"{dataset}-{number}" if given in (None, "") else str(given),
    }
    number_columns = {} if popularity is None else {"popularity": number_of(popularity, where, "popularity")}
    return {**row, **names, "question": question, "answers": tuple(answers), **spans, **number_columns}


def _spans(where: str, name: str, value: object, question: str) -> tuple[Span, ...]:
    """Read spans from [start, end], a list of these, words of the question, or a list of words."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value, where, name)
    is_single = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    parts = [value] if is_single or not isinstance(value, list) else value
    spans = []
    for part in parts:
        span: Any = find_words(question, part) if isinstance(part, str) else part
        if span is None:
            raise InputError(f"{where}: {name} {part!r} does not occur in the question {question!r}.")
        # `type is int`, because True is an int but not an index.
        is_pair = isinstance(span, list | tuple) and len(span) == 2 and all(type(place) is int for place in span)
        if not is_pair or not 0 <= span[0] < span[1] <= len(question):
            raise InputError(
                f"{where}: {name} {part!r} is not a span [start, end] of the question ({len(question)} characters)."
            )
        spans.append((span[0], span[1]))
    return tuple(spans)


def _tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Convert other columns to JSON text if no table file can hold them: cells of several types, or huge numbers."""
    for name in table.columns.difference(list(FIRST_COLUMNS)):
        kinds = {type(value) for value in table[name].dropna()}
        # parquet has one type per column; an object column of ints has some beyond int64.
        if table[name].dtype == object and (len(kinds) > 1 or kinds & {list, dict, int}):
            table[name] = [_as_text(value) for value in table[name]]
    return table


def _as_text(value: object) -> str | None:
    if isinstance(value, str) or value is None:
        return value
    return None if isinstance(value, float) and value != value else json.dumps(value, ensure_ascii=False, default=str)


# The public question sets, each in its own file format, converted to the columns of a plain question table.
#
# format     recognised by                              accepted answers                   kept
# popqa      subj and prop, or s_pop                    possible_answers (a list, or its   prop as relation, s_pop as
#                                                       JSON text)                         popularity, s_pop, o_pop,
#                                                                                          subj, obj; the exact tokens
# triviaqa   Question and Answer; in small letters,     Answer.Value and Answer.Aliases    QuestionId, or
#            or value and aliases beside the question   (or the JSON text of these)        question_id, as id
# hotpotqa   answer, one text, with type, level or      answer                             _id as id, type, level
#            supporting_facts
# nq_open    answer, a list (or its JSON text), alone   answer
# table      anything else                              the first of `ANSWER_COLUMNS`      all columns
#
# Columns added to a set's rows (`ADDED`) are kept, and take precedence over the values from the format.
# PopQA: Mallen et al., ACL 2023. TriviaQA: Joshi et al., ACL 2017. HotpotQA: Yang et al., EMNLP 2018. NQ-open: Lee et
# al., ACL 2019.
#
# PopQA (Mallen et al., "When Not to Trust Language Models") asks for each of its 16 properties in one wording, which
# determines the exact tokens of its questions. In the wordings below, `{s}` stands for the subject, and square brackets
# mark the words that name the property.


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


def match_wording(question: str, relation: str | None = None) -> dict[str, Any] | None:
    """Return the first PopQA wording that a question matches (if any): `relation`, spans of `subject`, `property`."""
    for name, pattern in _PATTERNS.items():
        if relation in (None, name) and (found := pattern.fullmatch(question.strip())):
            shift = len(question) - len(question.lstrip())
            spans = {part: (found.start(part) + shift, found.end(part) + shift) for part in found.groupdict()}
            return {"relation": name, "subject": [spans.pop("subject")], "property": list(spans.values())}
    return None


def _pattern(wording: str) -> re.Pattern[str]:
    names = iter(("property", "property_too"))
    # re.escape escapes the brackets too.
    written = re.escape(wording).replace(r"\{s\}", "(?P<subject>.+)")
    return re.compile(re.sub(r"\\\[(.+?)\\\]", lambda words: f"(?P<{next(names)}>{words[1]})", written), re.DOTALL)


_PATTERNS = {relation: _pattern(wording) for relation, wording in WORDINGS.items()}


ANSWER_COLUMNS = ("answers", "answer", "possible_answers")
POPULARITY = ("s_pop", "o_pop")
ADDED = ("dataset", "subject", "property")
"""Fields that a row may have in addition to those of its set: another set name, the exact words of the question."""
WITHHELD = "<unk>"
"""Placeholder for the answer if a set is distributed without its answers."""


def detect_format(row: Mapping[str, object]) -> str:
    """Return the format of a file, from its first row."""
    fields, answer = row.keys(), row.get("answer")
    # The answer is an object, such as {value, aliases}, or these fields are beside the question.
    is_object = isinstance(answer, Mapping) or (isinstance(answer, str) and answer.lstrip().startswith("{"))
    beside = {"question", "value", "aliases"} <= fields and not fields & {*ANSWER_COLUMNS, "Answer"}
    if {"Question", "Answer"} <= fields or is_object or beside:
        return "triviaqa"
    if {"subj", "prop"} <= fields or "s_pop" in fields:
        return "popqa"
    if "answers" in fields or "answer" not in fields:
        return "table"
    if isinstance(answer, list) or str(answer).lstrip().startswith("["):
        return "nq_open" if fields <= {"id", "question", "answer", *ADDED} else "table"
    return "hotpotqa" if {"type", "level", "supporting_facts"} & fields else "table"


def columns_found(row: Mapping[str, object], *missing: str) -> str:
    """Return sentences that list a row's columns, and suggest similar names for missing columns."""
    names = [str(name) for name in row]
    others = [name for name in names if name not in missing]
    near = [(found, name) for name in missing for found in difflib.get_close_matches(name, others, n=1)]
    meant = "".join(f" Is {found!r} meant to be {name!r}?" for found, name in near)
    listed = [name if len(name) <= 40 else f"{name[:40]}..." for name in (names[:20] or ["none"])]
    return f"Columns found: {', '.join(listed + ['...'] * (len(names) > 20))}.{meant}"


def _table(row: dict[str, object], where: str) -> dict[str, object]:
    column = next((name for name in ANSWER_COLUMNS if name in row), None)
    if column is None:
        return row
    others = {key: value for key, value in row.items() if key != column}
    return others | {"answers": _answers(row[column], where, column)}


def _popqa(row: dict[str, Any], where: str) -> dict[str, Any]:
    question, relation, subject = (row.get(name) for name in ("question", "prop", "subj"))
    if "subj" in row and "prop" not in row:
        raise InputError(f"{where}: the field prop is missing. {columns_found(row, 'prop')}")
    for name in ("prop", "subj"):
        if not isinstance(row.get(name), str | None):
            raise InputError(f"{where}: {name} is not a text: {row[name]!r}.")
    accepted = next((name for name in ("possible_answers", *ANSWER_COLUMNS) if name in row), "possible_answers")
    fields: dict[str, object] = {name: row[name] for name in ("id", "subj", "obj") if name in row}
    fields |= {name: number_of(row[name], where, name) for name in POPULARITY if name in row}
    if "s_pop" in fields:
        fields["popularity"] = fields["s_pop"]
    match = match_wording(question, relation) if isinstance(question, str) else None
    if match and subject in (None, question[slice(*match["subject"][0])]):  # type: ignore[index]
        fields |= match
    elif isinstance(question, str) and isinstance(subject, str) and find_words(question, subject):
        fields |= {"subject": subject}
    fields["relation"] = relation or (match["relation"] if match else None)
    return fields | {"question": question, "answers": _answers(row.get(accepted), where, accepted)}


def _triviaqa(row: dict[str, Any], where: str) -> dict[str, Any]:
    # The original files have capitals, tables small letters; some have value and aliases beside the question.
    fields = {name.replace("_", "").casefold(): value for name, value in row.items()}
    answer = fields.get("answer", fields)
    if isinstance(answer, str) and answer.lstrip().startswith("{"):
        answer = _parsed(answer, where, "answer")
    if not isinstance(answer, Mapping):
        raise InputError(f"{where}: Answer is not an object with Value and Aliases.")
    parts = {name.casefold(): value for name, value in answer.items()}
    aliases = _answers(parts.get("aliases") or [], where, "aliases")
    if not isinstance(aliases, list):
        raise InputError(f"{where}: Answer.Aliases is not a list.")
    texts = [text for text in (parts.get("value"), *aliases) if isinstance(text, str) and text.strip()]
    texts = [text for text in texts if text != WITHHELD]
    if not texts:
        raise InputError(f"{where}: Answer has neither a Value nor Aliases.")
    identity = {"id": fields.get("questionid", fields.get("id"))}
    return identity | {"question": fields.get("question"), "answers": list(dict.fromkeys(texts))}


def _hotpotqa(row: dict[str, object], where: str) -> dict[str, object]:
    kept = {name: row[name] for name in ("question", "type", "level") if name in row}
    return kept | {"id": row.get("_id", row.get("id")), "answers": [row.get("answer")]}


def _nq_open(row: dict[str, object], where: str) -> dict[str, object]:
    answers = _answers(row.get("answer"), where, "answer")
    return {"id": row.get("id"), "question": row.get("question"), "answers": answers}


FORMATS: Mapping[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "popqa": _popqa,
    "triviaqa": _triviaqa,
    "hotpotqa": _hotpotqa,
    "nq_open": _nq_open,
    "table": _table,
}


def _answers(value: object, where: str, name: str) -> object:
    """Read the accepted answers of a row: a list, its JSON text, or one text with " | " between them."""
    if not isinstance(value, str):
        return value
    is_json = value.lstrip().startswith("[")
    return _parsed(value, where, name, ": json.dumps writes a list in this form") if is_json else value.split(" | ")


def _parsed(text: str, where: str, name: str, hint: str = "") -> Any:
    """Read the JSON text of a column."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{where}: {name} is not JSON ({error}){hint}.") from None


def number_of(value: Any, where: str, name: str) -> float:
    """Read a number; the error names the row and column without one."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{where}: {name} is not a number: {value!r}.") from None
