"""How well numbers separate two kinds of examples, and how two numbers of the same examples correlate.

An example counts as often as `counts` says, so that a row of counts per resample gives the statistic in every resample.

    AUC             the fraction of pairs of a positive and another example in which the positive has the higher value
    within strata   only over pairs within one stratum, over all strata together
    true positives  the largest fraction of positives above a threshold that at most a given fraction of others exceed

Ties count half in an AUC; a threshold takes all examples of one value or none.

    Pearson   cov(x, y) / (sd(x) sd(y)), over the pairs that have both numbers
    Spearman  the same for their ranks; equal numbers share their mean rank

Ranks are computed on the data: a draw repeats examples, it does not rank them again.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

Values = Shaped[ndarray, " example"]
Counts = Shaped[ndarray, "*draw example"]


def auc(
    values: Values, positive: Values, *, counts: Counts | None = None, strata: Int[ndarray, " example"] | None = None
) -> Float[ndarray, "*draw"]:
    """Return the area under the ROC curve of values that should be high for positive examples.

    Args:
        values: the values of the examples.
        positive: true (or 1) for examples of the kind to detect.
        counts: how often each example counts, in every draw; default: once, and one number is returned.
        strata: a number per example; only pairs with equal numbers count.

    Returns:
        One number per draw; NaN if it has no pair to compare, or a value is NaN.
    """
    drawn = np.ones(len(values)) if counts is None else counts
    if not len(values) or np.isnan(values).any():
        return np.full(drawn.shape[:-1], np.nan)
    is_positive = np.asarray(positive, dtype=bool)
    stratum = np.zeros(len(values)) if strata is None else strata
    order = np.lexsort((values, stratum))
    place = np.empty(len(values), dtype=np.int64)  # equal values of a stratum have one place
    place[order] = np.cumsum(_begins(stratum[order]) | _begins(values[order]))
    others = order[~is_positive[order]]
    before = np.zeros((*drawn.shape[:-1], len(others) + 1))  # how many others come before each of them in the order
    np.cumsum(np.take(drawn, others, axis=-1), axis=-1, out=before[..., 1:])
    counted = np.take(drawn, np.flatnonzero(is_positive), axis=-1)
    left, right = (np.searchsorted(place[others], place[is_positive], side) for side in ("left", "right"))
    # How many others lie below each positive; ties count half.
    below = np.take(before, left, axis=-1)
    if not np.array_equal(left, right):
        below = (below + np.take(before, right, axis=-1)) / 2
    if strata is None:
        pairs = counted.sum(-1) * before[..., -1]
    else:
        in_stratum = stratum[others]
        first, end = (np.searchsorted(in_stratum, stratum[is_positive], side) for side in ("left", "right"))
        begin = np.take(before, first, axis=-1)
        below -= begin
        pairs = _sum_of_products(counted, np.take(before, end, axis=-1) - begin)
    return np.asarray(_sum_of_products(counted, below) / _or_nan(pairs))


def _sum_of_products(one: Counts, other: Counts) -> Float[ndarray, "*draw"]:
    return np.asarray(np.einsum("...e,...e->...", one, other))


CHANCE, BELOW = "indistinguishable from chance", "below chance"


def against_chance(low: float, high: float) -> str:
    """Interpret the interval of an AUC: `CHANCE` if it contains 0.5, `BELOW` if it is below, or "" if above."""
    return "" if low > 0.5 else BELOW if high < 0.5 else CHANCE


def true_positives(
    values: Values, positive: Values, at: float, *, counts: Counts | None = None
) -> Float[ndarray, "*draw"]:
    """Return the largest true positive rate at a false positive rate of at most `at`, 0 to 1; otherwise like `auc`.

    NaN if a kind is missing, or a value is NaN.
    """
    drawn = np.ones(len(values)) if counts is None else counts
    if not len(values) or np.isnan(values).any():
        return np.full(drawn.shape[:-1], np.nan)
    order = np.argsort(-values, kind="stable")
    last_of_tie = np.roll(_begins(values[order]), -1)
    ordered, is_positive = drawn[..., order], np.asarray(positive[order], dtype=bool)
    true, false = (
        np.cumsum(of, axis=-1)[..., last_of_tie] / _or_nan(of.sum(-1, keepdims=True))
        for of in (ordered * is_positive, ordered * ~is_positive)
    )
    passing = np.where(false <= at, true, 0.0).max(-1)
    return np.where(np.isnan(true[..., -1] + false[..., -1]), np.nan, passing)


def _begins(sorted_values: Shaped[ndarray, " example"]) -> Bool[ndarray, " example"]:
    """Return where a sorted row has a new value."""
    return np.append(True, sorted_values[1:] != sorted_values[:-1])


def _or_nan(total: ArrayLike) -> NDArray[np.float64]:
    """Return a divisor with NaN instead of 0."""
    return np.where(np.greater(total, 0), total, np.nan)


FEWEST = 3
"""Two pairs always lie on a line."""
VARIES = 1e-12
"""Spreads below this fraction of the numbers are rounding."""


def pearson(x: Values, y: Values, *, counts: Counts | None = None) -> Float[ndarray, "*draw"]:
    """Return the correlation of two numbers of examples, in every draw of `counts`, or over all examples.

    NaN for fewer than three pairs, and if one of the numbers does not vary.
    """
    x, y, drawn = _pairs(x, y, counts)
    if len(x) < FEWEST or not all(one.std() > VARIES * np.abs(one).max() for one in (x, y)):
        return np.full(drawn.shape[:-1], np.nan)
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    with np.errstate(invalid="ignore", divide="ignore"):
        total = drawn.sum(-1)
        mean_x, mean_y = drawn @ x / total, drawn @ y / total
        covariance = drawn @ (x * y) / total - mean_x * mean_y
        variances = (drawn @ (x * x) / total - mean_x**2, drawn @ (y * y) / total - mean_y**2)
        size = np.where(np.minimum(*variances) > VARIES, np.sqrt(variances[0] * variances[1]), np.nan)
        return np.asarray(np.clip(covariance / size, -1.0, 1.0))


def spearman(x: Values, y: Values, *, counts: Counts | None = None) -> Float[ndarray, "*draw"]:
    """Return the rank correlation of two numbers; see `pearson`."""
    from scipy.stats import rankdata  # takes half a second: not when headwater is imported

    x, y, drawn = _pairs(x, y, counts)
    return pearson(rankdata(x), rankdata(y), counts=drawn)


def fisher_interval(r: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a correlation of n pairs: tanh(artanh r ± z / √(n − 3)); NaN for fewer than four."""
    if n < 4 or np.isnan(r):
        return float("nan"), float("nan")
    half = ndtri(0.975) / np.sqrt(n - 3)
    centre = np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12))
    return float(np.tanh(centre - half)), float(np.tanh(centre + half))


def _pairs(
    x: Values, y: Values, counts: Counts | None
) -> tuple[Float[ndarray, " pair"], Float[ndarray, " pair"], Float[ndarray, "*draw pair"]]:
    """Return the examples that have both numbers."""
    has = ~np.isnan(x) & ~np.isnan(y)
    drawn = np.ones(len(x)) if counts is None else counts
    return x[has].astype(float), y[has].astype(float), drawn[..., has].astype(float)
