"""AUCs and true positive rates are scikit-learn's, and those of counting pairs and thresholds one by one."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from headwater.stats.discrimination import auc, true_positives
from tests import chance


@pytest.fixture
def rng():
    return chance.rng()


def examples(rng, n, ties):
    """Values of which positives have the higher ones, both kinds among them."""
    positive = np.append(rng.random(n - 2) < 0.4, [True, False])
    values = rng.normal(size=n) + positive
    return (values.round(1) if ties else values), positive


def best_rate(values, positive, at, count):
    """The true positive rate of every threshold, one by one."""
    rates = [0.0]
    for threshold in set(values.tolist()):
        false = sum(count[(values >= threshold) & ~positive]) / sum(count[~positive])
        if false <= at:
            rates.append(sum(count[(values >= threshold) & positive]) / sum(count[positive]))
    return max(rates)


@pytest.mark.oracle
@pytest.mark.parametrize("ties", [False, True])
def test_aucs_of_resamples_are_those_of_scikit_learn_with_weights(ties, rng):
    for n in (2, 7, 60, 400):
        values, positive = examples(rng, n, ties)
        counts = np.concatenate([np.ones((1, n)), rng.integers(0, 3, (20, n))])
        counts[:, -2:] = 1
        expected = [roc_auc_score(positive, values, sample_weight=row) for row in counts]
        np.testing.assert_allclose(auc(values, positive, counts=counts), expected, rtol=1e-12)
        assert auc(values, positive.astype(int)) == pytest.approx(expected[0])
        assert auc(values, positive, strata=np.full(n, 3)) == pytest.approx(expected[0])


@pytest.mark.oracle
@pytest.mark.parametrize("ties", [False, True])
def test_true_positive_rates_are_those_of_the_roc_curve_and_of_every_threshold(ties, rng):
    values, positive = examples(rng, 400, ties)
    counts = rng.integers(0, 3, (5, 400))
    false, true, _ = roc_curve(positive, values, drop_intermediate=False)
    for at in (0.0, 0.01, 0.05, 1.0):
        assert true_positives(values, positive, at) == true[false <= at][-1]
        expected = [best_rate(values, positive, at, row) for row in counts]
        np.testing.assert_allclose(true_positives(values, positive, at, counts=counts), expected)


def test_counts_weigh_an_example_as_often_as_repeating_it(rng):
    values, member = rng.normal(size=30).round(1), np.arange(30) < 13
    weights = rng.integers(1, 4, (5, 30))
    for measure in (auc, lambda *given, counts=None: true_positives(*given, 0.05, counts=counts)):
        found = measure(values, member, counts=weights)
        for row, counts in enumerate(weights):
            again = measure(values.repeat(counts), member.repeat(counts), counts=np.ones((1, counts.sum()), dtype=int))
            assert found[row] == pytest.approx(again[0])


def test_the_auc_within_strata_counts_pairs_of_one_stratum(rng):
    for _ in range(20):
        n = int(rng.integers(4, 30))
        values, strata = rng.integers(0, 6, n).astype(float), rng.integers(0, 4, n)
        member = np.append(rng.random(n - 2) < 0.5, [True, False])
        strata[-2:] = 0
        weights = np.concatenate([np.ones((1, n), dtype=int), rng.integers(0, 3, (3, n))])
        for weight, found in zip(weights, auc(values, member, strata=strata, counts=weights), strict=True):
            pairs = [
                (weight[i] * weight[j], (values[i] > values[j]) + (values[i] == values[j]) / 2)
                for i in np.flatnonzero(member)
                for j in np.flatnonzero(~member)
                if strata[i] == strata[j]
            ]
            total = sum(count for count, _ in pairs)
            expected = sum(count * won for count, won in pairs) / total if total else math.nan
            assert found == pytest.approx(expected, nan_ok=True)
        one = auc(values, member, counts=weights[:1])
        assert auc(values, member, strata=np.zeros(n, dtype=int), counts=weights[:1]) == pytest.approx(one)


def test_auc_is_that_of_scikit_learn_and_undefined_with_one_class(rng):
    z, logits = rng.integers(0, 2, 50), rng.normal(size=50).round(1)
    z[:2] = 0, 1
    assert auc(logits, z) == pytest.approx(roc_auc_score(z, logits))
    assert np.isnan(auc(logits[:4], np.ones(4, dtype=np.int64)))


def test_equal_orders_have_exactly_equal_aucs_and_a_perfect_one_is_one(rng):
    values, positive = examples(rng, 300, ties=True)
    assert auc(values, positive) == auc(3 * values + 1, positive)
    assert auc(positive + 0.1 * rng.random(300), positive) == 1.0
    assert auc(np.zeros(300), positive) == 0.5
    assert true_positives(np.zeros(300), positive, 0.05) == 0.0


@pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0, np.nan]])
def test_without_both_kinds_or_with_a_value_that_is_none_there_is_no_number(values):
    values = np.array(values)
    for positive in (np.ones(len(values)), np.zeros(len(values))):
        assert np.isnan(auc(values, positive))
        assert np.isnan(true_positives(values, positive, 0.05))
    assert np.isnan(auc(values, np.arange(len(values)), counts=np.zeros((2, len(values))))).all()
    apart = np.arange(len(values))
    assert np.isnan(auc(values, apart, strata=apart))
