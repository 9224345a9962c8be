"""What metrics read of a group's runs, and what they give: on the unedited runs once, on edited ones as these come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.errors import InputError
from headwater.kernels.devices import to_device, to_device_many
from headwater.models.sites import SITES
from headwater.patching.edits import LOGITS, CellTable, CellTemplate, Deliver, Edit, Indices, Reading, Variants
from headwater.patching.metrics import Metric
from headwater.patching.plan import Group, Kept, columns_of

Reads: TypeAlias = dict[Reading, list[Tensor]]
"""By reading, each example's values at its kept positions."""
AT_ONCE = 1 << 20
"""About how many numbers of unedited runs a metric is given together."""


@dataclass
class Measured:
    """What cells came to: by cell and metric, and the baselines of their examples."""

    values: Float[Tensor, "cell metric"]
    unedited: Float[Tensor, "cell metric"]
    """The same reading of the base run."""
    other: Float[Tensor, "cell metric"]
    """The same reading of the other prompt's run; NaN without one."""
    edges: Float[Tensor, " cell"]
    """How many visible edges a cell severs, over its layers and heads; NaN for cells that sever none."""
    before: dict[Reading, Float[Tensor, "cell width"]] = field(default_factory=dict)
    """The states requested, of the base run."""
    after: dict[Reading, Float[Tensor, "cell width"]] = field(default_factory=dict)
    """The same after the edits."""
    engine: str = ""
    """The name of the runner."""

    @classmethod
    def empty(cls, n_cells: int, n_metrics: int) -> Measured:
        """Return NaN for so many cells."""
        values, unedited, other = (torch.full((n_cells, n_metrics), torch.nan, dtype=torch.float64) for _ in range(3))
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
    """Read whole runs of a group's examples at some positions; without logits, everything else that is read."""
    columns = columns_of(positions).tolist()
    read: Reads = {}
    for site, layer in group.readings:
        if site != LOGITS:
            activation = activations[SITES[site].hook_name(layer)]
            at = to_device_many([torch.tensor(kept) for kept in positions], activation.device)
            read[site, layer] = [activation[i, own] for i, own in enumerate(at)]
        elif logits is not None:
            places = [torch.tensor([columns.index(p) for p in kept]) for kept in positions]
            read[site, layer] = [logits[i, own] for i, own in enumerate(to_device_many(places, logits.device))]
    return read


