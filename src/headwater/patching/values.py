"""What edits write: the kinds of values, and how each comes by them.

    other run   the other prompt's own activations
    zero        nothing

from the runs of a data set (`headwater.patching.dataset_values`): their mean, or another prompt's activations;
and what is made of the activation that stands there (`headwater.patching.changes`): by a function, a tensor, a
direction added, a factor, noise.

A kind is a class, and a row of `VALUES`: what the sweep gives it, it may refuse when it is made; for each group of
examples it is asked for activations (`Wanted`), which it makes from the other run's, from runs of its own
(`Wanted.of_runs`), or from nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from headwater.errors import InputError, InterventionError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.sites import Site
from headwater.models.tokens import Batch, pad_id
from headwater.options import checked_name, shown
from headwater.patching.forwards import capture
from headwater.patching.prompts import Prompts, first_difference, read_prompts
from headwater.patching.rows import Rows, Values
from headwater.patching.variants import Place
from headwater.registry import Registry

NOT_WRITTEN, LEFT, CHANGED = range(3)
"""What values made of what stands there have done so far: nothing was asked of them, every row was left, or not."""


TensorLike: TypeAlias = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True)
class Recipe:
    """Values with what they need: what `hw.add`, `hw.scale`, `hw.noise`, `hw.mean` and `hw.resample` return."""

    kind: str
    """The name of a kind of values."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Roles:
    """Positions that were named by role."""

    where: Mapping[str, Any]
    """As they were named."""
    at: Sequence[Mapping[str, Sequence[int]]]
    """By prompt of the caller's: what they are in it."""


@dataclass(frozen=True)
class Given:
    """What a sweep gives to a kind of values."""

    kind: str
    """The name that was asked for."""
    base: tuple[Prompt, ...]
    """The prompts that are edited."""
    other: tuple[Prompt, ...] | None
    """The other prompt of each pair."""
    dataset: tuple[Prompt, ...] | None
    """What was given as `dataset=`."""
    sites: tuple[Site, ...]
    seed: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What the kind was given by the caller, such as a factor."""
    draws: int = 1
    """How many of the prompts that are edited stand for one of the caller's, each with other noise."""
    roles: Roles | None = None
    """What the edited positions are in their prompts, where they were named by role."""
    begins: tuple[int, ...] | None = None
    """By prompt that is edited, where its two runs begin to differ; None: where the texts of the pair do."""

    @property
    def prompts(self) -> int:
        """How many prompts the caller gave."""
        return len(self.base) // self.draws


@dataclass(frozen=True)
class Wanted:
    """What a group of examples asks of its values: `example position ...` at each place."""

    model: HookedModel
    examples: range
    width: int
    """The tokens of the longest prompt that is edited."""
    places: tuple[Place, ...]
    other: Mapping[Place, Tensor]
    """The other run's activations, for kinds that take them."""
    sites: Mapping[str, Site]
    """By name, the sites of the places."""

    def of_runs(self, prompts: Sequence[Prompt], names: Sequence[int | str]) -> dict[Place, Tensor]:
        """Run prompts, each called by its name in messages, and return their activations at each place."""
        batch = Batch.of([prompt.ids for prompt in prompts], pad_id(self.model.tokenizer)).named(names)
        hooks = {(site, layer): self.sites[site].hook_name(layer) for site, layer in self.places}
        held, _ = capture(self.model, batch, list(dict.fromkeys(hooks.values())))
        return {place: self.sites[place[0]].read(held[name]) for place, name in hooks.items()}


