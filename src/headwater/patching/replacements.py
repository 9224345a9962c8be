"""What edits write: the kinds of replacements, and how each comes by its values.

    other run   the other prompt's own activations
    zero        nothing
    mean        the mean over the prompts of a data set
    resample    the activations of another of its prompts, drawn at random

and what is computed from the activation itself (`headwater.patching.changes`): a function, a tensor, a direction
added, a factor, noise.

A kind is a class and a row of `VALUES`. It is made once per sweep and may refuse its inputs then. For each group of
examples it is asked for activations (`ValueRequest`), which it takes from the other run, from runs of its own
(`ValueRequest.of_runs`), or from nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, InterventionError
from headwater.models.checks import finite_output
from headwater.models.edits import Hook, read_hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where, roles_of
from headwater.models.sites import Site, Stage, main_site
from headwater.models.tokens import Batch, pad_id
from headwater.options import checked_name, checked_seed, shown
from headwater.patching.edits import Place
from headwater.patching.prompts import Prompts, first_difference, read_prompts
from headwater.patching.writing import EditedRows, ReplacementValues
from headwater.registry import Registry

NOT_WRITTEN, LEFT, CHANGED = range(3)
"""What values made of what stands there have done so far: nothing was asked of them, every row was left, or not."""


TensorLike: TypeAlias = Tensor | np.ndarray | Sequence[Any]


@dataclass(frozen=True)
class ReplacementSpec:
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
class ReplacementInputs:
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
class ValueRequest:
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


class Replacement(ABC):
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
    """What a caller must give it, by the names of `ReplacementInputs.arguments`: its name alone is not enough then."""
    changes: ClassVar[bool] = False
    """Whether it is made of the activation that stands where it is written, by `changed`."""
    mean_over: str | None = None
    """Over what a mean is: examples or tokens."""
    samples: int | None = None
    """How often it is drawn, if so: each draw is a cell of its own; `values` returns an example's draws in turn."""

    def __init__(self, given: ReplacementInputs):
        """Keep what the sweep gives.

        Raises:
            InputError: the prompts do not allow these values.
        """
        self.given = given
        self.outcome = NOT_WRITTEN

    @abstractmethod
    def values(self, wanted: ValueRequest) -> Mapping[Place, Tensor]:
        """Return the values at every place that is wanted, one row per example, over all of its positions."""

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Return what is written where `activation` stands, `row width`, for kinds that say `changes`.

        Args:
            activation: of each row, in the run that is edited, after the edits of earlier layers; a copy.
            other: what `values` returned for it, if anything.
            rows: which rows they are.
        """
        raise NotImplementedError

    def written(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
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
VALUES: Registry[str, type[Replacement]] = Registry(
    "kind of values", "headwater.patching.replacements", "headwater.patching.changes"
)
"""What `values=` may be."""


@VALUES.add("other run")
class OtherRun(Replacement):
    """The other prompt's own activations."""

    takes_other_run = True
    of_prompts = True
    labelled = False

    def __init__(self, given: ReplacementInputs):
        super().__init__(given)
        if given.other is None:
            raise InputError(
                "Values from the other run were asked for, but there are no corrupted prompts. Give them, or "
                "values='zero', 'mean' or 'resample'; a file of pairs is given as a pathlib.Path."
            )

    def values(self, wanted: ValueRequest) -> Mapping[Place, Tensor]:
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
class Zero(Replacement):
    """Nothing."""

    copies = 0
    labelled = False

    def values(self, wanted: ValueRequest) -> Mapping[Place, Tensor]:
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


def replacement_spec(values: object) -> ReplacementSpec:
    """Return what was given as values as a recipe.

    Raises:
        InputError: it is nothing that values can be made of, or a name that needs more.
    """
    if isinstance(values, ReplacementSpec):
        return values
    if isinstance(values, list | tuple) or hasattr(values, "__array__"):
        return ReplacementSpec("tensor", {"tensor": checked_tensor("values", values)})
    if callable(values) and not isinstance(values, type):
        return ReplacementSpec("function", {"function": values})
    kind = checked_name("values", values, tuple(name for name, row in VALUES.items() if not row.needs))
    return ReplacementSpec(kind, {})


