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
LEVELS = (0.99, 0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
UNIFORM = {
    20: (0.212, 0.254, 0.296, 0.328, 0.369, 0.396, 0.436, 0.473, 0.516, 0.544, 0.567, 0.602, 0.623),
    30: (0.217, 0.259, 0.302, 0.337, 0.378, 0.405, 0.446, 0.483, 0.529, 0.560, 0.586, 0.622, 0.644),
    50: (0.221, 0.266, 0.309, 0.345, 0.388, 0.415, 0.457, 0.496, 0.540, 0.570, 0.600, 0.634, 0.658),
    100: (0.228, 0.274, 0.318, 0.355, 0.398, 0.426, 0.470, 0.508, 0.558, 0.588, 0.619, 0.660, 0.684),
    300: (0.236, 0.282, 0.327, 0.364, 0.408, 0.437, 0.483, 0.523, 0.572, 0.606, 0.634, 0.681, 0.704),
    1000: (0.241, 0.288, 0.334, 0.373, 0.420, 0.451, 0.494, 0.533, 0.583, 0.624, 0.645, 0.683, 0.713),
    3000: (0.243, 0.291, 0.334, 0.373, 0.420, 0.451, 0.494, 0.535, 0.583, 0.624, 0.645, 0.684, 0.713),
}
"""By n, what √n · dip of n uniform numbers exceeds with each of the probabilities `LEVELS`: 4,000 to 20,000 simulated
samples for each n up to 1,000, from where on it hardly changes."""


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
    return float(_uniform(n)[LEVELS.index(0.05)] / np.sqrt(n))


def dip_p(sample: NDArray[np.float64]) -> float:
    """Return how often a uniform sample of this size has at least this dip: the p-value of "one peak".

    At most 1 and at least 0.001, the smallest that the table holds. Samples of fewer than 20 are compared with the dips
    of 20, which are larger: p is then too large, never too small.
    """
    scaled = dip(sample) * np.sqrt(len(sample))
    return float(np.exp(np.interp(scaled, _uniform(len(sample)), np.log(LEVELS), left=0.0)))


def _uniform(n: int) -> NDArray[np.float64]:
    """Return the quantiles of √n · dip of n uniform numbers, at `LEVELS`."""
    table = np.array(list(UNIFORM.values()))
    return np.array([np.interp(np.log(n), np.log(list(UNIFORM)), column) for column in table.T])


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
