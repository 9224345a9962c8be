"""JSON from data files, where anything may stand, and texts that are no Unicode: each an error of one line."""

import json
from typing import Any

from headwater.errors import InputError

HALF_A_CHARACTER = "half of a surrogate pair stands for a character"


def parse_json(text: str | bytes) -> Any:
    r"""Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON in UTF-8, is nested too deep, has a number beyond all bounds, or is not Unicode: JSON
            can spell half a character, "\ud800", which no file or table can hold. The message is what is wrong.
    """
    try:
        value = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not is_unicode(value):
        raise ValueError(HALF_A_CHARACTER)
    return value


def is_unicode(value: Any) -> bool:
    """Whether every text in a JSON value can be written in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def refuse_half_characters(text: str) -> None:
    """Refuse a text that cannot be written as UTF-8, which tokenizers answer with an error of their own.

    Raises:
        InputError: it holds a lone surrogate, half of a pair that stands for one character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise InputError(
            f"The text {shown!r} holds half a character, {text[error.start]!r} at {error.start} (a lone surrogate): it "
            "cannot be tokenized. Mend it where it was read, for example with errors='replace'."
        ) from None
