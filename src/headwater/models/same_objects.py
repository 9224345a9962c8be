"""Whether dictionaries, or modules, still hold the very objects that they held: what was found of these still stands.

A model of some hundred modules is looked at whenever a run is recorded. Comparing objects by identity costs a tenth of
reading what each module holds, and misses nothing but what changes within an object; the hooks, submodules and
parameters of a module lie in dictionaries of its own, which are compared too. Tensors under names that begin with "_"
do not count, nor whether there is one: attention keeps there what it last computed.

Dictionaries are compared one by one only where they hold such a tensor, or where anything differs: all others go at
once, their sizes, names and objects as three lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""By the attribute in which torch keeps them: what they are called."""
WITHIN = (*HOOKS, "_modules", "_parameters")


class SameObjects:
    """The objects that dictionaries hold now."""

    def __init__(self, dictionaries: Iterable[Mapping[str, Any]]):
        listed = list(dictionaries)
        self._empty = [one for one in listed if not one]
        self._held = [(one, tuple(one), _lasting(one)) for one in listed if one]
        self._arrange()

    def are_there(self) -> bool:
        """Whether each holds the very same, under the same names and in the same order."""
        if any(self._empty) or not all(map(_is_there, self._one_by_one)):
            return False
        if self._at_once.is_there():
            return True
        if not all(map(_is_there, self._held)):
            return False
        self._arrange()  # there is a tensor where there was none
        return True

    def _arrange(self) -> None:
        self._one_by_one = [held for held in self._held if any(map(_is_passing, *zip(*held[0].items(), strict=True)))]
        apart = {id(held[0]) for held in self._one_by_one}
        self._at_once = _AtOnce(held[0] for held in self._held if id(held[0]) not in apart)


class _AtOnce:
    """All that dictionaries hold now, as three lists."""

    def __init__(self, dictionaries: Iterable[Mapping[str, Any]]):
        self._dictionaries = list(dictionaries)
        self._sizes = list(map(len, self._dictionaries))
        self._names = list(chain.from_iterable(self._dictionaries))
        self._objects = list(self._values())

    def is_there(self) -> bool:
        return (
            list(map(len, self._dictionaries)) == self._sizes
            and list(chain.from_iterable(self._dictionaries)) == self._names
            and all(map(is_, self._values(), self._objects))
        )

    def _values(self) -> Iterator[object]:
        return chain.from_iterable(one.values() for one in self._dictionaries)


def _is_there(held: tuple[Mapping[str, Any], tuple[str, ...], tuple[object, ...]]) -> bool:
    now, names, lasting = held
    return tuple(now) == names and all(map(is_, _lasting(now), lasting))


def _lasting(held: Mapping[str, Any]) -> tuple[object, ...]:
    """What a dictionary holds, None in place of the tensors that its owner keeps of what it last computed."""
    return tuple(None if _is_passing(name, one) else one for name, one in held.items())


def _is_passing(name: str, one: object) -> bool:
    return isinstance(one, Tensor) and name[0] == "_"


class SameModules:
    """Modules, and the objects that each holds now: values, hooks, submodules and parameters."""

    def __init__(self, modules: Iterable[torch.nn.Module]):
        self._modules = list(modules)
        self._kinds = list(map(type, self._modules))
        held = [vars(module) for module in self._modules]
        self._objects = SameObjects([*held, *(one[name] for one in held for name in WITHIN)])

    def are_as_they_were(self) -> bool:
        """Whether each is of the same class and holds the very same."""
        return all(map(is_, map(type, self._modules), self._kinds)) and self._objects.are_there()


class SameTensors:
    """The parameters and buffers in a module, which is walked anew when one came or went anywhere within it."""

    def __init__(self, root: torch.nn.Module):
        self._root = root
        self._walk()

    def named(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """Return what `named_parameters` and `named_buffers` yield now."""
        if not (all(map(is_, self._now(), self._dictionaries)) and self._held.is_there()):
            self._walk()
        return self._parameters, self._buffers

    def _walk(self) -> None:
        self._modules = list(self._root.modules())
        self._dictionaries = list(self._now())
        self._held = _AtOnce(self._dictionaries)
        self._parameters: list[tuple[str, Tensor]] = list(self._root.named_parameters())
        self._buffers = list(self._root.named_buffers())

    def _now(self) -> Iterator[Mapping[str, object]]:
        return chain.from_iterable(map(_TENSORS, self._modules))


_TENSORS = attrgetter("_modules", "_parameters", "_buffers")
