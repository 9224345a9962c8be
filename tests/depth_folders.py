"""Random question graphs, as nodes and as folders in the layout of DepthQA."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from headwater.likelihood.graph import DepthGraph, load_depth_graph
from tests.tiny import WORDS


def sentence(rng, longest: int = 8) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(2, longest + 1)))


def random_nodes(rng, groups: int = 4, scored: bool = True) -> list[dict]:
    """Graphs of one question at depth 3, two to three at depth 2, and as many below each; some questions are shared."""
    nodes = []
    shared = [sentence(rng) + "?" for _ in range(3)]

    def add(name: str, depth: int, predecessors: list[str]) -> str:
        question = str(rng.choice(shared)) if depth == 1 and rng.random() < 0.3 else sentence(rng) + f" {len(nodes)}?"
        node = {"id": name, "group": name.split("_")[0], "depth": depth, "question": question}
        node |= {"answers": [sentence(rng, 4)], "predecessors": predecessors}
        if scored and rng.random() < 0.9:
            node["score"] = int(rng.choice([1, 2, 3, 4, 5, 5, 5]))
        if scored:
            node["model_answer"] = sentence(rng, 4)
        nodes.append(node)
        return name

    for group in range(groups):
        deep = []
        for i in range(rng.integers(2, 4)):
            below = [add(f"{group}_d1_n{i}{j}", 1, []) for j in range(rng.integers(2, 4))]
            deep.append(add(f"{group}_d2_n{i}", 2, below))
        add(f"{group}_d3", 3, deep)
    return nodes


def as_file(folder: Path, nodes: list[dict]) -> DepthGraph:
    """Write nodes as one file, and read it."""
    file = folder / "graph.json"
    file.write_text(json.dumps({"name": "made up", "nodes": nodes}), encoding="utf-8")
    return load_depth_graph(file)


def as_rows(nodes: list[dict]) -> dict[str, list[dict]]:
    """Nodes as the rows of the three files and of one file of answers."""
    numbers: dict[str, str] = {}
    for node in nodes:
        numbers.setdefault(node["question"], f"d{node['depth']}_q{len(numbers) + 1}")
    first = {numbers[node["question"]]: node for node in reversed(nodes)}
    questions = [
        {"qid": name, "depth": node["depth"], "question": node["question"], "answer": node["answers"][0]}
        for name, node in sorted(first.items())
    ]
    above: dict[str, list[str]] = {}
    for node in nodes:
        for name in node["predecessors"]:
            above.setdefault(name, []).append(node["id"])
    graph = [
        {
            "nodeid": node["id"],
            "group": node["group"],
            "depth": node["depth"],
            "direct_predecessors": node["predecessors"],
            "direct_successors": above.get(node["id"], []),
        }
        for node in nodes
    ]
    which = [{"nodeid": node["id"], "qid": numbers[node["question"]]} for node in nodes]
    answers = {
        name: {"qid": name, "predicted_answer": node.get("model_answer"), "score": node.get("score")}
        for name, node in first.items()
    }
    return {"questions": questions, "nodes": graph, "node_to_q": which, "answers": [answers]}


def write_folder(folder: Path, rows: dict[str, list[dict]], suffix: str = ".jsonl") -> Path:
    """Write the rows as a folder in the layout of DepthQA."""
    folder.mkdir(exist_ok=True)
    for name, values in rows.items():
        if name == "answers":
            (folder / "zero-shot.json").write_text(json.dumps(values[0]), encoding="utf-8")
        elif suffix == ".parquet":
            (folder / name).mkdir()
            pd.DataFrame(values).to_parquet(folder / name / "test-00000-of-00001.parquet")
        elif suffix == ".json":
            (folder / f"depthqa_{name}.json").write_text(json.dumps(values), encoding="utf-8")
        else:
            lines = "".join(json.dumps(value) + "\n" for value in values)
            (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def log_probs(model, network, text, start, end):
    """The log-probabilities of the tokens that hold characters `start` to `end`, from the network's own logits."""
    found = model.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = [model.tokenizer.bos_token_id, *found["input_ids"]]
    with torch.no_grad():
        logits = network(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    inside = [i for i, (a, b) in enumerate(found["offset_mapping"]) if a < end and start < b]
    return [logits[i, ids[i + 1]].item() for i in inside]


def min_k(values, k=0.2):
    return np.mean(sorted(values)[: max(1, int(k * len(values)))])
