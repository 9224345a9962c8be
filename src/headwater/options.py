"""Options of the analyses, checked: one that cannot be used is one line that says what was given and what there is."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headwater.errors import InputError, did_you_mean, readable

T = TypeVar("T")
_A_FILE = f".{'x' * 60}.tmp"
"""A name as long as those of the files that are written into a folder."""
LONGEST_SHOWN = 300
"""Of a value that takes more characters the beginning is shown."""
MOST_REPEATS = 1000
"""The average over so many repeats is known to 3 % of how far they differ: more of them are work for nothing."""


def checked_name(option: str, value: object, valid: Sequence[str]) -> str:
    """Return a name that is one of the valid ones."""
    if not isinstance(value, str) or value not in valid:
        hint = did_you_mean(value, valid, or_all=False)
        raise InputError(f"{option}={shown(value)} is not one of {', '.join(valid)}.{hint}")
    return value


def checked_flag(option: str, value: object) -> bool:
    """Return True or False, of Python or numpy."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{option}={shown(value)} must be True or False.")
    return bool(value)


def checked_kind(option: str, value: object, kind: type[T], source: str) -> T:
    """Return an object that is of a kind; `source` says what gives one, as "hw.patch(...)"."""
    if not isinstance(value, kind):
        a = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise InputError(f"{option} must be {a} {kind.__name__}, as {source} gives; found a {type(value).__name__}.")
    return value


def is_one(value: Any) -> bool:
    """Whether something is one thing and not several: a text, bytes, a number, a tensor or an array without axes."""
    if isinstance(value, str | bytes):
        return True
    try:
        iter(value)
    except TypeError:  # a tensor without axes is an Iterable, and says so only here
        return True
    return False


def one_or_several(value: Any) -> list[Any]:
    """Return one thing, or what a list, an array, a column or an iterator holds, as a list."""
    return [value] if is_one(value) else list(value)


def has_no_order(value: object) -> bool:
    """Whether something is gone through by its keys or columns, or in no fixed order: a mapping, a table, a set."""
    return isinstance(value, Mapping | AbstractSet) or hasattr(value, "columns")


def checked_several(option: str, value: Any, wanted: str) -> list[Any]:
    """Return several things as a list, in their order; `wanted` is what is to be given, as "a list of texts"."""
    if is_one(value) or has_no_order(value):
        kind = type(value).__name__
        raise InputError(f"A{'n' * (kind[0] in 'aeio')} {kind} was given as {option}: give {wanted}.")
    return list(value)


def shown(value: object) -> str:
    """Write out a value on one line, as it is in a message; of one that takes many characters, its beginning."""
    try:
        written = repr(value)
    except Exception:  # nested too deep, or of a class of the user's whose repr fails
        written = f"<a {type(value).__name__} that cannot be written out>"
    text = readable(" ".join(line.strip() for line in written.splitlines()))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


def whole_number(value: Any) -> int:
    """Return a whole number of whatever library as Python's own."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        raise TypeError(f"{value!r} is not a number")
    return operator.index(value)


def whole_numbers(value: Any) -> list[int]:
    """Return one whole number, or several, of whatever library."""
    try:
        return [whole_number(value)]
    except TypeError:
        if is_one(value):
            raise
        return [whole_number(part) for part in value]


def resolve_indices(values: Any, size: int, axis: str, option: str | None = None) -> tuple[int, ...]:
    """Return indices along an axis, ascending: None is all of them, negative ones count from the end.

    `option` is what the values were given as; default: the name of the axis with an s.
    """
    option = option or f"{axis}s"
    if values is None:
        return tuple(range(size))
    try:
        given = whole_numbers(values)
    except TypeError:
        what = f"{option}={shown(values)} are not whole numbers"
        raise InputError(
            f"{what}; they are 0 to {size - 1}, or -1 for the last; without {option}= it is all."
        ) from None
    if outside := [index for index in given if not -size <= index < size]:
        where = f"{option}={shown(given)}: there" if option != f"{axis}s" else "There"
        raise InputError(f"{where} is no {axis} {outside[0]}; they are 0 to {size - 1}.")
    found = sorted({index % size for index in given})
    if not found or len(found) < len(given):
        raise InputError(f"{option}={shown(given)} must name at least one {axis}, each once.")
    return tuple(found)


def checked_count(option: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return a whole number, of whatever library, that is neither too small nor too large."""
    limit = f"at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = whole_number(value)
    except TypeError:
        raise InputError(f"{option}={shown(value)} must be a whole number, {limit}.") from None
    if number < least or (most is not None and number > most):
        raise InputError(f"{option}={number} must be {limit}.")
    return number


def checked_repeats(option: str, value: object) -> int:
    """Return how often something is to be done anew, such as splitting into halves, to average over it."""
    return checked_count(option, value, most=MOST_REPEATS)


def is_label(label: object) -> bool:
    """Whether something is a label, 0 or 1."""
    try:
        return label in (0, 1)
    except (ValueError, RuntimeError):  # of an array or a tensor with several numbers
        return False


def checked_seed(value: object) -> int:
    """Return a seed that every generator takes."""
    return checked_count("seed", value, least=0, most=2**32 - 1)


def checked_layer(option: str, value: object, n_layers: int, most: int | None = None) -> int:
    """Return the number of a layer; `most` is the largest, where that is not the model's last."""
    try:
        return checked_count(option, value, least=0, most=n_layers - 1 if most is None else most)
    except InputError:
        raise InputError(f"{option}={shown(value)} is not a layer; the model has layers 0 to {n_layers - 1}.") from None


def checked_path(option: str, value: object) -> Path:
    """Return a path, its `~` read as the user's home. Nothing need be there."""
    if not isinstance(value, str | Path):
        found = type(value).__name__
        raise InputError(f"{option}={shown(value)} must be a path: a text or a pathlib.Path, not {found}.")
    if not str(value).strip():
        raise InputError(f"{option}={value!r} is empty: give a path; '.' is the current folder.")
    text = repr(str(value) if len(str(value)) < 80 else f"{str(value)[:60]}... ({len(str(value))} characters)")
    try:
        path = Path(value).expanduser()
        str(path).encode()  # parquet and safetensors take names in UTF-8 only
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (path / _A_FILE).stat()
    except (ValueError, RuntimeError) as error:  # NUL, half a character, the home of nobody
        raise InputError(f"{option}={text} is not a path: {error}.") from None
    except OSError as error:  # too long, or a folder that may not be entered
        raise InputError(f"{option}={text} cannot be used as a path: {error.strerror}.") from None
    return path


def checked_number(option: str, value: Any, above: float, below: float = float("inf"), up_to: bool = False) -> float:
    """Return a number, of whatever library, between two others; with `up_to` it may be the second itself."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not (above < value < below or (up_to and value == below)):
        limit = f"above {above:g}" if below == float("inf") else f"between {above:g} and {below:g}"
        limit = f"above {above:g} and at most {below:g}" if up_to else limit
        raise InputError(f"{option}={shown(value)} must be a number {limit}.")
    return float(value)
