"""Checks of public calls: an unknown option and a missing argument each give an error of one line.

`@checked_call` decorates each function that a room exports; results, models and circuits check their public methods.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from headwater.errors import InputError, Interrupted, did_you_mean
from headwater.foreign_names import hint_for

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


def checked_call(function: F) -> F:
    """Make a public function or method report which option was meant, and which of its arguments is missing."""
    if hasattr(function, "is_checked"):
        return function
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    known = [one.name for one in parameters if one.name != "self"]
    called = "model" if function.__name__ == "__call__" else _name(function)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in () if takes_any else options:
            if name not in known:
                here, hint = f"{called} has no option {name}=", hint_for("option", name)
                raise InputError(f"{here}: {hint}." if hint else f"{here}.{did_you_mean(name, known)}")
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
    return cast(F, call)


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
