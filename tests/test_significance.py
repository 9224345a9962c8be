"""What chance gives: permuted targets against exact and simulated permutations, flipped signs, q values, Wilson."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headwater.stats.significance import (
    combined_p,
    permutation_moments,
    permutation_p_values,
    q_values,
    sign_flip_p,
    wilson_interval,
)
from tests import chance


def random_hits(seed: int, n: int, kind: str) -> np.ndarray:
    """What heads of several habits hit: rows are sources, columns targets."""
    rng = np.random.default_rng(seed)
    hits = np.zeros((n, n), bool)
    if kind == "sparse":
        return rng.random((n, n)) < 1.5 / n
    if kind == "dense":
        return rng.random((n, n)) < 0.5
    if kind == "one source, one target":
        return np.eye(n, dtype=bool)
    if kind == "favourite targets, and noise":
        hits[:, : n // 2] = True
        return hits ^ (rng.random((n, n)) < 0.03)
    if kind == "popular targets":
        return rng.random((n, n)) < np.minimum(0.6, 2 / np.arange(1, n + 1))
    if kind == "busy sources":
        return rng.random((n, n)) < np.minimum(0.6, 2 / np.arange(1, n + 1))[:, None]
    block = n // 3  # two kinds of source, each with its own targets
    hits[:block, :block] = hits[block:, block:] = True
    return hits


KINDS = (
    "sparse",
    "dense",
    "one source, one target",
    "favourite targets, and noise",
    "popular targets",
    "busy sources",
    "blocks",
)


SIZES = {
    "equal": lambda rng, n: np.full(n, 4),
    "a few": lambda rng, n: rng.integers(1, 4, n),
    "some large": lambda rng, n: rng.geometric(0.3, n),
    "one large": lambda rng, n: np.array([20] + [1] * (n - 1)),
}
"""How many items each of n sources has."""


def random_counts(seed: int, n: int, kind: str, sizes: str) -> np.ndarray:
    """What heads of several habits hit of n sources with several items each, which share some targets."""
    rng = np.random.default_rng(seed)
    items = SIZES[sizes](rng, n)
    source = np.repeat(np.arange(n), items)
    if kind == "other sources' targets":
        return (rng.random((n, n)) < 1.5 / n) * items
    n_targets = max(3, len(source) // 2)
    target = rng.integers(0, n_targets, len(source))
    likely = {
        "sparse": np.full((n, n_targets), 0.15),
        "dense": np.full((n, n_targets), 0.5),
        "popular targets": np.broadcast_to(np.minimum(0.8, 2 / np.arange(1, n_targets + 1)), (n, n_targets)),
        "busy sources": np.broadcast_to(np.minimum(0.8, 2 / np.arange(1, n + 1))[:, None], (n, n_targets)),
    }[kind]
    written = rng.random((n, n_targets)) < likely
    return np.stack([np.bincount(source, weights=row[target], minlength=n) for row in written]).astype(int)


COUNT_KINDS = ("other sources' targets", "sparse", "dense", "popular targets", "busy sources")
of_every_size = pytest.mark.parametrize("sizes", SIZES)


def exact_tail(hits: np.ndarray) -> np.ndarray:
    """P(S >= s) for all s, by adding one source at a time to every set of used targets."""
    n, most = len(hits), int(hits.max(1).sum())
    ways = np.zeros((1 << n, most + 1))
    ways[0, 0] = 1
    sizes = np.array([bin(used).count("1") for used in range(1 << n)])
    for source in range(n):
        further = np.zeros_like(ways)
        for target in range(n):
            before = np.flatnonzero((sizes == source) & (np.arange(1 << n) >> target & 1 == 0))
            hit = int(hits[source, target])
            further[before | 1 << target, hit:] += ways[before, : most + 1 - hit]
        ways = further
    return np.cumsum(ways[-1][::-1])[::-1] / math.factorial(n)


def moments_of(hits: np.ndarray) -> np.ndarray:
    return permutation_moments(torch.tensor(hits)[None])[0].numpy()


def p_values(counts: int | np.ndarray, hits: np.ndarray) -> np.ndarray:
    return permutation_p_values(np.asarray(counts, float), np.broadcast_to(moments_of(hits), (*np.shape(counts), 4)))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(3, 6), st.sampled_from(KINDS))
def test_the_moments_are_those_of_all_permutations(seed, n, kind):
    hits = random_hits(seed, n, kind)
    counts = [sum(hits[i, p[i]] for i in range(n)) for p in itertools.permutations(range(n))]
    expected = [np.mean(counts), np.var(counts), np.mean((counts - np.mean(counts)) ** 3), 1]
    np.testing.assert_allclose(moments_of(hits), expected, atol=1e-10)


@of_every_size
@pytest.mark.parametrize("kind", COUNT_KINDS)
def test_the_moments_are_those_of_all_orders_of_sources_with_several_items(kind, sizes):
    for n in range(3, 7):
        hits = random_counts(int(chance.rng().integers(10**6)), n, kind, sizes)
        counts = [sum(hits[i, p[i]] for i in range(n)) for p in itertools.permutations(range(n))]
        expected = [np.mean(counts), np.var(counts), np.mean((counts - np.mean(counts)) ** 3)]
        np.testing.assert_allclose(moments_of(hits)[:3], expected, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_p_values_are_not_too_small_and_not_much_too_large(kind):
    for seed in range(6):
        hits = random_hits(seed, 11, kind)
        exact = exact_tail(hits)
        law = p_values(np.arange(len(exact)), hits)
        near = (exact > 1e-4) & (exact < 0.15)
        assert (law[near] >= 0.6 * exact[near]).all()
        assert (law[near] <= 25 * exact[near]).all()
        assert (law[(exact > 0) & (exact < 1e-4)] < 2e-3).all()


@of_every_size
@pytest.mark.parametrize("kind", COUNT_KINDS)
def test_p_values_of_sources_with_several_items_are_not_too_small(kind, sizes):
    for seed in range(6):
        hits = random_counts(seed, 9, kind, sizes)
        exact = exact_tail(hits)
        law = p_values(np.arange(len(exact)), hits)
        near = (exact > 1e-4) & (exact < 0.15)
        assert (law[near] >= 0.6 * exact[near]).all()
        if sizes in ("equal", "a few"):  # else a large source fits few places, which the law does not know
            assert (law[near] <= 25 * exact[near]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_without_the_relation_are_called_at_most_as_often_as_the_level_says(kind):
    rng = chance.rng()
    n, draws = 40, 4000
    hits = random_hits(int(rng.integers(10**6)), n, kind)
    targets = rng.permuted(np.broadcast_to(np.arange(n), (draws, n)), axis=1)
    assert_no_more_often_than_the_level_says(p_values(hits[np.arange(n), targets].sum(1), hits))


@of_every_size
@pytest.mark.parametrize("kind", COUNT_KINDS)
def test_so_are_heads_whose_sources_have_several_items_each(kind, sizes):
    rng = chance.rng()
    for n in (8, 16, 36):
        hits = random_counts(int(rng.integers(10**6)), n, kind, sizes)
        targets = rng.permuted(np.broadcast_to(np.arange(n), (2000, n)), axis=1)
        assert_no_more_often_than_the_level_says(p_values(hits[np.arange(n), targets].sum(1), hits))


def assert_no_more_often_than_the_level_says(p: np.ndarray) -> None:
    for level in (0.1, 0.01, 0.001):
        true_share_above_twice_the_level = stats.binomtest(int((p <= level).sum()), len(p), 2 * level, "greater")
        assert true_share_above_twice_the_level.pvalue > 1e-4


def test_a_head_that_writes_the_same_targets_for_every_source_has_p_of_one():
    rng = chance.rng()
    for n in (30, 77, 400):
        hits = np.broadcast_to(rng.random(n) < 0.4, (n, n)).copy()
        assert moments_of(hits)[1] == 0
        assert p_values(hits.trace(), hits) == 1


def test_a_head_that_hits_everything_or_nothing_has_p_of_one():
    for hits in (np.ones((30, 30), bool), np.zeros((30, 30), bool)):
        assert p_values(hits.trace(), hits) == 1


def test_a_few_right_pairs_where_almost_nothing_is_expected_are_found():
    hits = np.zeros((40, 40), bool)
    hits[range(6), range(6)] = True
    p = p_values(6, hits)
    exact = math.factorial(34) / math.factorial(40)
    assert exact < p < 100 * exact


def test_right_pairs_on_top_of_favourite_targets_are_found():
    hits = np.zeros((40, 40), bool)
    hits[:, :16] = True
    hits[range(16, 26), range(16, 26)] = True
    p = p_values(hits.trace(), hits)
    assert p < 1e-9


def test_p_values_fall_as_hits_rise_and_stay_between_zero_and_one():
    for seed, kind in enumerate(KINDS):
        p = p_values(np.arange(61), random_hits(seed, 60, kind))
        assert ((p >= 0) & (p <= 1)).all()
        assert (np.diff(p) <= 1e-6).all()


def test_one_p_of_several_is_fishers():
    p = [0.01, 0.4, 0.7]
    assert combined_p(p) == pytest.approx(stats.chi2.sf(-2 * np.log(p).sum(), 6))


def test_q_values_are_benjamini_and_hochbergs_and_leave_out_what_is_unknown():
    p = np.array([0.03, np.nan, 0.001, 0.2])
    np.testing.assert_allclose(q_values(p), [0.045, np.nan, 0.003, 0.2])
    assert np.isnan(q_values(np.array([np.nan]))).all()


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_is_wilsons(counts):
    hits, pairs = counts
    ours = wilson_interval(np.array(float(hits)), np.array(float(pairs)))
    theirs = stats.binomtest(hits, pairs).proportion_ci(method="wilson")
    np.testing.assert_allclose(ours, (theirs.low, theirs.high), atol=1e-12)


def test_the_sign_flip_test_counts_all_sign_patterns():
    effects = torch.randn(7, dtype=torch.float64).numpy() + 0.5
    signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 7).numpy()
    expected = (abs(signs @ effects) >= abs(effects.sum()) - 1e-12).mean()
    assert sign_flip_p(effects, 0) == pytest.approx(expected)
    assert sign_flip_p(effects[:1], 0) != sign_flip_p(effects[:1], 0)


def test_p_values_of_effects_without_sign_are_spread_evenly():
    draws = torch.randn(300, 20, dtype=torch.float64).numpy()
    p_values = torch.tensor([sign_flip_p(effects, 0) for effects in draws[:100]])
    assert 0.35 < float(p_values.mean()) < 0.65


@pytest.mark.oracle
def test_random_signs_give_nearly_the_share_of_all_sign_patterns():
    effects = torch.randn(14, dtype=torch.float64).numpy() + 0.4
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=14)))
    expected = (abs(signs @ effects) >= abs(effects.sum()) - 1e-12).mean()
    assert sign_flip_p(effects, 0) == pytest.approx(expected, abs=4 * math.sqrt(expected / 10_000) + 2e-4)
