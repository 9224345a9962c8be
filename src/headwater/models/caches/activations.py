"""Which activations names mean: sites by their short names, hooks by TransformerLens's, with `*`.

1. A short name is a row of `SITES`, or of `HOOKS`: it means that activation at every layer requested.
2. A hook's name means that activation; `*` matches one part of it between dots, so that "blocks.*.mlp.hook_post" is
   one activation at every layer. A hook that is a site's is that site.
3. The axes of a site are in its row. Those of any other hook are seen in two small runs: the axis that goes with the
   number of texts is `batch`, those that go with their length are `position` and `key`; whatever has no such axes is
   refused.
4. Features of a dictionary (`headwater.models.dictionaries.features`) are read from the activation at their own layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.models.dictionaries.features import Features
from headwater.models.edits import Hook, read_hook
from headwater.models.sites import AXES, HOOKS, SITES, Site, sites_named
from headwater.models.tokens import Batch
from headwater.options import shown

if TYPE_CHECKING:
    from headwater.models.model import Model

PROBES = ((2, 3), (2, 5))
"""Texts and tokens of the two runs in which the axes of a hook are seen."""


@dataclass(frozen=True)
class Activation:
    """One kind of activation, at some layers.

    Attributes:
        name: the short name of a site, or a hook's name with `*` for its layer.
        hook: the hook's name, with its layer left open as {layer}.
        layers: where it is read; empty for what belongs to no layer.
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
        """Read one that is kept as JSON."""
        read: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        return cls(**read)

    def plain(self) -> dict[str, Any]:
        """Return it as JSON keeps it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @property
    def has_keys(self) -> bool:
        """Whether it says, for each query, something of each key."""
        return "key" in self.axes

    @property
    def head_axis(self) -> int | None:
        """Which axis is heads, if one is; 0 is the axis of tokens, or of texts for what has keys."""
        axes = [axis for axis in self.axes if axis not in ("position", "key")]
        return next((1 + n for n, axis in enumerate(axes) if axis in ("head", "kv_head")), None)

    @property
    def places(self) -> tuple[int | None, ...]:
        """The layers, or None once for what belongs to no layer."""
        return self.layers or (None,)

    @property
    def torch_dtype(self) -> torch.dtype:
        """In which numbers it is kept."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def hook_name(self, layer: int | None) -> str:
        """Return the hook's name at one of its places."""
        return self.hook.format(layer=layer)

    def shape(self, n_tokens: int, n_keys: int) -> tuple[int, ...]:
        """Return the shape of what is kept of one text in one layer."""
        return (*self.size, n_tokens, n_keys) if self.has_keys else (n_tokens, *self.size)

    # In memory and files the texts of a layer lie one after the other: a row per token that is kept. Texts differ in
    # keys, so what has keys is laid flat, a row for each number.

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row."""
        return () if self.has_keys else self.size

    def rows(self, counts: Int[Tensor, " example"], lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
        """Return how many rows each text has in one layer, by its tokens that are kept and all of its tokens."""
        return counts * lengths * math.prod(self.size) if self.has_keys else counts

    def nbytes(self, counts: Int[Tensor, " example"], lengths: Int[Tensor, " example"]) -> Int[Tensor, " example"]:
        """Return how many bytes each text takes in all layers."""
        return self.rows(counts, lengths) * math.prod(self.row) * len(self.places) * self.torch_dtype.itemsize


def activations_named(
    names: Sequence[Any], layers: Sequence[int], heads: Sequence[int] | None, model: Model
) -> list[Activation]:
    """Look up what names mean in a model, at these layers; of what has query heads, these alone unless None."""
    if not names or not all(isinstance(name, str | Site) for name in names):
        raise InputError(f"sites={shown(names)} names no activation: give names of sites or of hooks.")
    hooks: dict[str, dict[int, None]] = {}  # a dictionary in place of a set keeps the order
    for name in names:
        if not isinstance(name, Features):
            for hook, layer in _places(name.name if isinstance(name, Site) else name, layers, model):
                # One entry per hook whatever it was called: "z" and "blocks.*.attn.hook_z" are kept once.
                hooks.setdefault(hook, {}).update({} if layer is None else {layer: None})
    short = {hook: name for name, hook in HOOKS.items()} | {site.hook: name for name, site in SITES.items()}
    seen = _axes_seen({hook: at for hook, at in hooks.items() if short.get(hook) not in SITES}, model)
    activations = []
    for hook, at in hooks.items():
        name = short.get(hook, hook.replace("{layer}", "*"))
        if hook in seen:
            axes, size, dtype = seen[hook]
        else:
            ((axes, dtype),) = ((site.axes, _kept_in(model.dtype)) for site in sites_named(name, model))
            size = tuple(AXES[axis](model.shape, 0) for axis in axes if axis not in ("position", "key"))
        activations.append(Activation(name, hook, tuple(at), axes, size, dtype))
    for features in (name.fitted(model) for name in names if isinstance(name, Features)):
        axes, size, hook = ("position", "feature"), (len(features.units),), SITES[features.at].hook
        activations.append(Activation(features.name, hook, (features.layer,), axes, size, "float32", is_read=True))
    known = [activation.name for activation in activations]
    if twice := [name for n, name in enumerate(known) if name in known[:n]]:
        raise InputError(f"Two of what is to be kept are called {twice[0]!r}: give them names of their own.")
    return activations if heads is None else _with_heads(activations, heads, model)


def _with_heads(activations: list[Activation], heads: Sequence[int], model: Model) -> list[Activation]:
    """Return activations with these query heads alone, where they have any."""
    shape = model.shape
    for each in activations:
        if "kv_head" in each.axes and shape.group_size > 1:
            raise InputError(
                f"heads= counts the {shape.n_heads} query heads, and {each.name} has {shape.n_kv_heads} key-value "
                f"heads, each shared by {shape.group_size} of them: cache {each.name} without heads=, and pick along "
                "its axis kv_head."
            )
    if all(each.head_axis is None for each in activations):
        names = ", ".join(each.name for each in activations)
        raise InputError(f"heads= chooses heads, and none of what is kept has any: {names}.")
    return [
        each
        if (axis := each.head_axis) is None
        else replace(each, size=(*each.size[: axis - 1], len(heads), *each.size[axis:]))
        for each in activations
    ]


def _kept_in(dtype: torch.dtype) -> str:
    """Name the dtype in which activations of a dtype are kept: float32 or wider, whole numbers as they are."""
    kept = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return str(kept).removeprefix("torch.")


def _places(name: str, layers: Sequence[int], model: Model) -> list[tuple[str, int | None]]:
    """Return the hooks that a name means, their layer left open, each with its layer."""
    if name in SITES:
        (site,) = sites_named(name, model)
        return [(site.hook, layer) for layer in site.among(layers, model)]
    if name in HOOKS:
        hook = HOOKS[name]
        return [(hook, layer) for layer in layers] if "{layer}" in hook else [(hook, None)]
    known, parts = model.raw.hook_dict, name.split(".")
    matching = [name] if name in known else []
    if "*" in name:  # each part between dots by itself
        split = {hook: hook.split(".") for hook in known}
        matching = [hook for hook, own in split.items() if len(own) == len(parts) and all(map(fnmatchcase, own, parts))]
    if not matching:
        open_names = dict.fromkeys(re.sub(r"^blocks\.\d+\.", "blocks.*.", hook) for hook in known)
        known_names = [*SITES, *HOOKS, *(open_names if "." in name else ())]
        near = did_you_mean(re.sub(r"^blocks\.\d+\.", "blocks.*.", name), known_names)
        raise InputError(f"{model.name} has no activation named {shown(name)}.{near}")
    places: list[tuple[str, int | None]] = []
    for hook in matching:
        # `layers=` cuts a pattern that leaves the layer open; a hook named with its layer is meant all the same.
        of_layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)
        if of_layer is None:
            places.append((hook, None))
        elif not name.startswith("blocks.*.") or int(of_layer[1]) in layers:
            places.append((f"blocks.{{layer}}.{of_layer[2]}", int(of_layer[1])))
    return places


def _axes_seen(
    hooks: Mapping[str, Iterable[int]], model: Model
) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], str]]:
    """Run the model twice on a few tokens; return axes, size and dtype of hooks that are not sites."""

    def note(activation: object, hook: object, name: str, found: set[Any]) -> None:
        if not isinstance(activation, Tensor):
            raise InputError(f"{name} is a {type(activation).__name__} and cannot be kept.")
        found.add((tuple(activation.shape), _kept_in(activation.dtype)))
        if len(found) > 1:
            raise InputError(f"{name} has another shape in another layer: name its layers separately.")

    # Two lengths: one would not tell an axis of tokens from another of that size. Every vocabulary has token 0.
    runs: list[dict[str, set[Any]]] = []
    for n_texts, length in PROBES if hooks else ():
        found = {hook: set[Any]() for hook in hooks}
        watching: list[Hook] = []
        for hook, layers in hooks.items():
            for place in [hook.format(layer=layer) for layer in layers] or [hook]:
                watching.append((place, read_hook(partial(note, name=place, found=found[hook]))))
        model.run(Batch.of([[0] * length] * n_texts, pad=0), watching)
        runs.append(found)
    seen = {}
    for hook in hooks:
        ((short, dtype),), ((long, _),) = (found[hook] for found in runs)
        seen[hook] = (*_axes(hook, short, long, model), dtype)
    return seen


def _axes(
    hook: str, short: tuple[int, ...], long: tuple[int, ...], model: Model
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Tell the axes of an activation by its shapes in the two runs."""
    (n_texts, short_length), (_, long_length) = PROBES
    axes = ["batch" if n == 0 and size == n_texts else "" for n, size in enumerate(short)]
    for n, sizes in enumerate(zip(short, long, strict=False)):
        if sizes == (short_length, long_length):
            axes[n] = "key" if "position" in axes else "position"
    is_one_per_token = axes[:2] == ["batch", "position"] and "key" not in axes
    if not is_one_per_token and [axes[:1], axes[2:]] != [["batch"], ["position", "key"]]:
        raise InputError(
            f"{hook.replace('{layer}', '*')} cannot be kept text by text: for {n_texts} texts of {short_length} tokens "
            f"its shape is {short}."
        )
    shape = model.shape
    known = [("d_model", shape.d_model), ("d_mlp", shape.d_mlp), ("d_vocab", shape.d_vocab), ("head", shape.n_heads)]
    known += [("d_head", shape.d_head)] + ([("kv_head", shape.n_kv_heads)] if shape.group_size > 1 else [])
    size = tuple(size for size, axis in zip(short, axes, strict=True) if not axis)
    for length in size:  # an axis is named by its length, where one axis of the model alone has it
        names = [name for name, known_length in known if known_length == length]
        axes[axes.index("")] = names[0] if len(names) == 1 else "width"
    return tuple(axes[1:]), size
