"""Exports of the package and its rooms, loaded on first use: `hw.patch`, `hw.heads.ablate_heads`, `hw.models.sites`.

A room's `__init__` lists its exports once, as imports under `if TYPE_CHECKING:`, which editors and type checkers read.
`lazy_exports` reads these lines without importing them: `import headwater` loads nothing, and every name is found.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`. It exports the names that it imports under TYPE_CHECKING, and its modules; for the top
            package, `dir` lists only the rooms among its modules.
    """
    homes = homes_of(package)
    modules = {one.name: one.ispkg for one in pkgutil.iter_modules(sys.modules[package].__path__)}
    modules.pop("__main__", None)
    shown = [name for name, is_room in modules.items() if is_room or "." in package]

    def load(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        from headwater.errors import UnknownNameError, did_you_mean
        from headwater.foreign_names import hint_for

        hint = hint_for("package", name)
        near = did_you_mean(name, {*homes, *modules}, or_all=False)
        advice = f": {hint}." if hint else f".{near}" if near else f"; dir({package}) lists its names."
        # `from package import name` calls this from importlib, which would raise an ImportError without the advice.
        if sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap":
            raise ImportError(f"cannot import name {name!r} from {package!r}{advice}", name=package)
        raise UnknownNameError(f"module {package!r} has no attribute {name!r}{advice}")

    return load, lambda: sorted({*homes, *shown}), sorted(homes)


def homes_of(package: str) -> dict[str, str]:
    """Return the module that defines each name that a package imports under TYPE_CHECKING."""
    loader: Any = sys.modules[package].__loader__
    blocks = [node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
    lines = [line for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for line in block.body]
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {one.asname or one.name: str(line.module) for line in imports for one in line.names}
