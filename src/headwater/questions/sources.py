"""Questions with their accepted answers, and where in the question its exact tokens are.

A question file is one of the public sets in its own format (`formats`), or a plain table: JSON lines, a JSON array,
CSV, TSV or parquet. In a plain table `question` and `answers` must be there; the other columns may be.

| column | what it holds |
|---|---|
| question | the text |
| answers | every accepted answer: a list, or one text with " | " between them |
| id, dataset | a name for the row and for the set it belongs to; made from the file's name where missing |
| subject, property | the exact words of the question (E_Q): character spans [start, end], or the words themselves |
| popularity | a number: how well known the subject is |
| relation, depth, ... | kept as they are |

Files are read row by row, and every row is checked before the next is read.
"""

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from headwater.options import checked_count, checked_path, checked_seed
from headwater.questions.formats import adapt, check_format, columns_found, detect_format, number_of
from headwater.questions.words import Span, find_words
from headwater.runs.result import table_html

SPAN_COLUMNS = ("subject", "property")
FIRST_COLUMNS = ("dataset", "id", "question", "answers", *SPAN_COLUMNS)
WORLD_SETS = ("properties", "paraphrased", "natural", "multi_hop")
Source = str | Path | pd.DataFrame


@dataclass(frozen=True)
class Questions:
    """One or several question sets."""

    table: pd.DataFrame
    """dataset, id, question, answers (tuple), subject and property (tuples of spans, empty where not given), and
    whatever else the file holds."""
    source: str = ""

    @property
    def datasets(self) -> tuple[str, ...]:
        """The names of the sets, in the order of the table."""
        return tuple(dict.fromkeys(self.table["dataset"]))

    def select(self, dataset: str) -> "Questions":
        """Return one of the sets."""
        if dataset not in self.datasets:
            raise InputError(f"There is no question set {dataset!r} here.{did_you_mean(dataset, self.datasets)}")
        return Questions(self.table[self.table["dataset"] == dataset].reset_index(drop=True), self.source)

    def sample(self, per_dataset: int, seed: int = 0) -> "Questions":
        """Draw at most `per_dataset` questions of each set without replacement; they stay in the order of the table."""
        checked_count("sample", per_dataset)
        checked_seed(seed)
        shuffled = self.table.sample(frac=1, random_state=seed)
        # One shuffle for all sets: drawing more of each keeps those drawn before.
        kept = shuffled.groupby("dataset", sort=False).head(per_dataset).sort_index()
        return Questions(kept.reset_index(drop=True), self.source)

    @classmethod
    def joined(cls, parts: "Iterable[Questions]") -> "Questions":
        """Put question sets one after another."""
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
    """Read questions from a public question set, from a table of one's own, or those of the embedded model's world.

    Args:
        source: a `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet` file; a data frame; one of the world's sets by its
            name (`properties`, `paraphrased`, `natural`, `multi_hop`); a list of these; None for the world's four.
        format: "popqa", "triviaqa", "hotpotqa", "nq_open" or "table"; by default told from the first row.
        sample: draw this many questions of each set, without replacement; default all.
        seed: of the draw of questions.

    Raises:
        InputError: no such file or format, or a row that cannot be used; the message names the file, the row and the
            column.
    """
    if format is not None:
        check_format(format)
    checked_seed(seed)
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
    """The world's ten thousand questions, read once: to check them takes a second."""
    return _read(str(world), read_rows(world, "questions"), format)


def _read(name: str, rows: Iterator[tuple[int, Row]], format: str | None) -> pd.DataFrame:
    checked = list(_checked_rows(name, rows, format))
    if not checked:
        raise InputError(f"{name} holds no questions.")
    table = _tidy(pd.DataFrame(checked))
    return table[[*FIRST_COLUMNS, *(column for column in table if column not in FIRST_COLUMNS)]]


