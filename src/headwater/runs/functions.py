"""What functions, classes and whatever can be called are made of, and what their code reads, for their identity.

Which code is a library's: Python's own, an installed package's, headwater's. It is known by its name and version.
"""

from __future__ import annotations

import dis
import functools
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator

NAMED = ("PUSH_NULL", "CACHE", "PRECALL", "NOP", "EXTENDED_ARG", "RESUME")
"""Instructions between the name of a module and that of its attribute which change neither."""
MADE_BY_PYTHON = frozenset(
    "__module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __firstlineno__ __static_attributes__ "  # noqa: SIM905
    "__parameters__ __slotnames__ __orig_bases__ __match_args__ __dataclass_params__ __dataclass_fields__ "
    "__abstractmethods__ __annotate_func__ __annotations_cache__ __annotate__ __classcell__ __type_params__ "
    "_abc_impl".split()
)
READ_BY_NAME = (eval, exec, globals, __import__)
"""Built-in functions by which code reads what its names do not tell."""
MADE_OF = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools._lru_cache_wrapper: ("__wrapped__",),
    types.ClassMethodDescriptorType: ("__objclass__", "__name__"),
    types.GetSetDescriptorType: ("__objclass__", "__name__"),
}
"""What decides what these compute: pickle refuses them, or writes a name in its place."""


def version_of(module: str) -> str:
    """Return the version of the package that a module belongs to; empty where it says none."""
    version = getattr(sys.modules.get(module.split(".")[0]), "__version__", "")
    return version if isinstance(version, str) else ""


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


def reads(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the global names that code reads, each with the attributes asked of it at once."""
    chain: list[str] = []
    for step in _steps(code):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain.append(str(step.argval))
        elif step.opname not in NAMED:
            if chain:
                yield tuple(chain)
            chain = [str(step.argval)] if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else []


def imports(code: types.CodeType) -> Iterator[str]:
    """Yield the modules that code imports when it is called."""
    return (str(step.argval) for step in _steps(code) if step.opname == "IMPORT_NAME")


def _steps(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of code, which end in a return, and of the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _steps(constant)


def content_of(cell: types.CellType) -> object:
    """Return what a closure's cell holds; NotImplemented where it holds nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return NotImplemented


def without_type_checks(function: types.FunctionType) -> types.FunctionType:
    """Return a function as it was before beartype or jaxtyping wrapped it: they name what they add by addresses."""
    while isinstance(wrapped := vars(function).get("__wrapped__"), types.FunctionType):
        where = str(function.__globals__.get("__name__", ""))
        if not (function.__code__.co_filename.startswith("<@beartype(") or where.split(".")[0] == "jaxtyping"):
            break
        function = wrapped
    return function
