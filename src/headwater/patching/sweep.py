"""A sweep: the measurement of its cells, and the result, with a row per example, cell and metric.

effect            = metric of the edited run - metric of the run that was edited
normalized_effect = effect / (metric of the other run - metric of the run that was edited)

1. Examples are split into groups (limited recorded activations); a group's cells are cut into waves (`plan.waves`).
2. For each group, the runner makes the unedited runs of both prompts of each pair, and the metrics on both.
3. For each wave, the runner measures its cells; with `out=` a wave is a piece of the run's folder.
4. If the model's blocks cannot be stepped through, whole runs take over, with a warning.
5. The numbers become the table of a `Sweep`: means, grids, claims and figures are computed from it.

When memory runs out, half of a group's examples are run at a time from then on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, SupportsFloat

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headwater.errors import InputError, InterventionError, callers_level
from headwater.kernels.devices import in_tiles
from headwater.models.hooked import HookedModel
from headwater.options import checked_count
from headwater.patching import summaries
from headwater.patching.edits import AXES
from headwater.patching.plan import Measured, Plan, wave_tokens, waves
from headwater.patching.prompts import places_among, prompt_options
from headwater.patching.replacements import CHANGED, LEFT, NOT_WRITTEN
from headwater.patching.runners import AttributionRunner, CannotStepError, Runner, WalkRunner, WholeRuns
from headwater.patching.summaries import CellEffects, MeasureName, NormalizeName
from headwater.progress import progress_bar, say, spelled_time
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.record import RunRecord
from headwater.runs.result import Claim, Result
from headwater.stats.claims import ClaimEffects, notes_of_few
from headwater.stats.discrimination import pearson, spearman

ENGINES: Mapping[str, type[Runner]] = {"auto": WalkRunner, "whole runs": WholeRuns}
"""Runners by the option `engine`: a walk down the layers if the model allows it, or whole runs."""
COORDINATES = (
    *("site", "layer", "position", "role", "token", "head", "kv_head", "key", "key_role", "feature"),
    *("window", "set", "from_layer", "values", "sample", "metric"),
)
"""The columns that identify a cell, as far as a sweep has them."""
NOT_AXES = ("token", "window", "values")
"""The coordinates that only describe a cell further: no grid runs over them."""


def run_sweep(
    analysis: str,
    plan: Plan,
    options: Mapping[str, Any],
    *,
    engine: str,
    runner: type[Runner] | None = None,
    seed: int = 0,
    progress: bool,
    out: str | Path | None,
) -> Sweep:
    """Measure a plan's cells, or resume from those in the folder `out`, and make the result.

    `options` determine the result in addition to the plan's prompts, metrics and values. `runner` measures the cells;
    by default the engine's runner.
    """
    pair, replacement, runner = plan.pair, plan.replacement, runner or ENGINES[engine]
    pool = replacement.inputs.dataset if replacement is not None else None
    # Noise makes the corrupted runs from the clean prompts: the corrupted runs have no texts of their own.
    corrupted = pair.corrupted if pair.corruption is None else None
    options = {**options, **prompt_options(pair.clean, corrupted, pool)}
    options |= {} if pair.corruption is None else {"corruption": asdict(pair.corruption)}
    if replacement is not None:
        options |= {"direction": pair.direction, "values": replacement.described, "mean_over": replacement.mean_over}
    # Recorded only if it was chosen: by default a folder is the same run whichever engine the model allows.
    options |= {"metrics": plan.metric_options} | ({} if engine == "auto" else {"engine": engine})
    measuring = _Measuring(plan, runner)

    def compute(wave: tuple[range, range]) -> dict[str, Tensor]:
        parts = [part.tables() for _, part in measuring.parts(*wave)]
        tables = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        outcome = replacement.outcome if replacement is not None else CHANGED
        return tables | {"whole": torch.tensor(measuring.runner is WholeRuns), "outcome": torch.tensor(outcome)}

    def work(run: Run) -> Sweep:
        measured = Measured.empty(len(plan.cells), len(plan.metrics))
        planned, outcome = list(waves(plan)), NOT_WRITTEN
        # Attribution needs few runs, however many cells there are.
        if run.progress and runner is not AttributionRunner:
            # A cell runs from its first edit on; of that layer, half counts.
            first = [min((edit.layers.start for edit in one.edits), default=0) for one in plan.cells.templates]
            depth = 1 - (np.array(first) + 0.5) / plan.model.shape.n_layers
            lengths = np.array([len(prompt) for prompt in pair.base])[plan.cells.example]
            tokens = np.maximum(lengths - plan.cells.first_position, 0) * depth[plan.cells.template]
            what, advice = f"{len(plan.cells):,} cells", "Fewer layers, positions or prompts take less time."
            say_how_long(plan.model, what, tokens.sum(), advice, progress=run.progress)
        with run.bar("cells", "cell", len(plan.cells)) as bar:
            # The tokens are part of a piece's name: another device may cut the same run into other waves.
            stage = f"wave-of-{wave_tokens(plan.model)}"
            pieces = run.pieces(stage, planned, compute, bar, lambda wave: len(wave[1]))
            for (_, cells), piece in zip(planned, pieces, strict=True):
                for name, table in measured.tables().items():
                    table[cells.start : cells.stop] = piece[name]
                # A piece of an interrupted run records its engine: the other pieces continue with the same engine.
                if bool(piece["whole"]):
                    measuring.runner = WholeRuns
                outcome = max(outcome, int(piece.get("outcome", CHANGED)))
        # Checked at the end: one piece may change nothing by chance, but not all pieces together.
        if replacement is not None and outcome == LEFT and not replacement.is_control:
            kind, label = replacement.inputs.kind, replacement.label
            sites = ", ".join(site.name for site in replacement.inputs.sites)
            raise InterventionError(
                f"The {kind}{f' ({label})' if label not in (None, kind) else ''} given as values left every row of "
                f"{sites} unchanged, at all requested layers and positions: nothing was edited. Return another "
                "activation there, or choose other layers and positions."
            )
        # Counted by the run's own mask: a sliding-window layer may see none of the edges that a knockout severs.
        nothing = measured.edges == 0
        if bool(nothing.any()):
            if bool(nothing.all()):
                raise InterventionError(
                    "No requested layer can see any of these edges: they lie outside its sliding window."
                )
            pairs = zip(plan.cells, nothing, strict=True)
            labels = [template.labels for (_, template), none in pairs if none]
            blind = sorted({of_cell["layer"] for of_cell in labels if "layer" in of_cell})
            warnings.warn(
                f"{f'At layers {blind} the' if blind else 'The'} edges of some prompts lie outside the sliding window: "
                "nothing was severed there, and the effect is NaN.",
                stacklevel=5,
            )
            measured.values[nothing] = torch.nan
        strings = tuple(prompt.strings for prompt in pair.prompts)
        return Sweep(tabulate(plan, measured), run.record, strings, measuring.runner.name)

    return run_or_resume(Sweep, analysis, plan.model, options, work, out=out, seed=seed, progress=progress)


# An estimate of how long work takes, reported before anything that takes over a minute:
#
#     seconds = 2 · parameters of the blocks · tokens / rate
#
# of the tokens of whole runs of the model with as much compute; a gradient counts as a run. The rate is measured on the
# model's device with one product of the size of an MLP's. An edge counts for half its receiver's layer and later ones,
# a circuit for all layers: the estimate is half to twice the true compute, and more for circuits that omit layers.


PATIENCE = 60.0
"""The estimate of a run's duration is reported from this many seconds on."""
WORTH_TIMING = 1e11
"""Work with fewer operations than this is not timed: no device takes a minute for it."""
ROWS = 1024
"""Rows of the product that is timed."""


