"""Where replaced activations take their values from: the other run, zero, a mean, or a prompt drawn by lot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.sites import SITES
from headwater.models.tokens import Batch, pad_id
from headwater.options import checked_name
from headwater.patching.prompts import Prompt
from headwater.patching.variants import Values
from headwater.patching.whole import capture

KINDS = ("other run", "zero", "mean", "resample")
BATCH = 16


@dataclass(frozen=True, eq=False)
class Source:
    """One of the four kinds of values.

    The mean is over the prompts of the data set at each position (`mean_over="examples"`) when all of them are as long
    as the prompts that are edited, and over all their tokens but the first (`"tokens"`) when lengths differ.
    """

    kind: str
    dataset: tuple[Prompt, ...] = ()
    mean_over: str = "examples"
    donors: tuple[int, ...] = ()
    """For `resample`: by example, the prompt of the data set whose run gives its values."""
    _means: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    @property
    def label(self) -> dict[str, str]:
        """What the table says of the values: over what a mean is."""
        return {"values": f"mean over {self.mean_over}"} if self.kind == "mean" else {}

    @property
    def is_other_run(self) -> bool:
        """Whether values are the other prompt's own activations."""
        return self.kind == "other run"

    def values(self, model: HookedModel, examples: range, width: int, wanted: set[tuple[str, int]]) -> Values:
        """Return the values of the wanted sites and layers for a group of examples, the longest of `width` tokens."""
        if self.kind == "zero":
            return Values({key: _zeros(model, key[0], len(examples), width) for key in wanted})
        names = {key: SITES[key[0]].hook_name(key[1]) for key in wanted}
        if self.kind == "resample":
            held, _ = capture(model, self._batch(model, [self.donors[i] for i in examples]), list(names.values()))
            return Values({key: held[name] for key, name in names.items()})
        self._take_means(model, {key: name for key, name in names.items() if key not in self._means})
        return Values({key: self._spread(self._means[key], len(examples), width) for key in wanted})

    def _batch(self, model: HookedModel, numbers: Sequence[int]) -> Batch:
        """Some prompts of the data set, by number."""
        batch = Batch.of([self.dataset[i].ids for i in numbers], pad_id(model.tokenizer))
        return batch.named(f"{i} of the data set" for i in numbers)

    def _take_means(self, model: HookedModel, names: dict[tuple[str, int], str]) -> None:
        """Run the data set once and add up each activation."""
        if not names:
            return
        sums: dict[tuple[str, int], Tensor] = {}
        count = 0
        for start in range(0, len(self.dataset), BATCH):
            part = self.dataset[start : start + BATCH]
            batch = self._batch(model, range(start, start + len(part)))
            held, _ = capture(model, batch, list(names.values()))
            if self.mean_over == "examples":
                count += len(part)
                added = {key: held[name].double().sum(0) for key, name in names.items()}
            else:
                count += sum(len(prompt) - 1 for prompt in part)
                added = {
                    key: torch.stack(
                        [held[name][i, 1 : len(prompt)].double().sum(0) for i, prompt in enumerate(part)]
                    ).sum(0)
                    for key, name in names.items()
                }
            sums = {key: sums[key] + added[key] if key in sums else added[key] for key in names}
        dtype = model.dtype
        self._means.update({key: (total / count).to(dtype) for key, total in sums.items()})

    def _spread(self, mean: Tensor, n_examples: int, width: int) -> Tensor:
        if self.mean_over == "examples":
            return mean.expand(n_examples, *mean.shape)
        return mean.expand(n_examples, width, *mean.shape)


def source_of(
    values: str,
    base: tuple[Prompt, ...],
    other: tuple[Prompt, ...] | None,
    dataset: tuple[Prompt, ...] | None,
    sites: Sequence[str],
    seed: int,
) -> Source:
    """Make the source that a sweep asked for.

    Raises:
        InputError: there is no such kind, or the prompts do not allow it.
    """
    checked_name("values", values, KINDS)
    if values == "other run" and other is None:
        raise InputError(
            "Values from the other run were asked for, but there are no corrupted prompts. Give them, or "
            "values='zero', 'mean' or 'resample'."
        )
    if values in ("other run", "zero"):
        return Source(values)
    pool = dataset if dataset is not None else base
    if values == "mean":
        one_length = len({len(prompt) for prompt in (*pool, *base)}) == 1
        if "pattern" in sites and not one_length:
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
        return Source(values, pool, mean_over="examples" if one_length else "tokens")
    generator = torch.Generator().manual_seed(seed)
    donors = []
    for i, prompt in enumerate(base):
        fitting = [j for j, donor in enumerate(pool) if len(donor) == len(prompt) and donor.ids != prompt.ids]
        if not fitting:
            raise InputError(
                f"No other prompt has as many tokens as prompt {i} ({len(prompt)}): its activations cannot be "
                "resampled. Give a dataset= with prompts of this length."
            )
        donors.append(fitting[int(torch.randint(len(fitting), (1,), generator=generator))])
    return Source(values, pool, donors=tuple(donors))


def _zeros(model: HookedModel, site: str, n: int, width: int) -> Tensor:
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    return zero.expand(n, *SITES[site].size(model.shape, width))
