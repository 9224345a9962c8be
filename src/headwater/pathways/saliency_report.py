"""What saliency shows of a question set: medians, how many examples are near zero and why, one peak or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headwater.stats.dip import critical_dip, dip
from headwater.stats.discrimination import CHANCE
from headwater.stats.resample import DRAWS
from headwater.stats.significance import wilson_interval

LossName: TypeAlias = Literal["cross_entropy", "logit"]
TARGETS = get_args(LossName)
EDGES = ("exact_answer", "all")
COLUMNS = tuple(f"saliency_{name}" for name in EDGES)
NEAR_ZERO = 0.1
"""An example is near zero when its saliency is less than this share of its set's mean."""


def summary_of(rows: pd.DataFrame, column: str) -> dict[str, object] | None:
    """Describe one kind of edge in one set; None where it has no value."""
    if rows.empty:
        return None
    by_target = {target: rows[rows["target"] == target].set_index("example") for target in TARGETS}
    near_zero = {target: part[column] < NEAR_ZERO * part[column].mean() for target, part in by_target.items()}
    medians = {
        f"median_{target}_{name}": float(part.loc[part["z"] == kind, column].median())
        if (part["z"] == kind).any()
        else None
        for target, part in by_target.items()
        for kind, name in enumerate(("right", "wrong"))
    }
    at_zero = near_zero["cross_entropy"]
    several = {t: len(p) > 1 and dip(p[column].to_numpy()) > critical_dip(len(p)) for t, p in by_target.items()}
    flow = by_target["logit"]
    return {
        **medians,
        "right": int((flow["z"] == 0).sum()),
        "wrong": int((flow["z"] == 1).sum()),
        "times": _times(*(flow.loc[flow["z"] == kind, column].to_numpy() for kind in (1, 0))),
        "near_zero": {target: round(float(near.mean()), 4) for target, near in near_zero.items()},
        "saturated": round(float((~near_zero["logit"][at_zero]).mean()), 4) if at_zero.any() else None,
        "several_peaks": several,
    }


def _times(wrong: NDArray[np.float64], right: NDArray[np.float64]) -> list[float] | None:
    """How many times the median of right answers that of wrong ones is, with its 95 % interval over examples."""
    if min(len(wrong), len(right)) < 2 or not np.median(right):
        return None
    rng = np.random.default_rng(0)
    top, bottom = (
        np.median(values[rng.integers(len(values), size=(DRAWS, len(values)))], 1) for values in (wrong, right)
    )
    # A drawn median of 0 has no ratio, and would make the interval infinite.
    drawn = top[bottom > 0] / bottom[bottom > 0]
    ends = np.quantile(drawn, [0.025, 0.975]) if len(drawn) else (0.0, np.inf)
    return [float(np.median(wrong) / np.median(right)), *map(float, ends)]


def rows_of_entry(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Lay out what was found of one set, a row per kind of edge and target; kinds without a value have one of Nones."""
    for column, edges in zip(COLUMNS, EDGES, strict=True):
        measured = entry[column] or {}
        for target in TARGETS:
            yield {
                "dataset": entry["dataset"],
                "edges": edges,
                "target": target,
                "examples": entry["examples"],
                "median_right": measured.get(f"median_{target}_right"),
                "median_wrong": measured.get(f"median_{target}_wrong"),
                "near_zero": measured.get("near_zero", {}).get(target),
                "several_peaks": measured.get("several_peaks", {}).get(target),
            }


def held_out_sentence(table: pd.DataFrame, probe: dict[str, object]) -> str:
    """Say whether the probe had seen the examples that it measures."""
    examples = table.drop_duplicates("example")
    unknown = 0 if probe.get("fitted_on") else int((examples["fold"] == -1).sum())
    if unknown:
        return (
            "The probe does not say which answers it was fitted on: where these are among them, a peak near zero in "
            "the cross-entropy may be its memory."
        )
    return f"All {len(examples):,} examples are measured by coefficients of the probe that were not fitted on them."


def sentences_of(entry: dict[str, Any]) -> Iterator[str]:
    """Say what the summary of one set shows."""
    name = entry["dataset"]
    for column, edges in zip(COLUMNS, ("S(E_Q→E_A)", "S(E_Q→*)"), strict=True):
        measured = entry[column]
        if measured is None:
            yield f"{name}: {edges} has no value: it was not requested, or the probe cannot depend on these edges."
            continue
        if measured["times"] is not None:
            times, low, high = measured["times"]
            chance = f", {CHANCE}" if low <= 1 <= high else ""
            yield (
                f"{name}: {edges} of the logit is {times:.2f} ({low:.2f} to {high:.2f}) times as large for "
                f"{measured['wrong']:,} wrong answers as for {measured['right']:,} right ones{chance}."
            )
        near, saturated = measured["near_zero"], measured["saturated"]
        why = (
            f", of which {saturated:.0%} have a probe that is sure and right and a flow like the others"
            if saturated
            else ""
        )
        n = measured["right"] + measured["wrong"]
        entropy, logit = (_percent(near[target], n) for target in TARGETS)
        yield (
            f"{name}: {entropy} of {n:,} examples are near zero in {edges} of the cross-entropy{why}; {logit} with the "
            "logit."
        )
        entropy, logit = (
            "more than one peak" if several else "one peak" for several in measured["several_peaks"].values()
        )
        yield f"{name}: by the dip test {edges} has {entropy} with the cross-entropy and {logit} with the logit."


def _percent(share: float, n: int) -> str:
    low, high = (100 * float(end) for end in wilson_interval(np.array(share * n), np.array(n)))
    return f"{share:.1%} ({low:.0f} to {high:.0f})"
