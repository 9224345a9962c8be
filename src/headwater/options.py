"""Checks of the analyses' options: an error is one line with what was passed and what is valid."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from pathlib import Path
from typing import Any, SupportsIndex, TypeVar

import numpy as np

from headwater.errors import InputError, did_you_mean, readable

T = TypeVar("T")
_A_FILE = f".{'x' * 60}.tmp"
"""A name as long as the names of files that are written into a folder."""
LONGEST_SHOWN = 300
"""A value that takes more characters is cut to its beginning."""
MOST_REPEATS = 1000
"""This many repeats give the average to within 3 % of their spread: more are wasted work."""


def checked_name(option: str, value: object, valid: Sequence[str]) -> str:
    """Return a name, as plain text, if it is one of the valid ones."""
    if not isinstance(value, str) or value not in valid:
        hint = did_you_mean(value, valid, or_all=False)
        raise InputError(f"{option}={shown(value)} is not one of {', '.join(valid)}.{hint}")
    return next(name for name in valid if name == value)  # the value may be of numpy, or of an enumeration


def checked_names(option: str, values: object, valid: Sequence[str]) -> list[str]:
    """Return one name or several, each once, if all of them are valid."""
    names = list(dict.fromkeys(checked_name(option, value, valid) for value in one_or_several(values)))
    if not names:
        raise InputError(f"{option}= is empty: give some of {', '.join(valid)}.")
    # The names are part of a run's record, and a set has another order in every process.
    return sorted(names, key=list(valid).index) if has_no_order(values) else names


def checked_flag(option: str, value: object) -> bool:
    """Return True or False, from Python or numpy."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{option}={shown(value)} must be True or False.")
    return bool(value)


def a_or_an(name: str) -> str:
    """Return the name of a type with its article."""
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"  # of U alone, most begin as "unit" does


def checked_kind(option: str, value: object, kind: type[T]) -> T:
    """Return an object if it is of a class, whose `returned_by` names what returns one, as "hw.patch(...)"."""
    if not isinstance(value, kind):
        wanted, found = a_or_an(kind.__name__), a_or_an(type(value).__name__)
        raise InputError(f"{option} must be {wanted}, as {kind.returned_by} returns; found {found}.")  # type: ignore[attr-defined]
    return value


def is_one(value: Any) -> bool:
    """Return whether a value is one thing: a text, bytes, a number, a tensor or an array without axes."""
    if isinstance(value, str | bytes):
        return True
    try:
        iter(value)
    except TypeError:  # a tensor without axes is an Iterable, and fails only here
        return True
    return False


def is_index(value: object) -> bool:
    """Return whether a value is one whole number of any library."""
    # An array has `__index__` too, whatever its shape.
    return is_one(value) and isinstance(value, SupportsIndex)


def one_or_several(value: Any) -> list[Any]:
    """Return one thing, or the items of a list, an array, a column or an iterator, as a list."""
    return [value] if is_one(value) else list(value)


def has_no_order(value: object) -> bool:
    """Return whether a value iterates over keys or columns, or in no fixed order: a mapping, a table, a set."""
    return isinstance(value, Mapping | AbstractSet) or hasattr(value, "columns")


def checked_several(option: str, value: Any, wanted: str) -> list[Any]:
    """Return several things as a list, in their order; `wanted` describes valid input, as "a list of texts"."""
    if is_one(value) or has_no_order(value):
        found = a_or_an(type(value).__name__)
        raise InputError(f"A{found[1:]} was given as {option}: give {wanted}.")
    return list(value)


