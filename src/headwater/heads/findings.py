"""What a head map shows: each relation's heads and best head, and sentences made of these numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from headwater.heads.categories import UNCLASSIFIED
from headwater.runs.findings import rounded


def best_heads(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per relation: how many heads implement or suppress it, and its best head.

    The best head of a relation has the largest excess, where there is one, else the highest score.

    Args:
        table: of a `HeadMap`.

    Returns:
        `relation, category, pairs, heads`, and of the best head `layer, head, score, expected, excess`.
    """
    found = table.loc[table["implemented"] | table["suppressed"], "relation"].value_counts()
    strength = table["excess"].fillna(table["score"]).groupby(table["relation"], sort=False)
    best = table.loc[strength.idxmax()].reset_index(drop=True)
    named = best[["relation", "category", "pairs"]].assign(heads=best["relation"].map(found).fillna(0).astype(int))
    return named.join(best[["layer", "head", "score", "expected", "excess"]])


def as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `best_heads` as JSON values."""
    return {
        "relation": row["relation"],
        "category": row["category"] if isinstance(row["category"], str) else None,
        "pairs": row["pairs"],
        "heads": row["heads"],
        "best_head": f"{row['layer']}.{row['head']}",
        "best_score": round(row["score"], 4),
        "best_expected": rounded(row["expected"]),
        "best_excess": rounded(row["excess"]),
    }


def sentences_of(findings: Mapping[str, Any]) -> list[str]:
    """Say what the findings of a head map show."""
    labels = {name: count for name, count in findings["labels"].items() if count and name != UNCLASSIFIED}
    classified = sum(labels.values())
    named = ", ".join(f"{count} {'in ' * name.endswith('categories')}{name}" for name, count in labels.items())
    first = f"{classified} of {findings['heads']} heads are classified under the {findings['rule']} rule"
    said = [f"{first}: {named}." if named else f"{first}: no head implements any of the relations."]
    found = [row for row in findings["relations"] if row["heads"]]
    if found:
        best = max(found, key=lambda row: row["best_score"] if row["best_excess"] is None else row["best_excess"])
        by_habit = "" if best["best_excess"] is None else f", where its habits would give {best['best_expected']:.0%}"
        said.append(
            f"{len(found)} of {len(findings['relations'])} relations are implemented by some head. The strongest is "
            f"head {best['best_head']}: it maps {best['best_score']:.0%} of {best['relation']} right{by_habit}."
        )
    if findings["rule"] == "published":
        said.append(
            "The published rule looks at the score alone: a head that writes the same few tokens whatever it reads "
            "scores too, and nothing here says by how much."
        )
    missing = [row["relation"] for row in findings["relations"] if not row["heads"]]
    if missing:
        said.append(f"No head was found for: {', '.join(missing)}.")
    if findings["left_out"]:
        said.append(f"Too few pairs of single tokens to be scored: {', '.join(findings['left_out'])}.")
    return said
