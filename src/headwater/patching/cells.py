"""The cells of a sweep: layers, positions, heads and keys, one at a time or in windows, as edits of each example.

A window of size w around i covers i - w//2 ... i - w//2 + w - 1, cut at the ends. A cumulative window covers everything
up to i. An axis that the sweep does not run over is covered whole by every cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.sites import Site
from headwater.options import checked_count, checked_name, one_or_several, shown, whole_numbers
from headwater.patching.plan import Cell
from headwater.patching.prompts import Prompt, Where, aligned_positions
from headwater.patching.values import Source
from headwater.patching.variants import Replace

T = TypeVar("T")
AXES = ("layer", "position", "head", "key")
Window: TypeAlias = SupportsIndex | str | Mapping[str, SupportsIndex | str] | None
"""A size, "cumulative", or these by axis; alone it means the layers."""


@dataclass(frozen=True)
class Step:
    """One place on one axis: its label in the table and what it covers (None: all)."""

    label: int | None
    covers: tuple[int, ...] | None


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
            by_axis[axis] = "cumulative" if str(size) == "cumulative" else checked_count("window", size)
        except InputError:
            raise InputError(f"window={shown(size)} is neither a number of {axis}s nor 'cumulative'.") from None
    return by_axis


def chosen(indices: Iterable[int] | int | None, count: int, what: str) -> tuple[int, ...]:
    """Return the layers or heads asked for, in order; negative ones count from the end.

    Raises:
        InputError: one does not exist.
    """
    if indices is None:
        return tuple(range(count))
    try:
        asked = whole_numbers(indices)
    except TypeError:
        raise InputError(f"{what}s={shown(indices)} are not whole numbers; they are 0 to {count - 1}.") from None
    outside = [i for i in asked if not -count <= i < count]
    if outside or not asked:
        raise InputError(f"There is no {what} {outside[0] if outside else 'asked for'}; they are 0 to {count - 1}.")
    return tuple(sorted({i % count for i in asked}))


def lasting(value: T) -> T:
    """Turn an iterator into a tuple, which can be gone through twice."""
    return cast("T", tuple(value)) if isinstance(value, Iterator) else value


def steps(among: Sequence[int], swept: bool, window: int | str | None, whole: bool) -> list[Step]:
    """List the places on one axis.

    Args:
        among: the indices that take part.
        swept: whether the sweep runs over the axis; otherwise one step covers all of them.
        window: size of the window, or "cumulative".
        whole: whether `among` is everything there is, so that a step covering it can say None.
    """
    if not swept:
        return [Step(None, None if whole else tuple(among))]
    if window is None:
        return [Step(i, (i,)) for i in among]
    if window == "cumulative":
        return [Step(i, tuple(j for j in among if j <= i)) for i in among]
    size = int(window)
    return [Step(i, tuple(j for j in among if i - size // 2 <= j < i - size // 2 + size)) for i in among]


def grid(axes: Mapping[str, list[Step]]) -> list[dict[str, Step]]:
    """Combine the places on each axis; layers run fastest, so that nested ones stand side by side."""
    order = [axis for axis in ("position", "key", "head", "layer") if axis in axes]
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


def labels_of(step: Mapping[str, Step], window: Mapping[str, int | str]) -> dict[str, Any]:
    """Return the coordinates of a cell as the table shows them."""
    named: dict[str, Any] = {axis: step[axis].label for axis in AXES if axis in step and step[axis].label is not None}
    if window:
        named["window"] = ", ".join(str(size) if axis == "layer" else f"{axis} {size}" for axis, size in window.items())
    return named


@dataclass(frozen=True)
class Asked:
    """Which cells were asked for, of whatever site."""

    over: str | Iterable[str] | None
    layers: Iterable[int] | int | None
    positions: Where
    heads: Iterable[int] | int | None
    window: Window

    def axes(self, site: Site) -> tuple[str, ...]:
        """The axes that run."""
        default = ("layer", "head") if site.has_heads else ("layer", "position")
        return axes_of(self.over, default, site.swept_axes, f"The site {site.name}")

    def sizes(self, site: Site) -> dict[str, int | str]:
        """The window of each axis that has one."""
        return windows_of(self.window, self.axes(site))

    def steps(
        self, model: HookedModel, site: Site, base: Sequence[Prompt], other: Sequence[Prompt] | None, example: int
    ) -> dict[str, list[Step]]:
        """The places on each axis of a site, in one example."""
        axes, sizes, prompt = self.axes(site), self.sizes(site), base[example]
        n_heads, n_layers = site.n_heads(model.shape), model.shape.n_layers
        among = {
            "layer": chosen(self.layers, n_layers, "layer"),
            "position": aligned_positions(
                self.positions, prompt, other[example] if other else None, example, len(base)
            ),
            "head": chosen(self.heads, n_heads, "head") if site.has_heads else (),
            "key": range(len(prompt)),
        }
        total = {"layer": n_layers, "position": len(prompt), "head": n_heads, "key": len(prompt)}
        return {
            axis: steps(among[axis], axis in axes, sizes.get(axis), axis != "layer" and len(among[axis]) == total[axis])
            for axis in site.swept_axes
        }


def cells_of(
    prompt: Prompt,
    example: int,
    site: Site,
    listed: Mapping[str, list[Step]],
    sizes: Mapping[str, int | str],
    source: Source,
) -> Iterator[Cell]:
    """Yield one example's cells of one site."""
    since, values = source.since(example), {"values": source.label} if source.label else {}
    for step in grid(listed):
        at, of, to = (step[axis].covers if axis in step else None for axis in ("position", "head", "key"))
        edits = tuple(Replace(site, run, at, of, to, since=since) for run in layer_runs(step["layer"].covers or ()))
        labels = {"site": site.name} | labels_of(step, sizes) | values
        if "position" in labels:
            labels["token"] = prompt.strings[labels["position"]]
        if "head" in labels:
            labels[site.head_column] = labels.pop("head")
        nested = "layer" in sizes and len(edits) == 1
        others = tuple(step[axis].label for axis in listed if axis != "layer")
        family = (site.name, *others, edits[0].layers.start) if nested else None
        yield Cell(example, labels, edits, family)


def covered(listed: Sequence[Step], length: int) -> tuple[int, ...] | str:
    """Return the positions that the steps of an axis cover together."""
    whole = any(step.covers is None for step in listed)
    covered = sorted({place for step in listed for place in step.covers or ()})
    return "all" if whole or len(covered) == length else tuple(covered)
