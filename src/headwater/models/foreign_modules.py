"""What was put into a model past `model.hooks`: what its modules hold now and did not when it was loaded.

Looked at whenever a run is recorded; where nothing is found, weights and config say what the model computes.

1. Hooks of torch or TransformerLens on a module, and methods patched on a module or its class: what they compute cannot
   be named. Those of libraries belong to a model as it is loaded (TransformerLens, accelerate and peft hook what they
   wrap); a hook or a `forward` that was written elsewhere counts whenever it came.
2. Numbers and texts that a module keeps, such as the eps of a norm, and which class it is: named by their values.

Numbers kept in tuples, lists or other objects are not looked at.

Whether dictionaries, or modules, still hold the very same objects, so that what was found before still applies.

A model of some hundred modules is looked at whenever a run is recorded. Comparing objects by identity costs a tenth of
reading what each module holds, and misses nothing but what changes within an object; the hooks, submodules and
parameters of a module lie in dictionaries of its own, which are compared too. Tensors under names that begin with "_"
do not count, nor whether there is one: attention keeps there what it last computed.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules import module as torch_modules

from headwater.runs.identity import UNKNOWN, content_of, without_type_checks

HOOKS = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}
"""By the attribute in which torch keeps them: what they are called."""
WITHIN = (*HOOKS, "_modules", "_parameters")


def _is_passing(name: str, one: object) -> bool:
    """Whether a module keeps something of what it last computed."""
    return isinstance(one, Tensor) and name[0] == "_"


class SameObjects:
    """The objects that dictionaries hold now, but for what `passes`."""

    def __init__(self, dictionaries: Iterable[Mapping[str, Any]], passes: Callable[[str, object], bool] = _is_passing):
        listed, self._passes = list(dictionaries), passes
        self._empty = [one for one in listed if not one]
        # The objects and not their ids: an id is given to another object once its own is gone.
        self._held = [(one, tuple(one), self._lasting(one)) for one in listed if one]

    def are_there(self) -> bool:
        """Whether each holds the very same, under the same names and in the same order."""
        return not any(self._empty) and all(
            tuple(now) == names and (all(map(is_, now.values(), before)) or all(map(is_, self._lasting(now), before)))
            for now, names, before in self._held
        )

    def _lasting(self, held: Mapping[str, Any]) -> list[object]:
        """What a dictionary holds, None in place of what passes."""
        return [None if self._passes(name, one) else one for name, one in held.items()]


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
    """The parameters and buffers in a module, which is walked again when one came or went anywhere within it."""

    def __init__(self, root: torch.nn.Module):
        self._root = root
        self._walk()

    def named(self) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
        """Return what `named_parameters` and `named_buffers` yield now."""
        if not (all(map(is_, self._now(), self._dictionaries)) and self._held.are_there()):
            self._walk()
        return self._parameters, self._buffers

    def _walk(self) -> None:
        self._modules = list(self._root.modules())
        self._dictionaries = list(self._now())
        self._held = SameObjects(self._dictionaries, passes=lambda name, one: False)
        self._parameters: list[tuple[str, Tensor]] = list(self._root.named_parameters())
        self._buffers = list(self._root.named_buffers())

    def _now(self) -> Iterator[Mapping[str, object]]:
        return chain.from_iterable(map(_TENSORS, self._modules))


_TENSORS = attrgetter("_modules", "_parameters", "_buffers")


Function: TypeAlias = Callable[..., Any]

LIBRARIES = frozenset(
    ["accelerate", "builtins", "headwater", "peft", "torch", "transformer_lens", "transformers", "transformers_modules"]
)
"""Whose hooks and classes belong to a model; `transformers_modules` is the code that a checkpoint brings."""
MOVERS = frozenset(("accelerate", "headwater"))
"""Whose hooks and methods may come and go: they compute what was there before, or are recorded otherwise."""
NOT_LOOKED_AT = frozenset(vars(torch.nn.Module())) - {"training"} | {
    "context_level",
    "max_seq_len_cached",
    "processor",
    "tokenizer",
}
"""Attributes that torch keeps for itself, that change with use, or that the record of a run has in another place."""
PLAIN = frozenset((bool, int, float, str, type(None)))
SHOWN = 3
"""How many places a message names."""


class Held(NamedTuple):
    """What one module holds beside weights and submodules."""

    kind: type
    values: dict[str, object]
    methods: dict[str, Function]
    hooks: dict[str, list[Function]]


class KnownModules:
    """The modules of a model as they were when it was loaded, to compare with as they are now."""

    def __init__(self, raw: object):
        self._raw = raw
        self._before = {path: _belonging(_held(module)) for path, module in _modules(raw)}
        self._forwards = {held.kind: _forward(held.kind) for held in self._before.values()}
        self._loaded: SameModules | None = None

    def as_loaded(self) -> SameModules | None:
        """Look whether every module holds just what a model as it was loaded holds, its hook points no hook of anyone.

        Returns:
            what they hold, the same object as last time where they hold the same objects; None where they hold more.
        """
        if any(_forward(kind) is not forward for kind, forward in self._forwards.items()) or any(_everywhere()):
            return None
        if self._loaded is None or not self._loaded.are_as_they_were():
            modules = dict(_modules(self._raw))
            # The slow comparison by value, done only after something was replaced.
            is_so = {path: _held(module) for path, module in modules.items()} == self._before
            self._loaded = SameModules(modules.values()) if is_so else None
        return self._loaded

    def alterations(self) -> list[Any]:
        """Return what is other than it was, for the record of a run; nothing for a model as it was loaded.

        Returns:
            Texts that name values, and where there is something that cannot be named an object that says so under
            `UNKNOWN`.
        """
        if self.as_loaded() is not None:
            return []
        values, unnamed = list[str](), list(_everywhere())
        unnamed += [f"a forward of the class {k.__name__}" for k, f in self._forwards.items() if _forward(k) is not f]
        gone = dict(self._before)
        for path, module in _modules(self._raw):
            now, before = _held(module), gone.pop(path, None)
            if before == now:
                continue
            name = _readable(path, module)
            if before is None or before.kind is not now.kind:
                named = values if _sources(now.kind) <= LIBRARIES else unnamed
                named.append(f"{name} is a {now.kind.__name__}")
                before = Held(now.kind, {}, {}, {})
            values += _other_values(name, before.values, now.values)
            unnamed += [f"{what} of {name}" for what in _other_methods(before.methods, now.methods)]
            unnamed += [f"{what} on {name}" for what in _other_hooks(before, now)]
        values += [f"{_readable(path)} is gone" for path in gone]
        if unnamed:
            more = f" and {len(unnamed) - SHOWN} more" if len(unnamed) > SHOWN else ""
            return [*values, {UNKNOWN: f"{', '.join(unnamed[:SHOWN])}{more}"}]
        return values


def _modules(raw: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module of a bridge, and of the model that it wraps those that the bridge itself does not hold."""
    seen: set[torch.nn.Module] = set()
    yield from raw.named_modules(seen)
    # A bridge keeps its model in __dict__, where torch does not see it as a submodule.
    original = raw.__dict__.get("original_model", getattr(raw, "original_model", None))
    if isinstance(original, torch.nn.Module):
        yield from original.named_modules(seen, "original_model")