def _open(source: object) -> tuple[str, Iterator[tuple[int, Row]]]:
    """Return what to call the source, and its rows."""
    if isinstance(source, pd.DataFrame):
        refuse_repeated("The table", source.columns)
        records = source.to_dict("records")
        return "the table", enumerate((_from_frame(row) for row in records), start=1)
    if not isinstance(source, str | Path):
        raise InputError(f"Questions come from a file or a data frame, not from a {type(source).__name__}.")
    path = checked_path("source", source)
    if isinstance(source, str) and not path.suffix and not path.exists():
        raise InputError(f"There is no file and no question set {source!r}.{did_you_mean(source, WORLD_SETS)}")
    return str(path), read_rows(path, "questions")


def _from_frame(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A data frame's row as a file would have it: lists instead of tuples and arrays, no missing cells."""
    lists = {str(key): _plain(value) for key, value in row.items()}
    if not is_unicode(lists):
        raise InputError(f"The table holds text that is not Unicode: {HALF_A_CHARACTER}, in {str(lists)[:80]!r}.")
    # A frame fills columns that a row does not have; in a file they would not be there.
    return {key: value for key, value in lists.items() if isinstance(value, list) or not pd.isna(value)}


def _plain(value: object) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _checked_rows(name: str, rows: Iterator[tuple[int, Row]], format: str | None) -> Iterator[dict[str, Any]]:
    first = next(rows, None)
    if first is None:
        return
    format = format or detect_format(first[1])
    stem = Path(name).stem if name != "the table" else "table"
    dataset = stem if format == "table" else format
    seen: dict[tuple[str, str], int] = {}
    for number, row in chain([first], rows):
        where = f"{name}, row {number}"
        checked = _checked(where, adapt(format, row, where), row, dataset, number)
        key = checked["dataset"], checked["id"]
        if key in seen:
            raise InputError(f"{where}: the id {key[1]!r} is that of row {seen[key]} too; ids must differ.")
        seen[key] = number
        yield checked


def _checked(where: str, row: Mapping[str, object], written: Row, dataset: str, number: int) -> dict[str, Any]:
    """Check a row of a plain table, which the row as it is `written` in the file was brought to."""
    question, answers, popularity = row.get("question"), row.get("answers"), row.get("popularity")
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"{where}: the column question is missing or empty. {columns_found(written, 'question')}")
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(
            f"{where}: the column answers is missing or empty, or holds an empty answer. "
            f"{columns_found(written, 'answers')}"
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
    """Read spans given as [start, end], as a list of these, as words of the question, or as a list of words."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise InputError(f"{where}: {name} is not JSON ({error}).") from None
    is_single = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    parts = [value] if is_single or not isinstance(value, list) else value
    return tuple(_span(where, name, part, question) for part in parts)


def _span(where: str, name: str, part: Any, question: str) -> Span:
    if isinstance(part, str):
        found = find_words(question, part)
        if found is None:
            raise InputError(f"{where}: {name} {part!r} does not occur in the question {question!r}.")
        return found
    # `type is int`, since True is an int and no place.
    is_pair = isinstance(part, list) and len(part) == 2 and all(type(place) is int for place in part)
    if not is_pair or not 0 <= part[0] < part[1] <= len(question):
        raise InputError(
            f"{where}: {name} {part!r} is not a span [start, end] of the question ({len(question)} characters)."
        )
    return part[0], part[1]


def _tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Write further columns as JSON text where no table file can hold them: cells of several kinds, or huge numbers."""
    for name in table.columns.difference(list(FIRST_COLUMNS)):
        kinds = {type(value) for value in table[name].dropna()}
        # parquet has one type a column; an object column of ints holds some that int64 does not.
        if table[name].dtype == object and (len(kinds) > 1 or kinds & {list, dict, int}):
            table[name] = [_as_text(value) for value in table[name]]
    return table


def _as_text(value: object) -> str | None:
    if isinstance(value, str) or value is None:
        return value
    return None if isinstance(value, float) and value != value else json.dumps(value, ensure_ascii=False, default=str)
