"""The dip of a sample against linear programs, and its test against uniform samples."""

import numpy as np
import pytest
from scipy.optimize import linprog

from headwater.stats.significance import critical_dip, dip, dip_p
from tests import chance


def nearest_one_peak(sample):
    """The dip by linear programs: for each place of the peak, the nearest convex-then-concave distribution function."""
    x, counts = np.unique(sample, return_counts=True)
    above = counts.cumsum() / len(sample)
    below, k = above - counts / len(sample), len(x)
    return min(_distance(x, above, below, peak) for peak in range(k))


def _distance(x, above, below, peak):
    """Unknown: the function at each value, at the peak also after its jump, and the distance."""
    k = len(x)
    after, far = k, k + 1
    rows, limits = [], []

    def at_most(limit, *terms):
        row = np.zeros(k + 2)
        for index, factor in terms:
            row[index] += factor
        rows.append(row)
        limits.append(limit)

    for i in range(k):
        for index, low, high in [(i, above, below)] if i != peak else [(i, below, below), (after, above, above)]:
            at_most(high[i], (index, 1), (far, -1))
            at_most(-low[i], (index, -1), (far, -1))
    at_most(0, (peak, 1), (after, -1))
    for i in range(k - 1):
        at_most(0, (after if i == peak else i, 1), (i + 1, -1))
    for i in range(1, k - 1):
        if i != peak:
            left, right = x[i] - x[i - 1], x[i + 1] - x[i]
            sign = 1 if i < peak else -1
            before = after if i - 1 == peak else i - 1
            at_most(0, (i, sign * (1 / left + 1 / right)), (before, -sign / left), (i + 1, -sign / right))
    goal = np.zeros(k + 2)
    goal[far] = 1
    solved = linprog(goal, A_ub=np.array(rows), b_ub=limits, bounds=[(0, 1)] * (k + 2))
    return solved.fun if solved.status == 0 else np.inf


@pytest.mark.oracle
def test_the_dip_is_the_distance_to_the_nearest_distribution_with_one_peak():
    rng = chance.rng()
    for _ in range(12):
        n = int(rng.integers(3, 11))
        for sample in (
            rng.normal(size=n),
            rng.integers(0, 5, n).astype(float),
            rng.normal(size=n) + 4 * (np.arange(n) % 2),
        ):
            assert dip(sample) == pytest.approx(nearest_one_peak(sample), abs=1e-7)
    assert dip(np.array([0.0, 1.0])) == pytest.approx(0.25)
    assert dip(np.arange(10.0)) == pytest.approx(0.05)


def test_one_in_twenty_uniform_samples_exceeds_the_critical_dip():
    rng = chance.rng()
    exceeded = np.mean([dip(rng.uniform(size=200)) > critical_dip(200) for _ in range(300)])
    assert exceeded < 0.12


def test_the_p_value_of_the_dip_is_its_rank_among_uniform_samples():
    rng = np.random.default_rng(5)
    p = np.array([dip_p(rng.uniform(size=70)) for _ in range(400)])
    for level in (0.05, 0.2, 0.5, 0.9):
        assert abs((p <= level).mean() - level) < 3.5 * np.sqrt(level * (1 - level) / 400)
    assert dip_p(np.r_[np.zeros(50), np.ones(50)]) == pytest.approx(0.001)
    assert dip_p(np.arange(100.0)) == 1.0
    assert dip_p(rng.uniform(size=8)) > 0.05
