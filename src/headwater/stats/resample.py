"""Intervals by resampling questions: all quantities of a question, every answer, layer and seed, are drawn together.

A resample is a row of counts, how often each example was drawn. The first row is all ones: the data themselves. So a
mean is one matrix product for all resamples, layers and seeds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy.typing import NDArray

DRAWS = 1000
LEVEL = 0.95
FEWEST = 10
"""With fewer examples a mean gets no interval."""
Counts = Float[np.ndarray, "resample example"]


def resamples(n_groups: int, draws: int = DRAWS, seed: int = 0) -> Float[np.ndarray, "resample group"]:
    """Draw `n_groups` groups with replacement, many times; row 0 is every group once."""
    rng = np.random.default_rng(seed)
    counts = np.ones((draws + 1, n_groups))
    for row in counts[1:]:
        row[:] = np.bincount(rng.integers(n_groups, size=n_groups), minlength=n_groups)
    return counts


def resampled_questions(questions: Iterable[Hashable], draws: int = DRAWS, seed: int = 0) -> Counts:
    """Resample examples by their questions: those of one question are drawn together."""
    codes, names = pd.factorize(pd.Series(list(questions), dtype=object))
    return resamples(len(names), draws, seed)[:, codes]


def member_means(
    counts: Counts,
    values: Float[np.ndarray, "seed example *column"],
    member: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Average over the seeds and examples that are members, with intervals.

    Args:
        counts: resamples.
        values: by seed, example and whatever else.
        member: of the same shape: what takes part.

    Returns:
        By column: mean, low, high (NaN where fewer than `FEWEST` examples are ever members), and how many are.
    """
    taken = np.where(member, values, 0.0).sum(0).reshape(counts.shape[1], -1)
    sizes = member.sum(0).reshape(counts.shape[1], -1).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = (counts @ taken) / (counts @ sizes)
    examples = (sizes > 0).sum(0)
    _, low, high = interval(means)
    few = examples < FEWEST
    return means[0], np.where(few, np.nan, low), np.where(few, np.nan, high), examples


def interval(estimates: Float[np.ndarray, " resample *column"]) -> tuple[NDArray[np.float64], ...]:
    """Return the estimate on the data and the percentile interval over the resamples; NaN where most are undefined."""
    tail = (1 - LEVEL) / 2
    defined = np.isfinite(estimates).mean(0) > 0.5
    filled = np.where(defined, estimates, 0.0)
    low, high = np.nanquantile(filled, [tail, 1 - tail], axis=0)
    return np.asarray(estimates[0]), np.where(defined, low, np.nan), np.where(defined, high, np.nan)
