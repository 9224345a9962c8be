"""The two runs of each pair: which of them is edited, which is the other, and what of the one is what of the other.

A pair is two prompts; or one prompt, clean and with noise at the embeddings of some of its tokens, several times over
(`headwater.patching.changes`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt
from headwater.models.sites import Site
from headwater.patching.axes import SweepSpec, matched_positions
from headwater.patching.changes import Corruption, corruption_of
from headwater.patching.prompts import (
    AlignedSpan,
    Prompts,
    matched_tokens,
    prompt_options,
    read_pairs,
    read_prompts,
    refuse_other_order,
)
from headwater.patching.replacements import Replacement, ReplacementSpec, Roles, build_replacement

DirectionName: TypeAlias = Literal["denoise", "noise"]
DIRECTIONS = get_args(DirectionName)


@dataclass(frozen=True, eq=False)
class PromptPair:
    """The runs of a sweep: those of the clean prompts, and of the corrupted ones if there are any."""

    clean: tuple[Prompt, ...]
    corrupted: tuple[Prompt, ...] | None
    direction: str
    corruption: Corruption | None = None
    """Noise that makes the corrupted runs of the clean prompts; else these have texts of their own."""

    @property
    def draws(self) -> int:
        """How many corrupted runs, each a pair, every clean prompt has."""
        return 1 if self.corruption is None else self.corruption.samples

    @property
    def base_is_clean(self) -> bool:
        """Whether the clean runs are edited."""
        return self.direction == "noise" or self.corrupted is None

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts whose runs are edited, each once."""
        return self.clean if self.base_is_clean or self.corrupted is None else self.corrupted

    @property
    def others(self) -> tuple[Prompt, ...] | None:
        """The other prompt of each pair, where it is another text."""
        if self.corrupted is None or self.corruption is not None:
            return None
        return self.corrupted if self.base_is_clean else self.clean

    @cached_property
    def base(self) -> tuple[Prompt, ...]:
        """The prompts whose runs are edited, each once for every draw."""
        return _repeated(self.prompts, self.draws)

    @cached_property
    def other(self) -> tuple[Prompt, ...] | None:
        """The other prompt of each pair, once for every draw; of noise the same text, which is another run."""
        return self.others if self.corruption is None else _repeated(self.prompts, self.draws)

    def spots(self, ask: SweepSpec) -> list[dict[str, AlignedSpan]]:
        """By prompt: what the positions asked for are in both runs, by role."""
        return ask.spots(self.prompts, self.others, 0 if self.base_is_clean else 1)

    def keys(self, ask: SweepSpec) -> list[dict[str, AlignedSpan]]:
        """By prompt: what the keys asked for are in both runs, by role."""
        return ask.key_spots(self.prompts, self.others, 0 if self.base_is_clean else 1)

    def roles(self, ask: SweepSpec, spots: Sequence[Mapping[str, AlignedSpan]]) -> Roles | None:
        """Return positions as values know them, where they were named by role."""
        if not isinstance(ask.positions, Mapping):
            return None
        return Roles(ask.positions, [{role: spot.base for role, spot in one.items()} for one in spots])

    def matched(
        self,
        spots: Sequence[Mapping[str, AlignedSpan]],
        sites: Iterable[Site],
        keys: Sequence[Mapping[str, AlignedSpan]] | None = None,
    ) -> tuple[dict[int, int] | None, ...]:
        """Return by prompt which position of the other one each position is that may be edited (see `Plan.matched`).

        `keys`: what the keys are that may be edited, where these stand by role.

        Raises:
            InputError: they differ, and a site holds keys, for all of which there would have to be a match; or a query
                comes before a key in one prompt of a pair and after it in the other.
        """
        others = self.others or [None] * len(self.prompts)
        keyed = [site.name for site in sites if site.has_keys]
        named = keys if keyed and keys is not None else [{}] * len(self.prompts)
        found: dict[tuple[int, int, bool], dict[int, int] | None] = {}
        matched = []
        for i, (at, to, base, other) in enumerate(zip(spots, named, self.prompts, others, strict=True)):
            aligned = other is None or len(base) == len(other)
            if (alike := (id(at), id(to), aligned)) not in found:
                found[alike] = matched_positions(matched_tokens(at, to, i), aligned)
            matched.append(found[alike])
        unlike = [i for i, one in enumerate(matched) if one is not None]
        if unlike and keyed and keys is None:
            raise InputError(
                f"The site {keyed[0]} holds every key of a prompt, and pair {unlike[0]} does not align token by token: "
                "give pairs that do, or name the keys by role, as in keys={'subject': (' Rome', ' New York')}."
            )
        for i in unlike:
            refuse_other_order(spots[i], named[i], i)
        return tuple(matched)

    def source(
        self,
        model: HookedModel,
        values: object,
        dataset: Prompts | None,
        sites: tuple[Site, ...],
        seed: int,
        roles: Roles | None = None,
    ) -> Replacement:
        """Make what was asked for as `values=` of a sweep of these runs, at positions by role if so.

        Raises:
            InputError: see `build_replacement`; or both the runs and the values are drawn several times.
        """
        noise = self.corruption
        source = build_replacement(
            model,
            values,
            dataset,
            base=self.base,
            other=self.other,
            sites=sites,
            seed=seed,
            draws=self.draws,
            begins=None if noise is None else noise.starts(),
            roles=roles,
        )
        if noise is not None and source.samples is not None:
            raise InputError("corrupted= and values= are both hw.noise: a cell would have two draws. Give one of them.")
        return source

    def described(self, dataset: Sequence[Prompt] | None) -> dict[str, Any]:
        """Return what the record of a run says of them, with the prompts of a data set."""
        noise = self.corruption
        if noise is None:
            return prompt_options(self.clean, self.corrupted, dataset)
        return prompt_options(self.clean, None, dataset) | {"corruption": dataclasses.asdict(noise)}


def read_prompt_pair(model: HookedModel, clean: Any, corrupted: object, ask: SweepSpec, direction: str) -> PromptPair:
    """Read the prompts of a sweep.

    Raises:
        InputError: see `read_pairs` and `corruption_of`.
    """
    if not isinstance(corrupted, ReplacementSpec):
        by_role = None if ask.whole_prompts else ask.by_role
        return PromptPair(*read_pairs(model, clean, corrupted, by_role=by_role), direction)
    prompts = read_prompts(model, clean)
    return PromptPair(prompts, prompts, direction, corruption_of(model, corrupted, prompts, ask.positions))


def _repeated(prompts: Sequence[Prompt], draws: int) -> tuple[Prompt, ...]:
    """Return each prompt so many times, in a tuple of its own: a plan tells its sides apart by which tuple they are."""
    return tuple([prompt for prompt in prompts for _ in range(draws)])
