"""Effects over examples: means, bootstrap intervals, sign-flip permutation tests, and how two sweeps agree."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
from scipy import stats

from headwater.errors import InputError
from headwater.options import checked_number

RESAMPLES = 2000
FLIPS = 10_000


def summarize(table: pd.DataFrame, coordinates: list[str], value: str, level: float, seed: int) -> pd.DataFrame:
    """Summarize each cell over examples; see `Sweep.summary`."""
    if value not in ("effect", "normalized_effect") or value not in table.columns:
        raise InputError(
            f"value={value!r} is not a column that can be summarized; use 'effect' or 'normalized_effect'."
        )
    checked_number("level", level, above=0.0, below=1.0)
    rows = []
    for cell, part in table.groupby(coordinates, sort=False, dropna=False):
        effects = part[value].dropna().to_numpy()
        low, high = bootstrap_interval(effects, level, seed)
        mean = effects.mean() if len(effects) else np.nan
        rows.append([*cell, len(effects), mean, low, high, sign_flip_p(effects, seed)])
    summary = pd.DataFrame(rows, columns=[*coordinates, "examples", "mean", "low", "high", "p_value"])
    return summary.astype({name: table[name].dtype for name in coordinates})


def bootstrap_interval(effects: np.ndarray, level: float, seed: int) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; NaN for fewer than two examples."""
    if len(effects) < 2:
        return np.nan, np.nan
    draws = np.random.default_rng(seed).integers(len(effects), size=(RESAMPLES, len(effects)))
    low, high = np.quantile(effects[draws].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


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
    keys = [
        n for n in ("example", "site", "layer", "position", "head", "key", "window", "metric") if n in exact.columns
    ]
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
