"""Whatever a file holds, reading it ends with a result or a HeadwaterError, never with another exception.

Inputs are documents that are nearly right: known fields with likely values or with anything, written in each of the
formats, and then, half of the time, with bytes cut, doubled, swapped or replaced. CI draws a few hundred for each
reader, the slow suite 100,000.
"""

import csv
import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from headwater.errors import HeadwaterError
from headwater.heads.relations import load_relations
from headwater.likelihood.depth import load_depth_graph
from headwater.likelihood.files import _texts
from headwater.models.checkpoint import open_checkpoint
from headwater.pathways.questions import load_questions
from headwater.results import RunFolder
from tests.test_results import Sample, record, sample

FEW, MANY = 150, 100_000

WORDS = st.sampled_from(
    ["Paris", "France", "a", "", " ", "é", "\ud800", "\0", "a | b", "[", '["x"]', "[0, 3]", "../x", "#", "0"]
)
NUMBERS = st.integers(-2, 9) | st.sampled_from([10**400, -(2**63), 0.5, 1e308, float("nan"), float("inf"), True])
LEAVES = st.none() | NUMBERS | WORDS
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=6
)


def rows_of(fields: dict[str, st.SearchStrategy[Any]], rows: int = 4) -> st.SearchStrategy[list[Any]]:
    """Lists of objects with these fields: all likely, or some of them missing or with anything in them."""
    likely = st.fixed_dictionaries(fields)
    strange = st.fixed_dictionaries({}, optional={name: values | ANYTHING for name, values in fields.items()})
    return st.lists(likely, min_size=1, max_size=rows) | st.lists(likely | likely | strange | ANYTHING, max_size=rows)


@st.composite
def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """Bytes as they are, or with some of them changed."""
    data = bytearray(content)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 5]))):
        place = draw(st.integers(0, len(data)))
        end = min(len(data), place + draw(st.sampled_from([1, 1, 2, 8, 100])))
        kind = draw(st.sampled_from(["cut", "drop", "double", "swap", "set", "insert"]))
        if kind == "cut":
            del data[place:]
        elif kind == "drop":
            del data[place:end]
        elif kind == "double":
            data[place:place] = data[place:end]
        elif kind == "swap" and place < len(data):
            data[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "set":
            data[place:end] = bytes([draw(st.sampled_from([0, 34, 44, 91, 93, 123, 125, 255, 0xED]))]) * (end - place)
        else:
            data[place:place] = draw(
                st.sampled_from([b"[" * 3000, b'{"a":' * 2000, b"\xff\xfe", b'"', b"\n", b"9" * 5000])
            )
    return bytes(data)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_lines(rows: list[Any]) -> bytes:
    return b"\n".join(as_json(row) for row in rows)


def as_cells(rows: list[Any], separator: str) -> bytes:
    objects = [row for row in rows if isinstance(row, dict)]
    names = sorted({name for row in objects for name in row})
    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator)
    writer.writerow(names)
    for row in objects:
        writer.writerow([v if isinstance(v, str) else json.dumps(v) for v in (row.get(name, "") for name in names)])
    return out.getvalue().encode("utf-8", "surrogatepass")


@st.composite
def documents(
    draw: Callable[..., Any], rows: st.SearchStrategy[list[Any]], suffixes: tuple[str, ...]
) -> tuple[str, bytes]:
    """A file of rows: the ending of its name, and its bytes."""
    suffix, content = draw(st.sampled_from(suffixes)), draw(rows)
    written = {
        ".jsonl": lambda: as_lines(content),
        ".json": lambda: as_json(draw(st.sampled_from([content, {"data": content}, {"name": "x", "nodes": content}]))),
        ".csv": lambda: as_cells(content, ","),
        ".tsv": lambda: as_cells(content, "\t"),
        ".txt": lambda: "\n".join(map(str, content)).encode("utf-8", "replace"),
    }[suffix]()
    return suffix, draw(damaged(written))