def say_how_long(model: HookedModel, what: str, tokens: SupportsFloat, advice: str, *, progress: bool = True) -> None:
    """Report how long work takes, if it is over a minute.

    `tokens` is the number of tokens of whole runs with the same compute; `advice` says how to reduce it.
    """
    # Blocks only: embeddings are looked up, and sweeps unembed few positions.
    work = 2.0 * float(tokens) * sum(parameter.numel() for parameter in model.raw.blocks.parameters())
    if progress and work >= WORTH_TIMING and (needed := work / rate(model)) > PATIENCE:
        say(progress, f"{what} take about {spelled_time(needed)}. {advice}")


def rate(model: HookedModel) -> float:
    """Return the multiplications and additions per second of a matrix product on the model's device."""
    width, inner = model.shape.d_model, model.shape.d_mlp
    a, b = (torch.zeros(*size, dtype=model.dtype, device=model.device) for size in ((ROWS, width), (width, inner)))
    best = 0.0
    for _ in range(3):
        begun = time.perf_counter()
        # Read the result back: on a GPU the call returns before the product is done.
        float((a @ b)[0, 0])
        # The best of three: the first includes loading the kernel.
        best = max(best, 2.0 * ROWS * width * inner / (time.perf_counter() - begun))
    return best


def collect_states(plan: Plan, progress: bool = True) -> Iterator[tuple[range, Measured]]:
    """Yield the states that a plan requests, before and after the edits, for some cells at a time."""
    measuring = _Measuring(plan, WalkRunner)
    with progress_bar(progress, len(plan.cells), desc="prompts", unit="prompt") as bar:
        for examples, cells in waves(plan):
            yield from measuring.parts(examples, cells)
            bar.update(len(cells))


