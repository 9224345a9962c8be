"""Rows of a file of any shape: JSON lines, a JSON array (bare, or under a key of an object), CSV, TSV, parquet.

- `read_rows` yields (number, row), one row at a time (a JSON array is read as a whole). The number is the one a person
  would look for: the line of JSON lines, CSV and TSV, the item of a JSON array, the row of parquet.
- `read_texts` yields one text per row, or per line, in the same way; an unreadable row counts as a row without a text.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow.parquet as pq
from pyarrow import ArrowException

from headwater.calls import checked_call
from headwater.data.strict_json import parse_json, unique_keys
from headwater.errors import InputError

Row = Mapping[str, object]
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
NOT_TEXTS = (".json", ".parquet", ".arrow", ".xlsx", ".gz", ".zst", ".bz2", ".xz", ".zip")
ROWS_AT_A_TIME = 1024
"""Rows of a parquet file in memory at a time."""


@checked_call
def read_rows(path: Path, what: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file, each with its number.

    Args:
        path: the file.
        what: what each row of it is, for messages: "questions".
    """
    check_readable(path, what)
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} is not a table of {what}: expected a file ending in {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in _rows(path, file):
                if not isinstance(row, dict):
                    raise InputError(f"{path}, row {number}: expected an object, not a bare value.")
                yield number, row
    except UnicodeDecodeError:
        raise InputError(f"{path} is not UTF-8 text. Save the file as UTF-8.") from None


def read_texts(path: Path, field: str) -> Iterator[str | None]:
    """Yield the texts of a file one after the other; None for a row without one.

    Args:
        path: `.jsonl` has an object per line, `.csv` and `.tsv` have columns; any other file a text per line.
        field: the field or the column of the text.
    """
    if path.suffix in NOT_TEXTS:
        raise InputError(
            f"{path} is not a file of texts: give .jsonl, .csv or .tsv with texts under {field!r}, or a text per line."
        )
    with path.open("rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise InputError(f"{path} is UTF-16 text. Save the file as UTF-8.")
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        if path.suffix in SEPARATORS:
            header, rows = _table(path, lines, " Put texts with separators in quotation marks.")
            if field not in header:
                raise InputError(f"{path} has no column {field!r}; it has {', '.join(header) or 'none'}.")
            yield from (row.get(field) for _, row in rows)
        elif path.suffix == ".jsonl":
            yield from (_text_in(line, field) for line in lines if line.strip())
        else:
            yield from (line.rstrip("\r\n") for line in lines)


def _text_in(line: str, field: str) -> str | None:
    try:
        value = json.loads(line, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return None
    text = value.get(field) if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def check_readable(path: Path, what: str) -> None:
    """Refuse a file that does not exist or cannot be read."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise InputError(f"The file of {what} {path} does not exist; check the path.") from None
    except (OSError, ValueError) as error:  # ValueError: NUL, half a character
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"The file of {what} {str(path)!r} cannot be read: {reason}.") from None


def refuse_repeated(where: object, names: Iterable[object]) -> None:
    """Refuse a table with two columns of one name, because a reader would use the last."""
    twice = next((name for name, times in Counter(names).items() if times > 1 and name != ""), None)
    if twice is not None:
        raise InputError(f"{where} has the column {twice!r} twice. Rename or remove one of the two.")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a parquet file, with few of its rows in memory at a time; empty cells are omitted."""
    number = 1
    try:
        with pq.ParquetFile(path) as file:
            refuse_repeated(path, file.schema_arrow.names)
            for batch in file.iter_batches(ROWS_AT_A_TIME):
                for row in batch.to_pylist():
                    yield number, {name: cell for name, cell in row.items() if cell is not None and cell == cell}
                    number += 1
    except (ArrowException, ValueError, OSError) as error:
        raise InputError(f"{path}, row {number} cannot be read ({' '.join(str(error).split())}).") from None


def _rows(path: Path, file: TextIO) -> Iterator[tuple[int, object]]:
    """Yield the rows of a text file in one of the formats."""
    if path.suffix == ".jsonl":
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, parse_json(line)
                except ValueError as error:
                    raise InputError(f"{path}, row {number}: the row is not JSON ({error}).") from None
    elif path.suffix == ".json":
        text = file.read()
        try:
            value = parse_json(text)
        except ValueError as error:
            raise InputError(f"{path} is not JSON ({error}).") from None
        if isinstance(value, dict):
            value = next((part for part in value.values() if isinstance(part, list)), None)
        if not isinstance(value, list):
            raise InputError(f"{path} is not a table: expected an array of objects, alone or under a key of an object.")
        yield from enumerate(value, start=1)
    else:
        header, rows = _table(path, file)
        if not header:
            raise InputError(f"{path} is not a table: it has no header.")
        for number, row in rows:
            yield number, {name: cell for name, cell in row.items() if cell not in ("", None)}


def _table(path: Path, file: TextIO, advice: str = "") -> tuple[Sequence[str], Iterator[tuple[int, dict[str, Any]]]]:
    """Return the header of a table of cells, and its rows by their lines; None for a missing cell."""
    csv.field_size_limit(2**27)
    reader = csv.DictReader(file, delimiter=SEPARATORS[path.suffix])

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            for row in reader:
                if None in row:
                    raise InputError(
                        f"{path}, row {reader.line_num}: the row has more cells than the header has names.{advice}"
                    )
                yield reader.line_num, row
        except csv.Error as error:
            raise InputError(f"{path}, row {reader.line_num}: {error}.") from None

    try:
        header = reader.fieldnames or ()
        refuse_repeated(path, header)
        return header, rows()
    except csv.Error as error:
        raise InputError(f"{path}, row {reader.line_num}: {error}.") from None
