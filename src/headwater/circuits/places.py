"""Where senders' outputs are exchanged: at all positions together, at each by itself, at some, or by role.

Roles are named as everywhere (`models.positions`): each prompt of a pair is resolved by itself. Pairs align token by
token here, since what a sender adds at a position is exchanged for what it adds at the same position of the other run;
a role must therefore be the same tokens of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headwater.circuits.both_runs import BothRuns, Place
from headwater.errors import InputError
from headwater.models.positions import Prompt, Where
from headwater.options import checked_name
from headwater.patching.prompts import AlignedSpan, aligned_positions, side_by_side, spans_by_role


@dataclass(frozen=True)
class Places:
    """Where senders are exchanged in each example.

    Args:
        by_example: by example and place, the positions that are exchanged together; None for all.
        roles: the names of the places, where they were named.
        apart: whether each place is the position of its number.
        chosen: whether the caller named positions.
    """

    by_example: tuple[tuple[tuple[int, ...] | None, ...], ...]
    roles: tuple[str, ...] = ()
    apart: bool = False
    chosen: bool = False

    def __len__(self) -> int:
        return max(map(len, self.by_example))

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions that are taken apart; none where they are not."""
        return tuple(range(len(self))) if self.apart else ()

    def of(self, runs: BothRuns) -> Iterator[tuple[int, Place]]:
        """Yield the places of an example that can be felt, each with its number."""
        for number, positions in enumerate(self.by_example[runs.example]):
            if (place := runs.place(positions)) is not None:
                yield number, place

    def missing(self, example: int) -> slice:
        """Return the places that an example does not have: its prompt is shorter than others."""
        return slice(len(self.by_example[example]), None)

    @property
    def options(self) -> dict[str, Any]:
        """What of it decides the result."""
        named = [[at for at in one if at is not None] for one in self.by_example]
        return {"positions": named, "roles": list(self.roles)} if self.chosen else {}


def places_of(
    over: str | None,
    where: Where | None,
    base: tuple[Prompt, ...],
    other: tuple[Prompt, ...] | None,
    stops: tuple[int, ...],
    base_side: int,
) -> Places:
    """Resolve `over=` and `positions=`.

    Args:
        over: None or `position`.
        where: what was given as positions, a mapping for roles.
        base: the prompts that are edited.
        other: the other prompt of each pair.
        stops: by example, the position after the last that is read.
        base_side: 0 where the clean prompts are edited, 1 where the corrupted are.

    Raises:
        InputError: an option is none, a name is not in a prompt, or it is other tokens of the other prompt.
    """
    if over is not None:
        checked_name("over", over, ("position",))
    others = other if other is not None else (None,) * len(base)
    n = len(base)
    if isinstance(where, Mapping):
        if over is not None:
            raise InputError("over='position' and positions by role were both given: give one of them.")
        spots = [spans_by_role(where, *pair, i, n, base_side) for i, pair in enumerate(zip(base, others, strict=True))]
        for i, found in enumerate(spots):
            _refuse_moved(found, base[i], others[i], i)
        return Places(tuple(tuple(spot.base for spot in one.values()) for one in spots), tuple(where), chosen=True)
    if where is None:
        chosen: list[tuple[int, ...] | None] = [None] * n
    else:
        chosen = [
            aligned_positions(where, *pair, i, n, base_side) for i, pair in enumerate(zip(base, others, strict=True))
        ]
    if over is None:
        return Places(tuple((one,) for one in chosen), chosen=where is not None)
    apart = [
        tuple((at,) if one is None or at in one else () for at in range(stop))
        for one, stop in zip(chosen, stops, strict=True)
    ]
    return Places(tuple(apart), apart=True, chosen=where is not None)


def _refuse_moved(spots: Mapping[str, AlignedSpan], base: Prompt, other: Prompt | None, example: int) -> None:
    for role, spot in spots.items():
        if spot.base != spot.other and other is not None:
            raise InputError(
                f"The role {role!r} is tokens {list(spot.base)} of one prompt of pair {example} and {list(spot.other)} "
                f"of the other. What senders add is exchanged position by position: give pairs in which roles stand at "
                f"the same positions.\n{side_by_side(base, other)}"
            )
