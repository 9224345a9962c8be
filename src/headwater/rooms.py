"""What the package and its rooms offer, loaded on first use: `hw.patch`, `hw.heads.ablate_heads`, `hw.models.sites`.

A room's `__init__` names what it offers once, as imports under `if TYPE_CHECKING:`, which editors and type checkers
read. `opened` reads the same lines, unimported, so that `import headwater` loads nothing and everything is found.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from headwater.waiting import LIBRARIES, said_if_slow


def opened(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: its `__name__`. It offers the names that it imports under TYPE_CHECKING, and its modules; of the
            modules at the top, `dir` lists the rooms alone.
    """
    homes = homes_of(package)
    found = list(pkgutil.iter_modules(sys.modules[package].__path__))
    modules = {module.name for module in found} - {"__main__"}
    rooms = {module.name for module in found if module.ispkg}
    shown = modules if "." in package else rooms

    def load(name: str) -> Any:
        if name in homes:
            return getattr(_imported(homes[name]), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        from headwater.errors import did_you_mean
        from headwater.foreign_names import hint_for

        hint = hint_for("package", name)
        said = f": {hint}." if hint else f".{did_you_mean(name, {*homes, *modules})}"
        if _asked_by_import(sys._getframe(1)):
            raise ImportError(f"cannot import name {name!r} from {package!r}{said}", name=package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}{said}")

    return load, lambda: sorted({*homes, *shown}), sorted(homes)


def _asked_by_import(asking: FrameType) -> bool:
    """Whether `from package import name` asks: it would put an error of its own in place of an AttributeError.

    It asks with `hasattr`, in Python's `_handle_fromlist`; any other `hasattr` is told that the name is not there.
    """
    return asking.f_code.co_name == "_handle_fromlist" and asking.f_globals.get("__name__") == "importlib._bootstrap"


def _imported(module: str) -> Any:
    """Import a module; the first that needs PyTorch takes seconds, and says so."""
    if "torch" in sys.modules:
        return importlib.import_module(module)
    with said_if_slow(LIBRARIES):
        return importlib.import_module(module)


def homes_of(package: str) -> dict[str, str]:
    """Return, by each name that a package imports under TYPE_CHECKING, the module that defines it."""
    loader: Any = sys.modules[package].__loader__
    blocks = [node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
    found: dict[str, str] = {}
    for block in blocks:
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                assert node.module
                found |= {alias.asname or alias.name: node.module for alias in node.names}
    return found