def build_replacement(
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
) -> Replacement:
    """Make what was asked for as `values=` of a sweep, with `dataset=` and `seed=` beside it; see `ReplacementInputs`.

    Raises:
        InputError: it is nothing that values can be made of, or the prompts do not allow it.
    """
    recipe = replacement_spec(values)
    if "positions" in recipe.arguments and roles is None and recipe.kind == "resample":
        raise InputError("hw.resample(..., positions=) says what roles are, but the edited positions have none.")
    if "prompts" in recipe.arguments and dataset is not None:
        raise InputError(f"values=hw.{recipe.kind}(prompts) and dataset= both give prompts; give one of them.")
    given = recipe.arguments.get("prompts", dataset)
    pool = read_prompts(model, given) if given is not None else None
    seed = int(recipe.arguments.get("seed", seed))
    return replacement_of(
        ReplacementInputs(recipe.kind, base, other, pool, sites, seed, recipe.arguments, draws, roles, begins)
    )


def replacement_of(given: ReplacementInputs) -> Replacement:
    """Make the source that a sweep asked for.

    Raises:
        InputError: there is no such kind, or the prompts do not allow it.
    """
    kind = VALUES[given.kind]
    if given.dataset is not None and not kind.takes_dataset:
        takers = " or ".join(repr(name) for name, row in VALUES.items() if row.takes_dataset)
        raise InputError(f"dataset= was given, but values={given.kind!r} takes nothing from it; use {takers}.")
    return kind(given)