class Source(ABC):
    """A kind of values, made for one sweep."""

    takes_other_run: bool = False
    """Whether it asks for the other run's activations."""
    takes_dataset: ClassVar[bool] = False
    """Whether it can use `dataset=`."""
    copies: int = 2
    """How many activations it holds at once for each that it returns: what a sweep takes is estimated with it."""
    labelled: ClassVar[bool] = True
    """Whether the table has a column `values` that names it."""
    of_prompts: ClassVar[bool] = False
    """Whether it depends on which prompts are edited: `hw.edit` then needs to know them."""
    is_control: bool = False
    """Whether they are meant to leave everything as it is: a dose of zero."""
    needs: ClassVar[tuple[str, ...]] = ()
    """What a caller must give it, by the names of `Given.arguments`: its name alone is not enough then."""
    changes: ClassVar[bool] = False
    """Whether it is made of the activation that stands where it is written, by `changed`."""
    mean_over: str | None = None
    """Over what a mean is: examples or tokens."""
    samples: int | None = None
    """How often it is drawn, if so: each draw is a cell of its own; `values` returns an example's draws in turn."""

    def __init__(self, given: Given):
        """Keep what the sweep gives.

        Raises:
            InputError: the prompts do not allow these values.
        """
        self.given = given
        self.outcome = NOT_WRITTEN

    @abstractmethod
    def values(self, wanted: Wanted) -> Mapping[Place, Tensor]:
        """Return the values at every place that is wanted, one row per example, over all of its positions."""

    def changed(self, activation: Tensor, other: Tensor | None, rows: Rows) -> Tensor:
        """Return what is written where `activation` stands, `row width`, for kinds that say `changes`.

        Args:
            activation: of each row, in the run that is edited, after the edits of earlier layers; a copy.
            other: what `values` returned for it, if anything.
            rows: which rows they are.
        """
        raise NotImplementedError

    def written(self, activation: Tensor, other: Tensor | None, rows: Rows) -> Tensor:
        """Return what `changed` makes of rows, and remember whether it ever was anything else than these."""
        made = self.changed(activation, other, rows)
        if self.outcome != CHANGED and len(rows):
            self.outcome = LEFT if torch.equal(made, activation) else CHANGED
        return made

    def since(self, example: int) -> int:
        """Return the position before which the values of an example are those of its own run."""
        return 0

    @property
    def label(self) -> str | None:
        """What the table's column `values` says of them, if anything."""
        return self.given.kind if self.labelled else None


ValueName: TypeAlias = Literal["other run", "zero", "mean", "resample"]
VALUES: Registry[str, type[Source]] = Registry(
    "kind of values", "headwater.patching.dataset_values", "headwater.patching.changes"
)
"""What `values=` may be."""


@VALUES.add("other run")
class OtherRun(Source):
    """The other prompt's own activations."""

    takes_other_run = True
    of_prompts = True
    labelled = False

    def __init__(self, given: Given):
        super().__init__(given)
        if given.other is None:
            raise InputError(
                "Values from the other run were asked for, but there are no corrupted prompts. Give them, or "
                "values='zero', 'mean' or 'resample'; a file of pairs is given as a pathlib.Path."
            )

    def values(self, wanted: Wanted) -> Mapping[Place, Tensor]:
        """Return what the other run has there."""
        return wanted.other

    def since(self, example: int) -> int:
        """Return the first position at which the two prompts differ."""
        assert self.given.other is not None
        if self.given.begins is not None:
            return self.given.begins[example]
        return self._first_differences[example]

    @cached_property
    def _first_differences(self) -> list[int]:
        assert self.given.other is not None
        return [first_difference(*pair) for pair in zip(self.given.base, self.given.other, strict=True)]


@VALUES.add("zero")
class Zero(Source):
    """Nothing."""

    copies = 0
    labelled = False

    def values(self, wanted: Wanted) -> Mapping[Place, Tensor]:
        """Return zeros, none of which takes memory."""
        model = wanted.model
        zero = torch.zeros((), dtype=model.dtype, device=model.device)
        n = len(wanted.examples)
        return {
            (site, layer): zero.expand(n, *wanted.sites[site].size(model.shape, wanted.width))
            for site, layer in wanted.places
        }


def checked_tensor(option: str, value: Any) -> Tensor:
    """Return a copy of a tensor, of an array of another library, or of a list of numbers.

    Raises:
        InputError: it is none of these, has no axis, or its numbers are not finite.
    """
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        is_usable = tensor.ndim > 0 and tensor.numel() > 0 and not tensor.is_complex()
        is_usable = is_usable and tensor.layout == torch.strided and not tensor.is_meta
    except (TypeError, ValueError):  # numpy makes no array of it, or torch none of numpy's
        is_usable = False
    if not is_usable:
        raise InputError(
            f"{option}={shown(value)} is not a tensor, array or list of numbers, dense, with one axis at least."
        )
    if not bool(tensor.isfinite().all()):
        raise InputError(f"The tensor given as {option} has NaN or infinity in it.")
    return tensor.detach().clone()


