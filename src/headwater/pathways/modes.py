"""From probe logits before and after an intervention to ΔP and modes, and whether there are two.

Luo et al., "Two Pathways to Truthfulness", ACL 2026, §3.2, with P the probe's probability of its original prediction:

    ΔP(k) = 100 · (P_after − P_before), percentage points, for the probe of layer k; the logit change beside it
    mode  = Q-anchored where the hard prediction flips, A-anchored where it does not (Eq. 2)

A split by what is then plotted always looks like two groups: one population with one spread of changes gives a
Q-anchored curve far below 0 and an A-anchored one near it. Hence four ways to split, named in the column `split_by`:

    per layer        flips at the layer itself (published)
    best layer       flips at l* only
    cross-fitted     flips at l* of another seed's probe, which was fitted on other examples but reads the same state
    random tokens    flips, and ΔP, when random question tokens are knocked out: what such a split gives by itself

None of them tests anything: one population splits under the second and the third too. Whether there are two modes
is asked of the logit changes themselves. All together may have two peaks (`components`) because questions of two
relations differ in difficulty, or because two predictions start from two sides. So one mode is tested within each
relation and prediction, and the tests are put together (`within_relations`); over question sets the share of false
discoveries is kept at 5 % (`decided`).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""What `components` says of numbers."""
TWO, ONE, NO_RELATIONS = "two modes", "one mode not rejected", "relations unknown"
"""What `decided` says of a question set; `TOO_FEW` too."""
WITHIN = "within relations"
Logits = Float[np.ndarray, "seed layer example"]
FEWEST_FOR_COMPONENTS = 20
LEVEL = 0.05
EVIDENCE = 10.0
"""Two Gaussians beat one where their BIC is lower by this: very strong evidence (Kass & Raftery 1995)."""
APART = 0.1
"""Two modes nearer than this, in standard deviations of the probe's logit, are one."""


@dataclass(frozen=True)
class ModeEffects:
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

    def where(self, applies: Bool[np.ndarray, "seed layer example"]) -> ModeEffects:
        """Return the same effects where another intervention applies too, and none elsewhere."""
        return replace(
            self,
            delta_p=np.where(applies, self.delta_p, np.nan),
            delta_logit=np.where(applies, self.delta_logit, np.nan),
            flipped=self.flipped & applies,
        )

    def at(self, layers: Int[np.ndarray, "seed example"]) -> ModeEffects:
        """Return the effects at each seed's and example's own layer, as the only one."""
        return ModeEffects(**{name: at_layer(values, layers)[:, None] for name, values in vars(self).items()})


def effects(before: Logits, after: Logits) -> ModeEffects:
    """Compare logits of z = 1 before and after an intervention."""
    # A logit of 0 says "right", as it does in `flipped` and in the table's `predicted_wrong`.
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
    """Pick each seed's and example's own layer of an array by seed, layer, example."""
    return np.take_along_axis(values, layers[:, None], axis=1)[:, 0]


def crossed(flips: Bool[np.ndarray, "seed example"]) -> Bool[np.ndarray, "seed example"]:
    """Return for each of several seeds the flips that the next seed's probe saw."""
    return np.roll(flips, -1, axis=0)


def splits_of(
    knockout: ModeEffects, best: Int[np.ndarray, "seed example"], windowed: bool
) -> dict[str, NDArray[np.bool_]]:
    """Return who is Q-anchored, by seed, layer and example, for each way to split.

    Of curves that are those of windows, flips at their own layer say nothing.
    """
    n_layers = knockout.flipped.shape[1]
    at_best = at_layer(knockout.flipped, best)
    splits = {} if windowed else {PER_LAYER: knockout.flipped}
    splits[BEST_LAYER] = np.repeat(at_best[:, None], n_layers, axis=1)
    if len(at_best) > 1:
        splits[CROSSED] = np.repeat(crossed(at_best)[:, None], n_layers, axis=1)
    return splits


