"""Folders in the layout of DepthQA: read as the same graph in one file, and refused with node, file and line."""

import json

import pandas as pd
import pytest

from headwater.errors import InputError
from headwater.likelihood.graph import load_depth_graph
from tests import chance
from tests.depth_folders import as_file, as_rows, random_nodes, write_folder


@pytest.fixture
def rng():
    return chance.rng()


@pytest.fixture
def nodes(rng):
    """Nodes whose shared questions have one answer, as they have in DepthQA, where answers belong to questions."""
    made, first = random_nodes(rng), {}
    for node in made:
        one = first.setdefault(node["question"], node)
        node |= {key: one[key] for key in ("answers", "model_answer", "score") if key in one}
        if "score" not in one:
            node.pop("score", None)
    return made


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_folder_is_the_graph_that_one_file_gives(nodes, suffix, tmp_path):
    expected = as_file(tmp_path, nodes).table.drop(columns="question_id")
    graph = load_depth_graph(write_folder(tmp_path / "depthqa", as_rows(nodes), suffix))
    pd.testing.assert_frame_equal(graph.table.drop(columns="question_id"), expected)
    assert graph.table["question_id"].nunique() == len({node["question"] for node in nodes})
    assert graph.name == "depthqa"
    missing = sum("score" not in node for node in nodes)
    assert graph.notes == (
        (f"{missing:,} of {len(nodes):,} nodes without a score of the judge in zero-shot.json",) * (missing > 0)
    )


def test_a_folder_of_questions_alone_is_a_graph_without_edges(nodes, tmp_path):
    rows = {"questions": as_rows(nodes)["questions"]}
    graph = load_depth_graph(write_folder(tmp_path / "alone", rows))
    assert len(graph) == graph.table["group"].nunique() == len(rows["questions"])
    assert not graph.table["predecessors"].map(len).any()
    assert graph.notes == (
        "no nodes file: no question has edges",
        "no answers of a model",
        "no scores of a judge",
    )
    assert graph.table["score"].isna().all()


def test_answers_are_taken_from_the_file_named_and_several_are_not_guessed_from(nodes, tmp_path):
    rows = as_rows(nodes)
    folder = write_folder(tmp_path / "two", rows)
    (tmp_path / "two" / "metric.json").write_text('{"Average Accuracy - Depth depth_1": 4.5}')
    by_node = {node["id"]: {"predicted_answer": "gold", "score": 5} for node in nodes[:2]}
    (folder / "prompt-gold.json").write_text(json.dumps(by_node))
    assert set(load_depth_graph(folder).table["model_answer"]) == {node["model_answer"] for node in nodes}
    named = load_depth_graph(folder, predictions="prompt-gold.json")
    assert named.table["score"].notna().sum() == 2
    assert named.table.set_index("id").at[nodes[0]["id"], "model_answer"] == "gold"
    (folder / "other.json").write_text(json.dumps(rows["answers"][0]))
    with pytest.raises(InputError, match=r"answers of several models \(other.json, zero-shot.json\). Choose one"):
        load_depth_graph(folder)
    with pytest.raises(InputError, match="does not exist, nor is it in the folder"):
        load_depth_graph(folder, predictions="none.json")
    with pytest.raises(InputError, match=r"metric.json contains no answers"):
        load_depth_graph(folder, predictions="metric.json")


def broken(rows, nodes, case):
    """Break rows in one way; return what the message must say."""
    first, deep = nodes[0]["id"], next(n for n in nodes if n["depth"] == 2)["id"]
    row = {each["nodeid"]: each for each in rows["nodes"]}
    place = {each["nodeid"]: number for number, each in enumerate(rows["nodes"], start=1)}
    if case == "dangling predecessor":
        row[deep]["direct_predecessors"] = [*row[deep]["direct_predecessors"], "9_d1"]
        return rf"nodes.jsonl, row {place[deep]}, node '{deep}': its predecessor '9_d1' does not exist"
    if case == "one end":
        row[first]["direct_successors"] = []
        return rf"nodes.jsonl, row {place[first]}, node '{first}': it names the successors .*, but precedes .*{deep}"
    if case == "no question":
        rows["node_to_q"] = rows["node_to_q"][1:]
        return rf"nodes.jsonl, row 1: only one of nodes and node_to_q has the node '{first}'"
    if case == "unknown question":
        rows["node_to_q"][0]["qid"] = "d1_q0"
        return rf"node_to_q.jsonl, row 1, node '{first}': its question 'd1_q0' does not exist"
    if case == "unknown node":
        rows["node_to_q"].append({"nodeid": "x_d1", "qid": rows["questions"][0]["qid"]})
        return rf"node_to_q.jsonl, row {len(nodes) + 1}: only one of nodes and node_to_q has the node 'x_d1'"
    if case == "depth":
        row[first]["depth"] = 2
        return rf"nodes.jsonl, row 1, node '{first}': it has depth 2, but its question '.*' has depth 1 \(.*.jsonl, row"
    if case == "twice":
        rows["questions"].append(rows["questions"][0])
        return rf"questions.jsonl, row {len(rows['questions'])}: qid '.*' occurs twice, first in .*row 1"
    if case == "empty answer":
        rows["questions"][0]["answer"] = " "
        return r"questions.jsonl, row 1: answer is missing or empty"
    if case == "score":
        rows["answers"][0][next(iter(rows["answers"][0]))]["score"] = 6
        return r"nodes.jsonl, row \d+, node '.*': the score must lie between 1 and 5, found 6"
    rows["answers"][0]["d9_q9"] = {"predicted_answer": "?"}
    return r"zero-shot.json: 'd9_q9' is neither a node nor a question"


CASES = (
    "dangling predecessor", "one end", "no question", "unknown question", "unknown node", "depth", "twice",
    "empty answer", "score", "answer to nothing",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_together_is_refused_with_node_file_and_row(case, nodes, tmp_path):
    rows = as_rows(nodes)
    message = broken(rows, nodes, case)
    with pytest.raises(InputError, match=message):
        load_depth_graph(write_folder(tmp_path / "broken", rows))


def test_files_that_cannot_be_read_are_named_with_the_row(nodes, tmp_path):
    folder = write_folder(tmp_path / "d", as_rows(nodes))
    file = folder / "nodes.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for bad, message in (
        (b"{\n", ", row 2: the row is not JSON"),
        (b'"\xff"\n', " is not UTF-8 text"),
        (b"[]\n", ", row 2: expected an object"),
    ):
        file.write_bytes(b"".join([lines[0], bad, *lines[1:]]))
        with pytest.raises(InputError, match=f"nodes.jsonl{message}"):
            load_depth_graph(folder)
    file.unlink()
    (folder / "questions.json").write_text("[]")
    with pytest.raises(InputError, match="several files of questions"):
        load_depth_graph(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no questions"):
        load_depth_graph(tmp_path / "empty")
    with pytest.raises(InputError, match="needs a folder"):
        load_depth_graph(as_path := tmp_path / "d" / "zero-shot.json", predictions=as_path)
