"""Modes, intervals and the dip: against definitions, linear programs and scikit-learn; one population is one mode."""

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import linprog
from scipy.special import expit
from sklearn.metrics import roc_auc_score

from headwater.pathways.bootstrap import FEWEST, member_means, resampled_questions, resamples, weighted_auc
from headwater.pathways.controls import aware_logits, compare, logit_baseline, relation_logits
from headwater.pathways.dip import critical_dip, dip
from headwater.pathways.modes import CROSSED, PER_LAYER, components, curves, effects, splits_of
from tests import chance


def random_logits(n_seeds=2, n_layers=3, n=80):
    rng = chance.rng()
    before = rng.normal(size=(n_seeds, n_layers, n))
    return before, before + rng.normal(-0.2, 1.0, before.shape)


def test_effects_are_measured_on_the_original_prediction_row_by_row():
    before, after = random_logits()
    after[0, 1, 5] = np.nan
    found = effects(before, after)
    for place in np.ndindex(before.shape):
        if not np.isfinite(after[place]):
            assert not found.applies[place]
            assert not found.flipped[place]
            continue
        said_wrong = before[place] > 0
        p, q = (expit(logit) if said_wrong else 1 - expit(logit) for logit in (before[place], after[place]))
        assert found.delta_p[place] == pytest.approx(100 * (q - p))
        assert found.probability[place] == pytest.approx(p)
        assert p >= 0.5
        assert found.flipped[place] == (q < 0.5)
        assert np.sign(found.delta_logit[place]) == np.sign(q - p)


@pytest.mark.oracle
def test_curves_average_over_the_examples_and_seeds_of_a_mode():
    before, after = random_logits()
    found, best = effects(before, after), np.full((2, 80), 1)
    table = curves(found, splits_of(found, best, False), resamples(80)).set_index(["split_by", "mode", "layer"])
    for layer in range(3):
        own = found.delta_p[:, layer][found.flipped[:, layer]]
        assert table.loc[(PER_LAYER, "Q-anchored", layer), "delta_p"] == pytest.approx(own.mean())
        other = found.delta_p[:, layer][~found.flipped[::-1, 1]]
        row = table.loc[(CROSSED, "A-anchored", layer)]
        assert row["delta_p"] == pytest.approx(other.mean())
        assert row["delta_p_low"] < row["delta_p"] < row["delta_p_high"]


def test_a_mode_with_few_examples_has_a_mean_and_no_band():
    before, after = random_logits(n_seeds=1, n=FEWEST + 2)
    member = np.zeros((1, FEWEST + 2, 3), dtype=bool)
    member[:, : FEWEST - 1] = True
    values = np.swapaxes(after - before, 1, 2)
    mean, low, high, examples = member_means(resamples(FEWEST + 2), values, member)
    assert np.isfinite(mean).all()
    assert np.isnan(low).all()
    assert np.isnan(high).all()
    assert (examples == FEWEST - 1).all()


@pytest.mark.oracle
def test_aucs_of_resamples_are_those_of_scikit_learn_with_weights():
    rng = chance.rng()
    z, scores, counts = rng.integers(0, 2, 60), rng.normal(size=60).round(1), resamples(60, draws=20)
    found = weighted_auc(counts, z, scores)
    expected = [roc_auc_score(z, scores, sample_weight=row) for row in counts]
    np.testing.assert_allclose(found, expected)


def test_answers_to_one_question_are_drawn_together():
    rng = chance.rng()
    questions = rng.integers(0, 12, 40).astype(str)
    counts = resampled_questions(questions, draws=30)
    for name in np.unique(questions):
        own = counts[:, questions == name]
        assert (own == own[:, :1]).all()
    firsts = counts[:, np.unique(questions, return_index=True)[1]]
    assert (firsts.sum(1) == len(np.unique(questions))).all()
    assert (counts[0] == 1).all()
    assert (counts[1:] != 1).any()


def test_an_interval_of_a_mean_covers_it_about_as_often_as_it_says():
    rng = chance.rng()
    hits = 0
    for _ in range(200):
        values = rng.normal(1.0, 2.0, (1, 60, 1))
        _, low, high, _ = member_means(resamples(60, 300), values, np.ones_like(values, dtype=bool))
        hits += low[0] < 1.0 < high[0]
    assert 0.86 < hits / 200 <= 1.0


