"""Effects over examples: means, bootstrap intervals, sign-flip permutation tests, and how two sweeps agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from headwater.errors import InputError
from headwater.options import checked_name, checked_number, checked_seed, shown

NORMALIZE = ("mean of ratios", "ratio of means")
NO_GAP = 1e-9
"""Where two runs differ by less, nothing can be a share of it."""
SMALL_GAP = 0.1
"""Of the median gap: below this share a pair is named."""
RESAMPLES = 2000
FLIPS = 10_000


def measure_of(table: pd.DataFrame, value: str, normalize: str | None) -> str:
    """Return what of a sweep is summarized: `effect`, `normalized_effect` (a mean of ratios) or `ratio of means`.

    Raises:
        InputError: there is no such column or way to normalize.
    """
    if normalize is not None and not (isinstance(normalize, str) and normalize in NORMALIZE):
        raise InputError(f"normalize={shown(normalize)} is none of {', '.join(map(repr, NORMALIZE))}.")
    column = checked_name("value", value, ("effect", "normalized_effect"))
    column = column if normalize is None else "normalized_effect"
    if column not in table.columns:
        raise InputError(
            f"value={shown(value)} is not a column that can be summarized; use 'effect' or 'normalized_effect'."
            if normalize is None
            else f"normalize={shown(normalize)} needs pairs of prompts: this sweep has one run only to go by."
        )
    return normalize if normalize == "ratio of means" else column


def summarize(table: pd.DataFrame, coordinates: list[str], measure: str, level: float, seed: int) -> pd.DataFrame:
    """Summarize each cell over examples; see `Sweep.summary`."""
    checked_number("level", level, above=0.0, below=1.0)
    seed = checked_seed(seed)
    rows = []
    for cell, part in table.groupby(coordinates, sort=False, dropna=False):
        effects, gaps = summands(part, measure)
        low, high = bootstrap_interval(effects, level, seed, gaps)
        rows.append([*cell, len(effects), mean_effect(effects, gaps), low, high, sign_flip_p(effects, seed)])
    summary = pd.DataFrame(rows, columns=[*coordinates, "examples", "mean", "low", "high", "p_value"])
    return summary.astype({name: table[name].dtype for name in coordinates})


def summands(part: pd.DataFrame, measure: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the effects of one cell by example and, for a ratio of means, the gaps that their mean is divided by."""
    if measure != "ratio of means":
        return part[measure].dropna().to_numpy(), None
    part = part.dropna(subset=["effect"])
    return part["effect"].to_numpy(), gaps_of(part).to_numpy()


def gaps_of(table: pd.DataFrame) -> pd.Series:
    """Return how far the other run's metric is from the edited run's, which normalized effects are shares of."""
    gap = table["clean"] - table["corrupted"]
    shares = table["effect"] * table["normalized_effect"] * gap  # its sign says which of the two runs was edited
    return -gap if bool((shares < 0).any()) else gap


def cell_means(table: pd.DataFrame, columns: list[str], measure: str) -> pd.Series:
    """Return the mean of each cell over examples; see `Sweep.summary`."""
    if measure != "ratio of means":
        return table.groupby(columns, dropna=False)[measure].mean()
    felt = table.assign(gap=gaps_of(table)).dropna(subset=["effect"])
    sums = felt.groupby(columns, dropna=False)[["effect", "gap"]].sum()
    return (sums["effect"] / sums["gap"]).where(sums["gap"].abs() > NO_GAP)


def mean_effect(effects: np.ndarray, gaps: np.ndarray | None = None) -> float:
    """Return the mean effect, or with gaps its share of the mean gap; NaN where there is nothing, or no gap."""
    if not len(effects) or (gaps is not None and abs(gaps.sum()) <= NO_GAP):
        return np.nan
    return float(effects.mean() if gaps is None else effects.sum() / gaps.sum() + 0.0)


