"""How well a linear probe decodes labels from states, compared with labels that it can only memorize.

Hewitt & Liang, "Designing and Interpreting Probes with Control Tasks", EMNLP 2019.

1. Per layer, every row gets its logit from a probe that was fitted on neither it nor its group (below).
2. AUC counts pairs within one fold, accuracy counts all rows; the intervals resample groups, with the fits fixed.
3. A control task has the same states, and random labels, one per type (`types`): a probe can decode them only by
   memorizing. selectivity = accuracy - accuracy on the control task, the mean of several draws.

The probe for a row, with the penalty chosen without the row's fold:

1. Rows are assigned to folds by group (`linear.grouped_folds`): no group is on both sides of a split.
2. For each fold, the rows outside it are split into inner folds in the same way; the chosen penalty has the smallest
   mean log loss on held-out inner rows. If a class has too few groups for that, the default penalty is used.
3. A logistic regression on standardized states is fitted with it on all rows outside the fold, and gives the fold's
   logits. Standardization, too, uses only the rows outside.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError
from headwater.options import (
    MOST_REPEATS,
    checked_count,
    checked_number,
    checked_several,
    is_label,
    shown,
)
from headwater.probes.linear import C, Probe, fit_linear, given_states, grouped_folds, read_linear
from headwater.runs.analysis import Run, run_or_resume
from headwater.runs.identity import digest
from headwater.runs.record import RunRecord
from headwater.runs.result import Result, interval_text
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval

INNER = 3
Splits = Sequence[tuple[Int[ndarray, " _"], Int[ndarray, " _"]]]


class CrossFit(NamedTuple):
    """The output for each row of the probe that was fitted on the other folds (of several tasks, if stacked)."""

    logit: Float[ndarray, "*task row"]
    fold: Int[ndarray, "*task row"]
    C: Float[ndarray, "*task row"]
    """The inverse penalty strength that was chosen for the row's fold."""


def cross_fitted(
    states: Float[ndarray, "row feature"],
    labels: Int[ndarray, " row"],
    groups: Sequence[Hashable],
    splits: Splits,
    strengths: Sequence[float],
    seed: int,
) -> CrossFit:
    """Return the logit of label 1 for every row, for the splits of `grouped_folds`."""
    fit = CrossFit(np.zeros(len(labels)), np.zeros(len(labels), dtype=np.int64), np.zeros(len(labels)))
    for number, (others, fold) in enumerate(splits):
        chosen = chosen_strength(states[others], labels[others], [groups[i] for i in others], strengths, seed)
        weight, bias = fit_linear(states[others], labels[others], chosen)
        fit.logit[fold] = read_linear(states[fold], weight, bias)
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
    """Return the inverse strength with the smallest mean log loss on held-out inner folds; ties: strongest penalty."""
    ordered = sorted(strengths)
    if len(ordered) == 1:
        return float(ordered[0])
    try:
        splits = grouped_folds(labels, groups, INNER, seed)
    except InputError:  # too few groups of a class
        # The one nearest to the default on a log scale.
        return float(min(ordered, key=lambda strength: abs(np.log(strength / C))))
    losses = np.zeros(len(ordered))
    for others, fold in splits:
        for place, strength in enumerate(ordered):
            weight, bias = fit_linear(states[others], labels[others], strength)
            logits = read_linear(states[fold], weight, bias)
            # -log sigmoid(±logit), without overflow of exp.
            losses[place] += np.logaddexp(0, np.where(labels[fold] == 1, -logits, logits)).sum()
    return float(ordered[int(losses.argmin())])


STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Inverse strengths of the L2 penalty on the weights of standardized states."""
Groups = Sequence[Hashable]


@dataclass(frozen=True, eq=False, repr=False)
class ProbeFit(Result):
    """The performance of linear probes at each layer on held-out rows, beside control tasks."""

    table: pd.DataFrame
    """A row per layer: `layer, rows, groups`, `auc`, `accuracy`, `selectivity` with `..._low` and `..._high`,
    `majority` (the accuracy of the majority class), `control_auc` and `control_accuracy` (means over draws)."""
    predictions: pd.DataFrame
    """A row per layer and row: `layer, row, group, label, fold, logit` (of label 1, from a probe fitted on neither the
    row nor its group) and `C` (the inverse penalty strength chosen for its fold)."""
    weight: Tensor
    """`layer feature`: the weights of probes fitted on all rows, for use on other rows."""
    bias: Tensor
    """`layer`: the biases of these probes."""
    site: str
    run: RunRecord

    def summary(self) -> pd.DataFrame:
        """Return the table by layer, without the interval bounds of accuracy."""
        return self.table.drop(columns=["accuracy_low", "accuracy_high"])

    @property
    def best(self) -> int:
        """The layer with the highest AUC, the first of these if there are several."""
        return int(self.table["layer"].iloc[int(self.table["auc"].argmax())])

    def probe(self, layer: int | None = None) -> Probe:
        """Return the probe of a layer (by default the best) fitted on all rows, for use on other rows."""
        # Not those of the table, whose rows may have been sorted or taken out.
        layers = list(self.run.options["layers"])
        wanted = self.best if layer is None else layer
        if not isinstance(wanted, Integral) or wanted not in layers:
            raise InputError(f"There is no probe of layer {shown(layer)}; there are {', '.join(map(str, layers))}.")
        place = layers.index(wanted)
        seen = frozenset(one for one in self.predictions["group"] if isinstance(one, str))
        return Probe(self.site, "given rows", layers[place], self.weight[place], float(self.bias[place]), seen)

    def report(self) -> list[str]:
        """Return the performance at the best layer, and how much of it a probe reaches on random labels."""
        row = max(self.table.to_dict("records"), key=lambda one: one["auc"])
        layers = len(self.table)
        auc_text, accuracy, selectivity = (
            interval_text(row, name, ".3f") for name in ("auc", "accuracy", "selectivity")
        )
        ties = int((self.table["auc"] == row["auc"]).sum())
        tied = f" (the first of {ties} that tie)" if ties > 1 else ""
        sentences = [
            f"The best probe is at layer {row['layer']:.0f}{tied}: AUC {auc_text}, accuracy {accuracy} against "
            f"{row['majority']:.3f} for the majority class, over {row['rows']:.0f} rows of {row['groups']:.0f} groups "
            "held out in turn."
        ]
        if layers > 1:
            sentences.append(f"As the best of {layers} layers, its performance is somewhat overestimated.")
        below = [f"{layer:.0f}" for layer in self.table.loc[self.table["auc_high"] < 0.5, "layer"]]
        if below:
            sentences.append(
                f"The interval of the AUC is wholly below 0.5 (layer{'s' * (len(below) > 1)} {', '.join(below)}). "
                "This happens if matched pairs, such as one text with two endings, are split over folds: give "
                "groups= with one name for each pair."
            )
        if not row["auc_low"] > 0.5 and not row["auc_high"] < 0.5:
            sentences.append("This is indistinguishable from chance.")
        if np.isfinite(row["selectivity"]):
            sentences.append(
                f"The accuracy on random labels is {row['control_accuracy']:.3f}, so the selectivity is {selectivity}."
            )
            if not row["selectivity_low"] > 0:
                sentences.append("The probe does no better than one fitted to random labels.")
        elif self.run.options["controls"]:
            sentences.append(
                "No probe was fitted to random labels, one for each type: too few groups had each of them for "
                f"{self.run.options['folds']} folds. Give fewer folds, or more groups."
            )
        sentences.append("That a probe can decode a label does not show that the model uses it.")
        return sentences


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
    seed: int = 0,
    progress: bool = True,
    out: str | Path | None = None,
) -> ProbeFit:
    """Fit a linear probe per layer, cross-fitted by group, and compare it with control tasks.

    P(label 1) = sigmoid(state · weight + bias), on standardized states; selectivity is the accuracy minus the accuracy
    on control tasks (Hewitt and Liang 2019).

    Args:
        cache: the states: a result of `model.cache`; an array `row feature` or `layer row feature`; or a mapping of
            layers to arrays `row feature`.
        labels: 0 or 1 (or False and True) for each row.
        groups: the group of each row, such as its question or text: rows of one group are never on both sides of a
            split, and intervals resample groups. Default: the prompt of a cache's row, otherwise each row separately.
        types: the type of each row, such as its word: a control task gives all rows of a type one random label.
            Default: the groups. A type that occurs in several groups can be memorized; with types that do not, the
            control task stays at chance.
        site: the site of a cache; required if it has several.
        layers: layers to fit; default: all.
        folds: each of this many folds is held out in turn.
        strengths: inverse strengths of the L2 penalty; one is chosen for each fold, without using the fold.
        controls: number of control tasks that are drawn and averaged; 0 for none.
        seed: seed of the folds, the control tasks and the bootstrap.
    """
    states = given_states(cache, site, layers)
    entries = checked_several("labels", labels, "a list with a label for each row")
    if len(entries) != states.rows:
        raise InputError(
            f"{len(entries)} labels were given for {states.rows} rows of states. A cache has a row for each token: for "
            "a row per text, cache with positions='last'. An array of three axes is `layer row feature`."
        )
    wrong = [i for i, label in enumerate(entries) if not is_label(label)]
    if wrong:
        found = shown(entries[wrong[0]])
        raise InputError(
            f"Labels must be 0 or 1; label {wrong[0]} is {found}. For several classes fit one probe for each: "
            f"labels=[label == {found} for label in labels]."
        )
    of_groups = _named("groups", groups, states.rows) or list(states.groups)
    listed = [checked_number("strengths", one, above=0.0) for one in checked_several("strengths", strengths, "a list")]
    if not listed:
        raise InputError("strengths=[] is empty; give at least one strength of the penalty.")
    folds = checked_count("folds", folds, least=2)
    controls = checked_count("controls", controls, least=0, most=MOST_REPEATS)
    target, of_types = np.array([int(label) for label in entries]), _named("types", types, states.rows) or of_groups
    # The labels, and those of each control task, each with folds of its own: both labels must occur in every fold.
    tasks = [(target, grouped_folds(target, of_groups, folds, seed))]
    for number in range(controls):
        drawn = control_labels(target, of_types, [seed, number])
        with suppress(InputError):  # too few groups have each of the drawn labels
            tasks.append((drawn, grouped_folds(drawn, of_groups, folds, seed)))
    options = {
        "labels": target.tolist(), "groups": digest([str(name) for name in of_groups]),
        "types": digest([str(name) for name in of_types]), "site": states.site, "layers": list(states.layers),
        "folds": folds, "strengths": listed, "controls": controls,
    }  # fmt: skip

    def work(run: Run) -> ProbeFit:
        def compute(layer: int) -> dict[str, Tensor]:
            features = states.of_layer(layer)
            fits = [cross_fitted(features, one, of_groups, splits, listed, seed) for one, splits in tasks]
            weight, bias = fit_linear(features, target, chosen_strength(features, target, of_groups, listed, seed))
            arrays = {name: np.stack([getattr(fit, name) for fit in fits]) for name in CrossFit._fields}
            arrays |= {"weight": weight, "bias": np.array(bias)}
            return {name: torch.from_numpy(array) for name, array in arrays.items()}

        with run.bar("Probing", "layer", len(states.layers)) as bar:
            pieces = list(run.pieces("layer", states.layers, compute, bar))
        sizes, draws = {"rows": states.rows, "groups": len(set(of_groups))}, Bootstrap.of(of_groups, seed=seed)
        groups = [one if isinstance(one, str | int) else str(one) for one in of_groups]
        labels, measured, predictions = np.stack([one for one, _ in tasks]), [], []
        for layer, piece in zip(states.layers, pieces, strict=True):
            fit = CrossFit(*(piece[name].numpy() for name in CrossFit._fields))
            measured.append({"layer": layer} | sizes | _measures(fit, labels, draws))
            about = {"layer": layer, "row": np.arange(states.rows), "group": groups, "label": target}
            predictions.append(pd.DataFrame(about | {"fold": fit.fold[0], "logit": fit.logit[0], "C": fit.C[0]}))
        return ProbeFit(
            table=pd.DataFrame(measured),
            predictions=pd.concat(predictions, ignore_index=True),
            weight=torch.stack([piece["weight"] for piece in pieces]),
            bias=torch.stack([piece["bias"] for piece in pieces]),
            site=states.site,
            run=run.record,
        )

    return run_or_resume(ProbeFit, "fit_probe", states, options, work, out=out, seed=seed, progress=progress)


def _named(option: str, names: Iterable[Hashable] | None, rows: int) -> list[Hashable]:
    """Return the names of rows as a list, empty for None."""
    if names is None:
        return []
    listed = checked_several(option, names, "a list with a name for each row")
    if len(listed) != rows:
        raise InputError(f"{len(listed)} {option} were given for {rows} rows of states.")
    missing = pd.Series(listed, dtype=object).isna().to_numpy()
    for place, name in enumerate(listed):
        if missing[place] or not isinstance(name, Hashable) or isinstance(name, Tensor):
            raise InputError(f"{option}: entry {place}, {shown(name)}, is not a name; give texts or numbers.")
    return listed


def control_labels(labels: Int[ndarray, " row"], types: Groups, seed: Sequence[int]) -> Int[ndarray, " row"]:
    """Draw random labels, one per type, with the labels' share of ones."""
    codes = pd.factorize(pd.Series(list(types), dtype=object), use_na_sentinel=False)[0]
    n_types, rng = int(codes.max()) + 1, np.random.default_rng(seed)
    # With only one label a control task could not be fitted, and would have no AUC.
    ones = int(np.clip(round(labels.mean() * n_types), 1, n_types - 1)) if n_types > 1 else 1
    drawn = np.zeros(n_types, dtype=np.int64)
    drawn[rng.permutation(n_types)[:ones]] = 1
    return drawn[codes]


