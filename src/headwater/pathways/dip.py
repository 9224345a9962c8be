"""The dip: how far a sample's distribution function is from the nearest one with a single peak.

Hartigan & Hartigan, "The dip test of unimodality", Annals of Statistics 13, 1985. A distribution function with one peak
is convex before it and concave after it. With F(x−) and F(x) the limits of the step function at a value:

1. Between two values, fit the greatest convex function below F(x−) and the least concave one above F(x).
2. Where they are farthest apart, the peak must lie between the neighbouring corners of the two: go on between these.
   Outside, the distance of F from its convex and concave fits is what one peak costs.
3. End when the two are nowhere farther apart than that cost; the dip is half of it.

The test compares with samples of the uniform distribution, the one-peaked distribution with the largest dips.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

Values = Float[np.ndarray, " value"]
CRITICAL = {30: 0.482, 100: 0.509, 300: 0.525, 1000: 0.534, 3000: 0.536}
"""The 95 % quantile of √n · dip of n uniform numbers, from 3,000 to 20,000 simulated samples each."""


def dip(sample: NDArray[np.float64]) -> float:
    """Return the dip of a sample: at most 1/4, and at least 1 / (2n) when all values differ."""
    x, counts = np.unique(sample, return_counts=True)
    above = counts.cumsum() / counts.sum()
    below = above - counts / counts.sum()
    first, last, cost = 0, len(x) - 1, 0.0
    while True:
        here = slice(first, last + 1)
        low_corners = first + _hull(x[here], below[here])
        high_corners = first + _hull(x[here], -above[here])
        low = np.interp(x[here], x[low_corners], below[low_corners])
        high = np.interp(x[here], x[high_corners], above[high_corners])
        corners = np.union1d(low_corners, high_corners)
        gaps = (high - low)[corners - first]
        if gaps.max() <= cost or first == last:
            return cost / 2
        widest = int(corners[gaps.argmax()])
        left = int(low_corners[low_corners <= widest][-1])
        right = int(high_corners[high_corners >= widest][0])
        before = (above[here] - low)[: left - first]
        after = (high - below[here])[right - first + 1 :]
        cost = max(cost, float(before.max(initial=0)), float(after.max(initial=0)))
        first, last = left, right


def critical_dip(n: int) -> float:
    """Return the dip that 5 % of samples of n uniform numbers exceed."""
    return float(np.interp(np.log(n), np.log(list(CRITICAL)), list(CRITICAL.values())) / np.sqrt(n))


def _hull(x: Values, y: Values) -> Int[np.ndarray, " corner"]:
    """Return the indices of the corners of the greatest convex function below the points."""
    corners: list[int] = []
    for i in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2], corners[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(i)
    return np.array(corners)