def components(changes: NDArray[np.float64]) -> dict[str, float | int | str]:
    """Say whether numbers, logit changes in standard deviations of the probe's logit, have one peak or two.

    Two Gaussians are fitted and one. Two peaks are reported where the two have the lower BIC by more than `EVIDENCE`,
    neither holds less than 5 % of the examples, their means lie `APART` apart, their sum has two peaks, and the dip
    test rejects a single peak at 5 %: skewed, heavy-tailed or flat populations with one peak also prefer two Gaussians.

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
        # EM ends in local optima, hence eight starts; reg_covar, here a share of the variance, keeps a component from
        # shrinking onto equal values.
        one, two = (GaussianMixture(k, n_init=8, reg_covar=1e-4, random_state=0).fit(data) for k in (1, 2))
    bic_one, bic_two = float(one.bic(data)), float(two.bic(data))
    means, weights = two.means_[:, 0], two.weights_
    low, high = np.argsort(means)
    peaks = _peaks(means, np.sqrt(two.covariances_[:, 0, 0]), weights)
    depth, critical = dip(x), critical_dip(len(x))
    apart = (means[high] - means[low]) * scale >= APART
    verdict = ONE_PEAK
    if bic_one - bic_two > EVIDENCE and apart:
        verdict = TWO_PEAKS if peaks == 2 and weights.min() >= 0.05 and depth > critical else SKEWED
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


def within_relations(
    changes: NDArray[np.float64], relations: NDArray[np.object_] | None, predicted_wrong: NDArray[np.bool_]
) -> dict[str, float | int]:
    """Test one mode within each relation and prediction, and put the tests together.

    1. A cell holds the questions of one relation with one prediction; smaller ones than `FEWEST_FOR_COMPONENTS` are
       left out, and counted.
    2. The dip test of each cell, against the uniform distribution, of those with one mode the one with the largest
       dips: no population with one mode in every cell is rejected more often than its level says. Fisher's method
       makes one p of all cells. A cell whose values all lie within `APART` has one mode, whatever rounding does to it.
    3. Where that rejects at 5 %: by how much the BIC of two Gaussians is lower than that of one, summed over cells;
       two whose means are nearer than `APART` never count for two.

    Changes are in standard deviations of the probe's logit; `predicted_wrong` is what the probe said before.

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
    """How much lower the BIC of two Gaussians is, that of two as good as one never."""
    gain = float(found["bic_one"] - found["bic_two"])
    return gain if found["high_mean"] - found["low_mean"] >= APART else min(gain, 0.0)


