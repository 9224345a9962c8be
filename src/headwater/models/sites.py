"""Where an intervention acts: the named activations of a block, one row each, as the block computes them.

    serial     resid_pre -> q k v -> pattern -> z -> attn_out -> resid_mid -> mlp_post -> mlp_out -> resid_post
    parallel   resid_pre -> q k v -> pattern -> z -> attn_out              -> mlp_post -> mlp_out -> resid_post

`q`, `k`, `v` are taken before rotation, as TransformerLens names them; with grouped heads `k` and `v` count key-value
heads. `mlp_post` is what the MLP's output projection reads: its neurons, after activation and gate.
`attn_out` and `mlp_out` are what is added to the residual stream, after a post-norm where there is one.

An edit at a place reaches everything that the model computes from it. Where TransformerLens's hook of that name would
not do that, the site has a carrier: the edit is made by way of another activation. On a bridge the hook of `resid_mid`
sits at the MLP's norm, and what it returns misses the skip connection around the MLP, so the edit goes into what
attention adds.

A site of one's own is one more row:

    register_site(Site("mlp_pre", "blocks.{layer}.mlp.hook_pre", ("position", "d_mlp"), Stage.NEURONS, within="mlp"))
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
    """How far into its block an edit acts; what comes before is as it was."""

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
    """How an edit of one activation is made by way of another, computed in the same block."""

    at: str
    """The site that is edited instead."""
    given: str
    """A site before it, which is needed too."""
    get: Callable[[Tensor, Tensor], Tensor]
    """The activation, from those of `at` and `given`."""
    put: Callable[[Tensor, Tensor], Tensor]
    """What `at` must be for the activation to be the first argument; the second is that of `given`."""


@dataclass(frozen=True)
class Site:
    """One kind of activation."""

    name: str
    hook: str
    """Its hook name in TransformerLens, with the layer left open."""
    axes: tuple[str, ...]
    """The axes of one example's activation, by the words of `AXES`; a pattern's queries are its positions."""
    stage: Stage | None = None
    """How far into the block an edit of it acts; where that is not said, a sweep makes a whole run for every cell."""
    within: Literal["attention", "mlp"] | None = None
    """The part of the block that computes it on the way, where only a hook sees it; None where it lies between them."""
    carrier: EditVia | None = None
    """How an edit gets into a run, where the hook does not carry it."""
    absent: Callable[[ModelShape], str | None] = lambda shape: None
    """Why a model of some shape has none of it; None where it has."""

    @property
    def swept_axes(self) -> tuple[str, ...]:
        """The axes that a sweep can run over; `head` counts key-value heads where the site has those."""
        axes = tuple("head" if axis == "kv_head" else axis for axis in self.axes)
        return "layer", *(axis for axis in ("position", "head", "key", "feature") if axis in axes)

    @property
    def default_axes(self) -> tuple[str, ...]:
        """The axes that a sweep runs over where none is named."""
        return "layer", next(axis for axis in ("head", "feature", "position") if axis in self.swept_axes)

    @property
    def has_units(self) -> bool:
        """Whether each entry of its last axis has its own meaning: features."""
        return "feature" in self.axes

    @property
    def units(self) -> Sequence[int] | None:
        """Which entries of its last axis a sweep runs over, if any: features."""
        return None

    @property
    def has_heads(self) -> bool:
        """Whether the activation is one per head."""
        return "head" in self.swept_axes

    @property
    def has_keys(self) -> bool:
        """Whether it says, for each query, something of each key: a pattern."""
        return "key" in self.axes

    @property
    def head_column(self) -> str:
        """The column of a table that numbers its heads: key-value heads have one of their own."""
        return "kv_head" if "kv_head" in self.axes else "head"

    def hook_name(self, layer: int) -> str:
        """Return the hook name at one layer."""
        return self.hook.format(layer=layer)

    def size(self, shape: ModelShape, length: int) -> tuple[int, ...]:
        """Return the size of one example's activation, for a prompt of this length."""
        return tuple(AXES[axis](shape, length) for axis in self.axes)

    def width(self, shape: ModelShape, length: int) -> int:
        """How many numbers the activation holds per token of a prompt of this length."""
        return math.prod(AXES[axis](shape, length) for axis in self.axes if axis != "position")

    def layers(self, shape: ModelShape) -> Sequence[int]:
        """The layers that it is of."""
        return range(shape.n_layers)

    def read(self, activation: Tensor) -> Tensor:
        """Return what edits are written in, of what passes at its hook: the activation itself."""
        return activation

    @property
    def leaves_out(self) -> bool:
        """Whether there are tokens or positions at which it is not edited or read."""
        return False

    def left_out(self, ids: Sequence[int]) -> frozenset[int]:
        """Return the positions of a text at which it is not edited or read."""
        return frozenset()

    def written(self, activation: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return an activation of which `change` was made to what `read` gives of it."""
        return change(activation)

    @property
    def inner(self) -> Site:
        """The site whose activation is what `read` gives: itself."""
        return self

    def first_order(self, activation: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        """Return (value - activation) · gradient, summed over the width; by key for a pattern."""
        # In float64: the terms have both signs, and their sum may be far smaller than they are.
        product = (value - activation).double() * gradient.double()
        return product if self.has_keys else product.sum(-1)

    def lacks(self, model: Model, layer: int, edited: bool = False) -> str | None:
        """Why a layer has none of it, or, where it is `edited`, none that can be; None where it has."""
        # Found by experiment at load (`bridge_check`), as no config says it.
        place = self.name, layer
        return model.misfits.get(place) or (model.read_only.get(place) if edited else None)

    def among(self, layers: Iterable[int], model: Model, edited: bool = False) -> tuple[int, ...]:
        """Return those of some layers that have it, or in which it can be `edited`; a warning names the others.

        Raises:
            InputError: none of them does.
        """
        layers = tuple(layers)
        lacking = {layer: reason for layer in layers if (reason := self.lacks(model, layer, edited))}
        if lacking and len(lacking) == len(layers):
            raise InputError(lacking[layers[0]])
        if lacking:
            several = f"s {', '.join(map(str, lacking))} are" if len(lacking) > 1 else f" {min(lacking)} is"
            warnings.warn(f"Layer{several} left out: {lacking[min(lacking)]}", stacklevel=3)
        return tuple(layer for layer in layers if layer not in lacking)

    def fitted(self, model: Model) -> Site:
        """Return it as a site of a model.

        Raises:
            InputError: no layer of the model has it as its shape says.
        """
        if reason := self.absent(model.shape):
            raise InputError(f"{self.name} was asked for, but {reason}")
        lacking = [self.lacks(model, layer) for layer in self.layers(model.shape)]
        if all(lacking):
            raise InputError(str(lacking[0]))
        return self

    @property
    def described(self) -> Any:
        """What the record of a run says of it."""
        return self.name

    def n_heads(self, shape: ModelShape) -> int:
        """How many heads the site has: key-value heads for `k` and `v`."""
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
"""The axes that a site can have, and how long they are."""


class Sites(Registry[str, Site]):
    """The sites by name; a hook of TransformerLens is answered with the site that it belongs to."""

    def unknown(self, name: object) -> str:
        """Return the sentence that says that there is no such site, with the one whose hook was requested."""
        parts = re.fullmatch(r"(?:blocks\.(\d+)\.)?(?:\w+\.)?(hook_\w+)", name) if isinstance(name, str) else None
        site = next((row for row in self.values() if parts and row.hook.endswith(f".{parts[2]}")), None)
        if parts is None or site is None:
            return super().unknown(name)
        layer = f", with layers=[{parts[1]}]" if parts[1] else ""
        return f"There is no {self.kind} {shown(name)}: the site of this hook is {site.name!r}{layer}."


SiteName: TypeAlias = Literal[
    "resid_pre", "q", "k", "v", "pattern", "z", "attn_out", "resid_mid", "mlp_post", "mlp_out", "resid_post"
]
"""The sites that come with headwater, for editors and type checkers; for one of your own give the `Site` itself."""
SITES = Sites("site")
"""By name, in the order in which a block computes them."""


@checked_call
def register_site(site: Site) -> Site:
    """Add a site, under its name. Models that are loaded from then on are seen to have it as its axes say.

    Raises:
        InputError: the name is taken, an axis is none of `AXES`, or the hook leaves no layer open.
    """
    if unknown := [axis for axis in site.axes if axis not in AXES]:
        raise InputError(f"The site {site.name} has an axis {unknown[0]!r}.{did_you_mean(unknown[0], AXES)}")
    if site.axes[:1] != ("position",) and site.axes != ("head", "position", "key"):
        raise InputError(
            f"The axes of the site {site.name} are {', '.join(site.axes)}; they must begin with position, or be those "
            "of a pattern: head, position, key."
        )
    if "{layer}" not in site.hook:
        raise InputError(f"The hook {site.hook!r} of the site {site.name} must leave its layer open, as {{layer}}.")
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
    Site("q", "blocks.{layer}.attn.hook_q", _HEAD, Stage.ATTENTION, within="attention"),
    Site("k", "blocks.{layer}.attn.hook_k", _KV_HEAD, Stage.ATTENTION, within="attention"),
    Site("v", "blocks.{layer}.attn.hook_v", _KV_HEAD, Stage.ATTENTION, within="attention"),
    Site("pattern", "blocks.{layer}.attn.hook_pattern", ("head", "position", "key"), Stage.PATTERN, "attention"),
    Site("z", "blocks.{layer}.attn.hook_z", _HEAD, Stage.HEAD_OUTPUT, within="attention"),
    Site("attn_out", "blocks.{layer}.hook_attn_out", _TOKEN, Stage.ATTENTION_OUTPUT),
    Site("resid_mid", "blocks.{layer}.hook_resid_mid", _TOKEN, Stage.BETWEEN, carrier=_MIDDLE, absent=_nothing_between),
    Site(
        "mlp_post", "blocks.{layer}.mlp.hook_post", ("position", "d_mlp"), Stage.NEURONS, within="mlp", absent=_no_mlp
    ),
    Site("mlp_out", "blocks.{layer}.hook_mlp_out", _TOKEN, Stage.MLP_OUTPUT, absent=_no_mlp),
    Site("resid_post", "blocks.{layer}.hook_resid_post", _TOKEN, Stage.BLOCK_OUTPUT),
):
    register_site(_site)
HOOKS = {
    "embed": "hook_embed",
    "attn_in": "blocks.{layer}.attn.hook_in",
    "attn_scores": "blocks.{layer}.attn.hook_attn_scores",
    "attn_written": "blocks.{layer}.attn.o.hook_out",
    "mlp_in": "blocks.{layer}.mlp.hook_in",
}
"""Hooks of TransformerLens that are used here and are not sites: what goes into the model and its parts, scores before
the softmax, and what attention writes before a norm after it."""
STATES = tuple(site.name for site in SITES.values() if site.axes == _TOKEN)
"""The sites that have the residual stream's width: resid_pre, attn_out and so on. A metric may read them in place of
logits."""


def hook_name(name: str, layer: int = 0) -> str:
    """Return the hook name at one layer of a site, or of what `HOOKS` lists."""
    return (HOOKS[name] if name in HOOKS else SITES[name].hook).format(layer=layer)


def kv_site_of(sites: Iterable[Site]) -> str | None:
    """Return the first of some sites that counts key-value heads; None where all count query heads."""
    return next((site.name for site in sites if "kv_head" in site.axes), None)


def main_site(stage: Stage) -> Site:
    """Return the site that is the very tensor which passes through a block at a stage: the first row of that stage."""
    return next(site for site in SITES.values() if site.stage == stage)


def taken_as_recorded(stage: Stage, parallel: bool) -> tuple[Stage, ...]:
    """Say what a block has computed when a stage's first edit acts: the outcome of attention, of the MLP, or neither.

    In a parallel block attention and MLP both read its input, so that no edit of the one reaches the other.
    """
    if stage <= Stage.PATTERN:
        return ()
    attention = Stage.HEAD_OUTPUT if stage == Stage.HEAD_OUTPUT else Stage.ATTENTION_OUTPUT
    skips_mlp = stage != Stage.NEURONS if parallel else stage >= Stage.MLP_OUTPUT
    return (attention, Stage.MLP_OUTPUT) if skips_mlp else (attention,)


def place_named(hook: str) -> tuple[Site, int] | None:
    """Return the site and layer of a hook name; None where it does not belong to a site."""
    if (parts := re.fullmatch(r"blocks\.(\d{1,9})\.(.+)", hook)) is None:
        return None
    open_hook = f"blocks.{{layer}}.{parts[2]}"
    site = next((site for site in SITES.values() if site.hook == open_hook), None)
    return None if site is None else (site, int(parts[1]))


def sites_called(names: str | Site | Iterable[str | Site]) -> tuple[Site, ...]:
    """Look sites up by name, whatever the model; a site, such as features of a dictionary, is taken as it is."""
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
