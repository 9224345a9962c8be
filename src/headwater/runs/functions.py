"""What functions, classes and whatever can be called are made of, and what their code reads, for their identity.

Which code is a library's: Python's own, an installed package's, headwater's. It is known by its name and version.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any


def found_by_name(value: Any) -> bool:
    """Whether a module holds a value under its own name, as it does not hold a function made inside another."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    # Unwrapped on both sides: what a module offers may be wrapped by a check (`calls.checked_call`, beartype).
    return found is not None and inspect.unwrap(found) is inspect.unwrap(value)


def version_of(module: str) -> bytes:
    """Return the version of the package that a module belongs to; empty where it says none."""
    version = getattr(sys.modules.get(module.split(".")[0]), "__version__", "")
    return version.encode() if isinstance(version, str) else b""


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(sorted({os.path.realpath(folder) + os.sep for folder in folders}))


def is_library(module: str | None) -> bool:
    """Whether a module is Python's own, an installed package's or headwater's: it is known by name and version."""
    top = (module or "").split(".")[0]
    if top in ("", "__main__"):
        return False
    if top == "headwater" or top in sys.builtin_module_names:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None:  # also of what is in the standard library but not loaded, or frozen
        return top in sys.stdlib_module_names
    return os.path.realpath(file).startswith(_library_folders())  # a file of the user's may be called profile.py


NAMED = ("PUSH_NULL", "CACHE", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME")
"""Instructions between the name of a module and that of its attribute which change neither."""
MADE_BY_PYTHON = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __firstlineno__ __static_attributes__ "  # noqa: SIM905
    "__parameters__ __slotnames__ __orig_bases__ __match_args__ __dataclass_params__ __dataclass_fields__ "
    "__abstractmethods__ __annotate_func__ __annotations_cache__ __annotate__ __classcell__ __type_params__ "
    "_abc_impl".split()
)
READ_BY_NAME = ("eval", "exec", "globals", "__import__")
"""Built-in functions by which code reads what its names do not tell."""


def reads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that code reads, each with the attributes asked of it at once."""
    chain: list[str] = []
    for step in dis.get_instructions(code):
        # `np.linalg.norm` counts as that one function, not as all of numpy.
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
        elif step.opname not in NAMED:
            if chain:
                yield tuple(chain)
            chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from reads(constant)


def imports(code: types.CodeType) -> Iterator[str]:
    """Yield the modules that code imports when it is called."""
    yield from (str(step.argval) for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from imports(constant)


def content_of(cell: types.CellType) -> object:
    """Return what a closure's cell holds; NotImplemented where it holds nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return NotImplemented


def callable_parts(value: Any) -> tuple[Any, ...] | None:
    """Take a method, a partial or a built-in function apart; None for what is none of these."""
    if isinstance(value, types.MethodType):
        return "method", value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return "partial", value.func, value.args, value.keywords
    if isinstance(value, staticmethod | classmethod):
        return type(value).__name__, value.__func__
    if isinstance(value, property):
        return "property", value.fget, value.fset, value.fdel
    if isinstance(value, functools.cached_property):
        return "property", value.func
    if isinstance(value, functools.partialmethod):
        return "partial method", value.func, value.args, value.keywords
    if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
        owner = value.__self__
        name = f"{getattr(value, '__module__', None)} {value.__qualname__}"
        return ("built in", name, None if isinstance(owner, types.ModuleType | type) else owner)
    if isinstance(value, types.WrapperDescriptorType | types.MethodDescriptorType | types.ClassMethodDescriptorType):
        return "built in", value.__qualname__, value.__objclass__
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return "slot", value.__name__
    if type(value).__module__ == "functools" and callable(getattr(value, "__wrapped__", None)):
        return "wrapped", value.__wrapped__
    return None


def without_type_checks(function: types.FunctionType) -> types.FunctionType:
    """Return a function as it was before beartype or jaxtyping wrapped it: they name what they add by addresses."""
    while isinstance(wrapped := vars(function).get("__wrapped__"), types.FunctionType):
        where = str(function.__globals__.get("__name__", ""))
        if not (function.__code__.co_filename.startswith("<@beartype(") or where.split(".")[0] == "jaxtyping"):
            break
        function = wrapped
    return function


def is_generated(cls: type, value: object) -> bool:
    """Whether a member of a class was written by `dataclasses`, out of fields that are hashed themselves."""
    inner = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
    code = getattr(inner, "__code__", None)
    return dataclasses.is_dataclass(cls) and code is not None and "__create_fn__" in code.co_qualname


def writes_itself(cls: type) -> bool:
    """Whether a class of the user's own decides what pickle writes of its objects, and so may leave something out."""
    names = ("__getstate__", "__reduce__", "__reduce_ex__")
    return any(name in vars(base) and not is_library(base.__module__) for base in cls.__mro__ for name in names)


def is_computed_once(cls: type, name: str) -> bool:
    """Whether an object keeps under this name what follows from the rest of it."""
    return isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
