"""Hallucination detectors: scores of an answer that separate wrong answers from right ones.

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §5; Kadavath et al. 2022 for P(True); Orgad et al., ICLR 2025.
For every method, a higher score means that the answer is more likely wrong.

    p_true           1 − P(True) / (P(True) + P(False)) when the model itself is asked
    logit_mean       minus the mean log-probability of the answer's tokens
    logit_min        minus the lowest log-probability of the answer's tokens
    probe            P(z = 1) of the linear probe at l*
    mop              π p_Q + (1 − π) p_A: one probe trained on the answers of each mode, π the gate's P(Q-anchored)
    vanilla_experts  the same gate over two probes trained on random halves, whatever the mode
    random_gate      the two experts of mop under a random π
    pr               the probe of the reweighted state (`reweighting`)
    question         relation, popularity and depth of the question alone: no model, the score to beat

All except `p_true` and `pr`, which need another run each, come from one ordinary run of the prompt with its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from headwater.calls import checked_calls
from headwater.detection.reweighting import Reweighted, Reweighting, Strength, train_reweighting
from headwater.errors import InputError
from headwater.models.generation import next_logits
from headwater.models.hooked import HookedModel
from headwater.models.tokens import by_length, chat_text, encode
from headwater.options import checked_name, checked_names
from headwater.pathways.interventions import Setup, after_states, block_exact_tokens, untouched
from headwater.probes.linear import C, Probe, States, fit_linear, fit_probes, grouped_folds, linear_logits, read_linear
from headwater.questions.answers import AnsweredQuestions, check_answered
from headwater.questions.states import probe_states
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval

NAMES = {
    "question": "relation, popularity",
    "p_true": "P(True)",
    "logit_mean": "logit mean",
    "logit_min": "logit min",
    "probe": "single probe",
    "random_gate": "MoP, random gate",
    "vanilla_experts": "MoP, random experts",
    "mop": "mixture of probes (MoP)",
    "pr": "pathway reweighting (PR)",
}
"""Display name of each method."""
METHODS = tuple(NAMES)
CLASSIFIERS = ("probe", "gate", "question_expert", "answer_expert", "first_half", "second_half", "pr")
"""The linear classifiers of the state at l*, in the order of `Detector.weight`."""
ASK = "Question: {question}\nProposed answer: {answer}\nIs the proposed answer true or false? It is"
WORDS = (("True", "False"), ("true", "false"))
"""Pairs in order of preference."""
QUESTION_NUMBERS = ("popularity", "depth")


@checked_calls
@dataclass(frozen=True, eq=False)
class Detector:
    """Classifiers fitted on the answers to one question set; they score new answers of the same model."""

    dataset: str
    fingerprint: str
    """Fingerprint of the model whose states it reads."""
    site: str
    token: str
    layer: int
    """l*."""
    weight: Float[Tensor, "classifier d_model"]
    """Weights of `CLASSIFIERS`, float64."""
    bias: Float[Tensor, " classifier"]
    alpha: Strength
    """α of `pr`; NaN where it was not trained."""
    question_weight: Float[Tensor, " feature"]
    """Weights of `question`: of the numbers, of each relation, and the bias."""
    relations: tuple[str, ...] = ()
    methods: tuple[str, ...] = METHODS

    def probe(self, name: str = "probe") -> Probe:
        """Return one of the linear classifiers as a probe."""
        place = CLASSIFIERS.index(checked_name("name", name, CLASSIFIERS))
        return Probe(self.site, self.token, self.layer, self.weight[place], float(self.bias[place]))

    def score(
        self,
        model: HookedModel,
        answered: AnsweredQuestions,
        *,
        methods: Sequence[str] | None = None,
        batch_size: int = 64,
        progress: bool = True,
    ) -> pd.DataFrame:
        """Score answers: a row per answer, a column per method, higher = more likely wrong.

        Args:
            model: the model that answered, and that the detector was fitted on.
            answered: what `hw.answer` returned.
            methods: some of the fitted methods; default: all except `p_true`, which asks the model another question.
            batch_size: rows in one run.
        """
        if model.fingerprint != self.fingerprint:
            raise InputError(
                f"This detector was fitted on a model other than {model.name} (fingerprint {self.fingerprint[:12]}, "
                f"here {model.fingerprint[:12]}). Fit one with hw.detect."
            )
        check_answered(model, answered)
        wanted = [name for name in self.methods if name != "p_true"] if methods is None else methods
        names = checked_names("methods", wanted, self.methods)
        read = {"site": self.site, "token": self.token, "batch_size": batch_size, "progress": progress}
        states = probe_states(model, answered, **read)[self.layer]  # type: ignore[arg-type]
        scores = self.scores(model, answered, states, names, batch_size)
        if "p_true" in names:
            scores["p_true"] = 1 - p_true(model, answered, batch_size)
        named = {"dataset": answered.table["dataset"].to_numpy(), "example": np.arange(len(answered.table))}
        return pd.DataFrame(named | {method: scores[method] for method in names})

    def scores(
        self,
        model: HookedModel,
        answered: AnsweredQuestions,
        states: Float[Tensor, "example d_model"],
        methods: Sequence[str],
        batch_size: int,
    ) -> dict[str, NDArray[Any]]:
        """Return the scores of answers from their states at l*: of all methods but `p_true`, and `pr` if requested."""
        read = zip(CLASSIFIERS, self.weight, self.bias, strict=True)
        p = {name: torch.sigmoid(linear_logits(states, weight, bias)) for name, weight, bias in read}
        gate = p["gate"]
        # Seeded here, so that the scores of a detector do not depend on earlier draws.
        random = torch.from_numpy(np.random.default_rng(0).random(len(gate)))
        features = torch.from_numpy(question_features(answered.table, self.relations))
        scores = {
            "question": torch.sigmoid(linear_logits(features, self.question_weight[:-1], self.question_weight[-1])),
            "probe": p["probe"],
            "mop": gate * p["question_expert"] + (1 - gate) * p["answer_expert"],
            "vanilla_experts": gate * p["first_half"] + (1 - gate) * p["second_half"],
            "random_gate": random * p["question_expert"] + (1 - random) * p["answer_expert"],
        }
        if "pr" in methods:
            # A second run, with edges reweighted by the gate.
            reads = self.probe("pr")
            inputs = Reweighted.of(model, answered, reads, torch.sigmoid(self.probe("gate").logits(states))).begin()
            scores["pr"] = torch.empty(len(states), dtype=torch.float64)
            for rows in inputs.batches(range(len(states)), batch_size):
                scores["pr"][rows] = torch.sigmoid(reads.logits(inputs.states(rows, self.alpha).cpu()))
        log_probs = answered.table["log_probs"]
        return {name: score.numpy() for name, score in scores.items()} | {
            "logit_mean": np.array([-float(np.mean(row)) for row in log_probs]),
            "logit_min": np.array([-float(np.min(row)) for row in log_probs]),
        }


def question_features(table: pd.DataFrame, relations: Sequence[str]) -> NDArray[np.float64]:
    """Return features of a question that need no model: log popularity, depth, and an indicator per relation."""
    columns = []
    for name in QUESTION_NUMBERS:
        values = pd.to_numeric(table[name], errors="coerce") if name in table else pd.Series(0.0, index=table.index)
        # Page views span orders of magnitude, hence the log.
        columns.append(np.log1p(values.fillna(0).clip(lower=0).to_numpy(dtype=np.float64)))
    named = table["relation"].astype(str).to_numpy() if "relation" in table else np.full(len(table), "")
    return np.stack([*columns, *((named == relation).astype(np.float64) for relation in relations)], axis=1)


def p_true(model: HookedModel, answered: AnsweredQuestions, batch_size: int = 64) -> NDArray[np.float64]:
    """Ask the model whether each of its answers is true, and return P(True) / (P(True) + P(False)).

    `ASK` is sent as the user's message if the model has a chat template.
    """
    plain = [
        ASK.replace("{question}", row["question"]).replace("{answer}", row["answer"].strip())
        for row in answered.table[["question", "answer"]].to_dict("records")
    ]
    chat = [chat_text(model.tokenizer, text) for text in plain] if model.tokenizer is not None else []
    is_chat = bool(chat) and chat[0] is not None
    true, false = truth_tokens(model)
    prompts = [encode(model.tokenizer, text, model.bos)[0] for text in (chat if is_chat else plain)]  # type: ignore[arg-type]
    odds = np.empty(len(prompts))
    for rows in by_length([len(prompt) for prompt in prompts], batch_size):
        logits = next_logits(model, model.tokenize([prompts[row] for row in rows])).double().cpu()
        # P(True) / (P(True) + P(False)) is the sigmoid of the difference, so no sum over the vocabulary is needed.
        odds[rows] = (logits[:, true] - logits[:, false]).numpy()
    return np.asarray(expit(odds))


def truth_tokens(model: HookedModel) -> tuple[int, int]:
    """Return the ids of the first pair of `WORDS` that are one token each: after a space, except in a chat."""
    tokenizer: Any = model.tokenizer
    space = "" if getattr(tokenizer, "chat_template", None) else " "
    for pair in WORDS:
        ids = [encode(tokenizer, space + word)[0] for word in pair]
        if all(len(one) == 1 and one[0] != tokenizer.unk_token_id for one in ids):
            return ids[0][0], ids[1][0]
    listed = ", ".join(f"{true}/{false}" for true, false in WORDS)
    raise InputError(f"P(True) needs a pair of single tokens, and {model.name} has none of {listed}. Leave p_true out.")


# Fit detectors on half of a question set: probe, gate, experts and reweighted edges (`detection` explains how and why).


Folds: TypeAlias = Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Pairs of rows to fit on and to predict."""
Reading: TypeAlias = tuple[Float[np.ndarray, " feature"], float]
"""Weight and bias of a logistic regression."""
COUNTS = ("train", "q_right", "q_wrong", "a_right", "a_wrong")


