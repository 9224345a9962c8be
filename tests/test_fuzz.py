"""Whatever a file of data holds, reading it ends with a result or a HeadwaterError, never with another exception.

`fuzzing` says how inputs are made. CI reads the same few hundred for each reader, the slow suite 100,000 fresh ones.
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from headwater.data.rows import read_texts as _texts
from headwater.heads.relations import load_relations
from headwater.likelihood.graph import load_depth_graph
from headwater.likelihood.members import load_member_texts
from headwater.patching.prompts import read_table
from headwater.questions.extract import EndpointExtractor
from headwater.questions.sources import FORMATS, load_questions
from tests.fuzzing import (
    ANYTHING,
    FEW,
    MANY,
    NUMBERS,
    WORDS,
    Files,
    Reader,
    as_json,
    documents,
    fuzz,
    rows_of,
)  # fmt: skip

TABLES = (".jsonl", ".json", ".csv", ".tsv")
SPANS = st.sampled_from(["France", [3, 5], [[0, 2]], ["the", "a"], "[0, 3]", [], None])
TEXTS = st.sampled_from(["What is the capital of France?", "Who wrote France?", '"the ""a"" b"'])
ANSWERS = st.sampled_from([["Paris"], "Paris | Lyon", '["Paris"]', ["a", "b"], "x"])
IDS = st.sampled_from(["n0", "n1", "n2", "q1"])

QUESTION_ROWS = {
    "table": {
        "question": TEXTS,
        "answers": ANSWERS,
        "subject": SPANS,
        "property": SPANS,
        "popularity": NUMBERS,
        "id": st.none() | NUMBERS | WORDS,
    },
    "popqa": {
        "question": TEXTS,
        "prop": WORDS | st.just("capital"),
        "subj": WORDS,
        "obj": WORDS,
        "s_pop": NUMBERS,
        "possible_answers": ANSWERS,
    },
    "triviaqa": {
        "Question": TEXTS,
        "QuestionId": WORDS,
        "Answer": st.sampled_from([{"Value": "Paris", "Aliases": ["a"]}, {"Value": "Paris"}, {"Aliases": None}, {}]),
    },
    "hotpotqa": {"question": TEXTS, "answer": WORDS, "type": WORDS, "level": WORDS, "_id": WORDS},
    "nq_open": {"question": TEXTS, "answer": ANSWERS, "id": WORDS},
}


@st.composite
def question_files(draw: Callable[..., Any]) -> Files:
    """A file of questions, and now and then one that says which format to read it as."""
    rows = draw(st.sampled_from(sorted(QUESTION_ROWS)))
    files = draw(documents("q", rows_of(QUESTION_ROWS[rows]), TABLES))
    named = draw(st.sampled_from([None, None, None, *FORMATS]))
    return files if named is None else files | {"format": named.encode()}


def read_questions(folder: Path) -> None:
    named = folder / "format"
    name = named.read_text(errors="replace") if named.exists() else None
    (file,) = [file for file in folder.iterdir() if file.stem == "q"] or [folder / "q.csv"]
    questions = load_questions(file, format=name)
    pa.Table.from_pandas(questions.table)  # what is read can be kept beside its answers
    assert len(questions) > 0


NAMES = st.sampled_from(["France", "Paris", "Rome", "é", "a | b", "../x"])
PAIRS = st.lists(
    st.tuples(NAMES, NAMES | st.lists(NAMES, min_size=1, max_size=3, unique=True)).map(list), min_size=1, max_size=5
) | st.lists(st.tuples(WORDS, WORDS | st.lists(WORDS, max_size=3)).map(list) | ANYTHING, max_size=5)
RELATIONS = PAIRS | st.fixed_dictionaries(
    {"name": NAMES | WORDS, "category": st.sampled_from(["knowledge", "linguistic", None, "none"]), "pairs": PAIRS},
    optional={"provenance": ANYTHING},
)
RELATION_FILES = st.fixed_dictionaries(
    {"name/name.json": RELATIONS.map(as_json)},
    optional={"categories.json": st.fixed_dictionaries({"name": st.just("knowledge") | ANYTHING}).map(as_json)},
)


def read_relations(folder: Path) -> None:
    for relation in load_relations(folder):
        json.dumps(relation.pairs).encode()


@st.composite
def nodes_of(draw: Callable[..., Any], names: dict[str, str], fields: dict[str, st.SearchStrategy[Any]]) -> list[Any]:
    """Nodes of a graph, nearly right: ids differ, edges lead to the depth below; then some fields hold anything."""
    depths = sorted(draw(st.lists(st.integers(1, 3), min_size=1, max_size=5)))
    nodes = []
    for number, depth in enumerate(depths):
        below = [f"n{i}" for i, other in enumerate(depths) if other == depth - 1]
        edges = draw(st.lists(st.sampled_from(below), unique=True, max_size=2)) if below else []
        known = {names["id"]: f"n{number}", "depth": depth, names["predecessors"]: edges}
        nodes.append(known | {name: draw(values) for name, values in fields.items()})
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        node = draw(st.sampled_from(nodes))
        node[draw(st.sampled_from(sorted(node)))] = draw(ANYTHING | IDS)
    return nodes


NODES = nodes_of(
    {"id": "id", "predecessors": "predecessors"},
    {
        "question": TEXTS,
        "answers": ANSWERS,
        "group": st.just("g"),
        "score": st.sampled_from([None, 1, 9]),
        "model_answer": WORDS,
    },
)
DEPTHQA = {
    "questions": rows_of({"qid": st.just("q1"), "depth": st.just(1), "question": TEXTS, "answer": TEXTS}, rows=1),
    "nodes": nodes_of({"id": "nodeid", "predecessors": "direct_predecessors"}, {}),
    "node_to_q": st.lists(IDS, unique=True).map(lambda ids: [{"nodeid": one, "qid": "q1"} for one in ids]),
}
PREDICTIONS = st.dictionaries(
    IDS, st.fixed_dictionaries({"predicted_answer": WORDS | ANYTHING, "score": NUMBERS | ANYTHING})
)


@st.composite
def depthqa_files(draw: Callable[..., Any]) -> Files:
    files: Files = {}
    for name, rows in DEPTHQA.items():
        if draw(st.sampled_from([True, True, True, False])):
            files |= draw(documents(name, rows, (".jsonl", ".json")))
    if draw(st.booleans()) or not files:
        files["zero-shot.json"] = as_json(draw(PREDICTIONS | ANYTHING))
    return files


def read_graph(folder: Path) -> None:
    source = folder / "graph.json"
    graph = load_depth_graph(source if source.exists() else folder)
    plain = [column for column in graph.table if graph.table[column].dtype != object]
    pa.Table.from_pandas(graph.table[plain])


def read_texts(folder: Path) -> None:
    (file,) = folder.iterdir()
    for text in _texts(file, "text"):
        assert text is None or isinstance(text, str)


MEMBERS = rows_of({"text": TEXTS, "member": st.sampled_from([0, 1, True, "1"])}) | rows_of(
    {"input": TEXTS | WORDS, "label": st.sampled_from([0, 1])}
)


@st.composite
def member_files(draw: Callable[..., Any]) -> Files:
    if draw(st.sampled_from([True, True, True, False])):
        return draw(documents("members", MEMBERS, (".jsonl", ".json", ".csv")))
    count, file = draw(st.integers(0, 3)), io.BytesIO()
    pd.DataFrame({"text": ["a text"] * count, "member": [0, 1, 1][:count]}).to_parquet(file)
    return {"members.parquet": file.getvalue()}


def read_members(folder: Path) -> None:
    (file,) = folder.iterdir()
    table = load_member_texts(file)
    assert table["member"].dtype == bool
    assert len(table)


PROMPTS = rows_of({"clean": TEXTS | WORDS, "corrupted": TEXTS | WORDS | st.just([1, 2])})


def read_prompt_pairs(folder: Path) -> None:
    (file,) = folder.iterdir()
    clean, corrupted = read_table(file)
    assert len(clean) == len(corrupted) > 0


REPLIES = st.dictionaries(
    st.sampled_from(["subject", "property", "answer"]), st.sampled_from(["France", ["Paris"], None, "x"]) | ANYTHING
)
SENT = (REPLIES | ANYTHING).map(
    lambda reply: {"choices": [{"message": {"content": f"Here: {json.dumps(reply)}"}}]}
) | ANYTHING


def read_reply(folder: Path) -> None:
    """What an endpoint sends to an extractor."""
    (file,) = folder.iterdir()
    extractor = EndpointExtractor("http://localhost:1/v1", "m", tries=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urllib.request.urlopen", lambda request, timeout: file.open("rb"))
        found = extractor("What is the capital of France?", "Paris")
    assert found.keys() <= {"subject", "property", "answer"}


READERS = {
    "questions": Reader(question_files(), read_questions),
    "relations": Reader(RELATION_FILES, read_relations),
    "a depth graph": Reader(documents("graph", NODES, (".json",)), read_graph),
    "a DepthQA folder": Reader(depthqa_files(), read_graph),
    "texts": Reader(
        documents("texts", rows_of({"text": WORDS | TEXTS}), (".jsonl", ".csv", ".tsv", ".txt")), read_texts
    ),
    "member texts": Reader(member_files(), read_members),
    "prompt pairs": Reader(documents("pairs", PROMPTS, (".jsonl", ".csv")), read_prompt_pairs),
    "an extractor's reply": Reader(SENT.map(lambda sent: {"reply": as_json(sent)}), read_reply),
}


@pytest.mark.parametrize("reader", READERS)
def test_whatever_is_read_gives_a_result_or_a_clear_error(reader):
    fuzz(READERS[reader], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_a_hundred_thousand_inputs_give_a_result_or_a_clear_error(reader):
    outcomes = fuzz(READERS[reader], MANY)
    assert min(outcomes.values()) > MANY / 100, f"nearly all inputs end alike: {outcomes}"
