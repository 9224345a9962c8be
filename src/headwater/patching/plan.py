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
from headwater.models.tokens import Batch
from headwater.options import checked_count, shown
from headwater.patching.edits import LOGITS, CellTable, Edit, Place, Reading, Variant, Variants
from headwater.patching.metrics import Metric, answer_ids
from headwater.patching.prompt_pair import PromptPair, Side
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
    pair: PromptPair
    cells: CellTable
    metrics: tuple[Metric, ...]
    replacement: Replacement | None = None
    """What edits write; None where they sever edges, or where there are none."""
    batch_size: int | None = None
    states: tuple[Reading, ...] = ()
    """Residual-stream states that are wanted themselves, beside what metrics read."""
    states_at: Where = "last"
    matched: tuple[Mapping[int, int] | None, ...] = ()
    """By prompt: of each position that edits may write, the same one of the other prompt; None, or nothing at all,
    where these are the same numbers."""
    checked: set[str] = field(default_factory=set)
    """The metrics that were seen to treat each row by itself."""

    def __post_init__(self) -> None:
        last = self.model.shape.n_layers - 1
        for metric in self.metrics:
            try:
                if metric.layer is not None:
                    # Here and not where the metric is made, which knows no model.
                    checked_count("layer", metric.layer, least=0, most=last)
            except InputError:
                message = f"The metric {metric.name!r} reads layer {metric.layer!r}; they are 0 to {last}."
                raise InputError(message) from None
            if metric.site != LOGITS:
                sites_named(metric.site, self.model)

    @property
    def base(self) -> tuple[Prompt, ...]:
        """By example: the prompt whose run is edited."""
        return self.pair.base

    @property
    def other(self) -> tuple[Prompt, ...] | None:
        """By example: the other prompt of the pair."""
        return self.pair.other

    @cached_property
    def spans(self) -> tuple[tuple[AlignedSpan, ...], ...]:
        """By example and metric: the positions it reads, in both prompts."""
        # The noisy run is of the same text: names fall on the same tokens.
        others = self.other if self.other is not None and self.pair.corruption is None else [None] * len(self.base)
        side, draws = 0 if self.pair.base_is_clean else 1, self.pair.draws
        by_metric = [aligned_spans(metric.at, self.base, others, side, draws) for metric in self.metrics]
        return tuple(zip(*by_metric, strict=True)) if by_metric else ((),) * len(self.base)

    @cached_property
    def kept(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """By example and metric: the positions it reads in the prompt that is edited."""
        return tuple(tuple(span.base for span in spans) for spans in self.spans)

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """By example: every position that is read, ascending."""
        n, draws = len(self.pair.prompts), self.pair.draws
        by_example = []
        for i, (prompt, kept) in enumerate(zip(self.base, self.kept, strict=True)):
            states = positions_of(self.states_at, prompt, i // draws, n) if self.states else ()
            by_example.append(tuple(sorted({p for at in (*kept, states) for p in at})))
        return tuple(by_example)

    @cached_property
    def other_positions(self) -> tuple[tuple[int, ...], ...]:
        """By example: the positions of the other prompt that are read as those of `positions` are of the edited one."""
        by_example = []
        for i, (spans, positions) in enumerate(zip(self.spans, self.positions, strict=True)):
            same: dict[int, int] = {}
            for span in spans:
                for here, there in zip(span.base, span.other, strict=True):
                    # Every position is read once for all metrics, in either run.
                    if same.setdefault(here, there) != there:
                        raise InputError(
                            f"The metrics read position {here} of pair {i}, which is {same[here]} of the other prompt "
                            f"for one and {there} for another: name what they read alike."
                        )
            by_example.append(tuple(same.get(position, position) for position in positions))
        return tuple(by_example)

    @cached_property
    def answers(self) -> tuple[tuple[Int[Tensor, " example"], ...], ...]:
        """By metric: the token ids of its answers, one per example."""
        model, n, draws = self.model, len(self.pair.prompts), self.pair.draws
        by_metric = [
            [answer_ids(answer, model.tokenizer, n, model.n_logits) for answer in metric.answers]
            for metric in self.metrics
        ]
        for metric, answers in zip(self.metrics, by_metric, strict=True):
            if metric.name == "logit_difference" and len(answers) == 2:
                _refuse_equal(metric, *answers)
        # An answer "Paris" after " is" is another token than " Paris": warned of once, from the prompts' last tokens.
        at_the_end = [answer for metric in self.metrics if metric.at == "last" for answer in metric.answers]
        warn_of_missing_spaces(at_the_end, [prompt.strings[-1] for prompt in self.pair.prompts], model.tokenizer)
        return tuple(tuple(ids.repeat_interleave(draws) for ids in answers) for answers in by_metric)

    @property
    def only_answers(self) -> Int[Tensor, "example answer"] | None:
        """The tokens whose logits suffice: the answers of each metric in turn; None where some metric needs all."""
        read = [answers for m, answers in zip(self.metrics, self.answers, strict=True) if m.site == LOGITS]
        if not read or any(metric.needs_all for metric in self.metrics if metric.site == LOGITS):
            return None
        # In the order of the metrics: `Readout._answers` counts columns the same way.
        return torch.stack([ids for answers in read for ids in answers], 1)

    def reading(self, metric: Metric, edits: Sequence[Edit]) -> Reading:
        """What a metric reads after these edits."""
        if metric.site == LOGITS:
            return LOGITS, self.model.shape.n_layers
        # Of a window or a set the last edited layer, as the metric's own layer.
        last = max((edit.layers.stop for edit in edits), default=1) - 1
        return metric.site, metric.layer if metric.layer is not None else last

    def readings(self, edits: Sequence[Edit]) -> set[Reading]:
        """Everything that is read after these edits."""
        return {*self.states, *(self.reading(metric, edits) for metric in self.metrics)}

    @property
    def metric_options(self) -> list[dict[str, Any]]:
        """What the record says of the metrics: what each computes with, its positions and token ids."""
        draws = self.pair.draws
        return [
            {
                "name": metric.name,
                "function": metric.function,
                "site": metric.site,
                "layer": metric.layer,
                "against_clean": metric.against_clean,
                "at": [kept[number] for kept in self.kept[::draws]],
                "answers": [ids[::draws].tolist() for ids in self.answers[number]],
            }
            for number, metric in enumerate(self.metrics)
        ]


class Group:
    """Some of a plan's examples, whose runs are made together: what is read, kept and written of them."""

    def __init__(self, plan: Plan, examples: range):
        self.plan, self.examples = plan, examples
        self.lengths = [len(plan.base[i]) for i in examples]
        self.kept: Kept = [plan.positions[i] for i in examples]
        self.other_kept: Kept = [plan.other_positions[i] for i in examples] if plan.other is not None else []
        self.cells = plan.cells.part(plan.cells.among(examples))
        edits = [edit for template in self.cells.used for edit in template.edits]
        self.edits: list[Edit] = edits
        self.writes = [edit for edit in edits if edit.writes]
        self.sites: dict[str, Site] = {edit.site.name: edit.site for edit in self.writes}
        """By name, where edits write."""
        self.readings = sorted({one for template in self.cells.used for one in plan.readings(template.edits)})

    @property
    def longest(self) -> int:
        """Which of the examples has the longest edited prompt."""
        return self.lengths.index(max(self.lengths))

    @cached_property
    def places(self) -> set[Place]:
        """Where edits write."""
        return {(edit.site.name, layer) for edit in self.writes for layer in edit.layers}

    @cached_property
    def sources(self) -> set[Place]:
        """Where the values are taken that edits write."""
        return {(edit.site.name, edit.source_of(layer)) for edit in self.writes for layer in edit.layers}

    def drawn(self, site: str, layer: int) -> set[tuple[int, int]]:
        """Return the layers that values of a place are taken from, and which draws of them, as pairs."""
        here = [edit for edit in self.writes if edit.site.name == site and layer in edit.layers]
        return {(edit.source_of(layer), edit.sample) for edit in here}

    @cached_property
    def severed_layers(self) -> set[int]:
        """Where edits sever edges."""
        return {layer for edit in self.edits if not edit.writes for layer in edit.layers}

    def batch(self, *sides: Side) -> Batch:
        """The examples' prompts of one side, then those of the next."""
        return self.plan.pair.batch(self.plan.model, self.examples, *sides)

    def corrupting(self, *sides: Side, rows: Sequence[int] | None = None) -> list[Hook]:
        """The hooks that make a `batch`, or some rows of it, the runs that are meant, edits apart."""
        return self.plan.pair.corrupting(self.examples, *sides, rows=rows)

    def aligned_with_base(
        self, activation: Shaped[Tensor, "example ... position *width"], site: Site
    ) -> Shaped[Tensor, "example ... _ *width"]:
        """Order a site's activation of the other run by the positions (and keys) of the prompts that are edited.

        Positions without a match in the other prompt hold anything: no edit writes them.
        """
        matched = [self.plan.matched[i // self.plan.pair.draws] if self.plan.matched else None for i in self.examples]
        if all(one is None for one in matched):
            return activation
        # A pattern is aligned twice, by queries and then by keys: position first, heads out of the way.
        of_position = activation.movedim(1, 3) if site.has_keys else activation  # of a pattern, heads go last
        index = torch.arange(max(self.lengths)).clamp_max(of_position.shape[1] - 1).repeat(len(matched), 1)
        for row, one in enumerate(matched):
            for here, there in (one or {}).items():
                index[row, here] = there
        rows = torch.arange(len(matched))[:, None]
        gathered = of_position[rows, index]
        return gathered.transpose(1, 2)[rows, index].permute(0, 3, 2, 1) if site.has_keys else gathered

    def variants(self, cells: CellTable) -> Variants:
        """Turn cells into variants of the examples' runs: one for each template and each set of positions read."""
        example = cells.example - self.examples.start
        # Where attention looks ahead every position depends on every edit: rows are whole prompts.
        whole = self.lengths if self.plan.model.looks_ahead else [None] * len(self.lengths)
        reads = list(zip(self.kept, whole, strict=True))
        number = {one: i for i, one in enumerate(dict.fromkeys(reads))}
        read = np.array([number[one] for one in reads])[example]
        # Examples that read the same positions share a variant: its properties are computed once for all of them.
        pairs, which = np.unique(np.stack([cells.template, read]), axis=1, return_inverse=True)
        listed = list(number)
        changes = []
        for template, i in pairs.T:
            edits, (kept, length) = cells.templates[template].edits, listed[i]
            changes.append(Variant(edits, kept, tuple(sorted(self.plan.readings(edits))), whole=length))
        return Variants(tuple(changes), which.reshape(-1), example, cells.longest_of_nested())


def _refuse_equal(metric: Metric, right: Int[Tensor, " example"], wrong: Int[Tensor, " example"]) -> None:
    """Refuse the difference of a token's logit with itself, for all prompts or for one."""
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
    edits = [edit for template in plan.cells.used for edit in template.edits if edit.writes]
    written = {(edit.site.name, layer) for edit in edits for layer in edit.layers}
    shape = plan.model.shape
    # By layer beside what edits need: keys and values.
    recorded = len(written) * (2 if plan.replacement is not None else 1) + 2 * shape.n_layers
    groups: list[list[int]] = []
    width, tokens = 0, 0
    for example, prompt in enumerate(plan.base):
        longer = max(len(prompt), len(plan.other[example]) if plan.other is not None else 0)
        wider = max(width, longer)
        fits = groups and (len(groups[-1]) + 1) * wider * shape.d_model * recorded <= GROUP_FLOATS
        if not (fits and tokens + per_example[example] <= WAVE_TOKENS):
            groups.append([])
            wider, tokens = longer, 0
        groups[-1].append(example)
        width, tokens = wider, tokens + per_example[example]
    for group in groups:
        examples = range(group[0], group[-1] + 1)
        yield from ((examples, wave) for wave in _cut(plan, plan.cells.among(examples)))


def _cut(plan: Plan, cells: range) -> Iterator[range]:
    """Cut a group's cells into waves of at most `WAVE_TOKENS` tokens, nested cells left together."""
    part = plan.cells.part(cells)
    filled = np.cumsum(tokens_of(plan)[cells.start : cells.stop])
    keys = {key: number for number, key in enumerate(dict.fromkeys(template.nested for template in part.used))}
    by_template = [-1 if one.nested is None else keys.get(one.nested, -1) for one in part.templates]
    key = np.array(by_template, dtype=np.int64)[part.template]
    # A wave may begin at a cell that is not nested in the one before it: a trunk and what follows it stay together.
    begins = 1 + np.flatnonzero((key[1:] < 0) | (key[1:] != key[:-1]))
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
    # A cell whose first change lies after all that is read has no tokens, and no run.
    return tokens if ahead else (tokens - plan.cells.first_position).clip(0)


def check_call(model: object, batch_size: object) -> int | None:
    """Return the batch size of a call, checked; refuse what is not a model of `hw.load`."""
    check_model(model)
    return None if batch_size is None else checked_count("batch_size", batch_size)


def recorded_roles(spans: Sequence[Mapping[str, AlignedSpan]]) -> list[dict[str, list[list[int]]]]:
    """Write down by example and role the positions in both prompts."""
    return [{role: [list(span.base), list(span.other)] for role, span in one.items()} for one in spans]
