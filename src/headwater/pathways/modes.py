"""From probe logits before and after an intervention to ΔP, modes and their curves.

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §3.2, with P the probe's probability of its original prediction:

    ΔP(k) = 100 · (P_after − P_before), percentage points, for the probe of layer k; the logit change beside it
    mode  = Q-anchored where the hard prediction flips, A-anchored where it does not (Eq. 2)

A split by what is then plotted always looks like two groups: one population with one spread of changes gives a
Q-anchored curve far below 0 and an A-anchored one near it. Hence four ways to split, named in the column `split_by`:

    per layer        flips at the layer itself (published)
    best layer       flips at l* only
    cross-fitted     flips at l* of another seed's probe, which was fitted on other examples
    random tokens    flips, and ΔP, when random question tokens are knocked out: what such a split gives by itself

and the question whether the logit changes have one peak or two (`components`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from headwater.pathways.bootstrap import Counts, member_means
from headwater.pathways.dip import critical_dip, dip

MODES = ("Q-anchored", "A-anchored")
PER_LAYER, BEST_LAYER, CROSSED, RANDOM_SPLIT = "per layer", "best layer", "cross-fitted", "random tokens"
TWO, ONE, SKEWED, TOO_FEW = "two modes", "one mode", "one mode, not Gaussian", "too few examples"
Logits = Float[np.ndarray, "seed layer example"]
FEWEST_FOR_COMPONENTS = 30
APART = 0.1
"""Two modes nearer than this, in standard deviations of the probe's logit, are one."""


@dataclass(frozen=True)
class Effects:
    """What an intervention does to the probe's original prediction; NaN where it does not apply."""

    probability: Logits
    """P of the original prediction, before."""
    probability_after: Logits
    delta_p: Logits
    """Percentage points."""
    delta_logit: Logits
    """Towards the original prediction: negative where the probe becomes less sure of it."""
    flipped: Bool[np.ndarray, "seed layer example"]

    @property
    def applies(self) -> Bool[np.ndarray, "seed layer example"]:
        """Where there is an effect to report."""
        return np.isfinite(self.delta_logit)

    def at(self, layers: Int[np.ndarray, "seed example"]) -> Effects:
        """Return the effects at each seed's and example's own layer, as the only one."""
        return Effects(**{name: at_layer(values, layers)[:, None] for name, values in vars(self).items()})


def effects(before: Logits, after: Logits) -> Effects:
    """Compare logits of z = 1 before and after an intervention."""
    sign = np.where(before > 0, 1.0, -1.0)
    probability, probability_after = expit(np.abs(before)), expit(sign * after)
    return Effects(
        probability=probability,
        probability_after=probability_after,
        delta_p=100 * (probability_after - probability),
        delta_logit=sign * (after - before),
        flipped=np.isfinite(after) & ((after > 0) != (before > 0)),
    )


def at_layer(values: NDArray[Any], layers: Int[np.ndarray, "seed example"]) -> NDArray[Any]:
    """Pick each seed's and example's own layer of an array by seed, layer, example."""
    return np.take_along_axis(values, layers[:, None], axis=1)[:, 0]


def crossed(flips: Bool[np.ndarray, "seed example"]) -> Bool[np.ndarray, "seed example"]:
    """Return for each of several seeds the flips that the next seed's probe saw."""
    return np.roll(flips, -1, axis=0)


def splits_of(knockout: Effects, best: Int[np.ndarray, "seed example"], windowed: bool) -> dict[str, NDArray[np.bool_]]:
    """Return who is Q-anchored, by seed, layer and example, for each way to split.

    Args:
        knockout: of E_Q, in every layer up to each.
        best: l* of the probe that each example is measured with.
        windowed: whether the curves are those of windows, for which flips at their own layer say nothing.
    """
    n_layers = knockout.flipped.shape[1]
    own = at_layer(knockout.flipped, best)
    found = {} if windowed else {PER_LAYER: knockout.flipped}
    found[BEST_LAYER] = np.repeat(own[:, None], n_layers, axis=1)
    if len(own) > 1:
        found[CROSSED] = np.repeat(crossed(own)[:, None], n_layers, axis=1)
    return found


