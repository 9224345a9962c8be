"""Which activations are meant by names: sites by their short names, hooks by TransformerLens's, with `*`.

1. A short name is a row of `SITES`, or of `HOOKS`: it means that activation at every layer asked for.
2. A hook's name means that activation; `*` stands for one part of it between dots, so that "blocks.*.mlp.hook_post" is
   one activation at every layer. A hook that is a site's is that site.
3. The axes of a site stand in its row. Those of any other hook are seen in two small runs: the axis that goes with the
   number of texts is `batch`, those that go with their length are `position` and `key`; whatever has no such axes is
   refused.
4. Features of a dictionary (`headwater.models.dictionaries.features`) are read from the activation at their own layer.

Under which names a cache answers: a short name with a layer, a hook's name of TransformerLens, or one with `*`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries.features import Features
from headwater.models.edits import Hook, read_hook
from headwater.models.sites import AXES, HOOKS, SITES, Site, sites_named
from headwater.models.tokens import Batch
from headwater.options import checked_count, shown

if TYPE_CHECKING:
    from headwater.models.model import Model


PROBES = ((2, 3), (2, 5))
"""Texts and tokens of the two runs in which the axes of a hook are seen."""
BEFORE_BLOCKS = ("hook_embed", "hook_pos_embed", "embed.", "pos_embed.")


@dataclass(frozen=True)
class Activation:
    """One kind of activation, at some layers.

    Attributes:
        name: the short name of a site, or a hook's name with `*` for its layer.
        hook: the hook's name, with its layer left open as {layer}.
        layers: where it is read; empty for what stands in no layer.
        axes: of one text's activation; those of a pattern end in position and key.
        size: how long the axes are, without position and key.
        dtype: in which it is kept, as torch names it.
        is_read: whether it is read from what the hook holds (features of a dictionary), and not the thing itself.
    """

    name: str
    hook: str
    layers: tuple[int, ...]
    axes: tuple[str, ...]
    size: tuple[int, ...]
    dtype: str
    is_read: bool = False

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Activation:
        """Read one that is kept as JSON, with lists in the place of tuples."""
        axes, size, layers = tuple(plain["axes"]), tuple(plain["size"]), tuple(plain["layers"])
        return cls(plain["name"], plain["hook"], layers, axes, size, plain["dtype"], plain["is_read"])

    @property
    def has_keys(self) -> bool:
        """Whether it says, for each query, something of each key."""
        return "key" in self.axes

    @property
    def places(self) -> tuple[int | None, ...]:
        """The layers, or None once for what stands in no layer."""
        return self.layers or (None,)

    def hook_name(self, layer: int | None) -> str:
        """Return the hook's name at one of its places."""
        return self.hook if layer is None else self.hook.format(layer=layer)

    def torch_dtype(self) -> torch.dtype:
        """Return in which numbers it is kept."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


def activations_named(asked: Sequence[Any], layers: Sequence[int], model: Model) -> list[Activation]:
    """Look up what names mean in a model.

    Args:
        asked: short names of sites, names of hooks, and sites themselves, such as features of a dictionary.
        layers: for names that leave their layer open.
        model: the model.
    """
    if not asked or not all(isinstance(name, str | Site) for name in asked):
        raise InputError(f"sites={shown(asked)} names no activation: give names of sites or of hooks.")
    wanted: dict[str, list[int]] = {}
    dictionaries = features_among(asked)
    for name in asked:
        if name in dictionaries:
            continue
        for hook, layer in _places(name.name if isinstance(name, Site) else name, layers, model):
            held = wanted.setdefault(hook, [])
            if layer is not None and layer not in held:
                held.append(layer)
    sites = {site.hook: site.name for site in SITES.values()}
    short = {hook: name for name, hook in HOOKS.items()}
    own = {hook: held for hook, held in wanted.items() if hook not in sites}
    seen = _seen(own, model) if own else {}
    dtype = str(torch.promote_types(model.dtype, torch.float32)).removeprefix("torch.")
    found = []
    for hook, held in wanted.items():
        if hook in sites:
            (site,) = sites_named(sites[hook], model)
            size = tuple(AXES[axis](model.shape, 0) for axis in site.axes if axis not in ("position", "key"))
            found.append(Activation(site.name, hook, tuple(held), site.axes, size, dtype))
        else:
            name = short.get(hook, hook.replace("{layer}", "*"))
            found.append(Activation(name, hook, tuple(held), *seen[hook]))
    found += [_of_features(one, model) for one in dictionaries]
    if twice := [one.name for n, one in enumerate(found) if one.name in [other.name for other in found[:n]]]:
        raise InputError(f"Two of what is to be kept are called {twice[0]!r}: give them names of their own.")
    return found


def features_among(asked: Sequence[Any]) -> list[Features]:
    """Return the dictionaries among what was asked for."""
    return [one for one in asked if isinstance(one, Features)]


def _of_features(features: Features, model: Model) -> Activation:
    """Return the features of a dictionary, at its own layer, as an activation."""
    fitted = features.fitted(model)
    hook = SITES[fitted.at].hook
    return Activation(
        fitted.name, hook, (fitted.layer,), ("position", "feature"), (len(fitted.units),), "float32", True
    )


def _places(name: str, layers: Sequence[int], model: Model) -> list[tuple[str, int | None]]:
    """Return the hooks that a name means, their layer left open, each with its layer."""
    if name in SITES or name in HOOKS:
        if name in SITES:
            (site,) = sites_named(name, model)
            return [(site.hook, layer) for layer in site.among(layers, model)]
        hook = HOOKS[name]
        return [(hook, layer) for layer in layers] if "{layer}" in hook else [(hook, None)]
    known = model.raw.hook_dict
    matching = [hook for hook in known if _matches(hook, name)] if "*" in name else [name] if name in known else []
    if not matching:
        open_names = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.*.", hook) for hook in known)
        near = did_you_mean(re.sub(r"^blocks\.\d+\.", "blocks.*.", name), [*SITES, *HOOKS, *open_names])
        raise InputError(f"{model.name} has no activation named {shown(name)}.{near}")
    found = [_opened(hook) for hook in matching]
    leaves_open = name.startswith("blocks.*.")
    return [(hook, layer) for hook, layer in found if layer is None or not leaves_open or layer in layers]


def _opened(hook: str) -> tuple[str, int | None]:
    """Split a hook's name into one with its layer left open, and the layer."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)
    return (hook, None) if found is None else (f"blocks.{{layer}}.{found[2]}", int(found[1]))


