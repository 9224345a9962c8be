"""Public calls: an option that a function does not have, and an argument that nothing can read, are one line each.

`@checked_call` is written at each function that a room offers; results, models and circuits check their public methods.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from headwater.errors import InputError, Interrupted, did_you_mean
from headwater.foreign_names import hint_for

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
DEEPEST = 100
"""Lists in one another beyond which nothing is meant."""


def checked_call(function: F) -> F:
    """Let a public function or method say which option was meant, and which of its arguments cannot be read."""
    if hasattr(function, "is_checked"):
        return function
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters]
    known = [name for name in names if name != "self"]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        for name in () if takes_any else options:
            if name not in known:
                here, hint = f"{function.__name__} has no option {name}=", hint_for(function.__name__, name)
                raise InputError(f"{here}: {hint}." if hint else f"{here}.{did_you_mean(name, known)}")
        try:
            return function(*args, **options)
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"{function.__name__} was interrupted.") from None
        except (RuntimeError, TypeError, ValueError):
            for name, value in (*zip(names, args, strict=False), *options.items()):
                if flaw := _flaw(value):
                    raise InputError(f"{name}= of {function.__name__} {flaw}.") from None
            raise

    call.is_checked = True  # type: ignore[attr-defined]
    return cast(F, call)


def checked_calls(kind: C) -> C:
    """Check the calls of a class's own public methods."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            setattr(kind, name, checked_call(member))
        elif isinstance(member, classmethod | staticmethod):
            setattr(kind, name, type(member)(checked_call(member.__func__)))
    return kind


def _flaw(value: object) -> str | None:
    """Say what nothing can read in a value: lists that hold themselves or lie deep in one another, a sparse tensor."""
    torch, within = sys.modules.get("torch"), list[Iterator[Any]]([iter((value,))])
    while within:
        for part in within[-1]:
            if torch and isinstance(part, torch.Tensor) and part.layout is not torch.strided:
                return f"holds a tensor of {part.layout}: give its to_dense()"
            if isinstance(part, list | tuple | set | frozenset | Mapping):
                if len(within) > DEEPEST:
                    return f"holds itself, or has lists more than {DEEPEST} deep in one another"
                within.append(iter(part.values() if isinstance(part, Mapping) else part))
                break
        else:
            within.pop()
    return None
