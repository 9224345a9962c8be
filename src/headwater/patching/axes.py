"""The axes of a sweep: layers, positions, heads, keys, features, one by one or in windows, and what each cell edits.

Positions are numbers, or named by role (`models.positions`): then a step on their axis is a role, all of whose tokens
are edited together, or one of its tokens. So are the keys of a pattern.

A window of size w around i covers i - w//2 ... i - w//2 + w - 1, cut at the ends. A cumulative window covers everything
up to i. An axis that the sweep does not run over is covered whole by every cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, SupportsIndex, TypeAlias, TypeVar, cast, get_args

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where
from headwater.models.sites import Site
from headwater.options import checked_count, checked_name, one_or_several, resolve_indices, shown
from headwater.patching.edits import CellTemplate, Edit
from headwater.patching.prompts import AlignedSpan
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


@dataclass(frozen=True)
class SweepSpec:
    """Which cells were requested, of whatever site."""

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
    def by_role(self) -> bool:
        """Whether positions are named by role."""
        return isinstance(self.positions, Mapping)

    @property
    def keys_by_role(self) -> bool:
        """Whether keys are named by role."""
        return isinstance(self.keys, Mapping)

    def source_layers(self, model: HookedModel) -> tuple[int | None, ...]:
        """Return the layers that values come from, in turn; None is the layer that is written."""
        if self.from_layer is None:
            return (None,)
        return resolve_indices(self.from_layer, model.shape.n_layers, "layer", "from_layer")

    def axes(self, site: Site) -> tuple[str, ...]:
        """Return the axes that run; roles are distinguished unless `over` leaves positions out."""
        named = {"position": self.by_role, "key": self.keys_by_role and site.has_keys}
        by_role = [axis for axis, is_named in named.items() if is_named and axis not in site.default_axes]
        return axes_of(self.over, (*site.default_axes, *by_role), site.swept_axes, f"The site {site.name}")

    def windows(self, site: Site) -> dict[str, int | str]:
        """Return the window of each axis that has one; positions and keys by role have no order, and so none."""
        windows = windows_of(self.window, self.axes(site))
        for axis, by_role in (("position", self.by_role), ("key", self.keys_by_role)):
            if by_role and axis in windows:
                raise InputError(f"A window of {axis}s needs {axis}s in a row; roles have none. Name a span as a role.")
        return windows

    def steps(
        self,
        model: HookedModel,
        site: Site,
        prompt: Prompt,
        spans: Mapping[str, AlignedSpan],
        keys: Mapping[str, AlignedSpan],
    ) -> dict[str, list[AxisStep]]:
        """Return the steps of each axis of a site, in one prompt; `spans` and `keys` are its positions and keys."""
        axes, windows, shape = self.axes(site), self.windows(site), model.shape
        # A dictionary may leave tokens out, such as the first, on which it was not trained.
        at = seen_positions(site, prompt, positions_in(spans))
        seen = {role: tuple(p for p in span.base if p in at) for role, span in spans.items()}
        among: dict[str, Sequence[int]] = {
            "layer": layers_of(self.layers, site, model),
            "position": at,
            "head": resolve_indices(self.heads, site.n_heads(shape), "head") if site.has_heads else (),
            "key": positions_in(keys),
            "feature": site.units or (),
        }
        total = {"position": len(prompt), "key": len(prompt), "head": site.n_heads(shape)}
        total["feature"] = site.width(shape, len(prompt)) if site.units else 0
        by_axis = {
            axis: axis_steps(among[axis], axis in axes, windows.get(axis), len(among[axis]) == total.get(axis))
            for axis in site.swept_axes
        }
        if self.by_role:
            by_axis["position"] = role_steps({r: p for r, p in seen.items() if p}, "position" in axes, self.spans)
        if self.keys_by_role and site.has_keys:
            by_axis["key"] = role_steps({r: span.base for r, span in keys.items()}, "key" in axes, self.spans)
        return by_axis

    def templates(
        self, site: Site, steps: Mapping[str, list[AxisStep]], replacement: Replacement, since: int, model: HookedModel
    ) -> Iterator[CellTemplate]:
        """Yield what is edited of one site, once for each layer that values come from and each draw.

        Args:
            site: where.
            steps: on each axis.
            replacement: what is written.
            since: before this position the values of a layer are those of the run itself.
            model: the model.
        """
        windows = self.windows(site)
        values = {"values": replacement.label} if replacement.label else {}
        draws = range(replacement.samples or 1)
        for from_layer, sample, step in product(self.source_layers(model), draws, grid(steps)):
            covers = {axis: step[axis].covers if axis in step else None for axis in AXES}
            runs = layer_runs(covers["layer"] or ())
            at, of, to, units = (covers[axis] for axis in ("position", "head", "key", "feature"))
            # Before the first difference both runs are equal layer by layer; another layer's values differ everywhere.
            first = since if from_layer is None else 0
            edits = tuple(Edit(site, run, at, of, to, units, first, from_layer, sample) for run in runs)
            labels = {"site": site.name} | labels_of(step, windows) | values
            if from_layer is not None:
                labels["from_layer"] = from_layer
            if replacement.samples is not None:
                labels["sample"] = sample
            token_at = (labels["position"],) if "position" in labels else (at or ()) if "role" in labels else None
            if "head" in labels:
                labels[site.head_column] = labels.pop("head")
            nested = None
            if "layer" in windows and len(runs) == 1:
                others = tuple((step[axis].label, step[axis].role) for axis in steps if axis != "layer")
                nested = (site.name, *others, runs[0].start, from_layer, sample)
            yield CellTemplate(labels, edits, nested, token_at)


def tokens_by_role(columns: Iterable[str]) -> set[str]:
    """Return the columns of tokens, of those of a sweep, in whose place roles are shown."""
    return {ROLES[column] for column in columns if column in ROLES}


def axes_of(
    over: str | Iterable[str] | None, default: tuple[str, ...], allowed: Sequence[str], what: str
) -> tuple[str, ...]:
    """Return the axes that a sweep runs over; refuse one that does not exist, or that the site has not."""
    if over is None:
        return default
    names = one_or_several(over)
    for name in names:
        if checked_name("over", name, AXES) not in allowed:
            raise InputError(f"{what} has no {name} axis; it has {', '.join(allowed)}.")
    return tuple(axis for axis in AXES if axis in names)


def windows_of(window: Window, over: Iterable[str]) -> dict[str, int | str]:
    """Return the window of each axis that has one, a size or "cumulative"; refuse one of an axis that does not run."""
    sizes = dict(window) if isinstance(window, Mapping) else {"layer": window} if window is not None else {}
    by_axis: dict[str, int | str] = {}
    for axis, size in sizes.items():
        if axis not in over:
            raise InputError(f"window={shown(window)} is for the {axis} axis, which this sweep does not run over.")
        try:
            is_named = isinstance(size, str) and size == "cumulative"
            by_axis[axis] = "cumulative" if is_named else checked_count("window", size)
        except InputError:
            raise InputError(f"window={shown(size)} is neither a number of {axis}s nor 'cumulative'.") from None
    return by_axis


def layers_of(indices: Iterable[int] | int | None, site: Site, model: HookedModel) -> tuple[int, ...]:
    """Return the requested layers of a site; refuse those that the site has not, or that cannot be edited."""
    wanted, has = resolve_indices(indices, model.shape.n_layers, "layer"), site.layers(model.shape)
    found = tuple(layer for layer in wanted if layer in has)
    if not found:
        raise InputError(f"layers={shown(indices)}, but {site.name} is of layer {', '.join(map(str, has))}.")
    return site.among(found, model, edited=True)


def materialize(value: T) -> T:
    """Turn an iterator into a tuple, which can be gone through twice."""
    return cast("T", tuple(value)) if isinstance(value, Iterator) else value


def axis_steps(among: Sequence[int], swept: bool, window: int | str | None, is_all: bool) -> list[AxisStep]:
    """Return the steps on one axis.

    Args:
        among: the indices that take part.
        swept: whether the sweep runs over the axis; otherwise one step covers all of them.
        window: size of the window, or "cumulative".
        is_all: whether `among` is everything there is, so that a step covering it can say None.
    """
    if not swept:
        return [AxisStep(None, None if is_all else tuple(among))]
    if window is None:
        return [AxisStep(i, (i,)) for i in among]
    if window == "cumulative":
        return [AxisStep(i, tuple(j for j in among if j <= i)) for i in among]
    size = int(window)
    return [AxisStep(i, tuple(j for j in among if i - size // 2 <= j < i - size // 2 + size)) for i in among]


def role_steps(roles: Mapping[str, tuple[int, ...]], swept: bool, spans: str) -> list[AxisStep]:
    """Return the roles of a prompt as steps on the axis of positions; or, not swept over, as one.

    Token by token, the tokens of a role of several are called by its name and their number: `subject[0]`, `subject[1]`.
    """
    if not swept:
        return [AxisStep(None, tuple(sorted({p for at in roles.values() for p in at})), " + ".join(roles))]
    if spans == SPANS[0]:
        return [AxisStep(at[0] if len(at) == 1 else None, at, role) for role, at in roles.items()]
    return [
        AxisStep(position, (position,), f"{role}[{i}]" if len(at) > 1 else role)
        for role, at in roles.items()
        for i, position in enumerate(at)
    ]


def grid(axes: Mapping[str, list[AxisStep]]) -> list[dict[str, AxisStep]]:
    """Combine the steps on each axis; layers run fastest, so that nested cells are adjacent."""
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


def labels_of(step: Mapping[str, AxisStep], windows: Mapping[str, int | str]) -> dict[str, Any]:
    """Return the coordinates of a cell as the table shows them."""
    labels: dict[str, Any] = {axis: step[axis].label for axis in AXES if axis in step and step[axis].label is not None}
    labels |= {
        column: step[axis].role for column, axis in ROLES.items() if axis in step and step[axis].role is not None
    }
    if windows:
        sizes = [str(size) if axis == "layer" else f"{axis} {size}" for axis, size in windows.items()]
        labels["window"] = ", ".join(sizes)
    return labels


def positions_in(spans: Mapping[str, AlignedSpan]) -> list[int]:
    """Return every position of the edited prompt that is meant."""
    return sorted({position for span in spans.values() for position in span.base})


def seen_positions(site: Site, prompt: Prompt, positions: Sequence[int]) -> tuple[int, ...]:
    """Return positions without those at which a site is not edited; refuse where no other was named."""
    left_out = site.left_out(prompt.ids) if site.leaves_out else frozenset()
    kept = tuple(position for position in positions if position not in left_out)
    if not kept:
        raise InputError(
            f"{site.name} can be edited at none of the positions {list(positions)} of the prompt that begins with "
            f"{''.join(prompt.strings[:8])!r}: its dictionary was trained without such tokens. Name other positions."
        )
    return kept


def covered(steps: Sequence[AxisStep], length: int) -> tuple[int, ...] | str:
    """Return the positions that the steps of an axis cover together."""
    positions = sorted({position for step in steps for position in step.covers or ()})
    return "all" if any(step.covers is None for step in steps) or len(positions) == length else tuple(positions)
