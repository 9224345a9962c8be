"""Whether a claim holds: the effect of a chosen set, compared with chance, other ablations and other prompts.

Computed from the effects of a set on prompts, and of everything it is compared with (both from the caller):

1. effect        the mean over prompts, with its bootstrap interval (`low`, `high`)
2. placebo       the mean size |effect| of random sets that are like it (`placebo_high`: its 95 % quantile);
                 p = (1 + placebos of at least this size) / (1 + placebos)
3. other_ablation  the effect under another kind of values
4. split_half    how consistently two halves of the prompts rank the parts that could have been chosen: the mean over
                 random halves of Spearman's correlation between the halves' mean effects
5. held_out      the effect on prompts that were not used to choose the set
6. margin        how large an effect has to be to matter; by default `placebo_high`. "Not zero" is not importance

A claim holds if the whole interval lies beyond the margin, p ≤ 0.05, the other ablation (if any) has the same sign, and
the effect on held-out prompts (if any) has the same sign and is beyond the margin too. From six prompts on, random
signs of the prompts' effects must also give such a mean in at most 5 % of cases: the bootstrap interval is too narrow
for few prompts, and alone it would let more than that pass. If all else holds and no random set has an effect as large,
but there are too few of them for p ≤ 0.05, the claim is not decided (`holds` is False). A set that was chosen because
it is strong beats random sets by selection alone: p is a p-value only with held-out prompts, or for a set that was
named before any measurement.
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
from headwater.stats.discrimination import spearman
from headwater.stats.resample import Bootstrap, interval
from headwater.stats.significance import sign_flip_p

LARGEST_P = 0.05
FEWEST_SIGNS = 6
"""With fewer prompts no draw of their signs is as rare as 5 %."""
TOO_FEW = 19
"""With fewer random sets no p is 0.05 or less."""
PLACEBO_QUANTILE = 0.95
VERDICTS = HOLDS, FAILS, OPEN = "holds", "does not hold", "is not decided"
UNDECIDED = "no random set has an effect as large, but there are too few of them"
RESAMPLES = 2000
SPLITS = 100


@dataclass(frozen=True)
class ClaimEffects:
    """The effects that decide a claim; NaN where a prompt has none."""

    effects: Float[ndarray, " example"]
    """Effects of the set, by prompt."""
    placebos: Float[ndarray, "draw example"]
    """Effects of random sets that are like it, on the same prompts."""
    other_ablation: Float[ndarray, " _"] | None = None
    """Effects of the set under another kind of values."""
    parts: Float[ndarray, "example _"] | None = None
    """Effects of everything that could have been chosen, by prompt."""
    held_out: Float[ndarray, " _"] | None = None
    """Effects of the set on other prompts."""


def claim_of(
    evidence: ClaimEffects,
    *,
    what: str = "The set",
    margin: float | None = None,
    seed: int = 0,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Judge a claim from measured effects; return the fields of `headwater.runs.Claim` except its run.

    The sentence begins with `what`, the set in words. The margin is by default the 95 % quantile of the placebos'
    sizes; the seed is for the bootstrap and the random halves; notes are appended to the verdict.
    """
    effects = _known(evidence.effects)
    if not len(effects):
        raise InputError(f"{what}: no effect can be computed, because no prompt has all of the cells.")
    # The size of each placebo's mean effect; placebos that no prompt has are dropped.
    placebos = _known(np.abs(means_of(evidence.placebos.T))) if evidence.placebos.size else np.zeros(0)
    if not len(placebos) and margin is None:
        raise InputError("No comparable random set exists: give margin=, or sample from more cells.")
    effect, low, high = interval(Bootstrap.of(range(len(effects)), draws=RESAMPLES, seed=seed).mean(effects))
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
    failed = _failures(row, evidence, len(placebos))
    by_signs = sign_flip_p(effects, seed) if not failed and len(effects) >= FEWEST_SIGNS else 0.0
    if by_signs > LARGEST_P:
        failed.append(f"random signs of the effects give as large a mean (p = {by_signs:.2g})")
    row["holds"] = not failed
    counts = len(effects), len(placebos), 0 if evidence.held_out is None else len(_known(evidence.held_out))
    because = "; ".join([*failed, *notes])
    found = OPEN if failed == [UNDECIDED] else FAILS if failed else HOLDS
    verdict = f"With a margin of {row['margin']:.2g} the claim {found}"
    verdict += f" ({because})." if because else "."
    sentences = [_measured(what, row, counts), verdict]
    return {"table": pd.DataFrame([row]), "what": what, "sentences": sentences, "notes": list(notes)}


