"""ΔP and modes from probe logits before and after an intervention, and a test of whether there are two modes.

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §3.2; P is the probe's probability of its original prediction:

    ΔP(k) = 100 · (P_after − P_before), percentage points, for the probe of layer k; reported with the logit change
    mode  = Q-anchored where the hard prediction flips, A-anchored where it does not (Eq. 2)

A split by the plotted quantity always looks like two groups: one population with one spread of changes gives a
Q-anchored curve far below 0 and an A-anchored curve near 0. Hence four ways to split, named in the column `split_by`:

    per layer        flips at the layer itself (published)
    best layer       flips at l* only
    cross-fitted     flips at l* of another seed's probe, which was fitted on other examples but reads the same state
    random tokens    flips, and ΔP, when random question tokens are knocked out: the result of such a split alone

None of these is a test: one population also splits under the second and the third. The test of two modes uses the
logit changes themselves. All changes together may have two peaks (`components`) because questions of two relations
differ in difficulty, or because the two predictions start from opposite sides. So one mode is tested within each
relation and prediction, and these tests are combined (`within_relations`); over question sets the false discovery rate
is kept at 5 % (`decided`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from scipy.special import expit
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from headwater.pathways.interventions import EXACT, RANDOM, WINDOWED
from headwater.stats.resample import Bootstrap, percentile_interval
from headwater.stats.significance import combined_p, critical_dip, dip, dip_p, q_values

MODES = ("Q-anchored", "A-anchored")
SplitName: TypeAlias = Literal["per layer", "best layer", "cross-fitted", "random tokens"]
PER_LAYER, BEST_LAYER, CROSSED, RANDOM_SPLIT = get_args(SplitName)
TWO_PEAKS, ONE_PEAK, SKEWED, TOO_FEW = "two peaks", "one peak", "one peak, not Gaussian", "too few examples"
"""Verdicts of `components`."""
TWO, ONE, NO_RELATIONS = "two modes", "one mode not rejected", "relations unknown"
"""Verdicts of `decided` on a question set; `TOO_FEW` is one too."""
WITHIN = "within relations"
Logits = Float[np.ndarray, "seed layer example"]
FEWEST_FOR_COMPONENTS = 20
LEVEL = 0.05
EVIDENCE = 10.0
"""Two Gaussians beat one if their BIC is lower by more than this: very strong evidence (Kass & Raftery 1995)."""
APART = 0.1
"""Two modes closer than this, in standard deviations of the probe's logit, count as one."""


@dataclass(frozen=True)
class ModeEffects:
    """Effects of an intervention on the probe's original prediction; NaN where it does not apply."""

    probability: Logits
    """P of the original prediction, before the intervention."""
    probability_after: Logits
    delta_p: Logits
    """Percentage points."""
    delta_logit: Logits
    """Towards the original prediction: negative if the probe becomes less sure of it."""
    flipped: Bool[np.ndarray, "seed layer example"]

    @property
    def applies(self) -> Bool[np.ndarray, "seed layer example"]:
        """Where there is an effect to report."""
        return np.isfinite(self.delta_logit)


def effects(before: Logits, after: Logits) -> ModeEffects:
    """Compare logits of z = 1 before and after an intervention."""
    # A logit of 0 means "right", as in `flipped` and in the table's `predicted_wrong`.
    sign = np.where(before > 0, 1.0, -1.0)
    probability, probability_after = expit(np.abs(before)), expit(sign * after)
    return ModeEffects(
        probability=probability,
        probability_after=probability_after,
        delta_p=100 * (probability_after - probability),
        delta_logit=sign * (after - before),
        flipped=np.isfinite(after) & ((after > 0) != (before > 0)),
    )


def at_layer(values: NDArray[Any], layers: Int[np.ndarray, "seed example"]) -> NDArray[Any]:
    """Pick the layer chosen for each seed and example, from an array by seed, layer and example."""
    return np.take_along_axis(values, layers[:, None], axis=1)[:, 0]


def crossed(flips: Bool[np.ndarray, "seed example"]) -> Bool[np.ndarray, "seed example"]:
    """Return for each seed the flips under the next seed's probe."""
    return np.roll(flips, -1, axis=0)


