"""The cells of a patching sweep: what was asked of axes, positions, heads and windows, as edits of each example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headwater.models.hooked import HookedModel
from headwater.models.sites import Site
from headwater.patching.plan import Cell
from headwater.patching.prompts import (
    Prompt,
    Where,
    aligned_positions,
)
from headwater.patching.values import Source
from headwater.patching.variants import Replace
from headwater.patching.windows import (
    Step,
    Window,
    axes_of,
    chosen,
    grid,
    labels_of,
    layer_runs,
    steps,
    windows_of,
)

if TYPE_CHECKING:
    pass

DIRECTIONS = ("denoise", "noise")
METHODS = ("exact", "attribution")
COORDINATES = ("site", "layer", "position", "token", "head", "kv_head", "key", "window", "values", "metric")


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
        edits = tuple(Replace(site, run, at, of, to, since) for run in layer_runs(step["layer"].covers or ()))
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
