"""Options of the analyses, checked: one that cannot be used is one line that says what was given and what there is."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from headwater.errors import InputError, did_you_mean


def checked_name(option: str, value: Any, valid: Sequence[str]) -> str:
    """Return a name that is one of the valid ones.

    Raises:
        InputError: it is not.
    """
    if not isinstance(value, str) or value not in valid:
        raise InputError(f"{option}={value!r} is not one of {', '.join(valid)}.{did_you_mean(str(value), valid)}")
    return value


def checked_count(option: str, value: Any, least: int = 1) -> int:
    """Return a whole number, of whatever library, that is not too small.

    Raises:
        InputError: it is something else, or smaller.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InputError(f"{option}={value!r} must be a whole number, at least {least}.")
    number = operator.index(value)
    if number < least:
        raise InputError(f"{option}={value!r} must be at least {least}.")
    return number


def checked_path(option: str, value: Any) -> Path:
    """Return a path, its `~` read as the user's home.

    Raises:
        InputError: it is neither a text nor a path.
    """
    if not isinstance(value, str | Path):
        raise InputError(f"{option}={value!r} must be a path: a text or a pathlib.Path, not {type(value).__name__}.")
    return Path(value).expanduser()


def checked_number(option: str, value: Any, above: float, below: float = float("inf")) -> float:
    """Return a number between two others.

    Raises:
        InputError: it is something else, or not between them.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not above < value < below:
        limit = f"above {above:g}" if below == float("inf") else f"between {above:g} and {below:g}"
        raise InputError(f"{option}={value!r} must be a number {limit}.")
    return float(value)
