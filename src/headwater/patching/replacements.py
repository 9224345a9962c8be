"""The values that edits write: the kinds of replacements, and how each computes its values.

    other run   the other prompt's own activations
    zero        zeros
    mean        the mean over the prompts of a data set
    resample    the activations of another of its prompts, drawn at random

and those computed from the activation itself (`headwater.patching.changes`): a function, a tensor, a direction added, a
factor, noise.

A kind is a class and a row of `VALUES`. It is instantiated once per sweep and may refuse its inputs then. For each
group of examples it receives a `ValueRequest`, and takes the activations from the other run, from runs of its own
(`ValueRequest.of_runs`), or needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, did_you_mean
from headwater.models.edits import Hook, keeping
from headwater.models.forward import finite_output
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where, roles_of
from headwater.models.sites import Site, Stage, main_site
from headwater.models.tokens import Batch, pad_id
from headwater.options import shown
from headwater.patching.edits import EditedRows, Place, ReplacementSpec, ReplacementValues
from headwater.patching.prompts import BATCH, PromptPair, Prompts, read_prompts
from headwater.registry import Registry

TensorLike: TypeAlias = Tensor | np.ndarray | Sequence[Any]
ValueName: TypeAlias = Literal["other run", "zero", "mean", "resample"]
WITH_ARGUMENTS = "hw.add(direction), hw.scale(factor), hw.noise(std), hw.mean(prompts), hw.resample(prompts)"
NOT_WRITTEN, LEFT, CHANGED = range(3)
"""Outcomes of computed values so far: none was computed yet, every row was left unchanged, or some row was changed."""


@dataclass(frozen=True)
class ReplacementInputs:
    """The inputs that a sweep, or an edit, passes to a kind of replacement."""

    kind: str
    """The name of the requested kind."""
    pair: PromptPair
    sites: tuple[Site, ...]
    """The sites that it is written at."""
    dataset: tuple[Prompt, ...] | None = None
    """The prompts passed as `dataset=`."""
    seed: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The caller's arguments of the kind, such as a factor."""
    roles: Mapping[str, Any] | None = None
    """The edited positions by role, if they were named by role."""


@dataclass(frozen=True)
class ValueRequest:
    """The values that a group of examples requests from a replacement: `example position ...` at each place."""

    model: HookedModel
    examples: Sequence[int]
    lengths: Sequence[int]
    """Number of tokens of each example's prompt, in generation with the tokens generated so far."""
    places: tuple[Place, ...]
    other: Mapping[Place, Tensor]
    """The other run's activations, for kinds that take them."""
    sites: Mapping[str, Site]
    """The sites of the places, by name."""

    @property
    def width(self) -> int:
        """Number of tokens of the longest example."""
        return max(self.lengths)

    def of_runs(self, prompts: Sequence[Prompt], names: Sequence[int | str]) -> dict[Place, Tensor]:
        """Run prompts, named so in error messages, and return their activations at each place."""
        batch = Batch.of([prompt.ids for prompt in prompts], pad_id(self.model.tokenizer)).named(names)
        hooks = {(site, layer): self.sites[site].hook_name(layer) for site, layer in self.places}
        activations, _ = capture(self.model, batch, list(dict.fromkeys(hooks.values())))
        return {place: self.sites[place[0]].read(activations[name]) for place, name in hooks.items()}