def splits_of(
    knockout: ModeEffects, best: Int[np.ndarray, "seed example"], windowed: bool
) -> dict[str, NDArray[np.bool_]]:
    """Return which examples are Q-anchored, by seed, layer and example, for each way to split.

    With windows there is no split per layer: flips at a layer itself do not belong to a window's curve.
    """
    n_layers = knockout.flipped.shape[1]
    at_best = at_layer(knockout.flipped, best)
    splits = {} if windowed else {PER_LAYER: knockout.flipped}
    splits[BEST_LAYER] = np.repeat(at_best[:, None], n_layers, axis=1)
    if len(at_best) > 1:
        splits[CROSSED] = np.repeat(crossed(at_best)[:, None], n_layers, axis=1)
    return splits


def components(changes: NDArray[np.float64]) -> dict[str, float | int | str]:
    """Test whether values (logit changes in standard deviations of the probe's logit) have one peak or two.

    One and two Gaussians are fitted. There are two peaks if the BIC of two is lower by more than `EVIDENCE`, each
    component has at least 5 % of the weight, their means are at least `APART` apart, their sum has two peaks, and the
    dip test rejects one peak at 5 %: skewed, heavy-tailed or flat populations with one peak also prefer two Gaussians.

    Returns:
        `examples, bic_one, bic_two, peaks, dip, dip_critical, low_mean, high_mean, low_weight, verdict`.
    """
    x = changes[np.isfinite(changes)]
    names = ("bic_one", "bic_two", "dip", "dip_critical", "low_mean", "high_mean", "low_weight")
    result: dict[str, float | int | str] = {"examples": len(x), **dict.fromkeys(names, np.nan), "peaks": 0}
    if len(x) < FEWEST_FOR_COMPONENTS:
        return result | {"verdict": TOO_FEW}
    scale = float(x.std()) or 1.0
    data = (x[:, None] - x.mean()) / scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        # Eight starts because EM ends in local optima; reg_covar, here a share of the variance, keeps a component from
        # collapsing onto equal values.
        one, two = (GaussianMixture(k, n_init=8, reg_covar=1e-4, random_state=0).fit(data) for k in (1, 2))
    bic_one, bic_two = float(one.bic(data)), float(two.bic(data))
    means, weights = two.means_[:, 0], two.weights_
    low, high = np.argsort(means)
    peaks = _peaks(means, np.sqrt(two.covariances_[:, 0, 0]), weights)
    depth, critical = dip(x), critical_dip(len(x))
    low_mean, high_mean = (float(means[place] * scale + x.mean()) for place in (low, high))
    verdict = ONE_PEAK
    if bic_one - bic_two > EVIDENCE and (means[high] - means[low]) * scale >= APART:
        verdict = TWO_PEAKS if peaks == 2 and weights.min() >= 0.05 and depth > critical else SKEWED
    numbers = (bic_one, bic_two, depth, critical, low_mean, high_mean, float(weights[low]))
    return result | dict(zip(names, numbers, strict=True)) | {"peaks": peaks, "verdict": verdict}


def within_relations(
    changes: NDArray[np.float64], relations: NDArray[np.object_] | None, predicted_wrong: NDArray[np.bool_]
) -> dict[str, float | int]:
    """Test for one mode within each relation and prediction, and combine the tests.

    1. A cell contains the questions of one relation with one prediction; cells with fewer than `FEWEST_FOR_COMPONENTS`
       questions are left out, and their questions are counted.
    2. The dip test of each cell is against the uniform distribution, which has the largest dips of all distributions
       with one mode: populations with one mode in every cell are rejected no more often than the level. Fisher's method
       combines the cells into one p. A cell whose values all lie within `APART` has one mode, whatever the rounding.
    3. If this rejects at 5 %: by how much the BIC of two Gaussians is lower than that of one, summed over cells; two
       Gaussians whose means are closer than `APART` never count in favour of two modes.

    Changes are in standard deviations of the probe's logit; `predicted_wrong` is the probe's original prediction.

    Returns:
        `examples` tested and `left_out`, `cells`, `p`, and `gain` in BIC; NaN where it was not computed.
    """
    known = np.isfinite(changes) & ([True] * len(changes) if relations is None else pd.notna(relations))
    frame = pd.DataFrame({"change": changes[known], "wrong": predicted_wrong[known]})
    frame["relation"] = "" if relations is None else relations[known]
    every = [group["change"].to_numpy() for _, group in frame.groupby(["relation", "wrong"])]
    cells = [values for values in every if len(values) >= FEWEST_FOR_COMPONENTS]
    tested = sum(map(len, cells))
    result = {"examples": tested, "left_out": len(changes) - tested, "cells": len(cells), "p": np.nan, "gain": np.nan}
    if cells and relations is not None:
        p_values = [dip_p(values) if np.ptp(values) >= APART else 1.0 for values in cells]
        result["p"] = combined_p(p_values)
        if result["p"] <= LEVEL:
            result["gain"] = sum(_gain(components(values)) for values in cells)
    return result


