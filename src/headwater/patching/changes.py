"""Replacements computed from the current activation: by a function, a tensor, a direction, a factor, or noise.

    function    f(activation, other, place)
    tensor      the tensor
    add         activation + direction
    scale       factor · activation
    noise       activation + std · σ · ε,   ε ~ N(0, 1), drawn anew for every sample, prompt, site, layer and entry

σ is the standard deviation of the row's own entries (the vector of one token, or of one head at one token), so that a
strength means the same at every layer of every model; or 1, if the strength is given in the activation's own units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, InterventionError
from headwater.kernels.devices import failures_named
from headwater.models.positions import Where
from headwater.models.sites import Site
from headwater.options import checked_count, checked_number, shown
from headwater.patching.edits import EditedRows, Place, ReplacementSpec
from headwater.patching.prompts import draw
from headwater.patching.replacements import (
    VALUES,
    Replacement,
    ReplacementInputs,
    TensorLike,
    ValueRequest,
    checked_tensor,
)

RTOL, ATOL = 1e-3, 1e-5
"""Tolerance for a function's result on a row when other rows are beside it: larger than rounding."""
SAMPLES = 10_000
"""Most draws of noise: each draw is a separate run."""


@checked_call
def add(direction: TensorLike) -> ReplacementSpec:
    """Values: the current activation, with a direction added; zeros are the control, and change nothing.

    Args:
        direction: a tensor, a numpy array or a list of numbers: one for all rows, `d`; for sites with heads one for
            each head, `head d_head`; or one for each prompt, or each token of each prompt, with further leading axes
            (see `hw.patch`).
    """
    return ReplacementSpec("add", {"direction": checked_tensor("direction", direction)})


@checked_call
def scale(factor: SupportsFloat) -> ReplacementSpec:
    """Values: the current activation, times a factor; `hw.scale(0)` is `"zero"`, `hw.scale(1)` the control."""
    return ReplacementSpec("scale", {"factor": _number("factor", factor)})


@checked_call
def noise(
    std: SupportsFloat, samples: int = 10, seed: int = 0, *, absolute: bool = False, positions: Where | None = None
) -> ReplacementSpec:
    """Values: the current activation, with Gaussian noise added, drawn several times.

    As `corrupted=`, it adds noise to the embeddings of some tokens of the clean prompts, which makes the corrupted runs
    of causal tracing (Meng et al. 2022).

    Every draw is a separate cell, in the column `sample`. A draw depends only on the seed, its number, the prompt's
    number, the site and the layer. `Sweep.summary` averages each prompt's draws and takes intervals over prompts; for
    one prompt it takes them over draws.

    Args:
        std: its standard deviation, in standard deviations of the entries of the vector that it is added to; as
            `corrupted=`, of the entries of all embeddings that it is added to, over all prompts. 0 is the control.
        samples: number of draws; at most 10,000.
        seed: of the draws.
        absolute: `std` is in the activation's own units.
        positions: as `corrupted=`, the tokens whose embeddings are corrupted: a word, a span, a list with one of
            these per prompt (see `headwater.models.positions`), or the name of a role of the sweep's `positions=`.
    """
    std = _number("std", std)
    if std < 0:
        raise InputError(f"std={shown(std)} must be at least 0.")
    samples = checked_count("samples", samples, most=SAMPLES)
    arguments: dict[str, Any] = {"std": std, "samples": samples, "seed": seed, "absolute": absolute}
    return ReplacementSpec("noise", arguments if positions is None else arguments | {"positions": positions})


class _Changing(Replacement):
    """Values computed from the current activation."""

    changes = True

    def site(self, name: str) -> Site:
        return next(site for site in self.inputs.sites if site.name == name)

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        return {}