def decided(tests: pd.DataFrame) -> pd.DataFrame:
    """Say of which question sets two modes are found within relations, in rows by dataset, intervention, population.

    The rows of `WITHIN` (what `within_relations` returned) get `q`, by Benjamini and Hochberg over the sets tested of
    each intervention, and their verdict: `TWO` where q is at most 5 % and two Gaussians beat one.
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
    # A grid around each component: one over all of the range could step over a narrow peak.
    grid = np.unique(
        np.concatenate([np.linspace(m - 4 * s, m + 4 * s, 801) for m, s in zip(means, spreads, strict=True)])
    )
    density = (weights / spreads * np.exp(-0.5 * ((grid[:, None] - means) / spreads) ** 2)).sum(1)
    rises = np.sign(np.diff(density))
    # Flat stretches, where the density underflows between far peaks, are neither rise nor fall.
    return int((np.diff(rises[rises != 0]) < 0).sum())


# What every intervention does on average: flips, ΔP and logit change by layer, for all examples and by mode.
#
# One long table (`Pathways.mean_effects`); what figures and reports ask for are rows of it: `curves_of`, `controls_of`.


ALL, UNSPLIT = "all", "not split"
FEWEST = 10
"""With fewer examples a mean gets no interval."""
VALUES = ("flip_rate", "delta_p", "delta_logit")
KEYS = ["dataset", "intervention", "split_by", "group", "layer"]
MEASURES = [f"{name}{end}" for name in VALUES for end in ("", "_low", "_high")]
Splits: TypeAlias = Mapping[str, Bool[np.ndarray, "seed layer example"] | None]
"""Who is Q-anchored, for each way to split; None puts all into one group."""


def mean_effects_of(
    done: Mapping[str, Sequence[ModeEffects]],
    windowed: ModeEffects | None,
    best: Int[np.ndarray, "seed example"],
    draws: Bootstrap,
) -> pd.DataFrame:
    """Average the effects of every intervention, at each layer and at l* of each fit.

    The knockout of E_Q is split in every way, a control by the mode that another seed's probe gives (with one seed, by
    the own), and random question tokens by their own flips too. `done` has the effects of each intervention, one per
    draw of its tokens; `windowed` those of the knockout in a window around each layer, where one was requested.
    """
    pooled = {name: _pooled(each) for name, each in done.items()}
    splits = splits_of(pooled[EXACT], best, windowed is not None)
    tables = [_each(pooled, splits, draws, randomly=windowed is None)]
    if windowed is not None:
        tables.append(averaged(windowed, splits, draws).assign(intervention=WINDOWED))
    at_best = {name: _pooled([one.at(best) for one in each]) for name, each in done.items()}
    splits = splits_of(at_best[EXACT], np.zeros_like(best), windowed is not None)
    tables.append(_each(at_best, splits, draws, randomly=True).assign(layer=None))
    together = pd.concat([table.astype({"layer": "Int64"}) for table in tables], ignore_index=True)
    return together[[*KEYS[1:], "examples", *MEASURES, "share"]]


def _each(pooled: Mapping[str, ModeEffects], splits: Splits, draws: Bootstrap, *, randomly: bool) -> pd.DataFrame:
    """Average each intervention in the ways to split that are its own; `randomly`: random tokens by their own flips."""
    for_controls = _split_for_controls(splits)
    tables = []
    for name, measured in pooled.items():
        by = {UNSPLIT: None, **(splits if name == EXACT else {for_controls: splits[for_controls]})}
        if name == RANDOM and randomly:
            by[RANDOM_SPLIT] = measured.flipped
        tables.append(averaged(measured, by, draws).assign(intervention=name))
    return pd.concat(tables, ignore_index=True)


def averaged(measured: ModeEffects, splits: Splits, draws: Bootstrap) -> pd.DataFrame:
    """Average one intervention's effects by way to split, group and layer, with 95 % intervals over questions.

    Several draws of its tokens are so many times as many seeds.

    Returns:
        `split_by, group, layer, examples` (that are ever in the group), `share` of the group among those that the
        intervention applies to, and each of `VALUES` with `_low` and `_high`.
    """
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
            # Draws are concatenated, each with all of its seeds: the modes of the seeds repeat draw by draw.
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
    """Average over the seeds and examples that are members, with intervals.

    Returns:
        By column: mean, low, high (NaN where fewer than `FEWEST` examples are ever members), and how many are.
    """
    sizes = member.sum(0)
    means = draws.ratio(np.where(member, values, 0.0).sum(0), sizes)
    examples = (sizes > 0).sum(0)
    low, high = (np.where(examples < FEWEST, np.nan, end) for end in percentile_interval(means))
    return means[0], low, high, examples


def _pooled(each: Sequence[ModeEffects]) -> ModeEffects:
    """Put the draws of an intervention one after the other, as if they were seeds."""
    return ModeEffects(**{name: np.concatenate([getattr(one, name) for one in each]) for name in vars(each[0])})


def _split_for_controls(splits: Collection[str]) -> str:
    """Return how controls are split: by another seed's probe where there is one, else by the own at l*."""
    return CROSSED if CROSSED in splits else BEST_LAYER


def curves_of(table: pd.DataFrame, *, at_best: bool) -> pd.DataFrame:
    """Return the rows by mode of the knockout (in windows, where these were requested) and of the random split.

    `at_best`: those at l*, where no window is, without a layer.

    Returns:
        `dataset, split_by, mode, layer, examples, delta_p, delta_logit` with their intervals, and `share`.
    """
    of_layers = not at_best and (table["intervention"] == WINDOWED).any()
    knockout = (table["intervention"] == (WINDOWED if of_layers else EXACT)) & (table["split_by"] != UNSPLIT)
    rows = table[knockout | (table["split_by"] == RANDOM_SPLIT)].rename(columns={"group": "mode"})
    changes = [name for name in MEASURES if not name.startswith("flip_rate")]
    return _at(rows, at_best, ["dataset", "split_by", "mode", "layer", "examples", *changes, "share"])


def controls_of(table: pd.DataFrame, *, at_best: bool) -> pd.DataFrame:
    """Return the rows of every intervention without a window, of all examples and by mode; `at_best`: those at l*.

    Returns:
        `dataset, intervention, group, layer, examples, flip_rate, delta_p, delta_logit`, with their intervals.
    """
    split = table["split_by"].isin([UNSPLIT, _split_for_controls(set(table["split_by"]))])
    rows = table[split & (table["intervention"] != WINDOWED)]
    return _at(rows, at_best, ["dataset", "intervention", "group", "layer", "examples", *MEASURES])


def _at(rows: pd.DataFrame, at_best: bool, columns: Sequence[str]) -> pd.DataFrame:
    """Keep the rows of the layers, or those at l*, which are of no one layer."""
    if at_best:
        return rows.loc[rows["layer"].isna(), [name for name in columns if name != "layer"]].reset_index(drop=True)
    return rows.loc[rows["layer"].notna(), list(columns)].astype({"layer": np.int64}).reset_index(drop=True)
