"""What saliency shows of a question set: medians, how many examples are near zero and why, one peak or several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import pandas as pd

from headwater.stats.dip import critical_dip, dip

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
    return {
        **medians,
        "near_zero": {target: round(float(near.mean()), 4) for target, near in near_zero.items()},
        "saturated": round(float((~near_zero["logit"][at_zero]).mean()), 4) if at_zero.any() else None,
        "several_peaks": several,
    }


def rows_of_entry(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Lay out what was found of one set, a row per kind of edge and target; kinds without a value have one of Nones."""
    for column, edges in zip(COLUMNS, EDGES, strict=True):
        found = entry[column] or {}
        for target in TARGETS:
            yield {
                "dataset": entry["dataset"],
                "edges": edges,
                "target": target,
                "examples": entry["examples"],
                "median_right": found.get(f"median_{target}_right"),
                "median_wrong": found.get(f"median_{target}_wrong"),
                "near_zero": found.get("near_zero", {}).get(target),
                "several_peaks": found.get("several_peaks", {}).get(target),
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
        found = entry[column]
        if found is None:
            yield f"{name}: {edges} has no value: it was not asked for, or the probe cannot depend on these edges."
            continue
        right, wrong = found["median_logit_right"], found["median_logit_wrong"]
        if right and wrong is not None:
            yield f"{name}: {edges} of the logit is {wrong / right:.2f} times as large for wrong answers as for right."
        near, saturated = found["near_zero"], found["saturated"]
        why = (
            f", of which {saturated:.0%} have a probe that is sure and right and a flow like the others"
            if saturated
            else ""
        )
        yield (
            f"{name}: {near['cross_entropy']:.1%} of the examples are near zero in {edges} of the cross-entropy{why}; "
            f"{near['logit']:.1%} with the logit."
        )
        entropy, logit = (
            "more than one peak" if several else "one peak" for several in found["several_peaks"].values()
        )
        yield f"{name}: by the dip test {edges} has {entropy} with the cross-entropy and {logit} with the logit."
