"""The edits and readings of a sweep: edits, the table of cells, the variants of runs, and functions that apply edits.

    Edit          writes an activation at a site, over layers, positions, heads; or severs attention edges
    CellTemplate  the edits of a cell with its labels, shared by all examples that have the same
    CellTable     the example and template of each cell: a sweep of 24 places over 500 prompts is 24 templates
    Variant       what some cells share: the edits of a run, from where it is recomputed, what is read afterwards
    Variants      the edited runs of one walk through the layers: each has an example and a variant

Both engines, whole runs and the walk, take the same variants and apply them by `write_tokens` and `write_patterns`.

A row of an activation is the vector of one token or, at a site with heads, of one head at one token; in a pattern, the
weights of one query of one head. Values are either fixed (another run's activations, a mean, zero) or computed from the
activation by a function of rows, which is called once for all rows that are written together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from headwater.kernels.devices import refuse_too_large, to_device
from headwater.models.sites import Site, Stage

LOGITS = "logits"
AxisName: TypeAlias = Literal["layer", "position", "head", "key", "feature"]
AXES = get_args(AxisName)
"""The axes that a sweep may run over."""
NEVER = 1 << 40
"""A position that no prompt has."""
CELL_BYTES = 800
"""Memory of a cell in bytes, from its first label to its row of the table."""
PATTERNS_AT_ONCE = 1 << 22
"""Most attention weights written at once."""

Indices: TypeAlias = Int[np.ndarray, " _"]
Place: TypeAlias = tuple[str, int]
"""A site and a layer."""
Reading: TypeAlias = Place
"""The site and layer that a metric reads; `("logits", n_layers)` for the logits."""
Deliver: TypeAlias = Callable[[Reading, Indices, Tensor], None]
"""Callback that takes a reading, the indices of the variants read, and their values, `variant kept width`."""


@dataclass(frozen=True)
class ReplacementSpec:
    """Values with their arguments: what `hw.add`, `hw.scale`, `hw.noise`, `hw.mean` and `hw.resample` return."""

    kind: str
    """The name of a kind of values."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Edit:
    """One change to a run: other values at a site, or (a knockout) severed attention edges in its pattern."""

    site: Site
    layers: range
    positions: tuple[int, ...] | None = None
    """Token positions (query positions of a pattern); None means all."""
    heads: tuple[int, ...] | None = None
    keys: tuple[int, ...] | None = None
    """Key positions of a pattern; None means all."""
    units: tuple[int, ...] | None = None
    """Indices along the last axis, such as neurons; None means all."""
    since: int = 0
    """Nothing changes before this position: the values equal those of the run itself, or no query loses a key."""
    source_layer: int | None = None
    """The layer that the written values come from; None means the edited layer."""
    sample: int = 0
    """The draw to write, if values are drawn several times."""
    severed: Bool[Tensor, "query key"] | None = None
    """Instead of values: True where the query must not read the key."""
    after_softmax: bool = False
    """Set severed weights to 0, instead of their scores to minus infinity (which makes the other weights grow)."""

    @property
    def writes(self) -> bool:
        """Whether the edit writes values, rather than severing edges."""
        return self.severed is None

    @property
    def edges(self) -> Bool[Tensor, "query key"]:
        """The severed edges; only for an edit that severs edges."""
        assert self.severed is not None
        return self.severed

    def source_layer_of(self, layer: int) -> int:
        """Return the layer that the values written at `layer` come from."""
        return layer if self.source_layer is None else self.source_layer

    @cached_property
    def first_position(self) -> int:
        """The first position whose state can change; beyond any prompt if none can."""
        # A query before the first edited key cannot see it, so its weights do not change.
        first = self.since if self.keys is None else max(self.since, min(self.keys))
        return first if self.positions is None else min((p for p in self.positions if p >= first), default=NEVER)


