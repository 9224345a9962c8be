"""Which code is a library's: Python's own, an installed package's, headwater's. It is known by its name and version."""

from __future__ import annotations

import functools
import inspect
import os
import site
import sys
import sysconfig
from typing import Any


def found_by_name(value: Any) -> bool:
    """Whether a module holds a value under its own name, as it does not hold a function made inside another."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
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