class Replacement(ABC):
    """A kind of values, made for one sweep or edit. It may refuse its inputs when it is made."""

    takes_other_run: bool = False
    """Whether it requests the other run's activations."""
    takes_dataset: ClassVar[bool] = False
    """Whether it can use `dataset=`."""
    labelled: ClassVar[bool] = True
    """Whether the table has a column `values` with its label."""
    of_prompts: ClassVar[bool] = False
    """Whether it depends on which prompts are edited: `hw.edit` then requires them."""
    is_control: bool = False
    """Whether it is meant to change nothing: a dose of zero."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the arguments that the caller must pass; with any, the kind's name alone is not enough."""
    changes: ClassVar[bool] = False
    """Whether `changed` computes it from the current activation."""
    mean_over: str | None = None
    """What a mean is taken over: examples or tokens."""
    samples: int | None = None
    """Number of draws (if any): each draw is a separate cell; `values` returns an example's draws in turn."""

    def __init__(self, inputs: ReplacementInputs):
        self.inputs = inputs
        self.outcome = NOT_WRITTEN

    @abstractmethod
    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Return the values at every requested place, one row per example, over all of its positions."""

    def changed(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Return the values that replace `activation`, `row width`, for kinds that set `changes`.

        The activation is a copy of the current one, after the edits of earlier layers; `other` is from `values`.
        """
        raise NotImplementedError

    def written(self, activation: Tensor, other: Tensor | None, rows: EditedRows) -> Tensor:
        """Return `changed`, and record whether it ever differed from the rows themselves."""
        changed = self.changed(activation, other, rows)
        # Compared until the first difference: once a row has changed, no other comparison is needed.
        if self.outcome != CHANGED and len(rows):
            self.outcome = LEFT if torch.equal(changed, activation) else CHANGED
        return changed

    def changed_tokens(self, example: int) -> tuple[int, ...] | None:
        """Return the tokens at which an example's two runs begin to differ, if its values are the other run's."""
        return None

    def since(self, example: int) -> int:
        """Return the position before which the values of an example equal those of its own run."""
        return min(self.changed_tokens(example) or (0,))

    @property
    def covers_new_tokens(self) -> bool:
        """Whether it has values for generated tokens."""
        return True

    @property
    def label(self) -> str | None:
        """The values' label in the table's column `values` (if any)."""
        return self.inputs.kind if self.labelled else None

    def labels(self, sample: int) -> dict[str, Any]:
        """Return the labels of the values in a cell of the table: their label and, if drawn, the number of the draw."""
        labels: dict[str, Any] = {"values": self.label} if self.label else {}
        return labels if self.samples is None else labels | {"sample": sample}

    @property
    def described(self) -> Any:
        """Description for the record of a run: the name with the arguments; for a kind that the caller added, its code.

        The prompts of a data set are not included: they are among the run's prompts.
        """
        kind, arguments = self.inputs.kind, {k: v for k, v in self.inputs.arguments.items() if k != "prompts"}
        if kind in get_args(ValueName):
            return {kind: arguments} if arguments else kind
        return {kind: arguments if VALUES[kind].__module__.startswith("headwater.") else type(self)}


VALUES: Registry[str, type[Replacement]] = Registry(
    "kind of values", "headwater.patching.replacements", "headwater.patching.changes"
)
"""The kinds of values that `values=` may name."""