@dataclass(frozen=True)
class DetectorSetup(Setup):
    """How detectors are fitted; see `detect`."""

    methods: tuple[str, ...] = METHODS
    layer: int | None = None
    cross_fit: bool = True
    reweighting: Reweighting = field(default_factory=Reweighting)


@dataclass(frozen=True, eq=False)
class AnswerSet:
    """The answers to one question set, and the quantities computed once for all seeds."""

    model: HookedModel
    answered: AnsweredQuestions
    """Answers of this set alone."""
    dataset: str
    rows: NDArray[np.int64]
    """Row numbers of these answers in the table of all answers."""
    relations: tuple[str, ...]
    recipe: DetectorSetup

    @classmethod
    def of(cls, model: HookedModel, answered: AnsweredQuestions, dataset: str, recipe: DetectorSetup) -> AnswerSet:
        """Select one question set."""
        rows = np.flatnonzero(answered.table["dataset"] == dataset)
        return cls(model, answered.select(dataset), dataset, rows, relations_of(answered.table), recipe)

    @cached_property
    def states(self) -> States:
        """States of every layer at the token that the probe reads."""
        return after_states(self.model, untouched(self.answered, self.recipe), self.recipe)

    @cached_property
    def severed(self) -> States:
        """The same states after the knockout of E_Q; unchanged if no edge from E_Q can be severed."""
        knockout = block_exact_tokens(self.answered, self.recipe)
        states = self.states.clone()
        states[:, torch.from_numpy(knockout.examples)] = after_states(self.model, knockout, self.recipe)
        return states

    @cached_property
    def p_true(self) -> NDArray[np.float64]:
        """P(True) of every answer, according to the model."""
        return p_true(self.model, self.answered, self.recipe.batch_size)

    @cached_property
    def groups(self) -> list[str]:
        """Question of each answer; all answers to one question stay on one side of every split."""
        return self.answered.table["question"].tolist()

    def notes(self) -> dict[str, str]:
        """Return why a method has no score here, by method."""
        notes, table = {}, self.answered.table
        known = (name for name in ("relation", *QUESTION_NUMBERS) if name in table)
        if not any(table[name].nunique() > 1 for name in known):
            notes["question"] = "relation, popularity and depth are missing, or equal for all questions"
        try:
            truth_tokens(self.model)
        except InputError as error:
            notes["p_true"] = str(error)
        return {method: note for method, note in notes.items() if method in self.recipe.methods}

    def halves(self, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Split the answers into training and test rows."""
        return grouped_folds(self.answered.z, self.groups, 2, seed)[0]

    def fit(self, seed: int) -> dict[str, Tensor]:
        """Fit on one half and score the other.

        Returns:
            `layer`; the tensors of a `Detector`; `test`, rows of the table of all answers; their `scores` by method;
            `counts` (`COUNTS`) of the training half; `gate_auc`, with the 95 % interval over questions.
        """
        train, test = self.halves(seed)
        z, groups, recipe = self.answered.z[train], [self.groups[row] for row in train], self.recipe
        layer = recipe.layer
        if layer is None:
            options = {"site": recipe.site, "token": recipe.token, "groups": groups, "seed": seed, "cross_fit": False}
            layer = fit_probes(self.states[:, torch.from_numpy(train)], z, **options).best  # type: ignore[arg-type]
        states, severed = (every[layer].double().numpy() for every in (self.states, self.severed))
        # Pairs of training answers to fit on and to predict: swapped halves, or all without `cross_fit`.
        everything = np.arange(len(train))
        folds = grouped_folds(z, groups, 2, seed) if recipe.cross_fit else [(everything, everything)]
        anchored = np.zeros(len(train), dtype=bool)
        for fitted, predicted in folds:
            reading = fit_linear(states[train[fitted]], z[fitted])
            anchored[predicted] = _flipped(reading, states[train[predicted]], severed[train[predicted]])
        linear = _fit_readings(states[train], z, anchored, seed)
        alpha = torch.full((2, layer + 1, self.model.shape.n_heads), torch.nan, dtype=torch.float64)
        if "pr" in recipe.methods:
            probe = Probe(recipe.site, recipe.token, layer, torch.from_numpy(linear["pr"][0]), linear["pr"][1])
            strength, trained = self._reweighting(probe, train, states[train], anchored, folds, seed)
            alpha, linear["pr"] = strength.expand_as(alpha), (trained.weight.numpy(), trained.bias)
        features = question_features(self.answered.table, self.relations)
        tensors = {
            "weight": torch.from_numpy(np.stack([weight for weight, _ in linear.values()])),
            "bias": torch.tensor([bias for _, bias in linear.values()], dtype=torch.float64),
            "alpha": alpha,
            "question_weight": torch.from_numpy(np.append(*fit_linear(features[train], z))),
        }
        known = self.dataset, self.model.fingerprint, recipe.site, recipe.token, layer
        detector = Detector(*known, **tensors, relations=self.relations)  # type: ignore[arg-type]
        flipped = _flipped(linear["probe"], states[test], severed[test]).astype(np.int64)
        gate = read_linear(states[test], *linear["gate"])
        counts = [int((mode & (z == label)).sum()) for mode in (anchored, ~anchored) for label in (0, 1)]
        draws = Bootstrap.of([self.groups[row] for row in test])
        gate_auc = interval(draws.apply(lambda counts: auc(gate, flipped, counts=counts)))
        return tensors | {
            "layer": torch.tensor(layer),
            "test": torch.from_numpy(self.rows[test]),
            "scores": self._scores(detector, test),
            "counts": torch.tensor([len(train), *counts]),
            "gate_auc": torch.tensor(gate_auc, dtype=torch.float64),
        }

    def _reweighting(
        self,
        probe: Probe,
        train: NDArray[np.int64],
        states: NDArray[np.float64],
        anchored: NDArray[np.bool_],
        folds: Folds,
        seed: int,
    ) -> tuple[Strength, Probe]:
        """Train α and the probe of reweighted states on the training half."""
        part = replace(self.answered, table=self.answered.table.iloc[train])
        # Cross-fitted, so that the gate is as confident on each answer as on answers that it has not seen.
        gate = np.empty(len(train))
        for fitted, predicted in folds:
            gate[predicted] = read_linear(states[predicted], *fit_linear(states[fitted], anchored[fitted]))
        spread = states.std(0)
        return train_reweighting(
            Reweighted.of(self.model, part, probe, torch.from_numpy(expit(gate))),
            torch.tensor(part.z, dtype=torch.float64),
            probe,
            torch.from_numpy(np.where(spread > 0, spread, 1.0)),
            self.recipe.reweighting,
            # scikit-learn minimises |w|²/2 + C · Σ losses; divided by C · rows this is the mean loss plus this penalty.
            penalty=1 / (C * len(train)),
            seed=seed,
            batch_size=self.recipe.batch_size,
        )

    def _scores(self, detector: Detector, test: NDArray[np.int64]) -> Float[Tensor, "method example"]:
        part = replace(self.answered, table=self.answered.table.iloc[test])
        states, methods = self.states[detector.layer][torch.from_numpy(test)], self.recipe.methods
        unusable, nothing = self.notes(), np.full(len(test), np.nan)
        scores = detector.scores(self.model, part, states, methods, self.recipe.batch_size)
        if "p_true" in methods and "p_true" not in unusable:
            scores["p_true"] = 1 - self.p_true[test]
        return torch.from_numpy(np.stack([nothing if name in unusable else scores[name] for name in methods]))


def relations_of(table: pd.DataFrame) -> tuple[str, ...]:
    """Return the relations of the questions."""
    return tuple(sorted(table["relation"].dropna().astype(str).unique())) if "relation" in table else ()


def _fit_readings(
    states: NDArray[np.float64], z: NDArray[np.int64], anchored: NDArray[np.bool_], seed: int
) -> dict[str, Reading]:
    """Fit the linear classifiers; `pr` starts as the single probe."""
    first = np.zeros(len(z), dtype=bool)
    first[np.random.default_rng(seed).permutation(len(z))[: len(z) // 2]] = True
    probe = fit_linear(states, z)
    experts = [fit_linear(states[part], z[part]) for part in (anchored, ~anchored, first, ~first)]
    return dict(zip(CLASSIFIERS, [probe, fit_linear(states, anchored), *experts, probe], strict=True))


def _flipped(reading: Reading, before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where the hard prediction changes."""
    return (read_linear(before, *reading) > 0) != (read_linear(after, *reading) > 0)