def _measures(fit: CrossFit, labels: Int[ndarray, "task row"], draws: Bootstrap) -> dict[str, float]:
    """Return the measures of one layer from its cross-fits, of the labels and then of each control task."""
    # 1 where the logit's sign matches the label, otherwise 0; 0.5 where the logit is 0.
    right = np.where(fit.logit == 0, 0.5, (fit.logit > 0) == (labels == 1))
    control, control_auc = np.full_like(right[0], np.nan), np.nan
    if len(labels) > 1:
        tasks = zip(fit.logit[1:], labels[1:], fit.fold[1:], strict=True)
        control_auc = float(np.mean([auc(logit, drawn, strata=fold) for logit, drawn, fold in tasks]))
        control = right[1:].mean(0)
    aucs = draws.apply(lambda counts: auc(fit.logit[0], labels[0], counts=counts, strata=fit.fold[0]))
    found = {"auc": aucs, "accuracy": draws.mean(right[0]), "selectivity": draws.mean(right[0] - control)}
    numbers = {name: interval(estimates).named(name) for name, estimates in found.items()}
    beside = {"majority": float(max(labels[0].mean(), 1 - labels[0].mean()))}
    beside |= {"control_auc": control_auc, "control_accuracy": float(control.mean())}
    return numbers["auc"] | numbers["accuracy"] | beside | numbers["selectivity"]
