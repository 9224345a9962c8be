"""The two runs of each pair: which of them is edited, which is the other, and what of the one is what of the other.

A pair is two prompts; or one prompt, clean and with noise at the embeddings of some of its tokens, several times over
(`headwater.patching.changes`); or, where values come from elsewhere, one prompt alone. Its two runs are called `base`,
which is edited, and `other`, which values may come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from headwater.errors import InputError
from headwater.models.edits import Hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Prompt, Where
from headwater.models.sites import Site
from headwater.models.tokens import Batch, pad_id
from headwater.patching.corruption import Corruption, corruption_of
from headwater.patching.edits import ReplacementSpec
from headwater.patching.prompts import (
    AlignedSpan,
    aligned_spans,
    first_difference,
    matched_tokens,
    prompt_options,
    read_pairs,
    read_prompts,
    refuse_other_order,
    spans_by_role,
)

DirectionName: TypeAlias = Literal["denoise", "noise"]
DIRECTIONS = get_args(DirectionName)
Side: TypeAlias = Literal["base", "other"]


@dataclass(frozen=True, eq=False)
class PromptPair:
    """The runs of a sweep: those of the clean prompts, and of the corrupted ones if there are any.

    An example is one pair: a prompt of the caller's or, with noise, one of its draws.
    """

    clean: tuple[Prompt, ...]
    corrupted: tuple[Prompt, ...] | None = None
    direction: DirectionName | str = "noise"
    """`denoise` edits the corrupted runs, `noise` the clean ones."""
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
        """By example: the prompt whose run is edited."""
        return tuple(prompt for prompt in self.prompts for _ in range(self.draws))

    @cached_property
    def other(self) -> tuple[Prompt, ...] | None:
        """By example: the other prompt; of noise the same text, which is another run."""
        return self.others if self.corruption is None else self.base

    @property
    def sides(self) -> tuple[Side, ...]:
        """The runs that there are."""
        return ("base",) if self.other is None else ("base", "other")

    def of(self, side: Side) -> tuple[Prompt, ...]:
        """By example: the prompt of one side."""
        found = self.base if side == "base" else self.other
        assert found is not None
        return found

    def is_clean(self, side: Side) -> bool:
        """Whether a side is the clean runs."""
        return (side == "base") == self.base_is_clean

    @cached_property
    def first_differences(self) -> tuple[int, ...]:
        """By example: the first position at which its two runs differ. Until there they are one."""
        if self.corruption is not None:
            return self.corruption.starts()
        assert self.other is not None
        return tuple(first_difference(*pair) for pair in zip(self.base, self.other, strict=True))

    def batch(self, model: HookedModel, examples: range, *sides: Side) -> Batch:
        """The prompts of one side after those of another, each called by its example and, of a pair, its side."""
        # Sides one after the other, as `Group.corrupting` and the recorded halves count on.
        ids = [self.of(side)[i].ids for side in sides for i in examples]
        batch = Batch.of(ids, pad_id(model.tokenizer))
        if self.other is None:
            return batch.named(examples)
        kinds = ["clean" if self.is_clean(side) else "corrupted" for side in sides]
        if self.corruption is None:
            return batch.named(f"{i} ({kind} prompt)" for kind in kinds for i in examples)
        draws = [divmod(i, self.draws) for i in examples]
        return batch.named(f"{i} ({kind} run, sample {draw})" for kind in kinds for i, draw in draws)

    def corrupting(self, examples: range, *sides: Side, rows: Sequence[int] | None = None) -> list[Hook]:
        """The hooks that make of a `batch`, or of some rows of it, the runs that are meant, edits apart."""
        noisy = [None if self.is_clean(side) else i for side in sides for i in examples]
        noisy = noisy if rows is None else [noisy[row] for row in rows]
        if self.corruption is None or all(example is None for example in noisy):
            return []
        return [self.corruption.hook(noisy)]

    def spans(self, where: Where, *, in_base: bool = False) -> list[dict[str, AlignedSpan]]:
        """By prompt: what positions are in both runs, by role; by an empty name where they are not named by role.

        Prompts that have the same ones share one object. `in_base`: positions of the edited prompt alone.
        """
        others: Sequence[Prompt | None] = [None] * len(self.prompts) if in_base or not self.others else self.others
        side, n = 0 if self.base_is_clean else 1, len(self.prompts)
        known: dict[Hashable, dict[str, AlignedSpan]] = {}
        if isinstance(where, Mapping):
            pairs = enumerate(zip(self.prompts, others, strict=True))
            found = [spans_by_role(where, *pair, i, n, side) for i, pair in pairs]
        else:
            found = [{"": span} for span in aligned_spans(where, self.prompts, others, side)]
        return [known.setdefault(tuple(one.items()), one) for one in found]

    def matched(
        self,
        spans: Sequence[Mapping[str, AlignedSpan]],
        sites: Iterable[Site],
        keys: Sequence[Mapping[str, AlignedSpan]] | None = None,
    ) -> tuple[Mapping[int, int] | None, ...]:
        """By prompt: which position of the other one each position is that may be edited; None where all are the same.

        Args:
            spans: what may be edited.
            sites: where.
            keys: what the keys are that may be edited, where these are named by role.
        """
        others = self.others or [None] * len(self.prompts)
        keyed = [site.name for site in sites if site.has_keys]
        of_keys = keys if keyed and keys is not None else [{}] * len(self.prompts)
        # Prompts that share their spans share what comes of them, so that 500 prompts of one shape cost as much as one.
        known: dict[tuple[int, int, bool], Mapping[int, int] | None] = {}
        matched = []
        for i, (at, to, base, other) in enumerate(zip(spans, of_keys, self.prompts, others, strict=True)):
            of_one_length = other is None or len(base) == len(other)
            if (same := (id(at), id(to), of_one_length)) not in known:
                pairs = matched_tokens(at, to, i)
                in_place = of_one_length and all(here == there for here, there in pairs.items())
                known[same] = None if in_place else pairs
            matched.append(known[same])
        moved = [i for i, one in enumerate(matched) if one is not None]
        if moved and keyed and keys is None:
            raise InputError(
                f"The site {keyed[0]} holds every key of a prompt, and pair {moved[0]} does not align token by token: "
                "give pairs that do, or name the keys by role, as in keys={'subject': (' Rome', ' New York')}."
            )
        for i in moved:
            refuse_other_order(spans[i], of_keys[i], i)
        return tuple(matched)

    def described(self, dataset: Sequence[Prompt] | None) -> dict[str, Any]:
        """Return what the record of a run says of them, with the prompts of a data set."""
        if self.corruption is None:
            return prompt_options(self.clean, self.corrupted, dataset)
        return prompt_options(self.clean, None, dataset) | {"corruption": dataclasses.asdict(self.corruption)}


def read_prompt_pair(
    model: HookedModel,
    clean: Any,
    corrupted: object,
    direction: str,
    *,
    positions: Where = "all",
    by_role: bool | None = None,
) -> PromptPair:
    """Read the prompts of a sweep, as `read_pairs` does, or noise, which may name one of the roles of `positions`."""
    if not isinstance(corrupted, ReplacementSpec):
        return PromptPair(*read_pairs(model, clean, corrupted, by_role=by_role), direction)
    prompts = read_prompts(model, clean)
    return PromptPair(prompts, prompts, direction, corruption_of(model, corrupted, prompts, positions))
