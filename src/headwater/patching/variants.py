"""One cell of a sweep as a change to one example's run: which edits, where they start, what is read afterwards.

An edit acts on a range of layers. `Replace` writes an activation taken from elsewhere; `Cut` severs attention edges.
Both ways of running a sweep, whole runs and the wavefront, take the same variants and write with the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool
from torch import Tensor

from headwater.models.sites import Site, Stage

LOGITS = "logits"
NEVER = 1 << 40
"""A position that no prompt has."""


@dataclass(frozen=True)
class Replace:
    """Write other values at a site."""

    site: Site
    layers: range
    positions: tuple[int, ...] | None = None
    """Token positions (query positions of a pattern); None is all of them."""
    heads: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    """Key positions of a pattern; None is all of them."""
    units: tuple[int, ...] | None = None
    """Of the last axis, such as neurons; None is all of it."""
    since: int = 0
    """Before this position the values are those of the run itself, so that writing them changes nothing."""

    @property
    def stage(self) -> Stage | None:
        """How far into the block the edit acts; None where the site does not say."""
        return self.site.stage

    @property
    def first_position(self) -> int:
        """The first position whose state can change; beyond any prompt if none can."""
        first = self.since if self.keys is None else max(self.since, min(self.keys))
        return first if self.positions is None else min((p for p in self.positions if p >= first), default=NEVER)


@dataclass(frozen=True, eq=False)
class Cut:
    """Sever attention edges, before the softmax (`zero=False`: the other weights grow) or after it."""

    layers: range
    edges: Bool[Tensor, "query key"]
    """True where query must not read key."""
    heads: tuple[int, ...] | None = None
    zero: bool = False

    stage = Stage.ATTENTION

    @property
    def first_position(self) -> int:
        """The first position whose state can change: the first query that loses a key."""
        return int(self.edges.any(-1).int().argmax())


Edit = Replace | Cut
Place: TypeAlias = tuple[str, int]
"""A site and a layer."""
Reading: TypeAlias = Place
"""Where a metric reads; `("logits", n_layers)` for the logits."""
Deliver: TypeAlias = Callable[[Reading, list[int], Tensor], None]
"""Takes a reading, the variants read and their values, `variant kept width`."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One example with some edits."""

    example: int
    """Which example of the group."""
    edits: tuple[Edit, ...]
    kept: tuple[int, ...]
    """The positions that metrics read, ascending."""
    readings: tuple[Reading, ...]
    trunk: int | None = None
    """Another variant of the group that has these edits and, in later layers, more of them."""
    start: tuple[int, int] | None = None
    """Overrides the layer and position from which the run is recomputed."""

    @property
    def first_layer(self) -> int:
        """The layer of the first edit."""
        return self.start[0] if self.start else min(edit.layers.start for edit in self.edits)

    @property
    def stage(self) -> Stage:
        """How far into its first layer the first edit acts."""
        if self.start:
            return Stage.BLOCK_INPUT
        stages = {edit.stage for edit in self.edits if edit.layers.start == self.first_layer and edit.stage is not None}
        first = min(stages)
        if Stage.NEURONS in stages and first < Stage.NEURONS:  # within both parts of the block: both are computed
            return min(first, Stage.PATTERN)
        return first

    @property
    def stop_layer(self) -> int:
        """The layer after the last edit."""
        return max((edit.layers.stop for edit in self.edits), default=0)

    @property
    def first_position(self) -> int:
        """Where the recomputed stretch begins: at the first change, or at the first position read if earlier."""
        changed = self.start[1] if self.start else min(edit.first_position for edit in self.edits)
        return min(changed, self.kept[0])

    @property
    def is_felt(self) -> bool:
        """Whether a position that is read can see any edit."""
        changed = self.start[1] if self.start else min(edit.first_position for edit in self.edits)
        return changed <= self.kept[-1]

    def replacing(self, site: Site | str, layer: int) -> list[Replace]:
        """Return the edits that write at a site of a layer."""
        name = site if isinstance(site, str) else site.name
        return [e for e in self.edits if isinstance(e, Replace) and e.site.name == name and layer in e.layers]

    def cutting(self, layer: int, zero: bool) -> list[Cut]:
        """Return the edits that sever edges of a layer, before the softmax or after it."""
        return [e for e in self.edits if isinstance(e, Cut) and e.zero == zero and layer in e.layers]


@dataclass(frozen=True)
class Values:
    """The activations that `Replace` writes: by site and layer, one row per example of the group."""

    by_site: Mapping[tuple[str, int], Tensor]

    def of(self, site: Site, layer: int, example: int) -> Tensor:
        """Return one example's values over all of its positions."""
        return self.by_site[site.name, layer][example]


def write_tokens(held: Tensor, edit: Replace, value: Tensor, start: int) -> None:
    """Write an edit into the activations `held` of the positions from `start` on, `position (head) width`."""
    length = held.shape[0]
    edited = range(start, start + length) if edit.positions is None else edit.positions
    source = torch.tensor([p for p in edited if start <= p < start + length], dtype=torch.long, device=held.device)
    if edit.site.has_units:
        units = slice(None) if edit.units is None else torch.tensor(edit.units, device=held.device)

        def change(features: Tensor) -> Tensor:
            features[:, units] = value[source][:, units].to(features)
            return features

        held[source - start] = edit.site.written(held[source - start], change)
        return
    if edit.units is not None:
        units = torch.tensor(edit.units, device=held.device)
        held[(source - start)[:, None], units] = value[source[:, None], units]
    elif edit.heads is None:
        held[source - start] = value[source]
    else:
        for head in edit.heads:
            held[source - start, head] = value[source, head]


def write_pattern(held: Tensor, edit: Replace, value: Tensor, start: int, columns: Tensor) -> None:
    """Write an edit into the patterns `held` (`head position key`), whose key axis holds the positions `columns`.

    `columns` is -1 where a key belongs to no position of this row.
    """
    length = held.shape[1]
    edited = range(start, start + length) if edit.positions is None else edit.positions
    rows = torch.tensor([q for q in edited if start <= q < start + length], dtype=torch.long, device=held.device)
    heads = range(held.shape[0]) if edit.heads is None else edit.heads
    if edit.keys is not None:
        written = torch.isin(columns, torch.tensor(edit.keys, device=columns.device))
        for head in heads:
            held[head, (rows - start)[:, None], written.nonzero()[:, 0]] = value[head][rows][:, columns[written]]
        return
    known = columns >= 0
    for head in heads:
        held[head, rows - start] = torch.where(known, value[head][rows][:, columns.clamp_min(0)], 0.0)