class _Measuring:
    """Measures waves one after another, keeping the runs of the current group."""

    def __init__(self, plan: Plan, runner: type[Runner]):
        self.plan, self.runner = plan, runner
        self._most = len(plan.pair.base)
        self._current: tuple[range, Runner] | None = None

    def parts(self, examples: range, cells: range) -> list[tuple[range, Measured]]:
        """Measure the cells of one wave; if memory runs out, for half of the examples at a time from now on."""
        measured: list[tuple[range, Measured]] = []

        def do(part: range) -> None:
            cells_of_part = self.plan.cells.among(part)
            # A wave may begin or end within the cells of these examples.
            if shared := range(max(cells_of_part.start, cells.start), min(cells_of_part.stop, cells.stop)):
                measured.append((shared, self._runner_of(part).measure(self.plan.cells.part(shared))))

        most = min(self._most, len(examples))
        # No graph can be built in inference mode, not even with enable_grad inside it.
        with torch.inference_mode(not self.runner.needs_graph), self.plan.model.lock:
            if (fits := in_tiles(examples, most, do)) < most:
                self._most = fits
        return measured

    def _runner_of(self, examples: range) -> Runner:
        """Return the runner of a group: the current one if it is of these examples, else a new one."""
        if self._current is None or self._current[0] != examples or not isinstance(self._current[1], self.runner):
            # Freed before the next group's runs are made: both at once would need twice the memory.
            self._current = None
            runner: Runner | None = None
            try:
                runner = self.runner(self.plan, examples)
            except CannotStepError as error:
                self.runner = WholeRuns
                warnings.warn(
                    f"{self.plan.model.name} is swept with whole runs, many cells in each, because {error}. Results "
                    "are the same; it takes longer.",
                    stacklevel=callers_level(),
                )
            # Made outside the handler, whose error keeps the recorded runs of the walk alive.
            self._current = examples, runner or self.runner(self.plan, examples)
        return self._current[1]


