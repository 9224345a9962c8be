"""Depth graphs: read, joined both ways, and refused with the node's name when they are none."""

import json

import pytest

from headwater.errors import InputError
from headwater.likelihood.graph import load_depth_graph


def node(name, depth, *predecessors, **more):
    return {
        "id": name,
        "depth": depth,
        "question": f"{name}?",
        "answers": [name],
        "predecessors": [*predecessors],
    } | more


def write(tmp_path, *nodes):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"nodes": nodes}), "utf-8")
    return file


def test_successors_are_the_predecessors_read_backwards(tmp_path):
    nodes = [node("a", 1), node("b", 1), node("c", 2, "a", "b"), node("d", 2, "b"), node("e", 3, "c", "d", score=4)]
    graph = load_depth_graph(write(tmp_path, *nodes))
    table = graph.table.set_index("id")
    assert table["successors"].to_dict() == {"a": ("c",), "b": ("c", "d"), "c": ("e",), "d": ("e",), "e": ()}
    assert table.at["e", "predecessors"] == ("c", "d")
    assert table.at["e", "score"] == 4
    assert graph.name == "mine"
    assert repr(graph) == "DepthGraph(mine: 1 groups; depth 1: 2, depth 2: 2, depth 3: 1)"


def test_one_answer_may_be_given_as_a_text(tmp_path):
    one = {"id": "a", "depth": 1, "question": "a?", "answer": "yes"}
    assert load_depth_graph(write(tmp_path, one)).table["answers"].tolist() == [("yes",)]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("a", 1), node("b", 3, "a")], r"node 'b' \(depth 3\): its predecessor 'a' has depth 1"),
        ([node("a", 1), node("b", 1, "a")], r"node 'b' \(depth 1\): its predecessor 'a' has depth 1"),
        ([node("ab", 1), node("b", 2, "abb")], r"node 'b': its predecessor 'abb' does not exist. Did you mean 'ab'"),
        ([node("a", 1, "b"), node("b", 2, "a")], r"node 'a' \(depth 1\): its predecessor 'b' has depth 2"),
        ([node("a", 1), node("a", 1)], r"node 'a': this id occurs twice"),
        ([node("a", 1), node("b", 2, "a", "a")], r"node 'b': predecessors names a node twice"),
        ([node("a", 1, group="1"), node("b", 2, "a", group="2")], r"node 'b': its predecessor 'a' belongs to another"),
        ([node("a", 0)], r"node 'a': depth must be a whole number of at least 1, found 0"),
        ([node("a", "1")], r"node 'a': depth must be a whole number"),
        ([node("a", 1, question=" ")], r"node 'a': question is missing or empty"),
        ([node("a", 1, answers=[])], r"node 'a': answers is missing or empty"),
        ([node("a", 1) | {"predecessors": "b"}], r"node 'a': predecessors must be a list of ids"),
        ([node("a", 1), {"depth": 1}], r"node number 2 has no id"),
    ],
)
def test_what_is_no_graph_is_refused_and_the_node_named(tmp_path, nodes, message):
    with pytest.raises(InputError, match=message):
        load_depth_graph(write(tmp_path, *nodes))


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"does not exist"):
        load_depth_graph(tmp_path / "none.json")
    for text, message in (("{", "not a JSON file"), ("[]", "expected"), ('{"nodes": []}', "at least one node")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match=message):
            load_depth_graph(tmp_path / "bad.json")
