"""Linear probes of truthfulness: does a state of the model distinguish a wrong answer from a right one?

Orgad et al., "LLMs Know More Than They Show", ICLR 2025; Luo et al., "Two Pathways to Truthfulness", ACL 2026, §2.2.

1. The input is one state per layer of each row, its label z = 1 or 0, and its group. `questions.states` records the
   states of answered questions.
2. Per layer, a logistic regression (scikit-learn) on the standardized states is fitted on all folds but one; folds keep
   rows of one group (one question text) together and the share of wrong answers even. Standardization is folded into
   the weights: logit = state · weight + bias, P(z = 1) = sigmoid(logit), z = 1 for a wrong answer.
3. l*, the best layer, has the highest AUC on the held-out fold. If folds have fewer than `FEW` rows, one AUC says
   little: then each fold is held out in turn, AUCs are averaged, and the final probes are fitted on all rows.
4. A probe's output on the rows that it was fitted on is meaningless: with more coordinates than rows it separates them
   even without any signal. So it has `folds`, each fitted on one half of the rows, and the output for a row comes from
   coefficients that were not fitted on its question (`Probe.reader`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import ThreadpoolController
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.options import checked_count, checked_name, shown, whole_numbers
from headwater.runs.identity import digest
from headwater.stats.discrimination import auc

FEW = 200
FOLDS = 5
"""Number of folds; one is held out to choose the layer."""
C = 0.1
"""Inverse strength of the L2 penalty on the weights of standardized states."""
TOLERANCE = 1e-8
"""Tolerance on the fit's gradient: scikit-learn's default, 1e-4, changes logits of 4,096 coordinates by about 0.33."""
NOISE = 1e-6
"""Smallest standard deviation that is scaled to 1, relative to the largest, so that tiny variation is not amplified."""
MOST_ROWS = 100
"""Most rows that are fitted by `row_space_regression`: it takes a fifth of scikit-learn's time at 20 rows of 576
features, and as long at 200."""
States = Float[Tensor, "layer example d_model"]


@dataclass(frozen=True)
class Probe:
    """A linear probe of one layer: P(z = 1) = sigmoid(state · weight + bias), z = 1 for a wrong answer."""

    returned_by = "hw.probes.fit_probes(...)[5]"

    site: str
    """The site it reads: `mlp_out`, `attn_out` or `resid_post`."""
    token: str
    """The position it reads, such as `exact_answer_last`; see `headwater.questions.states`."""
    layer: int
    weight: Float[Tensor, " d_model"]
    bias: float
    fitted_on: frozenset[str] = frozenset()
    """The questions whose answers were used to fit it or to choose its layer, if known."""
    folds: tuple[Probe, ...] = ()
    """The same probe fitted on parts of these answers; for every question, one at least has not seen its answers."""

    def __repr__(self) -> str:
        folds = f", {len(self.folds)} folds" if self.folds else ""
        return f"Probe({self.site} at {self.token}, layer {self.layer}: {len(self.weight)} weights{folds})"

    def reader(self, question: str) -> int | None:
        """Return which coefficients were not fitted on a question: -1 for this probe, the index of a fold, or None."""
        readers = enumerate((self, *self.folds), start=-1)
        return next((place for place, one in readers if question not in one.fitted_on), None)

    def logits(self, states: Float[Tensor | ndarray, "example d_model"]) -> Float[Tensor, " example"]:
        """Return the logit of z = 1 for each state, in the dtype of the weights."""
        return linear_logits(torch.as_tensor(states), self.weight, self.bias)

    def predict(self, states: Float[Tensor | ndarray, "example d_model"]) -> Int[Tensor, " example"]:
        """Return z for each state: 1 where its logit is above 0, otherwise 0."""
        return (self.logits(states) > 0).long()


@dataclass(frozen=True)
class Probes:
    """A linear probe per layer, and the best layer."""

    site: str
    token: str
    weight: Float[Tensor, "layer d_model"]
    bias: Float[Tensor, " layer"]
    best: int
    """l*: the layer with the highest AUC on held-out rows."""
    validation_auc: Float[Tensor, " layer"] | None = None
    """The AUC of every layer on held-out rows."""
    fitted_on: frozenset[str] = frozenset()
    """The questions whose answers were used to fit them or to choose the layer, if known."""
    folds: tuple[Probes, ...] = ()
    """The same probes fitted on parts of these answers; see `Probe.folds`."""

    def __repr__(self) -> str:
        layers, width = self.weight.shape
        return f"Probes({self.site} at {self.token}: {layers} layers of {width} weights, best layer {self.best})"

    def __getitem__(self, layer: int) -> Probe:
        if not -len(self.weight) <= layer < len(self.weight):
            raise InputError(f"There is no probe of layer {layer}; there are layers 0 to {len(self.weight) - 1}.")
        layer %= len(self.weight)
        # Folds have no folds themselves, so the recursion ends.
        folds = tuple(fold[layer] for fold in self.folds)
        return Probe(self.site, self.token, layer, self.weight[layer], float(self.bias[layer]), self.fitted_on, folds)

    def __len__(self) -> int:
        return len(self.weight)

    def logits(self, states: States) -> Float[Tensor, "layer example"]:
        """Return the logit of z = 1 for each state, in the dtype of the weights."""
        by_layer = zip(states, self.weight, self.bias, strict=True)
        return torch.stack([linear_logits(layer, weight, bias) for layer, weight, bias in by_layer])


def linear_logits(
    states: Float[Tensor, "example feature"], weight: Float[Tensor, " feature"], bias: float | Tensor
) -> Float[Tensor, " example"]:
    """Return the logit of each state, in the dtype of the weights; equal states have equal logits.

    A matrix product rounds a row depending on its place in memory. It would order equal examples at random, which would
    change AUCs.
    """
    return (states.to(weight) * weight).sum(-1) + bias


def read_linear(
    features: Float[ndarray, "example feature"], weight: Float[ndarray, " feature"], bias: float
) -> Float[ndarray, " example"]:
    """Return the same for NumPy arrays, such as those from `fit_linear`."""
    return np.asarray(linear_logits(torch.from_numpy(features), torch.from_numpy(weight), bias).numpy())


@checked_call
def fit_probes(
    states: States,
    z: ArrayLike,
    *,
    site: str,
    token: str,
    groups: Sequence[Hashable],
    seed: int = 0,
    folds: int = FOLDS,
    C: float = C,
    cross_fit: bool = True,
) -> Probes:
    """Fit a probe per layer, and choose the best layer on held-out rows.

    Args:
        states: a state of each row at every layer.
        z: 1 where the answer is wrong.
        site: the site of the states; stored in the result.
        token: the position of the states; stored in the result.
        groups: rows of one group are never on both sides of a split. Pass the question texts, because by them the
            probes record which answers they were fitted on.
        seed: seed of the split.
        folds: one of this many folds is held out to choose the layer, or each in turn if they are small.
        C: inverse strength of the L2 penalty on the standardized states.
        cross_fit: also fit on each half of the rows (`Probes.folds`), so that these rows can be evaluated.
    """
    wrong = np.asarray(z, dtype=np.int64)
    splits = grouped_folds(wrong, groups, folds, seed)
    if len(splits[0][1]) >= FEW:
        weight, bias = _fit_layers(states, wrong, splits[0][0], C)
        aucs = _aucs(states, wrong, splits[0][1], weight, bias)
    else:
        aucs = torch.stack(
            [_aucs(states, wrong, rows, *_fit_layers(states, wrong, others, C)) for others, rows in splits]
        ).mean(0)
        weight, bias = _fit_layers(states, wrong, np.arange(len(wrong)), C)
    probes = Probes(site, token, weight, bias, int(aucs.argmax()), aucs, _questions(groups))
    if not cross_fit:
        return probes
    half = np.zeros(len(wrong), dtype=np.int64)
    half[grouped_folds(wrong, groups, 2, seed)[1][1]] = 1
    return with_halves(probes, states, wrong, groups, half, C)


def with_halves(
    probes: Probes, states: States, z: ArrayLike, groups: Sequence[Hashable], half: NDArray[np.int64], C: float = C
) -> Probes:
    """Return the probes with two folds, for half 0 and half 1 (of whole groups), each fitted on the other half."""
    wrong = np.asarray(z, dtype=np.int64)
    folds = []
    for side in (0, 1):
        rows = np.flatnonzero(half != side)
        weight, bias = _fit_layers(states, wrong, rows, C)
        seen = _questions([groups[row] for row in rows.tolist()])
        folds.append(Probes(probes.site, probes.token, weight, bias, probes.best, fitted_on=seen))
    return replace(probes, fitted_on=_questions(groups), folds=tuple(folds))


def _questions(groups: Iterable[Hashable]) -> frozenset[str]:
    """Return the groups that are question texts."""
    return frozenset(group for group in groups if isinstance(group, str))


def grouped_folds(
    z: NDArray[np.int64], groups: Sequence[Hashable], folds: int, seed: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Split rows into folds that keep groups whole and classes even: (the others, the fold) for each."""
    checked_count("folds", folds, least=2)
    codes = pd.factorize(pd.Series(list(groups), dtype=object))[0]
    per_class = [len(np.unique(codes[z == value])) for value in (0, 1)]
    short = InputError(
        f"{per_class[0]:,} groups with label 0 and {per_class[1]:,} with label 1 (of answers: right and wrong ones) "
        f"are too few for {folds} folds with both in each. Give more rows, or fewer folds."
    )
    if min(per_class) < folds:
        raise short
    shares = np.bincount(codes, weights=z) / np.bincount(codes)
    # Groups are dealt in turn, by their share of wrong answers. lexsort uses its last key first; ties are random.
    dealt = np.lexsort((np.random.default_rng(seed).random(len(shares)), shares))
    fold_of = np.empty(len(shares), dtype=np.int64)
    fold_of[dealt] = np.arange(len(shares)) % folds
    splits = [(np.flatnonzero(fold_of[codes] != fold), np.flatnonzero(fold_of[codes] == fold)) for fold in range(folds)]
    if any(len(np.unique(z[side])) < 2 for split in splits for side in split):
        raise short
    return splits


