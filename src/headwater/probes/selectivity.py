"""How well a linear probe reads labels from states, and how much of that it could have learned of anything.

Hewitt & Liang, "Designing and Interpreting Probes with Control Tasks", EMNLP 2019.

1. Per layer every row gets its logit from a probe that saw neither it nor its group (below).
2. AUC counts pairs of one fold, accuracy all rows; the intervals draw groups, with the fits as they are.
3. A control task has the same states and labels drawn at random, one per type (`types`): what a probe reads there it
   has learned by heart. selectivity = accuracy - accuracy on the control task, the mean of several draws.

The probe of a row, with the penalty chosen without the row's fold:

1. Rows are dealt into folds by group (`linear.grouped_folds`): no group is on both sides of a split.
2. For each fold, the rows outside it are dealt into inner folds the same way; the strength of the penalty is the one
   with the smallest mean log loss on inner rows left out. Where a class has too few groups for that it is the default.
3. A logistic regression on standardized states is fitted with it on all rows outside the fold, and gives the fold's
   logits. Standardization, too, sees the rows outside alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int, Shaped
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.options import (
    MOST_REPEATS,
    checked_count,
    checked_number,
    checked_seed,
    checked_several,
    is_label,
    shown,
)
from headwater.probes.linear import C, GivenStates, Probe, fit_linear, given_states, grouped_folds
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, Size, each_row, with_interval
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INNER = 3


class CrossFit(NamedTuple):
    """What probes fitted on the other folds say of each row."""

    logit: Float[ndarray, " row"]
    fold: Int[ndarray, " row"]
    C: Float[ndarray, " row"]
    """The inverse strength of the penalty that was chosen for the row's fold."""


def cross_fitted(
    states: Float[ndarray, "row feature"],
    labels: Int[ndarray, " row"],
    groups: Sequence[Hashable],
    splits: Sequence[tuple[Int[ndarray, " _"], Int[ndarray, " _"]]],
    strengths: Sequence[float],
    seed: int,
) -> CrossFit:
    """Return the logit of label 1 of every row, for the splits that `grouped_folds` gives."""
    fit = CrossFit(np.zeros(len(labels)), np.zeros(len(labels), dtype=np.int64), np.zeros(len(labels)))
    for number, (others, fold) in enumerate(splits):
        chosen = chosen_strength(states[others], labels[others], [groups[i] for i in others], strengths, seed)
        weight, bias = fit_linear(states[others], labels[others], chosen)
        # Not a matrix product, which rounds equal rows otherwise by their place (`linear.linear_logits`).
        fit.logit[fold] = (states[fold] * weight).sum(-1) + bias
        fit.fold[fold] = number
        fit.C[fold] = chosen
    return fit


def chosen_strength(
    states: Float[ndarray, "row feature"],
    labels: Int[ndarray, " row"],
    groups: Sequence[Hashable],
    strengths: Sequence[float],
    seed: int,
) -> float:
    """Return the inverse strength with the smallest mean log loss on inner folds left out; the strongest of equals."""
    ordered = sorted(strengths)
    if len(ordered) == 1:
        return float(ordered[0])
    try:
        splits = grouped_folds(labels, groups, INNER, seed)
    except InputError:  # too few groups of a class
        # The one nearest to the default, in steps of a factor.
        return float(min(ordered, key=lambda strength: abs(np.log(strength / C))))
    losses = np.zeros(len(ordered))
    for others, fold in splits:
        for place, strength in enumerate(ordered):
            weight, bias = fit_linear(states[others], labels[others], strength)
            logits = states[fold] @ weight + bias
            # -log sigmoid(±logit), without the overflow of exp.
            losses[place] += np.logaddexp(0, np.where(labels[fold] == 1, -logits, logits)).sum()
    return float(ordered[int(losses.argmin())])


STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Inverse strengths of the L2 penalty on the weights of standardized states."""
Groups = Sequence[Hashable]


@dataclass(frozen=True, eq=False, repr=False)
class ProbeFit(Result):
    """What linear probes read from each layer, on rows left out, beside control tasks."""

    table: pd.DataFrame
    """A row per layer: `layer, rows, groups`, `auc`, `accuracy`, `selectivity` with `..._low` and `..._high`,
    `majority` (the accuracy of the majority class), `control_auc` and `control_accuracy` (means over
    draws)."""
    predictions: pd.DataFrame
    """A row per layer and row: `layer, row, group, label, fold, logit` (of label 1, from a probe that saw neither the
    row nor its group) and `C` (the strength chosen for it)."""
    weight: Tensor
    """`layer feature`: of probes fitted on all rows, to be used on others."""
    bias: Tensor
    """`layer`."""
    site: str
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return the table by layer, without the ends of the intervals of accuracy."""
        return self.table.drop(columns=["accuracy_low", "accuracy_high"])

    @property
    def best(self) -> int:
        """The layer with the highest AUC."""
        return int(self.table["layer"].iloc[int(self.table["auc"].argmax())])

    def probe(self, layer: int | None = None) -> Probe:
        """Return the probe of a layer (by default the best) fitted on all rows: for other rows than these.

        Raises:
            InputError: there is no such layer.
        """
        layers = self.table["layer"].tolist()
        wanted = self.best if layer is None else layer
        if not isinstance(wanted, Integral) or wanted not in layers:
            raise InputError(f"There is no probe of layer {shown(layer)}; there are {', '.join(map(str, layers))}.")
        place = layers.index(wanted)
        seen = frozenset(one for one in self.predictions["group"] if isinstance(one, str))
        return Probe(self.site, "given", layers[place], self.weight[place], float(self.bias[place]), seen)

    def report(self) -> list[str]:
        """Return what the best layer reads, and what of it a probe could have learned of anything."""
        row = max(each_row(self.table), key=lambda one: one["auc"])
        layers = len(self.table)
        auc_text = with_interval(row["auc"], row["auc_low"], row["auc_high"], places=3)
        accuracy = with_interval(row["accuracy"], row["accuracy_low"], row["accuracy_high"], places=3)
        sentences = [
            f"Layer {row['layer']:.0f} is read best: AUC {auc_text}, accuracy {accuracy} against {row['majority']:.3f} "
            f"of the majority class, over {row['rows']:.0f} rows of {row['groups']:.0f} groups left out in "
            "turn."
        ]
        if layers > 1:
            sentences.append(f"It is the best of {layers} layers, and so somewhat overestimated.")
        below = [f"{layer_row['layer']:.0f}" for layer_row in each_row(self.table) if layer_row["auc_high"] < 0.5]
        if below:
            sentences.append(
                f"The interval of the AUC is wholly below 0.5 (layer{'s' * (len(below) > 1)} {', '.join(below)}). "
                "That is the sign of matched pairs, such as one text with two endings, split over folds: give "
                "groups= with one name for each pair."
            )
        if not row["auc_low"] > 0.5 and not row["auc_high"] < 0.5:
            sentences.append("That is indistinguishable from chance.")
        if np.isfinite(row["selectivity"]):
            selectivity = with_interval(row["selectivity"], row["selectivity_low"], row["selectivity_high"], places=3)
            sentences.append(
                f"Labels drawn at random are read with accuracy {row['control_accuracy']:.3f}: selectivity "
                f"{selectivity}."
            )
            if not row["selectivity_low"] > 0:
                sentences.append("The probe does no better than on random labels.")
        sentences.append("That a probe can decode a label does not show that the model uses it.")
        return sentences

    def plot(self, ax: Axes | None = None, *, title: str | None = None, figsize: Size | None = None) -> Axes:
        """Draw AUC by layer with its interval, the control task's AUC, and selectivity."""
        return cast("Axes", self._drawn(ax, title, figsize))


@dataclass(frozen=True)
class _Task:
    """Rows with their labels, and how they are split."""

    labels: Int[ndarray, " row"]
    groups: Groups
    types: Groups
    folds: int
    strengths: tuple[float, ...]
    controls: int
    level: float
    seed: int
    draws: Bootstrap = field(repr=False)

    def splits(self, labels: Int[ndarray, " row"]) -> list[tuple[ndarray, ndarray]] | None:
        """Deal the rows into folds for some labels; None where a class has too few groups."""
        try:
            return list(grouped_folds(labels, self.groups, self.folds, self.seed))
        except InputError:
            return None

    def control(self, number: int) -> Int[ndarray, " row"]:
        """Draw labels, one per type, as often 1 as the labels are."""
        codes = pd.factorize(pd.Series(list(self.types), dtype=object), use_na_sentinel=False)[0]
        n_types, rng = int(codes.max()) + 1, np.random.default_rng([self.seed, number])
        # A control task with one label alone could not be fitted, and would have no AUC.
        ones = int(np.clip(round(self.labels.mean() * n_types), 1, n_types - 1)) if n_types > 1 else 1
        drawn = np.zeros(n_types, dtype=np.int64)
        drawn[rng.permutation(n_types)[:ones]] = 1
        return drawn[codes]