SPANS = st.sampled_from(["France", [3, 5], [[0, 2]], ["the", "a"], "[0, 3]", [], None])
TEXTS = st.sampled_from(["What is the capital of France?", "Who wrote France?", '"the ""a"" b"'])
ANSWERS = st.sampled_from([["Paris"], "Paris | Lyon", '["Paris"]', ["a", "b"], "x"])
QUESTIONS = st.one_of(
    rows_of(
        {
            "question": TEXTS,
            "answers": ANSWERS,
            "subject": SPANS,
            "property": SPANS,
            "popularity": NUMBERS,
            "id": LEAVES,
        }
    ),
    rows_of(
        {"question": TEXTS, "prop": WORDS, "subj": WORDS, "obj": WORDS, "s_pop": NUMBERS, "possible_answers": ANSWERS}
    ),
    rows_of(
        {
            "Question": TEXTS,
            "QuestionId": WORDS,
            "Answer": st.sampled_from(
                [{"Value": "Paris", "Aliases": ["a"]}, {"Value": "Paris"}, {"Aliases": None}, {}]
            ),
        }
    ),
    rows_of({"question": TEXTS, "answer": ANSWERS, "type": WORDS, "level": WORDS, "_id": WORDS}),
    rows_of({"question": TEXTS, "golden_answers": ANSWERS, "metadata": st.just({"relation": "x", "depth": 2})}),
)
PAIRS = st.lists(
    st.tuples(WORDS, WORDS).map(list) | st.tuples(WORDS, st.lists(WORDS, max_size=3)).map(list) | ANYTHING, max_size=5
)
RELATIONS = PAIRS | st.fixed_dictionaries(
    {"name": WORDS, "category": st.sampled_from(["knowledge", "linguistic", "nothing", None]), "pairs": PAIRS},
    optional={"provenance": ANYTHING},
)
IDS = st.sampled_from(["n0", "n1", "n2", "q1"])


@st.composite
def graphs(draw: Callable[..., Any], names: dict[str, str], fields: dict[str, st.SearchStrategy[Any]]) -> list[Any]:
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


NODES = graphs(
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
    "nodes": graphs({"id": "nodeid", "predecessors": "direct_predecessors"}, {}),
    "node_to_q": st.lists(IDS, unique=True).map(lambda ids: [{"nodeid": one, "qid": "q1"} for one in ids]),
}
PREDICTIONS = st.dictionaries(
    IDS, st.fixed_dictionaries({"predicted_answer": WORDS | ANYTHING, "score": NUMBERS | ANYTHING})
)


