"""The runs that the cells of a few examples share, and the metrics of what comes out of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError, NumericsError
from headwater.models.blocks import Blocks, Recording
from headwater.models.checks import not_finite
from headwater.models.edits import Hook, makes
from headwater.models.memory import is_out_of_memory
from headwater.models.sites import SITES, Stage, hook_name
from headwater.models.tokens import Batch, pad_id
from headwater.patching.job import Cell, Job
from headwater.patching.metrics import Metric
from headwater.patching.prompts import Prompt
from headwater.patching.variants import LOGITS, Cut, Reading, Replace, Values, Variant
from headwater.patching.wave import Deliver, NotFiniteError, Wave
from headwater.patching.whole import capture, run_edited, run_whole, visible_keys

TILE_TOKENS = {"cpu": 1024, "cuda": 1 << 15}
"""Tokens given to a sublayer at once; halved when memory runs out."""
WHOLE_RUNS = "whole runs"
WAVEFRONT = "wavefront"
GRADIENTS = "gradients"
Run: TypeAlias = dict[Reading, list[Tensor]]
"""By reading, each example's values at its kept positions."""
Sites: TypeAlias = set[tuple[str, int]]
"""Site and layer."""


class Group:
    """The runs that the cells of a few examples share."""

    def __init__(self, job: Job, examples: range, engine: str):
        self.job, self.examples, self.engine = job, examples, engine
        self.lengths = [len(job.base[i]) for i in examples]
        self.cells = [cell for cell in job.cells if cell.example in examples]
        self.kept = [job.positions[i] for i in examples]
        self.tile = job.batch_size * max(self.lengths) if job.batch_size else None
        replaced = {
            (e.site.name, layer) for c in self.cells for e in c.edits if isinstance(e, Replace) for layer in e.layers
        }
        self.readings = sorted({*job.states, *(job.reading(m, c.edits) for m in job.metrics for c in self.cells)})
        states = [SITES[site].hook_name(layer) for site, layer in self.readings if site != LOGITS]
        self.recording: Recording | None = None
        self.visible: Mapping[int, Tensor] = {}
        self.answers: Tensor | None = None
        self.held: dict[str, Tensor] = {}
        if engine == WAVEFRONT:
            activations, self.base_run, other_run = self._record(states, replaced)
        else:
            self.base_run = self._run_with_graph(states, replaced) if engine == GRADIENTS else self._run_base(states)
            activations, other_run = self._run_other(states, replaced)
        self.values = self._values(replaced, activations)
        self.clean_run = self.base_run if job.base_is_clean else other_run
        with torch.no_grad():
            self.base = self._baseline(self.base_run)
            self.other = self._baseline(other_run) if other_run is not None else None

    def measure(self, cells: range) -> dict[str, Tensor]:
        """Measure some of the group's cells, all in one wave."""
        chosen = self.job.cells[cells.start : cells.stop]
        unedited = torch.stack([self.unedited(cell) for cell in chosen])
        other = torch.stack([self.of_other_run(cell) for cell in chosen])
        values = unedited.clone()
        variants = self._variants(chosen)

        def deliver(reading: Reading, indices: list[int], read: Tensor) -> None:
            for m, metric in enumerate(self.job.metrics):
                asking = [k for k, i in enumerate(indices) if self.job.reading(metric, chosen[i].edits) == reading]
                if asking:
                    owners = [variants[indices[k]].example for k in asking]
                    part = read if len(asking) == len(indices) else read[asking]
                    measured = self.apply(m, reading, part, owners)
                    values[[indices[k] for k in asking], m] = measured

        self._run(variants, deliver)
        edges = torch.tensor([self._visible_edges(cell) for cell in chosen], dtype=torch.float64)
        return {"values": values, "unedited": unedited, "other": other, "edges": edges}

    def states(self, cells: range) -> tuple[dict[Reading, Tensor], dict[Reading, Tensor]]:
        """Return the states asked for at the cells' examples, before and after the edits, `cell width`."""
        chosen = self.job.cells[cells.start : cells.stop]
        before = {
            reading: torch.stack([self.base_run[reading][cell.example - self.examples.start][-1] for cell in chosen])
            for reading in self.job.states
        }
        after = {reading: states.clone() for reading, states in before.items()}

        def deliver(reading: Reading, indices: list[int], read: Tensor) -> None:
            after[reading][indices] = read[:, -1]

        self._run(self._variants(chosen), deliver)
        return before, after

    def unedited(self, cell: Cell) -> Float[Tensor, " metric"]:
        """Return what a cell's metrics are on the base run."""
        return self._of(self.base, cell)

    def of_other_run(self, cell: Cell) -> Float[Tensor, " metric"]:
        """Return what they are on the other prompt's run; NaN without one."""
        missing = torch.full((len(self.job.metrics),), torch.nan, dtype=torch.float64)
        return missing if self.other is None else self._of(self.other, cell)

    def distrust(self) -> str | None:
        """Send a row without edits through the blocks, and say why the outcome is not to be trusted, if it is not."""
        recording = self.recording
        assert recording is not None
        if set(recording.keys) != set(range(self.job.model.shape.n_layers)):
            return "its attention does not hand its keys and values to a cache"
        last = max(self.lengths) - 1
        longest = self.lengths.index(last + 1)
        found: list[Tensor] = []
        variant = Variant(longest, (), (last,), ((LOGITS, self.job.model.shape.n_layers),), start=(0, (last + 1) // 2))
        try:
            self._wave([variant], lambda reading, indices, read: found.append(read[0, 0]))
        except NumericsError:
            return "stepping through its blocks gives NaN or infinity where the model does not"
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            return (
                f"its blocks cannot be called one by one ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
            )
        expected = recording.last_logits[longest].float()
        tolerance = max(1e-4, 8 * torch.finfo(recording.last_logits.dtype).eps) * float(expected.abs().max())
        if self.answers is not None:
            expected = expected[self.answers[longest]]
        difference = float((found[0].float() - expected).abs().max())
        return (
            f"stepping through its blocks changes its logits by {difference:.1e}"
            if not difference <= tolerance
            else None
        )

    def _run(self, variants: list[Variant], deliver: Deliver) -> None:
        if self.engine == WAVEFRONT:
            self._wave(variants, deliver)
        else:
            run_whole(self.job.model, self._batch(self.job.base), variants, self.values, deliver)

    def _wave(self, variants: list[Variant], deliver: Deliver) -> None:
        assert self.recording is not None
        tile = self.tile or TILE_TOKENS.get(self.job.model.device.type, TILE_TOKENS["cpu"])
        wave = Wave(self.blocks, self.recording, variants, self.values, deliver, tile, self.answers)
        try:
            wave.run()
        except NotFiniteError as found:
            self._name_not_finite(variants[found.variant], found.position)
        self.tile = wave.tile_tokens if wave.tile_tokens < tile else self.tile

    def _name_not_finite(self, variant: Variant, position: int) -> NoReturn:
        """Say in which layer an edited run went wrong, by making it once more as a whole run."""
        model, batch = self.job.model, self._batch(self.job.base).rows(variant.example, variant.example + 1)
        run_edited(model, batch, variant, self.values)
        token = int(batch.tokens[0, position])
        raise NumericsError(not_finite(model, "the logits", batch.name(0), position, token, edited=True))

    def _variants(self, cells: Sequence[Cell]) -> list[Variant]:
        trunks = {(cell.example, cell.family): i for i, cell in enumerate(cells) if cell.family is not None}
        variants = []
        for i, cell in enumerate(cells):
            trunk = trunks.get((cell.example, cell.family), i) if cell.family is not None else i
            readings = {*self.job.states, *(self.job.reading(metric, cell.edits) for metric in self.job.metrics)}
            example = cell.example - self.examples.start
            variants.append(
                Variant(example, cell.edits, self.kept[example], tuple(sorted(readings)), trunk if trunk != i else None)
            )
        return variants

    def _record(self, states: list[str], replaced: Sites) -> tuple[Mapping[str, Tensor], Run, Run | None]:
        """Run the prompts of both sides as one batch, and record it; return the other side's activations."""
        job, n = self.job, len(self.examples)
        self.blocks = Blocks(job.model)
        if (answers := job.only_answers) is not None:
            self.answers = answers[self.examples.start : self.examples.stop].to(job.model.device)
        names = [*states, *self._joined_names(), *self._value_names(replaced).values()]
        sides = [job.base] if job.other is None else [job.base, job.other]
        self.recording = self.blocks.record(self._batch(*sides), names)
        self.visible = self.recording.visible
        others = {name: activation[n:] for name, activation in self.recording.activations.items()}
        other_run = self._read_recording(others, job.other) if job.other is not None else None
        return others, self._read_recording(self.recording.activations, job.base), other_run

    def _run_base(self, states: list[str]) -> Run:
        """Run the prompts that are edited, as they are."""
        model, batch = self.job.model, self._batch(self.job.base)
        run = self.read_run(*capture(model, batch, states, self.columns()), self.readings)
        cut = {layer for cell in self.cells for e in cell.edits if isinstance(e, Cut) for layer in e.layers}
        longest = self.lengths.index(max(self.lengths))
        self.visible = visible_keys(model, batch.rows(longest, longest + 1), cut) if cut else {}
        return run

    def _run_with_graph(self, states: list[str], replaced: Sites) -> Run:
        """The same with gradients, from the embeddings on; `held` keeps the activations at which they are wanted."""

        def hold(activation: Tensor, hook: Any, name: str) -> Tensor:
            self.held[name] = activation
            return activation

        names = [*states, *(SITES[site].hook_name(layer) for site, layer in replaced)]
        names += [SITES[carrier.at].hook_name(layer) for s, layer in replaced if (carrier := SITES[s].carrier)]
        begin = makes(lambda activation, hook: activation.detach().requires_grad_(True))
        hooks: list[Hook] = [(hook_name("embed"), begin)]
        hooks += [(name, makes(partial(hold, name=name))) for name in dict.fromkeys(names)]
        logits = self.job.model.run(self._batch(self.job.base), hooks, keep=self.columns(), grad=True)
        with torch.enable_grad():
            return self.read_run(self.held, logits, self.readings)

    def _run_other(self, states: list[str], replaced: Sites) -> tuple[Mapping[str, Tensor], Run | None]:
        """Run the other prompt of each pair, and keep what edits write."""
        if self.job.other is None:
            return {}, None
        names = [*states, *self._value_names(replaced).values()]
        activations, logits = capture(self.job.model, self._batch(self.job.other), names, self.columns())
        return activations, self.read_run(activations, logits, self.readings)

    def _value_names(self, replaced: Sites) -> dict[tuple[str, int], str]:
        """Name the other run's activations that edits write."""
        source = self.job.source
        if source is None or not source.is_other_run:
            return {}
        return {(site, layer): SITES[site].hook_name(layer) for site, layer in replaced}

    def _values(self, replaced: Sites, activations: Mapping[str, Tensor]) -> Values:
        source = self.job.source
        if source is None:
            return Values({})
        if source.is_other_run:
            return Values({key: activations[name] for key, name in self._value_names(replaced).items()})
        return source.values(self.job.model, self.examples, max(self.lengths), replaced)

    def _batch(self, *sides: Sequence[Prompt]) -> Batch:
        """The prompts of one side after those of another, each called by its example and, of a pair, its side."""
        job = self.job
        ids, pad = [side[i].ids for side in sides for i in self.examples], pad_id(job.model.tokenizer)
        if job.other is None:
            return Batch.of(ids, pad).named(self.examples)
        kinds = ["clean" if (side is job.base) == job.base_is_clean else "corrupted" for side in sides]
        return Batch.of(ids, pad).named(f"{i} ({kind} prompt)" for kind in kinds for i in self.examples)

    def _joined_names(self) -> list[str]:
        """Name the activations of the base run with which rows start."""
        names = []
        for cell in self.cells:
            variant = Variant(0, cell.edits, (0,), ())
            layer, stage = variant.first_layer, variant.stage
            wanted = ["resid_pre"]
            if stage == Stage.HEAD_OUTPUT:
                wanted.append("z")
            if stage >= Stage.BETWEEN:
                wanted.append("attn_out")
            if stage >= (Stage.HEAD_OUTPUT if self.blocks.parallel else Stage.BLOCK_OUTPUT):
                wanted.append("mlp_out")
            names += [SITES[name].hook_name(layer) for name in wanted]
        return [*names, SITES["resid_pre"].hook_name(0)]

    def columns(self) -> Int[Tensor, " kept"]:
        """Return every position that some metric reads in some prompt."""
        return torch.tensor(sorted({p for kept in self.kept for p in kept}))

    def read_run(self, activations: Mapping[str, Tensor], logits: Tensor, readings: Sequence[Reading]) -> Run:
        """By reading, each example's values at its kept positions, from a whole run."""
        columns = self.columns().tolist()
        read: Run = {}
        for site, layer in readings:
            if site == LOGITS:
                places = [[columns.index(p) for p in kept] for kept in self.kept]
                read[site, layer] = [logits[i, place] for i, place in enumerate(places)]
            else:
                held = activations[SITES[site].hook_name(layer)]
                read[site, layer] = [held[i, list(kept)] for i, kept in enumerate(self.kept)]
        return read

    def _read_recording(self, activations: Mapping[str, Tensor], side: Sequence[Prompt]) -> Run:
        """The same from a recorded run, whose logits were not computed."""
        n_layers = self.job.model.shape.n_layers
        states = [reading for reading in self.readings if reading[0] != LOGITS]
        residual = activations[SITES["resid_post"].hook_name(n_layers - 1)]
        read = self.read_run(activations, residual, states)
        if len(states) < len(self.readings):
            read[LOGITS, n_layers] = [self._logits(residual[i, list(kept)], i) for i, kept in enumerate(self.kept)]
            for i, logits in enumerate(read[LOGITS, n_layers]):
                self._refuse_not_finite(logits, side, i)
        return read

    def _refuse_not_finite(self, logits: Float[Tensor, "kept width"], side: Sequence[Prompt], example: int) -> None:
        wrong = ~logits[:, :1].isfinite().all(-1)
        if bool(wrong.any()):
            batch, position = self._batch(side), self.kept[example][int(wrong.nonzero()[0])]
            token = int(batch.tokens[example, position])
            raise NumericsError(not_finite(self.job.model, "the logits", batch.name(example), position, token))

    def _logits(self, residual: Float[Tensor, "kept d_model"], example: int) -> Float[Tensor, "kept d_vocab_or_answer"]:
        if self.answers is None:
            return self.blocks.logits(residual)
        return self.blocks.logits_of(residual, self.answers[example].expand(len(residual), -1))

    def _baseline(self, run: Run) -> dict[Reading, Float[Tensor, "example metric"]]:
        """By reading, every metric that could read it, on an unedited run."""
        table: dict[Reading, Tensor] = {}
        for reading in self.readings:
            columns = torch.full((len(self.examples), len(self.job.metrics)), torch.nan, dtype=torch.float64)
            for m, metric in enumerate(self.job.metrics):
                if metric.site == reading[0] and metric.layer in (None, reading[1]):
                    for i, values in enumerate(run[reading]):
                        columns[i, m] = self.apply(m, reading, values[None], [i])[0]
            table[reading] = columns
        return table

    def _of(self, baseline: dict[Reading, Tensor], cell: Cell) -> Float[Tensor, " metric"]:
        example = cell.example - self.examples.start
        per_metric = [
            baseline[self.job.reading(metric, cell.edits)][example, m] for m, metric in enumerate(self.job.metrics)
        ]
        return torch.stack(per_metric)

    def apply(self, m: int, reading: Reading, read: Tensor, owners: list[int]) -> Tensor:
        """Apply one metric to rows that belong to these examples of the group."""
        metric = self.job.metrics[m]
        measured = torch.empty(len(owners), dtype=torch.float64)
        by_count: dict[int, list[int]] = {}
        for row, owner in enumerate(owners):
            by_count.setdefault(len(self.job.kept[self.examples[owner]][m]), []).append(row)
        for rows in by_count.values():
            part = read if len(rows) == len(owners) else read[rows]
            who = [owners[row] for row in rows]
            values = self._metric_positions(m, part, who)
            answers = self._answers(m, reading, who, read.device)
            clean = None
            if metric.against_clean and self.clean_run is not None:
                held = torch.stack([self.clean_run[reading][i].detach() for i in who])
                clean = self._metric_positions(m, held, who)
            self._check_metric(metric, values, answers, clean)
            measured[rows] = metric.measure(values, answers, clean).double().cpu()
            self._refuse_no_number(metric, values, measured, rows, who)
        return measured

    def _check_metric(self, metric: Metric, values: Tensor, answers: list[Tensor], clean: Tensor | None) -> None:
        """Check once per sweep that a metric treats each row by itself."""
        if metric.name not in self.job.checked:
            with torch.no_grad():
                metric.refuse_if_rows_mix(values.detach(), answers, clean)
            self.job.checked.add(metric.name)

    def _refuse_no_number(
        self, metric: Metric, values: Tensor, measured: Tensor, rows: list[int], owners: list[int]
    ) -> None:
        """Refuse NaN and infinity that a metric makes of finite values.

        Raises:
            InputError: with the metric and the example.
        """
        for i in (~measured[rows].isfinite()).nonzero().flatten().tolist():
            if bool(values[i].isfinite().all()):
                raise InputError(
                    f"The metric {metric.name!r} gave {float(measured[rows[i]])} for example "
                    f"{self.examples[owners[i]]}, of values that are all finite: mend it there (log_softmax in place "
                    "of log(softmax), no division by 0)."
                )

    def _answers(self, m: int, reading: Reading, owners: list[int], device: torch.device) -> list[Tensor]:
        """Where a metric's answers stand in what was read: token ids, or columns where only answers were read."""
        answers = self.job.answers[m]
        if self.answers is None or reading[0] != LOGITS:
            return [ids[[self.examples[i] for i in owners]].to(device) for ids in answers]
        before = sum(
            len(ids)
            for ids, metric in zip(self.job.answers[:m], self.job.metrics, strict=False)
            if metric.site == LOGITS
        )
        return [torch.full((len(owners),), before + k, device=device) for k in range(len(answers))]

    def _metric_positions(self, m: int, read: Tensor, owners: list[int]) -> Tensor:
        """Of the positions kept for all metrics, take one metric's."""
        places = [[self.kept[i].index(p) for p in self.job.kept[self.examples[i]][m]] for i in owners]
        if all(place == list(range(read.shape[1])) for place in places):
            return read
        index = torch.tensor(places, device=read.device)
        return read[torch.arange(len(read), device=read.device)[:, None], index]

    def _visible_edges(self, cell: Cell) -> float:
        """Count the visible edges that a cell severs, over its layers and heads; NaN for cells that sever none."""
        cuts = [edit for edit in cell.edits if isinstance(edit, Cut)]
        if not cuts:
            return float("nan")
        total = 0
        for cut in cuts:
            heads = self.job.model.shape.n_heads if cut.heads is None else len(cut.heads)
            length = cut.edges.shape[0]
            for layer in cut.layers:
                visible = self.visible[layer][:length, :length].to(cut.edges.device)
                total += heads * int((cut.edges & visible).sum())
        return float(total)
