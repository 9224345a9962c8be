"""JSON from data files, which may contain anything, and texts that are not Unicode: each error is one line."""

import json
import re
from pathlib import Path
from typing import Any

from headwater.errors import InputError

HALF_A_CHARACTER = "it holds a lone surrogate (half a character)"
_WRITE = json.JSONEncoder(ensure_ascii=False, default=str).encode


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object from keys and values; a repeated key, of which JSON would keep the last value, is an error."""
    if len(made := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return made


def parse_json(text: str | bytes) -> Any:
    r"""Return the value of a JSON text."""
    try:
        plain = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(plain, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    # Halves come only from escapes, or are in the text itself. Without escapes the text is checked, not the value: to
    # write a value takes as long as to parse it.
    if not is_unicode(value if "\\u" in plain else plain):
        raise ValueError(HALF_A_CHARACTER)
    return value


def is_unicode(value: object) -> bool:
    """Return whether every text in a JSON value can be written in UTF-8."""
    try:
        _WRITE(value).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


class JsonDocument:
    """A JSON file that can report the line of each of its parts."""

    _space = re.compile(r"[ \t\n\r]*")
    _decoder = json.JSONDecoder()

    def __init__(self, file: Path, what: str):
        """Read a file, described in messages as `what`: "relation file"."""
        self.file = file
        try:
            self.text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise InputError(f"{file}, line {line}: not UTF-8 text. Save the file as UTF-8.") from None
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}.") from None
        if not self.text.strip():
            raise InputError(f"{file} is empty.")
        try:
            self.value: Any = parse_json(self.text)
        except ValueError as error:
            raise InputError(f"{file} is not a {what} in JSON ({error}).") from None

    def line(self, position: int) -> int:
        """Return the line, from 1, of the first non-blank character at or after a position."""
        return self.text.count("\n", 0, self._skip(position)) + 1

    def error(self, position: int, what: str) -> InputError:
        """Return an error that names the file and the line."""
        return InputError(f"{self.file}, line {self.line(position)}: {what}" + ("" if what[-1] in ".?" else "."))

    def element(self, start: int, index: int) -> int:
        """Return the position of one element of the list that begins at `start`."""
        position = self._skip(self._skip(start) + 1)
        for _ in range(index):
            _, end = self._decoder.raw_decode(self.text, position)
            position = self._after_comma(end)
        return position

    def members(self) -> dict[str, tuple[int, Any]]:
        """Return {key: (position of the value, value)} for the object in the file."""
        members: dict[str, tuple[int, Any]] = {}
        position = self._skip(self._skip(0) + 1)
        while self.text[position] != "}":
            key, end = self._decoder.raw_decode(self.text, position)
            position = self._skip(self._skip(end) + 1)
            value, end = self._decoder.raw_decode(self.text, position)
            members[key] = (position, value)
            position = self._after_comma(end)
        return members

    def _skip(self, position: int) -> int:
        space = self._space.match(self.text, position)
        return space.end() if space else position

    def _after_comma(self, end: int) -> int:
        position = self._skip(end)
        return self._skip(position + 1) if self.text[position] == "," else position