def _matches(hook: str, pattern: str) -> bool:
    """Whether each part of a name, between dots, is what the pattern says there."""
    parts, wanted = hook.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _seen(wanted: dict[str, list[int]], model: Model) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Run the model twice on a few tokens, and return axes, size and dtype of hooks that are no sites."""
    shapes: dict[str, list[tuple[int, ...]]] = {hook: [] for hook in wanted}
    dtypes: dict[str, str] = {}

    def watch(hook: str, first: bool) -> Any:
        def note(activation: object, hook: object, name: str = hook) -> None:
            if not isinstance(activation, Tensor):
                raise InputError(f"{name} is a {type(activation).__name__} and cannot be kept.")
            if first:
                shapes[name].append(tuple(activation.shape))
            elif tuple(activation.shape) != shapes[name][-1]:
                raise InputError(f"{name} has another shape in another layer: name its layers apart.")
            wide = activation.dtype.is_floating_point
            kept = torch.promote_types(activation.dtype, torch.float32) if wide else activation.dtype
            dtypes[name] = str(kept).removeprefix("torch.")

        return read_hook(note)

    for texts, length in PROBES:
        hooks: list[Hook] = []
        for hook, layers in wanted.items():
            places = [hook.format(layer=layer) for layer in layers] or [hook]
            hooks += [(place, watch(hook, first=place == places[0])) for place in places]
        model.run(Batch.of([[0] * length] * texts, pad=0), hooks)
    return {hook: (*_axes(hook, shapes[hook], model), dtypes[hook]) for hook in wanted}


def _axes(hook: str, shapes: list[tuple[int, ...]], model: Model) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tell the axes of an activation by its shapes in the two runs."""
    (texts, one), (_, other) = PROBES
    short, long = shapes
    axes = ["batch" if n == 0 and size == texts else "" for n, size in enumerate(short)]
    for n, (size, then) in enumerate(zip(short, long, strict=len(short) == len(long)) if axes else ()):
        if (size, then) == (one, other):
            axes[n] = "key" if "position" in axes else "position"
    is_one_per_token = axes[:2] == ["batch", "position"] and "key" not in axes
    if not is_one_per_token and [axes[:1], axes[2:]] != [["batch"], ["position", "key"]]:
        raise InputError(
            f"{hook.replace('{layer}', '*')} cannot be kept text by text: for {texts} texts of {one} tokens its shape "
            f"is {short}."
        )
    own = [size for size, axis in zip(short, axes, strict=True) if not axis]
    labels = iter(_labels(own, model))
    return tuple(axis or next(labels) for axis in axes[1:]), tuple(own)