def _fit_layers(
    states: States, z: NDArray[np.int64], rows: NDArray[np.int64], C: float
) -> tuple[Float[Tensor, "layer d_model"], Float[Tensor, " layer"]]:
    weights, biases = zip(*(fit_linear(layer.double().numpy()[rows], z[rows], C) for layer in states), strict=True)
    return torch.from_numpy(np.stack(weights)), torch.tensor(biases, dtype=torch.float64)


def _aucs(
    states: States,
    z: NDArray[np.int64],
    rows: NDArray[np.int64],
    weight: Float[Tensor, "layer d_model"],
    bias: Float[Tensor, " layer"],
) -> Float[Tensor, " layer"]:
    logits = Probes("", "", weight, bias, best=0).logits(states[:, torch.from_numpy(rows)])
    return torch.tensor([float(auc(logit.numpy(), z[rows])) for logit in logits], dtype=torch.float64)


def fit_linear(
    features: Float[ndarray, "example feature"], labels: NDArray[Any], C: float = C
) -> tuple[Float[ndarray, " feature"], float]:
    """Fit a logistic regression on standardized features; return weight and bias for the unscaled features.

    If all labels are equal, the result is a constant: their share, moved towards the middle by half an example. Few
    rows of many features are fitted by `row_space_regression`, others by scikit-learn: both have the same minimum.
    """
    positive = int(labels.sum())
    if not 0 < positive < len(labels):
        # Never 0 or 1, whose logit is infinite.
        share = (positive + 0.5) / (len(labels) + 1)
        return np.zeros(features.shape[1]), float(np.log(share / (1 - share)))
    mean, spread = features.mean(0), features.std(0)
    spread = np.maximum(spread, NOISE * spread.max()) if spread.any() else np.ones_like(spread)
    few = len(features) <= min(MOST_ROWS, features.shape[1])
    fit = row_space_regression if few else _scikit_regression
    with _threads().limit(limits=1, user_api="blas"):  # threads slow small products down
        coefficients, intercept = fit((features - mean) / spread, labels, C)
    weight = coefficients / spread
    return weight, float(intercept - weight @ mean)