def bootstrap_interval(
    effects: np.ndarray, level: float, seed: int, gaps: np.ndarray | None = None
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (with gaps: of its share); NaN for fewer than two examples."""
    if len(effects) < 2:
        return np.nan, np.nan
    draws = np.random.default_rng(seed).integers(len(effects), size=(RESAMPLES, len(effects)))
    means = effects[draws].mean(1)
    if gaps is not None:
        divisors = gaps[draws].mean(1)
        means = means[np.abs(divisors) > NO_GAP] / divisors[np.abs(divisors) > NO_GAP]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2]) if len(means) else (np.nan, np.nan)
    return float(low), float(high)


def note_of_lengths(lengths: Sequence[int], columns: Sequence[str]) -> str | None:
    """Say it where a mean over examples is taken at places counted from the beginning of prompts unlike in length."""
    counted = [name for name in ("position", "key") if name in columns]
    if not counted or len(set(lengths)) < 2:
        return None
    return (
        f"Prompts of {min(lengths)} to {max(lengths)} tokens are averaged by {counted[0]}, counted from the beginning: "
        "a cell may hold other words of one prompt than of another, and fewer prompts than there are (`examples` "
        "counts them). Sweep prompts of one length, or a token of each with positions= and over='layer'."
    )


def note_of_gaps(table: pd.DataFrame, columns: Sequence[str], measure: str) -> str | None:
    """Say it where pairs of hardly any gap stand in a mean of ratios."""
    if measure != "normalized_effect" or table["example"].nunique() < 2:
        return None
    gaps = gaps_of(table).abs()
    typical = gaps.groupby([table[name] for name in columns], dropna=False).transform("median")
    small = sorted(table["example"][(gaps < SMALL_GAP * typical).to_numpy()].unique().tolist())
    if not small:
        return None
    return (
        f"The two runs of pair{'s' * (len(small) > 1)} {', '.join(map(str, small[:8]))} differ by less than a tenth of "
        "what the others' do: such a pair's normalized effect weighs more than theirs. "
        "Use normalize='ratio of means', or leave it out."
    )


def sign_flip_p(effects: np.ndarray, seed: int) -> float:
    """Two-sided p of a mean this far from 0 when each example's effect could as well have had the other sign.

    All sign patterns are counted up to 12 examples, 10,000 random ones beyond (the observed one among them).
    """
    n = len(effects)
    if n < 2:
        return np.nan
    if n <= 12:
        signs = np.array(list(product([1.0, -1.0], repeat=n)))
    else:
        signs = np.random.default_rng(seed).choice([1.0, -1.0], size=(FLIPS, n))
        signs[0] = 1.0
    observed = abs(effects.sum())
    return float((np.abs(signs @ effects) >= observed * (1 - 1e-12)).mean())


def agreement(approximate: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Correlate two sweeps over the same cells; see `Sweep.agreement`."""
    named = ("example", "site", "layer", "position", "head", "kv_head", "key", "window", "metric")
    keys = [name for name in named if name in exact.columns]
    if any(name not in approximate.columns for name in keys):
        raise InputError("The two sweeps do not run over the same axes.")
    both = approximate[[*keys, "effect"]].merge(exact[[*keys, "effect"]], on=keys, suffixes=("", "_exact"))
    if len(both) != len(exact) or len(both) != len(approximate):
        raise InputError(f"The two sweeps share {len(both)} cells of {len(approximate)} and {len(exact)}.")
    rows = []
    for (site, metric), part in both.groupby(["site", "metric"], sort=False):
        x, y = part["effect"].to_numpy(), part["effect_exact"].to_numpy()
        varied = len(part) > 2 and np.ptp(x) > 0 and np.ptp(y) > 0
        pearson = stats.pearsonr(x, y).statistic if varied else np.nan
        spearman = stats.spearmanr(x, y).statistic if varied else np.nan
        felt = np.abs(y) > 1e-6 * np.abs(y).max()
        same_sign = float((np.sign(x) == np.sign(y))[felt].mean()) if felt.any() else np.nan
        rows.append([site, metric, len(part), pearson, spearman, same_sign])
    return pd.DataFrame(rows, columns=["site", "metric", "cells", "pearson", "spearman", "sign_agreement"])