def _labels(sizes: list[int], model: Model) -> list[str]:
    """Name axes by their length, where one axis of the model alone has it; "width" otherwise."""
    shape = model.shape
    by_size: dict[int, set[str]] = {}
    last = [("d_model", shape.d_model), ("d_mlp", shape.d_mlp), ("d_vocab", shape.d_vocab)]
    heads = [("head", shape.n_heads)] + ([("kv_head", shape.n_kv_heads)] if shape.n_kv_heads < shape.n_heads else [])
    for name, size in [*last, *heads, ("d_head", shape.d_head)]:
        by_size.setdefault(size, set()).add(name)
    return [next(iter(by_size[size])) if len(by_size.get(size, ())) == 1 else "width" for size in sizes]


def layers_needed(activations: Sequence[Activation], model: Model) -> int | None:
    """Return how many blocks must run for activations; None where one stands behind them."""
    behind = [a.hook for a in activations if not a.layers and not a.hook.startswith(BEFORE_BLOCKS)]
    return None if behind else 1 + max((layer for a in activations for layer in a.layers), default=0)


def refuse_misread_heads(activations: Sequence[Activation], heads: object, model: Model) -> None:
    """Refuse query heads for activations that have none, or that have key-value heads."""
    shape = model.shape
    if heads is None:
        return
    for one in activations:
        if "kv_head" in one.axes and shape.n_kv_heads != shape.n_heads:
            raise InputError(
                f"heads= counts the {shape.n_heads} query heads, and {one.name} has {shape.n_kv_heads} key-value "
                f"heads, each shared by {shape.group_size} of them: cache {one.name} without heads=, and pick along "
                "its axis kv_head."
            )
    if not any(has_query_heads(one, model) for one in activations):
        names = ", ".join(one.name for one in activations)
        raise InputError(f"heads= chooses heads, and none of what is kept has any: {names}.")


def has_query_heads(activation: Activation, model: Model) -> bool:
    """Whether one of its axes counts query heads (a key-value head each, where heads are not grouped)."""
    alone = "kv_head" in activation.axes and model.shape.n_kv_heads == model.shape.n_heads
    return "head" in activation.axes or alone


@dataclass(frozen=True)
class Names:
    """The names of what is kept.

    Attributes:
        kept: by short name, or by hook name with `*` for its layer.
        n_layers: of the model.
    """

    kept: dict[str, Activation]
    n_layers: int

    def keys(self) -> list[str | tuple[str, int]]:
        """Return all of them: ("z", 3) and "blocks.3.attn.hook_z"."""
        short: list[str | tuple[str, int]] = []
        full: list[str | tuple[str, int]] = []
        for one in self.kept.values():
            short += [(one.name, layer) for layer in one.layers] if one.layers else []
            full += [] if one.is_read else [one.hook_name(layer) for layer in one.places]
        return short + full

    def found(self, key: object, any_layer: bool = False) -> tuple[Activation, int]:
        """Return what a key means, and which of its places."""
        name, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not isinstance(name, str):
            raise InputError(f"The cache holds no {shown(name)}: ask for one of cache.keys().")
        for one in self.kept.values():
            for place, at in enumerate(one.places):
                if layer is None and not one.is_read and name == one.hook_name(at):
                    return one, place
        by_name = {one.hook.replace("{layer}", "*"): one for one in self.kept.values() if not one.is_read} | self.kept
        named = by_name.get(name)
        if named is None:
            near = did_you_mean(name, [*self.kept, *(key for key in self.keys() if isinstance(key, str))])
            kept = [one.name + (f" at {layers_said(one.layers)}" if one.layers else "") for one in self.kept.values()]
            said = near if near.startswith(" Did") else f" It keeps {'; '.join(kept[:12])}{'; ...' * (len(kept) > 12)}."
            raise InputError(f"The cache does not hold {shown(name)}.{said}")
        one = named
        if any_layer or (layer is None and len(one.places) == 1):
            return one, 0
        held = f"{one.name} is kept at {layers_said(one.layers)}" if one.layers else f"{one.name} stands in no layer"
        if layer is None:
            raise InputError(f"{held}: name one of them, as in cache[{one.name!r}, {one.layers[-1]}].")
        number = checked_count("layer", layer, least=-self.n_layers)
        number += self.n_layers if number < 0 else 0
        if number not in one.layers:
            raise InputError(f"The cache holds no {one.name!r} of layer {layer}: {held}.")
        return one, one.layers.index(number)


def layers_said(layers: Sequence[int]) -> str:
    """Name layers."""
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(tuple(layers))}"


def ranges(numbers: tuple[int, ...]) -> str:
    """Name numbers, those of a row by its ends."""
    whole = len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
