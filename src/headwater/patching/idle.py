"""Which runs of a wave write what stands there already: they are the unedited runs, and need not be made.

Two prompts that differ in one token enter the first layer with the same vectors everywhere else, so that most cells of
its input change nothing. Whether written and recorded values are the same is looked at, number by number, not inferred
from the tokens. What is not known beforehand counts as a change: values made of what stands there, patterns, features
of a dictionary, severed edges, and runs that share a trunk.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.models.sites import Site
from headwater.patching.rows import Values
from headwater.patching.variants import Place, Replace, Variant, Variants


def same_values(
    values: Values, sites: Mapping[str, Site], recorded: Mapping[str, Tensor], n_examples: int
) -> dict[Place, Bool[np.ndarray, "example position *head"]]:
    """Say by place where what is written is what stands there, wherever something is the same; fetched in one go.

    Args:
        values: what edits write.
        sites: those where they write, by name.
        recorded: the activations of the unedited runs, by hook name, those of the edited prompts first.
        n_examples: how many of these there are.
    """
    if values.change is not None or values.samples != 1:
        return {}
    equal: dict[Place, Tensor] = {}
    for (name, layer), written in values.by_site.items():
        site = sites[name]
        standing = recorded.get(site.hook_name(layer))
        if standing is not None and not (site.has_keys or site.has_units):
            standing = site.read(standing[:n_examples])
            if standing.shape == written.shape:
                equal[name, layer] = (standing == written).all(-1)
    if not equal:
        return {}
    fetched = torch.cat([one.flatten() for one in equal.values()]).cpu().split([one.numel() for one in equal.values()])
    found = {place: one.view(equal[place].shape).numpy() for place, one in zip(equal, fetched, strict=True)}
    return {place: same for place, same in found.items() if same.any()}


def idle(
    variants: Variants, same: Mapping[Place, Bool[np.ndarray, "example position *head"]]
) -> Bool[np.ndarray, " _"]:
    """Say which runs are as if nothing were edited, given where that is so by place."""
    found = np.zeros(len(variants), dtype=bool)
    order = np.argsort(variants.which, kind="stable")
    ends = np.searchsorted(variants.which[order], np.arange(len(variants.changes)), side="right")
    for runs, change in zip(np.split(order, ends[:-1]), variants.changes, strict=True):
        if same and _may_be_idle(change, same):
            parts = [
                _at(same[edit.site.name, layer], edit)[variants.example[runs]].reshape(len(runs), -1)
                for edit in change.edits
                if isinstance(edit, Replace)
                for layer in edit.layers
            ]
            found[runs] = np.concatenate(parts, 1).all(1)
    follows = variants.trunk >= 0
    found[follows] = False
    found[variants.trunk[follows]] = False
    return found


def _may_be_idle(change: Variant, same: Mapping[Place, object]) -> bool:
    """Whether every edit writes the values of its own layers, at places where some are the same."""
    return bool(change.edits) and all(
        isinstance(edit, Replace)
        and edit.units is None
        and all((edit.site.name, layer) in same and edit.read_at(layer) == layer for layer in edit.layers)
        for edit in change.edits
    )


def _at(same: Bool[np.ndarray, "example position *head"], edit: Replace) -> Bool[np.ndarray, "example _ *_"]:
    """Take the positions and heads that an edit writes."""
    same = same if edit.positions is None else same[:, list(edit.positions)]
    return same if edit.heads is None else same[:, :, list(edit.heads)]
