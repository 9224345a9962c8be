"""Which edges are recomputed exactly after a screen: the strongest by their estimates, and some of the rest by lot.

An edge is as strong as the larger of two estimates makes it, each as a part of its own largest: the sublayer's, and the
first-order one. The sublayer's is by far the better, but where a softmax goes up and down again between the two runs it
can be near 0 by accident; then the slope is not. On 112 single pairs of the embedded model's tasks one of the exact top
100 was not among the first 500 by the sublayer's alone in 8 pairs, by the larger of the two in 3.

The lot falls on the rest in proportion to how many of its edges lead to each kind of receiver, so that what it meets
there speaks for all of it: of how many of the rest are beyond the weakest of the recomputed, `EdgeEffects.report` says
at most how many there can be.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from headwater.circuits.graph import Indices

DRAWN = 50
"""How many of the rest are drawn."""


def strength(estimates: Float[np.ndarray, "example position edge metric"]) -> Float[np.ndarray, " edge"]:
    """Return by what edges are ranked: the mean size over pairs, as a part of the metric's largest, on any metric."""
    sizes = np.abs(estimates).sum(1).mean(0)
    return np.asarray((sizes / np.maximum(sizes.max(0), np.finfo(float).tiny)).max(1))


def strongest_and_drawn(
    strengths: Float[np.ndarray, " edge"], kinds: Indices, verify: int, seed: int
) -> tuple[Bool[np.ndarray, " edge"], Bool[np.ndarray, " edge"]]:
    """Return which edges are recomputed for their strength, and which because they were drawn.

    Args:
        strengths: of each edge.
        kinds: the kind of its receiver.
        verify: how many of the strongest.
        seed: of the lot.
    """
    strongest, drawn = np.zeros(len(strengths), dtype=bool), np.zeros(len(strengths), dtype=bool)
    strongest[np.argsort(-strengths, kind="stable")[:verify]] = True
    rest = np.flatnonzero(~strongest)
    wanted = min(DRAWN, len(rest))
    if not wanted:
        return strongest, drawn
    generator = np.random.default_rng(seed)
    strata = [rest[kinds[rest] == kind] for kind in np.unique(kinds[rest])]
    for stratum, count in zip(strata, _shares([len(one) for one in strata], wanted), strict=True):
        drawn[generator.choice(stratum, count, replace=False)] = True
    return strongest, drawn


def _shares(sizes: list[int], wanted: int) -> NDArray[np.int64]:
    """Divide a number in proportion to sizes, the largest remainders rounded up."""
    exact = np.array(sizes) * wanted / sum(sizes)
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: wanted - counts.sum()]] += 1
    return np.asarray(np.minimum(counts, sizes))