def compute_values(source: Replacement, wanted: ValueRequest, lengths: Sequence[int]) -> ReplacementValues:
    """Return what edits write at the examples of a group, by what they are written into where the kind says so."""
    known = [example // source.given.draws for example in wanted.examples]
    change = source.written if source.changes else None
    return ReplacementValues(source.values(wanted), change, known, lengths, source.samples or 1)


def refuse_values_that_change_nothing(source: Replacement, outcome: int) -> None:
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


def described_replacement(source: Replacement) -> Any:
    """What the record of a run says of a source: its name, with what it was given, and of one that was added its code.

    The prompts of a data set are not said here: they stand among the run's prompts.
    """
    kind, arguments = source.given.kind, {k: v for k, v in source.given.arguments.items() if k != "prompts"}
    if kind in BUILT_IN:
        return {kind: arguments} if arguments else kind
    return {kind: arguments if VALUES[kind].__module__.startswith("headwater.") else type(source)}


BATCH = 16
"""Prompts of a data set that are run at once."""


class _OfDataset(Replacement):
    """Values from the runs of a data set; without one, of the prompts that are edited."""

    takes_dataset = True
    of_prompts = True

    def __init__(self, given: ReplacementInputs):
        super().__init__(given)
        self.pool = given.dataset if given.dataset is not None else given.base[:: given.draws]

    def runs(self, wanted: ValueRequest, numbers: Sequence[int]) -> dict[Place, Tensor]:
        """Run some prompts of the data set, by number."""
        return wanted.of_runs([self.pool[i] for i in numbers], [f"{i} of the data set" for i in numbers])


@VALUES.add("mean")
class Mean(_OfDataset):
    """The mean over the prompts of a data set.

    It is taken at each position (`mean_over="examples"`) when all of them are as long as the prompts that are edited,
    and over all their tokens but the first (`"tokens"`) when lengths differ.
    """

    copies = BATCH + 1

    def __init__(self, given: ReplacementInputs):
        super().__init__(given)
        pool = self.pool
        one_length = len({len(prompt) for prompt in (*pool, *given.base)}) == 1
        if any(site.has_keys for site in given.sites) and not one_length:
            raise InputError("A mean of attention patterns needs prompts of one length; these differ.")
        if not one_length and all(len(prompt) < 2 for prompt in pool):
            raise InputError(
                "A mean over tokens leaves out each prompt's first; dataset= has prompts of one token only."
            )
        if one_length and len({prompt.ids for prompt in pool}) == 1:
            raise InputError(
                f"values='mean' was asked for over {len(pool)} prompt{'s' * (len(pool) > 1)} with the same tokens: at "
                "each position the mean is that prompt's own activation. Give several prompts, or dataset= with others."
            )
        self.mean_over = "examples" if one_length else "tokens"
        self._means: dict[Place, Tensor] = {}

    @property
    def label(self) -> str:
        """Over what the mean is."""
        return f"mean over {self.mean_over}"

    def values(self, wanted: ValueRequest) -> Mapping[Place, Tensor]:
        """Return each mean for every example, and where it is one over tokens, for every position."""
        if missing := tuple(place for place in wanted.places if place not in self._means):
            self._take_means(ValueRequest(wanted.model, wanted.examples, wanted.width, missing, {}, wanted.sites))
        n, by_position = len(wanted.examples), self.mean_over == "examples"
        means = {place: self._means[place] for place in wanted.places}
        return {
            place: mean.expand(n, *mean.shape) if by_position else mean.expand(n, wanted.width, *mean.shape)
            for place, mean in means.items()
        }

    def _take_means(self, wanted: ValueRequest) -> None:
        """Run the data set once and add up each activation."""
        sums: dict[Place, Tensor] = {}
        count = 0
        for start in range(0, len(self.pool), BATCH):
            numbers = range(start, min(start + BATCH, len(self.pool)))
            lengths = [len(self.pool[i]) for i in numbers]
            held = self.runs(wanted, numbers)
            by_position = self.mean_over == "examples"
            count += len(numbers) if by_position else sum(lengths) - len(numbers)
            for place, activation in held.items():
                added = activation.double().sum(0) if by_position else _sum_over_tokens(activation, lengths)
                sums[place] = sums[place] + added if place in sums else added
        self._means |= {place: (total / count).to(wanted.model.dtype) for place, total in sums.items()}


@VALUES.add("resample")
class Resample(_OfDataset):
    """For each prompt, the activations of another prompt of the data set, drawn by lot.

    One with as many tokens, token for token; or, where positions are named by role, one with as many tokens in each
    role, role for role.
    """

    copies = 1
    labelled = False

    def __init__(self, given: ReplacementInputs):
        super().__init__(given)
        generator = torch.Generator().manual_seed(given.seed)
        by_role = given.roles is not None and not any(site.has_keys for site in given.sites)
        self._roles = self._of_pool(given.roles) if given.roles is not None and by_role else None
        self.donors: list[int] = []
        for i, prompt in enumerate(given.base):
            fitting = [j for j, donor in enumerate(self.pool) if donor.ids != prompt.ids and self._fits(i, j)]
            if not fitting:
                same = "tokens in each role" if self._roles is not None else f"tokens as prompt {i} ({len(prompt)})"
                raise InputError(
                    f"No other prompt has as many {same}: the activations of prompt {i} cannot be resampled. Give a "
                    "dataset= with prompts that have."
                )
            self.donors.append(fitting[int(torch.randint(len(fitting), (1,), generator=generator))])

    def _of_pool(self, roles: Roles) -> Sequence[Mapping[str, Sequence[int]]]:
        """Return by prompt of the data set what its roles are; of the edited prompts they are known."""
        where = self.given.arguments.get("positions") or roles.where
        if self.given.dataset is None and where is roles.where:
            return roles.at
        try:
            found = [roles_of(where, donor, j, len(self.pool)) for j, donor in enumerate(self.pool)]
        except InputError as error:
            raise InputError(
                f"Roles of the prompts to resample from: {error} hw.resample(prompts, positions={{...}}) names them."
            ) from None
        if set(found[0]) != set(roles.where):
            raise InputError(
                f"hw.resample(..., positions=) names the roles {', '.join(found[0])}; those that are edited are "
                f"{', '.join(roles.where)}."
            )
        return found

    def _fits(self, i: int, j: int) -> bool:
        if self._roles is None or self.given.roles is None:
            return len(self.pool[j]) == len(self.given.base[i])
        own = self.given.roles.at[i // self.given.draws]
        return all(len(own[role]) == len(at) for role, at in self._roles[j].items())

    def values(self, wanted: ValueRequest) -> Mapping[Place, Tensor]:
        """Run the prompts that were drawn; by role, lay their tokens where those of the edited prompts stand."""
        drawn = self.runs(wanted, [self.donors[i] for i in wanted.examples])
        if self._roles is None or self.given.roles is None:
            return drawn
        index = torch.zeros(len(wanted.examples), wanted.width, dtype=torch.long)
        for row, example in enumerate(wanted.examples):
            own, donors = self.given.roles.at[example // self.given.draws], self._roles[self.donors[example]]
            for role, at in own.items():
                index[row, list(at)] = torch.tensor(list(donors[role]))
        rows = torch.arange(len(index))[:, None]
        return {place: activation[rows, index] for place, activation in drawn.items()}


@checked_call
def mean(prompts: Prompts) -> ReplacementSpec:
    """Values: the mean over prompts, at each position where all are of one length, else over all tokens but the first.

    The same as `values="mean"` with `dataset=`.

    Args:
        prompts: several; the mean over one prompt is that prompt's own activation and is refused.
    """
    return ReplacementSpec("mean", {"prompts": prompts})


@checked_call
def resample(prompts: Prompts, seed: int = 0, *, positions: Where | None = None) -> ReplacementSpec:
    """Values: for each prompt, the activations of another one of these, drawn by lot.

    The same as `values="resample"` with `dataset=` and `seed=`.

    Args:
        prompts: to draw from. For each prompt that is edited, one of other tokens at least, and of its length; or,
            where the sweep's positions are named by role, one of any length with as many tokens in each role.
        seed: of the draw.
        positions: what the roles are in these prompts, by the same names; default: as they are named for the prompts
            that are edited, such as `"last"` or a function.

    Raises:
        InputError: the seed is none.
    """
    given = {"prompts": prompts, "seed": checked_seed(seed)}
    return ReplacementSpec("resample", given if positions is None else given | {"positions": positions})


def _sum_over_tokens(activation: Tensor, lengths: Sequence[int]) -> Tensor:
    """Add up an activation, `prompt position ...`, over all tokens but each prompt's first."""
    return torch.stack([activation[i, 1:length].double().sum(0) for i, length in enumerate(lengths)]).sum(0)


def capture(
    model: HookedModel,
    batch: Batch,
    names: Sequence[str],
    keep: Int[Tensor, " kept"] | None = None,
    before: Sequence[Hook] = (),
) -> tuple[dict[str, Tensor], Tensor]:
    """Run prompts; return the named activations and the logits at the kept columns (without any, the last residual).

    `before` are hooks that act before anything is kept.

    Raises:
        NumericsError: the model computes NaN or infinity anywhere, kept or not.
    """
    held: dict[str, Tensor] = {}

    def hold(activation: Tensor, hook: object, name: str) -> None:
        held[name] = activation.clone()

    n_layers = model.shape.n_layers
    last = main_site(Stage.BLOCK_OUTPUT).hook_name(n_layers - 1)
    hooks = [(name, read_hook(partial(hold, name=name))) for name in dict.fromkeys([*names, last])]
    with model.lock:
        out = model.run(batch, [*before, *hooks], keep=keep, stop_at=n_layers if keep is None else None)
        finite_output(model, held[last], batch, None)
    return held, out
