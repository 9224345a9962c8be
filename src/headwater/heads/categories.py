"""From scores to categories: which head implements which relation, and what a head is called for it.

A head belongs to a category when it implements, or suppresses, at least one relation of that category.

- `rule="published"` (Elhelo & Geva, ACL 2025): a relation counts when its score reaches the threshold.
- `rule="controlled"`: the chance-corrected score, `excess`, reaches the threshold (`chance_corrected`: how far the head
  has come from what its habits score to perfection); shuffled targets (`stats.significance`) are rejected at a
  false-discovery rate of 5 % over all heads, relations and both signs; and the excess still reaches the threshold when
  only those items count as hits whose target beats the source itself. Where only this last condition fails the head is
  copying, and is marked so. A head without habits has excess = score: the threshold means what it does in the
  publication.
"""

import numpy as np
import pandas as pd

from headwater.heads.relations import CATEGORIES
from headwater.options import checked_name
from headwater.stats.significance import Numbers, chance_corrected

RULES = ("controlled", "published")
UNCLASSIFIED = "unclassified"
LABELS = (UNCLASSIFIED, *CATEGORIES, "2 categories", "3 categories", "4 categories")
FALSE_DISCOVERY_RATE = 0.05
PREFIXES = {"score": "", "suppression": "suppression_"}
"""What the names of a sign's columns begin with, but for the score itself."""
THRESHOLDS = (0.10, 0.15, 0.20, 0.25, 0.30)
"""Where `sensitivity` looks."""


def apply_rule(table: pd.DataFrame, rule: str, threshold: float) -> pd.DataFrame:
    """Return the flags of each row of a score table: implemented, suppressed, copying.

    Args:
        table: a row per layer, head and relation, with score, suppression and, for the controlled rule, expected,
            excess, q_value, beyond_copying and the same four of the suppression side.
        rule: "published" or "controlled".
        threshold: the score, or the excess, from which on a relation counts.

    Raises:
        InputError: the rule does not exist.
    """
    checked_name("rule", rule, RULES)
    if rule == "published":
        flags = {"implemented": table["score"] >= threshold, "suppressed": table["suppression"] >= threshold}
        return pd.DataFrame(flags | {"copying": False}, index=table.index)
    found, beyond = {}, {}
    for sign, prefix in PREFIXES.items():
        is_found = table[f"{prefix}q_value"] <= FALSE_DISCOVERY_RATE
        found[sign] = is_found & (table[f"{prefix}excess"] >= threshold)
        beyond[sign] = _excess(table, f"{prefix}beyond_copying", prefix) >= threshold
    copying = [found[sign] & ~beyond[sign] for sign in found]
    return pd.DataFrame(
        {
            "implemented": found["score"] & beyond["score"],
            "suppressed": found["suppression"] & beyond["suppression"],
            "copying": copying[0] | copying[1],
        }
    )


def add_excess(table: pd.DataFrame) -> pd.DataFrame:
    """Return a score table with the columns `excess` and `suppression_excess`, each behind what was expected."""
    table = table.copy()
    for sign, prefix in PREFIXES.items():
        place = list(table.columns).index(f"{prefix}expected") + 1
        table.insert(place, f"{prefix}excess", _excess(table, sign, prefix))
    return table


def _excess(table: pd.DataFrame, share: str, prefix: str) -> Numbers:
    """The chance-corrected values of a column of shares."""
    return chance_corrected(*(table[name].to_numpy(dtype=float) for name in (share, f"{prefix}expected")))


def best_excess(table: pd.DataFrame) -> pd.Series:
    """Return the largest excess among what each head implements or suppresses, by (layer, head); NaN for none.

    Args:
        table: a score table with its flags.
    """
    flags = {"excess": "implemented", "suppression_excess": "suppressed"}
    best = pd.concat([table[excess].where(table[flag]) for excess, flag in flags.items()], axis=1).max(axis=1)
    return best.groupby([table["layer"], table["head"]]).max()


def sensitivity(table: pd.DataFrame) -> pd.DataFrame:
    """Return how many heads each rule puts into each category, for thresholds from 0.10 to 0.30.

    Args:
        table: a score table; without a null model it has no numbers for the controlled rule.

    Returns:
        A row per rule and threshold: `rule, threshold, heads` (in any category), and a column per category, in which a
        head of several categories counts in each.
    """
    rules = [rule for rule in RULES if rule == "published" or table["q_value"].notna().any()]
    rows = []
    for rule in rules:
        for threshold in THRESHOLDS:
            flags = apply_rule(table, rule, threshold)
            found = table[(flags["implemented"] | flags["suppressed"]) & table["category"].notna()]
            counts = found.drop_duplicates(["layer", "head", "category"])["category"].value_counts()
            heads = len(found[["layer", "head"]].drop_duplicates())
            rows.append((rule, threshold, heads, *(int(counts.get(name, 0)) for name in CATEGORIES)))
    return pd.DataFrame(rows, columns=["rule", "threshold", "heads", *CATEGORIES])


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
