"""Measure one question set: states, probes, interventions. The results are logits.

1. States of every row and layer, in pieces.
2. Per seed, two halves that share no question and have about equal shares of wrong answers. Each half is measured by
   probes fitted on the other half, so every example is measured once per seed, by a probe that has not seen it.
3. Per intervention, the logits of these probes on the states after it. One pass gives every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.tokens import by_length
from headwater.patching.edge_knockout import windowed_states
from headwater.pathways import interventions
from headwater.pathways.interventions import Intervention, Setup, after_states
from headwater.pathways.modes import Logits
from headwater.probes.linear import FOLDS, Probes, States, fit_probes, grouped_folds
from headwater.progress import Bar
from headwater.questions.answers import AnsweredQuestions
from headwater.runs.analysis import Run

SWAPS = 3
"""Number of times each subject is swapped."""
CHUNK = 256
"""Rows in one piece."""
Halves = Int[np.ndarray, "seed example"]


@dataclass(frozen=True)
class Fits:
    """The probes of one question set: `probes[seed][side]` measures the examples in that half."""

    probes: list[list[Probes]]
    half: Halves

    @property
    def best(self) -> Int[np.ndarray, "seed example"]:
        """l* of the probe that measures each example."""
        layers = np.array([[side.best for side in sides] for sides in self.probes])
        return np.take_along_axis(layers, self.half, axis=1)

    def logits(self, states: States, examples: Int[np.ndarray, " row"]) -> Logits:
        """Return the logit of z = 1 of each state, by the probes that have not seen its example."""
        logits = np.empty((len(self.probes), len(states), len(examples)))
        for (seed, _, here), probes in zip(each_half(self.half[:, examples]), chain(*self.probes), strict=True):
            logits[seed][:, here] = probes.logits(states[:, torch.from_numpy(here)]).numpy()
        return logits

    def logits_at_best(
        self,
        states: Float[Tensor, "window layer row d_model"],
        layers: Sequence[int],
        examples: Int[np.ndarray, " row"],
    ) -> Float[np.ndarray, "seed window row"]:
        """Return the logits of the probes at l* alone; `states` are of `layers`, after each window's knockout."""
        result = np.empty((len(self.probes), len(states), len(examples)))
        for (seed, _, here), probes in zip(each_half(self.half[:, examples]), chain(*self.probes), strict=True):
            read = states[:, layers.index(probes.best)][:, torch.from_numpy(here)]
            result[seed][:, here] = probes[probes.best].logits(read.flatten(0, 1)).view(read.shape[:2]).numpy()
        return result


@dataclass(frozen=True)
class Effects:
    """One question set: its probes, and their logits by seed, layer and example."""

    answered: AnsweredQuestions
    fits: Fits
    states: States
    before: Logits
    knockout: Logits
    """After the knockout of E_Q in all layers up to each layer."""
    windowed: Logits | None
    """At l*, after the knockout of E_Q in a window around each layer."""
    others: dict[str, Float[np.ndarray, "_ layer example"]]
    """After the controls, by name: the seeds of every draw; NaN where a control does not apply."""


def halves(answered: AnsweredQuestions, seeds: int) -> Halves:
    """Split a question set into two halves, once per seed."""
    groups = answered.table["question"].tolist()
    half = np.empty((seeds, len(groups)), dtype=np.int64)
    for seed in range(seeds):
        for side, (_, rows) in enumerate(grouped_folds(answered.z, groups, 2, seed)):
            half[seed, rows] = side
            # Fail now, not later, if the half cannot be split again to choose a layer.
            grouped_folds(answered.z[rows], [groups[row] for row in rows], FOLDS, seed)
    return half


def usable_sets(answered: AnsweredQuestions, seeds: int) -> tuple[dict[str, Halves], pd.DataFrame]:
    """Split the question sets into halves; return a table of those that cannot be split, with the causes."""
    usable, causes = {}, []
    for name in answered.datasets:
        subset = answered.select(name)
        try:
            usable[name] = halves(subset, seeds)
        except InputError:
            right, wrong = int((subset.z == 0).sum()), int((subset.z == 1).sum())
            what = "too few answers of one kind" if right and wrong else "answers of one kind only"
            causes.append(
                {"dataset": name, "cause": f"{what}: {right:,} right, {wrong:,} wrong", "examples": len(subset.z)}
            )
    if not usable:
        listed = "; ".join(f"{row['dataset']}: {row['cause']}" for row in causes)
        raise InputError(
            f"No question set can be used ({listed}). Each needs right answers to at least {2 * FOLDS} different "
            f"questions, and wrong answers to as many."
        )
    return usable, pd.DataFrame(causes, columns=["dataset", "cause", "examples"])


