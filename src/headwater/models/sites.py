"""Sites of interventions: the named activations of a block, one entry each, in the order the block computes them.

    serial     resid_pre -> q k v -> pattern -> z -> attn_out -> resid_mid -> mlp_post -> mlp_out -> resid_post
    parallel   resid_pre -> q k v -> pattern -> z -> attn_out              -> mlp_post -> mlp_out -> resid_post

`q`, `k`, `v` are before rotation, as in TransformerLens; with grouped heads `k` and `v` count key-value heads.
`mlp_post` is the input of the MLP's output projection: its neurons, after activation function and gate.
`attn_out` and `mlp_out` are the terms added to the residual stream, after a post-norm (if any).

An edit at a site reaches everything that the model computes from it. If TransformerLens's hook of that name would not
achieve this, another activation is edited instead (`EditVia`). In a TransformerLens bridge, the hook of `resid_mid` is
at the MLP's norm, and its return value does not reach the skip connection around the MLP, so the edit is applied to
`attn_out`.

To add your own site, register one more entry:

    register_site(Site("mlp_pre", "blocks.{layer}.mlp.hook_pre", ("position", "d_mlp"), Stage.NEURONS))
"""

from __future__ import annotations

import enum
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.options import one_or_several, shown
from headwater.registry import Registry

if TYPE_CHECKING:
    from headwater.models.families import ModelShape
    from headwater.models.model import Model


class Stage(enum.IntEnum):
    """The point in a block at which an edit first acts; everything computed before it is as in the unedited run."""

    BLOCK_INPUT = 0
    ATTENTION = 1
    PATTERN = 2
    HEAD_OUTPUT = 3
    ATTENTION_OUTPUT = 4
    BETWEEN = 5
    NEURONS = 6
    MLP_OUTPUT = 7
    BLOCK_OUTPUT = 8


@dataclass(frozen=True)
class EditVia:
    """How to edit one activation through another of the same block."""

    at: str
    """The site that is edited instead."""
    given: str
    """An earlier site whose activation is also needed."""
    get: Callable[[Tensor, Tensor], Tensor]
    """Returns the activation, from the activations of `at` and `given`."""
    put: Callable[[Tensor, Tensor], Tensor]
    """Returns the value of `at` for which the activation equals the first argument; the second is `given`'s value."""


