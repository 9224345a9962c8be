"""Bootstrap over graphs: nodes of one graph are drawn together, because they are not independent.

Everything measured here is a mean, or a ratio of two sums over nodes: the sums are formed per graph once, and a draw
only weights graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy import ndarray
from scipy.stats import rankdata

LEVEL = 0.95


class Interval(NamedTuple):
    """A value with the ends of its 95 % percentile interval."""

    value: float
    low: float
    high: float


NOTHING = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Graphs:
    """The graph that each node belongs to, and how often each graph comes in each draw."""

    of_node: Int[ndarray, " node"]
    draws: Int[ndarray, "draw graph"]

    @classmethod
    def of(cls, groups: Iterable[str], draws: int, seed: int) -> Graphs:
        """Number the graphs, and draw as many of them as there are, again and again; of one graph, never."""
        _, of_node = np.unique(np.array(list(groups), dtype=str), return_inverse=True)
        count = int(of_node.max()) + 1
        rng = np.random.default_rng(seed)
        return cls(of_node, rng.multinomial(count, np.full(count, 1 / count), size=draws if count > 1 else 0))

    def sums(self, values: Float[ndarray, " node"]) -> Float[ndarray, " graph"]:
        """Add up the values of each graph's nodes."""
        return np.bincount(self.of_node, weights=values, minlength=self.draws.shape[1])

    def mean(self, values: Shaped[ndarray, " node"]) -> Interval:
        """Return the mean over the nodes that have a value."""
        has = ~np.isnan(values)
        return self.ratio(np.where(has, values, 0.0), has.astype(float))

    def ratio(self, top: Float[ndarray, " node"], bottom: Float[ndarray, " node"]) -> Interval:
        """Return sum(top) / sum(bottom)."""
        return interval(*self.drawn(self.sums(top), self.sums(bottom)))

    def drawn(
        self, top: Float[ndarray, " graph"], bottom: Float[ndarray, " graph"]
    ) -> tuple[float, Float[ndarray, " draw"]]:
        """Return sum(top) / sum(bottom) over the graphs, and over each draw of them; NaN where bottom is 0."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(top.sum() / bottom.sum()), (self.draws @ top) / (self.draws @ bottom)

    def spearman(self, x: Float[ndarray, " node"], y: Float[ndarray, " node"]) -> Interval:
        """Return the rank correlation over the nodes that have both values; a draw repeats nodes, not ranks."""
        has = ~np.isnan(x) & ~np.isnan(y)
        if has.sum() < 3 or np.ptp(x[has]) == 0 or np.ptp(y[has]) == 0:
            return NOTHING
        a, b = rankdata(x[has]), rankdata(y[has])
        weights = self.draws[:, self.of_node[has]].astype(float)
        drawn = _weighted_correlation(a, b, weights)
        return interval(float(_weighted_correlation(a, b, np.ones((1, len(a))))[0]), drawn)


def interval(value: float, drawn: Float[ndarray, " draw"]) -> Interval:
    """Put a value and the percentiles of its draws together; draws without a value do not count."""
    drawn = drawn[~np.isnan(drawn)]
    if not len(drawn):
        return Interval(float(value), math.nan, math.nan)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(value), float(low), float(high))


def _weighted_correlation(
    a: Float[ndarray, " node"], b: Float[ndarray, " node"], weights: Float[ndarray, "draw node"]
) -> Float[ndarray, " draw"]:
    total = weights.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_a, mean_b = weights @ a / total, weights @ b / total
        covariance = weights @ (a * b) / total - mean_a * mean_b
        variance_a = weights @ (a * a) / total - mean_a**2
        variance_b = weights @ (b * b) / total - mean_b**2
        varies = (variance_a > 1e-9) & (variance_b > 1e-9)
        return np.where(varies, covariance / np.sqrt(np.where(varies, variance_a * variance_b, 1.0)), math.nan)