def _readable(path: str, module: Any = None) -> str:
    """Name a module as `model.hooks` does where it can."""
    if _is_hook_point(type(module)) and isinstance(module.name, str):
        return module.name
    return re.sub(r"\b_original_component\b\.?", "", path).strip(".") or "the model"


def _held(module: torch.nn.Module) -> Held:
    """Look at a module: some hundreds are looked at whenever a run is recorded."""
    values: dict[str, object] = {}
    methods: dict[str, Function] = {}
    kept, kind = vars(module), type(module)
    for name, value in tuple(kept.items()):  # a model keeps what it last computed, also while it is looked at
        if name in NOT_LOOKED_AT:
            continue
        if type(value) in PLAIN:
            if name[0] != "_":
                values[name] = value
        elif callable(value) and not isinstance(value, torch.nn.Module) and _is_method(module, name, value):
            methods[name] = value
    # transformers leaves its hooks on a model once somebody asked it for states or attentions: they edit nothing.
    hooks = {
        key: [hook for hook in kept[key].values() if _sources(hook) != {"transformers"}] for key in HOOKS if kept[key]
    }
    return Held(kind, values, methods, {key: listed for key, listed in hooks.items() if listed})


def _is_method(module: torch.nn.Module, name: str, value: object) -> bool:
    """Whether a function that a module keeps may replace a method of its class."""
    usual = getattr(type(module), name, None)
    if name[0] == "_" and not callable(usual):  # torch keeps compiled calls so
        return False
    is_put_back = isinstance(value, types.MethodType) and value.__func__ is usual and value.__self__ is module
    return not is_put_back


