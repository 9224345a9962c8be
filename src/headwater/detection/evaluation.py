"""How well scores tell wrong answers from right ones: AUCs with intervals over questions, and a paragraph on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headwater.stats.discrimination import against_chance, auc
from headwater.stats.resample import Bootstrap, percentile_interval

NAMES = {
    "question": "relation, popularity",
    "p_true": "P(True)",
    "logit_mean": "logit mean",
    "logit_min": "logit min",
    "probe": "single probe",
    "random_gate": "MoP, random gate",
    "vanilla_experts": "MoP, any experts",
    "mop": "mixture of probes (MoP)",
    "pr": "pathway reweighting (PR)",
}
"""What a reader is shown of each method."""


def evaluate(
    scores: pd.DataFrame, questions: pd.Series, methods: Sequence[str], notes: Mapping[str, str]
) -> pd.DataFrame:
    """Measure the AUC of every method on one question set, with intervals over its questions.

    Args:
        scores: rows of `Detection.scores` of one set; `example` is the index of `questions`.
        questions: the text of every question of the set.
        methods: columns of `scores`.
        notes: by method.

    Returns:
        Rows of `Detection.table`.
    """
    draws = Bootstrap.of(questions)
    places = pd.Series(np.arange(len(questions)), index=questions.index)
    seeds = [part for _, part in scores.groupby("seed")]

    def aucs(method: str) -> NDArray[np.float64]:
        """The AUC in every resample, averaged over seeds."""
        per_seed = [
            auc(
                part[method].to_numpy(),
                part["z"].to_numpy(),
                counts=draws.per_example(places.loc[part["example"]].to_numpy()),
            )
            for part in seeds
            if part[method].notna().all()
        ]
        return np.mean(per_seed, axis=0) if per_seed else np.full(len(draws.counts), np.nan)

    drawn = np.stack([aucs(method) for method in methods], axis=1)
    probe = drawn[:, [methods.index("probe")]] if "probe" in methods else np.full((len(drawn), 1), np.nan)
    columns = dict(zip(("auc", "low", "high"), (drawn[0], *percentile_interval(drawn)), strict=True))
    gain = drawn - probe
    columns |= dict(zip(("gain", "gain_low", "gain_high"), (gain[0], *percentile_interval(gain)), strict=True))
    sizes = {"answers": len(scores) / len(seeds), "wrong": scores["z"].sum() / len(seeds)}
    named = {"dataset": scores["dataset"].iloc[0], "method": methods}
    return pd.DataFrame(named | columns | sizes | {"note": [notes.get(method, "") for method in methods]})


def paragraph(dataset: str, table: pd.DataFrame) -> str:
    """Say of one question set which method does best, and what the modes add to a single probe."""
    measured = table[table["auc"].notna()].sort_values("auc", ascending=False)
    if measured.empty:
        return f"{dataset}: no method could be measured."
    best = measured.iloc[0]
    reached = f"AUC {best['auc']:.3f}, {best['low']:.3f} to {best['high']:.3f}"
    chance = against_chance(best["low"], best["high"])
    many = f"of {len(measured)} methods " if len(measured) > 1 else ""
    sentences = [
        f"{dataset}: of {best['answers']:,.0f} test answers {best['wrong']:,.0f} are wrong; {many}"
        f"{NAMES[best['method']]} tells them apart best ({reached}{f'; {chance}' if chance else ''})."
    ]
    found: dict[str, Any] = {row["method"]: row for row in measured.to_dict("records")}
    sentences += [
        f"{_begun(NAMES[name])} {_verdict(found[name])} the single probe ({_signed(found[name])})."
        for name in ("mop", "pr")
        if name in found and np.isfinite(found[name]["gain"])
    ]
    if "question" in found and "probe" in found:
        alone = found["question"]
        reached = f"AUC {alone['auc']:.3f}, {alone['low']:.3f} to {alone['high']:.3f}"
        sentences.append(
            f"Relation and popularity alone ({reached}): this {_verdict(alone)} the probe ({_signed(alone)})."
        )
    notes = table[table["note"] != ""]
    sentences += [f"Note on {NAMES[row['method']]}: {row['note'].rstrip('.')}." for row in notes.to_dict("records")]
    return " ".join(sentences)


def _begun(name: str) -> str:
    """A name as the first word of a sentence; what is short for it keeps its letters."""
    return name[:1].upper() + name[1:]


def _verdict(row: Mapping[str, Any]) -> str:
    if row["gain_low"] > 0:
        return "does better than"
    return "does worse than" if row["gain_high"] < 0 else "is indistinguishable from"


def _signed(row: Mapping[str, object]) -> str:
    return f"{row['gain']:+.3f}, {row['gain_low']:+.3f} to {row['gain_high']:+.3f}"
