"""From scores to categories: which head implements which relation, and the label that this gives the head.

A head belongs to a category when it implements, or suppresses, at least one relation of that category.

- `rule="published"` (Elhelo & Geva, ACL 2025): a relation counts when its score reaches the threshold.
- `rule="controlled"`: a relation counts when three conditions hold. (1) The chance-corrected score, `excess`, reaches
  the threshold (`chance_corrected`: 0 is the score expected with shuffled targets, which a head reaches by favouring
  the same tokens for every source, 1 a perfect score). (2) The null of shuffled targets (`stats.significance`) is
  rejected at a false-discovery rate of 5 % over all heads, relations and both signs. (3) The excess still reaches the
  threshold when an item is a hit only if its target beats the source itself. If only (3) fails, the head is copying,
  and `copying` is set. If the expected score is 0, excess = score, so the threshold means the same as in the
  publication.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from headwater.colors import BLUE, GREEN, ORANGE, RED
from headwater.options import checked_name
from headwater.registry import Registry
from headwater.stats.significance import Numbers, chance_corrected


@dataclass(frozen=True)
class Category:
    """A kind of relation, and how its heads are drawn.

    `color` is a matplotlib colour and `mark` a matplotlib marker; both encode the category.
    """

    color: str
    mark: str


CATEGORIES: Registry[str, Category] = Registry("category")
"""The categories, in the order of tables and legends. `CATEGORIES.add("arithmetic", Category("#8c5a3c", "v"))` adds
one: relations may then use it, and head maps count and draw it."""
CATEGORIES.add("algorithmic", Category(BLUE, "s"))
CATEGORIES.add("knowledge", Category(ORANGE, "o"))
CATEGORIES.add("linguistic", Category(GREEN, "^"))
CATEGORIES.add("translation", Category(RED, "D"))
PUBLISHED_CATEGORIES = {
    name: category
    for category, names in {
        "algorithmic": "general_copying_english_500 name_copying word_first_letter word_last_letter year_to_following",
        "knowledge": "country_to_capital_wikidata country_to_official_language_wikidata object_superclass "
        "product_by_company work_location",
        "linguistic": "adj_antonym adj_comparative adj_superlative verb_past_tense entity_to_pronoun word_to_synonym "
        "word_to_homophone word_to_compound",
        "translation": "english_to_french english_to_spanish",
    }.items()
    for name in names.split()
}
"""The category of every published relation."""
RULES = ("controlled", "published")
UNCLASSIFIED = "unclassified"
FALSE_DISCOVERY_RATE = 0.05
PREFIXES = {"score": "", "suppression": "suppression_"}
"""By sign, the prefix of its column names, except of the score itself."""
FLAGS = {"score": "implemented", "suppression": "suppressed"}
SAYS = {"score": "implements", "suppression": "suppresses"}
"""By sign: `FLAGS` names the flag column of a score table, `SAYS` the verb that describes the head."""


def apply_rule(table: pd.DataFrame, rule: str, threshold: float) -> pd.DataFrame:
    """Return the flags of each row of a score table: implemented, suppressed, copying.

    The threshold is the smallest score, or under the controlled rule the smallest excess, with which a relation counts.
    The controlled rule needs the columns expected, excess, q_value, beyond_copying, and the same four for suppression.
    """
    checked_name("rule", rule, RULES)
    if rule == "published":
        reached = {flag: table[sign] >= threshold for sign, flag in FLAGS.items()}
        return pd.DataFrame(reached | {"copying": False}, index=table.index)
    flags, copying = {}, []
    for sign, prefix in PREFIXES.items():
        is_found = (table[f"{prefix}q_value"] <= FALSE_DISCOVERY_RATE) & (table[f"{prefix}excess"] >= threshold)
        is_beyond = _excess(table, f"{prefix}beyond_copying", prefix) >= threshold
        flags[FLAGS[sign]] = is_found & is_beyond
        copying.append(is_found & ~is_beyond)
    return pd.DataFrame(flags | {"copying": copying[0] | copying[1]})


def by_sign(table: pd.DataFrame) -> pd.DataFrame:
    """Return a score table with a row per sign: `sign, called`, and that sign's `score, expected, excess, q_value`."""
    parts = []
    for sign, prefix in PREFIXES.items():
        columns = {"called": FLAGS[sign], "score": sign}
        columns |= {name: f"{prefix}{name}" for name in ("expected", "excess", "q_value")}
        parts.append(table.assign(sign=sign, **{name: table[column] for name, column in columns.items()}))
    return pd.concat(parts, ignore_index=True)


def add_excess(table: pd.DataFrame) -> pd.DataFrame:
    """Return a score table with the columns `excess` and `suppression_excess`, each after its expected column."""
    table = table.copy()
    for sign, prefix in PREFIXES.items():
        place = list(table.columns).index(f"{prefix}expected") + 1
        table.insert(place, f"{prefix}excess", _excess(table, sign, prefix))
    return table


def _excess(table: pd.DataFrame, share: str, prefix: str) -> Numbers:
    """Return the chance-corrected values of a column of shares."""
    return chance_corrected(*(table[name].to_numpy(dtype=float) for name in (share, f"{prefix}expected")))


def best_excess(table: pd.DataFrame) -> pd.Series:
    """Return, by (layer, head), the largest excess of any relation the head implements or suppresses; NaN for none."""
    called = [table[f"{PREFIXES[sign]}excess"].where(table[flag]) for sign, flag in FLAGS.items()]
    best = pd.concat(called, axis=1).max(axis=1)
    return best.groupby([table["layer"], table["head"]]).max()


def head_categories(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per layer and head: its `categories`, a tuple in the order of `CATEGORIES`, and its `label`."""
    heads = table[["layer", "head"]].drop_duplicates().sort_values(["layer", "head"], ignore_index=True)
    called = table[(table["implemented"] | table["suppressed"]) & table["category"].notna()]
    of_head = called.groupby(["layer", "head"])["category"].agg(set).to_dict()
    places = zip(heads["layer"], heads["head"], strict=True)
    categories = [tuple(name for name in CATEGORIES if name in of_head.get(place, ())) for place in places]
    # Filled in place, because numpy turns tuples of equal length into a two-dimensional array.
    cells = np.empty(len(heads), dtype=object)
    cells[:] = categories
    return heads.assign(categories=cells, label=[label_of(names) for names in categories])


def label_of(categories: tuple[str, ...]) -> str:
    """Return the label of a head with these categories in figures."""
    if len(categories) > 1:
        return f"{len(categories)} categories"
    return categories[0] if categories else UNCLASSIFIED


def labels() -> tuple[str, ...]:
    """Return the possible labels of a head: unclassified, one category, or a number of categories."""
    return (UNCLASSIFIED, *CATEGORIES, *(f"{several} categories" for several in range(2, len(CATEGORIES) + 1)))


def label_counts(categories: pd.DataFrame) -> dict[str, int]:
    """Return the number of heads with each label, in the order of `labels()`."""
    counts = categories["label"].value_counts()
    return {label: int(counts.get(label, 0)) for label in labels()}
