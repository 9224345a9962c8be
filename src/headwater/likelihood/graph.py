"""Question graphs: deep questions, and the shallower ones they are built from.

A graph is a folder in the layout of DepthQA (`headwater.likelihood.depthqa`), or one JSON file: `{"name": ..., "nodes":
[node, ...]}`. A node has `id`, `depth` (1, 2, 3, ...), `question`, `answers` (a list; or `answer`, one text) and
`predecessors`: the ids of the questions of the depth below that it builds on. `group` names the graph that the node
belongs to (without it, all nodes form one); `model_answer` and `score` (1 to 5) are what a model answered and what a
judge gave it; further fields are kept.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from headwater.calls import checked_call
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, did_you_mean
from headwater.likelihood import depthqa
from headwater.models.packaged import world_folder
from headwater.options import checked_path
from headwater.questions.judge import checked_score
from headwater.runs.result import table_html

FIRST_COLUMNS = (
    "group", "id", "depth", "question_id", "question", "answers", "predecessors", "successors", "model_answer", "score",
)  # fmt: skip


class Node(NamedTuple):
    """A node as it was read, and the place it was read from."""

    where: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class DepthGraph:
    """Questions of several depths with the edges between them."""

    table: pd.DataFrame
    """A row per node: `group, id, depth, question_id` (nodes of one question share it), `question, answers,
    predecessors, successors` (tuples), `model_answer` (None where there is none), `score` (NaN where there is none),
    and what else it has."""
    name: str = ""
    notes: tuple[str, ...] = ()
    """What the files lack."""

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
    """Read a graph of questions, and check that it is one.

    Args:
        source: a folder in the layout of DepthQA, or a JSON file as the module describes; None for the graph of the
            embedded model's world.
        predictions: of a folder: the file with a model's answers, judged or not, by its path or its name in the folder.
            Default: the one file that has answers to the questions alone ("zero-shot"), if there is one.

    Raises:
        InputError: a file is missing or not of this format, or this is not a graph whose edges join neighbouring
            depths; the message names the node, the file and the line.
    """
    path = world_folder() / "depth_graph.json" if source is None else checked_path("source", source)
    if not path.exists():
        raise InputError(f"The depth graph {path} does not exist: give a folder as DepthQA has it, or a JSON file.")
    if path.is_dir():
        chosen = None if predictions is None else checked_path("predictions", predictions)
        read, notes = depthqa.read_folder(path, chosen)
        return _graph([Node(*node) for node in read], path.resolve().name, notes)
    if predictions is not None:
        raise InputError(f"predictions={str(predictions)!r} belongs to a folder; {path} is one file.")
    try:
        value = parse_json(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{path} is not a JSON file ({error}).") from None
    if not isinstance(value, dict) or not isinstance(value.get("nodes"), list) or not value["nodes"]:
        raise InputError(f'{path}: expected {{"name": ..., "nodes": [...]}} with at least one node.')
    for place, node in enumerate(value["nodes"]):
        if not isinstance(node, dict) or not isinstance(node.get("id"), str) or not node["id"]:
            raise InputError(f"{path}: node number {place + 1} has no id (a text).")
    return _graph([Node(str(path), node) for node in value["nodes"]], str(value.get("name") or path.stem))


def _graph(read: Sequence[Node], name: str, notes: Sequence[str] = ()) -> DepthGraph:
    """Check nodes and their edges, and make the table."""
    if not read:
        raise InputError(f"The depth graph {name} has no nodes.")
    nodes: dict[str, Node] = {}
    for node in map(_checked, read):
        if node.fields["id"] in nodes:
            raise InputError(f"{_place(node)}: the id comes twice.")
        nodes[node.fields["id"]] = node
    _check_edges(nodes)
    successors: dict[str, list[str]] = defaultdict(list)
    for node in nodes.values():
        for predecessor in node.fields["predecessors"]:
            successors[predecessor].append(node.fields["id"])
    table = pd.DataFrame(
        [dict(node.fields) | {"successors": tuple(successors[found])} for found, node in nodes.items()]
    )
    others = (column for column in table if column not in FIRST_COLUMNS)
    return DepthGraph(table[[*FIRST_COLUMNS, *others]], name, tuple(notes))


def _place(node: Node) -> str:
    return f"{node.where}, node {node.fields['id']!r}"


def _checked(node: Node) -> Node:
    """Check the fields of a node, and give it all of them."""
    where, fields = _place(node), node.fields
    if type(fields.get("depth")) is not int or fields["depth"] < 1:
        raise InputError(f"{where}: depth must be a whole number from 1 up, found {fields.get('depth')!r}.")
    if not isinstance(fields.get("question"), str) or not fields["question"].strip():
        raise InputError(f"{where}: question is missing or empty.")
    answers = fields.get("answers", fields.get("answer"))
    answers = [answers] if isinstance(answers, str) else answers
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(f"{where}: answers is missing or empty, or holds an empty answer.")
    predecessors = fields.get("predecessors", [])
    if not isinstance(predecessors, list) or not all(isinstance(name, str) for name in predecessors):
        raise InputError(f"{where}: predecessors must be a list of ids, found {predecessors!r}.")
    if len(set(predecessors)) < len(predecessors):
        raise InputError(f"{where}: predecessors names a node twice.")
    model_answer = fields.get("model_answer")
    if model_answer is not None and not isinstance(model_answer, str):
        raise InputError(f"{where}: model_answer must be a text, found {model_answer!r}.")
    others = {key: value for key, value in fields.items() if key != "answer"}
    known = {
        "group": str(fields.get("group", "")),
        "question_id": str(fields.get("question_id", fields["question"])),
        "answers": tuple(answers),
        "predecessors": tuple(predecessors),
        "model_answer": model_answer,
        "score": checked_score(fields.get("score"), where),
    }
    return Node(node.where, others | known)


def _check_edges(nodes: Mapping[str, Node]) -> None:
    for node in nodes.values():
        for predecessor in node.fields["predecessors"]:
            if predecessor not in nodes:
                hint = did_you_mean(predecessor, nodes)
                raise InputError(f"{_place(node)}: its predecessor {predecessor!r} does not exist.{hint}")
    try:
        TopologicalSorter({name: node.fields["predecessors"] for name, node in nodes.items()}).prepare()
    except CycleError as error:
        first = nodes[error.args[1][0]]
        raise InputError(f"{first.where}: the nodes {' → '.join(error.args[1])} form a cycle.") from None
    for node in nodes.values():
        for predecessor in node.fields["predecessors"]:
            below = nodes[predecessor].fields
            if below["depth"] != node.fields["depth"] - 1:
                raise InputError(
                    f"{_place(node)} (depth {node.fields['depth']}): its predecessor {predecessor!r} has depth "
                    f"{below['depth']}; edges join neighbouring depths only."
                )
            if below["group"] != node.fields["group"]:
                raise InputError(f"{_place(node)}: its predecessor {predecessor!r} belongs to another group.")
