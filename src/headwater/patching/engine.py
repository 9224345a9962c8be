"""The sweep engine: cells in, effects out.

1. Examples are taken in groups whose recorded activations fit in memory; a group's cells are cut into waves.
2. For each group: one recorded run of both prompts of each pair, as one batch, and the metrics on both.
3. For each wave: one walk down the layers (`headwater.patching.wave`), or one whole run per cell
   (`headwater.patching.whole`) where the model cannot be stepped through. The first time, a row without any edit is
   sent down; when its logits are not the plain run's, the sweep falls back to whole runs and says so.
4. A cell that no read position can feel has effect 0, without a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.models.blocks import cannot_step
from headwater.models.memory import in_halves
from headwater.patching.footprint import examples_at_once
from headwater.patching.group import WAVEFRONT, WHOLE_RUNS, Group
from headwater.patching.job import Job, waves
from headwater.patching.variants import Reading, Replace
from headwater.progress import progress_bar
from headwater.runs.analysis import Run

T = TypeVar("T")


@dataclass
class Measured:
    """What a sweep found: by cell and metric, and the two baselines by example and metric."""

    values: Float[Tensor, "cell metric"]
    unedited: Float[Tensor, "cell metric"]
    """The same reading of the base run."""
    other: Float[Tensor, "cell metric"]
    """The same reading of the other prompt's run; NaN without one."""
    edges: Float[Tensor, " cell"]
    """How many visible edges a cell severs, over its layers and heads."""
    engine: str = WAVEFRONT


def measure(job: Job, run: Run) -> Measured:
    """Measure the cells of a sweep, a wave in a piece."""
    n_cells, n_metrics = len(job.cells), len(job.metrics)
    values, unedited, other = (torch.full((n_cells, n_metrics), torch.nan, dtype=torch.float64) for _ in range(3))
    edges = torch.full((n_cells,), torch.nan, dtype=torch.float64)
    walker = _Walker(job)
    planned = list(waves(job))

    def compute(wave: tuple[range, range]) -> dict[str, Tensor]:
        return walker.measure(*wave)

    with run.bar("cells", "cell", n_cells) as bar:
        pieces = run.pieces("wave", planned, compute, bar, lambda wave: len(wave[1]))
        for (_, cells), piece in zip(planned, pieces, strict=True):
            for table, name in ((values, "values"), (unedited, "unedited"), (other, "other"), (edges, "edges")):
                table[cells.start : cells.stop] = piece[name]
            if bool(piece["whole"]):
                walker.engine = WHOLE_RUNS
    return Measured(values, unedited, other, edges, walker.engine)


def collect_states(
    job: Job, progress: bool = True
) -> Iterator[tuple[range, dict[Reading, Tensor], dict[Reading, Tensor]]]:
    """Yield the states that a job asks for, a wave of cells at a time: the cells, before, after."""
    walker = _Walker(job)
    with progress_bar(progress, total=len(job.cells), desc="prompts", unit="prompt") as bar:
        for examples, cells in waves(job):
            for part, states in walker.in_groups(examples, cells, lambda group, part: (part, group.states(part))):
                yield part, *states
            bar.update(len(cells))


class _Walker:
    """Measures waves one after another, keeping the runs of the current group."""

    def __init__(self, job: Job):
        self.job = job
        self.engine = WAVEFRONT
        self.group: Group | None = None
        self.most = examples_at_once(job)
        with job.model.lock:  # another thread's hooks are not the model's own
            reason = cannot_step(job.model) or _inside(job)
        if reason:
            self._fall_back(reason)

    def measure(self, examples: range, cells: range) -> dict[str, Tensor]:
        """Measure the cells of one wave."""
        parts = self.in_groups(examples, cells, Group.measure)
        measured = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return measured | {"whole": torch.tensor(self.engine == WHOLE_RUNS)}

    def in_groups(self, examples: range, cells: range, work: Callable[[Group, range], T]) -> list[T]:
        """Do the work on cells of a group; when memory runs out, on half of its examples at a time from now on."""
        found: list[T] = []

        def do(part: range) -> None:
            own = [cell for cell in cells if self.job.cells[cell].example in part]
            if own:
                found.append(work(self.group_of(part), range(own[0], own[-1] + 1)))

        most = min(self.most, len(examples))
        with torch.inference_mode(), self.job.model.lock:
            for start in range(0, len(examples), most):
                parts = in_halves(examples[start : start + most], do)
                self.most = most // len(parts) if len(parts) > 1 else self.most
        return found

    def group_of(self, examples: range) -> Group:
        """Return the runs of a group, made now unless they are the last ones; the first are checked."""
        if self.group is None or self.group.examples != examples or self.group.engine != self.engine:
            self.group = None
            self.group = Group(self.job, examples, self.engine)
        if self.engine == WAVEFRONT and not self.job.model.steps_checked:
            reason = self.group.distrust()
            if reason:
                self._fall_back(reason)
                self.group = Group(self.job, examples, self.engine)
            else:
                self.job.model.steps_checked = True
        return self.group

    def _fall_back(self, reason: str) -> None:
        self.engine = WHOLE_RUNS
        warnings.warn(
            f"{self.job.model.name} is swept with one whole run per cell, because {reason}. Results are the same; it "
            "takes longer.",
            stacklevel=8,
        )


def _inside(job: Job) -> str | None:
    """Say which edited site lies inside an MLP, which blocks run as one; None where none does."""
    edits = (edit for cell in job.cells for edit in cell.edits if isinstance(edit, Replace))
    name = next((edit.site.name for edit in edits if edit.site.within == "mlp"), None)
    return None if name is None else f"{name} lies inside the MLP, which is stepped over as one"