@checked_call
def fit_probe(
    cache: object,
    labels: Iterable[Any],
    *,
    groups: Iterable[Hashable] | None = None,
    types: Iterable[Hashable] | None = None,
    site: str | None = None,
    layers: Sequence[int] | int | None = None,
    folds: int = 5,
    strengths: Sequence[float] = STRENGTHS,
    controls: int = 3,
    level: float = 0.95,
    seed: int = 0,
    progress: bool = True,
    out: str | Path | None = None,
) -> ProbeFit:
    """Fit a linear probe per layer, cross-fitted by group, and compare it with control tasks.

    P(label 1) = sigmoid(state · weight + bias), on standardized states; selectivity is the accuracy less that on
    control tasks (Hewitt and Liang 2019).

    Args:
        cache: the states: what `model.cache` gives; an array `row feature`, `layer row feature`; or a mapping of layers
            to arrays `row feature`.
        labels: 0 or 1 (or False and True) for each row.
        groups: for each row what it belongs to, such as its question or text: rows of one group are never on both sides
            of a split, and intervals draw groups. Default: the prompt of a cache's row, and else each row by itself.
        types: for each row of what type it is, such as its word: a control task gives all rows of a type one random
            label. Default: the groups. A type that recurs in several groups can be learned by heart; one that does not
            leaves the control task at chance.
        site: which of a cache's sites; needed where it holds several.
        layers: which layers; default: all.
        folds: each of this many folds is left out in turn.
        strengths: inverse strengths of the L2 penalty; one is chosen for each fold without it.
        controls: how many control tasks are drawn and averaged; 0 for none.
        level: of the intervals.
        seed: of the folds, the control tasks and the bootstrap.
        progress: show a bar over layers.
        out: a folder for the result. An interrupted run, repeated with it, continues.

    Raises:
        InputError: states, labels, groups or options cannot be used, or a class has fewer groups than there are folds.
    """
    states = given_states(cache, site, layers)
    entries = checked_several("labels", labels, "a list with a label for each row")
    if len(entries) != states.rows:
        n_groups = len(set(states.groups))
        hint = (
            f" There is one label for each of the {n_groups} texts, and a row for each token: cache them with "
            "positions='last'."
        )
        if states.site == "given" and len(entries) == len(states.layers) > 1:
            hint = " An array of three axes is `layer row feature`: transpose(0, 1) makes it so of `row layer feature`."
        elif len(entries) != n_groups:
            hint = " Give a label for each row."
        raise InputError(f"{len(entries)} labels were given for {states.rows} rows of states.{hint}")
    wrong = [i for i, label in enumerate(entries) if not is_label(label)]
    if wrong:
        raise InputError(f"Label {wrong[0]} is {shown(entries[wrong[0]])}; labels are 0 and 1.")
    of_groups = _named("groups", groups, states.rows) or list(states.groups)
    listed = [checked_number("strengths", one, above=0.0) for one in checked_several("strengths", strengths, "a list")]
    if not listed:
        raise InputError("strengths=[] holds no strength of the penalty; give one at least.")
    seed = checked_seed(seed)
    task = _Task(
        labels=np.array([int(label) for label in entries], dtype=np.int64),
        groups=of_groups,
        types=_named("types", types, states.rows) or of_groups,
        folds=checked_count("folds", folds, least=2),
        strengths=tuple(listed),
        controls=checked_count("controls", controls, least=0, most=MOST_REPEATS),
        level=checked_number("level", level, above=0.0, below=1.0),
        seed=seed,
        draws=Bootstrap.of(of_groups, seed=seed),
    )
    splits = task.splits(task.labels)
    if splits is None:
        counts = [len({g for g, label in zip(task.groups, task.labels, strict=True) if label == v}) for v in (0, 1)]
        raise InputError(
            f"{counts[0]} groups with label 0 and {counts[1]} with label 1 are too few for {task.folds} folds that "
            "each hold both. Give more rows, or fewer folds."
        )
    options = {
        "labels": task.labels.tolist(), "groups": digest([str(name) for name in task.groups]),
        "types": digest([str(name) for name in task.types]), "site": states.site, "layers": list(states.layers),
        "folds": task.folds, "strengths": list(task.strengths), "controls": task.controls, "level": task.level,
    }  # fmt: skip

    def work(run: Run) -> ProbeFit:
        def compute(layer: int) -> dict[str, Tensor]:
            return _of_layer(states.of_layer(layer), task, splits)

        with run.bar("probes", "layer", len(states.layers)) as bar:
            pieces = list(run.pieces("layer", states.layers, compute, bar))
        return _result(states, task, pieces, run.record)

    return run_or_resume(ProbeFit, "fit_probe", states, options, work, out=out, seed=task.seed, progress=progress)