def _scikit_regression(
    features: Float[ndarray, "example feature"], labels: NDArray[Any], C: float
) -> tuple[Float[ndarray, " feature"], float]:
    """Return weight and intercept that minimize C * (sum of log losses) + |weight|² / 2."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*ABNORMAL", ConvergenceWarning)  # float64 allows no closer fit
        fitted = LogisticRegression(C=C, max_iter=2000, tol=TOLERANCE).fit(features, labels)
    return fitted.coef_[0], float(fitted.intercept_[0])


def row_space_regression(
    features: Float[ndarray, "example feature"], labels: NDArray[Any], C: float
) -> tuple[Float[ndarray, " feature"], float]:
    """Return the same as `_scikit_regression`, by Newton's method on one number per row.

    The penalty makes the weights a combination of the rows: weight = features.T @ a. At the minimum
    a = C (labels - P) and sum(a) = 0, where P = sigmoid(logits) and logits = features @ features.T @ a + intercept.
    """
    gram, rows = features @ features.T, len(features)
    signs = np.where(labels == 1, 1.0, -1.0)

    def loss(a: Float[ndarray, " example"], logits: Float[ndarray, " example"]) -> float:
        return float(C * np.logaddexp(0, -signs * logits).sum() + a @ gram @ a / 2)

    a, intercept, logits = np.zeros(rows), 0.0, np.zeros(rows)
    for _ in range(100):
        slope = C * expit(logits) * expit(-logits)  # of C * P, by the logit
        system = np.block([[np.eye(rows) + slope[:, None] * gram, slope[:, None]], [np.ones(rows), 0.0]])
        target = C * signs * expit(-signs * logits) + slope * logits
        newton = np.linalg.solve(system, np.append(target, 0.0))
        a_step, intercept_step = newton[:-1] - a, newton[-1] - intercept
        logit_step = gram @ a_step + intercept_step
        # A full step can overshoot where the penalty is weak.
        size, most = 1.0, loss(a, logits) * (1 + 1e-12)
        while size > 1e-6 and loss(a + size * a_step, logits + size * logit_step) > most:
            size /= 2
        a, intercept, logits = a + size * a_step, intercept + size * intercept_step, logits + size * logit_step
        if np.abs(logit_step).max() < TOLERANCE:
            break
    return features.T @ a, float(intercept)


@functools.cache
def _threads() -> ThreadpoolController:
    """Return the controller of the BLAS libraries of this process; cached, as a search takes as long as a small fit."""
    return ThreadpoolController()


# The states that a probe is fitted on: `row feature` by layer. A row of a cache is a real token of a prompt, in the
# order of prompts and positions; an array of two axes is layer 0.


WANTED = "Give what model.cache gives, an array `row feature` or `layer row feature`, or a mapping of layers to arrays."

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class GivenStates:
    """States by layer; in the record of a run they take the place of a model (the cache's model, if from a cache)."""

    read: Callable[[int], Float[ndarray, "row feature"]]
    """Returns the states of a layer in float64."""
    layers: tuple[int, ...]
    site: str
    source: str
    """A hash of the states."""
    groups: tuple[Any, ...]
    """Default groups of the rows: the prompts of a cache, otherwise each row separately."""
    name: str = "given states"
    fingerprint: str = "none"
    revision: str | None = None
    tokenizer_digest: str = "none"
    device: torch.device = CPU
    dtype: torch.dtype = torch.float64

    @property
    def rows(self) -> int:
        """Number of rows of each layer."""
        return len(self.groups)

    @property
    def interventions(self) -> Mapping[str, object]:
        """The hash that identifies the states."""
        return {"states": self.source}

    def of_layer(self, layer: int) -> Float[ndarray, "row feature"]:
        """Return the states of a layer, after checks."""
        array = self.read(layer)
        if len(array) != self.rows or not array.size:
            raise InputError(f"Layer {layer} has states of shape {array.shape}; there are {self.rows} rows.")
        if not np.isfinite(array).all():
            raise InputError(f"The states of layer {layer} hold NaN or infinite values.")
        return array


def given_states(data: object, site: str | None, layers: Sequence[int] | int | None) -> GivenStates:
    """Resolve states from any input format, and select layers."""
    if hasattr(data, "to_numpy") and hasattr(data, "frame"):
        return _of_cache(data, site, layers)
    if site is not None and not isinstance(site, str):
        raise InputError(f"site={shown(site)} is not the name of a site.")
    if isinstance(data, Mapping):
        by_layer = dict(data)
    elif isinstance(data, Tensor | ndarray) and data.ndim in (2, 3):
        by_layer = dict(enumerate(data if data.ndim == 3 else data[None]))
    else:
        what = f"an array of {data.ndim} axes" if isinstance(data, Tensor | ndarray) else f"a {type(data).__name__}"
        raise InputError(f"The states to probe are {what}. {WANTED}")
    chosen = _chosen(layers, list(by_layer))
    whole = {layer: _array(by_layer[layer]) for layer in chosen}
    source = digest([[layer, torch.from_numpy(array)] for layer, array in whole.items()])
    n_rows = len(whole[chosen[0]])
    # Converted again when a layer is fitted, because float64 takes up to four times the memory.
    result = GivenStates(
        lambda layer: _array(by_layer[layer]), tuple(chosen), site or "given", source, tuple(range(n_rows))
    )
    for layer in chosen:
        result.of_layer(layer)
    return result


def _of_cache(cache: Any, site: str | None, layers: Sequence[int] | int | None) -> GivenStates:
    """Return the token rows of a site of a cache."""
    layers_by_site = {name: kept.layers for name, kept in cache.kept.items() if kept.layers}
    if not layers_by_site:
        raise InputError("This cache holds no activations by layer to probe.")
    if site is None and len(layers_by_site) > 1:
        raise InputError(f"This cache holds {', '.join(layers_by_site)}: name one as site=.")
    chosen = checked_name("site", next(iter(layers_by_site)) if site is None else site, tuple(layers_by_site))

    def of_layer(layer: int) -> Float[ndarray, "row feature"]:
        # flatten(1) concatenates the heads of a site.
        return np.asarray(cache.rows(chosen, layer).flatten(1).double().cpu().numpy())

    run = cache.run
    # Loaded when a layer is fitted, because a cache in files may be larger than memory.
    return GivenStates(
        of_layer, tuple(_chosen(layers, layers_by_site[chosen])), chosen, str(cache.digest()),
        tuple(cache.frame["example"].tolist()), name=run.model, fingerprint=run.fingerprint, revision=run.revision,
        tokenizer_digest=run.tokenizer or "none",
    )  # fmt: skip


def _chosen(layers: Sequence[int] | int | None, keys: Sequence[object]) -> list[int]:
    try:
        numbers = [number for entry in keys for number in whole_numbers(entry)]
        requested = numbers if layers is None else whole_numbers(layers)
    except TypeError:
        raise InputError(f"layers={shown(layers)} of states of {shown(keys)[:80]} are not layers. {WANTED}") from None
    missing = [layer for layer in requested if layer not in numbers]
    if missing or not requested or len(set(requested)) < len(requested) or numbers != list(keys):
        raise InputError(f"layers={shown(layers)}: the states have layers {', '.join(map(str, numbers)) or 'none'}.")
    return requested


def _array(part: object) -> Float[ndarray, "row feature"]:
    try:
        array = part.detach().double().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
    except ValueError:  # rows of unequal lengths
        array = np.zeros(0)
    if array.ndim == 3 and array.shape[1] == 1:  # a single position, as from a cache with positions="last"
        array = array[:, 0]
    if array.ndim != 2 or array.dtype.kind not in "fiu":
        dtype = str(part.dtype).removeprefix("torch.") if isinstance(part, Tensor) else array.dtype
        raise InputError(f"The states of a layer are of shape {array.shape} and type {dtype}. {WANTED}")
    return array.astype(np.float64)
