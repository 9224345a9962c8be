"""A sweep resolved to tokens: its cells, what is read of each, and how they are cut into groups and waves.

A group is some examples whose unedited runs are made together, because what they leave fits in memory; a wave is some
of a group's cells that are measured together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from headwater.errors import InputError
from headwater.models.edits import Hook
from headwater.models.hints import warn_of_missing_spaces
from headwater.models.hooked import HookedModel, check_model
from headwater.models.positions import Prompt, Where, positions_of
from headwater.models.sites import Site, sites_named
from headwater.models.tokens import Batch, pad_id
from headwater.options import checked_count, shown
from headwater.patching.changes import Corruption
from headwater.patching.edits import (
    LOGITS,
    CellTable,
    CellTemplate,
    Cut,
    Edit,
    Place,
    Reading,
    Replace,
    Variant,
    Variants,
)
from headwater.patching.metrics import Metric, answer_ids
from headwater.patching.prompt_pair import PromptPair
from headwater.patching.prompts import AlignedSpan, aligned_spans
from headwater.patching.replacements import Replacement

Kept: TypeAlias = Sequence[tuple[int, ...]]
"""By example: the positions that something reads."""
WAVE_TOKENS = 1 << 15
"""The most tokens that travel down the layers together."""
GROUP_FLOATS = 1 << 26
"""About how many numbers the recorded activations of a group of examples may hold."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a sweep needs, resolved to tokens and positions."""

    model: HookedModel
    base: tuple[Prompt, ...]
    """The prompts whose runs are edited."""
    other: tuple[Prompt, ...] | None
    """The other prompt of each pair."""
    base_is_clean: bool
    cells: CellTable
    metrics: tuple[Metric, ...]
    source: Replacement | None = None
    batch_size: int | None = None
    states: tuple[Reading, ...] = ()
    """Residual-stream states that are wanted themselves, beside what metrics read."""
    states_at: Where = "last"
    matched: tuple[Mapping[int, int] | None, ...] = ()
    """By example: of each position that edits may write, the same one of the other prompt; None, or nothing at all,
    where these are the same numbers."""
    corruption: Corruption | None = None
    """Noise that makes the corrupted runs of the clean prompts, each example with a draw of its own."""
    checked: set[str] = field(default_factory=set)
    """The metrics that were seen to treat each row by itself."""

    def __post_init__(self) -> None:
        n_layers = self.model.shape.n_layers
        for metric in self.metrics:
            try:
                if metric.layer is not None:
                    checked_count("layer", metric.layer, least=0, most=n_layers - 1)
            except InputError:
                raise InputError(
                    f"The metric {metric.name!r} reads layer {metric.layer!r}; they are 0 to {n_layers - 1}."
                ) from None
            if metric.site != LOGITS:
                sites_named(metric.site, self.model)

    @property
    def draws(self) -> int:
        """How many examples in turn stand for one prompt of the caller's, each with other noise."""
        return 1 if self.corruption is None else self.corruption.samples

    @cached_property
    def spots(self) -> tuple[tuple[AlignedSpan, ...], ...]:
        """By example and metric: the positions it reads, in both prompts."""
        others = self.other if self.other is not None and self.corruption is None else [None] * len(self.base)
        side = 0 if self.base_is_clean else 1
        by_metric = [aligned_spans(metric.at, self.base, others, side, self.draws) for metric in self.metrics]
        return tuple(zip(*by_metric, strict=True)) if by_metric else ((),) * len(self.base)

    @cached_property
    def kept(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By example and metric: the positions it reads in the prompt that is edited."""
        return tuple(tuple(spot.base for spot in spots) for spots in self.spots)

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """By example: every position that is read, ascending."""
        pairs = zip(self.base, self.kept, strict=True)
        n, draws = len(self.base) // self.draws, self.draws
        states = [
            positions_of(self.states_at, base, i // draws, n) if self.states else ()
            for i, (base, _) in enumerate(pairs)
        ]
        return tuple(
            tuple(sorted({p for at in (*kept, state) for p in at}))
            for kept, state in zip(self.kept, states, strict=True)
        )

    @cached_property
    def other_positions(self) -> tuple[tuple[int, ...], ...]:
        """By example: the positions of the other prompt that are read as those of `positions` are of the edited one.

        Raises:
            InputError: what two metrics read is one position of one prompt and two of the other.
        """
        found = []
        for i, (spots, positions) in enumerate(zip(self.spots, self.positions, strict=True)):
            same: dict[int, int] = {}
            for spot in spots:
                for here, there in zip(spot.base, spot.other, strict=True):
                    if same.setdefault(here, there) != there:
                        raise InputError(
                            f"The metrics read position {here} of pair {i}, which is {same[here]} of the other prompt "
                            f"for one and {there} for another: name what they read alike."
                        )
            found.append(tuple(same.get(position, position) for position in positions))
        return tuple(found)

    @cached_property
    def answers(self) -> tuple[tuple[Int[Tensor, " example"], ...], ...]:
        """By metric: the token ids of its answers, one per example."""
        model, n = self.model, len(self.base) // self.draws
        ends = [prompt.strings[-1] for prompt in self.base[:: self.draws]]
        at_the_end = [answer for metric in self.metrics if metric.at == "last" for answer in metric.answers]
        of_prompts = [
            [answer_ids(answer, model.tokenizer, n, model.n_logits) for answer in metric.answers]
            for metric in self.metrics
        ]
        for metric, answers in zip(self.metrics, of_prompts, strict=True):
            if metric.name == "logit_difference" and len(answers) == 2:
                _refuse_alike(metric, *answers)
        warn_of_missing_spaces(at_the_end, ends, model.tokenizer)
        return tuple(tuple(ids.repeat_interleave(self.draws) for ids in answers) for answers in of_prompts)

    @property
    def only_answers(self) -> Int[Tensor, "example answer"] | None:
        """The tokens whose logits suffice: the answers of each metric in turn; None where some metric needs all."""
        read = [answers for m, answers in zip(self.metrics, self.answers, strict=True) if m.site == LOGITS]
        if not read or any(metric.needs_all for metric in self.metrics if metric.site == LOGITS):
            return None
        return torch.stack([ids for answers in read for ids in answers], 1)

    def reading(self, metric: Metric, edits: Sequence[Edit]) -> Reading:
        """What a metric reads after these edits."""
        if metric.site == LOGITS:
            return LOGITS, self.model.shape.n_layers
        last = max((edit.layers.stop for edit in edits), default=1) - 1
        return metric.site, metric.layer if metric.layer is not None else last


class Group:
    """Some of a plan's examples, whose runs are made together: what is read, kept and written of them."""

    def __init__(self, plan: Plan, examples: range):
        self.plan, self.examples = plan, examples
        self.lengths = [len(plan.base[i]) for i in examples]
        self.kept: Kept = [plan.positions[i] for i in examples]
        self.other_kept: Kept = [plan.other_positions[i] for i in examples] if plan.other is not None else []
        self.cells = plan.cells.part(plan.cells.among(examples))
        self.kinds = self.cells.used
        self.readings = sorted({*plan.states, *(plan.reading(m, k.edits) for m in plan.metrics for k in self.kinds)})

    @property
    def longest(self) -> int:
        """Which of the examples has the longest edited prompt."""
        return self.lengths.index(max(self.lengths))

    @cached_property
    def places(self) -> set[Place]:
        """Where edits write."""
        edits = [edit for kind in self.kinds for edit in kind.edits if isinstance(edit, Replace)]
        return {(edit.site.name, layer) for edit in edits for layer in edit.layers}

    @cached_property
    def sites(self) -> dict[str, Site]:
        """The sites where edits write, by name."""
        edits = [edit for kind in self.kinds for edit in kind.edits if isinstance(edit, Replace)]
        return {edit.site.name: edit.site for edit in edits}

    @cached_property
    def sources(self) -> set[Place]:
        """Where the values are taken that edits write."""
        edits = [edit for kind in self.kinds for edit in kind.edits if isinstance(edit, Replace)]
        return {(edit.site.name, edit.read_at(layer)) for edit in edits for layer in edit.layers}

    def drawn(self, site: str, layer: int) -> set[tuple[int, int]]:
        """Return the layers that values of a place are taken from, and which draws of them, as pairs."""
        edits = [edit for kind in self.kinds for edit in kind.edits if isinstance(edit, Replace)]
        return {(e.read_at(layer), e.sample) for e in edits if e.site.name == site and layer in e.layers}

    @cached_property
    def cut_layers(self) -> set[int]:
        """Where edits sever edges."""
        edits = [edit for kind in self.kinds for edit in kind.edits if isinstance(edit, Cut)]
        return {layer for edit in edits for layer in edit.layers}

    def in_base(
        self, activation: Shaped[Tensor, "example ... position *width"], site: Site
    ) -> Shaped[Tensor, "example ... _ *width"]:
        """Lay out a site's activation of the other run by the positions (and keys) of the prompts that are edited.

        What stands at a position that has no like in the other prompt is anything: no edit writes it.
        """
        matched = [self.plan.matched[i] if self.plan.matched else None for i in self.examples]
        if all(one is None for one in matched):
            return activation
        of_position = activation.movedim(1, 3) if site.has_keys else activation  # of a pattern, heads go last
        index = torch.arange(max(self.lengths)).clamp_max(of_position.shape[1] - 1).repeat(len(matched), 1)
        for row, one in enumerate(matched):
            for here, there in (one or {}).items():
                index[row, here] = there
        rows = torch.arange(len(matched))[:, None]
        laid = of_position[rows, index]
        return laid.transpose(1, 2)[rows, index].permute(0, 3, 2, 1) if site.has_keys else laid

    def batch(self, *sides: Sequence[Prompt]) -> Batch:
        """The prompts of one side after those of another, each called by its example and, of a pair, its side."""
        plan = self.plan
        ids, pad = [side[i].ids for side in sides for i in self.examples], pad_id(plan.model.tokenizer)
        if plan.other is None:
            return Batch.of(ids, pad).named(self.examples)
        kinds = ["clean" if self._is_clean(side) else "corrupted" for side in sides]
        if plan.corruption is not None:
            draws = [divmod(i, plan.draws) for i in self.examples]
            return Batch.of(ids, pad).named(f"{i} ({kind} run, sample {draw})" for kind in kinds for i, draw in draws)
        return Batch.of(ids, pad).named(f"{i} ({kind} prompt)" for kind in kinds for i in self.examples)

    def corrupting(self, *sides: Sequence[Prompt]) -> list[Hook]:
        """The hooks that make of a `batch` of these sides the runs that are meant, edits apart."""
        if self.plan.corruption is None or all(map(self._is_clean, sides)):
            return []
        return [self.plan.corruption.hook([None if self._is_clean(s) else i for s in sides for i in self.examples])]

    def corrupting_rows(self, rows: Sequence[int], *sides: Sequence[Prompt]) -> list[Hook]:
        """The same for some rows of that batch."""
        placed = [divmod(row, len(self.examples)) for row in rows]
        noisy = [None if self._is_clean(sides[side]) else self.examples[row] for side, row in placed]
        if self.plan.corruption is None or all(example is None for example in noisy):
            return []
        return [self.plan.corruption.hook(noisy)]

    def _is_clean(self, side: Sequence[Prompt]) -> bool:
        """Whether a side, which is the plan's `base` or `other` itself, holds the clean runs."""
        return (side is self.plan.base) == self.plan.base_is_clean

    def variants(self, cells: CellTable) -> Variants:
        """Turn cells into variants of the examples' runs."""
        example = cells.example - self.examples.start
        ends = {kept: number for number, kept in enumerate(dict.fromkeys(self._ends))}
        end = np.array([ends[one] for one in self._ends])[example]
        pairs, which = np.unique(np.stack([cells.kind, end]), axis=1, return_inverse=True)
        listed = list(ends)
        changes = tuple(self._variant(cells.kinds[kind], *listed[place]) for kind, place in pairs.T)
        return Variants(changes, which.reshape(-1), example, _trunks(cells))

    @cached_property
    def _ends(self) -> list[tuple[tuple[int, ...], int | None]]:
        """By example: the positions that are read and, where attention looks ahead, the prompt's length."""
        ahead = self.plan.model.looks_ahead
        return [(kept, length if ahead else None) for kept, length in zip(self.kept, self.lengths, strict=True)]

    def _variant(self, kind: CellTemplate, kept: tuple[int, ...], whole: int | None) -> Variant:
        readings = {*self.plan.states, *(self.plan.reading(metric, kind.edits) for metric in self.plan.metrics)}
        return Variant(kind.edits, kept, tuple(sorted(readings)), whole=whole)


def _trunks(cells: CellTable) -> Int[np.ndarray, " cell"]:
    """Return which cell each follows: the last of its family; -1 for those that follow none."""
    trunk = np.full(len(cells), -1)
    of_family = np.array([kind.family is not None for kind in cells.kinds], dtype=bool)[cells.kind]
    followed: dict[tuple[Any, ...], int] = {}
    for i in np.flatnonzero(of_family)[::-1].tolist():
        last = followed.setdefault((int(cells.example[i]), cells.kinds[cells.kind[i]].family), i)
        trunk[i] = last if last != i else -1
    return trunk


def _refuse_alike(metric: Metric, right: Int[Tensor, " example"], wrong: Int[Tensor, " example"]) -> None:
    """Refuse the difference of a token's logit with itself.

    Raises:
        InputError: with the prompt, where it is so for some.
    """
    same = right == wrong
    if bool(same.all()):
        what = f"{shown(metric.answers[0])} with itself"
    elif bool(same.any()):
        prompt = int(same.nonzero()[0])
        what = f"token {int(right[prompt])} with itself for prompt {prompt}"
    else:
        return
    raise InputError(f"hw.logit_difference compares {what}, which is always 0: give two different answers.")


def columns_of(kept: Kept) -> Int[Tensor, " kept"]:
    """Return every position that something reads in some prompt."""
    return torch.tensor(sorted({p for positions in kept for p in positions}))


def waves(plan: Plan) -> Iterator[tuple[range, range]]:
    """Cut a sweep into groups of examples and waves of cells: (examples of the group, cells of the wave)."""
    per_example = np.bincount(plan.cells.example, tokens_of(plan), len(plan.base)).astype(np.int64).tolist()
    edits = [edit for kind in plan.cells.used for edit in kind.edits if isinstance(edit, Replace)]
    activations = {(edit.site.name, layer) for edit in edits for layer in edit.layers}
    shape = plan.model.shape
    recorded = len(activations) * (2 if plan.source is not None else 1) + 2 * shape.n_layers
    groups: list[list[int]] = []
    width, live = 0, 0
    for example, prompt in enumerate(plan.base):
        longer = max(len(prompt), len(plan.other[example]) if plan.other is not None else 0)
        wider = max(width, longer)
        fits = groups and (len(groups[-1]) + 1) * wider * shape.d_model * recorded <= GROUP_FLOATS
        if not (fits and live + per_example[example] <= WAVE_TOKENS):
            groups.append([])
            wider, live = longer, 0
        groups[-1].append(example)
        width, live = wider, live + per_example[example]
    for group in groups:
        examples = range(group[0], group[-1] + 1)
        yield from ((examples, wave) for wave in _cut(plan, plan.cells.among(examples)))


def _cut(plan: Plan, cells: range) -> Iterator[range]:
    """Cut a group's cells into waves of at most `WAVE_TOKENS` tokens, families left whole."""
    part = plan.cells.part(cells)
    filled = np.cumsum(tokens_of(plan)[cells.start : cells.stop])
    families = {family: number for number, family in enumerate(dict.fromkeys(kind.family for kind in part.used))}
    of_kind = [-1 if kind.family is None else families.get(kind.family, -1) for kind in part.kinds]
    family = np.array(of_kind, dtype=np.int64)[part.kind]
    begins = 1 + np.flatnonzero((family[1:] < 0) | (family[1:] != family[:-1]))
    start, before = 0, 0
    while start < len(part):
        over = int(np.searchsorted(filled, before + WAVE_TOKENS, side="right"))
        later = begins[np.searchsorted(begins, max(over, start + 1)) :]
        stop = int(later[0]) if over < len(part) and len(later) else len(part)
        yield range(cells.start + start, cells.start + stop)
        start, before = stop, int(filled[stop - 1])


def tokens_of(plan: Plan) -> Int[np.ndarray, " cell"]:
    """Count the tokens of each cell's row."""
    ahead = plan.model.looks_ahead
    stop = np.array([len(p) if ahead else at[-1] + 1 for p, at in zip(plan.base, plan.positions, strict=True)])
    tokens = stop[plan.cells.example]
    return tokens if ahead else (tokens - plan.cells.first_position).clip(0)


def check_call(model: object, batch_size: object) -> int | None:
    """Return the batch size; refuse one that is no number of rows, and what is no model of `hw.load`.

    Raises:
        InputError: one of these.
    """
    check_model(model)
    return None if batch_size is None else checked_count("batch_size", batch_size)


def engine_option(engine: str) -> dict[str, str]:
    """Name the engine where one was chosen; nothing is named of the default."""
    return {} if engine == "auto" else {"engine": engine}


def recorded_roles(spots: Sequence[Mapping[str, AlignedSpan]]) -> list[dict[str, list[list[int]]]]:
    """Write down by example and role the positions in both prompts."""
    return [{role: [list(spot.base), list(spot.other)] for role, spot in one.items()} for one in spots]


def metric_options(plan: Plan) -> list[dict[str, Any]]:
    """Describe the metrics of a sweep: what each computes with, and the positions and token ids that it came to."""
    return [
        {
            "name": metric.name,
            "function": metric.function,
            "site": metric.site,
            "layer": metric.layer,
            "against_clean": metric.against_clean,
            "at": [kept[number] for kept in plan.kept[:: plan.draws]],
            "answers": [ids[:: plan.draws].tolist() for ids in plan.answers[number]],
        }
        for number, metric in enumerate(plan.metrics)
    ]


def plan_of(
    model: HookedModel,
    sides: PromptPair,
    cells: CellTable,
    metrics: tuple[Metric, ...],
    source: Replacement,
    *,
    matched: Sequence[Mapping[int, int] | None],
    batch_size: int | None,
) -> Plan:
    """Return the plan of cells on these runs; `matched` is by prompt."""
    by_example = tuple(one for one in matched for _ in range(sides.draws))
    return Plan(
        model,
        sides.base,
        sides.other,
        sides.base_is_clean,
        cells,
        metrics,
        source,
        batch_size=batch_size,
        matched=by_example,
        corruption=sides.corruption,
    )