@dataclass(frozen=True, repr=False)
class Sweep(Result):
    """The result of a patching or knockout sweep."""

    returned_by = "hw.patch(...)"

    table: pd.DataFrame
    """A row per example, cell and metric: `example, site, layer, position, role, token, head, kv_head, key, key_role,
    feature, window, set, from_layer, values, sample, metric, effect, normalized_effect, clean, corrupted, edges`, those
    that apply. `role` is the name of the positions (`position` is `<NA>` for several tokens), `key_role` that of the
    keys; `head` counts query heads, `kv_head` the key-value heads of the sites `k` and `v`; `set` is what was ablated
    together, `from_layer` the layer that the values come from, `values` says over what a mean was taken, `sample` is
    the number of the draw."""
    run: RunRecord
    tokens: tuple[tuple[str, ...], ...] = ()
    """The tokens of each example's edited prompt."""
    engine: str = "wavefront"
    """The engine that ran it: `wavefront` (the walk down the layers), `whole runs` or `gradients`."""

    def summary(self, *, value: MeasureName = "effect", normalize: NormalizeName | None = None) -> pd.DataFrame:
        """Summarize each cell over examples: mean, bootstrap interval, and sign-flip permutation p of a zero mean.

        Args:
            value: the column to summarize, `effect` or `normalized_effect`.
            normalize: how effects become fractions of the gap between the two runs: `mean of ratios` is the mean of
                `normalized_effect`, in which pairs with hardly any gap weigh arbitrarily much; `ratio of means`
                divides the mean effect by the mean gap. Its p is the p of the mean effect.

        Returns:
            A row per cell and metric, the largest first: its coordinates, `examples` (how many have this cell), `mean,
            low, high, p_value`, and `q_value`, adjusted for all cells of the metric (Benjamini and Hochberg): of the
            cells with q ≤ 0.05 about one in twenty is expected to be chance. Intervals are not adjusted for other
            cells. With n prompts p is at least 2 / 2ⁿ: five prompts can give no p below 0.06. One example has neither
            interval nor p. `attrs["notes"]` keeps the warnings.

        Warns:
            UserWarning: prompts of different length share the cells of a position; or a mean of ratios contains pairs
                whose gap is below a tenth of the median.
        """
        measure = summaries.measure_of(self.table, value, normalize)
        notes = self.warn_of_averages(self.table, measure)
        summary = summaries.strongest_first(summaries.summarize(self.table, self.coordinates, measure))
        summary.attrs["notes"] = notes
        return summary

    def grid(
        self,
        rows: str | None = None,
        columns: str | None = None,
        *,
        value: MeasureName = "effect",
        normalize: NormalizeName | None = None,
        **fixed: object,
    ) -> pd.DataFrame:
        """Arrange the means over examples as a grid, such as layers by heads or layers by roles.

        Args:
            rows: the axis of the rows; default: the first that the sweep runs over.
            columns: the axis of the columns; default: the second.
            value: `effect` or `normalized_effect`.
            normalize: see `summary`.
            **fixed: `site=`, `metric=`, `layer=`, `head=`, `role=`, ...: select only these rows of the table. Every
                other axis that the sweep runs over must be fixed: only examples are averaged.

        Returns:
            A frame indexed by `rows` with a column for each of `columns`; NaN for missing cells.
            `attrs["examples"][column][row]` is the number of examples of each mean, `attrs["notes"]` the warnings; both
            are plain data, so that grids can be concatenated and written to files.
        """
        table = summaries.chosen_rows(self.table, fixed)
        measure = summaries.measure_of(table, value, normalize)
        down, across = summaries.grid_axes(
            table, [name for name in self.coordinates if name not in NOT_AXES], rows, columns
        )
        notes = self.warn_of_averages(table, measure)
        grid = summaries.grid_of(table, down, across, measure)
        counts = table.dropna(subset=["effect"]).groupby([down, across])["example"].nunique().unstack(across)
        grid.attrs["examples"] = counts.reindex_like(grid).fillna(0).astype(int).to_dict()
        grid.attrs["notes"] = notes
        return grid

    def claim(
        self,
        cells: object,
        *,
        metric: str | None = None,
        value: MeasureName = "effect",
        other: Sweep | None = None,
        held_out: Sweep | None = None,
        match: Literal["layer", "site"] = "layer",
        placebos: int = 1000,
        margin: float | Any = None,
        seed: int = 0,
    ) -> Claim:
        """Judge whether some cells matter, compared with random cells, another ablation, halves, and held-out prompts.

        Args:
            cells: a mapping such as `{"layer": 3, "head": [1, 4]}` (all cells with these values), a list of such
                mappings, or rows of `summary()`. Their effect is the mean of the cells', each edited by itself.
            metric: the metric of the claim, if there are several.
            value: `effect` or `normalized_effect`.
            other: the same sweep with another kind of values (zero, mean, resample); of normalized effects, also in the
                other direction.
            held_out: the same sweep on other prompts. Prompts that this sweep has too are left out, as the claim says.
            match: random sets have as many cells of each site and `layer`, or of each `site` in any layer. With fewer
                than 19 such sets p cannot reach 0.05, and the claim says so.
            placebos: number of random sets; all of them if there are no more.
            margin: how large an effect has to be to matter, in the units of `value`; default: the 95 % quantile of the
                random sets' effect sizes.
            seed: of the random sets, the bootstrap and the halves.

        Returns:
            A `Claim`: `table` is one row `effect, low, high, placebo, placebo_high, p_value, other_ablation,
            split_half, held_out, margin, holds`; `sentence` states it. The first lines of `headwater.stats.claims`
            define `holds`, and say when p is valid.
        """
        sweeps = {"other": other, "held_out": held_out}
        others = {name: sweep for name, sweep in sweeps.items() if sweep is not None}
        measure = summaries.measure_of(self.table, value, None)
        options: dict[str, Any] = {"match": match, "placebos": placebos, "seed": seed}
        checked_count("placebos", placebos)
        scores = CellEffects(self.table, self.coordinates, measure, metric)
        chosen = scores.chosen(cells)
        drawn = scores.placebos(chosen, **options)
        wider = "; match='site' draws from all layers" if match == "layer" else ""
        notes = notes_of_few(len(drawn), placebos, advice=wider)
        same: dict[str, np.ndarray] = {}
        for option, sweep in others.items():
            if measure not in sweep.table.columns:
                raise InputError(f"{option}= has no column {measure}: give a sweep of pairs, or value='effect'.")
            if option == "other":
                summaries.refuse_other_ablation(sweep.run, self.run, measure)
            alike = () if option == "other" else ("direction", "values")
            summaries.refuse_other_run(option, sweep.run, self.run, *alike, prompts=False, answers=option == "other")
            other_scores = CellEffects(sweep.table, sweep.coordinates, measure, scores.metric)
            same[option] = other_scores.of(other_scores.same(scores, chosen))
            mine, theirs = (summaries.prompts_of(record)[0] or [] for record in (self.run, sweep.run))
            if option == "held_out" and (shared := places_among(theirs, mine)):
                same[option] = same[option][[example not in shared for example in other_scores.examples]]
                notes.append(
                    f"{len(shared)} held-out prompt{'s' * (len(shared) > 1)} left out that the sweep has too "
                    f"({', '.join(map(str, shared[:8]))})"
                )
        evidence = ClaimEffects(scores.of(chosen), drawn, same.get("other"), scores.effects, same.get("held_out"))
        what = f"{len(chosen)} cell{'s' * (len(chosen) > 1)} on {scores.metric}".replace("_", " ")
        about = {"cells": scores.names(chosen), "metric": scores.metric, "value": measure, "margin": margin, **options}
        about |= {option: sweep.run for option, sweep in others.items()}
        return Claim.of(evidence, self.run, about, what=what, margin=margin, seed=seed, notes=notes)

    def report(self) -> list[str]:
        """Return sentences on the strongest cell of each site and metric, and cautions about the means."""
        value = "normalized_effect" if "normalized_effect" in self.table else "effect"
        direction = str(self.run.options.get("direction", "denoise"))
        cells = summaries.summarize(self.table, self.coordinates, value)
        by_site = cells.groupby(["site", "metric"], sort=False)
        sentences = [sentence for _, part in by_site for sentence in summaries.strongest(part, value, direction)]
        if self.engine == AttributionRunner.name:
            sentences.append("These effects are linear estimates from gradients, not runs with the edit.")
        sentences += summaries.edited_run(self.run.options)
        return [*sentences, *summaries.notes_on_averages(self.table, self.tokens, self.coordinates, value)]

    def warn_of_averages(self, table: pd.DataFrame, measure: str) -> list[str]:
        """Warn of anything that makes the means over examples misleading, and return the warnings."""
        notes = summaries.notes_on_averages(table, self.tokens, self.coordinates, measure)
        for note in notes:
            warnings.warn(note, stacklevel=3)
        return notes

    @property
    def coordinates(self) -> list[str]:
        """The columns that identify a cell; its draws (`sample`) are averaged as its examples are."""
        named = [name for name in COORDINATES if name in self.table.columns and name != "sample"]
        if self.table["example"].nunique() == 1:
            return named
        own = {"token"} | summaries.tokens_by_role(named)
        return [name for name in named if name not in own]

    def agreement(self, exact: Sweep) -> pd.DataFrame:
        """Compare an approximate sweep with the exact one, cell by cell.

        Returns:
            A row per site and metric: `cells, pearson, spearman, sign_agreement`.
        """
        summaries.refuse_other_run("exact", exact.run, self.run, "direction")
        # Neither the token's text nor the written values identify a cell: sweeps of other values are compared, too.
        named = ("example", *(name for name in COORDINATES if name not in ("token", "values")))
        keys = [name for name in named if name in exact.table.columns]
        if any(name not in self.table.columns for name in keys):
            raise InputError("The two sweeps do not run over the same axes.")
        mine, theirs = (table[[*keys, "effect"]] for table in (self.table, exact.table))
        both = mine.merge(theirs, on=keys, suffixes=("", "_exact"))
        if not len(both) == len(mine) == len(theirs):
            raise InputError(f"The two sweeps share {len(both)} cells of {len(mine)} and {len(theirs)}.")
        rows = []
        for (site, metric), part in both.groupby(["site", "metric"], sort=False):
            x, y = part["effect"].to_numpy(), part["effect_exact"].to_numpy()
            # The sign of an effect within rounding says nothing.
            sizeable = np.abs(y) > 1e-6 * np.abs(y).max()
            same_sign = float((np.sign(x) == np.sign(y))[sizeable].mean()) if sizeable.any() else np.nan
            rows.append([site, metric, len(part), float(pearson(x, y)), float(spearman(x, y)), same_sign])
        return pd.DataFrame(rows, columns=["site", "metric", "cells", "pearson", "spearman", "sign_agreement"])


