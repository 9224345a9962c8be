"""Comparisons between depths: effects that were planted are found, and the controls take away what is not memory."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from headwater.likelihood.report import between_depths, between_equal_lengths, comparisons, rank_correlation
from headwater.stats.resample import Bootstrap
from tests import chance


@pytest.fixture
def rng():
    return chance.rng()


def planted(rng, effect=0.0, of_length=0.0, graphs=80, spread=1.0):
    """Graphs of six nodes whose score falls by `effect` per depth and by `of_length` per token; depth adds tokens."""
    depth = np.tile([1, 1, 1, 2, 2, 3], graphs)
    group = np.repeat(np.arange(graphs), 6)
    tokens = rng.integers(3, 9, len(depth)) + 2 * depth
    values = (
        -effect * depth - of_length * tokens + spread * rng.normal(size=len(depth)) + rng.normal(size=graphs)[group]
    )
    return values, depth, tokens, Bootstrap.of(group.astype(str), draws=400, seed=int(rng.integers(10**6)))


def test_a_difference_between_depths_is_the_mean_over_graphs_of_their_averages(rng):
    values, depth, _, graphs = planted(rng)
    table = pd.DataFrame({"value": values, "depth": depth, "group": graphs.of_example})
    means = table.groupby(["group", "depth"])["value"].mean().groupby("depth").mean()
    found = between_depths(values, depth, 1, 3, graphs)
    assert found.value == pytest.approx(means[3] - means[1])
    assert found.low < found.value < found.high


def test_a_planted_difference_is_found_and_none_is_not(rng):
    values, depth, tokens, graphs = planted(rng, effect=1.0, graphs=320)
    assert between_depths(values, depth, 1, 2, graphs).high < -0.5
    assert between_equal_lengths(values, depth, tokens, 1, 2, graphs).high < -0.4
    wrong = 0
    for _ in range(40):
        values, depth, tokens, graphs = planted(rng, graphs=40)
        found = between_depths(values, depth, 1, 2, graphs)
        wrong += not found.low <= 0 <= found.high
    assert wrong <= 9  # 5 % are expected; 9 of 40 or more come by chance once in 10,000


def test_what_only_length_does_is_gone_among_equal_lengths(rng):
    values, depth, tokens, graphs = planted(rng, of_length=1.0, spread=0.2, graphs=320)
    assert between_depths(values, depth, 1, 3, graphs).high < -3
    same = between_equal_lengths(values, depth, tokens, 1, 3, graphs)
    assert abs(same.value) < 1
    assert same.low <= same.value <= same.high


def test_equal_lengths_are_weighted_by_the_smaller_number_of_nodes():
    depth = np.array([1, 1, 1, 2, 2, 2])
    tokens = np.array([4, 4, 5, 4, 5, 5])
    values = np.array([0.0, 2.0, 5.0, 3.0, 8.0, 10.0])
    graphs = Bootstrap.of("abcdef", draws=50)
    assert between_equal_lengths(values, depth, tokens, 1, 2, graphs).value == (1 * 2.0 + 1 * 4.0) / 2
    assert math.isnan(between_equal_lengths(values, depth, tokens + 3 * depth, 1, 2, graphs).value)


def test_rank_correlations_are_scipys_and_their_intervals_widen_with_fewer_graphs(rng):
    values, _, _, graphs = planted(rng)
    other = np.where(rng.random(len(values)) < 0.1, np.nan, values + rng.integers(0, 3, len(values)))
    has = ~np.isnan(other)
    found = rank_correlation(values, other, graphs)
    assert found.value == pytest.approx(spearmanr(values[has], other[has]).statistic)
    few = rank_correlation(values, other, Bootstrap.of((graphs.of_example // 16).astype(str), draws=400))
    assert few.value == found.value
    assert few.high - few.low > 0
    assert math.isnan(rank_correlation(values, np.ones_like(values), graphs).value)


def test_the_table_names_every_comparison_once_and_compares_quartiles(rng):
    values, depth, tokens, graphs = planted(rng, effect=0.5)
    gap = np.where(depth == 3, 0.2 * values, np.nan)
    at_top = pd.Series(-values).where(depth == 3)
    quartile = np.select([at_top <= at_top.quantile(0.25), at_top >= at_top.quantile(0.75)], [25, 75], 0)
    nodes = pd.DataFrame({"depth": depth, "scored": tokens, "score": rng.integers(1, 6, len(depth)), "gap": gap})
    nodes = nodes.assign(quartile=quartile, popularity=values + 0.1, **{"min_k_0.2": values, "loss": values / 2})
    found = comparisons(nodes, ["min_k_0.2", "loss"], "min_k_0.2", graphs)
    assert not found.duplicated(["measure", "score", "control", "depths"]).any()
    assert (found["control"] == "shuffled").sum() == 0
    by_name = found.set_index(["measure", "control", "depths"])["value"]
    expected = gap[quartile == 75].mean() - gap[quartile == 25].mean()
    assert by_name["gap", "quartile 75 - 25", "3"].item() == pytest.approx(expected)
    assert by_name["spearman with popularity", "all nodes", "1"].tolist() == pytest.approx([1, 1])
    nodes["min_k_0.2_shuffled"] = values
    controls = comparisons(nodes, ["min_k_0.2"], "min_k_0.2", graphs)
    assert controls.loc[controls["control"] == "minus shuffled", "value"].abs().max() < 1e-12
