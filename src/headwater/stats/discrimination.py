"""How well numbers tell two kinds of example apart: the area under the ROC curve, and true positives at a rate.

    AUC             the share of pairs of a positive and another example in which the positive has the higher value
    within strata   of the pairs of one stratum only, over all strata together
    true positives  the largest share of positives above a threshold that at most a given share of the others is above

Ties count half in an AUC; a threshold takes all examples of one value or none. An example counts as often as `counts`
says, so that a row of counts per resample gives the number in every resample.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray
from numpy.typing import ArrayLike, NDArray

Values = Shaped[ndarray, " example"]
Counts = Shaped[ndarray, "*draw example"]


def auc(
    values: Values,
    positive: Shaped[ndarray, " example"],
    *,
    counts: Counts | None = None,
    strata: Int[ndarray, " example"] | None = None,
) -> Float[ndarray, "*draw"]:
    """Return the area under the ROC curve of values that should be high where examples are positive.

    Args:
        values: of the examples.
        positive: true (or 1) for those of the kind that is looked for.
        counts: how often each example counts, in every draw; default: once, and one number is returned.
        strata: a number per example; only pairs of equal ones count.

    Returns:
        One number per draw; NaN where it has no pair to compare, or a value is NaN.
    """
    drawn = np.ones(len(values)) if counts is None else counts
    if not len(values) or np.isnan(values).any():
        return np.full(drawn.shape[:-1], np.nan)
    stratum = np.zeros(len(values)) if strata is None else strata
    order = np.lexsort((values, stratum))
    opens = _begins(stratum[order])
    ties = np.flatnonzero(opens | _begins(values[order]))
    positives, others = (np.add.reduceat(of, ties, axis=-1) for of in _by_kind(drawn[..., order], positive[order]))
    strata_begin = np.flatnonzero(opens[ties])
    in_stratum = np.cumsum(opens[ties]) - 1
    below = np.cumsum(others, axis=-1) - others
    won = positives * (below - below[..., strata_begin][..., in_stratum] + others / 2)
    n_positive, n_other = (np.add.reduceat(of, strata_begin, axis=-1) for of in (positives, others))
    return np.asarray(won.sum(-1) / _or_nan((n_positive * n_other).sum(-1)))


def true_positives(
    values: Values, positive: Shaped[ndarray, " example"], at: float, *, counts: Counts | None = None
) -> Float[ndarray, "*draw"]:
    """Return the largest true positive rate at a false positive rate of at most `at`.

    Args:
        values: of the examples.
        positive: true (or 1) for those of the kind that is looked for.
        at: the false positive rate, 0 to 1.
        counts: as in `auc`.

    Returns:
        One number per draw; NaN where a kind is missing, or a value is NaN.
    """
    drawn = np.ones(len(values)) if counts is None else counts
    if not len(values) or np.isnan(values).any():
        return np.full(drawn.shape[:-1], np.nan)
    order = np.argsort(-values, kind="stable")
    last_of_tie = np.roll(_begins(values[order]), -1)
    true, false = (
        np.cumsum(of, axis=-1)[..., last_of_tie] / _or_nan(of.sum(-1, keepdims=True))
        for of in _by_kind(drawn[..., order], positive[order])
    )
    passing = np.where(false <= at, true, 0.0).max(-1)
    return np.where(np.isnan(true[..., -1] + false[..., -1]), np.nan, passing)


def _begins(sorted_values: Shaped[ndarray, " example"]) -> Bool[ndarray, " example"]:
    """Say where a sorted row has a new value."""
    return np.append(True, sorted_values[1:] != sorted_values[:-1])


def _by_kind(drawn: Counts, positive: Shaped[ndarray, " example"]) -> tuple[Counts, Counts]:
    """Return the counts of the positive examples, and those of the others; 0 for the rest."""
    is_positive = np.asarray(positive, dtype=bool)
    return drawn * is_positive, drawn * ~is_positive


def _or_nan(total: ArrayLike) -> NDArray[np.float64]:
    """Return a divisor that is NaN instead of 0."""
    return np.where(np.greater(total, 0), total, np.nan)