def shown(value: object) -> str:
    """Format a value on one line for a message; a long one is cut to its beginning."""
    try:
        written = repr(value)
    except Exception:  # nested too deep, or of a user's class whose repr fails
        written = f"<a {type(value).__name__} whose repr fails>"
    text = readable(" ".join(line.strip() for line in written.splitlines()))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def whole_number(value: Any) -> int:
    """Convert a whole number of any library to a Python int."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{value!r} is not a number")
    return operator.index(value)


def whole_numbers(value: Any) -> list[int]:
    """Convert one whole number, or several, of any library to a list."""
    try:
        return [whole_number(value)]
    except TypeError:
        if is_one(value):
            raise
        return [whole_number(part) for part in value]


def resolve_indices(values: Any, size: int, axis: str, option: str | None = None) -> tuple[int, ...]:
    """Return indices along an axis, ascending: None means all, negative ones count from the end.

    `option` is the name of the option with the values; default: the name of the axis with an s.
    """
    option = option or f"{axis}s"
    if values is None:
        return tuple(range(size))
    try:
        given = whole_numbers(values)
    except TypeError:
        what = f"{option}={shown(values)} must be whole numbers"
        raise InputError(f"{what} from 0 to {size - 1}, or -1 for the last; omit {option}= for all.") from None
    if outside := [index for index in given if not -size <= index < size]:
        where = f"{option}={shown(given)}: there" if option != f"{axis}s" else "There"
        raise InputError(f"{where} is no {axis} {outside[0]}; they are 0 to {size - 1}.")
    found = sorted({index % size for index in given})
    if not found or len(found) < len(given):
        raise InputError(f"{option}={shown(given)} must name at least one {axis}, each once.")
    return tuple(found)


def checked_count(option: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return a whole number, of any library, if it is neither too small nor too large."""
    limit = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = whole_number(value)
    except TypeError:
        raise InputError(f"{option}={shown(value)} must be a whole number, {limit}.") from None
    if number < least or (most is not None and number > most):
        raise InputError(f"{option}={number} must be {limit}.")
    return number


def checked_repeats(option: str, value: object) -> int:
    """Return the number of repeats to average over, such as of a split into halves."""
    return checked_count(option, value, most=MOST_REPEATS)


def is_label(label: object) -> bool:
    """Return whether a value is a label, 0 or 1."""
    try:
        return label in (0, 1)
    except (TypeError, ValueError, RuntimeError):  # from pandas' missing value, or several numbers
        return False


def checked_seed(value: object) -> int:
    """Return a seed that every generator accepts."""
    return checked_count("seed", value, least=0, most=2**32 - 1)


def checked_layer(option: str, value: object, n_layers: int, most: int | None = None) -> int:
    """Return the number of a layer, -1 for the last; `most` is the largest, if that is not the model's last."""
    try:
        number = checked_count(option, value, least=-n_layers, most=n_layers - 1 if most is None else most)
    except InputError:
        raise InputError(f"{option}={shown(value)} is not a layer; the model has layers 0 to {n_layers - 1}.") from None
    return number + n_layers if number < 0 else number


def refuse_half_characters(text: str) -> None:
    """Refuse a text that cannot be written as UTF-8, for which tokenizers raise errors of their own."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text if len(text) <= 40 else text[:40] + "…"
        raise InputError(
            f"The text {shown!r} holds half a character, {text[error.start]!r} at {error.start} (a lone surrogate): it "
            "cannot be tokenized. Fix it where it was read, for example with errors='replace'."
        ) from None


def checked_path(option: str, value: object) -> Path:
    """Return a path, with `~` expanded to the user's home. It need not exist."""
    if not isinstance(value, str | Path):
        found = type(value).__name__
        raise InputError(f"{option}={shown(value)} must be a path: a text or a pathlib.Path, not {found}.")
    if not str(value).strip():
        raise InputError(f"{option}={value!r} is empty: give a path; '.' is the current folder.")
    try:
        path = Path(value).expanduser()
        str(path).encode()  # parquet and safetensors accept only names in UTF-8
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (path / _A_FILE).stat()
    # NUL, half a character, the home of an unknown user, too long, a folder that may not be entered
    except (ValueError, RuntimeError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{option}={shown(str(value))} cannot be used as a path: {why}.") from None
    return path


def checked_number(option: str, value: Any, above: float, below: float = float("inf"), up_to: bool = False) -> float:
    """Return a number, of any library, between two others; with `up_to` it may equal the second."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if not is_number or not (above < number < below or (up_to and number == below)):
        limit = f"above {above:g}" if below == float("inf") else f"between {above:g} and {below:g}"
        limit = f"above {above:g} and at most {below:g}" if up_to else limit
        raise InputError(f"{option}={shown(value)} must be a number {limit}.")
    return float(number)
