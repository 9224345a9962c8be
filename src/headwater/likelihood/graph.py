"""Question graphs: deep questions, and the shallower questions that they build on.

A graph is a folder in the layout of DepthQA (below), or one JSON file: `{"name": ..., "nodes":
[node, ...]}`. A node has `id`, `depth` (1, 2, 3, ...), `question`, `answers` (a list; or `answer`, one text) and
`predecessors`: the ids of the questions, one depth below, that it builds on. `group` names the graph of the node
(without it, all nodes form one graph); `model_answer` is a model's answer and `score` (1 to 5) a judge's score of it;
other fields are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from headwater.calls import checked_call
from headwater.data.rows import read_rows
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean
from headwater.models.packaged import world_folder
from headwater.options import checked_path
from headwater.questions.labels import checked_score
from headwater.runs.result import numbered_from_0, table_html

FIRST_COLUMNS = (
    "group", "id", "depth", "question_id", "question", "answers", "predecessors", "successors", "model_answer", "score",
)  # fmt: skip
FILES = (".jsonl", ".json", ".parquet")


class Row(NamedTuple):
    """A node, or a row of a file, as read, and its location in the file."""

    where: str
    fields: dict[str, Any]

    def text(self, name: str) -> str:
        """Return a field that must be a nonempty text."""
        value = self.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{_place(self)}: {name} is missing or empty.")
        return value

    def names(self, name: str) -> list[str]:
        """Return a field that holds a list of ids; an empty list if the field is missing."""
        value = self.fields.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise InputError(f"{_place(self)}: {name} must be a list of ids, found {value!r}.")
        return value or []


@dataclass(frozen=True)
class DepthGraph:
    """Questions of several depths with the edges between them."""

    returned_by = "hw.load_depth_graph(...)"

    table: pd.DataFrame
    """A row per node: `group, id, depth, question_id` (nodes of one question share it), `question, answers,
    predecessors, successors` (tuples), `model_answer` (None if missing), `score` (NaN if missing), and any other
    fields."""
    name: str = ""
    notes: tuple[str, ...] = ()
    """Notes on data that the files lack."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", numbered_from_0(self.table))

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        counts = self.table["depth"].value_counts().sort_index()
        depths = ", ".join(f"depth {depth}: {count:,}" for depth, count in counts.items())
        notes = f"; {'; '.join(self.notes)}" if self.notes else ""
        return f"DepthGraph({self.name}: {self.table['group'].nunique():,} groups; {depths}{notes})"

    def _repr_html_(self) -> str:
        return table_html(self, self.table)


@checked_call
def load_depth_graph(source: str | Path | None = None, *, predictions: str | Path | None = None) -> DepthGraph:
    """Read a graph of questions, and check that it is valid.

    Args:
        source: a folder in the layout of DepthQA, or a JSON file in the format of the module's docstring; None for the
            graph of the embedded model's world.
        predictions: for a folder, the file with a model's answers, judged or not, as a path or as a name in the folder.
            Default: the one file that has answers to the questions alone ("zero-shot"), if there is one.
    """
    path = world_folder() / "depth_graph.json" if source is None else checked_path("source", source)
    if not path.exists():
        raise InputError(
            f"The depth graph {path} does not exist. Pass a folder in the layout of DepthQA, or a JSON file."
        )
    if path.is_dir():
        chosen = None if predictions is None else checked_path("predictions", predictions)
        read, notes = read_folder(path, chosen)
        return _graph(read, path.resolve().name, notes)
    if predictions is not None:
        raise InputError(f"predictions={str(predictions)!r} needs a folder; {path} is one file.")
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not a JSON file ({error}).") from None
    if not isinstance(value, dict) or not isinstance(value.get("nodes"), list) or not value["nodes"]:
        raise InputError(f'{path}: expected {{"name": ..., "nodes": [...]}} with at least one node.')
    for place, node in enumerate(value["nodes"]):
        if not isinstance(node, dict) or not isinstance(node.get("id"), str) or not node["id"]:
            raise InputError(f"{path}: node number {place + 1} has no id (a string).")
    return _graph([Row(str(path), node) for node in value["nodes"]], str(value.get("name") or path.stem))


