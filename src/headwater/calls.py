"""Checks of public calls: an unknown option, a missing argument and a wrong value each give an error of one line.

`@checked_call` decorates each function that a room exports; results, models and circuits check their public methods.
What an annotation says is checked before the function begins, and converted to plain Python: an option that is `bool`
or a `Literal` of names, and an argument of one of headwater's classes (those with `returned_by`). So are the numbers of
`COMMON_OPTIONS`, which mean the same in every function of headwater; in the methods of a user's own class a name may
mean something else. Everything else the functions check themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from headwater.errors import InputError, Interrupted, did_you_mean
from headwater.foreign_names import hint_for
from headwater.options import (
    checked_count,
    checked_flag,
    checked_kind,
    checked_name,
    checked_number,
    checked_repeats,
    checked_seed,
)

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
Check = Callable[[str, Any], Any]
COMMON_OPTIONS: dict[str, Check] = {
    "seed": lambda _, value: checked_seed(value),
    "seeds": checked_repeats,
    "batch_size": checked_count,
    "margin": partial(checked_number, above=0.0),
}

COMMON_TEXTS = {
    "progress": "show progress bars.",
    "out": "a folder for the result. An interrupted run resumes if it is called again with the same folder.",
}
"""What these options are in every function: added to the docstrings that do not say more."""


def checked_call(function: F) -> F:
    """Make a public function or method report which option was meant, and which of its arguments is missing."""
    if hasattr(function, "is_checked"):
        return function
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    known = [one.name for one in parameters if one.name != "self"]
    positional = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    called = "model" if function.__name__ == "__call__" else _name(function)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in () if takes_any else options:
            if name not in known:
                here, hint = f"{called} has no option {name}=", hint_for("option", name)
                raise InputError(f"{here}: {hint}." if hint else f"{here}.{did_you_mean(name, known)}")
        if checks := _checks_of(function):
            first = [
                checks[name](name, value) if name in checks else value
                for name, value in zip(positional, args, strict=False)
            ]
            args = (*first, *args[len(first) :])
            options |= {name: checks[name](name, value) for name, value in options.items() if name in checks}
        try:
            return function(*args, **options)
        except KeyboardInterrupt as error:  # also from a nested call: the user called the outermost function
            reason = "" if isinstance(error, Interrupted) or not str(error) else f": {error}"
            raise Interrupted(f"{called} was interrupted{reason}.{_how_to_continue(known, options)}") from None
        except TypeError:
            try:
                signature.bind(*args, **options)
            except TypeError as misfit:
                raise InputError(f"{called}: {misfit}; its arguments are {', '.join(known)}.") from None
            raise

    call.is_checked = True  # type: ignore[attr-defined]
    head, title, rest = (function.__doc__ or "").partition("Args:\n")
    texts, gap, tail = rest.partition("\n\n")
    for name in [name for name in COMMON_TEXTS if title and name in known]:
        indent = texts[: len(texts) - len(texts.lstrip())]
        if f"{indent}{name}: " not in texts:
            texts = f"{texts.rstrip()}\n{indent}{name}: {COMMON_TEXTS[name]}"
            call.__doc__ = f"{head}{title}{texts}{gap}{tail}"
    return cast(F, call)


@functools.cache
def _checks_of(function: Callable[..., Any]) -> dict[str, Check]:
    """Return by parameter the check that follows from its annotation or, in `COMMON_OPTIONS`, from its name."""
    checks: dict[str, Check] = {}
    by_name = COMMON_OPTIONS if function.__module__.startswith("headwater.") else {}
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, inspect.unwrap(function).__globals__)
            except Exception:  # a class that is imported only for type checkers, or in a user's class any text
                continue
        kinds = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
        classes = [kind for kind in kinds if kind is not NoneType]
        literals = [value for kind in classes if get_origin(kind) is Literal for value in get_args(kind)]
        are_names = all(get_origin(kind) is Literal for kind in classes) and all(isinstance(n, str) for n in literals)
        if are_names:
            check: Check = partial(checked_name, valid=literals)
        elif classes == [bool]:
            check = checked_flag
        elif name in by_name:
            check = by_name[name]
        elif len(classes) == 1 and hasattr(classes[0], "returned_by"):
            check = partial(checked_kind, kind=classes[0])
        else:
            continue
        may_be_none = NoneType in kinds or parameter.default is None
        checks[name] = partial(_unless_none, check) if may_be_none else check
    return checks


def _unless_none(check: Check, name: str, value: Any) -> Any:
    return None if value is None else check(name, value)


def _how_to_continue(known: Sequence[str], options: Mapping[str, Any]) -> str:
    """Return the sentence on what an interrupted call kept; empty if the call takes no folder."""
    if "out" not in known:
        return ""
    if options.get("out") is None:
        return " Nothing was kept; with out=FOLDER a run can be continued."
    folder = str(options["out"])
    # The pieces of the run, or the results of its steps; the record of the run is written before any work.
    names = (path.name for path in Path(folder).rglob("*") if path.is_file())
    if any(name != "run.json" and not name.startswith(".") for name in names):
        return f" The same call with out={folder!r} continues from what is saved there."
    return f" Nothing is saved in {folder!r} yet: the same call begins anew."


def checked_calls(kind: C) -> C:
    """Check the calls of the public methods that a class defines."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(member):
            setattr(kind, name, checked_call(member))
        elif isinstance(member, classmethod | staticmethod):
            setattr(kind, name, type(member)(checked_call(member.__func__)))
    return kind


def _name(function: Callable[..., Any]) -> str:
    """Return the name by which a function is called: for `__init__` the name of its class."""
    return function.__qualname__.rpartition(".")[0] if function.__name__ == "__init__" else function.__name__
