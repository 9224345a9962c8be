"""The bootstrap: units are drawn with replacement, each with all of its examples.

Dependent examples are drawn together: all answers, layers and seeds of a question; all nodes of a graph.

1. A draw is a row of counts: how often each unit is drawn. As many are drawn as there are units, in each stratum as
   many as it has. The first row is all ones: the data themselves.
2. A statistic is computed for all draws at once, with the data first. Means and ratios are one matrix product of counts
   and sums by unit; statistics that take counts of examples (`discrimination.auc`) receive those.
3. `interval` combines the statistic of the data with the percentiles over the draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int, Shaped
from numpy import ndarray

from headwater.errors import InputError

DRAWS = 1000
LEVEL = 0.95
"""Every interval contains this fraction of the draws."""
AT_ONCE = 50
"""Draws passed at a time to a statistic of many examples."""
NOTHING_LEFT = 1e-9
"""A divisor closer to 0 than this is rounding: the ratio is undefined."""


class Interval(NamedTuple):
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float

    def named(self, name: str) -> dict[str, float]:
        """Return the three numbers by the names of their columns: `name`, `name_low`, `name_high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


NOTHING = Interval(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Bootstrap:
    """The unit of each example, and how often each unit is drawn in each draw."""

    of_example: Int[ndarray, " example"]
    """The index of each example's unit."""
    stratum: Int[ndarray, " unit"]
    """By unit: its stratum; units are drawn within their stratum."""
    draws: int
    seed: int

    @classmethod
    def of(
        cls, units: Iterable[Hashable], *, draws: int = DRAWS, seed: int = 0, within: Iterable[Hashable] | None = None
    ) -> Bootstrap:
        """Number the units (one per example, such as its question) in the order of their first example.

        `within` is the stratum of each example, in which its unit is drawn; default: one stratum. If no stratum has two
        units there are no draws, since each would equal the data.
        """
        of_example, names = _numbered(units)
        stratum = np.zeros(len(names), dtype=np.int64)
        if within is not None:
            of_stratum, _ = _numbered(within)
            stratum[of_example] = of_stratum
            torn = np.flatnonzero(stratum[of_example] != of_stratum)
            if len(torn):
                raise InputError(f"The unit of example {torn[0]} has examples in two strata; give it one.")
        return cls(of_example, stratum, draws if len(np.unique(stratum)) < len(names) else 0, seed)

    def blocks(self, size: int = AT_ONCE) -> Iterator[Float[ndarray, "draw unit"]]:
        """Yield the counts of the data, then of some draws at a time: the same draws whatever the size."""
        yield np.ones((1, len(self.stratum)))
        order = np.argsort(self.stratum, kind="stable")
        sizes, n_units = np.bincount(self.stratum)[self.stratum[order]], len(order)
        begins = np.searchsorted(self.stratum[order], self.stratum[order])
        rng = np.random.default_rng(self.seed)
        for start in range(0, self.draws, size):
            rows = np.arange(min(size, self.draws - start))
            drawn = order[begins + rng.integers(sizes, size=(len(rows), n_units))]
            places = (drawn + n_units * rows[:, None]).ravel()
            yield np.bincount(places, minlength=n_units * len(rows)).reshape(len(rows), n_units).astype(float)

    @cached_property
    def counts(self) -> Float[ndarray, "draw unit"]:
        """How often each unit is drawn in each draw; the first row is the data."""
        return np.concatenate(list(self.blocks()))

    def per_example(self, examples: Shaped[ndarray, " _"] | None = None) -> Float[ndarray, "draw example"]:
        """Return how often each example is drawn in each draw: all examples, or those chosen (a mask or indices)."""
        return np.take(self.counts, self.of_example if examples is None else self.of_example[examples], axis=1)

    def apply(
        self, statistic: Callable[[Float[ndarray, "draw example"]], Float[ndarray, " draw *column"]]
    ) -> Float[ndarray, " draw *column"]:
        """Return a statistic of every draw, computed from the counts of examples for some draws at a time."""
        return np.concatenate([statistic(np.take(counts, self.of_example, axis=1)) for counts in self.blocks()])

    def sums(self, values: Shaped[ndarray, " example *column"]) -> Float[ndarray, " unit *column"]:
        """Sum the values of each unit's examples."""
        found = np.zeros((len(self.stratum), *values.shape[1:]))
        np.add.at(found, self.of_example, values)
        return found

    def mean(self, values: Shaped[ndarray, " example *column"]) -> Float[ndarray, " draw *column"]:
        """Return the mean over the examples that have a value, in every draw; NaN if none has."""
        has = ~np.isnan(values)
        return self.ratio(np.where(has, values, 0.0), has)

    def ratio(
        self, top: Shaped[ndarray, " example *column"], bottom: Shaped[ndarray, " example *column"]
    ) -> Float[ndarray, " draw *column"]:
        """Return sum(top) / sum(bottom) over the examples of every draw; NaN if the divisor is 0."""
        return self.ratio_of_units(self.sums(top), self.sums(bottom))

    def ratio_of_units(
        self, top: Float[ndarray, " unit *column"], bottom: Float[ndarray, " unit *column"]
    ) -> Float[ndarray, " draw *column"]:
        """Return sum(top) / sum(bottom) in every draw for values given per unit."""
        tops, bottoms = self.counts @ top, self.counts @ bottom
        shares = tops / np.where(np.abs(bottoms) > NOTHING_LEFT, bottoms, np.nan)
        return shares + 0.0  # turns -0 into 0

    def difference_within(
        self,
        strata: Int[ndarray, " example"],
        values: Float[ndarray, " example"],
        first: Bool[ndarray, " example"],
        second: Bool[ndarray, " example"],
    ) -> Float[ndarray, " draw"]:
        """Return the mean value of the second group minus that of the first within strata, in every draw.

        Strata are weighted by the smaller number of examples; NaN if none has both groups.
        """
        shared = np.intersect1d(strata[first], strata[second])
        sums, counts = [], []
        for group in (first, second):
            cells = group[:, None] & (strata[:, None] == shared)
            sums.append(self.counts @ self.sums(np.where(cells, values[:, None], 0.0)))
            counts.append(self.counts @ self.sums(cells.astype(float)))
        # The smaller count: in a stratum with few examples of one group the difference is mostly that group's noise.
        weight = np.minimum(*counts)
        apart = sums[1] / np.maximum(counts[1], 1) - sums[0] / np.maximum(counts[0], 1)
        total = weight.sum(axis=1)
        return np.where(total > 0, (weight * apart).sum(axis=1) / np.maximum(total, 1), math.nan)


def percentile_interval(
    estimates: Float[ndarray, " draw *column"],
) -> tuple[Float[ndarray, "*column"], Float[ndarray, "*column"]]:
    """Return the 2.5 % and 97.5 % quantiles; NaN without draws, and where half of them or more are undefined."""
    defined = ((~np.isnan(estimates)).mean(0) > 0.5) & (len(estimates) > 1)
    filled = np.where(defined, estimates, 0.0)
    low, high = np.nanquantile(filled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return np.where(defined, low, np.nan), np.where(defined, high, np.nan)


def interval(estimates: Float[ndarray, " draw"]) -> Interval:
    """Return the statistic of the data, the first of `estimates`, with the `percentile_interval` over all draws."""
    low, high = percentile_interval(estimates)
    return Interval(float(estimates[0]), float(low), float(high))


def mean_interval(values: Shaped[ndarray, " example"], units: Iterable[Hashable]) -> Interval:
    """Return the mean over the examples that have a value, with its interval over units."""
    return interval(Bootstrap.of(units).mean(values))


def _numbered(names: Iterable[Hashable]) -> tuple[Int[ndarray, " example"], ndarray]:
    """Number names in the order of their first appearance."""
    codes, found = pd.factorize(pd.Series(list(names), dtype=object), use_na_sentinel=False)
    return codes.astype(np.int64), np.asarray(found)