def each_half(half: Halves) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield each half of each seed: the seed, the examples of the other half, and those of this one."""
    for seed, side in np.ndindex(len(half), 2):
        yield seed, np.flatnonzero(half[seed] != side), np.flatnonzero(half[seed] == side)


def measure(
    run: Run,
    model: HookedModel,
    answered: AnsweredQuestions,
    half: Halves,
    setup: Setup,
    *,
    window: int | None,
    controls: bool,
) -> Effects:
    """Measure one question set."""
    name = answered.datasets[0]
    whole = interventions.untouched(answered, setup)
    exact = interventions.block_exact_tokens(answered, setup)
    if len(exact.examples) < len(answered.table):
        raise InputError(
            f"{len(answered.table) - len(exact.examples):,} answers of {name} have no exact question token before the "
            "token that the probe reads. Choose another token=."
        )
    listed = []
    if controls:
        others = interventions.other_question_tokens(model, answered)
        listed.append(interventions.block_random_tokens(answered, setup, others))
        listed += [interventions.swap_subjects(model, answered, setup, seed) for seed in range(SWAPS)]
        listed += [interventions.swap_random_tokens(answered, setup, others, seed) for seed in range(SWAPS)]
        listed.append(interventions.answer_only(model, answered, setup))
    listed = [exact, *(control for control in listed if len(control.examples))]

    def everywhere(part: Intervention) -> Tensor:
        return torch.from_numpy(fits.logits(after_states(model, part, setup), part.examples))

    def in_windows(part: Intervention) -> Tensor:
        # Windows are measured at l* alone, which differs between fits.
        layers = np.unique(fits.best).tolist()
        options: dict[str, Any] = {"site": setup.site, "variant": setup.variant, "batch_size": setup.batch_size}
        tokens, at = [list(row) for row in part.tokens], list(part.positions)
        after = windowed_states(model, tokens, block=part.edges, window=window or 0, read=layers, at=at, **options)
        return torch.from_numpy(fits.logits_at_best(after, layers, part.examples))

    stages = [(f"run-{number:03d}", intervention, everywhere) for number, intervention in enumerate(listed)]
    stages += [("windows", exact, in_windows)] if window else []
    results: list[Logits] = []
    total = sum(len(intervention.examples) for intervention in (whole, *(part for _, part, _ in stages)))
    with run.bar(f"Tracing {name}", "row", total) as bar:
        states = torch.empty(model.shape.n_layers, len(whole.tokens), model.shape.d_model)
        for rows, found in _in_pieces(run, "states", whole, lambda part: after_states(model, part, setup), bar):
            states[:, rows] = found
        fits = _fits(run, states, answered, half, setup)
        for stage, intervention, read in stages:
            # NaN, which averages ignore, where an intervention does not apply.
            results.append(np.full((len(half), len(states), half.shape[1]), np.nan))
            for rows, found in _in_pieces(run, stage, intervention, read, bar):
                results[-1][:, :, intervention.examples[rows]] = found.numpy()
    windowed = results.pop() if window else None
    by_name: dict[str, list[Logits]] = {}
    for intervention, logits in zip(listed[1:], results[1:], strict=True):
        by_name.setdefault(intervention.name, []).append(logits)
    after_others = {control: np.concatenate(draws) for control, draws in by_name.items()}
    return Effects(answered, fits, states, fits.logits(states, whole.examples), results[0], windowed, after_others)


def _fits(run: Run, states: States, answered: AnsweredQuestions, half: Halves, setup: Setup) -> Fits:
    groups = answered.table["question"].tolist()

    def compute(one: tuple[int, int]) -> dict[str, Tensor]:
        seed, side = one
        rows = np.flatnonzero(half[seed] != side)
        there, z, asked = states[:, torch.from_numpy(rows)], answered.z[rows], [groups[row] for row in rows]
        fitted = fit_probes(there, z, site=setup.site, token=setup.token, groups=asked, seed=seed, cross_fit=False)
        return probes_as_tensors([fitted])

    sides = [(seed, side) for seed in range(len(half)) for side in (0, 1)]
    # Not "probes": earlier versions left pieces of another shape under that name in unfinished folders.
    found = [probes_from_tensors(piece, setup)[0] for piece in run.pieces("fits", sides, compute)]
    return Fits([found[i : i + 2] for i in range(0, len(found), 2)], half)


def probes_as_tensors(each: Sequence[Probes]) -> dict[str, Tensor]:
    """Split probes of one best layer into tensors."""
    assert each[0].validation_auc is not None
    weight, bias = torch.stack([probes.weight for probes in each]), torch.stack([probes.bias for probes in each])
    best, validation_auc = torch.tensor(each[0].best), each[0].validation_auc
    return {"weight": weight, "bias": bias, "best": best, "validation_auc": validation_auc}


def probes_from_tensors(found: Mapping[str, Tensor], setup: Setup) -> list[Probes]:
    """Rebuild probes from `probes_as_tensors`."""
    best, validation_auc = int(found["best"]), found["validation_auc"]
    each = zip(found["weight"], found["bias"], strict=True)
    return [Probes(setup.site, setup.token, weight, bias, best, validation_auc) for weight, bias in each]


def _in_pieces(
    run: Run, stage: str, intervention: Intervention, read: Callable[[Intervention], Tensor], bar: Bar
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield rows of an intervention, of similar lengths, and the result of `read` for them."""
    pieces = by_length([len(tokens) for tokens in intervention.tokens], CHUNK)

    def compute(rows: list[int]) -> dict[str, Tensor]:
        return {stage: read(intervention.rows(rows))}

    for rows, piece in zip(pieces, run.pieces(stage, pieces, compute, bar, len), strict=True):
        yield rows, piece[stage]
