"""What edits write from the runs of a data set.

mean        the mean over its prompts
resample    the activations of another of its prompts, drawn by lot
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.models.positions import Where, roles_of
from headwater.options import checked_seed
from headwater.patching.prompts import Prompts
from headwater.patching.values import VALUES, Given, Recipe, Roles, Source, Wanted
from headwater.patching.variants import Place

BATCH = 16
"""Prompts of a data set that are run at once."""


class _OfDataset(Source):
    """Values from the runs of a data set; without one, of the prompts that are edited."""

    takes_dataset = True
    of_prompts = True

    def __init__(self, given: Given):
        super().__init__(given)
        self.pool = given.dataset if given.dataset is not None else given.base[:: given.draws]

    def runs(self, wanted: Wanted, numbers: Sequence[int]) -> dict[Place, Tensor]:
        """Run some prompts of the data set, by number."""
        return wanted.of_runs([self.pool[i] for i in numbers], [f"{i} of the data set" for i in numbers])


@VALUES.add("mean")
class Mean(_OfDataset):
    """The mean over the prompts of a data set.

    It is taken at each position (`mean_over="examples"`) when all of them are as long as the prompts that are edited,
    and over all their tokens but the first (`"tokens"`) when lengths differ.
    """

    copies = BATCH + 1

    def __init__(self, given: Given):
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

    def values(self, wanted: Wanted) -> Mapping[Place, Tensor]:
        """Return each mean for every example, and where it is one over tokens, for every position."""
        if missing := tuple(place for place in wanted.places if place not in self._means):
            self._take_means(Wanted(wanted.model, wanted.examples, wanted.width, missing, {}, wanted.sites))
        n, by_position = len(wanted.examples), self.mean_over == "examples"
        means = {place: self._means[place] for place in wanted.places}
        return {
            place: mean.expand(n, *mean.shape) if by_position else mean.expand(n, wanted.width, *mean.shape)
            for place, mean in means.items()
        }

    def _take_means(self, wanted: Wanted) -> None:
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

    def __init__(self, given: Given):
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

    def values(self, wanted: Wanted) -> Mapping[Place, Tensor]:
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
def mean(prompts: Prompts) -> Recipe:
    """Values: the mean over prompts, at each position where all are of one length, else over all tokens but the first.

    The same as `values="mean"` with `dataset=`.

    Args:
        prompts: several; the mean over one prompt is that prompt's own activation and is refused.
    """
    return Recipe("mean", {"prompts": prompts})


@checked_call
def resample(prompts: Prompts, seed: int = 0, *, positions: Where | None = None) -> Recipe:
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
    return Recipe("resample", given if positions is None else given | {"positions": positions})


def _sum_over_tokens(activation: Tensor, lengths: Sequence[int]) -> Tensor:
    """Add up an activation, `prompt position ...`, over all tokens but each prompt's first."""
    return torch.stack([activation[i, 1:length].double().sum(0) for i, length in enumerate(lengths)]).sum(0)