def _named(option: str, names: Iterable[Hashable] | None, rows: int) -> list[Hashable]:
    """Return the names of rows as a list."""
    if names is None:
        return []
    listed = checked_several(option, names, "a list with a name for each row")
    if len(listed) != rows:
        raise InputError(f"{len(listed)} {option} were given for {rows} rows of states.")
    if unnamed := [i for i, one in enumerate(listed) if not isinstance(one, Hashable) or isinstance(one, Tensor)]:
        raise InputError(
            f"{option}: entry {unnamed[0]}, {shown(listed[unnamed[0]])}, is not a name; give texts or numbers."
        )
    return listed


def _of_layer(
    states: Float[ndarray, "row feature"], task: _Task, splits: list[tuple[ndarray, ndarray]]
) -> dict[str, Tensor]:
    """Return the logits of one layer, those of its control tasks, and a probe fitted on all rows."""
    fit = cross_fitted(states, task.labels, task.groups, splits, task.strengths, task.seed)
    chosen = chosen_strength(states, task.labels, task.groups, task.strengths, task.seed)
    weight, bias = fit_linear(states, task.labels, chosen)
    logits, folds, labels = [], [], []
    for number in range(task.controls):
        drawn = task.control(number)
        # Folds of its own: those of the labels need not hold both kinds of the drawn ones.
        dealt = task.splits(drawn)
        if dealt is not None:
            control = cross_fitted(states, drawn, task.groups, dealt, task.strengths, task.seed)
            logits.append(control.logit)
            folds.append(control.fold)
            labels.append(drawn)
    shape = (len(logits), len(task.labels))
    return {
        "logit": torch.from_numpy(fit.logit), "fold": torch.from_numpy(fit.fold), "C": torch.from_numpy(fit.C),
        "weight": torch.from_numpy(weight), "bias": torch.tensor(bias, dtype=torch.float64),
        "control_logit": torch.from_numpy(np.array(logits, dtype=float).reshape(shape)),
        "control_fold": torch.from_numpy(np.array(folds, dtype=np.int64).reshape(shape)),
        "control_label": torch.from_numpy(np.array(labels, dtype=np.int64).reshape(shape)),
    }  # fmt: skip


def _numbers(piece: Mapping[str, Tensor], task: _Task) -> dict[str, float]:
    """Measure one layer."""
    arrays = {name: tensor.numpy() for name, tensor in piece.items()}
    labels, draws = task.labels, task.draws
    right = _right(arrays["logit"], labels)
    control, control_auc = np.full_like(right, np.nan), np.nan
    if len(arrays["control_logit"]):
        tasks = list(zip(arrays["control_logit"], arrays["control_label"], arrays["control_fold"], strict=True))
        control_auc = float(np.mean([auc(logit, drawn, strata=fold) for logit, drawn, fold in tasks]))
        control = np.mean([_right(logit, drawn) for logit, drawn, _ in tasks], axis=0)

    def bounded(name: str, estimates: Float[ndarray, " draw"]) -> dict[str, float]:
        return dict(zip((name, f"{name}_low", f"{name}_high"), interval(estimates, task.level), strict=True))

    aucs = draws.apply(lambda counts: auc(arrays["logit"], labels, counts=counts, strata=arrays["fold"]))
    numbers = bounded("auc", aucs) | bounded("accuracy", draws.mean(right))
    numbers |= {"majority": float(max(labels.mean(), 1 - labels.mean()))}
    numbers |= {"control_auc": control_auc, "control_accuracy": float(control.mean())}
    return numbers | bounded("selectivity", draws.mean(right - control))


def _right(logits: Float[ndarray, " row"], labels: Shaped[ndarray, " row"]) -> Float[ndarray, " row"]:
    """1 where the sign of the logit is the label's; half where it has none."""
    return np.where(logits == 0, 0.5, (logits > 0) == (labels == 1))


def _result(states: GivenStates, task: _Task, pieces: Sequence[Mapping[str, Tensor]], run: RunRecord) -> ProbeFit:
    sizes = {"rows": states.rows, "groups": len(set(task.groups))}
    groups = [one if isinstance(one, str | int) else str(one) for one in task.groups]
    measured, predictions = [], []
    for layer, piece in zip(states.layers, pieces, strict=True):
        measured.append({"layer": layer} | sizes | _numbers(piece, task))
        about = {"layer": layer, "row": np.arange(states.rows), "group": groups, "label": task.labels}
        predictions.append(pd.DataFrame(about | {name: piece[name].numpy() for name in ("fold", "logit", "C")}))
    return ProbeFit(
        table=pd.DataFrame(measured),
        predictions=pd.concat(predictions, ignore_index=True),
        weight=torch.stack([piece["weight"] for piece in pieces]),
        bias=torch.stack([piece["bias"] for piece in pieces]),
        site=states.site,
        run=run,
    )
