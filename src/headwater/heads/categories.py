"""From scores to categories: which head implements which relation, and what a head is called for it.

A head belongs to a category when it implements, or suppresses, at least one relation of that category.

- `rule="published"` (Elhelo & Geva, ACL 2025): a relation counts when its score reaches the threshold.
- `rule="controlled"`: the score reaches the threshold, the null model of `nulls` is rejected at a false-discovery rate
  of 5 % over all heads, relations and both signs, and the score still reaches the threshold when only those items count
  whose target beats the source itself. Where only this last condition fails the head is copying, and is marked so.
"""

import numpy as np
import pandas as pd

from headwater.errors import InputError, did_you_mean
from headwater.heads.relations import CATEGORIES

RULES = ("controlled", "published")
UNCLASSIFIED = "unclassified"
LABELS = (UNCLASSIFIED, *CATEGORIES, "2 categories", "3 categories", "4 categories")
FALSE_DISCOVERY_RATE = 0.05


def check_rule(rule: str) -> None:
    """Refuse a rule that does not exist.

    Raises:
        InputError: with the nearest valid name.
    """
    if rule not in RULES:
        raise InputError(f"The rule {rule!r} does not exist.{did_you_mean(rule, RULES)}")


def apply_rule(table: pd.DataFrame, rule: str, threshold: float) -> pd.DataFrame:
    """Return the flags of each row of a score table: implemented, suppressed, copying.

    Args:
        table: a row per layer, head and relation, with score, suppression and, for the controlled rule, q_value,
            beyond_copying and the same two of the suppression side.
        rule: "published" or "controlled".
        threshold: the share of items from which on a relation counts.
    """
    check_rule(rule)
    reached = {sign: table[sign] >= threshold for sign in ("score", "suppression")}
    if rule == "published":
        flags = {"implemented": reached["score"], "suppressed": reached["suppression"], "copying": False}
        return pd.DataFrame(flags, index=table.index)
    found = {
        "score": reached["score"] & (table["q_value"] <= FALSE_DISCOVERY_RATE),
        "suppression": reached["suppression"] & (table["suppression_q_value"] <= FALSE_DISCOVERY_RATE),
    }
    beyond = {
        "score": table["beyond_copying"] >= threshold,
        "suppression": table["suppression_beyond_copying"] >= threshold,
    }
    copying = [found[sign] & ~beyond[sign] for sign in found]
    return pd.DataFrame(
        {
            "implemented": found["score"] & beyond["score"],
            "suppressed": found["suppression"] & beyond["suppression"],
            "copying": copying[0] | copying[1],
        }
    )


def head_categories(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per layer and head: its `categories`, a tuple in the order of `CATEGORIES`, and its `label`.

    Args:
        table: a row per layer, head and relation, with category, implemented and suppressed.
    """
    heads = table[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"], ignore_index=True)
    found = table[(table["implemented"] | table["suppressed"]) & table["category"].notna()]
    of_head = found.groupby(["layer", "head"])["category"].agg(set).to_dict()
    places = zip(heads["layer"], heads["head"], strict=True)
    categories = [tuple(name for name in CATEGORIES if name in of_head.get(place, ())) for place in places]
    cells = np.empty(len(heads), dtype=object)
    cells[:] = categories
    return heads.assign(categories=cells, label=[label_of(names) for names in categories])


def label_of(categories: tuple[str, ...]) -> str:
    """Return what the figure calls a head with these categories."""
    if len(categories) > 1:
        return f"{len(categories)} categories"
    return categories[0] if categories else UNCLASSIFIED


def label_counts(categories: pd.DataFrame) -> dict[str, int]:
    """Return the number of heads of every label, in the order of `LABELS`."""
    counts = categories["label"].value_counts()
    return {label: int(counts.get(label, 0)) for label in LABELS}
