"""Fit detectors on half of a question set: probe, gate, experts and reweighted edges (`detection` says how and why)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from headwater.detection.methods import (
    CLASSIFIERS,
    Detector,
    p_true,
    question_columns,
    question_features,
    sigmoid,
    truth_tokens,
)
from headwater.detection.reweighting import Reweighted, Reweighting, train_reweighting
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.patching.edge_knockout import VariantName
from headwater.pathways.interventions import Setup, after_states, block_exact_tokens, untouched
from headwater.probes.linear import FOLDS, C, States, fit_linear, fit_probes, grouped_folds, read_linear
from headwater.questions.answers import AnsweredQuestions
from headwater.questions.states import ProbeSiteName, TokenName
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval

Reading: TypeAlias = tuple[Float[np.ndarray, " feature"], float]
"""Weight and bias of a logistic regression."""
COUNTS = ("train", "q_right", "q_wrong", "a_right", "a_wrong")


@dataclass(frozen=True)
class DetectorSetup:
    """How detectors are fitted; see `detect`."""

    methods: tuple[str, ...]
    site: ProbeSiteName
    token: TokenName
    layer: int | None
    variant: VariantName
    cross_fit: bool
    reweighting: Reweighting
    batch_size: int


@dataclass(frozen=True, eq=False)
class AnswerSet:
    """The answers to one question set, and what is computed of them once for all seeds."""

    model: HookedModel
    answered: AnsweredQuestions
    """Of this set alone."""
    dataset: str
    rows: NDArray[np.int64]
    """Their places in the table of all answers."""
    relations: tuple[str, ...]
    recipe: DetectorSetup

    @classmethod
    def of(cls, model: HookedModel, answered: AnsweredQuestions, dataset: str, recipe: DetectorSetup) -> AnswerSet:
        """Pick one of the question sets."""
        rows = np.flatnonzero(answered.table["dataset"] == dataset)
        return cls(model, answered.select(dataset), dataset, rows, relations_of(answered.table), recipe)

    @cached_property
    def states(self) -> States:
        """Of every layer, where the probe reads."""
        return after_states(self.model, untouched(self.answered, self._setup), self._setup)

    @cached_property
    def severed(self) -> States:
        """The same after the knockout of E_Q; as before where nothing comes between E_Q and the token read."""
        knockout = block_exact_tokens(self.answered, self._setup)
        states = self.states.clone()
        states[:, torch.from_numpy(knockout.examples)] = after_states(self.model, knockout, self._setup)
        return states

    @property
    def _setup(self) -> Setup:
        r = self.recipe
        return Setup(r.site, r.token, r.variant, "after", r.batch_size)

    @cached_property
    def self_reports(self) -> NDArray[np.float64]:
        """P(False) of every answer, as the model says."""
        return 1 - p_true(self.model, self.answered, batch_size=self.recipe.batch_size)

    def forget(self) -> None:
        """Let go of the states, gigabytes per set of a large model; what is needed again is made again."""
        for name in ("states", "severed"):
            self.__dict__.pop(name, None)

    @cached_property
    def groups(self) -> list[str]:
        """What stays on one side of every split."""
        return self.answered.table["question"].tolist()

    def notes(self) -> dict[str, str]:
        """Return why a method has no score here, by method."""
        notes = {}
        if not question_columns(self.answered.table):
            notes["question"] = "the questions have no relation, popularity or depth that differs"
        try:
            truth_tokens(self.model)
        except InputError as error:
            notes["p_true"] = str(error)
        return {method: note for method, note in notes.items() if method in self.recipe.methods}

    def halves(self, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split the answers into those that train and those that test."""
        return grouped_folds(self.answered.z, self.groups, 2, seed)[0]

    def check(self, seed: int) -> None:
        """Raise what `fit` would raise."""
        train, _ = self.halves(seed)
        for folds in (FOLDS, 2):
            grouped_folds(self.answered.z[train], [self.groups[i] for i in train], folds, seed)

    def fit(self, seed: int) -> dict[str, Tensor]:
        """Fit on one half and score the other.

        Returns:
            `layer`; the tensors of a `Detector`; `test`, rows of the table of all answers; `scores` of these by method;
            `counts` (`COUNTS`) of the training half; `gate_auc`, with the 95 % interval over questions.
        """
        train, test = self.halves(seed)
        z, recipe = self.answered.z, self.recipe
        layer = self._best_layer(train, seed) if recipe.layer is None else recipe.layer
        states, severed = (s[layer].double().numpy() for s in (self.states, self.severed))
        anchored = self._modes(states, severed, train, seed)
        linear = _fit_readings(states[train], z[train], anchored, seed)
        features = question_features(self.answered.table, self.relations)
        question = fit_linear(features[train], z[train])
        detector = Detector(
            dataset=self.dataset,
            fingerprint=self.model.fingerprint,
            site=recipe.site,
            token=recipe.token,
            layer=layer,
            weight=torch.from_numpy(np.stack([weight for weight, _ in linear])),
            bias=torch.tensor([bias for _, bias in linear], dtype=torch.float64),
            alpha=torch.full((2, layer + 1, self.model.shape.n_heads), torch.nan, dtype=torch.float64),
            question_weight=torch.from_numpy(np.append(*question)),
            relations=self.relations,
        )
        if "pr" in recipe.methods:
            detector = self._with_reweighting(detector, train, anchored, seed)
        flipped = _flipped(linear[0], states[test], severed[test]).astype(np.int64)
        gate = read_linear(states[test], *linear[1])
        right, wrong = z[train] == 0, z[train] == 1
        counts = [
            len(train),
            *(int((mode & label).sum()) for mode in (anchored, ~anchored) for label in (right, wrong)),
        ]
        draws = Bootstrap.of([self.groups[row] for row in test])
        gate_auc = interval(draws.apply(lambda counts: auc(gate, flipped, counts=counts)))
        return {
            "layer": torch.tensor(layer),
            "weight": detector.weight,
            "bias": detector.bias,
            "alpha": detector.alpha,
            "question_weight": detector.question_weight,
            "test": torch.from_numpy(self.rows[test]),
            "scores": self._scores(detector, test),
            "counts": torch.tensor(counts),
            "gate_auc": torch.tensor(gate_auc, dtype=torch.float64),
        }

    def _best_layer(self, train: NDArray[np.int64], seed: int) -> int:
        states, z, recipe = self.states[:, torch.from_numpy(train)], self.answered.z[train], self.recipe
        groups = [self.groups[i] for i in train]
        return fit_probes(
            states, z, site=recipe.site, token=recipe.token, groups=groups, seed=seed, cross_fit=False
        ).best

    def _modes(
        self, states: NDArray[np.float64], severed: NDArray[np.float64], train: NDArray[np.int64], seed: int
    ) -> NDArray[np.bool_]:
        """Say which training answers are Q-anchored."""
        z, anchored = self.answered.z[train], np.zeros(len(train), dtype=bool)
        for fitted, predicted in self._folds(train, seed):
            reading = fit_linear(states[train[fitted]], z[fitted])
            anchored[predicted] = _flipped(reading, states[train[predicted]], severed[train[predicted]])
        return anchored

    def _folds(self, train: NDArray[np.int64], seed: int) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Return which training answers are fitted on, and which are predicted by that: the other half, or the same."""
        if not self.recipe.cross_fit:
            return [(np.arange(len(train)), np.arange(len(train)))]
        return grouped_folds(self.answered.z[train], [self.groups[i] for i in train], 2, seed)

    def _with_reweighting(
        self, detector: Detector, train: NDArray[np.int64], anchored: NDArray[np.bool_], seed: int
    ) -> Detector:
        part = replace(self.answered, table=self.answered.table.iloc[train])
        states = self.states[detector.layer].double().numpy()[train]
        # As sure of each answer as the gate is of answers that it has not seen.
        gate = np.empty(len(train))
        for fitted, predicted in self._folds(train, seed):
            gate[predicted] = read_linear(states[predicted], *fit_linear(states[fitted], anchored[fitted]))
        spread = states.std(0)
        alpha, reads = train_reweighting(
            Reweighted.of(self.model, part, detector.probe(), torch.from_numpy(sigmoid(gate))),
            torch.tensor(part.z, dtype=torch.float64),
            detector.probe(),
            torch.from_numpy(np.where(spread > 0, spread, 1.0)),
            self.recipe.reweighting,
            # scikit-learn minimises |w|²/2 + C · Σ losses: divided by C · rows, the mean loss and this penalty.
            penalty=1 / (C * len(train)),
            seed=seed,
            batch_size=self.recipe.batch_size,
        )
        weight, bias, place = detector.weight.clone(), detector.bias.clone(), CLASSIFIERS.index("pr")
        weight[place], bias[place] = reads.weight, reads.bias
        return replace(detector, weight=weight, bias=bias, alpha=alpha.expand(-1, -1, self.model.shape.n_heads))

    def _scores(self, detector: Detector, test: NDArray[np.int64]) -> Float[Tensor, "method example"]:
        part = replace(self.answered, table=self.answered.table.iloc[test])
        states = self.states[detector.layer][torch.from_numpy(test)]
        scores, unusable = detector.from_states(states, part.table), self.notes()
        if "p_true" in self.recipe.methods and "p_true" not in unusable:
            scores["p_true"] = self.self_reports[test]
        if "pr" in self.recipe.methods:
            scores["pr"] = detector.reweighted_scores(self.model, part, states, self.recipe.batch_size)
        nothing = np.full(len(test), np.nan)
        listed = [nothing if method in unusable else scores[method] for method in self.recipe.methods]
        return torch.from_numpy(np.stack(listed))


def relations_of(table: pd.DataFrame) -> tuple[str, ...]:
    """Return the relations that the questions ask about."""
    return tuple(sorted(table["relation"].dropna().astype(str).unique())) if "relation" in table else ()


def _fit_readings(
    states: NDArray[np.float64], z: NDArray[np.int64], anchored: NDArray[np.bool_], seed: int
) -> list[Reading]:
    """Fit the linear readings, in the order of `CLASSIFIERS`; that of `pr` starts as the single probe."""
    first = np.zeros(len(z), dtype=bool)
    first[np.random.default_rng(seed).permutation(len(z))[: len(z) // 2]] = True
    probe = fit_linear(states, z)
    experts = [fit_linear(states[part], z[part]) for part in (anchored, ~anchored, first, ~first)]
    return [probe, fit_linear(states, anchored), *experts, probe]


def _flipped(reading: Reading, before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Say where the hard prediction changes."""
    return (read_linear(before, *reading) > 0) != (read_linear(after, *reading) > 0)