@VALUES.add("function")
class Function(_Changing):
    """Values that a function computes from the activation, the other run's, and the rows' indices."""

    needs = ("function",)

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        self.takes_other_run = inputs.pair.other is not None
        self.function: Callable[..., Any] = inputs.arguments["function"]
        self._seen: set[Place] = set()

    @property
    def label(self) -> str:
        """The name of the function."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        return "function" if name == "<lambda>" else str(name)

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Return the other run's values, which the function receives."""
        return request.other

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Call the function, and refuse invalid results."""
        if (rows.site, rows.layer) not in self._seen:
            # Checked once per site and layer, since a function may treat these differently.
            self._refuse_if_rows_mix(activation.clone(), other, rows)
            self._seen.add((rows.site, rows.layer))
        # A copy: the function may work in place, and its result is compared with the original.
        written = self._called(activation.clone(), other, rows)
        wrong = ~written.isfinite().all(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise InterventionError(
                f"{self._named} gives NaN or infinity at {rows.site} of layer {rows.layer}, prompt "
                f"{int(rows.example[row])}, position {int(rows.position[row])}."
            )
        # Weight on a later key leaks the future into a prediction; nothing after the pattern would show it.
        if self.site(rows.site).has_keys:
            keys = torch.arange(written.shape[-1], device=written.device)
            if bool((written.masked_fill(keys <= rows.position[:, None], 0.0) != 0).any()):
                raise InterventionError(
                    f"{self._named} lets a query of layer {rows.layer} attend to a later key; its weights there must "
                    "be 0."
                )
        return written

    @property
    def _named(self) -> str:
        return f"The function given as values ({self.label})"

    def _called(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        kind = (activation.shape, activation.dtype, activation.device)
        with failures_named(f"{self._named}, called as function(activation, other, place), failed"):
            written = self.function(activation, other, rows)
        if isinstance(written, Tensor) and (written.shape, written.dtype, written.device) == kind:
            return written
        returned = f"a {type(written).__name__}"
        if isinstance(written, Tensor):
            returned = f"{tuple(written.shape)} in {written.dtype} on {written.device}"
        raise InterventionError(
            f"{self._named} was given rows {tuple(kind[0])} in {kind[1]} on {kind[2]} at {rows.site} of layer "
            f"{rows.layer} and returned {returned}; it must return rows of the same kind."
        )

    def _refuse_if_rows_mix(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> None:
        """Change the first row beside another (its entries in reverse, doubled, shifted), and each of the two alone."""
        first = torch.zeros(2, dtype=torch.long, device=activation.device)
        both = torch.cat([activation[:1], 2 * activation[:1].flip(-1) + 1])
        others = None if other is None else torch.cat([other[:1], 2 * other[:1].flip(-1) + 1])
        alone = [
            self._called(both[i : i + 1].clone(), None if others is None else others[i : i + 1], rows.part(first[:1]))
            for i in range(2)
        ]
        together, single = self._called(both.clone(), others, rows.part(first)).double(), torch.cat(alone).double()
        # Relative to the largest number: a matrix product of two rows rounds differently than a product of one row.
        size = single.nan_to_num().abs().max()
        if not torch.allclose(together, single, rtol=RTOL, atol=ATOL * max(1.0, float(size)), equal_nan=True):
            raise InterventionError(
                f"{self._named} gives a row of {rows.site} in layer {rows.layer} a different result beside another row "
                "than alone. It must treat each row separately (take means and the like over dim=-1) and draw no "
                "random numbers (for noise use hw.noise)."
            )


@VALUES.add("tensor")
class TensorReplacement(_Changing):
    """The caller's tensor: one row for all, or one for each head, prompt or token."""

    needs = ("tensor",)

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        self.tensor: Tensor = inputs.arguments[self.needs[0]]

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Check that the tensor fits; no values are needed."""
        longest = max(request.width, *map(len, self.inputs.pair.base))
        for name in dict.fromkeys(site for site, _ in request.places):
            listed, lengths = _axes(self.site(name)), self.site(name).size(request.model.shape, longest)
            sizes = {"example": len(self.inputs.pair.prompts)} | dict(zip(self.site(name).axes, lengths, strict=True))
            if not any(_fits(self.tensor.shape, axes, sizes) for axes in listed):
                known = " or ".join(f"({', '.join(f'{axis} {sizes[axis]}' for axis in axes)})" for axes in listed)
                raise InputError(
                    f"The tensor given as values is {tuple(self.tensor.shape)}; for {name} here it must be {known}."
                )
        return {}

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Return the tensor's row for each of these rows, in the activation's dtype and on its device."""
        tensor = self.tensor.to(activation)
        example = rows.example if len(tensor) > 1 else torch.zeros_like(rows.example)
        if self.site(rows.site).has_keys:
            return tensor[example, rows.head, rows.position, : activation.shape[-1]]
        by_axis = {"example": example, "position": rows.position, "head": rows.head, "kv_head": rows.head}
        axes = next(axes for axes in _axes(self.site(rows.site)) if len(axes) == tensor.ndim)
        index = tuple(by_axis[axis] for axis in axes[:-1])
        return (tensor[index] if index else tensor).expand_as(activation)


