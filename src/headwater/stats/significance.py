"""Results under chance alone: shuffled targets, flipped signs, false discoveries, and the interval of a proportion.

**Shuffled targets** (`permutation_moments`, `permutation_p_values`): how often would a head hit if the relation's
targets were shuffled? For a relation with n sources let H_ij be how many targets of source j the head hits, given
source i: 0 or 1 if each source has one item. Its hits are S = sum_i H_ii. If the targets were permuted at random, all
targets of a source together, S would be S_pi = sum_i H_i,pi(i). With d the doubly centred H (Hoeffding 1951):

    mean S_pi      = n mean(H)
    variance S_pi  = sum_ij d_ij^2 / (n - 1)
    third moment   = n sum_ij d_ij^3 / ((n - 1)(n - 2))

A head that ignores its source has equal rows, so no variance and p = 1, whatever its score. For other heads the tail
P(S_pi >= S) comes from the shifted Skellam law with these three moments, c + Poisson(a) - Poisson(b):

    a = (variance + third) / 2        b = (variance - third) / 2        c = mean - a + b

Hits on sources with several items come several at a time. Then S_pi is counted in steps of h, and the law is that of
S_pi / h: h = sqrt(sum_ij d_ij^4 / sum_ij d_ij^2), the size of the jumps in a sum of rare ones with these powers, or 1
if that is less, and if each source has one item.

S_pi counts whole hits, most of them rare, so the upper tail of the normal law is far too short: for 3 hits where 0.1
are expected by a factor of 10^10. The Skellam law is the Poisson for a sparse H, the shifted Poisson for a head with
favourite targets and some rare hits, and near normal for a dense H. Against exact distributions its tail is nowhere
below 0.6 of the true tail where that is above 1e-4, mostly within 10 % of it, and further out too long: the safe side.

**Flipped signs** (`sign_flip_p`): if effects were as likely to have the other sign, how often would their mean be this
far from 0? **Items gained and lost** (`mcnemar_p`): if a changed item were as likely to be lost as gained, how often
would the two numbers differ this much? **Above chance** (`excess_p`): over independent units, how often would the mean
be this far above its expectation? **Several tests**: the fraction of false discoveries (`q_values`, Benjamini and
Hochberg), and one p of all (`combined_p`, Fisher). **Proportion** of items: Wilson's interval (`wilson_interval`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray
from scipy.special import bdtr, betaincinv, chndtr, ndtri, stdtr
from torch import Tensor

Numbers = NDArray[np.float64]
NUMBERS_AT_ONCE = 2**17
"""Entries of hit matrices that are converted to float64 at a time (1 MB): few enough for a processor's cache."""
FLIPS = 10_000
SUMS_AT_ONCE = 1 << 22
"""Most sums of effects with flipped signs at a time (32 MB)."""


