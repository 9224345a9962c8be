"""Does a claim hold? The effect of a chosen set, beside what chance, other ablations and other prompts say of it.

Of the effects of a set on prompts, given by the caller with those of everything it is compared with:

1. effect        the mean over prompts, with its bootstrap interval (`low`, `high`)
2. placebo       the mean size |effect| of sets drawn at random that are like it (`placebo_high`: its 95 % quantile);
                 p = (1 + placebos of at least this size) / (1 + placebos)
3. other_ablation  the effect under another kind of values
4. split_half    how the parts that one could have chosen are ranked by two halves of the prompts: the mean over random
                 halves of Spearman's correlation between the halves' mean effects
5. held_out      the effect on prompts that the choice has not seen
6. margin        how large an effect has to be to matter; by default `placebo_high`. "Not zero" is not importance

A claim holds where the whole interval lies beyond the margin, p ≤ 0.05, the other ablation (if there is one) has the
same sign, and the effect on held-out prompts (if there are any) has the same sign and is beyond the margin too. From
six prompts on, their signs drawn by lot must also reach such a mean in at most 5 % of cases: the bootstrap's interval
is too narrow where prompts are few, and alone it lets more than that pass. A set that was chosen because it is strong
beats random ones by the choice alone: only held-out prompts, or a set named before anything was measured, make p a
p-value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from numpy import ndarray

from headwater.errors import InputError
from headwater.stats.discrimination import FEWEST
from headwater.stats.resample import Bootstrap, interval
from headwater.stats.significance import sign_flip_p

LARGEST_P = 0.05
FEWEST_SIGNS = 6
"""With fewer prompts no draw of their signs is as rare as 5 %."""
TOO_FEW = 19
"""With fewer random sets no p is 0.05 or less."""
PLACEBO_QUANTILE = 0.95
RESAMPLES = 2000
SPLITS = 100


@dataclass(frozen=True)
class ClaimEffects:
    """The effects that a claim is judged by; NaN where a prompt has none."""

    effects: Float[ndarray, " example"]
    """Of the set, by prompt."""
    placebos: Float[ndarray, "draw example"]
    """Of sets drawn at random that are like it, on the same prompts."""
    other_ablation: Float[ndarray, " _"] | None = None
    """Of the set under another kind of values."""
    parts: Float[ndarray, "example _"] | None = None
    """Of everything that could have been chosen, by prompt."""
    held_out: Float[ndarray, " _"] | None = None
    """Of the set on other prompts."""


@dataclass(frozen=True)
class Judgement:
    """What was found of a claim."""

    what: str
    """The set, in words."""
    table: pd.DataFrame
    """One row: `effect, low, high, placebo, placebo_high, p_value, other_ablation, split_half, held_out, margin,
    holds`; NaN where nothing was given to measure it by."""
    measured: str
    """The numbers, as a sentence."""
    verdict: str
    """Whether the claim holds, as a sentence, with what it does not hold by and what weakens it."""
    level: float
    """Of the interval."""
    notes: tuple[str, ...]
    """What weakens the claim, such as prompts that discovery and test share; the verdict ends with them."""

    @property
    def holds(self) -> bool:
        """Whether the claim holds; see the first lines of this file."""
        return bool(self.table["holds"].iloc[0])

    @property
    def sentence(self) -> str:
        """Both sentences in one line."""
        return f"{self.measured} {self.verdict}"


def claim_of(
    evidence: ClaimEffects,
    *,
    what: str = "The set",
    margin: float | None = None,
    level: float = 0.95,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> Judgement:
    """Judge a claim by effects that were measured.

    The sentence begins with `what`, the set in words. The margin is by default the 95 % quantile of the placebos'
    sizes; the seed is that of the bootstrap and of random halves; notes are what else is to be said.
    """
    effects = _known(evidence.effects)
    if not len(effects):
        raise InputError(f"{what} has no effect that can be given: no prompt has all of its cells.")
    # The size of each one's mean effect; those that no prompt has fall out.
    placebos = _known(np.abs(means_of(evidence.placebos.T))) if evidence.placebos.size else np.zeros(0)
    if not len(placebos) and margin is None:
        raise InputError("No comparable random set exists: give margin=, or sample from more cells.")
    effect, low, high = interval(Bootstrap.of(range(len(effects)), draws=RESAMPLES, seed=seed).mean(effects), level)
    quantile = float(np.quantile(placebos, PLACEBO_QUANTILE)) if len(placebos) else np.nan
    row: dict[str, Any] = {
        "effect": effect,
        "low": low,
        "high": high,
        "placebo": float(placebos.mean()) if len(placebos) else np.nan,
        "placebo_high": quantile,
        "p_value": (1 + int((placebos >= abs(effect) * (1 - 1e-12)).sum())) / (1 + len(placebos)),
        "other_ablation": _mean(evidence.other_ablation),
        "split_half": split_half(evidence.parts, seed) if evidence.parts is not None else np.nan,
        "held_out": _mean(evidence.held_out),
        "margin": quantile if margin is None else float(margin),
    }
    failed = _failures(row, evidence)
    by_signs = sign_flip_p(effects, seed) if not failed and len(effects) >= FEWEST_SIGNS else 0.0
    if by_signs > LARGEST_P:
        failed.append(f"random signs give the prompts as large a mean (p = {by_signs:.2g})")
    row["holds"] = not failed
    counts = len(effects), len(placebos), 0 if evidence.held_out is None else len(_known(evidence.held_out))
    because = "; ".join([*failed, *notes])
    verdict = f"With a margin of {row['margin']:.2g} the claim {'does not hold' if failed else 'holds'}"
    verdict += f" ({because})." if because else "."
    return Judgement(what, pd.DataFrame([row]), _measured(what, row, counts, level), verdict, level, tuple(notes))


def notes_of_few(sets: int, are: str = "random sets are like it", advice: str = "") -> list[str]:
    """Say that random sets are too few for a small p; nothing where there are enough, or none."""
    return [f"only {sets} {are}, so p is at least {1 / (1 + sets):.2g}{advice}"] if 0 < sets < TOO_FEW else []


def notes_of_seen(seen: Sequence[int], what: str) -> list[str]:
    """Say which prompts, by number, chose what is claimed, and so are not held out; nothing where none did."""
    some = ", ".join(map(str, seen[:8]))
    what = f"prompt{'s' * (len(seen) != 1)} used to select the {what}, and so not held out"
    return [f"{len(seen)} {what} ({some})"] if len(seen) else []


def split_half(parts: Float[ndarray, "example part"], seed: int) -> float:
    """Return the mean rank correlation of the parts' mean effects between random halves of the prompts.

    NaN for fewer than four prompts or three parts that both halves have.
    """
    n = len(parts)
    if n < 4:
        return float("nan")
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(n) for _ in range(SPLITS)]
    halves = np.array([[means_of(parts[order[: n // 2]]), means_of(parts[order[n // 2 :]])] for order in orders])
    in_both = ~np.isnan(halves).any(1)
    from scipy.stats import rankdata  # half a second: not when headwater is imported

    ranks = rankdata(np.where(in_both[:, None], halves, np.nan), axis=-1, nan_policy="omit")
    # The mean of `spearman(first, second)` over splits, all at once: one by one costs as much as the rest of a claim.
    ranks = ranks[in_both.sum(-1) >= FEWEST]
    first, second = (ranks - np.nanmean(ranks, -1, keepdims=True)).swapaxes(0, 1)
    spread = np.sqrt(np.nansum(first**2, -1) * np.nansum(second**2, -1))
    found = np.nansum(first * second, -1)[spread > 0] / spread[spread > 0]
    return float(found.mean()) if len(found) else float("nan")


def means_of(parts: Float[ndarray, " example *part"]) -> Float[ndarray, " *part"]:
    """The mean of each part over the prompts that have it; NaN where none has."""
    counts = (~np.isnan(parts)).sum(0)
    return np.where(counts > 0, np.nansum(parts, 0) / np.maximum(counts, 1), np.nan)


def _failures(row: dict[str, Any], evidence: ClaimEffects) -> list[str]:
    """Say what a claim does not hold by."""
    sign = 1.0 if row["effect"] >= 0 else -1.0
    near = row["low"] if sign > 0 else -row["high"]
    failed = []
    if np.isnan(near):
        failed.append("one prompt has no interval")
    elif not near > row["margin"]:
        failed.append("the interval includes values within the margin")
    if not row["p_value"] <= LARGEST_P:
        failed.append(f"random sets have an effect as large (p = {row['p_value']:.2g})")
    if evidence.other_ablation is not None and not sign * row["other_ablation"] > 0:
        failed.append("the other ablation does not have the same sign")
    if evidence.held_out is not None and not sign * row["held_out"] > row["margin"]:
        failed.append("the effect on held-out prompts is not beyond the margin")
    return failed


def _measured(what: str, row: dict[str, Any], counts: tuple[int, int, int], level: float) -> str:
    """Say in one sentence what was measured."""
    n, n_placebos, n_held_out = counts
    sentence = f"{what}: effect {row['effect']:.3g}"
    if not np.isnan(row["low"]):
        sentence += f" ({100 * level:g} % interval {row['low']:.3g} to {row['high']:.3g})"
    sentence += f" over {n:,} prompt{'s' * (n != 1)}"
    if n_placebos:
        sentence += (
            f"; {n_placebos:,} matched random sets: mean {row['placebo']:.2g}, 95th percentile "
            f"{row['placebo_high']:.2g} (p = {row['p_value']:.2g})"
        )
    if not np.isnan(row["other_ablation"]):
        sentence += f"; {row['other_ablation']:.3g} under the other ablation"
    if not np.isnan(row["split_half"]):
        sentence += f"; split-half rank correlation of all cells {row['split_half']:.2f}"
    if not np.isnan(row["held_out"]):
        sentence += f"; {row['held_out']:.3g} on {n_held_out:,} held-out prompt{'s' * (n_held_out != 1)}"
    return f"{sentence}."


def _known(effects: ndarray) -> ndarray:
    return effects[~np.isnan(effects)]


def _mean(effects: ndarray | None) -> float:
    known = _known(effects) if effects is not None else np.zeros(0)
    return float(known.mean()) if len(known) else float("nan")