def curves(measured: Effects, splits: Mapping[str, NDArray[np.bool_]], counts: Counts) -> pd.DataFrame:
    """Average ΔP and the logit change by layer, mode and way to split, with 95 % intervals over questions."""
    tables = []
    for split_by, q_anchored in splits.items():
        for mode in MODES:
            member = measured.applies & (q_anchored == (mode == MODES[0]))
            member = np.swapaxes(member, 1, 2)
            columns = {"split_by": split_by, "mode": mode, "layer": np.arange(member.shape[2])}
            for name in ("delta_p", "delta_logit"):
                values = np.nan_to_num(np.swapaxes(getattr(measured, name), 1, 2))
                mean, low, high, examples = member_means(counts, values, member)
                columns |= {"examples": examples, name: mean, f"{name}_low": low, f"{name}_high": high}
            columns["share"] = member.sum((0, 1)) / np.maximum(measured.applies.sum((0, 2)), 1)
            tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def components(changes: NDArray[np.float64], seed: int = 0) -> dict[str, float | int | str]:
    """Say whether numbers have one peak or two.

    Two Gaussians are fitted and one. Two modes are reported where the two have the lower BIC by more than 10 (very
    strong evidence, Kass & Raftery 1995), neither holds less than 5 % of the examples, their means lie `APART` apart,
    their sum has two peaks, and the dip test rejects a single peak at 5 %: skewed, heavy-tailed or flat populations
    with one peak also prefer two Gaussians.

    Args:
        changes: logit changes, in standard deviations of the probe's logit.
        seed: for the fits.

    Returns:
        `examples, bic_one, bic_two, peaks, dip, dip_critical, low_mean, high_mean, low_weight, verdict`.
    """
    x = changes[np.isfinite(changes)]
    if len(x) < FEWEST_FOR_COMPONENTS:
        blank = dict.fromkeys(
            ("bic_one", "bic_two", "dip", "dip_critical", "low_mean", "high_mean", "low_weight"), np.nan
        )
        return {"examples": len(x), **blank, "peaks": 0, "verdict": TOO_FEW}
    scale = float(x.std()) or 1.0
    data = (x[:, None] - x.mean()) / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        one, two = (GaussianMixture(k, n_init=8, reg_covar=1e-4, random_state=seed).fit(data) for k in (1, 2))
    bic_one, bic_two = float(one.bic(data)), float(two.bic(data))
    means, weights = two.means_[:, 0], two.weights_
    low, high = np.argsort(means)
    peaks = _peaks(means, np.sqrt(two.covariances_[:, 0, 0]), weights)
    depth, critical = dip(x), critical_dip(len(x))
    apart = (means[high] - means[low]) * scale >= APART
    verdict = ONE
    if bic_one - bic_two > 10 and apart:
        verdict = TWO if peaks == 2 and weights.min() >= 0.05 and depth > critical else SKEWED
    return {
        "examples": len(x),
        "bic_one": bic_one,
        "bic_two": bic_two,
        "peaks": peaks,
        "dip": depth,
        "dip_critical": critical,
        "low_mean": float(means[low] * scale + x.mean()),
        "high_mean": float(means[high] * scale + x.mean()),
        "low_weight": float(weights[low]),
        "verdict": verdict,
    }


def _peaks(means: NDArray[np.float64], spreads: NDArray[np.float64], weights: NDArray[np.float64]) -> int:
    """Count the peaks of a sum of Gaussians."""
    grid = np.unique(
        np.concatenate([np.linspace(m - 4 * s, m + 4 * s, 801) for m, s in zip(means, spreads, strict=True)])
    )
    density = (weights / spreads * np.exp(-0.5 * ((grid[:, None] - means) / spreads) ** 2)).sum(1)
    rises = np.sign(np.diff(density))
    return int((np.diff(rises[rises != 0]) < 0).sum())