@dataclass(frozen=True, eq=False)
class CellTemplate:
    """The part of cells that several examples may share: labels and edits."""

    labels: Mapping[str, Any]
    """The coordinates of the cells, as they appear in the table."""
    edits: tuple[Edit, ...]
    nest: tuple[Any, ...] | None = None
    """Identifies the nest of windows that the cell is in, if any.

    The cells of an example in one nest begin at one layer and end ever later. The last one is the parent of the others:
    it makes all their edits, and until its own edits end, each of the others is the same run as the parent.
    """
    token_at: tuple[int, ...] | None = None
    """The positions whose tokens the table shows."""

    @cached_property
    def noop(self) -> CellTemplate:
        """The same cells in examples in which their edits change nothing; made once for all of these."""
        return replace(self, edits=tuple(replace(edit, since=NEVER) for edit in self.edits))

    def writes_inputs_outside(self, tokens: tuple[int, ...]) -> bool:
        """Return whether all edits write to the first layer alone, from the same layer, and to none of these tokens."""
        return all(
            edit.layers == range(1) and edit.source_layer is None and not {*(edit.positions or tokens)} & {*tokens}
            for edit in self.edits
        )


@dataclass(frozen=True, eq=False)
class CellTable:
    """Many cells: the cells of an example are adjacent, and the examples are in order."""

    templates: tuple[CellTemplate, ...]
    example: Indices
    template: Indices
    """By cell: its index in `templates`."""

    @classmethod
    def of(cls, by_example: Iterable[tuple[int, Sequence[CellTemplate]]]) -> CellTable:
        """Concatenate the cells of each example."""
        # A list shared by several examples is numbered once: 500 prompts of one shape cost as much as one.
        rows = list(by_example)
        lists = {id(some): some for _, some in rows}
        templates = {id(template): template for some in lists.values() for template in some}
        number = {one: i for i, one in enumerate(templates)}
        numbers = {one: np.array([number[id(template)] for template in some], int) for one, some in lists.items()}
        template = np.concatenate([np.zeros(0, dtype=np.int64), *(numbers[id(some)] for _, some in rows)])
        example = np.repeat(np.array([one for one, _ in rows], dtype=np.int64), [len(some) for _, some in rows])
        return cls(tuple(templates.values()), example, template)

    @classmethod
    def unedited(cls, n_examples: int) -> CellTable:
        """Return a cell without edits for each example."""
        return cls((CellTemplate({}, ()),), np.arange(n_examples), np.zeros(n_examples, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.example)

    def __iter__(self) -> Iterator[tuple[int, CellTemplate]]:
        return ((int(i), self.templates[t]) for i, t in zip(self.example, self.template, strict=True))

    def part(self, cells: range) -> CellTable:
        """Return a range of the cells."""
        part = slice(cells.start, cells.stop)
        return CellTable(self.templates, self.example[part], self.template[part])

    def among(self, examples: range) -> range:
        """Return the range of the cells of consecutive examples."""
        first, last = np.searchsorted(self.example, [examples.start, examples.stop])
        return range(int(first), int(last))

    @cached_property
    def used(self) -> list[CellTemplate]:
        """The templates that some cell uses."""
        return [self.templates[number] for number in np.unique(self.template)]

    @cached_property
    def first_position(self) -> Int[np.ndarray, " cell"]:
        """By cell: the first position whose state can change."""
        firsts = [min((edit.first_position for edit in one.edits), default=NEVER) for one in self.templates]
        return np.array(firsts, dtype=np.int64)[self.template]

    def parents(self) -> Int[np.ndarray, " cell"]:
        """Return by cell its parent, the last cell of its nest; -1 for a parent itself and for cells without a nest."""
        parents = np.full(len(self), -1)
        in_nest = np.array([one.nest is not None for one in self.templates], dtype=bool)[self.template]
        # From the last cell back: the first cell found of each nest is the parent of the others.
        parent_of: dict[tuple[Any, ...], int] = {}
        # Loops over the cells of nests only: sweeps without windows have none.
        for i in np.flatnonzero(in_nest)[::-1].tolist():
            parent = parent_of.setdefault((int(self.example[i]), self.templates[self.template[i]].nest), i)
            parents[i] = parent if parent != i else -1
        return parents


@dataclass(frozen=True, eq=False)
class Variant:
    """The edits and readings that the same cell of several examples shares."""

    edits: tuple[Edit, ...]
    kept: tuple[int, ...]
    """The positions that metrics read, ascending."""
    of_metrics: tuple[Reading, ...]
    """By metric: what it reads."""
    states: tuple[Reading, ...] = ()
    """What is read besides."""
    whole: int | None = None
    """With non-causal attention, the length of the prompt: an edit anywhere reaches all of it."""

    @cached_property
    def readings(self) -> tuple[Reading, ...]:
        """All that is read, each once."""
        return tuple(sorted({*self.of_metrics, *self.states}))

    @cached_property
    def joins(self) -> tuple[int, Stage]:
        """The layer of the first edit, and the stage at which it acts there."""
        layer = min(edit.layers.start for edit in self.edits)
        # Later layers are computed anyway; only the stages in the first layer decide what can be taken as recorded.
        first_edits = (edit for edit in self.edits if edit.layers.start == layer)
        acting = {edit.site.stage if edit.writes else Stage.ATTENTION for edit in first_edits}
        stages = {stage for stage in acting if stage is not None}  # None if the site does not specify it
        first = min(stages)
        if Stage.NEURONS in stages and first < Stage.NEURONS:  # in both parts of the block: both are computed
            first = min(first, Stage.PATTERN)
        return layer, first

    @cached_property
    def first_change(self) -> int:
        """The first position whose state an edit can change."""
        return min(edit.first_position for edit in self.edits)

    @cached_property
    def can_change_output(self) -> bool:
        """Whether a position that is read can see any edit: if not, the effect is 0 and nothing is run."""
        return self.whole is not None or self.first_change <= self.kept[-1]


@dataclass(frozen=True, eq=False)
class Variants:
    """The edited runs of one walk: each has an example and one of a few variants (`distinct`)."""

    distinct: tuple[Variant, ...]
    which: Indices
    """By run: the index of its variant."""
    example: Indices
    """By run: the index of its example in the group."""
    parent: Indices
    """By run: the run of its parent, which makes these edits and, in later layers, more of them; -1 without one."""

    def __len__(self) -> int:
        return len(self.which)

    def __getitem__(self, index: int) -> Variant:
        return self.distinct[self.which[index]]

    @property
    def can_change_output(self) -> Bool[np.ndarray, " _"]:
        """By run: whether a reading can differ from the reading without the edits."""
        return np.array([variant.can_change_output for variant in self.distinct], dtype=bool)[self.which]


def refuse_too_many_cells(n_cells: int) -> None:
    """Refuse a sweep whose list of cells would not fit in memory."""
    advice = "Sweep over fewer axes (over=), layers, heads, positions or prompts."
    refuse_too_large(f"The list of this sweep's {n_cells:,} cells", n_cells * CELL_BYTES, torch.device("cpu"), advice)


@dataclass(frozen=True, eq=False)
class EditedRows:
    """The rows of an activation that are changed together: one entry per row, on the activation's device."""

    site: str
    layer: int
    example: Int[Tensor, " row"]
    """The index of its prompt."""
    position: Int[Tensor, " row"]
    """The position of its token; in a pattern, of the query."""
    head: Int[Tensor, " row"] | None
    """The index of its head, at sites with heads: of key-value heads for `k` and `v`."""
    sample: Int[Tensor, " row"]
    """The index of its draw, if values are drawn several times; else 0."""

    def __len__(self) -> int:
        return len(self.example)

    def part(self, chosen: Tensor) -> EditedRows:
        """Return some of the rows."""
        head = None if self.head is None else self.head[chosen]
        at = (self.example[chosen], self.position[chosen], head, self.sample[chosen])
        return EditedRows(self.site, self.layer, *at)


Change: TypeAlias = Callable[[Tensor, Tensor | None, EditedRows], Tensor]
"""Computes rows from rows: takes the current rows, `row width`, the other run's rows, and which rows they are."""


@dataclass(frozen=True)
class ReplacementValues:
    """The values that `Edit` writes at the examples of a group."""

    by_site: Mapping[Place, Tensor]
    """By site and layer, `example position ...`: the values to write, or the other run's values for a change."""
    change: Change | None = None
    """Computes the written values from the current ones; None if `by_site` is written unchanged."""
    examples: Sequence[int] = ()
    """The indices by which changes refer to the examples of the group."""
    lengths: Sequence[int] = ()
    """Number of tokens of each example's prompt, for changes."""
    samples: int = 1
    """Number of consecutive draws of each example on the first axis of `by_site`."""

    def taken(self, site: Site, layer: int, example: Tensor, sample: Tensor, *at: Tensor) -> Tensor | None:
        """Return the values of `by_site` at some rows; None if it has none for the site and layer."""
        value = self.by_site.get((site.name, layer))
        # Draws of an example are consecutive, so that one index selects example and draw.
        return None if value is None else value[example * self.samples + sample, *at]

    def known(self, example: Tensor) -> Tensor:
        """Return the indices by which changes refer to some examples of the group."""
        return to_device(torch.tensor(self.examples), example.device)[example]


@dataclass(frozen=True, eq=False)
class TokenSpanEdit:
    """An edit with the adjacent tokens of one or more examples that it acts on, located in an activation."""

    edit: Edit
    example: Indices
    """Indices of examples in the group."""
    start: int
    """The position of the first token."""
    length: int
    offset: Indices
    """By example: the index of its first token among the activation's tokens; for patterns, the index of its row."""

    @property
    def positions(self) -> Int[np.ndarray, " position"]:
        """The edited positions within this span."""
        if self.edit.positions is None:
            return np.arange(self.start, self.start + self.length)
        # Positions before a row are the recorded run's, and positions after it are never read.
        here = range(self.start, self.start + self.length)
        return np.array([position for position in self.edit.positions if position in here], dtype=np.int64)


def write_tokens(
    activation: Shaped[Tensor, "token ..."],
    span_edits: Sequence[TokenSpanEdit],
    values: ReplacementValues,
    site: Site,
    layer: int,
) -> None:
    """Apply edits in place to an activation of tokens laid end to end, `token (head) width`.

    At a site that goes through a dictionary, all rows are encoded and decoded at once.
    """
    # One gather and one scatter per kind of edit: a launch for each edit would cost more than its rows.
    groups: dict[tuple[int, bool, bool], list[TokenSpanEdit]] = {}
    for span_edit in span_edits:
        edit = span_edit.edit
        # An index of edits of all heads has no head axis: it cannot share a scatter with one that has.
        groups.setdefault((edit.source_layer_of(layer), edit.heads is None, edit.units is None), []).append(span_edit)
    for (source, all_heads, whole), group in groups.items():
        index = _written_rows(group)
        if not index.size:
            continue
        _, offset, place, head, example, sample, position = to_device(index, activation.device)
        tokens, heads = offset + place, [] if all_heads else [head]
        units = None if whole else _units(group, activation.device)
        # Fixed values: no need to read the current ones.
        if values.change is None and whole and "feature" not in site.axes:
            taken = values.taken(site, source, example, sample, position, *heads)
            assert taken is not None
            activation[tokens, *heads] = taken
            continue
        at = (example, position, sample, *heads)
        edited = partial(_edited, values=values, site=site, layer=layer, source=source, at=at, units=units)
        activation[tokens, *heads] = site.written(activation[tokens, *heads], edited)


def _edited(
    current: Tensor,
    values: ReplacementValues,
    site: Site,
    layer: int,
    source: int,
    at: Sequence[Tensor],
    units: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return rows after edits: `current`, `row (head) width`, is a copy, which may be written in place.

    `at` is their example, position, sample and, where heads are chosen, head; `units` is what `_units` returns, unless
    all entries are written.
    """
    example, position, sample, *heads = at
    if values.change is None and units is not None:
        row, unit = units
        # In a large layer only the chosen neurons are gathered, not whole rows.
        new = values.taken(site, source, example[row], sample[row], position[row], unit)
        assert new is not None
        current[row, unit] = new.to(current)
        return current
    replacement = values.taken(site, source, example, sample, position, *heads)
    if values.change is not None:
        # A change receives whole rows, even if only some of the entries that it returns are kept.
        prompts, head, before = values.known(example), heads[0] if heads else None, current
        if of_all_heads := site.has_heads and head is None:
            # It receives one row per head: the head's index is part of the row's place.
            n_heads = current.shape[1]
            head = torch.arange(n_heads, device=current.device).repeat(len(current))
            prompts, position, sample = (one.repeat_interleave(n_heads) for one in (prompts, position, sample))
            before, replacement = current.flatten(0, 1), None if replacement is None else replacement.flatten(0, 1)
        changed = values.change(before, replacement, EditedRows(site.name, layer, prompts, position, head, sample))
        replacement = changed.unflatten(0, current.shape[:2]) if of_all_heads else changed
    assert replacement is not None
    if units is None:
        return replacement.to(current)
    current[units] = replacement[units].to(current)
    return current


def write_patterns(
    activation: Float[Tensor, "row head position key"],
    span_edits: Sequence[TokenSpanEdit],
    columns: Int[Tensor, "row key"],
    values: ReplacementValues,
    site: Site,
    layer: int,
) -> None:
    """Apply edits in place to patterns of padded rows, whose key axes hold the positions `columns`.

    The offset of a span edit is the index of its sequence. `columns` is -1 where a key has no position in its row. A
    change receives the weights of all keys of the prompt in order, 0 where a key is missing. Rows are written together;
    edits of one row act in turn, each on the result of the one before.
    """
    turns: Counter[int] = Counter()
    together: dict[tuple[int, int, int], list[TokenSpanEdit]] = {}
    for span_edit in span_edits:
        source, row = span_edit.edit.source_layer_of(layer), int(span_edit.offset[0])
        # A change receives rows with one number of keys, that of the prompt, without padding.
        for example in np.unique(span_edit.example).tolist() if values.change is not None else [None]:
            part = span_edit
            if example is not None:
                mine = span_edit.example == example
                part = replace(span_edit, example=span_edit.example[mine], offset=span_edit.offset[mine])
            length = 0 if example is None else values.lengths[example]
            together.setdefault((turns[row], source, length), []).append(part)
        turns[row] += 1
    # In turns: a later edit of a row must act on the result of the one before.
    for (_, source, length), group in sorted(together.items(), key=lambda one: one[0]):
        index = _written_rows(group, activation.shape[1])
        keys = _chosen_keys(group, activation.shape[-1])
        most = max(1, PATTERNS_AT_ONCE // activation.shape[-1])
        for start in range(0, index.shape[1], most):
            at = to_device(index[:, start : start + most], activation.device)
            of_span_edit, row, query, head, example, sample, position = at
            named = columns[row]
            replacement = values.taken(site, source, example, sample, head, position)
            current = activation[row, head, query]
            if values.change is not None:
                # Keys without a position go into one extra column past the prompt's, which is cut off.
                place = named.where(named >= 0, length)
                ordered = current.new_zeros(len(current), length + 1).scatter(1, place, current)[:, :length]
                other = None if replacement is None else replacement[:, :length].contiguous()
                rows = EditedRows(site.name, layer, values.known(example), position, head, sample)
                replacement = values.change(ordered.contiguous(), other, rows)
            assert replacement is not None
            # Values are in the order of the prompt's positions; the pattern has the recorded keys first.
            written = replacement.gather(1, named.clamp_min(0)).masked_fill(named < 0, 0.0)
            if keys is not None:
                chosen = to_device(keys, activation.device)[of_span_edit[:, None], named]
                written = torch.where(chosen, written, current)
            activation[row, head, query] = written


def _written_rows(span_edits: Sequence[TokenSpanEdit], n_heads: int = 1) -> Int[np.ndarray, "7 row"]:
    """Return span edit, offset, place in the span, head, example, sample and position of each written row.

    An edit of all heads has a row for each of `n_heads`, or one for all of them.
    """
    parts = []
    for number, span_edit in enumerate(span_edits):
        positions, heads = span_edit.positions[:, None], span_edit.edit.heads
        listed = np.arange(n_heads) if heads is None else np.array(heads, dtype=np.int64)
        offset, example = (one[:, None, None] for one in (span_edit.offset, span_edit.example))
        at = (number, offset, positions - span_edit.start, listed, example, span_edit.edit.sample, positions)
        shape = (len(span_edit.example), len(positions), len(listed))
        parts.append(np.stack([np.broadcast_to(one, shape).reshape(-1) for one in at]))
    return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)


def _chosen_keys(span_edits: Sequence[TokenSpanEdit], n_keys: int) -> Bool[np.ndarray, "_ key"] | None:
    """Return by span edit which keys are written, and last whether keys outside the row are; None if all are."""
    if all(span_edit.edit.keys is None for span_edit in span_edits):
        return None
    chosen = np.zeros((len(span_edits), n_keys + 1), dtype=bool)
    for of_span_edit, span_edit in zip(chosen, span_edits, strict=True):
        keys = span_edit.edit.keys
        of_span_edit[slice(None) if keys is None else [key for key in keys if key < n_keys]] = True
    return chosen


def _units(span_edits: Sequence[TokenSpanEdit], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return, for each written entry, the index of its row in `_written_rows`, and the index of its unit."""
    rows, units, before = [], [], 0
    for span_edit in span_edits:
        length, chosen = len(span_edit.example) * len(span_edit.positions), np.array(span_edit.edit.units)
        rows.append(np.repeat(np.arange(before, before + length), len(chosen)))
        units.append(np.tile(chosen, length))
        before += length
    return to_device(np.concatenate(rows), device), to_device(np.concatenate(units), device)
