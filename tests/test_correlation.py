"""Correlations are scipy's, of repeated examples too; Fisher's interval is scipy's."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from headwater.stats.discrimination import fisher_interval, pearson, spearman
from tests import chance


@pytest.fixture
def pairs():
    """Two numbers that go together, with ties, far from 0, some missing."""
    rng = chance.rng()
    x = rng.normal(size=50).round(1) + 1000
    y = (x + rng.normal(size=50)).round(1)
    y[rng.random(50) < 0.2] = np.nan
    return x, y, ~np.isnan(y)


@pytest.mark.oracle
def test_correlations_are_those_of_scipy_over_the_pairs_that_have_both(pairs):
    x, y, has = pairs
    assert pearson(x, y) == pytest.approx(pearsonr(x[has], y[has]).statistic)
    assert spearman(x, y) == pytest.approx(spearmanr(x[has], y[has]).statistic)
    assert pearson(x, -3 * x) == pytest.approx(-1)


@pytest.mark.oracle
def test_counts_weigh_a_pair_as_often_as_repeating_it(pairs):
    x, y, has = pairs
    counts = chance.rng().integers(0, 4, (6, 50))
    expected = [pearsonr(x[has].repeat(row[has]), y[has].repeat(row[has])).statistic for row in counts]
    np.testing.assert_allclose(pearson(x, y, counts=counts), expected)
    ones = spearman(x, y, counts=np.ones((2, 50)))
    np.testing.assert_allclose(ones, spearmanr(x[has], y[has]).statistic)


def test_where_nothing_varies_or_few_pairs_are_left_there_is_no_correlation(pairs):
    x, y, _ = pairs
    for other in (np.full(50, 0.1), np.full(50, np.nan), np.where(np.arange(50) < 2, y, np.nan), 0.3 + 0 * x):
        assert np.isnan(pearson(x, other))
        assert np.isnan(spearman(other, x))
    one_pair = np.zeros((2, 50))
    one_pair[0, 3] = 4
    assert np.isnan(pearson(x, x, counts=one_pair)).all()


@pytest.mark.oracle
def test_the_interval_of_a_correlation_is_that_of_scipy(pairs):
    x, y, has = pairs
    found = pearsonr(x[has], y[has])
    expected = found.confidence_interval(0.95)
    assert fisher_interval(found.statistic, int(has.sum())) == pytest.approx((expected.low, expected.high))
    assert np.isnan(fisher_interval(0.5, 3)).all()
