"""JSON from data files, which may contain anything, and texts that are not Unicode: each error is one line."""

import json
from typing import Any

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
