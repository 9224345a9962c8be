"""The one loop that measures a sweep: cells in, numbers out.

1. Examples are taken in groups of so many recorded numbers; a group's cells are cut into waves (`plan.waves`).
2. For each group, the runner makes the unedited runs of both prompts of each pair, and the metrics on both.
3. For each wave, the runner measures its cells; with `out=` a wave is a piece of the run's folder.
4. Where the model's blocks cannot be stepped through, whole runs take over, and it is said.

When memory runs out, half of a group's examples are taken at a time from then on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.memory import in_halves
from headwater.patching.plan import Measured, Plan, waves
from headwater.patching.replacements import CHANGED, NOT_WRITTEN, refuse_values_that_change_nothing
from headwater.patching.sweep import Sweep, tabulate
from headwater.patching.walk_runner import CannotStepError, WalkRunner
from headwater.patching.whole_runs import Runner, WholeRuns
from headwater.progress import progress_bar, say, spelled_time
from headwater.runs.analysis import Run, run_or_resume

ENGINES: Mapping[str, type[Runner]] = {"auto": WalkRunner, "whole runs": WholeRuns}
"""What measures cells, by the option `engine`: a walk down the layers where the model allows it, or whole runs."""


def run_sweep(
    analysis: str,
    plan: Plan,
    options: Mapping[str, Any],
    *,
    engine: str,
    runner: type[Runner] | None = None,
    finish: Callable[[Plan, Measured], None] = lambda plan, measured: None,
    seed: int = 0,
    progress: bool,
    out: str | Path | None,
) -> Sweep:
    """Measure a plan's cells, or go on with what the folder `out` has of them, and make the result.

    Args:
        analysis: the name of the call, for the record.
        plan: what is measured.
        options: what decides the result beside prompts, metrics and values, which are taken from the plan.
        engine: as the caller gave it.
        runner: what measures; default: that of the engine.
        finish: a last look at what was measured, which it may change or refuse.
        seed: of the call.
        progress: show a bar.
        out: the folder.
    """
    replacement, runner = plan.replacement, runner or ENGINES[engine]
    options = {**options, **plan.pair.described(replacement.inputs.dataset if replacement is not None else None)}
    if replacement is not None:
        options |= {"direction": plan.pair.direction, "values": replacement.described}
        options |= {"mean_over": replacement.mean_over}
    # Only where it was chosen: by default a folder is the same run whichever engine the model allows.
    options |= {"metrics": plan.metric_options} | ({} if engine == "auto" else {"engine": engine})

    def work(run: Run) -> Sweep:
        measured = measure(plan, run, runner)
        finish(plan, measured)
        strings = tuple(prompt.strings for prompt in plan.pair.prompts)
        return Sweep(tabulate(plan, measured), run.record, strings, measured.engine)

    return run_or_resume(Sweep, analysis, plan.model, options, work, out=out, seed=seed, progress=progress)


def measure(plan: Plan, run: Run, runner: type[Runner] = WalkRunner) -> Measured:
    """Measure the cells of a sweep, a wave in a piece."""
    measured = Measured.empty(len(plan.cells), len(plan.metrics))
    measuring = _Measuring(plan, runner)
    planned, outcome = list(waves(plan)), NOT_WRITTEN

    def compute(wave: tuple[range, range]) -> dict[str, Tensor]:
        parts = [part.tables() for _, part in measuring.parts(*wave)]
        tables = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        outcome = plan.replacement.outcome if plan.replacement is not None else CHANGED
        return tables | {"whole": torch.tensor(measuring.runner is WholeRuns), "outcome": torch.tensor(outcome)}

    with run.bar("cells", "cell", len(plan.cells)) as bar:
        pieces = run.pieces("wave", planned, compute, bar, lambda wave: len(wave[1]))
        for (_, cells), piece in zip(planned, pieces, strict=True):
            for name, table in measured.tables().items():
                table[cells.start : cells.stop] = piece[name]
            # A piece of an interrupted run says which engine it took: the rest goes on with it.
            if bool(piece["whole"]):
                measuring.runner = WholeRuns
            outcome = max(outcome, int(piece.get("outcome", CHANGED)))
    if plan.replacement is not None:
        # At the end: a piece may change nothing by chance, all of them together do not.
        refuse_values_that_change_nothing(plan.replacement, outcome)
    measured.engine = measuring.runner.name
    return measured


def collect_states(plan: Plan, progress: bool = True) -> Iterator[tuple[range, Measured]]:
    """Yield the states that a plan asks for, before and after the edits, some cells at a time."""
    measuring = _Measuring(plan, WalkRunner)
    with progress_bar(progress, len(plan.cells), desc="prompts", unit="prompt") as bar:
        for examples, cells in waves(plan):
            yield from measuring.parts(examples, cells)
            bar.update(len(cells))


class _Measuring:
    """Measures waves one after another, keeping the runs of the current group."""

    def __init__(self, plan: Plan, runner: type[Runner]):
        self.plan, self.runner = plan, runner
        self._most = len(plan.base)
        self._current: tuple[range, Runner] | None = None

    def parts(self, examples: range, cells: range) -> list[tuple[range, Measured]]:
        """Measure the cells of one wave; when memory runs out, for half of the examples at a time from now on."""
        measured: list[tuple[range, Measured]] = []

        def do(part: range) -> None:
            cells_of_part = self.plan.cells.among(part)
            # A wave may begin or end within the cells of these examples.
            if shared := range(max(cells_of_part.start, cells.start), min(cells_of_part.stop, cells.stop)):
                measured.append((shared, self._runner_of(part).measure(shared)))

        most = min(self._most, len(examples))
        # A graph cannot be made in inference mode, also not by enable_grad inside of it.
        with torch.inference_mode(not self.runner.needs_graph), self.plan.model.lock:
            for start in range(0, len(examples), most):
                parts = in_halves(examples[start : start + most], do)
                self._most = most // len(parts) if len(parts) > 1 else self._most
        return measured

    def _runner_of(self, examples: range) -> Runner:
        """Return the runs of a group, made now unless they are the last ones."""
        if self._current is None or self._current[0] != examples or not isinstance(self._current[1], self.runner):
            # Freed before the next group's runs are made: both at once would be twice the memory.
            self._current = None
            self._current = examples, self._made(examples)
        return self._current[1]

    def _made(self, examples: range) -> Runner:
        try:
            return self.runner(self.plan, examples)
        except CannotStepError as error:
            self.runner = WholeRuns
            warnings.warn(
                f"{self.plan.model.name} is swept with whole runs, many cells in each, because {error}. Results are "
                "the same; it takes longer.",
                stacklevel=8,
            )
        return self.runner(self.plan, examples)


# How long work takes, roughly, said before anything that takes over a minute.
#
# seconds = 2 · parameters of the blocks · tokens / rate
#
# of so many tokens as whole runs of the model would have; a gradient counts as a run. The rate is that of one product
# of the size of an MLP's, measured on the model's device. What is left to do is measured by the progress bar.


PATIENCE = 60.0
"""Seconds from which on it is said how long a run takes."""
WORTH_TIMING = 1e11
"""Fewer operations than these are not timed: no device takes a minute for them."""
ROWS = 1024


def say_how_long(
    model: HookedModel, what: str, tokens: float, advice: str, *, hours: float | None = None, progress: bool = True
) -> None:
    """Say how long work takes, if it is over a minute, or refuse what takes longer than the caller allows.

    Args:
        model: on whose device.
        what: what is requested, such as "32,491 edges of 3 pairs".
        tokens: so many as whole runs of the model have that compute as much.
        advice: what would be less.
        hours: what the caller allows.
        progress: whether anything is said.
    """
    # Blocks alone: embeddings are looked up, and sweeps unembed few positions.
    work = 2.0 * tokens * sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    if hours is None and (work < WORTH_TIMING or not progress):
        return
    needed = work / rate(model)
    if hours is not None and needed > 3600 * hours:
        raise InputError(f"{what} would take about {spelled_time(needed)}; hours={hours:g} were allowed. {advice}")
    if needed > PATIENCE:
        say(progress, f"{what} take about {spelled_time(needed)}. {advice}")


def rate(model: HookedModel) -> float:
    """Return the multiplications and additions a second of a product of matrices on the model's device."""
    width, inner = model.shape.d_model, model.shape.d_mlp
    a, b = (torch.zeros(*size, dtype=model.dtype, device=model.device) for size in ((ROWS, width), (width, inner)))
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        # Read back: a GPU returns from the product before it is done.
        float((a @ b)[0, 0])
        # The best of three: the first includes loading the kernel.
        best = max(best, 2.0 * ROWS * width * inner / (time.perf_counter() - begun))
    return best
