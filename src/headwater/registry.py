"""Registries: rows by name, in the order in which they were added.

A registry is the only list of a kind of thing: sites, metrics, scores, families, figures. Tables, legends, the command
line and suggestions read it, so adding a row adds it everywhere. A row is added, never replaced: an unknown name and a
name that is already taken are errors.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, overload

from headwater.errors import InputError, did_you_mean
from headwater.options import shown

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Registry(Mapping[K, T], Generic[K, T]):
    """Rows by name (or by class), in the order added.

    Args:
        kind: what a row is, for messages: "site", "metric".
        filled_by: modules, or packages with all their modules, that add rows when they are imported; imported on the
            first access.
    """

    def __init__(self, kind: str, *filled_by: str):
        self.kind = kind
        self._filled_by = filled_by
        self._rows: dict[K, T] = {}

    @overload
    def add(self, name: K, row: T) -> T: ...
    @overload
    def add(self, name: K) -> Callable[[T], T]: ...

    def add(self, name: K, row: T | None = None) -> T | Callable[[T], T]:
        """Add a row; without `row`, return a decorator that adds one."""
        if row is None:
            return lambda made: self.add(name, made)
        if name in self._rows:
            raise InputError(f"There is a {self.kind} {_name(name)} already; choose another name.")
        self._rows[name] = row
        return row

    def __getitem__(self, name: Any) -> T:
        try:
            return self._filled()[name]
        except (KeyError, TypeError):
            raise InputError(self.unknown(name)) from None

    def of_class(self, kind: type) -> T:
        """Return the row of a class, or of the nearest class that it inherits from."""
        return self[next((base for base in kind.__mro__ if base in self), kind)]

    def unknown(self, name: object) -> str:
        """Return the message that there is no such row, with the nearest names or all names."""
        rows = [row if isinstance(row, str) else _name(row) for row in self._filled()]
        return f"There is no {self.kind} {_name(name)}.{did_you_mean(name, rows)}"

    def remove(self, name: K) -> T:
        """Remove a row, for example of a plug-in that was unloaded."""
        row = self[name]
        del self._rows[name]
        return row

    @contextmanager
    def with_row(self, name: K, row: T) -> Iterator[T]:
        """Add a row for the duration of a `with` block."""
        self._filled()
        self.add(name, row)
        try:
            yield row
        finally:
            self.remove(name)

    def _filled(self) -> dict[K, T]:
        for name in self._filled_by:
            filling = importlib.import_module(name)
            for module in pkgutil.iter_modules(getattr(filling, "__path__", ()), f"{name}."):
                importlib.import_module(module.name)
        self._filled_by = ()
        return self._rows

    def __contains__(self, name: object) -> bool:
        try:
            return name in self._filled()
        except TypeError:
            return False

    def __iter__(self) -> Iterator[K]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(_name(name) for name in self._filled())})"


def _name(name: object) -> str:
    return name.__name__ if isinstance(name, type) else shown(name)