def tabulate(plan: Plan, measured: Measured) -> pd.DataFrame:
    """Return the table, with a row per cell and metric."""
    n_cells, n_metrics = measured.values.shape
    cells, templates, draws = plan.cells, plan.cells.templates, plan.pair.draws
    examples, template = np.repeat(cells.example, n_metrics), np.repeat(cells.template, n_metrics)
    columns: dict[str, Any] = {"example": examples // draws}
    for name in COORDINATES[:-1]:
        if name == "sample" and plan.pair.corruption is not None:
            columns[name] = examples % draws
        elif name == "token" and any(each.token_at is not None for each in templates):
            strings = [prompt.strings for prompt in plan.pair.base]
            shown = [None if t.token_at is None else "".join([strings[i][at] for at in t.token_at]) for i, t in cells]
            columns[name] = [token for token in shown for _ in range(n_metrics)]
        elif any(name in each.labels for each in cells.used):
            labels = [each.labels.get(name) for each in templates]
            if name in (*AXES, "kv_head", "from_layer", "sample"):
                some = any(labels[number] is None for number in np.unique(template))
                columns[name] = pd.array(labels, dtype="Int64").take(template).astype("Int64" if some else "int64")
            else:
                columns[name] = [labels[number] for number in template.tolist()]
    columns["metric"] = [metric.name for metric in plan.metrics] * n_cells
    effect = measured.values - measured.unedited
    columns["effect"] = effect.flatten().numpy()
    if plan.pair.other is not None:
        gap = measured.other - measured.unedited
        # + 0.0 turns -0 into 0. Equal runs have no gap to divide by: NaN.
        normalized = torch.where(gap.abs() > 1e-9, effect / gap + 0.0, torch.nan)
        columns["normalized_effect"] = normalized.flatten().numpy()
    edited, other = measured.unedited, measured.other
    clean, corrupted = (edited, other) if plan.pair.base_is_clean else (other, edited)
    columns["clean"] = clean.flatten().numpy()
    if plan.pair.other is not None:
        columns["corrupted"] = corrupted.flatten().numpy()
    if not bool(measured.edges.isnan().all()):
        columns["edges"] = np.repeat(measured.edges.numpy(), n_metrics).astype(np.int64)
    return pd.DataFrame(columns)
