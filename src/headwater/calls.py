"""Checks of public calls: an unknown option, a missing argument and an unreadable one each give an error of one line.

`@checked_call` decorates each function that a room exports; results, models and circuits check their public methods.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from headwater.errors import InputError, Interrupted, did_you_mean
from headwater.foreign_names import hint_for

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
DEEPEST = 100
"""Nesting of lists beyond this depth is an error."""


def checked_call(function: F) -> F:
    """Make a public function or method report which option was meant, and which of its arguments cannot be read."""
    if hasattr(function, "is_checked"):
        return function
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    names = [one.name for one in parameters]
    known = [name for name in names if name != "self"]
    called = "model" if function.__name__ == "__call__" else _name(function)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in () if takes_any else options:
            if name not in known:
                here, hint = f"{called} has no option {name}=", hint_for(called, name)
                raise InputError(f"{here}: {hint}." if hint else f"{here}.{did_you_mean(name, known)}")
        try:
            return function(*args, **options)
        except KeyboardInterrupt as error:  # also from a nested call: the user called the outermost function
            reason = "" if isinstance(error, Interrupted) or not str(error) else f": {error}"
            raise Interrupted(f"{called} was interrupted{reason}.{_how_to_continue(known, options)}") from None
        except (RuntimeError, TypeError, ValueError):
            if misfit := _misfit(signature, args, options):
                raise InputError(f"{called}: {misfit}; its arguments are {', '.join(known)}.") from None
            for name, value in (*zip(names, args, strict=False), *options.items()):
                if flaw := _flaw(value):
                    raise InputError(f"{name}= of {called} {flaw}.") from None
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


def _misfit(signature: inspect.Signature, args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        return str(error)
    return None


def _flaw(value: object) -> str | None:
    """Return why a value cannot be read: lists that contain themselves or are nested too deeply, a sparse tensor."""
    torch, within = sys.modules.get("torch"), list[Iterator[Any]]([iter((value,))])
    while within:
        for part in within[-1]:
            if torch and isinstance(part, torch.Tensor) and part.layout is not torch.strided:
                return f"contains a tensor of {part.layout}: pass its to_dense()"
            if isinstance(part, list | tuple | set | frozenset | Mapping):
                if len(within) > DEEPEST:
                    return f"contains itself, or lists nested more than {DEEPEST} deep"
                within.append(iter(part.values() if isinstance(part, Mapping) else part))
                break
        else:
            within.pop()
    return None