class Desk:
    """A folder to write inputs into, one after the other."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, name: str, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content)
        return path

    def clear(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        return self.folder


def read_questions(draw: Callable[..., Any], desk: Desk) -> None:
    suffix, content = draw(documents(QUESTIONS, (".jsonl", ".json", ".csv", ".tsv")))
    questions = load_questions(desk.file(f"q{suffix}", content))
    questions.table.to_parquet(io.BytesIO())  # what is read can be kept beside its answers
    assert len(questions) > 0


def read_relations(draw: Callable[..., Any], desk: Desk) -> None:
    folder = desk.clear()
    desk.file("name/name.json", draw(damaged(as_json(draw(RELATIONS)))))
    if draw(st.booleans()):
        desk.file("categories.json", draw(damaged(as_json({"name": draw(st.just("knowledge") | ANYTHING)}))))
    (relation,) = load_relations(folder)
    json.dumps(relation.pairs).encode()


def read_graph(draw: Callable[..., Any], desk: Desk) -> None:
    _, content = draw(documents(NODES, (".json",)))
    graph = load_depth_graph(desk.file("graph.json", content))
    graph.table.drop(columns=[c for c in graph.table if graph.table[c].dtype == object]).to_parquet(io.BytesIO())


def read_depthqa(draw: Callable[..., Any], desk: Desk) -> None:
    folder = desk.clear()
    for name, rows in DEPTHQA.items():
        if draw(st.sampled_from([True, True, True, False])):
            suffix, content = draw(documents(rows, (".jsonl", ".json")))
            desk.file(f"{name}{suffix}", content)
    if draw(st.booleans()):
        desk.file("zero-shot.json", draw(damaged(as_json(draw(PREDICTIONS | ANYTHING)))))
    load_depth_graph(folder)


def read_texts(draw: Callable[..., Any], desk: Desk) -> None:
    suffix, content = draw(documents(rows_of({"text": WORDS | TEXTS}), (".jsonl", ".csv", ".txt")))
    for text in _texts(desk.file(f"texts{suffix}", content), "text"):
        assert text is None or isinstance(text, str)


def read_run(draw: Callable[..., Any], desk: Desk) -> None:
    """A finished run, one of its files changed; or its record with any value anywhere."""
    folder = desk.clear()
    sample().save(folder)
    if draw(st.booleans()):
        file = folder / draw(st.sampled_from(["run.json", "table.parquet", "tensors.safetensors"]))
        file.write_bytes(draw(damaged(file.read_bytes())))
    else:
        plain = json.loads((folder / "run.json").read_text())
        for _ in range(draw(st.integers(0, 3))):
            within = draw(st.sampled_from([plain, plain.get("run"), plain.get("manifest")]))
            if isinstance(within, dict) and within:
                name = draw(st.sampled_from(sorted(within)))
                if draw(st.booleans()):
                    within[name] = draw(ANYTHING)
                else:
                    del within[name]
        (folder / "run.json").write_bytes(as_json(plain))
        if draw(st.booleans()):
            plain.pop("manifest", None)
            file = folder / draw(st.sampled_from(["table.parquet", "tensors.safetensors"]))
            file.write_bytes(draw(damaged(file.read_bytes())))
            (folder / "run.json").write_bytes(as_json(plain))
    try:
        Sample.load(folder)
    finally:
        RunFolder(folder, record())


def read_weights(draw: Callable[..., Any], desk: Desk) -> None:
    """A checkpoint whose safetensors or index were changed."""
    file = desk.folder / "model.safetensors"
    whole = (desk.folder / "whole").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    kind = draw(st.sampled_from(["header", "bytes", "size", "index"]))
    (desk.folder / "model.safetensors.index.json").unlink(missing_ok=True)
    if kind == "header":
        header = json.loads(whole[8 : 8 + size])
        name = draw(st.sampled_from(sorted(header)))
        header[name] = draw(ANYTHING | st.just({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}))
        text = as_json(header)
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    elif kind == "bytes":
        file.write_bytes(draw(damaged(whole[: 8 + size])) + whole[8 + size :])
    elif kind == "size":
        file.write_bytes(draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little") + whole[8:])
    else:
        file.unlink(missing_ok=True)
        names = st.sampled_from(["whole", "../whole", "model.safetensors"]) | ANYTHING
        index = {"weight_map": draw(st.dictionaries(WORDS, names, max_size=3) | ANYTHING)}
        desk.file("model.safetensors.index.json", draw(damaged(as_json(draw(st.just(index) | ANYTHING)))))
    checkpoint = open_checkpoint(desk.folder)
    for name in list(checkpoint.names)[:2]:
        checkpoint.read(name)


def read_config(draw: Callable[..., Any], desk: Desk) -> None:
    config = json.loads((desk.folder / "whole.json").read_text())
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(config)))
        if draw(st.booleans()):
            config[name] = draw(ANYTHING)
        else:
            config.pop(name)
    desk.file("config.json", draw(damaged(as_json(config))))
    open_checkpoint(desk.folder)


READERS = [
    read_questions, read_relations, read_graph, read_depthqa, read_texts, read_run, read_weights, read_config,
]  # fmt: skip


@pytest.fixture
def desk(tmp_path, checkpoint):
    shared = Path("/dev/shm")
    folder = shared / f"headwater-{tmp_path.parent.name}-{tmp_path.name}" if shared.is_dir() else tmp_path
    folder.mkdir(exist_ok=True)
    for file in checkpoint("llama").iterdir():
        shutil.copy(file, folder)
    shutil.copy(folder / "config.json", folder / "whole.json")
    shutil.copy(folder / "model.safetensors", folder / "whole")
    yield Desk(folder)
    shutil.rmtree(folder)


def fuzz(reader: Callable[..., None], desk: Desk, examples: int) -> None:
    outcomes = {"read": 0, "refused": 0}

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                reader(data.draw, desk)
                outcomes["read"] += 1
            except HeadwaterError as error:
                outcomes["refused"] += bool(str(error).strip())

    run()
    assert outcomes["read"] > 0, "no input was right: the fuzzing tests nothing but refusals"
    assert outcomes["refused"] > 0


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_whatever_is_read_gives_a_result_or_a_clear_error(reader, desk):
    fuzz(reader, desk, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_hundred_thousand_inputs_give_a_result_or_a_clear_error(reader, desk):
    fuzz(reader, desk, MANY)
