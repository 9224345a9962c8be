"""Logits of rows from probes that saw neither the row nor its group, with the penalty chosen without them.

1. Rows are dealt into folds by group (`linear.grouped_folds`): no group is on both sides of a split.
2. For each fold, the rows outside it are dealt into inner folds the same way; the strength of the penalty is the one
   with the smallest mean log loss on inner rows left out. Where a class has too few groups for that it is the default.
3. A logistic regression on standardized states is fitted with it on all rows outside the fold, and gives the fold's
   logits. Standardization, too, sees the rows outside alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy import ndarray

from headwater.errors import InputError
from headwater.probes.linear import C, fit_linear, grouped_folds

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
    """Return the logit of label 1 of every row.

    Args:
        states: of the rows.
        labels: 0 or 1.
        groups: of the rows.
        splits: (the others, the fold) of each fold, as `grouped_folds` gives.
        strengths: inverse strengths of the penalty to choose from.
        seed: of the inner folds.
    """
    found = CrossFit(np.zeros(len(labels)), np.zeros(len(labels), dtype=np.int64), np.zeros(len(labels)))
    for number, (others, fold) in enumerate(splits):
        chosen = chosen_strength(states[others], labels[others], [groups[i] for i in others], strengths, seed)
        weight, bias = fit_linear(states[others], labels[others], chosen)
        found.logit[fold] = (states[fold] * weight).sum(-1) + bias
        found.fold[fold] = number
        found.C[fold] = chosen
    return found


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
        return float(min(ordered, key=lambda strength: abs(np.log(strength / C))))
    losses = np.zeros(len(ordered))
    for others, fold in splits:
        for place, strength in enumerate(ordered):
            weight, bias = fit_linear(states[others], labels[others], strength)
            logits = states[fold] @ weight + bias
            losses[place] += np.logaddexp(0, np.where(labels[fold] == 1, -logits, logits)).sum()
    return float(ordered[int(losses.argmin())])
