"""What a package or a room of it offers, loaded on first use: `hw.patch`, `hw.heads.ablation`, `hw.models.sites`."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, str] = MappingProxyType({})


def opened(
    package: str, homes: Mapping[str, str] = NOTHING, modules: Iterable[str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        homes: by public name, the module that defines it.
        modules: the modules that can be reached through it; None for all that lie in its folder.
    """

    def offered() -> set[str]:
        found = (module.name for module in pkgutil.iter_modules(sys.modules[package].__path__))
        return {*homes, *(found if modules is None else modules)}

    def load(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        if not name.startswith("_") and name in offered():
            return importlib.import_module(f"{package}.{name}")
        from headwater.errors import did_you_mean

        raise AttributeError(f"module {package!r} has no attribute {name!r}.{did_you_mean(name, offered())}")

    return load, lambda: sorted(offered())
