"""Resampled means, ratios and intervals against naive loops and scipy; units are drawn with all of their examples."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from headwater.errors import InputError
from headwater.stats.discrimination import auc
from headwater.stats.resample import Bootstrap, interval, percentile_interval
from tests import chance


@pytest.fixture
def rng():
    return chance.rng()


def grouped(rng, n=60, units=13):
    """Examples of units, some without a value, and columns of them."""
    values = rng.normal(size=(n, 2))
    values[rng.random(n) < 0.2, 0] = np.nan
    return rng.integers(0, units, n).astype(str), values


@pytest.mark.oracle
def test_statistics_of_a_draw_are_those_of_examples_repeated_as_often_as_their_unit_came(rng):
    units, values = grouped(rng)
    draws = Bootstrap.of(units, draws=40, seed=3)
    top, bottom, positive = rng.normal(size=60), rng.random(60) + 1, rng.random(60) < 0.5
    means, ratios = draws.mean(values), draws.ratio(top, bottom)
    aucs = draws.apply(lambda counts: auc(top, positive, counts=counts))
    for row, counts in enumerate(draws.per_example().astype(int)):
        repeated = np.arange(60).repeat(counts)
        np.testing.assert_allclose(means[row], np.nanmean(values[repeated], axis=0))
        assert ratios[row] == pytest.approx(top[repeated].sum() / bottom[repeated].sum())
        assert aucs[row] == pytest.approx(auc(top[repeated], positive[repeated]))


def test_answers_to_one_question_are_drawn_together(rng):
    questions = rng.integers(0, 12, 40).astype(str)
    counts = Bootstrap.of(questions, draws=30).per_example()
    for name in np.unique(questions):
        own = counts[:, questions == name]
        assert (own == own[:, :1]).all()
    firsts = counts[:, np.unique(questions, return_index=True)[1]]
    assert (firsts.sum(1) == len(np.unique(questions))).all()
    assert (counts[0] == 1).all()
    assert (counts[1:] != 1).any()


def test_units_are_drawn_as_often_as_there_are_within_each_stratum(rng):
    units, strata = np.arange(50).repeat(2), (rng.random(50) < 0.3).repeat(2)
    draws = Bootstrap.of(units, draws=300, within=strata)
    of_unit = strata[::2]
    for kind in (True, False):
        assert (draws.counts[:, of_unit == kind].sum(1) == (of_unit == kind).sum()).all()
    drawn = draws.counts[1:].mean(0)
    assert np.abs(drawn - 1).max() < 5 / np.sqrt(300)
    assert (Bootstrap.of(units, draws=30, within=np.zeros(100)).counts == Bootstrap.of(units, draws=30).counts).all()
    with pytest.raises(InputError, match="The unit of example 0 has examples in two strata"):
        Bootstrap.of([0, 0, 1], within=[0, 1, 1])


def test_draws_are_those_of_indices_drawn_with_replacement_however_many_are_made_at_a_time():
    draws = Bootstrap.of(range(7), draws=23, seed=5)
    picked = np.random.default_rng(5).integers(7, size=(23, 7))
    assert (draws.counts[1:] == [[(row == unit).sum() for unit in range(7)] for row in picked]).all()
    for size in (1, 4, 100):
        assert (np.concatenate(list(draws.blocks(size))) == draws.counts).all()


@pytest.mark.oracle
def test_intervals_of_a_mean_are_those_of_scipy(rng):
    values = rng.normal(size=80) ** 2
    ours = interval(Bootstrap.of(range(80), draws=8000).mean(values))
    theirs = bootstrap((values,), np.mean, confidence_level=0.95, n_resamples=8000, method="percentile", rng=1)
    assert ours.value == pytest.approx(values.mean())
    width = ours.high - ours.low
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.05 * width)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.05 * width)


def test_intervals_are_percentiles_of_the_defined_draws_and_none_where_half_are_undefined(rng):
    estimates = rng.normal(size=(101, 3))
    estimates[:30, 1] = estimates[:60, 2] = np.nan
    low, high = percentile_interval(estimates)
    np.testing.assert_allclose(low[:2], [np.quantile(estimates[start:, i], 0.025) for i, start in enumerate((0, 30))])
    np.testing.assert_allclose(high[:2], [np.quantile(estimates[start:, i], 0.975) for i, start in enumerate((0, 30))])
    assert np.isnan([low[2], high[2]]).all()


@pytest.mark.parametrize("units", ["", "a", "aaaa"])
def test_of_one_unit_or_none_there_is_no_interval(units):
    found = interval(Bootstrap.of(units).mean(np.arange(len(units)) * 2.0))
    assert np.isnan([found.low, found.high]).all()
    assert found.value == np.mean(np.arange(len(units)) * 2.0) if units else np.isnan(found.value)


def test_a_ratio_of_nothing_is_none_and_a_share_of_nothing_is_not_minus_zero():
    draws = Bootstrap.of("ab", draws=20)
    assert np.isnan(draws.ratio(np.ones(2), np.array([1.0, -1.0]))[0])
    assert np.signbit(draws.ratio(np.zeros(2), -np.ones(2))).sum() == 0


def test_intervals_of_means_hold_the_mean(rng):
    draws = Bootstrap.of(range(20), draws=2000)
    inside = [
        low <= 0 <= high
        for low, high in (percentile_interval(draws.mean(effects)) for effects in rng.normal(size=(300, 20)))
    ]
    assert 0.86 < sum(inside) / 300 <= 1


def test_intervals_of_means_over_groups_cover_the_truth_about_as_often_as_they_say(rng):
    covered = 0
    for _ in range(60):
        groups = np.repeat(np.arange(50), 4)
        values = rng.normal(size=50)[groups] + rng.normal(size=200)
        found = interval(Bootstrap.of(groups.astype(str), draws=300).mean(values))
        covered += found.low <= 0 <= found.high
    assert covered >= 48  # 57 of 60 are expected
