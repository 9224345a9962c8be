"""The cells of a sweep as changes to examples' runs: which edits, where they start, what is read afterwards.

An edit acts on a range of layers. `Replace` writes an activation taken from elsewhere; `Cut` severs attention edges.
Both ways of running a sweep, whole runs and the wavefront, take the same variants and write them by
`headwater.patching.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from jaxtyping import Bool, Int
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
    source_layer: int | None = None
    """The layer whose values are written; None is the layer itself."""
    sample: int = 0
    """Which draw, of values that are drawn several times."""

    def read_at(self, layer: int) -> int:
        """Return the layer whose values are written at a layer."""
        return layer if self.source_layer is None else self.source_layer

    @property
    def stage(self) -> Stage | None:
        """How far into the block the edit acts; None where the site does not say."""
        return self.site.stage

    @cached_property
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
    first_position: int = 0
    """The first position whose state can change: the first query that loses a key, or one before it."""

    stage = Stage.ATTENTION


Edit = Replace | Cut
Indices: TypeAlias = Int[np.ndarray, "_"]
Place: TypeAlias = tuple[str, int]
"""A site and a layer."""
Reading: TypeAlias = Place
"""Where a metric reads; `("logits", n_layers)` for the logits."""
Deliver: TypeAlias = Callable[[Reading, Indices, Tensor], None]
"""Takes a reading, the variants read and their values, `variant kept width`."""


@dataclass(frozen=True, eq=False)
class Variant:
    """Some edits of a run, of as many examples as have them."""

    edits: tuple[Edit, ...]
    kept: tuple[int, ...]
    """The positions that metrics read, ascending."""
    readings: tuple[Reading, ...]
    start: tuple[int, int] | None = None
    """Overrides the layer and position from which the run is recomputed."""
    whole: int | None = None
    """Where attention looks ahead, the length of the prompt: an edit anywhere reaches all of it."""

    @cached_property
    def first_layer(self) -> int:
        """The layer of the first edit."""
        return self.start[0] if self.start else min(edit.layers.start for edit in self.edits)

    @cached_property
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

    @cached_property
    def first_position(self) -> int:
        """Where the recomputed stretch begins: at the first change, or at the first position read if earlier."""
        if self.whole is not None:
            return 0
        changed = self.start[1] if self.start else min(edit.first_position for edit in self.edits)
        return min(changed, self.kept[0])

    @property
    def stop_position(self) -> int:
        """Where the recomputed stretch ends: after the last position that is read, or that one of these reads."""
        return self.kept[-1] + 1 if self.whole is None else self.whole

    @cached_property
    def is_felt(self) -> bool:
        """Whether a position that is read can see any edit."""
        if self.whole is not None:
            return True
        changed = self.start[1] if self.start else min(edit.first_position for edit in self.edits)
        return changed <= self.kept[-1]

    def replacing(self, site: Site | str, layer: int) -> list[Replace]:
        """Return the edits that write at a site of a layer."""
        name = site if isinstance(site, str) else site.name
        return [e for e in self.edits if isinstance(e, Replace) and e.site.name == name and layer in e.layers]

    def cutting(self, layer: int, zero: bool) -> list[Cut]:
        """Return the edits that sever edges of a layer, before the softmax or after it."""
        return [e for e in self.edits if isinstance(e, Cut) and e.zero == zero and layer in e.layers]


@dataclass(frozen=True, eq=False)
class Variants:
    """The runs of a wave: an example each, and one of a few changes."""

    changes: tuple[Variant, ...]
    which: Indices
    """By run: which of the changes."""
    example: Indices
    """By run: which example of the group."""
    trunk: Indices
    """By run: another that has these edits and, in later layers, more of them; -1 where it follows none."""
    idle: Bool[np.ndarray, " _"] | None = None
    """By run: whether it is known to be as if nothing were edited."""

    @classmethod
    def one(cls, change: Variant, example: int) -> Variants:
        """Return a single run."""
        return cls((change,), np.array([0]), np.array([example]), np.array([-1]))

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> Variant:
        return self.changes[self.which[index]]

    @property
    def felt(self) -> Bool[np.ndarray, " _"]:
        """By run: whether what is read can be another than without its edits."""
        felt = self.each(lambda change: change.is_felt).astype(bool)
        return felt if self.idle is None else felt & ~self.idle

    def each(self, number: Callable[[Variant], int]) -> Indices:
        """Return a number of each run's change, by run."""
        return np.array([number(change) for change in self.changes], dtype=np.int64)[self.which]


def padded_kept(changes: Sequence[Variant]) -> tuple[Int[np.ndarray, "_ kept"], Bool[np.ndarray, "_ kept"]]:
    """Return the positions that are read of each change, the last one again where others read more; and which count."""
    most = max((len(change.kept) for change in changes), default=0)
    positions = np.array([(*change.kept, *change.kept[-1:] * (most - len(change.kept))) for change in changes])
    counts = np.array([len(change.kept) for change in changes])
    return positions, np.arange(most) < counts[:, None]
