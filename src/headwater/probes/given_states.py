"""The states that a probe is fitted on, whatever they were given as: `row feature` by layer.

A cache, an array `row feature` (one layer, called 0), an array `layer row feature`, or a mapping of layers to arrays.
A row of a cache is a real token of a prompt, in the order of prompts and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor

from headwater.errors import InputError
from headwater.options import checked_name, shown, whole_numbers
from headwater.runs.identity import digest

WANTED = "Give what model.cache gives, an array `row feature` or `layer row feature`, or a mapping of layers to arrays."

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class GivenStates:
    """States by layer; in the record of a run they represent a model, that of the cache where they are of one."""

    states: Mapping[int, Callable[[], Float[ndarray, "row feature"]]]
    site: str
    source: str
    """A hash of the states."""
    groups: tuple[Any, ...]
    """What the rows belong to where nothing else is said: the prompts of a cache, else each row to itself."""
    name: str = "given states"
    fingerprint: str = "none"
    revision: str | None = None
    tokenizer_digest: str = "none"
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, in order."""
        return tuple(self.states)

    @property
    def rows(self) -> int:
        """How many rows each layer has."""
        return len(self.groups)

    @property
    def interventions(self) -> Mapping[str, object]:
        """What the states are."""
        return {"states": self.source}

    def of_layer(self, layer: int) -> Float[ndarray, "row feature"]:
        """Return the states of a layer in float64."""
        array = self.states[layer]()
        if len(array) != self.rows or not array.size:
            raise InputError(f"Layer {layer} has states of shape {array.shape}; there are {self.rows} rows.")
        if not np.isfinite(array).all():
            raise InputError(f"The states of layer {layer} hold NaN or infinite values.")
        return array


def given_states(given: object, site: str | None, layers: Sequence[int] | int | None) -> GivenStates:
    """Read states and choose layers of them."""
    if hasattr(given, "to_numpy") and hasattr(given, "frame"):
        return _of_cache(given, site, layers)
    if site is not None and not isinstance(site, str):
        raise InputError(f"site={shown(site)} is not the name of a site.")
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, Tensor | ndarray) and given.ndim in (2, 3):
        found = dict(enumerate(given if given.ndim == 3 else given[None]))
    else:
        what = f"an array of {given.ndim} axes" if isinstance(given, Tensor | ndarray) else f"a {type(given).__name__}"
        raise InputError(f"The states to probe are {what}. {WANTED}")
    states = {layer: partial(_array, found[layer]) for layer in _chosen(layers, list(found))}
    whole = {layer: read() for layer, read in states.items()}
    source = digest([[layer, torch.from_numpy(array)] for layer, array in whole.items()])
    found_states = GivenStates(states, site or "given", source, tuple(range(len(next(iter(whole.values()))))))
    for layer in whole:
        found_states.of_layer(layer)
    return found_states


def _of_cache(cache: Any, site: str | None, layers: Sequence[int] | int | None) -> GivenStates:
    """Read the token rows of a site of a cache."""
    kept: dict[str, list[int]] = {}
    for key in cache.keys():  # noqa: SIM118  (a cache is not a dictionary)
        if isinstance(key, tuple):
            kept.setdefault(key[0], []).append(key[1])
    if site is None and len(kept) > 1:
        raise InputError(f"This cache holds {', '.join(kept)}: name one as site=.")
    chosen = next(iter(kept), "") if site is None else checked_name("site", site, tuple(kept))
    if not kept:
        raise InputError("This cache holds nothing by layer that could be probed.")
    # Read when a layer is fitted: a cache in files may be larger than memory.
    states = {layer: partial(_of_site, cache, chosen, layer) for layer in _chosen(layers, kept[chosen])}
    run = cache.run
    return GivenStates(
        states, chosen, str(cache.digest()), tuple(cache.frame["example"].tolist()), name=run.model,
        fingerprint=run.fingerprint, revision=run.revision, tokenizer_digest=run.tokenizer or "none",
    )  # fmt: skip


def _of_site(cache: Any, site: str, layer: int) -> Float[ndarray, "row feature"]:
    # flatten(1): a site with heads has them side by side.
    return np.asarray(cache.rows(site, layer).flatten(1).double().cpu().numpy())


def _chosen(layers: Sequence[int] | int | None, found: Sequence[object]) -> list[int]:
    try:
        known = [number for one in found for number in whole_numbers(one)]
        wanted = known if layers is None else whole_numbers(layers)
    except TypeError:
        raise InputError(f"layers={shown(layers)} of states of {shown(found)[:80]} are not layers. {WANTED}") from None
    missing = [layer for layer in wanted if layer not in known]
    if missing or not wanted or len(set(wanted)) < len(wanted) or known != list(found):
        raise InputError(f"layers={shown(layers)}: the states have layers {', '.join(map(str, known)) or 'none'}.")
    return wanted


def _array(part: object) -> Float[ndarray, "row feature"]:
    try:
        array = part.detach().double().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
    except ValueError:  # rows of unequal lengths
        array = np.zeros(0)
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        raise InputError(f"The states of a layer are of shape {array.shape} and type {array.dtype}. {WANTED}")
    return array.astype(np.float64)