def _axes(site: Site) -> list[tuple[str, ...]]:
    """Return the axes that a tensor of rows may have, the fewest first."""
    if site.has_keys:
        return [("example", *site.axes)]
    inner = site.axes[1:]
    return list(dict.fromkeys([inner[-1:], inner, ("example", *inner), ("example", *site.axes)]))


def _fits(shape: tuple[int, ...], axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """Return whether a shape fits these axes; one prompt may represent all, and extra tokens are allowed."""
    alike = {"example": lambda have, need: have in (1, need), "position": int.__ge__, "key": int.__ge__}
    return len(shape) == len(axes) and all(
        alike.get(axis, int.__eq__)(have, sizes[axis]) for have, axis in zip(shape, axes, strict=True)
    )


@VALUES.add("add")
class Added(TensorReplacement):
    """The current activation, with a direction added."""

    needs = ("direction",)

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        self.is_control = not bool(self.tensor.any())

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Add the direction."""
        return activation + super().changed(activation, other, rows)


@VALUES.add("scale")
class Scaled(_Changing):
    """The current activation, times a factor."""

    needs = ("factor",)

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        self.is_control = inputs.arguments["factor"] == 1

    @property
    def label(self) -> str:
        """The name of the values, with the factor."""
        return f"scale {self.inputs.arguments['factor']:g}"

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Multiply."""
        return activation * self.inputs.arguments["factor"]


@VALUES.add("noise")
class Noise(_Changing):
    """The current activation, with noise added."""

    needs = ("std",)
    of_prompts = True

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        if "positions" in inputs.arguments:
            raise InputError(
                "hw.noise(..., positions=) selects embeddings for corrupted=hw.noise(...); noise given as "
                "values= is added at the positions of the call."
            )
        if any(site.has_keys for site in inputs.sites):
            raise InputError("Noise cannot be added to attention patterns: their weights would no longer sum to 1.")
        self.samples: int = inputs.arguments["samples"]
        self.is_control = inputs.arguments["std"] == 0

    @property
    def label(self) -> str:
        """The name of the values, with the strength."""
        return f"noise {self.inputs.arguments['std']:g}"

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Draw for each example and sample, over the tokens of the example's prompt."""
        model, drawn = request.model, {}
        for site, layer in request.places:
            size = self.site(site).size(model.shape, request.width)
            # Padding gets no noise, so that a draw does not depend on the longest prompt of its group.
            sampled = torch.zeros(len(request.examples), self.samples, *size)
            for row, example in enumerate(request.examples):
                for sample in range(self.samples):
                    shape, seed = (request.lengths[row], *size[1:]), self.inputs.arguments["seed"]
                    sampled[row, sample, : request.lengths[row]] = draw(seed, site, layer, example, sample, shape)
            drawn[site, layer] = sampled.flatten(0, 1).to(model.device, model.dtype)
        return drawn

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Add the drawn noise."""
        assert other is not None
        arguments = self.inputs.arguments
        # Divided by n: the standard deviation of each row's entries themselves, not an estimate from them.
        unit = 1.0 if arguments["absolute"] else activation.float().std(-1, unbiased=False, keepdim=True)
        return activation + (arguments["std"] * unit * other).to(activation.dtype)


def _number(option: str, value: Any) -> float:
    # An array with one number counts as a number.
    try:
        return checked_number(option, value.item() if getattr(value, "size", None) == 1 else value, above=-float("inf"))
    except InputError:
        raise InputError(f"{option}={shown(value)} is not a finite number.") from None