def recipe_of(values: object) -> Recipe:
    """Return what was given as values as a recipe.

    Raises:
        InputError: it is nothing that values can be made of, or a name that needs more.
    """
    if isinstance(values, Recipe):
        return values
    if isinstance(values, list | tuple) or hasattr(values, "__array__"):
        return Recipe("tensor", {"tensor": checked_tensor("values", values)})
    if callable(values) and not isinstance(values, type):
        return Recipe("function", {"function": values})
    kind = checked_name("values", values, tuple(name for name, row in VALUES.items() if not row.needs))
    return Recipe(kind, {})


def asked_source(
    model: HookedModel,
    values: object,
    dataset: Prompts | None,
    *,
    base: tuple[Prompt, ...],
    other: tuple[Prompt, ...] | None,
    sites: tuple[Site, ...],
    seed: int,
    draws: int = 1,
    begins: tuple[int, ...] | None = None,
    roles: Roles | None = None,
) -> Source:
    """Make what was asked for as `values=` of a sweep, with `dataset=` and `seed=` beside it; see `Given`.

    Raises:
        InputError: it is nothing that values can be made of, or the prompts do not allow it.
    """
    recipe = recipe_of(values)
    if "positions" in recipe.arguments and roles is None and recipe.kind == "resample":
        raise InputError("hw.resample(..., positions=) says what roles are, but the edited positions have none.")
    if "prompts" in recipe.arguments and dataset is not None:
        raise InputError(f"values=hw.{recipe.kind}(prompts) and dataset= both give prompts; give one of them.")
    given = recipe.arguments.get("prompts", dataset)
    pool = read_prompts(model, given) if given is not None else None
    seed = int(recipe.arguments.get("seed", seed))
    return source_of(Given(recipe.kind, base, other, pool, sites, seed, recipe.arguments, draws, roles, begins))


def source_of(given: Given) -> Source:
    """Make the source that a sweep asked for.

    Raises:
        InputError: there is no such kind, or the prompts do not allow it.
    """
    kind = VALUES[given.kind]
    if given.dataset is not None and not kind.takes_dataset:
        takers = " or ".join(repr(name) for name, row in VALUES.items() if row.takes_dataset)
        raise InputError(f"dataset= was given, but values={given.kind!r} takes nothing from it; use {takers}.")
    return kind(given)


def values_of(source: Source, wanted: Wanted, lengths: Sequence[int]) -> Values:
    """Return what edits write at the examples of a group, by what they are written into where the kind says so."""
    known = [example // source.given.draws for example in wanted.examples]
    change = source.written if source.changes else None
    return Values(source.values(wanted), change, known, lengths, source.samples or 1)


def refuse_values_that_change_nothing(source: Source, outcome: int) -> None:
    """Refuse values that left everything as it was, in the whole of a sweep.

    Args:
        source: the values.
        outcome: the highest of `NOT_WRITTEN`, `LEFT` and `CHANGED` that any part of the sweep came to.

    Raises:
        InterventionError: every row that was written was left as it stood.
    """
    if outcome == LEFT and not source.is_control:
        label = f" ({source.label})" if source.label not in (None, source.given.kind) else ""
        sites = ", ".join(site.name for site in source.given.sites)
        raise InterventionError(
            f"The {source.given.kind}{label} given as values left every row of {sites} as it was, at all layers and "
            "positions asked for: nothing was edited. Return another activation there, or choose other layers and "
            "positions."
        )


BUILT_IN = ("other run", "zero", "mean", "resample")


def recorded(source: Source) -> Any:
    """What the record of a run says of a source: its name, with what it was given, and of one that was added its code.

    The prompts of a data set are not said here: they stand among the run's prompts.
    """
    kind, arguments = source.given.kind, {k: v for k, v in source.given.arguments.items() if k != "prompts"}
    if kind in BUILT_IN:
        return {kind: arguments} if arguments else kind
    return {kind: arguments if VALUES[kind].__module__.startswith("headwater.") else type(source)}
