"""Where an intervention acts: the named activations of a block, in the order in which the block computes them.

    serial     resid_pre -> q k v -> pattern -> z -> attn_out -> resid_mid -> mlp_out -> resid_post
    parallel   resid_pre -> q k v -> pattern -> z -> attn_out              -> mlp_out -> resid_post

`q`, `k`, `v` are taken before rotation, as TransformerLens names them; with grouped heads `k` and `v` count key-value
heads. `attn_out` and `mlp_out` are what is added to the residual stream, after a post-norm where there is one.

An edit at a place reaches everything that the model computes from it. Where TransformerLens's hook of that name would
not do that, the site has a carrier: the edit is made by way of another activation. On a bridge the hook of `resid_mid`
sits at the MLP's norm, and what it returns misses the skip connection around the MLP, so the edit goes into what
attention adds.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.options import one_or_several, shown

if TYPE_CHECKING:
    from headwater.models.model import Model
    from headwater.models.shape import ModelShape


class Stage(enum.IntEnum):
    """How far into its block an edit acts; what comes before is as it was."""

    BLOCK_INPUT = 0
    ATTENTION = 1
    HEAD_OUTPUT = 2
    BETWEEN = 3
    BLOCK_OUTPUT = 4


@dataclass(frozen=True)
class Carrier:
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
    """The axes of one example's activation, apart from the last where that is the width."""
    stage: Stage
    carrier: Carrier | None = None

    @property
    def swept_axes(self) -> tuple[str, ...]:
        """The axes that a sweep can run over."""
        return "layer", *(axis for axis in ("position", "head", "key") if axis in self.axes)

    @property
    def has_heads(self) -> bool:
        """Whether the activation is one per head."""
        return "head" in self.axes

    @property
    def head_column(self) -> str:
        """The column of a table that numbers its heads: key-value heads have one of their own."""
        return "kv_head" if self.name in ("k", "v") else "head"

    def hook_name(self, layer: int) -> str:
        """Return the hook name at one layer."""
        return self.hook.format(layer=layer)

    def size(self, shape: ModelShape, length: int) -> tuple[int, ...]:
        """Return the size of one example's activation, for a prompt of this length."""
        sizes = {"position": length, "key": length, "head": self.n_heads(shape)}
        width = () if "key" in self.axes else (shape.d_head if self.has_heads else shape.d_model,)
        return *(sizes[axis] for axis in self.axes), *width

    def width(self, shape: ModelShape, length: int) -> int:
        """How many numbers the activation holds per token of a prompt of this length."""
        if "key" in self.axes:
            return shape.n_heads * length
        return self.n_heads(shape) * shape.d_head if self.has_heads else shape.d_model

    def n_heads(self, shape: ModelShape) -> int:
        """How many heads the site has: key-value heads for `k` and `v`."""
        return shape.n_kv_heads if self.name in ("k", "v") else shape.n_heads


_TOKEN, _HEAD = ("position",), ("position", "head")
_MIDDLE = Carrier("attn_out", "resid_pre", lambda added, before: before + added, lambda middle, before: middle - before)
SITES = {
    site.name: site
    for site in (
        Site("resid_pre", "blocks.{layer}.hook_resid_pre", _TOKEN, Stage.BLOCK_INPUT),
        Site("q", "blocks.{layer}.attn.hook_q", _HEAD, Stage.ATTENTION),
        Site("k", "blocks.{layer}.attn.hook_k", _HEAD, Stage.ATTENTION),
        Site("v", "blocks.{layer}.attn.hook_v", _HEAD, Stage.ATTENTION),
        Site("pattern", "blocks.{layer}.attn.hook_pattern", ("head", "position", "key"), Stage.ATTENTION),
        Site("z", "blocks.{layer}.attn.hook_z", _HEAD, Stage.HEAD_OUTPUT),
        Site("attn_out", "blocks.{layer}.hook_attn_out", _TOKEN, Stage.BETWEEN),
        Site("resid_mid", "blocks.{layer}.hook_resid_mid", _TOKEN, Stage.BETWEEN, _MIDDLE),
        Site("mlp_out", "blocks.{layer}.hook_mlp_out", _TOKEN, Stage.BLOCK_OUTPUT),
        Site("resid_post", "blocks.{layer}.hook_resid_post", _TOKEN, Stage.BLOCK_OUTPUT),
    )
}
SCORES_HOOK = "blocks.{layer}.attn.hook_attn_scores"
STATES = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
"""The sites that a metric may read in place of logits."""


def place_named(hook: str) -> tuple[Site, int] | None:
    """Return the site and layer of a hook name; None where it is no site's."""
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)
    site = _BY_HOOK.get(f"blocks.{{layer}}.{found[2]}") if found else None
    return (site, int(found[1])) if found and site else None


_BY_HOOK = {site.hook: site for site in SITES.values()}


def sites_called(names: str | Iterable[str]) -> tuple[Site, ...]:
    """Look sites up by name, whatever the model.

    Raises:
        InputError: there is no such site.
    """
    asked = one_or_several(names)
    if not asked:
        raise InputError(f"No site was asked for. Valid: {', '.join(SITES)}.")
    for name in asked:
        if not isinstance(name, str) or name not in SITES:
            raise InputError(f"There is no site {shown(name)}.{did_you_mean(str(name), SITES)}")
    return tuple(SITES[name] for name in dict.fromkeys(asked))


def sites_named(names: str | Iterable[str], model: Model) -> tuple[Site, ...]:
    """Look up the sites of a model by name.

    Raises:
        InputError: no such site, or the model has none of it, or one that is not what its shape says.
    """
    sites = sites_called(names)
    for name in (site.name for site in sites):
        if name == "resid_mid" and model.shape.parallel_blocks:
            raise InputError(
                f"resid_mid was asked for, but {model.shape.architecture} runs attention and MLP in parallel: nothing "
                "lies between them. Use resid_pre, resid_post, attn_out or mlp_out."
            )
        if reason := model.misfits.get(name):
            raise InputError(reason)
    return sites
