"""Discrepancies by hand, against the formula written out anew, and as properties."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.likelihood.report import discrepancies, judged
from headwater.stats.resample import Bootstrap
from tests import chance
from tests.depth_folders import as_file, random_nodes


def nodes_of(*rows):
    """Rows (id, depth, predecessors, score) as nodes; every node is a question of its own."""
    above = {name: tuple(r[0] for r in rows if name in r[2]) for name, *_ in rows}
    return pd.DataFrame(
        [
            {"id": name, "group": "g", "question_id": name, "depth": depth, "predecessors": below}
            | {"successors": above[name], "score": score}
            for name, depth, below, score in rows
        ]
    )


def summed(nodes, draws=20):
    nodes = nodes.join(discrepancies(nodes))
    return judged(nodes, Bootstrap.of(nodes["group"], draws=draws)).set_index(["measure", "depths"])


def test_the_worked_example():
    """Two answers of 5 and 4 below an answer of 3; an answer of 2 below answers of 5 and 3."""
    nodes = nodes_of(
        ("a", 1, (), 2.0), ("b", 2, ("a",), 5.0), ("c", 2, ("a",), 3.0), ("d", 2, (), 4.0), ("e", 3, ("b", "d"), 3.0)
    )
    found = discrepancies(nodes).set_axis(nodes["id"])
    assert found.at["e", "forward"] == (4.5 - 3) / 4
    assert found.at["e", "gap"] == (3 - 4.5) / 4
    assert found.at["a", "backward_first"] == (5 - 2) / 4
    assert found.at["a", "backward"] == (4 - 2) / 4
    assert math.isnan(found.at["b", "forward"])  # what it builds on was not answered well
    assert math.isnan(found.at["b", "backward"])  # what builds on it was not answered well
    numbers = summed(nodes)["value"]
    assert numbers["forward", "2-3"] == 0.375
    assert numbers["backward", "1-2"] == 0.5
    assert math.isnan(numbers["forward", "1-2"])
    assert numbers["accuracy", "2"] == 4.0


def published(table):
    """Accuracy and discrepancies in plain loops, pooled over pairs of depths as they are published."""
    score = {row.id: row.score for row in table.itertuples() if not math.isnan(row.score)}
    found = {}
    for depth in sorted(set(table["depth"])):
        of_question = {row.question_id: row.score for row in table[table["depth"] == depth].iloc[::-1].itertuples()}
        there = [value for value in of_question.values() if not math.isnan(value)]
        found["accuracy", str(depth)] = sum(there) / len(there) if there else math.nan
    for measure, neighbours in (
        ("forward", "predecessors"),
        ("backward", "successors"),
        ("backward_first", "successors"),
    ):
        top, bottom = {}, {}
        for row in table.to_dict("records"):
            names = row[neighbours][:1] if measure == "backward_first" else row[neighbours]
            around = [score[name] for name in names if name in score]
            if row["id"] not in score or not around or sum(around) / len(around) < 4:
                continue
            depth = row["depth"]
            pair = f"{depth - 1}-{depth}" if measure == "forward" else f"{depth}-{depth + 1}"
            for key in (pair, "all"):
                top[key] = top.get(key, 0) + max(0.0, (sum(around) / len(around) - score[row["id"]]) / 4)
                bottom[key] = bottom.get(key, 0) + 1
        found |= {(measure, key): top.get(key, 0) / bottom[key] for key in bottom}
    return found


def test_random_graphs_give_what_the_published_formulas_give(tmp_path):
    for _ in range(5):
        table = as_file(tmp_path, random_nodes(chance.rng(), groups=6)).table
        found, expected = summed(table), published(table)
        for key, row in found.iterrows():
            assert row["value"] == pytest.approx(expected.get(key, math.nan), nan_ok=True), key


scores = st.lists(st.one_of(st.integers(1, 5).map(float), st.just(math.nan)), min_size=7, max_size=7)


def tree(values):
    names = "abcdefg"
    below = {"e": ("a", "b"), "f": ("b", "c", "d"), "g": ("e", "f")}
    depth = {name: 1 + (name in "ef") + 2 * (name == "g") for name in names}
    return nodes_of(
        *((name, depth[name], below.get(name, ()), value) for name, value in zip(names, values, strict=True))
    )


@given(scores)
def test_discrepancies_lie_between_zero_and_one_and_gaps_between_minus_one_and_one(values):
    found = discrepancies(tree(values))
    for name in ("forward", "backward", "backward_first"):
        assert found[name].dropna().between(0, 1).all()
    assert found["gap"].dropna().between(-1, 1).all()


@given(scores, st.integers(0, 6))
def test_answering_one_question_better_never_raises_its_own_discrepancies(values, place):
    nodes = tree(values)
    better = nodes.assign(score=[5.0 if i == place and not math.isnan(v) else v for i, v in enumerate(values)])
    before, after = discrepancies(nodes).loc[place], discrepancies(better).loc[place]
    for name in ("forward", "backward", "backward_first"):
        assert math.isnan(before[name]) == math.isnan(after[name])
        assert not after[name] > before[name]


@given(st.integers(1, 5))
def test_equal_scores_have_no_discrepancy_and_no_gap(value):
    found = discrepancies(tree([float(value)] * 7))
    assert (found[["forward", "backward", "gap"]].fillna(0) == 0).all(axis=None)
    assert found["forward"].isna().all() == (value < 4)


def test_graphs_without_scores_give_nan_and_count_nothing(tmp_path):
    table = as_file(tmp_path, random_nodes(chance.rng(), scored=False)).table
    found = summed(table)
    assert found["value"].isna().all()
    assert (found["nodes"] == 0).all()
