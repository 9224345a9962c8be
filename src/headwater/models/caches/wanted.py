"""What a cache is asked to hold: which activations, of which layers and heads, of which tokens of which texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, did_you_mean
from headwater.models.caches.activations import (
    Activation,
    activations_named,
    features_among,
    has_query_heads,
    layers_needed,
    refuse_misread_heads,
)
from headwater.models.caches.sequences import Chosen, Sequences, chosen_tokens, seen_tokens, sequences_of
from headwater.models.dictionaries.features import Features
from headwater.models.part_names import Heads, layers_and_heads
from headwater.models.positions import Where
from headwater.models.sites import SITES
from headwater.models.tokens import Inputs
from headwater.options import checked_flag, one_or_several, resolve_indices, shown

if TYPE_CHECKING:
    from headwater.models.model import Model


@dataclass(frozen=True)
class Wanted:
    """What is kept of a collection: which activations, which heads, which tokens.

    Attributes:
        activations: which.
        heads: the query heads kept of those that have some.
        picked: by the name of those of which not all heads are kept, the axis of heads; the first is tokens, or texts.
        sequences: the texts.
        chosen: which tokens.
        stop_at: how many blocks must run; None for the whole model.
        readers: by the name of what is read from an activation, what reads rows of it.
    """

    activations: tuple[Activation, ...]
    heads: tuple[int, ...]
    picked: dict[str, int]
    sequences: Sequences
    chosen: Chosen
    stop_at: int | None
    readers: dict[str, Callable[[Tensor], Tensor]]

    @property
    def counts(self) -> Int[Tensor, " example"]:
        """How many tokens are kept of each text."""
        return self.chosen.counts

    def numbers(self, activation: Activation) -> Int[Tensor, " example"]:
        """Return how many numbers are kept of each text in one layer."""
        keys = self.sequences.lengths if activation.has_keys else 1
        return self.counts * keys * int(np.prod(activation.size))

    def nbytes(self) -> Int[Tensor, " example"]:
        """Return how many bytes each text takes."""
        each = [self.numbers(one) * len(one.places) * one.torch_dtype().itemsize for one in self.activations]
        return torch.stack(each).sum(0)

    def room(self, examples: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """Make the tensors of some texts, still to be filled."""
        which = torch.tensor(examples)
        room = {"examples": which}
        for one in self.activations:
            shape = [int(self.counts[which].sum()), *one.size]
            shape = [int(self.numbers(one)[which].sum())] if one.has_keys else shape
            room[one.name] = torch.zeros(len(one.places), *shape, dtype=one.torch_dtype(), device=device)
        return room


def names_asked(sites: object, residual: Any, attention: object, model: Model) -> list[Any]:
    """Return the names of what is kept, whichever way it was asked for."""
    if sites is not None:
        if residual is not None or attention is not None:
            raise InputError("sites= says all that is kept: leave residual= and attention= away.")
        return one_or_several(sites)
    attention = True if attention is None else checked_flag("attention", attention)
    site = _residual_site(True if residual is None else residual, model)
    if site is None and not attention:
        raise InputError("There is nothing to keep: residual and attention are both False.")
    return ([site] if site else []) + (["pattern"] if attention else [])


def _residual_site(residual: bool | str, model: Model) -> str | None:
    """The site to keep: one that has a vector per token."""
    if isinstance(residual, bool):
        return "resid_post" if residual else None
    kept = [name for name, site in SITES.items() if len(site.axes) == 2 and site.axes[0] == "position"]
    if not isinstance(residual, str) or residual not in kept:
        raise InputError(f"There is no residual site {shown(residual)}.{did_you_mean(residual, kept)}")
    if reason := SITES[residual].absent(model.shape):
        raise InputError(f"There is no {residual} to keep: {reason}")
    return residual


def wanted_of(
    model: Model,
    inputs: Inputs,
    names: list[Any],
    layers: Sequence[int] | None,
    positions: Where | Sequence[int] | None,
    heads: Heads,
) -> Wanted:
    """Check what was asked for, and say what it comes to."""
    shape = model.shape
    of_layers, numbers = layers_and_heads(layers, heads, shape)
    chosen_layers = resolve_indices(of_layers, shape.n_layers, "layer")
    chosen_heads = resolve_indices(numbers, shape.n_heads, "head")
    sequences = sequences_of(inputs, model)
    activations = activations_named(names, chosen_layers, model)
    refuse_misread_heads(activations, heads, model)
    dictionaries = [one.fitted(model) for one in features_among(names)]
    chosen = seen_tokens(chosen_tokens(positions, sequences, model), sequences, dictionaries)
    readers = {one.name: _reader(one) for one in dictionaries}
    picked = {} if chosen_heads == tuple(range(shape.n_heads)) else _head_axes(activations, model)
    of_heads = tuple(_of_heads(one, picked.get(one.name), len(chosen_heads)) for one in activations)
    return Wanted(of_heads, chosen_heads, picked, sequences, chosen, layers_needed(activations, model), readers)


def _reader(features: Features) -> Callable[[Tensor], Tensor]:
    """Return what gives, of rows of activations, the features that are kept."""
    units = None if features.chosen is None else list(features.chosen)
    return lambda rows: features.read(rows) if units is None else features.read(rows)[..., units]


def _head_axes(activations: Sequence[Activation], model: Model) -> dict[str, int]:
    """Return the axis of query heads of each activation that has one; 0 is the axis of tokens, or of texts."""
    found = {one.name: [axis for axis in one.axes if axis not in ("position", "key")] for one in activations}
    with_heads = [one.name for one in activations if has_query_heads(one, model)]
    return {name: 1 + next(n for n, axis in enumerate(found[name]) if "head" in axis.split("_")) for name in with_heads}


def _of_heads(activation: Activation, axis: int | None, n_heads: int) -> Activation:
    """Return an activation with as many heads as are kept."""
    if axis is None:
        return activation
    size = activation.size
    return dataclasses.replace(activation, size=(*size[: axis - 1], n_heads, *size[axis:]))
