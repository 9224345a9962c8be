"""Do the scores of a depth graph differ by depth, and would they without memorization? Comparisons and controls.

Differences are deeper minus shallower, of scores whose sign is "higher = more likely seen": negative where deeper
questions are less likely seen. Intervals are from a bootstrap over graphs.

    all nodes        each depth's mean over graphs of the graph's average
    same length      nodes of both depths with equally many scored tokens (from 21 tokens on, within 10 %): the mean
                     difference over lengths, weighted by the smaller number of nodes. Min-K% depends on the number of
                     tokens, and depth on length
    shuffled         the same with the words of question and answer in another order: no memory of a wording is left
    minus shuffled   each node's score less its score when shuffled

Beside the quartile groups of the published figure are rank correlations: of a score with the gap (s - P) / 4, with
the judge's score, and with how often the training data tell the fact, where the graph knows it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped
from numpy import ndarray

from headwater.stats.correlation import spearman
from headwater.stats.resample import NOTHING, Bootstrap, Interval, interval

LENGTHS_APART = 20
SHUFFLED = "_shuffled"
POPULARITY = "popularity"


def comparisons(nodes: pd.DataFrame, scores: Sequence[str], main: str, graphs: Bootstrap) -> pd.DataFrame:
    """Compare depths, quartile groups and ranks.

    Args:
        nodes: `group, depth, scored, score, gap, quartile`, a column per score, and what is there of the shuffled score
            and of `popularity`.
        scores: the columns of scores.
        main: the score of the figure, one of them.
        graphs: draws of the nodes, by graph.

    Returns:
        A row per comparison: `measure` ("depth", "gap", "spearman with gap", "... score", "... popularity"), `score`,
        `control`, `depths` ("1-2", or "3"), `value, low, high`.
    """
    rows = []
    depth = nodes["depth"].to_numpy()
    present = sorted(set(depth.tolist()))
    pairs = [*itertools.pairwise(present), *([(present[0], present[-1])] if len(present) > 2 else [])]

    def add(measure: str, score: str, control: str, depths: str, found: Interval) -> None:
        rows.append({"measure": measure, "score": score, "control": control, "depths": depths} | found._asdict())

    for a, b in pairs:
        name = f"{a}-{b}"
        for score in scores:
            values = nodes[score].to_numpy(float)
            add("depth", score, "all nodes", name, between_depths(values, depth, a, b, graphs))
            same = between_equal_lengths(values, depth, nodes["scored"].to_numpy(), a, b, graphs)
            add("depth", score, "same length", name, same)
        if main + SHUFFLED in nodes:
            values, shuffled = nodes[main].to_numpy(float), nodes[main + SHUFFLED].to_numpy(float)
            add("depth", main, "shuffled", name, between_depths(shuffled, depth, a, b, graphs))
            add("depth", main, "minus shuffled", name, between_depths(values - shuffled, depth, a, b, graphs))
    gap, at_top = nodes["gap"].to_numpy(float), depth == present[-1]
    for quartile in (25, 75):
        here = np.where(at_top & (nodes["quartile"] == quartile).to_numpy(), gap, math.nan)
        add("gap", main, f"quartile {quartile}", str(present[-1]), interval(graphs.mean(here)))
    add("gap", main, "quartile 75 - 25", str(present[-1]), _between_quartiles(nodes, gap, at_top, graphs))
    for score in scores:
        values = nodes[score].to_numpy(float)
        found = rank_correlation(np.where(at_top, values, math.nan), gap, graphs)
        add("spearman with gap", score, "all nodes", str(present[-1]), found)
        for name in ("score", POPULARITY):
            if name not in nodes:
                continue
            for one in present:
                other = np.where(depth == one, nodes[name].to_numpy(float), math.nan)
                add(f"spearman with {name}", score, "all nodes", str(one), rank_correlation(values, other, graphs))
    return pd.DataFrame(rows)


def between_depths(
    values: Float[ndarray, " node"], depth: Int[ndarray, " node"], a: int, b: int, graphs: Bootstrap
) -> Interval:
    """Return the difference of two depths' means over graphs, each graph's nodes averaged first."""
    averages = []
    for one in (a, b):
        here = (depth == one) & ~np.isnan(values)
        count = graphs.sums(here.astype(float))
        # Nodes are averaged within a graph first: graphs of many nodes would weigh more.
        average = graphs.sums(np.where(here, values, 0.0)) / np.maximum(count, 1)
        averages.append(graphs.ratio_of_units(average, (count > 0).astype(float)))
    return interval(averages[1] - averages[0])


def between_equal_lengths(
    values: Float[ndarray, " node"],
    depth: Int[ndarray, " node"],
    tokens: Int[ndarray, " node"],
    a: int,
    b: int,
    graphs: Bootstrap,
) -> Interval:
    """Return the difference of two depths' means within lengths, weighted by the smaller number of nodes."""
    has = ~np.isnan(values)
    lengths = _lengths(tokens)
    shared = np.intersect1d(lengths[(depth == a) & has], lengths[(depth == b) & has])
    if not len(shared):
        return NOTHING
    sums, counts = [], []
    for one in (a, b):
        cells = [(depth == one) & has & (lengths == length) for length in shared]
        sums.append(np.stack([graphs.sums(np.where(cell, values, 0.0)) for cell in cells], axis=1))
        counts.append(np.stack([graphs.sums(cell.astype(float)) for cell in cells], axis=1))

    (count_a, count_b), (sum_a, sum_b) = ([graphs.counts @ part for part in parts] for parts in (counts, sums))
    # The smaller count: a length that one depth hardly has would be mostly the other's noise.
    weight = np.minimum(count_a, count_b)
    apart = sum_b / np.maximum(count_b, 1) - sum_a / np.maximum(count_a, 1)
    total = weight.sum(axis=1)
    return interval(np.where(total > 0, (weight * apart).sum(axis=1) / np.maximum(total, 1), math.nan))


def rank_correlation(x: Float[ndarray, " node"], y: Float[ndarray, " node"], graphs: Bootstrap) -> Interval:
    """Return the rank correlation over the nodes that have both values."""
    return interval(spearman(x, y, counts=graphs.per_example()))


def _lengths(tokens: Int[ndarray, " node"]) -> Int[ndarray, " node"]:
    """Number lengths so that those which count as equal share a number."""
    long = LENGTHS_APART + np.log(np.maximum(tokens, LENGTHS_APART + 1) / LENGTHS_APART) / math.log(1.1)
    return np.where(tokens <= LENGTHS_APART, tokens, np.ceil(long)).astype(np.int64)


def _between_quartiles(
    nodes: pd.DataFrame, gap: Float[ndarray, " node"], at_top: Shaped[ndarray, " node"], graphs: Bootstrap
) -> Interval:
    quartile = nodes["quartile"].to_numpy()
    lower, upper = (graphs.mean(np.where(at_top & (quartile == one), gap, math.nan)) for one in (25, 75))
    return interval(upper - lower)
