"""How two numbers of the same examples go together: Pearson's and Spearman's correlation, and an interval of it.

    Pearson   cov(x, y) / (sd(x) sd(y)), over the pairs that have both numbers
    Spearman  the same of their ranks, equal numbers sharing their mean rank

An example counts as often as `counts` says, so that a row of counts per resample gives the correlation in every one.
Ranks are those in the data: a draw repeats examples, it does not rank them anew.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Shaped
from numpy import ndarray
from scipy.special import ndtri
from scipy.stats import rankdata

FEWEST = 3
"""Two pairs always lie on a line."""
VARIES = 1e-12
"""Spreads below this share of the numbers are rounding."""
Numbers = Shaped[ndarray, " example"]
Counts = Shaped[ndarray, "*draw example"]


def pearson(x: Numbers, y: Numbers, *, counts: Counts | None = None) -> Float[ndarray, "*draw"]:
    """Return the correlation of two numbers.

    Args:
        x: a number per example.
        y: another.
        counts: how often each example counts, in every draw; default: once, and one number is returned.

    Returns:
        One number per draw; NaN for fewer than three pairs, and where one of the numbers does not vary.
    """
    x, y, drawn = _pairs(x, y, counts)
    if len(x) < FEWEST or not (_varies(x) and _varies(y)):
        return np.full(drawn.shape[:-1], np.nan)
    x, y = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    with np.errstate(invalid="ignore", divide="ignore"):
        total = drawn.sum(-1)
        mean_x, mean_y = drawn @ x / total, drawn @ y / total
        covariance = drawn @ (x * y) / total - mean_x * mean_y
        variances = (drawn @ (x * x) / total - mean_x**2, drawn @ (y * y) / total - mean_y**2)
        size = np.where(np.minimum(*variances) > VARIES, np.sqrt(variances[0] * variances[1]), np.nan)
        return np.asarray(np.clip(covariance / size, -1.0, 1.0))


def spearman(x: Numbers, y: Numbers, *, counts: Counts | None = None) -> Float[ndarray, "*draw"]:
    """Return the rank correlation of two numbers; see `pearson`."""
    x, y, drawn = _pairs(x, y, counts)
    return pearson(rankdata(x), rankdata(y), counts=drawn)


def fisher_interval(r: float, n: int, level: float) -> tuple[float, float]:
    """Return the interval of a correlation of n pairs: tanh(artanh r ± z / √(n − 3)); NaN for fewer than four pairs."""
    if n < 4 or np.isnan(r):
        return float("nan"), float("nan")
    half = ndtri((1 + level) / 2) / np.sqrt(n - 3)
    centre = np.arctanh(np.clip(r, -1 + 1e-12, 1 - 1e-12))
    return float(np.tanh(centre - half)), float(np.tanh(centre + half))


def _pairs(
    x: Numbers, y: Numbers, counts: Counts | None
) -> tuple[Float[ndarray, " pair"], Float[ndarray, " pair"], Float[ndarray, "*draw pair"]]:
    """Return the examples that have both numbers."""
    has = ~np.isnan(x) & ~np.isnan(y)
    drawn = np.ones(len(x)) if counts is None else counts
    return x[has].astype(float), y[has].astype(float), drawn[..., has].astype(float)


def _varies(x: Float[ndarray, " pair"]) -> bool:
    return bool(x.std() > VARIES * np.abs(x).max())
