"""Rows of a file of any shape: JSON lines, a JSON array (bare, or under a key of an object), CSV, TSV, parquet.

- `read_rows` yields (number, row) one row at a time, so that a file of gigabytes is never completely in memory. The
  number is the one a person would look for: the line of JSON lines, CSV and TSV, the item of a JSON array, the row of
  parquet.
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
from headwater.data.strict_json import HALF_A_CHARACTER, is_unicode, parse_json, unique_keys
from headwater.errors import InputError

Row = Mapping[str, object]
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SEPARATORS = {".csv": ",", ".tsv": "\t"}
NOT_TEXTS = (".json", ".parquet", ".arrow", ".xlsx", ".gz", ".zst", ".bz2", ".xz", ".zip")
CHUNK = 2**20
ROWS_AT_A_TIME = 1024
"""Rows of a parquet file in memory at a time."""


@checked_call
def read_rows(path: Path, what: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file, each with its number.

    Args:
        path: the file.
        what: what each row of it is, for messages: "questions".

    Raises:
        InputError: the file does not exist, is of another kind, or has an unreadable row, whose number is reported.
    """
    check_readable(path, what)
    if path.suffix not in SUFFIXES:
        raise InputError(f"{path} is not a table of {what}: expected a file ending in {', '.join(SUFFIXES)}.")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    reader = {".jsonl": _json_lines, ".json": _json_items}.get(path.suffix, _cells)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, row in reader(path, file):
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
    """Refuse a file that does not exist, is a folder, or may not be read."""
    try:
        path.open("rb").close()
    except FileNotFoundError:
        raise InputError(f"The file of {what} {path} does not exist; check the path.") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; give a file of {what}.") from None
    except OSError as error:
        raise InputError(f"The file of {what} {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # NUL, half a character
        raise InputError(f"{str(path)!r} is not a path of a file of {what}: {error}.") from None


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


def _json_lines(path: Path, file: TextIO) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise InputError(f"{path}, row {number}: the row is not JSON ({error}).") from None


def _cells(path: Path, file: TextIO) -> Iterator[tuple[int, object]]:
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


def _json_items(path: Path, file: TextIO) -> Iterator[tuple[int, object]]:
    """Yield the items of the array that the file consists of, or of the first array under a key."""
    stream = _JsonStream(path, file)
    if stream.take("["):
        yield from stream.items()
        stream.refuse_more()
        return
    if not stream.take("{"):
        raise InputError(f"{path} is not a table: expected an array of objects.")
    keys: set[object] = set()
    while not stream.take("}"):
        key = stream.value("a key")
        if not isinstance(key, str) or key in keys:
            what = f"the key {key!r} occurs twice" if isinstance(key, str) else "a key is not a text"
            raise InputError(f"{path} is not a table: {what}.")
        keys.add(key)
        stream.expect(":")
        if stream.take("["):
            yield from stream.items()
            return
        stream.value("a value")
        stream.take(",")
    raise InputError(f"{path} is not a table: the object in it holds no array of objects.")


class _JsonStream:
    """A JSON text read piece by piece: only one value and a chunk of the file are in memory at a time."""

    def __init__(self, path: Path, file: TextIO):
        self._path, self._file = path, file
        self._text, self._place, self._ended = "", 0, False
        self._decoder = json.JSONDecoder(object_pairs_hook=unique_keys)

    def items(self) -> Iterator[tuple[int, object]]:
        """Yield the values up to the end of the current array, numbered from 1."""
        number = 1
        while not self.take("]"):
            if number > 1:
                self.expect(",", f"row {number}: ")
            yield number, self.value(f"row {number}")
            number += 1

    def take(self, sign: str) -> bool:
        """Skip `sign` if it comes next; return whether it did."""
        self._skip_blanks()
        found = self._text.startswith(sign, self._place)
        self._place += found
        return found

    def expect(self, sign: str, where: str = "") -> None:
        """Skip `sign`, which must come next."""
        if not self.take(sign):
            found = self._text[self._place : self._place + 1]
            raise InputError(f"{self._path}: {where}not JSON (expected {sign!r}, found {found or 'the end'!r}).")

    def refuse_more(self) -> None:
        """Refuse text after the value that the file consists of."""
        self._skip_blanks()
        if more := self._text[self._place : self._place + 1]:
            raise InputError(f"{self._path}: not JSON ({more!r} follows the end of the array).")

    def value(self, what: str) -> Any:
        """Return the next value, reading on until it is complete."""
        self._skip_blanks()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._place)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise InputError(f"{self._path}, {what} is not JSON ({error.msg}).") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self._path}, {what} cannot be read ({error}).") from None
            else:
                if end < len(self._text) or self._ended:
                    self._place = end
                    if not is_unicode(value):
                        raise InputError(f"{self._path}, {what} is not Unicode: {HALF_A_CHARACTER}.")
                    return value
            self._read()

    def _skip_blanks(self) -> None:
        while True:
            while self._place < len(self._text) and self._text[self._place] in " \t\r\n":
                self._place += 1
            if self._place < len(self._text) or self._ended:
                return
            self._read()

    def _read(self) -> None:
        chunk = self._file.read(max(CHUNK, len(self._text) - self._place))
        self._text, self._place, self._ended = self._text[self._place :] + chunk, 0, not chunk