def _graph(read: Sequence[Row], name: str, notes: Sequence[str] = ()) -> DepthGraph:
    """Check nodes and their edges, and build the table."""
    if not read:
        raise InputError(f"The depth graph {name} has no nodes.")
    nodes: dict[str, Row] = {}
    for node in map(_checked, read):
        if node.fields["id"] in nodes:
            raise InputError(f"{_place(node)}: this id occurs twice.")
        nodes[node.fields["id"]] = node
    successors: dict[str, list[str]] = {found: [] for found in nodes}
    for node in nodes.values():
        where, depth = _place(node), node.fields["depth"]
        for predecessor in node.fields["predecessors"]:
            if predecessor not in nodes:
                hint = did_you_mean(predecessor, nodes)
                raise InputError(f"{where}: its predecessor {predecessor!r} does not exist.{hint}")
            below = nodes[predecessor].fields
            # This excludes cycles, too.
            if below["depth"] != depth - 1:
                raise InputError(
                    f"{where} (depth {depth}): its predecessor {predecessor!r} has depth {below['depth']}; edges join "
                    "neighbouring depths only."
                )
            if below["group"] != node.fields["group"]:
                raise InputError(f"{where}: its predecessor {predecessor!r} belongs to another group.")
            successors[predecessor].append(node.fields["id"])
    for found, node in nodes.items():
        given = node.names("successors")
        if node.fields.get("successors") is not None and {*given} != {*successors[found]}:
            raise InputError(f"{_place(node)}: it names the successors {given}, but precedes {successors[found]}.")
    table = pd.DataFrame([node.fields | {"successors": tuple(successors[found])} for found, node in nodes.items()])
    others = (column for column in table if column not in FIRST_COLUMNS)
    return DepthGraph(table[[*FIRST_COLUMNS, *others]], name, tuple(notes))


def _place(node: Row) -> str:
    return f"{node.where}, node {node.fields['id']!r}" if "id" in node.fields else node.where


def _checked(node: Row) -> Row:
    """Check the fields of a node, and fill in missing ones."""
    where, fields = _place(node), node.fields
    if type(fields.get("depth")) is not int or fields["depth"] < 1:
        raise InputError(f"{where}: depth must be a whole number of at least 1, found {fields.get('depth')!r}.")
    node.text("question")
    answers = fields.get("answers", fields.get("answer"))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(f"{where}: answers is missing or empty, or contains an empty answer.")
    predecessors = node.names("predecessors")
    if len(set(predecessors)) < len(predecessors):
        raise InputError(f"{where}: predecessors names a node twice.")
    model_answer = fields.get("model_answer")
    if model_answer is not None and not isinstance(model_answer, str):
        raise InputError(f"{where}: model_answer must be a string, found {model_answer!r}.")
    others = {key: value for key, value in fields.items() if key != "answer"}
    checked = {
        "group": str(fields.get("group", "")),
        "question_id": str(fields.get("question_id", fields["question"])),
        "answers": tuple(answers),
        "predecessors": tuple(predecessors),
        "model_answer": model_answer,
        "score": checked_score(fields.get("score"), where),
    }
    return Row(node.where, others | checked)


# The layout of DepthQA (Ko et al., EMNLP 2024): a folder of questions, nodes, the question of each node, and answers.
#
# questions    qid, depth, question, answer
# nodes        nodeid, depth, direct_predecessors, direct_successors, group (or the part of nodeid before _)
# node_to_q    nodeid, qid; several nodes may have the same question
# answers      {qid or nodeid: {predicted_answer, score}}; the score of a judge, 1 to 5, may be missing
#
# The first three are found by name: `questions.jsonl`, `depthqa_questions.jsonl`, `questions/test.parquet` and so on,
# as .jsonl, .json (a list) or .parquet. A file of answers is a JSON object and is found by its content. Without
# `nodes` and `node_to_q` every question is a node in a separate group, without edges.


Answers: TypeAlias = Mapping[str, Mapping[str, object]]
"""Answers by question id or node id."""


def read_folder(folder: Path, predictions: Path | None = None) -> tuple[list[Row], list[str]]:
    """Read the nodes of a folder, with notes on the data that it lacks."""
    files = {name: _file_of(folder, name) for name in ("questions", "nodes", "node_to_q")}
    if files["questions"] is None:
        raise InputError(
            f"The folder {folder} has no questions: it needs a file questions.jsonl (or .json, .parquet) with qid, "
            "depth, question and answer."
        )
    questions = _by_id(files["questions"], "qid")
    notes = []
    if files["nodes"] is None:
        nodes = [_node(row, name, row, name) for name, row in questions.items()]
        notes.append("no nodes file: no question has edges")
    else:
        if files["node_to_q"] is None:
            raise InputError(f"The folder {folder} has nodes, but no file node_to_q with the question of each.")
        nodes = _nodes(_by_id(files["nodes"], "nodeid"), _by_id(files["node_to_q"], "nodeid"), questions)
    file, answers = _answers(folder, predictions, questions, list(files.values()))
    if file is None:
        return nodes, [*notes, "no answers of a model", "no scores of a judge"]
    known = {fields[key] for _, fields in nodes for key in ("id", "question_id")}
    for key in answers:
        if key not in known:
            raise InputError(f"{file}: {key!r} is neither a node nor a question.{did_you_mean(key, known)}")
    for _, fields in nodes:
        row = answers.get(fields["id"], answers.get(fields["question_id"], {}))
        fields["model_answer"], fields["score"] = row.get("predicted_answer"), row.get("score")
    for name, what in (("model_answer", "an answer of the model"), ("score", "a score of the judge")):
        if without := sum(fields[name] is None for _, fields in nodes):
            notes.append(f"{without:,} of {len(nodes):,} nodes without {what} in {file.name}")
    return nodes, notes