def permutation_moments(counts: Shaped[Tensor, "head source source"]) -> Float[Tensor, "head moment"]:
    """Return mean, variance, third central moment and step of the number of hits under permuted targets, in float64.

    `counts` is how many of the targets of the second source each head hits, given the first. Booleans mean that each
    source has one item: then the step is 1.
    """
    n = counts.shape[-1]
    sums = []
    for some in counts.split(max(1, NUMBERS_AT_ONCE // n**2)):
        H = some.double()
        rows, columns = H.mean(-1, keepdim=True), H.mean(-2, keepdim=True)
        mean = rows.mean(-2, keepdim=True)
        d = (H - rows).sub_(columns - mean)
        squares = d * d  # pow takes several times as long
        d2, d3 = squares.sum((-1, -2)), (squares * d).sum((-1, -2))
        sums.append((mean[:, 0, 0], d2, d3, squares.square_().sum((-1, -2))))
    mean, d2, d3, d4 = (torch.cat(part) for part in zip(*sums, strict=True))
    is_still = d2 < 0.5 / n**2  # n^2 d2 is a whole number: anything below one is rounding
    step = torch.where(is_still, 1.0, d4 / d2).sqrt().clamp(min=1.0)
    variance = torch.where(is_still, 0.0, d2) / max(n - 1, 1)
    third = n * d3 / max((n - 1) * (n - 2), 1)
    return torch.stack([n * mean, variance, third, torch.ones_like(step) if counts.dtype == torch.bool else step], -1)


def permutation_p_values(hits: Numbers, moments: Numbers) -> Numbers:
    """Return P(at least as many hits) under permuted targets; 1 if the variance is 0.

    The `permutation_moments` of each number of hits lie along a last axis of four.
    """
    mean, variance, third, step = np.moveaxis(moments, -1, 0)
    hits, mean, variance, third = hits / step, mean / step, variance / step**2, third / step**3
    third = np.clip(third, -variance, variance)
    a, b = (variance + third) / 2, (variance - third) / 2
    k = np.round(hits - (mean - third), 9)
    # P(Poisson(a) - Poisson(b) >= k) is a noncentral chi-square, also for k between the whole numbers.
    above = chndtr(2 * a, 2 * np.maximum(k, 1e-9), 2 * b)
    below = 1 - chndtr(2 * b, 2 * (1 - np.minimum(k, 0)), 2 * a)
    return np.where(variance > 0, np.clip(np.where(k > 0, above, below), 0, 1), 1.0)


def chance_corrected(share: Numbers, expected: Numbers) -> Numbers:
    """Return kappa = (share - expected) / (1 - expected): how far from the expected share to perfection (Cohen 1960).

    0 is no better than the expected share, 1 is perfect; if the expected share is 0, kappa is the share itself. If the
    expected share is 1 nothing can be gained, and kappa is 0. NaN if the expected share is NaN.
    """
    room = 1 - expected
    perfect = room < 1e-12
    return np.where(perfect, 0.0, (share - expected) / np.where(perfect, 1.0, room))


def sign_flip_p(effects: Float[np.ndarray, " example"], seed: int = 0) -> float:
    """Return the two-sided p of a mean this far from 0 if each effect could as well have had the other sign.

    All sign patterns are counted up to 12 examples, 10,000 random ones beyond (including the observed one). NaN for
    fewer than two examples.
    """
    return float(sign_flip_p_values(effects[:, None], seed)[0])


def sign_flip_p_values(effects: Float[np.ndarray, "example column"], seed: int = 0) -> Float[np.ndarray, " column"]:
    """Return the p of each column, as `sign_flip_p` does; all columns have the same sign patterns."""
    n = len(effects)
    if n < 2:
        return np.full(effects.shape[1], np.nan)
    if n <= 12:
        signs = np.array(list(product([1.0, -1.0], repeat=n)))
    else:
        signs = np.random.default_rng(seed).choice([1.0, -1.0], size=(FLIPS, n))
        signs[0] = 1.0
    p_values = []
    for part in np.array_split(effects, 1 + len(signs) * effects.shape[1] // SUMS_AT_ONCE, axis=1):
        p_values.append((np.abs(signs @ part) >= np.abs(part.sum(0)) * (1 - 1e-12)).mean(0))
    return np.concatenate(p_values)


def mcnemar_p(gained: Numbers, lost: Numbers) -> Numbers:
    """Return the two-sided exact p of McNemar's test (1947) on paired yes and no: 1 if nothing was gained or lost.

    `gained` are the numbers of items that are yes now and were no before, of any shape.
    """
    changed = gained + lost
    tail = bdtr(np.minimum(gained, lost), np.maximum(changed, 1).astype(int), 0.5)
    return np.where(changed > 0, np.minimum(2 * tail, 1.0), 1.0)


def excess_p(
    differences: Float[np.ndarray, "unit column"],
    variance: Float[np.ndarray, "unit column"],
    weights: Float[np.ndarray, " unit"],
) -> Numbers:
    """Return the one-sided p of a mean difference this far above 0, by Student's law over units; NaN for fewer than 2.

    The mean is the sum of differences over the sum of weights. Its variance is the larger of two: the variance between
    units, n / (n - 1) times the sum of squared distances from weight times mean, which includes what the parts of one
    unit have in common; and the variance under the null itself, which is valid when units happen to be alike. p is 1 if
    both are 0. A difference is the sum, over the parts of a unit, of the observed value minus its expectation under the
    null; its variance is the variance under the null; a weight is the number of parts of a unit.
    """
    n = len(differences)
    if n < 2:
        return np.full(differences.shape[1], np.nan)
    total = differences.sum(0)
    apart = np.square(differences - weights[:, None] * total / weights.sum()).sum(0)
    spread = np.sqrt(np.maximum(n / (n - 1) * apart, variance.sum(0)))
    moves = spread > 0
    return np.where(moves, stdtr(n - 1, -total / np.where(moves, spread, 1.0)), 1.0)


def q_values(p_values: Numbers) -> Numbers:
    """Return Benjamini and Hochberg's adjusted p-values over the whole array; NaN stays NaN and is not counted."""
    from scipy.stats import false_discovery_control  # takes half a second: not when headwater is imported

    q = np.full_like(p_values, np.nan)
    known = ~np.isnan(p_values)
    if known.any():
        q[known] = false_discovery_control(p_values[known])
    return q


def combined_p(p_values: Sequence[float]) -> float:
    """Combine several independent p-values into one, by Fisher's method."""
    from scipy.stats import combine_pvalues

    return float(combine_pvalues(p_values, method="fisher").pvalue)


def wilson_interval(hits: Numbers | float, pairs: Numbers | float) -> tuple[Numbers, Numbers]:
    """Return Wilson's 95 % score interval (low, high) of a proportion, given its hits out of pairs."""
    z = ndtri(0.975)
    share = hits / pairs
    center = (share + z**2 / (2 * pairs)) / (1 + z**2 / pairs)
    half = z * np.sqrt(share * (1 - share) / pairs + z**2 / (4 * pairs**2)) / (1 + z**2 / pairs)
    return np.where(hits <= 0, 0.0, center - half), np.where(hits >= pairs, 1.0, center + half)


def most_of_a_share(hits: int, drawn: int) -> float:
    """Return the one-sided 95 % upper bound of a proportion, given `hits` among `drawn` (Clopper and Pearson)."""
    return 1.0 if hits >= drawn else float(betaincinv(hits + 1, drawn - hits, 0.95))


# The dip: the distance of a sample's distribution function from the nearest one with a single peak.
#
# Hartigan & Hartigan, "The dip test of unimodality", Annals of Statistics 13, 1985. A distribution function with one
# peak is convex before it and concave after it. With F(x−) and F(x) the limits of the step function at a value:
#
# 1. Between two values, fit the greatest convex function below F(x−) and the least concave one above F(x).
# 2. Where they are farthest apart, the peak must lie between the neighbouring corners of the two: continue between
#    these. Outside, the distance of F from its convex and concave fits is the cost of one peak.
# 3. Stop when the two are nowhere farther apart than that cost; the dip is half of it.
#
# The test compares with samples of the uniform distribution, the one-peaked distribution with the largest dips. The
# package `diptest` is under the GPL and this one under MIT, so it is implemented here.


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
"""By n: the value that √n · dip of n uniform numbers exceeds with each of the probabilities `LEVELS`, from 4,000 to
20,000 simulated samples for each n up to 1,000; beyond that it hardly changes."""


def dip(sample: NDArray[np.float64]) -> float:
    """Return the dip of a sample: at most 1/4, and at least 1 / (2n) when all values differ."""
    x, counts = np.unique(sample, return_counts=True)
    above = counts.cumsum() / counts.sum()
    below = above - counts / counts.sum()
    first, last, cost = 0, len(x) - 1, 0.0
    while True:
        interval = slice(first, last + 1)
        low_corners = first + _hull(x[interval], below[interval])
        high_corners = first + _hull(x[interval], -above[interval])
        low = np.interp(x[interval], x[low_corners], below[low_corners])
        high = np.interp(x[interval], x[high_corners], above[high_corners])
        corners = np.union1d(low_corners, high_corners)
        gaps = (high - low)[corners - first]
        if gaps.max() <= cost or first == last:
            return cost / 2
        widest = int(corners[gaps.argmax()])
        left = int(low_corners[low_corners <= widest][-1])
        right = int(high_corners[high_corners >= widest][0])
        before = (above[interval] - low)[: left - first]
        after = (high - below[interval])[right - first + 1 :]
        cost = max(cost, float(before.max(initial=0)), float(after.max(initial=0)))
        first, last = left, right


def critical_dip(n: int) -> float:
    """Return the dip that 5 % of samples of n uniform numbers exceed."""
    return float(_uniform(n)[LEVELS.index(0.05)] / np.sqrt(n))


def dip_p(sample: NDArray[np.float64]) -> float:
    """Return how often a uniform sample of this size has at least this dip: the p-value of "one peak".

    At most 1 and at least 0.001, the smallest in the table. Samples of fewer than 20 are compared with the dips of 20,
    which are larger: p is then too large, never too small.
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