def _gain(found: Mapping[str, Any]) -> float:
    """Return how much lower the BIC of two Gaussians is; at most 0 if their means are closer than `APART`."""
    gain = float(found["bic_one"] - found["bic_two"])
    return gain if found["high_mean"] - found["low_mean"] >= APART else min(gain, 0.0)


def decided(tests: pd.DataFrame) -> pd.DataFrame:
    """Decide which question sets have two modes within relations; rows are by dataset, intervention, population.

    The rows of `WITHIN` (from `within_relations`) get `q`, by Benjamini and Hochberg over the tested sets of each
    intervention, and their verdict: `TWO` if q is at most 5 % and two Gaussians beat one.
    """
    result = tests.assign(q=np.nan)
    within = result["population"] == WITHIN
    for _, rows in result[within].groupby("intervention"):
        result.loc[rows.index, "q"] = q_values(rows["p"].to_numpy())
    two = (result["q"] <= LEVEL) & (result["gain"] > EVIDENCE)
    untested = np.where(result["cells"] == 0, TOO_FEW, NO_RELATIONS)
    verdicts = np.where(result["p"].isna(), untested, np.where(two, TWO, ONE))
    return result.assign(verdict=result["verdict"].where(~within, verdicts))


def _peaks(means: NDArray[np.float64], spreads: NDArray[np.float64], weights: NDArray[np.float64]) -> int:
    """Count the peaks of a sum of Gaussians."""
    # A grid around each component: a single grid over the whole range could step over a narrow peak.
    grid = np.unique(
        np.concatenate([np.linspace(m - 4 * s, m + 4 * s, 801) for m, s in zip(means, spreads, strict=True)])
    )
    density = (weights / spreads * np.exp(-0.5 * ((grid[:, None] - means) / spreads) ** 2)).sum(1)
    rises = np.sign(np.diff(density))
    # Flat stretches, where the density underflows between far peaks, are neither rise nor fall.
    return int((np.diff(rises[rises != 0]) < 0).sum())


# Mean effects of every intervention, in one long table (`Pathways.mean_effects`); figures and reports read its rows.


ALL, UNSPLIT = "all", "not split"
FEWEST = 10
"""A mean over fewer examples gets no interval."""
VALUES = ("flip_rate", "delta_p", "delta_logit")
KEYS = ["dataset", "intervention", "split_by", "group", "layer"]
MEASURES = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
Splits: TypeAlias = Mapping[str, Bool[np.ndarray, "seed layer example"] | None]
"""Which examples are Q-anchored, for each way to split; None puts all into one group."""


def mean_effects_of(
    before: Logits,
    after: Mapping[str, Float[np.ndarray, "_ layer example"]],
    windowed: ModeEffects | None,
    best: Int[np.ndarray, "seed example"],
    draws: Bootstrap,
) -> pd.DataFrame:
    """Average the effects of every intervention at each layer and at l* of each fit.

    Several draws of an intervention's tokens count as further seeds. The knockout of E_Q is split in every way, a
    control by the mode under another seed's probe (with one seed, under its own probe), and random question tokens also
    by their own flips.
    """
    tables = []
    for is_at_best in (False, True):
        measured = {}
        for name, logits in after.items():
            repeats = len(logits) // len(before)
            pair = [np.tile(before, (repeats, 1, 1)), logits]
            if is_at_best:
                pair = [at_layer(each, np.tile(best, (repeats, 1)))[:, None] for each in pair]
            measured[name] = effects(*pair)
        splits = splits_of(measured[EXACT], np.zeros_like(best) if is_at_best else best, windowed is not None)
        for_controls = _split_for_controls(splits)
        of_part = []
        for name, effect in measured.items():
            by = {UNSPLIT: None, **(splits if name == EXACT else {for_controls: splits[for_controls]})}
            if name == RANDOM and (is_at_best or windowed is None):
                by[RANDOM_SPLIT] = effect.flipped
            of_part.append(averaged(effect, by, draws).assign(intervention=name))
        if windowed is not None and not is_at_best:
            of_part.append(averaged(windowed, splits, draws).assign(intervention=WINDOWED))
        tables += [table.assign(layer=None) for table in of_part] if is_at_best else of_part
    together = pd.concat([table.astype({"layer": "Int64"}) for table in tables], ignore_index=True)
    return together[[*KEYS[1:], "examples", *MEASURES, "share"]]


