"""A sweep resolved to tokens: its cells, what each of them reads, and the division into groups and waves.

A group is a set of examples whose unedited runs are made together, because their recorded activations fit in memory; a
wave is a set of a group's cells that are measured together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwater.errors import InputError
from headwater.kernels.devices import to_device, to_device_many
from headwater.models.edits import Hook
from headwater.models.hooked import HookedModel
from headwater.models.positions import Where, positions_of
from headwater.models.sites import SITES, Site, sites_named
from headwater.models.tokens import Batch, pad_id, warn_of_missing_spaces
from headwater.options import checked_layer
from headwater.patching.edits import LOGITS, CellTable, Edit, Indices, Place, Reading, Variant, Variants
from headwater.patching.metrics import Metric, answer_ids
from headwater.patching.prompts import AlignedSpan, PromptPair, Side
from headwater.patching.replacements import Replacement

Kept: TypeAlias = Sequence[tuple[int, ...]]
"""By example: the positions that are read."""
WAVE_TOKENS = 1 << 15
"""Most tokens that go through the layers together."""
CPU_WORK, CPU_TOKENS = 5e11, 1024
"""About the most multiplications in a wave on a CPU, so that cells are finished, and saved, every few seconds; and the
fewest tokens of such a wave: with fewer, products of matrices are slower."""
GROUP_FLOATS = 1 << 26
"""About the most numbers in the recorded activations of a group of examples."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything a sweep needs, resolved to tokens and positions."""

    model: HookedModel
    pair: PromptPair
    cells: CellTable
    metrics: tuple[Metric, ...]
    replacement: Replacement | None = None
    """The values that edits write; None if they sever edges, or if there are no edits."""
    batch_size: int | None = None
    states: tuple[Reading, ...] = ()
    """Residual-stream states to return, in addition to what the metrics read."""
    states_at: Where | None = None
    """Where these states are read, besides the positions that the metrics read."""
    matched: tuple[Mapping[int, int] | None, ...] = ()
    """By prompt: the position in the other prompt of each position that edits may write; None, or an empty tuple,
    if the positions are equal."""
    checked: set[str] = field(default_factory=set)
    """The metrics that were verified to treat each row independently."""

    def __post_init__(self) -> None:
        metrics = []
        for metric in self.metrics:
            if metric.layer is not None:
                # Checked here and not where the metric is made, because there no model is known.
                option = f"The metric {metric.name!r}: layer"
                metric = replace(metric, layer=checked_layer(option, metric.layer, self.model.shape.n_layers))
            if metric.site != LOGITS:
                sites_named(metric.site, self.model)
            metrics.append(metric)
        object.__setattr__(self, "metrics", tuple(metrics))

    @cached_property
    def spans(self) -> tuple[tuple[AlignedSpan, ...], ...]:
        """By example and metric: the positions it reads, in both prompts."""
        by_metric = [self.pair.spans(metric.at, by_role=False) for metric in self.metrics]
        by_prompt = zip(*by_metric, strict=True) if by_metric else [()] * len(self.pair.prompts)
        return tuple(tuple(one[""] for one in some) for some in by_prompt for _ in range(self.pair.draws))

    @cached_property
    def positions(self) -> tuple[tuple[int, ...], ...]:
        """By example: all positions that are read, ascending."""
        by_example = [{position for span in spans for position in span.base} for spans in self.spans]
        for i, prompt in enumerate(self.pair.base if self.states_at is not None else ()):
            by_example[i].update(positions_of(self.states_at, prompt, i // self.pair.draws, len(self.pair.prompts)))
        return tuple(tuple(sorted(read)) for read in by_example)

    @cached_property
    def other_positions(self) -> tuple[tuple[int, ...], ...]:
        """By example: the positions read in the other prompt, matching those of `positions` in the edited prompt."""
        by_example = []
        for i, (spans, positions) in enumerate(zip(self.spans, self.positions, strict=True)):
            same: dict[int, int] = {}
            for span in spans:
                for in_base, in_other in zip(span.base, span.other, strict=True):
                    # Every position is read once for all metrics, in both runs.
                    if same.setdefault(in_base, in_other) != in_other:
                        raise InputError(
                            f"The metrics read position {in_base} of pair {i}, which matches {same[in_base]} of the "
                            f"other prompt for one and {in_other} for another: name their positions alike."
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
            if metric.name != "logit_difference" or len(answers) != 2:
                continue
            is_same = answers[0] == answers[1]
            if bool(is_same.any()):
                prompt = int(is_same.nonzero()[0])
                raise InputError(
                    f"hw.logit_difference compares token {int(answers[0][prompt])} with itself for prompt {prompt}, "
                    "which is always 0: give two different answers."
                )
        # After " is" an answer "Paris" is another token than " Paris": warn once, from the prompts' last tokens.
        at_the_end = [answer for metric in self.metrics if metric.at == "last" for answer in metric.answers]
        warn_of_missing_spaces(at_the_end, [prompt.strings[-1] for prompt in self.pair.prompts], model.tokenizer)
        return tuple(tuple(ids.repeat_interleave(draws) for ids in answers) for answers in by_metric)

    @property
    def only_answers(self) -> Int[Tensor, "example answer"] | None:
        """The tokens whose logits suffice: the answers of each metric in turn; None if some metric needs all logits."""
        read = [answers for m, answers in zip(self.metrics, self.answers, strict=True) if m.site == LOGITS]
        if not read or any(metric.needs_all for metric in self.metrics if metric.site == LOGITS):
            return None
        # In the order of the metrics: `Readout.apply` counts columns the same way.
        return torch.stack([ids for answers in read for ids in answers], 1)

    def reading(self, metric: Metric, edits: Sequence[Edit]) -> Reading:
        """Return the reading of a metric after these edits."""
        if metric.site == LOGITS:
            return LOGITS, self.model.shape.n_layers
        # For a window or a set, the last edited layer counts as the cell's layer.
        last = max((edit.layers.stop for edit in edits), default=1) - 1
        return metric.site, metric.layer if metric.layer is not None else last

    @property
    def metric_options(self) -> list[dict[str, Any]]:
        """Options of the metrics for the run's record: function, site, positions and token ids of each."""
        draws = self.pair.draws
        return [
            {
                "name": metric.name,
                "function": metric.function,
                "site": metric.site,
                "layer": metric.layer,
                "against_clean": metric.against_clean,
                "at": [spans[number].base for spans in self.spans[::draws]],
                "answers": [ids[::draws].tolist() for ids in self.answers[number]],
            }
            for number, metric in enumerate(self.metrics)
        ]


class Group:
    """Some of a plan's examples, whose runs are made together, with the sites and positions read, kept and edited."""

    def __init__(self, plan: Plan, examples: range):
        self.plan, self.examples = plan, examples
        self.lengths = [len(plan.pair.base[i]) for i in examples]
        self.kept: Kept = [plan.positions[i] for i in examples]
        self.other_kept: Kept = [plan.other_positions[i] for i in examples] if plan.pair.other is not None else []
        self.cells = plan.cells.part(plan.cells.among(examples))
        self.edits = [edit for template in self.cells.used for edit in template.edits]
        self.writes = [edit for edit in self.edits if edit.writes]
        self.sites: dict[str, Site] = {edit.site.name: edit.site for edit in self.writes}
        """By name: the sites that edits write."""
        self.places = {(edit.site.name, layer) for edit in self.writes for layer in edit.layers}
        """The sites and layers that edits write."""
        self.sources = {(edit.site.name, edit.source_layer_of(layer)) for edit in self.writes for layer in edit.layers}
        """The sites and layers that the written values come from."""
        self.value_names: dict[Place, str] = {}
        """By place: the hook name of the other run's activation that values are computed from."""
        if plan.replacement is not None and plan.replacement.takes_other_run:
            self.value_names = {(site, layer): self.sites[site].hook_name(layer) for site, layer in self.sources}
        of_metrics = {plan.reading(metric, one.edits) for metric in plan.metrics for one in self.cells.used}
        self.readings = sorted({*plan.states, *of_metrics})
        self.read_names = [SITES[site].hook_name(layer) for site, layer in self.readings if site != LOGITS]
        """The hook names of the activations that are read."""

    def batch(self, *sides: Side) -> Batch:
        """Return the examples' prompts of each side in turn, named by example and, for a pair, by side."""
        # Sides one after the other: `corrupting` and the recorded halves rely on this order.
        pair, examples = self.plan.pair, self.examples
        prompts = {"base": pair.base, "other": pair.other or ()}
        ids = [prompts[side][i].ids for side in sides for i in examples]
        batch = Batch.of(ids, pad_id(self.plan.model.tokenizer))
        if pair.other is None:
            return batch.named(examples)
        names = []
        for side, i in product(sides, examples):
            kind, (prompt, draw) = "clean" if pair.is_clean(side) else "corrupted", divmod(i, pair.draws)
            name = f"{i} ({kind} prompt)" if pair.corruption is None else f"{prompt} ({kind} run, sample {draw})"
            names.append(name)
        return batch.named(names)

    def corrupting(self, *sides: Side, rows: Sequence[int] | None = None) -> list[Hook]:
        """Return the corruption hooks, without edits, for a `batch` of these sides or for some of its rows."""
        pair = self.plan.pair
        noisy = [None if pair.is_clean(side) else i for side in sides for i in self.examples]
        noisy = noisy if rows is None else [noisy[row] for row in rows]
        if pair.corruption is None or all(example is None for example in noisy):
            return []
        return [pair.corruption.hook(noisy)]

    def aligned_with_base(
        self, activation: Shaped[Tensor, "example ... position *width"], site: Site
    ) -> Shaped[Tensor, "example ... _ *width"]:
        """Index a site's activation of the other run by the positions (and keys) of the prompts that are edited."""
        matched = [self.plan.matched[i // self.plan.pair.draws] if self.plan.matched else None for i in self.examples]
        if all(pairs is None for pairs in matched):
            return activation
        # A pattern is aligned twice, by queries and then by keys: move position to the front and heads to the end.
        of_position = activation.movedim(1, 3) if site.has_keys else activation
        # Positions without a match in the other prompt may hold anything: no edit writes them.
        index = torch.arange(max(self.lengths)).clamp_max(of_position.shape[1] - 1).repeat(len(matched), 1)
        for row, pairs in enumerate(matched):
            for in_base, in_other in (pairs or {}).items():
                index[row, in_base] = in_other
        rows = torch.arange(len(matched))[:, None]
        gathered = of_position[rows, index]
        return gathered.transpose(1, 2)[rows, index].permute(0, 3, 2, 1) if site.has_keys else gathered

    def variants(self, cells: CellTable) -> Variants:
        """Turn cells into variants of the examples' runs: one for each template and each set of positions read."""
        example = cells.example - self.examples.start
        # With non-causal attention every position depends on every edit: rows are whole prompts.
        whole = self.lengths if self.plan.model.is_bidirectional else [None] * len(self.lengths)
        reads = list(zip(self.kept, whole, strict=True))
        number = {one: i for i, one in enumerate(dict.fromkeys(reads))}
        read = np.array([number[one] for one in reads])[example]
        # Examples that read the same positions share a variant: its properties are computed once for all of them.
        pairs, which = np.unique(np.stack([cells.template, read]), axis=1, return_inverse=True)
        listed, distinct = list(number), []
        for template, i in pairs.T:
            edits, (kept, length) = cells.templates[template].edits, listed[i]
            # From the cells' own edits: a board's clicks are cells that the plan does not list.
            of_metrics = tuple(self.plan.reading(metric, edits) for metric in self.plan.metrics)
            distinct.append(Variant(edits, kept, of_metrics, self.plan.states, whole=length))
        return Variants(tuple(distinct), which.reshape(-1), example, cells.parents())


def columns_of(kept: Kept) -> Int[Tensor, " kept"]:
    """Return all positions that are read in any prompt."""
    return torch.tensor(sorted({p for positions in kept for p in positions}))


def waves(plan: Plan) -> Iterator[tuple[range, range]]:
    """Cut a sweep into groups of examples and waves of cells: (examples of the group, cells of the wave)."""
    pair, shape, ahead = plan.pair, plan.model.shape, plan.model.is_bidirectional
    stop = np.array([len(p) if ahead else at[-1] + 1 for p, at in zip(pair.base, plan.positions, strict=True)])
    of_cell = stop[plan.cells.example]
    # A cell whose first change is after every position read has no tokens, and no run.
    of_cell = of_cell if ahead else (of_cell - plan.cells.first_position).clip(0)
    per_example = np.bincount(plan.cells.example, of_cell, len(pair.base)).astype(np.int64).tolist()
    edits = [edit for template in plan.cells.used for edit in template.edits if edit.writes]
    written = {(edit.site.name, layer) for edit in edits for layer in edit.layers}
    # Each layer records keys and values besides what edits need.
    recorded = len(written) * (2 if plan.replacement is not None else 1) + 2 * shape.n_layers
    groups: list[list[int]] = []
    width, tokens = 0, 0
    for example, prompt in enumerate(pair.base):
        longer = max(len(prompt), len(pair.other[example]) if pair.other is not None else 0)
        wider = max(width, longer)
        fits = groups and (len(groups[-1]) + 1) * wider * shape.d_model * recorded <= GROUP_FLOATS
        if not (fits and tokens + per_example[example] <= WAVE_TOKENS):
            groups.append([])
            wider, tokens = longer, 0
        groups[-1].append(example)
        width, tokens = wider, tokens + per_example[example]
    most = wave_tokens(plan.model)
    for group in groups:
        examples = range(group[0], group[-1] + 1)
        cells = plan.cells.among(examples)
        part, filled = plan.cells.part(cells), np.cumsum(of_cell[cells.start : cells.stop])
        # A wave may not begin between a cell and its parent, which comes after it.
        begins = 1 + np.flatnonzero(part.parents()[:-1] < 0)
        start, before = 0, 0
        while start < len(part):
            over = int(np.searchsorted(filled, before + most, side="right"))
            later = begins[np.searchsorted(begins, max(over, start + 1)) :]
            end = int(later[0]) if over < len(part) and len(later) else len(part)
            yield examples, range(cells.start + start, cells.start + end)
            start, before = end, int(filled[end - 1])


def wave_tokens(model: HookedModel) -> int:
    """Return the most tokens of a wave: on a CPU those of a few seconds of work."""
    if model.device.type == "cuda":
        return WAVE_TOKENS
    of_a_token = sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    return min(WAVE_TOKENS, max(CPU_TOKENS, int(CPU_WORK / of_a_token)))


def recorded_roles(spans: Sequence[Mapping[str, AlignedSpan]]) -> list[dict[str, list[list[int]]]]:
    """List by example and role the positions in both prompts, for the run's record."""
    return [{role: [list(span.base), list(span.other)] for role, span in one.items()} for one in spans]


# Readings of a group's runs, and the metrics on them: on the unedited runs once, on edited runs as they arrive.

Reads: TypeAlias = dict[Reading, list[Tensor]]
"""By reading, each example's values at its kept positions."""
AT_ONCE = 1 << 20
"""About the most numbers of unedited runs that a metric receives in one call."""


@dataclass
class Measured:
    """Measurements of cells: by cell and metric, and the baselines of their examples."""

    values: Float[Tensor, "cell metric"]
    unedited: Float[Tensor, "cell metric"]
    """The same reading of the base run."""
    other: Float[Tensor, "cell metric"]
    """The same reading of the other prompt's run; NaN without one."""
    edges: Float[Tensor, " cell"]
    """Number of visible edges that a cell severs, over its layers and heads; NaN for cells that sever none."""
    before: dict[Reading, Float[Tensor, "cell kept width"]] = field(default_factory=dict)
    """The requested states, in the base run."""
    after: dict[Reading, Float[Tensor, "cell kept width"]] = field(default_factory=dict)
    """The same states after the edits."""

    @classmethod
    def empty(cls, n_cells: int, n_metrics: int) -> Measured:
        """Return measurements of NaN for this many cells."""
        values, unedited, other = torch.full((3, n_cells, n_metrics), torch.nan, dtype=torch.float64)
        return cls(values, unedited, other, torch.full((n_cells,), torch.nan, dtype=torch.float64))

    def tables(self) -> dict[str, Tensor]:
        """Return the tables by name."""
        return {"values": self.values, "unedited": self.unedited, "other": self.other, "edges": self.edges}


def read_run(
    group: Group,
    positions: Kept,
    activations: Mapping[str, Tensor],
    logits: Float[Tensor, "example kept d_vocab"] | None = None,
) -> Reads:
    """Read whole runs of a group's examples at some positions; without logits, all other readings."""
    read: Reads = {}
    for site, layer in group.readings:
        if site != LOGITS:
            activation = activations[SITES[site].hook_name(layer)]
            at = to_device_many([torch.tensor(each) for each in positions], activation.device)
            read[site, layer] = [activation[i, index] for i, index in enumerate(at)]
        elif logits is not None:
            columns = columns_of(positions).tolist()
            places = [torch.tensor([columns.index(p) for p in each]) for each in positions]
            read[site, layer] = [logits[i, index] for i, index in enumerate(to_device_many(places, logits.device))]
    return read


class Readout:
    """Metrics on the unedited runs of a group, and on edited runs.

    `base` and `other` are the readings of the unedited runs of either side. `visible` has, for each layer where edges
    are severed, the keys that each query sees; `answers` are the tokens whose logits are read, unless all are.
    """

    def __init__(
        self,
        group: Group,
        base: Reads,
        other: Reads | None,
        visible: Mapping[int, Bool[Tensor, "query key"]],
        answers: Int[Tensor, "example answer"] | None = None,
    ):
        self.group, self.plan, self.examples = group, group.plan, group.examples
        self.base, self.other, self._visible, self._answer_tokens = base, other, visible, answers
        # Metrics against the clean run (KL) compare with it whichever side is edited.
        self._clean = base if self.plan.pair.base_is_clean else other
        self._columns: list[tuple[list[tuple[int, ...]], Indices]] = []
        """By metric: where its positions may be among those kept for all metrics; and which of these an example has."""
        for m in range(len(self.plan.metrics)):
            spans = [self.plan.spans[i][m].base for i in self.examples]
            own = [tuple(map(kept.index, span)) for kept, span in zip(group.kept, spans, strict=True)]
            distinct = list(dict.fromkeys(own))
            self._columns.append((distinct, np.array([distinct.index(columns) for columns in own])))
        # The base run of an attribution has a graph, which baselines do not need and would keep alive.
        with torch.no_grad():
            self.base_metrics = self._baseline(base)
            self.other_metrics = self._baseline(other) if other is not None else None

    def unedited(self, variants: Variants) -> Measured:
        """Return the measurements of variants on the unedited runs, as if their edits changed nothing."""
        measured = Measured.empty(len(variants), len(self.plan.metrics))
        for m in range(len(self.plan.metrics)):
            readings = [variant.of_metrics[m] for variant in variants.distinct]
            for reading in set(readings):
                cells = np.flatnonzero(np.array([each == reading for each in readings])[variants.which])
                index, examples = torch.from_numpy(cells), torch.from_numpy(variants.example[cells])
                measured.unedited[index, m] = self.base_metrics[reading][examples, m]
                if self.other_metrics is not None:
                    measured.other[index, m] = self.other_metrics[reading][examples, m]
        cuts = [[edit for edit in variant.edits if not edit.writes] for variant in variants.distinct]
        if self.plan.metrics and any(cuts):
            measured.edges = self._visible_edges(cuts)[torch.from_numpy(variants.which)]
        # A cell without any delivery keeps these values: its effect is 0 without a run.
        measured.values = measured.unedited.clone()
        states = {name: torch.stack([self.base[name][i] for i in variants.example]) for name in self.plan.states}
        measured.before, measured.after = states, {reading: state.clone() for reading, state in states.items()}
        return measured

    def apply(self, m: int, reading: Reading, read: Tensor, owners: Indices | Sequence[int]) -> Float[Tensor, " row"]:
        """Apply one metric to rows that belong to these examples of the group."""
        metric, owners = self.plan.metrics[m], np.asarray(owners)
        measured = torch.empty(len(owners), dtype=torch.float64)
        distinct, which = self._columns[m]
        # The number of a role's tokens varies by prompt: each call of a metric gets rows with the same positions.
        for number in np.unique(which[owners]):
            rows = np.flatnonzero(which[owners] == number)
            who, columns = owners[rows], torch.tensor(distinct[number])
            values = read if len(rows) == len(owners) else read[to_device(rows, read.device)]
            # With one metric, or several of the same positions, the reading is passed on without a copy.
            is_all = columns.tolist() == list(range(read.shape[1]))
            values = values if is_all else values[:, to_device(columns, read.device)]
            if self._answer_tokens is None or reading[0] != LOGITS:
                among = torch.from_numpy(who + self.examples.start)
                answers = [to_device(ids[among], read.device) for ids in self.plan.answers[m]]
            else:
                # Only answers were read: columns follow those of the logit metrics in turn, see `Plan.only_answers`.
                pairs = zip(self.plan.answers[:m], self.plan.metrics, strict=False)
                column = sum(len(ids) for ids, one in pairs if one.site == LOGITS)
                numbers = range(column, column + len(self.plan.answers[m]))
                answers = [torch.full((len(who),), k, device=read.device) for k in numbers]
            clean = None
            if metric.against_clean and self._clean is not None:
                # Detached: with attribution the clean run is only compared with, not differentiated.
                clean = torch.stack([self._clean[reading][i].detach() for i in who])
                clean = clean if is_all else clean[:, to_device(columns, read.device)]
            # Checked before the metric is used: a metric that mixes rows would mix cells of one tile. Once per
            # sweep, as the check runs the metric again on some rows.
            if metric.name not in self.plan.checked:
                with torch.no_grad():
                    metric.refuse_misread(values.detach(), answers, clean)
                self.plan.checked.add(metric.name)
            # float64 from here on: effects are differences of nearly equal numbers.
            measured[torch.from_numpy(rows)] = metric.measure(values, answers, clean).double().cpu()
            for i in (~measured[torch.from_numpy(rows)].isfinite()).nonzero().flatten().tolist():
                # If the values themselves are not finite the model is at fault, which another check reports.
                if bool(values[i].isfinite().all()):
                    raise InputError(
                        f"The metric {metric.name!r} gave {float(measured[rows[i]])} for example "
                        f"{self.examples[who[i]]}, from values that are all finite: fix it there (log_softmax instead "
                        "of log(softmax), no division by 0)."
                    )
        return measured

    def _baseline(self, run: Reads) -> dict[Reading, Float[Tensor, "example metric"]]:
        """By reading, compute every metric that could use it, on an unedited run."""
        table: dict[Reading, Tensor] = {}
        for reading in self.group.readings:
            columns = torch.full((len(self.examples), len(self.plan.metrics)), torch.nan, dtype=torch.float64)
            by_shape: dict[tuple[int, ...], list[int]] = {}
            for i, values in enumerate(run[reading]):
                by_shape.setdefault(tuple(values.shape), []).append(i)
            parts: list[list[int]] = []
            for shape, alike in by_shape.items():
                # Limited, so that no second full copy of the readings is made.
                most = max(1, AT_ONCE // max(1, math.prod(shape)))
                parts += [alike[start : start + most] for start in range(0, len(alike), most)]
            for m, metric in enumerate(self.plan.metrics):
                if metric.site == reading[0] and metric.layer in (None, reading[1]):
                    for examples in parts:
                        values = torch.stack([run[reading][i] for i in examples])
                        columns[examples, m] = self.apply(m, reading, values, examples)
            table[reading] = columns
        return table

    def _visible_edges(self, cuts: Sequence[Sequence[Edit]]) -> Float[Tensor, " _"]:
        """Count the visible edges that variants sever, over their layers and heads; NaN for those that sever none."""
        # By identity: cells of a window over layers share one matrix.
        matrices = {id(cut.edges): cut.edges for some in cuts for cut in some}
        device = next(iter(matrices.values())).device
        visible = torch.stack([seen.to(device) for seen in self._visible.values()])
        # Each matrix is counted in all layers at once, and all counts are copied together: one wait for the device.
        counts = torch.stack([(visible[:, : len(one), : len(one)] & one).sum((1, 2)) for one in matrices.values()])
        rows = (dict(zip(self._visible, row, strict=True)) for row in counts.tolist())
        by_layer = dict(zip(matrices, rows, strict=True))

        def count(cut: Edit) -> int:
            each = sum(by_layer[id(cut.edges)][layer] for layer in cut.layers)
            return each * (self.plan.model.shape.n_heads if cut.heads is None else len(cut.heads))

        counted = [sum(map(count, some)) if some else math.nan for some in cuts]
        return torch.tensor(counted, dtype=torch.float64)