def notes_of_few(sets: int, drawn: int, are: str = "comparable random sets", advice: str = "") -> list[str]:
    """Return a note that random sets are too few for a small p; none if there are enough, or no sets at all.

    `drawn` is the number of sets that were to be drawn; `advice` is for too few comparable sets.
    """
    advice = f"; placebos={TOO_FEW} or more may decide" if sets == drawn else advice
    return [f"only {sets} {are}, so p is at least {1 / (1 + sets):.2g}{advice}"] if 0 < sets < TOO_FEW else []


def notes_of_seen(seen: Sequence[int], what: str) -> list[str]:
    """Return a note on the prompts, by number, that were used to choose the claimed set; none if there are none."""
    some = ", ".join(map(str, seen[:8]))
    what = f"prompt{'s' * (len(seen) != 1)} used to select the {what}, so not held out"
    return [f"{len(seen)} {what} ({some})"] if len(seen) else []


def split_half(parts: Float[ndarray, "example part"], seed: int) -> float:
    """Return the mean rank correlation of the parts' mean effects between random halves of the prompts.

    NaN for fewer than four prompts or three parts that both halves have.
    """
    n = len(parts)
    if n < 4:
        return float("nan")
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(SPLITS):
        order = rng.permutation(n)
        found.append(float(spearman(means_of(parts[order[: n // 2]]), means_of(parts[order[n // 2 :]]))))
    return _mean(np.array(found))


def means_of(parts: Float[ndarray, " example *part"]) -> Float[ndarray, " *part"]:
    """Return the mean of each part over the prompts that have it; NaN if none has."""
    counts = (~np.isnan(parts)).sum(0)
    return np.where(counts > 0, np.nansum(parts, 0) / np.maximum(counts, 1), np.nan)


def _failures(row: dict[str, Any], evidence: ClaimEffects, n_placebos: int) -> list[str]:
    """Return the criteria that a claim fails."""
    sign = 1.0 if row["effect"] >= 0 else -1.0
    near = row["low"] if sign > 0 else -row["high"]
    failed = []
    if np.isnan(near):
        failed.append("one prompt has no interval")
    elif not near > row["margin"]:
        failed.append("the interval includes values within the margin")
    if not row["p_value"] <= LARGEST_P:
        as_large = f"random sets have an effect as large (p = {row['p_value']:.2g})"
        # The least p of so many sets: none of them reaches the effect.
        as_large = UNDECIDED if row["p_value"] == 1 / (1 + n_placebos) else as_large
        failed.append("there are no comparable random sets" if np.isnan(row["placebo"]) else as_large)
    if evidence.other_ablation is not None and not sign * row["other_ablation"] > 0:
        failed.append("the other ablation does not have the same sign")
    if evidence.held_out is not None and not sign * row["held_out"] > row["margin"]:
        within = "the effect on held-out prompts does not exceed the margin"
        failed.append("no prompt is held out" if np.isnan(row["held_out"]) else within)
    return failed


def _measured(what: str, row: dict[str, Any], counts: tuple[int, int, int]) -> str:
    """Describe the measurements in one sentence."""
    n, n_placebos, n_held_out = counts
    sentence = f"{what}: effect {row['effect']:.3g}"
    if not np.isnan(row["low"]):
        sentence += f" (95 % interval {row['low']:.3g} to {row['high']:.3g})"
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