def test_a_population_with_one_mode_is_reported_as_one_though_the_published_split_shows_two():
    rng = chance.rng()
    before = rng.normal(0, 1.5, (1, 1, 1500))
    found = effects(before, before * 0.8 + rng.normal(0, 1.0, before.shape))
    table = curves(found, splits_of(found, np.zeros((1, 1500), dtype=np.int64), False), resamples(1500, 200))
    published = table[table["split_by"] == PER_LAYER].set_index("mode")
    assert published.loc["Q-anchored", "delta_p_high"] < -25
    assert published.loc["A-anchored", "delta_p_low"] > -8
    assert components(found.delta_logit.ravel())["verdict"].startswith("one mode")


@pytest.mark.parametrize("population", ["normal", "laplace", "exponential", "lognormal", "standard_t"])
@pytest.mark.parametrize("n", [60, 600])
def test_skewed_and_heavy_tailed_populations_are_one_mode(population, n):
    rng = chance.rng()
    draw = getattr(rng, population)
    arguments = {"df": 3} if population == "standard_t" else {}
    verdicts = [components(draw(size=n, **arguments))["verdict"] for _ in range(3)]
    assert sum(verdict == "two modes" for verdict in verdicts) <= 1


def test_two_populations_apart_are_two_modes_with_their_means():
    rng = chance.rng()
    both = np.concatenate([rng.normal(-3, 0.6, 150), rng.normal(0, 0.2, 250)])
    found = components(both)
    assert found["verdict"] == "two modes"
    assert found["low_mean"] == pytest.approx(-3, abs=0.3)
    assert found["high_mean"] == pytest.approx(0, abs=0.1)
    assert found["low_weight"] == pytest.approx(0.375, abs=0.05)
    assert found["bic_two"] < found["bic_one"]


def test_equal_and_few_numbers_have_a_verdict():
    assert components(np.full(80, -2.0))["verdict"] == "one mode"
    assert components(np.arange(12.0))["verdict"] == "too few examples"
    assert components(np.r_[np.full(40, 1.0), np.full(40, 1.02)])["verdict"] == "one mode"


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


def test_the_relation_baseline_knows_how_often_each_relation_was_wrong_in_the_other_half_only():
    relations = np.array(["a", "a", "b", "b"] * 20, dtype=object)
    z = np.array([1, 1, 0, 0] * 20)
    half = np.arange(80)[None] % 2
    found = relation_logits(relations, z, half)[0]
    np.testing.assert_allclose(found[relations == "a"], np.log(21))
    np.testing.assert_allclose(found[relations == "b"], -np.log(21))
    relations[:] = [f"only {i}" for i in range(80)]
    assert np.ptp(relation_logits(relations, z, half)) < 1e-9


def test_a_probe_of_the_mode_is_fitted_on_the_other_half_and_left_out_with_few_of_a_mode():
    import torch

    rng = chance.rng()
    half, best = np.arange(200)[None] % 2, np.ones((1, 200), dtype=np.int64)
    states = torch.from_numpy(rng.normal(size=(2, 200, 5))).float()
    flips = rng.random((1, 200)) < 0.4
    states[1, :, 2] += 5 * torch.from_numpy(flips[0]).float()
    counts = resamples(200, 100)
    table = compare(
        counts, flips, half, {"state": aware_logits(states, flips, half, best), "none": np.zeros((1, 200))}, "q"
    )
    values = table.set_index("score")
    assert values.loc["state", "value"] > 0.95
    assert values.loc["none", "value"] == 0.5
    assert values.loc["state − none", "low"] > 0.3
    assert np.isnan(aware_logits(states, np.arange(200)[None] < 9, half, best)).all()


def test_a_mode_that_is_the_prediction_is_known_from_the_logit_and_not_from_its_size():
    rng = chance.rng()
    logits, half = rng.normal(size=(1, 300)), np.arange(300)[None] % 2
    flips = logits > 0
    scores = {"both": logit_baseline(logits, flips, half), "margin": -np.abs(logits)}
    values = compare(resamples(300, 100), flips, half, scores, "q").set_index("score")["value"]
    assert values["both"] > 0.98
    assert abs(values["margin"] - 0.5) < 0.15


def test_tables_hold_plain_numbers():
    before, after = random_logits()
    found = effects(before, after)
    table = curves(found, splits_of(found, np.zeros((2, 80), dtype=np.int64), False), resamples(80, 50))
    assert isinstance(table, pd.DataFrame)
    assert table["share"].between(0, 1).all()
    assert table.groupby(["split_by", "layer"])["share"].sum().round(9).eq(1).all()
