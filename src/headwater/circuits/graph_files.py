"""Circuits in the files of EAP-IG (Hanna et al. 2024): `.json` and `.pt`, an edge by name with score and membership.

    input -> embed    a0.h1 -> head 0.1    m3 -> mlp 3    a0.h1<q> -> q 0.1    logits

These graphs have a k and a v for each query head. Where several query heads share a key-value head, the weights have
one edge: it is read if all heads of the group agree on it (or, with `groups="any"`, if one of them has it; with "all",
if all of them do), its score being their sum, and written to each of them, the score in equal parts. Files of its first
layout (a node is a word, true or false) are read as well. A graph of single neurons is none of edges: a file that keeps
a part of a node's neurons is refused.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from headwater.calls import checked_call
from headwater.circuits.circuit import Circuit, graph_of, made, name_of
from headwater.circuits.graph import Graph
from headwater.data.strict_json import parse_json
from headwater.errors import InputError
from headwater.models.hooked import HookedModel
from headwater.models.part_names import read_part
from headwater.options import checked_count, checked_flag, checked_kind, checked_name, checked_path, shown
from headwater.runs.storage import make_folder, write_atomically, write_json


@checked_call
def read_graph_file(
    path: str | Path, model: HookedModel | Graph, *, groups: Literal["any", "all"] | None = None
) -> Circuit:
    """Read the circuit of an EAP-IG graph: the edges that are in it, with their scores as effects.

    Args:
        path: a `.json` or `.pt` file that EAP-IG's `Graph.to_json` or `to_pt` wrote.
        model: whose circuit it is.
        groups: what to do with an edge to a key-value head that some of its query heads have and others have not: take
            it ("any"), or leave it out ("all"); by default such a file is refused.

    Raises:
        InputError: the file is none of these, is of a model of another size or of single neurons, or heads that share a
            key-value head disagree on an edge to it.
    """
    file, graph = checked_path("path", path), graph_of(model)
    if groups is not None:
        checked_name("groups", groups, ("any", "all"))
    if file.suffix not in (".json", ".pt"):
        raise InputError(
            f"{file} ends in {file.suffix!r}; EAP-IG's graphs end in .json or .pt. Of the edges of another tool make a "
            'circuit by their names: hw.Circuit.of(["head 9.9 -> q 10.7", ...], model).'
        )
    try:
        cfg, listed = (_of_pt if file.suffix == ".pt" else _of_json)(file)
        counts = [checked_count(name, cfg[name]) for name in ("n_layers", "n_heads")]
        sizes = (*counts, checked_flag("parallel_attn_mlp", cfg["parallel_attn_mlp"]))
        read = [(name, _number(name, score), checked_flag("in_graph", inside)) for name, score, inside in listed]
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except (
        OSError, EOFError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RuntimeError,
        MemoryError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{file} is not a graph that EAP-IG wrote ({reason}).") from None
    if sizes != (graph.n_layers, graph.n_heads, graph.parallel):
        raise InputError(
            f"{file} is the graph of {sizes[0]} layers of {sizes[1]} heads{', parallel blocks' * sizes[2]}; this model "
            f"has {graph.n_layers} of {graph.n_heads}{', parallel blocks' * graph.parallel}."
        )
    edges = [(graph.edge_named(name), score, inside) for name, score, inside in read]
    scores: dict[int, float] = {}
    inside_of: dict[int, set[bool]] = {}
    for edge, score, inside in edges:
        # EAP-IG has an edge for each query head of a group: the one edge here carries all of their effects.
        scores[edge] = scores.get(edge, 0.0) + score
        inside_of.setdefault(edge, set()).add(inside)
    torn = [edge for edge, inside in inside_of.items() if len(inside) > 1]
    if torn and groups is None:
        raise InputError(
            f"{file} has {graph.name(torn[0])} for some of the {graph.n_heads // graph.n_kv_heads} query heads that "
            f"share this key-value head and not for others ({len(torn)} such edges); here it is one edge. Give "
            'groups="any" to take it, or groups="all" to leave it out.'
        )
    kept = [edge for edge, inside in inside_of.items() if inside == {True} or (groups == "any" and True in inside)]
    return made(graph, kept, scores, model=name_of(model))


@checked_call
def write_graph_file(circuit: Circuit, path: str | Path, d_model: int) -> Path:
    """Write a circuit as a graph that EAP-IG's `Graph.from_json` or `from_pt` reads.

    Args:
        circuit: the circuit; effects become scores, 0 where none is known.
        path: a `.json` or `.pt` file.
        d_model: the width of the model, which these files record.

    Raises:
        InputError: the path ends otherwise.
        RunFolderError: the file cannot be written.
    """
    circuit = checked_kind("circuit", circuit, Circuit, "edges.circuit(...) or hw.Circuit.of(...)")
    file, graph = checked_path("path", path), circuit.graph
    if file.suffix not in (".json", ".pt"):
        raise InputError(f"{file} must end in .json or .pt.")
    cfg = {
        "n_layers": graph.n_layers,
        "n_heads": graph.n_heads,
        "parallel_attn_mlp": graph.parallel,
        "d_model": int(d_model),
    }
    inside = np.isin(np.arange(graph.n_edges), circuit.edges)
    scores = np.zeros(graph.n_edges)
    scores[circuit.edges] = np.nan_to_num(circuit.effects)
    sources, targets = _names(graph)
    sends = dict.fromkeys(sources, False) | {"logits": True}
    edges: dict[str, dict[str, Any]] = {}
    for target, (receiver, parts) in targets.items():
        for sender in range(int(graph.reach[receiver])):
            edge = graph.edge(sender, receiver)
            # Divided among the query heads, so that reading it back adds up to the effect.
            edges[f"{sources[sender]}->{target}"] = {"score": scores[edge] / parts, "in_graph": bool(inside[edge])}
            sends[sources[sender]] |= bool(inside[edge])
    make_folder(file.parent)
    if file.suffix == ".json":
        write_json(
            file, {"cfg": cfg, "nodes": {name: {"in_graph": one} for name, one in sends.items()}, "edges": edges}
        )
    else:
        content = _tensors(edges, sources, list(targets)) | {
            "cfg": cfg,
            "src_nodes": sources,
            "dst_nodes": list(targets),
        }
        content["nodes_in_graph"] = torch.tensor([sends[name] for name in sources])
        write_atomically(file, lambda temporary: torch.save(content, temporary))
    return file


def _of_json(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, object, object]]]:
    content = parse_json(file.read_bytes())
    nodes = [one for one in content["nodes"].values() if isinstance(one, dict)]
    _refuse_neurons([one["neurons"] for one in nodes if "neurons" in one])
    edges = content["edges"].items()
    return content["cfg"], ((name, one.get("score"), one["in_graph"]) for name, one in edges)


def _number(edge: str, score: object) -> float:
    """Return the score of an edge; 0 where the file has none."""
    found = score if isinstance(score, int | float) and not isinstance(score, bool) else math.nan
    if score is not None and not abs(found) < float("inf"):
        raise ValueError(f"the score of {edge} is {shown(score)}")
    return 0.0 if score is None else float(found)


def _of_pt(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, object, object]]]:
    # weights_only: a pickle from elsewhere could run code.
    content = torch.load(file, weights_only=True, map_location="cpu")
    _refuse_neurons([content["neurons_in_graph"]] if content.get("neurons_in_graph") is not None else [])
    inside, scores = content["edges_in_graph"], content["edges_scores"].double()
    if inside.dtype != torch.bool or inside.shape != scores.shape or not bool(scores.isfinite().all()):
        raise ValueError("edges_in_graph is not true or false, or edges_scores holds NaN or infinity")
    sources, targets = content["src_nodes"], content["dst_nodes"]
    places = inside.nonzero().tolist()
    members = ((f"{sources[i]}->{targets[j]}", float(scores[i, j]), True) for i, j in places)
    others = (~inside & _real(sources, targets)).nonzero().tolist()
    rest = ((f"{sources[i]}->{targets[j]}", float(scores[i, j]), False) for i, j in others)
    return content["cfg"], iter([*members, *rest])


def _refuse_neurons(kept: list[Any]) -> None:
    """Refuse a graph in which only some neurons of a node are kept."""
    if not all(bool(torch.as_tensor(neurons).bool().all()) for neurons in kept):
        raise InputError("it keeps single neurons of its nodes; a circuit here is of edges, whole ones.")


def _real(sources: list[str], targets: list[str]) -> torch.Tensor:
    """Which pairs of a source and a k or v there can be: only these have to agree with others."""
    parts = [read_part(name) for name in sources]
    layers = torch.tensor([-1 if part is None or part.layer is None else part.layer for part in parts])
    read = torch.tensor([int(name[1:].split(".")[0]) if name.endswith(("<k>", "<v>")) else -1 for name in targets])
    return layers[:, None] < read[None]


def _names(graph: Graph) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """EAP-IG's names of senders, and by its names of receivers the receiver and how many such represent it."""
    group = graph.n_heads // graph.n_kv_heads
    heads = range(graph.n_heads)
    sources, targets = ["input"], {}
    names = {name: number for number, name in enumerate(graph.receivers.names())}
    for layer in range(graph.n_layers):
        sources += [*(f"a{layer}.h{head}" for head in heads), f"m{layer}"]
        for kind in "qkv":
            for head in heads:
                own = head if kind == "q" else head // group
                targets[f"a{layer}.h{head}<{kind}>"] = names[f"{kind} {layer}.{own}"], 1 if kind == "q" else group
        targets[f"m{layer}"] = names[f"mlp {layer}"], 1
    return sources, targets | {"logits": (names["logits"], 1)}


def _tensors(edges: dict[str, dict[str, Any]], sources: list[str], targets: list[str]) -> dict[str, Any]:
    scores, inside = torch.zeros(len(sources), len(targets)), torch.zeros(len(sources), len(targets), dtype=torch.bool)
    row, column = ({name: i for i, name in enumerate(names)} for names in (sources, targets))
    for name, one in edges.items():
        source, target = name.split("->")
        scores[row[source], column[target]] = one["score"]
        inside[row[source], column[target]] = one["in_graph"]
    return {"edges_scores": scores, "edges_in_graph": inside}
