"""Whether dictionaries, or modules, still hold the very objects that they held: what was found of these still stands.

A model of some hundred modules is looked at whenever a run is recorded. Comparing objects by identity costs a fifth of
reading what each module holds, and misses nothing but what changes within an object; the hooks, submodules and
parameters of a module lie in dictionaries of its own, which are compared too. Tensors under names that begin with "_"
do not count, nor whether there is one: attention keeps there what it last computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch

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

    def are_there(self) -> bool:
        """Whether each holds the very same, under the same names and in the same order."""
        return not any(map(len, self._empty)) and all(
            tuple(now) == names and (all(map(is_, now.values(), lasting)) or all(map(is_, _lasting(now), lasting)))
            for now, names, lasting in self._held
        )


def _lasting(held: Mapping[str, Any]) -> tuple[object, ...]:
    """What a dictionary holds, None in place of the tensors that its owner keeps of what it last computed."""
    return tuple(None if isinstance(one, torch.Tensor) and name[0] == "_" else one for name, one in held.items())


class SameModules:
    """Modules, and the objects that each holds now: values, hooks, submodules and parameters."""

    def __init__(self, modules: Iterable[torch.nn.Module]):
        listed = list(modules)
        self._kinds = [(module, type(module)) for module in listed]
        held = [vars(module) for module in listed]
        self._objects = SameObjects([*held, *(one[name] for one in held for name in WITHIN)])

    def are_as_they_were(self) -> bool:
        """Whether each is of the same class and holds the very same."""
        return all(type(module) is kind for module, kind in self._kinds) and self._objects.are_there()
