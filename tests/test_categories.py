"""The two rules, and the categories and labels they give to heads."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InputError
from headwater.heads.categories import (
    CATEGORIES,
    add_excess,
    apply_rule,
    best_excess,
    head_categories,
    label_counts,
    labels,
)
from tests.made_up import made_up_table


def row(**values) -> pd.DataFrame:
    plain = {
        "layer": 0,
        "head": 0,
        "category": "knowledge",
        "score": 0.5,
        "expected": 0.0,
        "q_value": 0.001,
        "beyond_copying": 0.5,
        "suppression": 0.0,
        "suppression_expected": 0.0,
        "suppression_q_value": 1.0,
        "suppression_beyond_copying": 0.0,
    }
    return add_excess(pd.DataFrame([plain | values]))


def flags(rule: str, **values) -> set[str]:
    found = apply_rule(row(**values), rule, 0.15).iloc[0]
    return set(found.index[found.to_numpy(dtype=bool)])


def test_the_published_rule_looks_at_the_score_alone():
    assert flags("published", score=0.15, q_value=1.0, beyond_copying=0.0) == {"implemented"}
    assert flags("published", score=0.1499) == set()
    assert flags("published", score=0.0, suppression=0.2) == {"suppressed"}
    assert flags("published", q_value=np.nan, beyond_copying=np.nan) == {"implemented"}


def test_the_controlled_rule_wants_score_significance_and_more_than_copying():
    assert flags("controlled") == {"implemented"}
    assert flags("controlled", score=0.1499) == set()
    assert flags("controlled", q_value=0.051) == set()
    assert flags("controlled", beyond_copying=0.1) == {"copying"}
    assert flags("controlled", beyond_copying=0.1, q_value=0.2) == set()


def test_the_threshold_of_the_controlled_rule_acts_on_the_excess_of_either_sign():
    for score, expected in ((0.5, 0.42), (0.9, 0.89), (0.15, 0.001), (1.0, 1.0)):
        assert flags("published", score=score) == {"implemented"}
        assert flags("controlled", score=score, expected=expected, beyond_copying=score) == set()
        other = {"suppression": score, "suppression_expected": expected, "suppression_beyond_copying": score}
        assert flags("controlled", score=0.0, suppression_q_value=0.001, **other) == set()
    assert flags("controlled", score=0.5, expected=0.4, beyond_copying=0.5) == {"implemented"}


def test_what_a_habit_writes_above_the_source_is_no_evidence_against_copying():
    """Half of the hits are the habit's, and they alone beat the source; the others are copied."""
    assert flags("controlled", score=0.6, expected=0.3, beyond_copying=0.3) == {"copying"}
    assert flags("controlled", score=0.6, expected=0.3, beyond_copying=0.6) == {"implemented"}


def test_the_controlled_rule_treats_suppression_alike():
    suppressing = {"score": 0.0, "suppression": 0.3, "suppression_q_value": 0.01, "suppression_beyond_copying": 0.3}
    assert flags("controlled", **suppressing) == {"suppressed"}
    assert flags("controlled", **suppressing | {"suppression_q_value": 0.1}) == set()
    assert flags("controlled", **suppressing | {"suppression_beyond_copying": 0.1}) == {"copying"}


def test_a_score_of_exactly_the_threshold_counts():
    table = pd.DataFrame(
        [(hits, pairs) for pairs in range(30, 600) for hits in range(pairs)], columns=["hits", "pairs"]
    )
    table = table.assign(score=table["hits"] / table["pairs"], suppression=0.0)
    implemented = apply_rule(table, "published", 0.15)["implemented"]
    assert (implemented == (100 * table["hits"] >= 15 * table["pairs"])).all()


def test_an_unknown_rule_is_refused_with_the_nearest_name():
    with pytest.raises(InputError, match=r"rule='controled' is not one of .* Did you mean 'controlled'"):
        apply_rule(row(), "controled", 0.15)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from((*CATEGORIES, None)), st.booleans())))
def test_a_head_has_the_categories_of_what_it_implements_or_suppresses_and_its_label_counts_them(found):
    every_head = [(layer, head, "knowledge", False, False) for layer in range(3) for head in range(4)]
    rows = every_head + [(layer, head, name, sign, not sign) for layer, head, name, sign in found]
    table = pd.DataFrame(rows, columns=["layer", "head", "category", "implemented", "suppressed"]).sample(frac=1)
    heads = head_categories(table)
    assert list(zip(heads["layer"], heads["head"], strict=True)) == [(i, j) for i in range(3) for j in range(4)]
    for layer, head, categories, label in heads.itertuples(index=False):
        expected = {name for i, j, name, _ in found if (i, j) == (layer, head) and name is not None}
        assert set(categories) == expected
        assert list(categories) == sorted(expected)
        several = f"{len(expected)} categories"
        assert label == ("unclassified" if not expected else several if len(expected) > 1 else categories[0])
    assert sum(label_counts(heads).values()) == 12
    assert tuple(label_counts(heads)) == labels()


def test_without_a_null_model_there_is_no_excess():
    table = made_up_table(n_heads=10, seed=2).drop(columns=["excess", "suppression_excess"])
    for prefix in ("", "suppression_"):
        table[[f"{prefix}expected", f"{prefix}q_value"]] = np.nan
    table = add_excess(table)
    assert table[["excess", "suppression_excess"]].isna().all(axis=None)
    flagged = table.assign(**apply_rule(table, "published", 0.15))
    assert best_excess(flagged).isna().all()


def test_the_best_excess_of_a_head_is_that_of_what_it_implements_or_suppresses():
    table = made_up_table(n_heads=30, seed=3)
    table = table.assign(**apply_rule(table, "controlled", 0.15))
    best = best_excess(table)
    for head, rows in table.groupby("head"):
        found = [*rows.loc[rows["implemented"], "excess"], *rows.loc[rows["suppressed"], "suppression_excess"]]
        assert best[0, head] == max(found) if found else np.isnan(best[0, head])
    assert 0 < best.isna().sum() < 30
