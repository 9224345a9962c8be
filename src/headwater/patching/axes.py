"""The axes of a sweep: layers, positions, heads, keys, features, one by one or in windows, and what each cell edits.

Positions are numbers, or named by role (`models.positions`): then a step on their axis is a role, all of whose tokens
are edited together, or one of its tokens. So are the keys of a pattern.

A window of size w around i covers i - w//2 ... i - w//2 + w - 1, cut at the ends. A cumulative window covers everything
up to i. An axis that the sweep does not run over is covered whole by every cell.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar, cast, get_args

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where, is_all
from headwater.models.sites import Site
from headwater.options import checked_count, checked_name, one_or_several, resolve_indices, shown
from headwater.patching.edits import CellTemplate, Replace
from headwater.patching.prompts import AlignedSpan, aligned_spans, spans_by_role
from headwater.patching.replacements import Replacement

T = TypeVar("T")
AxisName: TypeAlias = Literal["layer", "position", "head", "key", "feature"]
AXES = get_args(AxisName)
ROLES = {"role": "position", "key_role": "key"}
"""By the column of a sweep that names roles: the column of the tokens that they are of."""
SpansName: TypeAlias = Literal["together", "token by token"]
SPANS = get_args(SpansName)
Window: TypeAlias = SupportsIndex | str | Mapping[str, SupportsIndex | str] | None
"""A size, "cumulative", or these by axis; alone it means the layers."""


@dataclass(frozen=True)
class AxisStep:
    """One place on one axis: its label in the table and what it covers (None: all)."""

    label: int | None
    covers: tuple[int, ...] | None
    role: str | None = None
    """What the positions are in their prompt."""


def tokens_by_role(columns: Iterable[str]) -> set[str]:
    """Return the columns of tokens, of those of a sweep, in whose place roles stand."""
    return {ROLES[column] for column in columns if column in ROLES}


def axes_of(
    over: str | Iterable[str] | None, default: tuple[str, ...], allowed: Sequence[str], what: str
) -> tuple[str, ...]:
    """Return the axes that a sweep runs over.

    Raises:
        InputError: an axis does not exist, or the site has none of it.
    """
    if over is None:
        return default
    names = one_or_several(over)
    for name in names:
        if checked_name("over", name, AXES) not in allowed:
            raise InputError(f"{what} has no {name} axis; it has {', '.join(allowed)}.")
    return tuple(axis for axis in AXES if axis in names)


def windows_of(window: Window, over: Iterable[str]) -> dict[str, int | str]:
    """Return the window of each axis that has one.

    Raises:
        InputError: a window is neither a size nor "cumulative", or its axis is not swept over.
    """
    asked = dict(window) if isinstance(window, Mapping) else {"layer": window} if window is not None else {}
    by_axis: dict[str, int | str] = {}
    for axis, size in asked.items():
        if axis not in over:
            raise InputError(f"window={shown(window)} is for the {axis} axis, which this sweep does not run over.")
        try:
            is_named = isinstance(size, str) and size == "cumulative"
            by_axis[axis] = "cumulative" if is_named else checked_count("window", size)
        except InputError:
            raise InputError(f"window={shown(size)} is neither a number of {axis}s nor 'cumulative'.") from None
    return by_axis


def layers_of(indices: Iterable[int] | int | None, site: Site, model: HookedModel) -> tuple[int, ...]:
    """Return the layers of a site that were asked for.

    Raises:
        InputError: the model has no such layer, or the site is of others, or can be edited in others only.
    """
    asked, own = resolve_indices(indices, model.shape.n_layers, "layer"), site.layers(model.shape)
    found = tuple(layer for layer in asked if layer in own)
    if not found:
        raise InputError(f"layers={shown(indices)}, but {site.name} is of layer {', '.join(map(str, own))}.")
    return site.among(found, model, edited=True)


def materialize(value: T) -> T:
    """Turn an iterator into a tuple, which can be gone through twice."""
    return cast("T", tuple(value)) if isinstance(value, Iterator) else value


def steps(among: Sequence[int], swept: bool, window: int | str | None, whole: bool) -> list[AxisStep]:
    """List the places on one axis.

    Args:
        among: the indices that take part.
        swept: whether the sweep runs over the axis; otherwise one step covers all of them.
        window: size of the window, or "cumulative".
        whole: whether `among` is everything there is, so that a step covering it can say None.
    """
    if not swept:
        return [AxisStep(None, None if whole else tuple(among))]
    if window is None:
        return [AxisStep(i, (i,)) for i in among]
    if window == "cumulative":
        return [AxisStep(i, tuple(j for j in among if j <= i)) for i in among]
    size = int(window)
    return [AxisStep(i, tuple(j for j in among if i - size // 2 <= j < i - size // 2 + size)) for i in among]


def role_steps(spots: Mapping[str, AlignedSpan], swept: bool, spans: str) -> list[AxisStep]:
    """List the roles of a prompt as places on the axis of positions; or, not swept over, as one.

    Token by token, the tokens of a role of several are called by its name and their number: `subject[0]`, `subject[1]`.
    """
    if not swept:
        return [AxisStep(None, tuple(_places(spots)), " + ".join(spots))]
    if spans == SPANS[0]:
        return [AxisStep(s.base[0] if len(s.base) == 1 else None, s.base, role) for role, s in spots.items()]
    return [
        AxisStep(position, (position,), f"{role}[{i}]" if len(spot.base) > 1 else role)
        for role, spot in spots.items()
        for i, position in enumerate(spot.base)
    ]


def matched_positions(same: dict[int, int], aligned: bool) -> dict[int, int] | None:
    """Return which position of the other prompt each position that may be edited is; None where they are the same.

    `aligned`: whether the two prompts are of one length.
    """
    return None if aligned and all(here == there for here, there in same.items()) else same


def grid(axes: Mapping[str, list[AxisStep]]) -> list[dict[str, AxisStep]]:
    """Combine the places on each axis; layers run fastest, so that nested ones stand side by side."""
    order = [axis for axis in ("position", "key", "head", "feature", "layer") if axis in axes]
    return [dict(zip(order, combination, strict=True)) for combination in product(*(axes[axis] for axis in order))]


def layer_runs(covered: Sequence[int]) -> list[range]:
    """Return layers as ranges without gaps."""
    runs: list[range] = []
    for layer in covered:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs


def labels_of(step: Mapping[str, AxisStep], window: Mapping[str, int | str]) -> dict[str, Any]:
    """Return the coordinates of a cell as the table shows them."""
    named: dict[str, Any] = {axis: step[axis].label for axis in AXES if axis in step and step[axis].label is not None}
    named |= {column: step[axis].role for column, axis in ROLES.items() if axis in step and step[axis].role is not None}
    if window:
        named["window"] = ", ".join(str(size) if axis == "layer" else f"{axis} {size}" for axis, size in window.items())
    return named


@dataclass(frozen=True)
class SweepSpec:
    """Which cells were asked for, of whatever site."""

    over: str | Iterable[str] | None
    layers: Iterable[int] | int | None
    positions: Where
    heads: Any
    window: Window
    spans: SpansName = "together"
    """Whether the tokens of a role are edited together, or each by itself."""
    from_layer: Iterable[int] | int | None = None
    """The layers that values come from; None is the layer that is written."""
    keys: Where = "all"
    """Of a pattern, the tokens that are attended to."""

    def __post_init__(self) -> None:
        checked_name("spans", self.spans, SPANS)
        if self.spans != SPANS[0] and not (self.by_role or self.keys_by_role):
            raise InputError(f"spans={self.spans!r} is for positions by role, as in positions={{'subject': ' Rome'}}.")

    @property
    def whole_prompts(self) -> bool:
        """Whether cells are of whole prompts, as nodes are: they run over no axis, and so no role is told apart."""
        return isinstance(self.over, tuple) and not self.over

    @property
    def by_role(self) -> bool:
        """Whether positions stand by role."""
        return isinstance(self.positions, Mapping)

    @property
    def keys_by_role(self) -> bool:
        """Whether keys stand by role."""
        return isinstance(self.keys, Mapping)

    def sources(self, model: HookedModel) -> tuple[int | None, ...]:
        """Return the layers that values come from, in turn; None is the layer that is written."""
        return (
            (None,)
            if self.from_layer is None
            else resolve_indices(self.from_layer, model.shape.n_layers, "layer", "from_layer")
        )

    def axes(self, site: Site) -> tuple[str, ...]:
        """The axes that run; roles are told apart unless `over` leaves positions out."""
        named = {"position": self.by_role, "key": self.keys_by_role and site.has_keys}
        by_role = [axis for axis, is_named in named.items() if is_named and axis not in site.default_axes]
        return axes_of(self.over, (*site.default_axes, *by_role), site.swept_axes, f"The site {site.name}")

    def sizes(self, site: Site) -> dict[str, int | str]:
        """The window of each axis that has one.

        Raises:
            InputError: it is of positions or keys, which roles do not put in a row.
        """
        sizes = windows_of(self.window, self.axes(site))
        for axis, by_role in (("position", self.by_role), ("key", self.keys_by_role)):
            if by_role and axis in sizes:
                raise InputError(f"A window of {axis}s needs {axis}s in a row; roles have none. Name a span as a role.")
        return sizes

    def steps(
        self,
        model: HookedModel,
        site: Site,
        prompt: Prompt,
        spots: Mapping[str, AlignedSpan],
        keys: Mapping[str, AlignedSpan],
    ) -> dict[str, list[AxisStep]]:
        """The places on each axis of a site, in one prompt, of which `spots` are the positions."""
        axes, sizes = self.axes(site), self.sizes(site)
        at = seen_positions(site, prompt, _places(spots))
        spots = {r: AlignedSpan(k, k) for r, s in spots.items() if (k := tuple(p for p in s.base if p in at))}
        n_heads, n_layers = site.n_heads(model.shape), model.shape.n_layers
        units = site.units or ()
        among: dict[str, Sequence[int]] = {
            "layer": layers_of(self.layers, site, model),
            "position": at,
            "head": resolve_indices(self.heads, n_heads, "head") if site.has_heads else (),
            "key": _places(keys),
            "feature": units,
        }
        total = {"layer": n_layers, "position": len(prompt), "head": n_heads, "key": len(prompt)}
        total["feature"] = site.width(model.shape, len(prompt)) if units else 0
        listed = {
            axis: steps(among[axis], axis in axes, sizes.get(axis), axis != "layer" and len(among[axis]) == total[axis])
            for axis in site.swept_axes
        }
        if self.by_role:
            listed["position"] = role_steps(spots, "position" in axes, self.spans)
        if self.keys_by_role and site.has_keys:
            listed["key"] = role_steps(keys, "key" in axes, self.spans)
        return listed

    def spots(
        self, base: Sequence[Prompt], other: Sequence[Prompt] | None, base_side: int
    ) -> list[dict[str, AlignedSpan]]:
        """By example: what the positions are in both prompts, by role; by an empty name where there are no roles."""
        return _spots(self.positions, base, other, base_side)

    def key_spots(
        self, base: Sequence[Prompt], other: Sequence[Prompt] | None, base_side: int
    ) -> list[dict[str, AlignedSpan]]:
        """By example: what the keys are in both prompts, in the same way; where all take part, each is itself."""
        if is_all(self.keys):
            return _spots("all", base, None, base_side)
        return _spots(self.keys, base, other, base_side)


def seen_positions(site: Site, prompt: Prompt, positions: Sequence[int]) -> tuple[int, ...]:
    """Return positions without those at which a site is not edited.

    Raises:
        InputError: no other was named.
    """
    left_out = site.left_out(prompt.ids) if site.leaves_out else frozenset()
    kept = tuple(position for position in positions if position not in left_out)
    if not kept:
        raise InputError(
            f"{site.name} can be edited at none of the positions {list(positions)} of the prompt that begins with "
            f"{''.join(prompt.strings[:8])!r}: its dictionary was trained without such tokens. Name other positions."
        )
    return kept


def _spots(
    where: Where, base: Sequence[Prompt], other: Sequence[Prompt] | None, base_side: int
) -> list[dict[str, AlignedSpan]]:
    """By example, what positions are by role; those of examples that have the same ones are one object."""
    others: Sequence[Prompt | None] = other or [None] * len(base)
    if not isinstance(where, Mapping):
        return _shared({"": spot} for spot in aligned_spans(where, base, others, base_side))
    pairs = enumerate(zip(base, others, strict=True))
    return _shared(spans_by_role(where, *pair, i, len(base), base_side) for i, pair in pairs)


def _shared(spots: Iterable[dict[str, AlignedSpan]]) -> list[dict[str, AlignedSpan]]:
    known: dict[Hashable, dict[str, AlignedSpan]] = {}
    return [known.setdefault(tuple(one.items()), one) for one in spots]


def _places(spots: Mapping[str, AlignedSpan]) -> list[int]:
    """Every position of the edited prompt that is meant."""
    return sorted({position for spot in spots.values() for position in spot.base})


def templates_of(
    site: Site,
    listed: Mapping[str, list[AxisStep]],
    sizes: Mapping[str, int | str],
    source: Replacement,
    first: int,
    source_layers: Sequence[int | None] = (None,),
) -> Iterator[CellTemplate]:
    """Yield what is edited of one site, a set of kinds for each layer that values come from and each draw.

    `first`: before this position the values of a layer are those that stand there.
    """
    values = {"values": source.label} if source.label else {}
    for from_layer, sample, step in product(source_layers, range(source.samples or 1), grid(listed)):
        since = first if from_layer is None else 0
        covers = {axis: step[axis].covers if axis in step else None for axis in AXES}
        at, of, to, units = (covers[axis] for axis in ("position", "head", "key", "feature"))
        runs = layer_runs(covers["layer"] or ())
        labels = {"site": site.name} | labels_of(step, sizes) | values
        if from_layer is not None:
            labels["from_layer"] = from_layer
        if source.samples is not None:
            labels["sample"] = sample
        token_at = (labels["position"],) if "position" in labels else (at or ()) if "role" in labels else None
        if "head" in labels:
            labels[site.head_column] = labels.pop("head")
        nested = "layer" in sizes and len(runs) == 1
        others = tuple((step[axis].label, step[axis].role) for axis in listed if axis != "layer")
        family = (site.name, *others, runs[0].start, from_layer, sample) if nested else None
        edits = tuple(Replace(site, run, at, of, to, units, since, from_layer, sample) for run in runs)
        yield CellTemplate(labels, edits, family, token_at)


def covered(listed: Sequence[AxisStep], length: int) -> tuple[int, ...] | str:
    """Return the positions that the steps of an axis cover together."""
    whole = any(step.covers is None for step in listed)
    covered = sorted({place for step in listed for place in step.covers or ()})
    return "all" if whole or len(covered) == length else tuple(covered)