@VALUES.add("other run")
class OtherRun(Replacement):
    """The other prompt's own activations."""

    takes_other_run = True
    of_prompts = True
    labelled = False

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        if inputs.pair.other is None:
            raise InputError(
                "Values from the other run were requested, but there are no corrupted prompts. Give them, or "
                "values='zero', 'mean' or 'resample'; a file of pairs is given as a pathlib.Path."
            )

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Return the other run's activations."""
        return request.other

    def changed_tokens(self, example: int) -> tuple[int, ...] | None:
        """Return the tokens that differ; None if writing equal values back changes something."""
        pair = self.inputs.pair
        if not all(site.is_lossless for site in self.inputs.sites):
            return None
        if pair.corruption is not None:
            return pair.corruption.at[example // pair.draws]
        assert pair.other is not None
        tokens = zip(pair.base[example].ids, pair.other[example].ids, strict=True)
        return tuple(i for i, (ours, theirs) in enumerate(tokens) if ours != theirs)


@VALUES.add("zero")
class Zero(Replacement):
    """Zeros."""

    labelled = False

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Return zeros that take no memory."""
        zero = torch.zeros((), dtype=request.model.dtype, device=request.model.device)
        n, shape = len(request.examples), request.model.shape
        return {place: zero.expand(n, *request.sites[place[0]].size(shape, request.width)) for place in request.places}


def checked_tensor(option: str, value: Any) -> Tensor:
    """Return a copy of a tensor, of an array of another library, or of a list of numbers."""
    try:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):  # numpy cannot convert it, or torch cannot convert numpy's array
        tensor = torch.empty(0)
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_complex()
    if not (is_plain and tensor.ndim and tensor.numel()):
        raise InputError(
            f"{option}={shown(value)} is not a tensor, array or list of numbers, dense, with one axis at least."
        )
    if not bool(tensor.isfinite().all()):
        raise InputError(f"The tensor given as {option} has NaN or infinity in it.")
    # A copy: the record has its digest, which must remain the digest of the written values.
    return tensor.detach().clone()


def replacement_spec(values: object) -> ReplacementSpec:
    """Convert the argument `values=` to a spec."""
    if isinstance(values, ReplacementSpec):
        return values
    if isinstance(values, list | tuple) or hasattr(values, "__array__"):
        return ReplacementSpec("tensor", {"tensor": checked_tensor("values", values)})
    if callable(values) and not isinstance(values, type):
        name = getattr(values, "__name__", "")
        if name in VALUES and str(values.__module__).startswith("headwater."):
            raise InputError(f"values=hw.{name} is a function that makes values: call it, as in {WITH_ARGUMENTS}.")
        return ReplacementSpec("function", {"function": values})
    kinds = tuple(name for name, row in VALUES.items() if not row.needs)
    if not isinstance(values, str) or values not in kinds:
        near = did_you_mean(values, kinds, or_all=False)
        raise InputError(
            f"values={shown(values)} is not one of {', '.join(kinds)}, nor {WITH_ARGUMENTS}, a tensor or a "
            f"function.{near}"
        )
    return ReplacementSpec(values, {})


def build_replacement(
    model: HookedModel,
    values: object,
    dataset: Prompts | None,
    pair: PromptPair,
    sites: tuple[Site, ...],
    seed: int = 0,
    *,
    positions: Where = "all",
) -> Replacement:
    """Build the replacement for `values=`, with `dataset=` and `seed=`, for edits at these positions."""
    spec = replacement_spec(values)
    kind, roles = VALUES[spec.kind], positions if isinstance(positions, Mapping) else None
    if "positions" in spec.arguments and roles is None and spec.kind == "resample":
        raise InputError("hw.resample(..., positions=) names roles, but the edited positions have none.")
    if "prompts" in spec.arguments and dataset is not None:
        raise InputError(f"values=hw.{spec.kind}(prompts) and dataset= both give prompts; give one of them.")
    prompts = spec.arguments.get("prompts", dataset)
    if prompts is not None and not kind.takes_dataset:
        takers = " or ".join(repr(name) for name, row in VALUES.items() if row.takes_dataset)
        raise InputError(f"dataset= was given, but values={spec.kind!r} does not use it; use {takers}.")
    pool = read_prompts(model, prompts) if prompts is not None else None
    seed = int(spec.arguments.get("seed", seed))
    replacement = kind(ReplacementInputs(spec.kind, pair, sites, pool, seed, spec.arguments, roles))
    if pair.corruption is not None and replacement.samples is not None:
        raise InputError("corrupted= and values= are both hw.noise: a cell would have two draws. Give one of them.")
    return replacement


def compute_values(replacement: Replacement, request: ValueRequest) -> ReplacementValues:
    """Return the values that edits write at the examples of a group, or a function of the activation for some kinds."""
    # Draws of one prompt are separate examples: functions receive the index of the caller's prompt.
    known = [example // replacement.inputs.pair.draws for example in request.examples]
    change = replacement.written if replacement.changes else None
    return ReplacementValues(replacement.values(request), change, known, request.lengths, replacement.samples or 1)


class _OfDataset(Replacement):
    """Values from the runs of a data set; by default, of the prompts that are edited."""

    takes_dataset = True
    of_prompts = True

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        self.pool = inputs.dataset if inputs.dataset is not None else inputs.pair.prompts

    @property
    def covers_new_tokens(self) -> bool:
        """Whether it is one mean for all tokens: other values are those of the other prompts' own tokens."""
        return self.mean_over == "tokens"

    def runs(self, request: ValueRequest, numbers: Sequence[int]) -> dict[Place, Tensor]:
        return request.of_runs([self.pool[i] for i in numbers], [f"{i} of the data set" for i in numbers])


@VALUES.add("mean")
class Mean(_OfDataset):
    """The mean over the prompts of a data set.

    It is taken at each position (`mean_over="examples"`) if all of them are as long as the prompts that are edited, and
    over all their tokens except the first (`"tokens"`) if lengths differ.
    """

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        pool = self.pool
        one_length = len({len(prompt) for prompt in (*pool, *inputs.pair.base)}) == 1
        if any(site.has_keys for site in inputs.sites) and not one_length:
            raise InputError("A mean of attention patterns needs prompts of one length; these differ.")
        if not one_length and all(len(prompt) < 2 for prompt in pool):
            raise InputError(
                "A mean over tokens leaves out each prompt's first token: give a dataset= with longer prompts."
            )
        if one_length and len({prompt.ids for prompt in pool}) == 1:
            same = f"{len(pool)} prompts with the same tokens is their" if len(pool) > 1 else "one prompt is its"
            raise InputError(
                f"values='mean': the mean over {same} own activation. Give several prompts, or dataset= with others."
            )
        self.mean_over = "examples" if one_length else "tokens"
        # Kept for the whole sweep: every group of examples requests the same places.
        self._means: dict[Place, Tensor] = {}

    @property
    def label(self) -> str:
        """The label: what the mean is taken over."""
        return f"mean over {self.mean_over}"

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Return each mean for every example and, for a mean over tokens, for every position."""
        by_position = self.mean_over == "examples"
        if missing := tuple(place for place in request.places if place not in self._means):
            of_missing = replace(request, places=missing, other={})
            sums: dict[Place, Tensor] = {}
            for start in range(0, len(self.pool), BATCH):
                numbers = range(start, min(start + BATCH, len(self.pool)))
                for place, activation in self.runs(of_missing, numbers).items():
                    each = activation.double()
                    if not by_position:
                        rows = zip(each, (len(self.pool[i]) for i in numbers), strict=True)
                        each = torch.stack([one[1:length].sum(0) for one, length in rows])
                    sums[place] = sums[place] + each.sum(0) if place in sums else each.sum(0)
            # Over tokens, one less per prompt: its first token is not in the sum.
            count = len(self.pool) if by_position else sum(len(prompt) - 1 for prompt in self.pool)
            self._means |= {place: (total / count).to(request.model.dtype) for place, total in sums.items()}
        size = (len(request.examples),) if by_position else (len(request.examples), request.width)
        return {place: self._means[place].expand(*size, *self._means[place].shape) for place in request.places}


@VALUES.add("resample")
class Resample(_OfDataset):
    """For each prompt, the activations of another prompt of the data set, drawn at random.

    The other prompt has the same number of tokens, matched token for token; or, if positions are named by role, the
    same number of tokens in each role, matched role for role.
    """

    labelled = False

    def __init__(self, inputs: ReplacementInputs):
        super().__init__(inputs)
        pair, generator = inputs.pair, torch.Generator().manual_seed(inputs.seed)
        # The roles of each prompt. Without named roles, one role of all its tokens.
        self._edited: Sequence[Mapping[str, Sequence[int]]] = [{"": range(len(prompt))} for prompt in pair.prompts]
        self._roles: Sequence[Mapping[str, Sequence[int]]] = [{"": range(len(donor))} for donor in self.pool]
        self._by_role = inputs.roles is not None and not any(site.has_keys for site in inputs.sites)
        if inputs.roles is not None and self._by_role:
            self._edited = [{role: s.base for role, s in spans.items()} for spans in pair.spans(inputs.roles)]
            where = inputs.arguments.get("positions") or inputs.roles
            self._roles = self._edited
            if inputs.dataset is not None or where is not inputs.roles:
                try:
                    self._roles = [roles_of(where, donor, j, len(self.pool)) for j, donor in enumerate(self.pool)]
                except InputError as error:
                    raise InputError(
                        f"Prompts to resample from: {error} hw.resample(prompts, positions={{...}}) names their roles."
                    ) from None
        needed, offered = (
            [{role: len(at) for role, at in roles.items()} for roles in some] for some in (self._edited, self._roles)
        )
        # Drawn here, for all prompts in order: the same donors whichever groups or pieces a process measures.
        self.donors: list[int] = []
        for i, prompt in enumerate(pair.base):
            fits = [size == needed[i // pair.draws] for size in offered]
            fitting = [j for j, donor in enumerate(self.pool) if fits[j] and donor.ids != prompt.ids]
            if not fitting:
                same = f"tokens as prompt {i} ({len(prompt)})"
                if self._by_role:
                    same = f"tokens in each role as prompt {i} ({needed[i // pair.draws]})"
                raise InputError(
                    f"No other prompt has as many {same}: its activations cannot be resampled. Give dataset= with such "
                    "prompts, or name the roles in them by hw.resample(prompts, positions={...})."
                )
            self.donors.append(fitting[int(torch.randint(len(fitting), (1,), generator=generator))])

    def values(self, request: ValueRequest) -> Mapping[Place, Tensor]:
        """Run the drawn prompts; with roles, move their tokens to the positions of the edited prompts' tokens."""
        drawn = self.runs(request, [self.donors[i] for i in request.examples])
        if not self._by_role:
            return drawn
        index = torch.zeros(len(request.examples), request.width, dtype=torch.long)
        for row, example in enumerate(request.examples):
            donor = self._roles[self.donors[example]]
            for role, at in self._edited[example // self.inputs.pair.draws].items():
                index[row, list(at)] = torch.tensor(list(donor[role]))
        rows = torch.arange(len(index))[:, None]
        return {place: activation[rows, index] for place, activation in drawn.items()}


@checked_call
def mean(prompts: Prompts) -> ReplacementSpec:
    """Values: the mean over prompts, at each position if all have one length, else over all tokens except the first.

    The same as `values="mean"` with `dataset=`.

    Args:
        prompts: several; the mean over one prompt is that prompt's own activation and is refused.
    """
    return ReplacementSpec("mean", {"prompts": prompts})


@checked_call
def resample(prompts: Prompts, seed: int | None = None, *, positions: Where | None = None) -> ReplacementSpec:
    """Values: for each prompt, the activations of another one of these, drawn at random.

    The same as `values="resample"` with `dataset=` and `seed=`.

    Args:
        prompts: the prompts to draw from. For each edited prompt, the drawn one differs in its tokens and has the same
            length; or, if the sweep's positions are named by role, any length and as many tokens in each role.
        seed: of the draw; default: the seed of the call.
        positions: the positions of the roles in these prompts, by the same names; default: the positions specified for
            the prompts that are edited, such as `"last"` or a function.
    """
    given = {"prompts": prompts} | ({} if seed is None else {"seed": seed})
    return ReplacementSpec("resample", given if positions is None else given | {"positions": positions})


def capture(
    model: HookedModel,
    batch: Batch,
    names: Sequence[str],
    keep: Int[Tensor, " kept"] | None = None,
    before: Sequence[Hook] = (),
) -> tuple[dict[str, Tensor], Tensor]:
    """Run prompts; return the named activations and the logits at the kept columns (without any, the last residual)."""
    activations: dict[str, Tensor] = {}
    n_layers = model.shape.n_layers
    # Always kept: any non-finite value in a run shows in its last residual stream.
    last = main_site(Stage.BLOCK_OUTPUT).hook_name(n_layers - 1)
    hooks = [*before, *keeping([*names, last], activations)]
    with model.lock:
        out = model.run(batch, hooks, keep=keep, stop_at=n_layers if keep is None else None)
        finite_output(model, activations[last], batch, None)
    return activations, out