@dataclass(frozen=True)
class Site:
    """One kind of activation."""

    name: str
    hook: str
    """Its hook name in TransformerLens, with a placeholder for the layer."""
    axes: tuple[str, ...]
    """The axes of one example's activation, by the keys of `AXES`; a pattern's query axis is `position`."""
    stage: Stage | None = None
    """How far into the block an edit of it acts; without a stage, a sweep makes a whole run for every cell."""
    carrier: EditVia | None = None
    """How to make an edit if the hook's return value does not reach everything."""
    absent: Callable[[ModelShape], str | None] = lambda shape: None
    """Returns why models of a shape lack this activation; None if they have it."""

    @property
    def within(self) -> Literal["attention", "mlp"] | None:
        """The part of the block inside which it is computed, where only a hook sees it; None if between the parts."""
        if self.stage in (Stage.ATTENTION, Stage.PATTERN, Stage.HEAD_OUTPUT):
            return "attention"
        return "mlp" if self.stage == Stage.NEURONS else None

    @property
    def swept_axes(self) -> tuple[str, ...]:
        """The axes that a sweep can run over; `head` counts key-value heads if the site has those."""
        axes = tuple("head" if axis == "kv_head" else axis for axis in self.axes)
        return "layer", *(axis for axis in ("position", "head", "key", "feature") if axis in axes)

    @property
    def default_axes(self) -> tuple[str, ...]:
        """The axes that a sweep runs over by default."""
        return "layer", next(axis for axis in ("head", "feature", "position") if axis in self.swept_axes)

    @property
    def units(self) -> Sequence[int] | None:
        """The entries of its last axis (features) that a sweep runs over (if any)."""
        return None

    @property
    def has_heads(self) -> bool:
        """Whether the activation has a head axis."""
        return "head" in self.swept_axes

    @property
    def has_keys(self) -> bool:
        """Whether it has a key axis: a pattern."""
        return "key" in self.axes

    @property
    def head_column(self) -> str:
        """The table column for its head numbers: key-value heads have a separate column."""
        return "kv_head" if "kv_head" in self.axes else "head"

    def hook_name(self, layer: int) -> str:
        """Return the hook name at one layer."""
        return self.hook.format(layer=layer)

    def size(self, shape: ModelShape, length: int) -> tuple[int, ...]:
        """Return the size of one example's activation, for a prompt of this length."""
        return tuple(AXES[axis](shape, length) for axis in self.axes)

    def width(self, shape: ModelShape, length: int) -> int:
        """Return how many numbers the activation has per token of a prompt of this length."""
        return math.prod(AXES[axis](shape, length) for axis in self.axes if axis != "position")

    def layers(self, shape: ModelShape) -> Sequence[int]:
        """Return the layers that have this site."""
        return range(shape.n_layers)

    def read(self, activation: Tensor) -> Tensor:
        """Return the representation that edits apply to, from the tensor at its hook: here the tensor itself."""
        return activation

    @property
    def leaves_out(self) -> bool:
        """Whether some tokens or positions are skipped: neither edited nor read."""
        return False

    def left_out(self, ids: Sequence[int]) -> frozenset[int]:
        """Return the positions of a text at which it is not edited or read."""
        return frozenset()

    def written(self, activation: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the activation after applying `change` to its representation (`read`)."""
        return change(activation)

    @property
    def is_lossless(self) -> bool:
        """Whether writing back what `read` returned leaves the activation unchanged."""
        return True

    @property
    def inner(self) -> Site:
        """The site whose activation `read` returns: here the site itself."""
        return self

    def first_order(self, activation: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        """Return (value - activation) · gradient, summed over the width; by key for a pattern."""
        # In float64: terms of both signs may nearly cancel, so their sum may be far smaller than the terms.
        product = (value - activation).double() * gradient.double()
        return product if self.has_keys else product.sum(-1)

    def lacks(self, model: Model, layer: int, edited: bool = False) -> str | None:
        """Return why a layer has no such activation, or with `edited`, none that can be edited; None if it has one."""
        # Tested at load (`bridge_check`), since no config says it.
        place = self.name, layer
        return model.misfits.get(place) or (model.read_only.get(place) if edited else None)

    def among(self, layers: Iterable[int], model: Model, edited: bool = False) -> tuple[int, ...]:
        """Return those of some layers that have it, or in which it can be `edited`; a warning names the others."""
        layers = tuple(layers)
        lacking = {layer: reason for layer in layers if (reason := self.lacks(model, layer, edited))}
        if lacking and len(lacking) == len(layers):
            raise InputError(lacking[layers[0]])
        if lacking:
            several = f"s {', '.join(map(str, lacking))} are" if len(lacking) > 1 else f" {min(lacking)} is"
            warnings.warn(f"Layer{several} left out: {lacking[min(lacking)]}", stacklevel=3)
        return tuple(layer for layer in layers if layer not in lacking)

    def fitted(self, model: Model) -> Site:
        """Return the site for a model."""
        if reason := self.absent(model.shape):
            raise InputError(f"{self.name} was requested, but {reason}")
        lacking = [self.lacks(model, layer) for layer in self.layers(model.shape)]
        if all(lacking):
            raise InputError(str(lacking[0]))
        return self

    @property
    def described(self) -> Any:
        """Its description in the record of a run."""
        return self.name

    def n_heads(self, shape: ModelShape) -> int:
        """Return the number of heads of the site: key-value heads for `k` and `v`."""
        return AXES[self.head_column](shape, 0)


AXES: dict[str, Callable[[ModelShape, int], int]] = {
    "position": lambda shape, length: length,
    "key": lambda shape, length: length,
    "head": lambda shape, length: shape.n_heads,
    "kv_head": lambda shape, length: shape.n_kv_heads,
    "d_head": lambda shape, length: shape.d_head,
    "d_model": lambda shape, length: shape.d_model,
    "d_mlp": lambda shape, length: shape.d_mlp,
}
"""The axes that a site can have, and their sizes."""


class Sites(Registry[str, Site]):
    """The sites by name; the error for a TransformerLens hook name suggests the site it belongs to."""

    def unknown(self, name: object) -> str:
        """Return the error message for an unknown site; for a hook name, it suggests the hook's site."""
        parts = re.fullmatch(r"(?:blocks\.(\d+)\.)?(?:\w+\.)?(hook_\w+)", name) if isinstance(name, str) else None
        site = next((row for row in self.values() if parts and row.hook.endswith(f".{parts[2]}")), None)
        if parts is None or site is None:
            return super().unknown(name)
        layer = f", with layers=[{parts[1]}]" if parts[1] else ""
        return f"There is no {self.kind} {shown(name)}: the site of this hook is {site.name!r}{layer}."


SiteName: TypeAlias = Literal[
    "resid_pre", "q", "k", "v", "pattern", "z", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post"
]
"""The sites that headwater defines, for editors and type checkers; for your own site, pass the `Site` itself."""
SITES = Sites("site")
"""All sites by name, in the order in which a block computes them."""


@checked_call
def register_site(site: Site) -> Site:
    """Register a site under its name. Models loaded afterwards are checked to have it with these axes."""
    if unknown := [axis for axis in site.axes if axis not in AXES]:
        raise InputError(f"The site {site.name} has an axis {unknown[0]!r}.{did_you_mean(unknown[0], AXES)}")
    if site.axes[:1] != ("position",) and site.axes != ("head", "position", "key"):
        raise InputError(
            f"The axes of the site {site.name} are {', '.join(site.axes)}; they must begin with position, or be those "
            "of a pattern: head, position, key."
        )
    if "{layer}" not in site.hook:
        raise InputError(f"The hook {site.hook!r} of the site {site.name} must have {{layer}} in place of the layer.")
    return SITES.add(site.name, site)


def _no_mlp(shape: ModelShape) -> str | None:
    return None if shape.d_mlp else f"the blocks of this model ({shape.architecture}) are attention alone, without MLP."


def _nothing_between(shape: ModelShape) -> str | None:
    if not shape.parallel_blocks:
        return _no_mlp(shape)
    return (
        f"{shape.architecture} runs attention and MLP in parallel: nothing lies between them. Use resid_pre, "
        "resid_post, attn_out or mlp_out."
    )


_TOKEN, _HEAD, _KV_HEAD = ("position", "d_model"), ("position", "head", "d_head"), ("position", "kv_head", "d_head")
_MIDDLE = EditVia("attn_out", "resid_pre", lambda added, before: before + added, lambda middle, before: middle - before)
for _site in (
    Site("resid_pre", "blocks.{layer}.hook_resid_pre", _TOKEN, Stage.BLOCK_INPUT),
    Site("q", "blocks.{layer}.attn.hook_q", _HEAD, Stage.ATTENTION),
    Site("k", "blocks.{layer}.attn.hook_k", _KV_HEAD, Stage.ATTENTION),
    Site("v", "blocks.{layer}.attn.hook_v", _KV_HEAD, Stage.ATTENTION),
    Site("pattern", "blocks.{layer}.attn.hook_pattern", ("head", "position", "key"), Stage.PATTERN),
    Site("z", "blocks.{layer}.attn.hook_z", _HEAD, Stage.HEAD_OUTPUT),
    Site("attn_out", "blocks.{layer}.hook_attn_out", _TOKEN, Stage.ATTENTION_OUTPUT),
    Site("resid_mid", "blocks.{layer}.hook_resid_mid", _TOKEN, Stage.BETWEEN, carrier=_MIDDLE, absent=_nothing_between),
    Site("mlp_post", "blocks.{layer}.mlp.hook_post", ("position", "d_mlp"), Stage.NEURONS, absent=_no_mlp),
    Site("mlp_out", "blocks.{layer}.hook_mlp_out", _TOKEN, Stage.MLP_OUTPUT, absent=_no_mlp),
    Site("resid_post", "blocks.{layer}.hook_resid_post", _TOKEN, Stage.BLOCK_OUTPUT),
):
    register_site(_site)
OTHER_ACTIVATIONS = {
    "embed": "hook_embed",
    "attn_in": "blocks.{layer}.attn.hook_in",
    "attn_scores": "blocks.{layer}.attn.hook_attn_scores",
    "attn_written": "blocks.{layer}.attn.o.hook_out",
    "mlp_in": "blocks.{layer}.mlp.hook_in",
}
"""TransformerLens hooks that headwater uses but that are not sites: inputs of the model and its parts, scores before
the softmax, and the attention output before a post-norm."""
STATES = tuple(site.name for site in SITES.values() if site.axes == _TOKEN)
"""The sites with the residual stream's width: resid_pre, attn_out and so on. A metric may read them instead of
logits."""


def hook_name(name: str, layer: int = 0) -> str:
    """Return the hook name at one layer of a site or of an entry of `OTHER_ACTIVATIONS`."""
    return (OTHER_ACTIVATIONS[name] if name in OTHER_ACTIVATIONS else SITES[name].hook).format(layer=layer)


def kv_site_of(sites: Iterable[Site]) -> str | None:
    """Return the first of some sites that counts key-value heads; None if none does."""
    return next((site.name for site in sites if "kv_head" in site.axes), None)


def main_site(stage: Stage) -> Site:
    """Return the site of the tensor that passes through a block at a stage: the first row of that stage."""
    return next(site for site in SITES.values() if site.stage == stage)


def taken_as_recorded(stage: Stage, parallel: bool) -> tuple[Stage, ...]:
    """Return the stages that a block can take as recorded if its first edit is at `stage`: attention, MLP, or neither.

    In a parallel block, attention and MLP both read its input, so an edit of either never reaches the other.
    """
    if stage <= Stage.PATTERN:
        return ()
    attention = Stage.HEAD_OUTPUT if stage == Stage.HEAD_OUTPUT else Stage.ATTENTION_OUTPUT
    skips_mlp = stage != Stage.NEURONS if parallel else stage >= Stage.MLP_OUTPUT
    return (attention, Stage.MLP_OUTPUT) if skips_mlp else (attention,)


def place_named(hook: str) -> tuple[Site, int] | None:
    """Return the site and layer of a hook name; None if it belongs to no site."""
    if (parts := re.fullmatch(r"blocks\.(\d{1,9})\.(.+)", hook)) is None:
        return None
    open_hook = f"blocks.{{layer}}.{parts[2]}"
    site = next((site for site in SITES.values() if site.hook == open_hook), None)
    return None if site is None else (site, int(parts[1]))


def sites_called(names: str | Site | Iterable[str | Site]) -> tuple[Site, ...]:
    """Look up sites by name, for any model; a `Site`, such as features of a dictionary, is returned unchanged."""
    if not (wanted := one_or_several(names)):
        raise InputError(f"No site was requested. Valid: {', '.join(SITES)}.")
    by_name: dict[str, Site] = {}
    for site in (one if isinstance(one, Site) else SITES[one] for one in wanted):
        if by_name.setdefault(site.name, site) is not site:
            raise InputError(f"Two sites are called {site.name!r}: give one of them another name=.")
    return tuple(by_name.values())


def sites_named(names: str | Site | Iterable[str | Site], model: Model) -> tuple[Site, ...]:
    """Look up the sites of a model by name."""
    return tuple(site.fitted(model) for site in sites_called(names))