def _belonging(held: Held) -> Held:
    """Return what a module may hold when it is loaded: of hooks and of its `forward`, those of libraries."""
    methods = {name: f for name, f in held.methods.items() if name != "forward" or _sources(f) <= LIBRARIES}
    hooks = {key: [hook for hook in hooks if _sources(hook) <= LIBRARIES] for key, hooks in held.hooks.items()}
    return held._replace(methods=methods, hooks={key: listed for key, listed in hooks.items() if listed})


def _other_values(name: str, before: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    for key in [*now, *(key for key in before if key not in now)]:
        if key not in now:
            yield f"{name}.{key} is gone"
        elif key not in before or before[key] != now[key]:
            yield f"{name}.{key} = {now[key]!r}"


def _other_methods(before: Mapping[str, Function], now: Mapping[str, Function]) -> Iterator[str]:
    for name in dict(before) | dict(now):
        one, other = before.get(name), now.get(name)
        if one is not other and not _sources(one, other) <= MOVERS:
            yield f"a {name}" if other is not None else f"no longer a {name} of its own"


def _other_hooks(before: Held, now: Held) -> Iterator[str]:
    """Name the hooks that came or went, but for those by which a library watches the modules that it wraps."""
    # At a hook point TransformerLens puts what it was given.
    usual = MOVERS if _is_hook_point(now.kind) else LIBRARIES - {"builtins"}
    for key, what in HOOKS.items():
        known, left = set(map(id, before.hooks.get(key, ()))), set(map(id, now.hooks.get(key, ())))
        came = [hook for hook in now.hooks.get(key, ()) if id(hook) not in known]
        went = [hook for hook in before.hooks.get(key, ()) if id(hook) not in left]
        yield from (f"a {what}" for hook in came if not _is_usual(hook, usual))
        yield from (f"no longer a {what}" for hook in went if not _is_usual(hook, usual))


def _is_usual(hook: Function, usual: frozenset[str]) -> bool:
    sources = _sources(hook)
    return sources <= LIBRARIES and bool(sources & usual)


def is_a(thing: object, *names: str) -> bool:
    """Whether one of an object's classes has one of these names; the library of the class need not be there."""
    return any(kind.__name__ in names for kind in type(thing).__mro__)


def _is_hook_point(kind: type) -> bool:
    return any(base.__name__ == "HookPoint" for base in kind.__mro__)


def _everywhere() -> Iterator[str]:
    """Name the hooks that torch calls at every module of every model."""
    for key, what in HOOKS.items():
        if any(not _sources(hook) <= LIBRARIES for hook in getattr(torch_modules, f"_global{key}").values()):
            yield f"a {what} on all modules of torch"


def _forward(kind: type) -> object:
    return getattr(kind, "forward", None)


def _sources(*functions: object) -> set[str]:
    """Return the packages in which functions, and the functions that they wrap, were written."""
    packages, waiting, seen = set[str](), [f for f in functions if f is not None], set[int]()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if type(current) in weakref.ProxyTypes:
            continue
        if isinstance(current, functools.partial):
            waiting += [current.func, *filter(callable, [*current.args, *current.keywords.values()])]
        elif isinstance(current, types.MethodType):
            waiting.append(current.__func__)
        elif isinstance(current, types.FunctionType):
            current = without_type_checks(current)  # and functools.wraps copies __module__ from another function
            packages.add(str(current.__globals__.get("__name__")).split(".")[0])
            waiting += filter(callable, map(content_of, current.__closure__ or ()))
        else:
            named = current if isinstance(current, type | types.BuiltinFunctionType) else type(current)
            package = (named.__module__ or "builtins").split(".")[0]
            if package not in LIBRARIES or not isinstance(current, torch.nn.Module):  # a library's acts on a library's
                packages.add(package)
    return packages