def _file_of(folder: Path, name: str) -> Path | None:
    """Find the one file with a name, in the folder or in its subfolder of that name."""
    inside = [file for file in (folder / name).glob("*") if file.suffix in FILES]
    ends = f"_{name}", f"-{name}"
    beside = [file for file in folder.glob("*") if file.suffix in FILES and f"_{file.stem}".endswith(ends)]
    found = sorted(inside + beside)
    if len(found) > 1:
        raise InputError(f"The folder {folder} has several files of {name}: {', '.join(str(f) for f in found)}.")
    return found[0] if found else None


def _by_id(file: Path, name: str) -> dict[str, Row]:
    """Read the rows of a file into a mapping by id."""
    rows: dict[str, Row] = {}
    for number, fields in read_rows(file, name):
        row = Row(f"{file}, row {number}", dict(fields))
        key = row.text(name)
        if key in rows:
            raise InputError(f"{row.where}: {name} {key!r} occurs twice, first in {rows[key].where}.")
        rows[key] = row
    return rows


def _nodes(nodes: Mapping[str, Row], question_of: Mapping[str, Row], questions: Mapping[str, Row]) -> list[Row]:
    """Join every node with its question."""
    if odd := question_of.keys() ^ nodes.keys():
        where = {**nodes, **question_of}[min(odd)].where
        raise InputError(f"{where}: only one of nodes and node_to_q has the node {min(odd)!r}.")
    rows = []
    for name, row in nodes.items():
        key = question_of[name].text("qid")
        if key not in questions:
            hint = did_you_mean(key, questions)
            raise InputError(f"{question_of[name].where}, node {name!r}: its question {key!r} does not exist.{hint}")
        question, depth = questions[key], row.fields.get("depth")
        if question.fields.get("depth") != depth:
            raise InputError(
                f"{row.where}, node {name!r}: it has depth {depth!r}, but its question {key!r} has depth "
                f"{question.fields.get('depth')!r} ({question.where})."
            )
        rows.append(_node(row, name, question, str(row.fields.get("group", name.split("_")[0]))))
    return rows


def _node(row: Row, name: str, question: Row, group: str) -> Row:
    fields = {
        "id": name,
        "depth": row.fields.get("depth"),
        "question_id": question.text("qid"),
        "question": question.text("question"),
        "answers": [question.text("answer")],
        "predecessors": row.fields.get("direct_predecessors"),
        "successors": row.fields.get("direct_successors"),
        "group": group,
    }
    return Row(row.where, fields)


def _answers(
    folder: Path, predictions: Path | None, questions: Mapping[str, Row], others: Sequence[Path | None]
) -> tuple[Path | None, Answers]:
    """Read the specified file of answers, or find the one file with answers to the questions alone (if any)."""
    if predictions is not None:
        file = predictions if predictions.exists() else folder / predictions
        if not file.is_file():
            raise InputError(f"The file of answers {predictions} does not exist, nor is it in the folder {folder}.")
        if answers := _answers_in(file):
            return file, answers
        raise InputError(
            f"{file} contains no answers: expected a JSON object {{id: {{predicted_answer, score}}, ...}}."
        )
    read = {file: _answers_in(file) for file in sorted(folder.rglob("*.json")) if file not in others}
    found = {file: answers for file, answers in read.items() if answers and next(iter(answers)) in questions}
    judged = [file for file in found if any(row.get("score") is not None for row in found[file].values())]
    files = judged or list(found)
    if len(files) > 1:
        listed = ", ".join(str(file.relative_to(folder)) for file in files)
        raise InputError(
            f"The folder {folder} has the answers of several models ({listed}). Choose one with predictions=."
        )
    return (files[0], found[files[0]]) if files else (None, {})


def _answers_in(file: Path) -> Answers:
    """Return the answers in a JSON file; none if it contains something else."""
    try:
        value = parse_json(file.read_bytes())
    except (ValueError, OSError) as error:
        raise InputError(f"{file} cannot be read ({error}).") from None
    is_one = isinstance(value, dict) and all(isinstance(row, dict) for row in value.values())
    return value if is_one and any("predicted_answer" in row for row in value.values()) else {}