class Readout:
    """What metrics give on the unedited runs of a group, and on edited ones.

    Args:
        group: whose runs.
        base: what was read of the unedited runs of the prompts that are edited.
        other: the same of the other prompts.
        visible: which keys each query sees, by layer: wherever edges are severed.
        answers: the tokens whose logits are read, where not all are.
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
        self._places = [self._places_of(m) for m in range(len(self.plan.metrics))]
        # The base run of an attribution has a graph, which baselines do not need and would keep.
        with torch.no_grad():
            self._of_base = self._baseline(base)
            self._of_other = self._baseline(other) if other is not None else None

    def unedited(self, cells: range) -> Measured:
        """Return what cells measure on the unedited runs, as if their edits changed nothing."""
        chosen = self.plan.cells.part(cells)
        measured = Measured.empty(len(chosen), len(self.plan.metrics))
        rows = chosen.example - self.examples.start
        measured.unedited = self._of(self._of_base, chosen, rows)
        if self._of_other is not None:
            measured.other = self._of(self._of_other, chosen, rows)
        cutting = [any(not edit.writes for edit in one.edits) for one in chosen.templates]
        if self.plan.metrics and len(cutting_cells := np.flatnonzero(np.array(cutting)[chosen.template])):
            numbers, which = np.unique(chosen.template[cutting_cells], return_inverse=True)
            edges = self._visible_edges([chosen.templates[number] for number in numbers])
            measured.edges[torch.from_numpy(cutting_cells)] = edges[torch.from_numpy(which.reshape(-1))]
        # A cell that nothing is delivered for keeps these: its effect is 0 without a run.
        measured.values = measured.unedited.clone()
        states = {reading: torch.stack([self.base[reading][i][-1] for i in rows]) for reading in self.plan.states}
        measured.before, measured.after = states, {reading: state.clone() for reading, state in states.items()}
        return measured

    def collect(self, cells: range, run: Callable[[Variants, Deliver], None]) -> Measured:
        """Return what cells measure when `run` delivers what is read of their variants."""
        chosen = self.plan.cells.part(cells)
        variants = self.group.variants(chosen)
        measured_cells = self.unedited(cells)
        readings = [[self.plan.reading(metric, one.edits) for metric in self.plan.metrics] for one in chosen.templates]

        def deliver(reading: Reading, indices: Indices, read: Tensor) -> None:
            for m in range(len(self.plan.metrics)):
                asks = np.array([own[m] == reading for own in readings])[chosen.template[indices]]
                if asks.any():
                    asking = indices[asks]
                    # Usually all variants of a reading ask: no copy of logits then.
                    part = read if asks.all() else read[to_device(np.flatnonzero(asks), read.device)]
                    measured = self.apply(m, reading, part, variants.example[asking])
                    measured_cells.values[torch.from_numpy(asking), m] = measured
            # The last of the kept positions, as in `unedited`.
            if reading in measured_cells.after:
                measured_cells.after[reading][to_device(indices, measured_cells.after[reading].device)] = read[:, -1]

        run(variants, deliver)
        return measured_cells

    def apply(self, m: int, reading: Reading, read: Tensor, owners: Indices | Sequence[int]) -> Float[Tensor, " row"]:
        """Apply one metric to rows that belong to these examples of the group."""
        metric, owners = self.plan.metrics[m], np.asarray(owners)
        measured = torch.empty(len(owners), dtype=torch.float64)
        counts = self._places[m][1][owners]
        # Roles have as many tokens as each prompt gives them: a metric is given rows of one number of positions.
        for count in np.unique(counts):
            rows = np.flatnonzero(counts == count)
            part = read if len(rows) == len(owners) else read[to_device(rows, read.device)]
            who = owners[rows]
            values = self._metric_positions(m, part, who)
            answers = self._answers(m, reading, who, read.device)
            clean = None
            if metric.against_clean and self._clean is not None:
                # Detached: with attribution the clean run is what is compared with, not what is differentiated.
                clean_values = torch.stack([self._clean[reading][i].detach() for i in who])
                clean = self._metric_positions(m, clean_values, who)
            # Before the metric counts: one that mixes rows would give each cell a share of its tile's other cells.
            self._check_metric(metric, values, answers, clean)
            # float64 from here on: effects are differences of nearly equal numbers.
            measured[torch.from_numpy(rows)] = metric.measure(values, answers, clean).double().cpu()
            self._refuse_no_number(metric, values, measured, rows, who)
        return measured

    def _baseline(self, run: Reads) -> dict[Reading, Float[Tensor, "example metric"]]:
        """By reading, every metric that could read it, on an unedited run."""
        table: dict[Reading, Tensor] = {}
        for reading in self.group.readings:
            columns = torch.full((len(self.examples), len(self.plan.metrics)), torch.nan, dtype=torch.float64)
            for m, metric in enumerate(self.plan.metrics):
                if metric.site == reading[0] and metric.layer in (None, reading[1]):
                    for examples in _batches(run[reading]):
                        values = torch.stack([run[reading][i] for i in examples])
                        columns[examples, m] = self.apply(m, reading, values, examples)
            table[reading] = columns
        return table

    def _of(self, baseline: Mapping[Reading, Tensor], cells: CellTable, rows: Indices) -> Float[Tensor, "cell metric"]:
        """What each cell's metrics gave on an unedited run of its example."""
        table = torch.full((len(cells), len(self.plan.metrics)), torch.nan, dtype=torch.float64)
        for m, metric in enumerate(self.plan.metrics):
            readings = [self.plan.reading(metric, one.edits) for one in cells.templates]
            for reading in {readings[number] for number in np.unique(cells.template)}:
                reading_cells = np.flatnonzero(np.array([one == reading for one in readings])[cells.template])
                table[torch.from_numpy(reading_cells), m] = baseline[reading][torch.from_numpy(rows[reading_cells]), m]
        return table

    def _check_metric(self, metric: Metric, values: Tensor, answers: list[Tensor], clean: Tensor | None) -> None:
        """Check once per sweep that a metric treats each row by itself, and reads what is there."""
        # Once per sweep, as the check runs the metric on some rows again.
        if metric.name not in self.plan.checked:
            with torch.no_grad():
                metric.refuse_misread(values.detach(), answers, clean)
            self.plan.checked.add(metric.name)

    def _refuse_no_number(
        self, metric: Metric, values: Tensor, measured: Tensor, rows: Indices, owners: Indices
    ) -> None:
        """Refuse NaN and infinity that a metric makes of finite values."""
        for i in (~measured[torch.from_numpy(rows)].isfinite()).nonzero().flatten().tolist():
            # Where the values themselves are not finite the model is at fault, which another check names.
            if bool(values[i].isfinite().all()):
                raise InputError(
                    f"The metric {metric.name!r} gave {float(measured[rows[i]])} for example "
                    f"{self.examples[owners[i]]}, of values that are all finite: mend it there (log_softmax in place "
                    "of log(softmax), no division by 0)."
                )

    def _answers(self, m: int, reading: Reading, owners: Indices, device: torch.device) -> list[Tensor]:
        """Where a metric's answers are in what was read: token ids, or columns where only answers were read."""
        answers = self.plan.answers[m]
        if self._answer_tokens is None or reading[0] != LOGITS:
            among = torch.from_numpy(owners + self.examples.start)
            return [to_device(ids[among], device) for ids in answers]
        pairs = zip(self.plan.answers[:m], self.plan.metrics, strict=False)
        # Columns follow the answers of the metrics of logits in turn, as `Plan.only_answers` stacks them.
        before = sum(len(ids) for ids, metric in pairs if metric.site == LOGITS)
        return [torch.full((len(owners),), before + k, device=device) for k in range(len(answers))]

    def _places_of(self, m: int) -> tuple[Int[np.ndarray, "example position"], Indices]:
        """By example: where one metric's positions are among those kept for all metrics, and how many they are."""
        kept = [self.plan.kept[i][m] for i in self.examples]
        counts = np.array([len(positions) for positions in kept])
        places = np.zeros((len(kept), max(counts, default=0)), dtype=np.int64)
        for i, positions in enumerate(kept):
            places[i, : len(positions)] = [self.group.kept[i].index(position) for position in positions]
        return places, counts

    def _metric_positions(self, m: int, read: Tensor, owners: Indices) -> Tensor:
        """Of the positions kept for all metrics, take one metric's, of examples that have as many of them."""
        places, counts = self._places[m]
        count = int(counts[owners[0]]) if len(owners) else 0
        index = places[owners, :count]
        # One metric, or several of the same positions: what was read is passed on without a copy.
        if count == read.shape[1] and bool((index == np.arange(count)).all()):
            return read
        rows = torch.arange(len(read), device=read.device)[:, None]
        return read[rows, to_device(index, read.device)]

    def _visible_edges(self, templates: Sequence[CellTemplate]) -> Float[Tensor, " template"]:
        """Count the visible edges that cells sever, over their layers and heads."""
        cuts = [[edit for edit in template.edits if not edit.writes] for template in templates]
        # By identity: cells of a window over layers share one matrix.
        matrices = {id(cut.edges): cut.edges for some in cuts for cut in some}
        device = next(iter(matrices.values())).device
        visible = torch.stack([seen.to(device) for seen in self._visible.values()])
        # A matrix is counted in every layer at once, and all counts are fetched together: one wait for the device.
        counts = torch.stack([(visible[:, : len(one), : len(one)] & one).sum((1, 2)) for one in matrices.values()])
        by_layer = dict(
            zip(matrices, (dict(zip(self._visible, row, strict=True)) for row in counts.tolist()), strict=True)
        )
        n_heads = self.plan.model.shape.n_heads

        def count(cut: Edit) -> int:
            each = sum(by_layer[id(cut.edges)][layer] for layer in cut.layers)
            return each * (n_heads if cut.heads is None else len(cut.heads))

        return torch.tensor([float(sum(map(count, some))) for some in cuts], dtype=torch.float64)


def _batches(read: Sequence[Tensor]) -> Iterator[list[int]]:
    """Number examples that read as many positions, so many at once that what they read is not held twice at length."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for i, values in enumerate(read):
        by_shape.setdefault(tuple(values.shape), []).append(i)
    for shape, examples in by_shape.items():
        most = max(1, AT_ONCE // max(1, math.prod(shape)))
        yield from (examples[start : start + most] for start in range(0, len(examples), most))
