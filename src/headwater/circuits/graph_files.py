"""Circuit files of EAP-IG (Hanna et al. 2024): `.json` and `.pt`, each edge by name with score and membership.

    input -> embed    a0.h1 -> head 0.1    m3 -> mlp 3    a0.h1<q> -> q 0.1    logits

EAP-IG graphs have a k and a v for each query head. If several query heads share a key-value head, the graph here has
one edge. Reading: the edge is in the circuit if all heads of the group agree on it (with `groups="any"`, if one of
them has it; with "all", if all of them do), and its score is the sum of their scores. Writing: each of them gets the
edge and an equal part of the score. A graph of single neurons is not a graph of edges: a file that keeps only some of a
node's neurons is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from headwater.calls import checked_call
from headwater.circuits.circuit import Circuit, circuit_from_edges, graph_of, model_name
from headwater.circuits.graph import Graph
from headwater.data.strict_json import parse_json
from headwater.errors import InputError, first_line
from headwater.models.hooked import HookedModel
from headwater.models.part_names import read_part
from headwater.options import checked_count, checked_flag, checked_number, checked_path
from headwater.runs.storage import make_folder, write_atomically, write_json


@checked_call
def read_graph_file(
    path: str | Path, model: HookedModel | Graph, *, groups: Literal["any", "all"] | None = None
) -> Circuit:
    """Read the circuit of an EAP-IG graph: its edges, with their scores as effects.

    Args:
        path: a `.json` or `.pt` file that EAP-IG's `Graph.to_json` or `to_pt` wrote.
        model: the model of the circuit.
        groups: how to treat an edge to a key-value head that only some of its query heads have: include it ("any") or
            exclude it ("all"); by default such a file is refused.

    Raises:
        InputError: the file is not such a graph, is of a model of another size or of single neurons, or heads that
            share a key-value head disagree on an edge to it.
    """
    file, graph = _checked_file(path), graph_of(model)
    try:
        cfg, listed = (_of_pt if file.suffix == ".pt" else _of_json)(file)
        counts = [checked_count(name, cfg[name]) for name in ("n_layers", "n_heads")]
        sizes = (*counts, checked_flag("parallel_attn_mlp", cfg["parallel_attn_mlp"]))
        read = [
            (name, checked_number(f"{name}, score", score, above=-math.inf), checked_flag(f"{name}, in_graph", inside))
            for name, score, inside in listed
        ]
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except Exception as error:  # a damaged pickle leads torch to errors of every kind
        raise InputError(f"{file} is not a graph that EAP-IG wrote ({first_line(error)[:200]}).") from None
    if sizes != (graph.n_layers, graph.n_heads, graph.parallel):
        shape = f"{sizes[0]} layers of {sizes[1]} heads{', parallel blocks' * sizes[2]}"
        raise InputError(f"{file} is the graph of {shape}; this model has {graph}.")
    scores: dict[int, float] = {}
    inside_of: dict[int, set[bool]] = {}
    for name, score, inside in read:
        edge = graph.edge_named(name)
        # EAP-IG has an edge for each query head of a group; the single edge here carries the sum of their effects.
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
    return circuit_from_edges(graph, kept, [scores[edge] for edge in kept], model=model_name(model))


@checked_call
def write_graph_file(circuit: Circuit, path: str | Path, d_model: int) -> Path:
    """Write a circuit as a graph that EAP-IG's `Graph.from_json` or `from_pt` reads.

    Args:
        circuit: the circuit; effects become scores, 0 if unknown.
        path: a `.json` or `.pt` file.
        d_model: the width of the model, which these files record.
    """
    file, graph = _checked_file(path), circuit.graph
    cfg = {"n_layers": graph.n_layers, "n_heads": graph.n_heads, "parallel_attn_mlp": graph.parallel}
    cfg["d_model"] = int(d_model)
    inside = np.isin(np.arange(graph.n_edges), circuit.edges)
    scores = np.zeros(graph.n_edges)
    scores[circuit.edges] = np.nan_to_num(circuit.effects)
    sources, targets = _names(graph)
    sends = dict.fromkeys(sources, False) | {"logits": True}
    edges: dict[str, dict[str, Any]] = {}
    by_name = np.zeros((len(sources), len(targets)), dtype=np.float32)
    members = np.zeros(by_name.shape, dtype=bool)
    for column, (target, (receiver, parts)) in enumerate(targets.items()):
        for sender in range(int(graph.reach[receiver])):
            edge = graph.edge(sender, receiver)
            # Divided among the query heads, so that reading the file back sums to the effect.
            score, is_in = scores[edge] / parts, bool(inside[edge])
            edges[f"{sources[sender]}->{target}"] = {"score": score, "in_graph": is_in}
            by_name[sender, column], members[sender, column] = score, is_in
            sends[sources[sender]] |= is_in
    make_folder(file.parent)
    if file.suffix == ".json":
        nodes = {name: {"in_graph": one} for name, one in sends.items()}
        write_json(file, {"cfg": cfg, "nodes": nodes, "edges": edges})
    else:
        content: dict[str, Any] = {"cfg": cfg, "src_nodes": sources, "dst_nodes": list(targets)}
        content |= {"edges_scores": torch.from_numpy(by_name), "edges_in_graph": torch.from_numpy(members)}
        content["nodes_in_graph"] = torch.tensor([sends[name] for name in sources])
        write_atomically(file, lambda temporary: torch.save(content, temporary))
    return file


def _checked_file(path: str | Path) -> Path:
    file = checked_path("path", path)
    if file.suffix not in (".json", ".pt"):
        raise InputError(
            f"{file} ends in {file.suffix!r}; EAP-IG's graphs end in .json or .pt. From another tool's edges make a "
            'circuit by their names: hw.Circuit.of(["head 9.9 -> q 10.7", ...], model).'
        )
    return file


def _of_json(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, object, object]]]:
    content = parse_json(file.read_bytes())
    _refuse_neurons([one["neurons"] for one in content["nodes"].values() if "neurons" in one])
    return content["cfg"], ((name, one["score"], one["in_graph"]) for name, one in content["edges"].items())


def _of_pt(file: Path) -> tuple[dict[str, Any], Iterator[tuple[str, object, object]]]:
    # weights_only, because a pickle from elsewhere could run code.
    content = torch.load(file, weights_only=True, map_location="cpu")
    _refuse_neurons([content["neurons_in_graph"]] if content.get("neurons_in_graph") is not None else [])
    inside, scores = content["edges_in_graph"], content["edges_scores"].double()
    if inside.dtype != torch.bool or inside.shape != scores.shape or not bool(scores.isfinite().all()):
        raise ValueError("edges_in_graph is not true or false, or edges_scores holds NaN or infinity")
    sources, targets = content["src_nodes"], content["dst_nodes"]
    places = inside.nonzero().tolist()
    members = ((f"{sources[i]}->{targets[j]}", float(scores[i, j]), True) for i, j in places)
    # Among non-members, only possible pairs of a source and a k or v have to agree.
    parts = [read_part(name) for name in sources]
    layers = torch.tensor([-1 if part is None or part.layer is None else part.layer for part in parts])
    read = torch.tensor([int(name[1:].split(".")[0]) if name.endswith(("<k>", "<v>")) else -1 for name in targets])
    others = (~inside & (layers[:, None] < read[None])).nonzero().tolist()
    rest = ((f"{sources[i]}->{targets[j]}", float(scores[i, j]), False) for i, j in others)
    return content["cfg"], iter([*members, *rest])


def _refuse_neurons(kept: list[Any]) -> None:
    """Refuse a graph in which only some neurons of a node are kept."""
    if not all(bool(torch.as_tensor(neurons).bool().all()) for neurons in kept):
        raise InputError("it keeps single neurons of its nodes; a circuit here consists of whole edges.")


def _names(graph: Graph) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Return EAP-IG's names of senders, and by its names of receivers our receiver and how many names share it."""
    group, heads = graph.n_heads // graph.n_kv_heads, range(graph.n_heads)
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