def averaged(measured: ModeEffects, splits: Splits, draws: Bootstrap) -> pd.DataFrame:
    """Return `split_by, group, layer, examples, share`, and means of `VALUES` with intervals, of one intervention."""
    applies = np.swapaxes(measured.applies, 1, 2)
    numbers = {
        "flip_rate": measured.flipped.astype(float),
        "delta_p": measured.delta_p,
        "delta_logit": measured.delta_logit,
    }
    tables = []
    for split_by, q_anchored in splits.items():
        groups: dict[str, NDArray[np.bool_]] = {ALL: np.ones((1, 1, 1), dtype=bool)}
        if q_anchored is not None:
            groups = {MODES[0]: q_anchored, MODES[1]: ~q_anchored}
        for group, member in groups.items():
            # The draws are concatenated, each with all its seeds, so the modes by seed repeat for every draw.
            repeats = 1 if q_anchored is None else len(applies) // len(q_anchored)
            included = applies & np.tile(np.swapaxes(member, 1, 2), (repeats, 1, 1))
            columns = {"split_by": split_by, "group": group, "layer": np.arange(included.shape[2])}
            for name, values in numbers.items():
                mean, low, high, examples = member_means(draws, np.swapaxes(values, 1, 2), included)
                columns |= {"examples": examples, name: mean, f"{name}_low": low, f"{name}_high": high}
            columns["share"] = included.sum((0, 1)) / np.maximum(applies.sum((0, 1)), 1)
            tables.append(pd.DataFrame(columns))
    return pd.concat(tables, ignore_index=True)


def member_means(
    draws: Bootstrap,
    values: Float[np.ndarray, "seed example *column"],
    member: Bool[np.ndarray, "seed example *column"],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return, by column, the mean over members, its interval (NaN below `FEWEST` examples), and the number of these."""
    sizes = member.sum(0)
    means = draws.ratio(np.where(member, values, 0.0).sum(0), sizes)
    examples = (sizes > 0).sum(0)
    low, high = (np.where(examples < FEWEST, np.nan, end) for end in percentile_interval(means))
    return means[0], low, high, examples


def _split_for_controls(splits: Collection[str]) -> str:
    """Return how controls are split: by another seed's probe if any, else by the flips at l* of their own probe."""
    return CROSSED if CROSSED in splits else BEST_LAYER


def curves_of(table: pd.DataFrame, *, at_best: bool) -> pd.DataFrame:
    """Return the rows by mode of the knockout (by layer in windows, if requested) and of the random split."""
    of_layers = not at_best and (table["intervention"] == WINDOWED).any()
    knockout = (table["intervention"] == (WINDOWED if of_layers else EXACT)) & (table["split_by"] != UNSPLIT)
    rows = table[knockout | (table["split_by"] == RANDOM_SPLIT)].rename(columns={"group": "mode"})
    changes = [name for name in MEASURES if not name.startswith("flip_rate")]
    return _at(rows, at_best, ["dataset", "split_by", "mode", "layer", "examples", *changes, "share"])


def controls_of(table: pd.DataFrame, *, at_best: bool) -> pd.DataFrame:
    """Return the rows of every intervention except windows, of all examples and by mode."""
    split = table["split_by"].isin([UNSPLIT, _split_for_controls(set(table["split_by"]))])
    rows = table[split & (table["intervention"] != WINDOWED)]
    return _at(rows, at_best, ["dataset", "intervention", "group", "layer", "examples", *MEASURES])


def _at(rows: pd.DataFrame, at_best: bool, columns: Sequence[str]) -> pd.DataFrame:
    """Keep the rows by layer, or the rows at l*, which have no layer."""
    if at_best:
        return rows.loc[rows["layer"].isna(), [name for name in columns if name != "layer"]].reset_index(drop=True)
    return rows.loc[rows["layer"].notna(), list(columns)].astype({"layer": np.int64}).reset_index(drop=True)
