"""Graphs are read as EAP-IG writes them, made here without the package's own writer; what cannot be read is named."""

import json
import pickle
from itertools import product
from typing import Any

import pytest
import torch

import headwater as hw
from headwater.circuits.graph import Graph
from headwater.circuits.graph_files import read_graph_file, write_graph_file
from headwater.errors import InputError
from tests import chance
from tests.tiny import tiny_hooked

SIZES = {"n_layers": 3, "n_heads": 4, "parallel_attn_mlp": False, "d_model": 32}
PARALLEL = SIZES | {"parallel_attn_mlp": True}


def eap_ig_edges(cfg: dict[str, Any]) -> list[str]:
    """The names of all edges, in the order in which EAP-IG writes them: by sender, then by head and q, k, v."""
    written, names = ["input"], []
    for layer in range(cfg["n_layers"]):
        heads = [f"a{layer}.h{head}" for head in range(cfg["n_heads"])]
        readers = [f"m{layer}"]
        for sender in written:
            names += [f"{sender}->{head}<{letter}>" for head, letter in product(heads, "qkv")]
            if cfg["parallel_attn_mlp"]:
                names += [f"{sender}->{reader}" for reader in readers]
        written += heads
        if not cfg["parallel_attn_mlp"]:
            names += [f"{sender}->{readers[0]}" for sender in written]
        written += readers
    return names + [f"{sender}->logits" for sender in written]


def nodes_of(cfg: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The senders and receivers, in the order of the axes of EAP-IG's matrices."""
    layers, heads = range(cfg["n_layers"]), range(cfg["n_heads"])
    senders = ["input"]
    for layer in layers:
        senders += [f"a{layer}.h{head}" for head in heads] + [f"m{layer}"]
    receivers = []
    for layer in layers:
        receivers += [f"a{layer}.h{head}<{letter}>" for letter, head in product("qkv", heads)] + [f"m{layer}"]
    return senders, [*receivers, "logits"]


def as_json(cfg: dict[str, Any], scores: dict[str, float], inside: set[str], **node: Any) -> str:
    """What its `to_json` writes."""
    nodes = {name: {"in_graph": True} | node for name in [*nodes_of(cfg)[0], "logits"]}
    edges = {name: {"score": score, "in_graph": name in inside} for name, score in scores.items()}
    return json.dumps({"cfg": cfg, "nodes": nodes, "edges": edges})


def as_pt(cfg: dict[str, Any], scores: dict[str, float], inside: set[str], **more: Any) -> dict[str, Any]:
    """What its `to_pt` saves."""
    senders, receivers = nodes_of(cfg)
    places = {name: i for i, name in enumerate(senders)}, {name: i for i, name in enumerate(receivers)}
    values, members = torch.zeros(len(senders), len(receivers)), torch.zeros(len(senders), len(receivers)).bool()
    for name, score in scores.items():
        sender, receiver = name.split("->")
        values[places[0][sender], places[1][receiver]] = score
        members[places[0][sender], places[1][receiver]] = name in inside
    return {
        "cfg": cfg,
        "src_nodes": senders,
        "dst_nodes": receivers,
        "edges_scores": values,
        "edges_in_graph": members,
        "nodes_in_graph": torch.ones(len(senders)).bool(),
    } | more


def ours(name: str, group: int) -> str:
    """What an edge of theirs is called here."""
    sender, receiver = name.split("->")
    layer_head = sender[1:].replace(".h", ".")
    sender = "embed" if sender == "input" else f"{'head' if sender[0] == 'a' else 'mlp'} {layer_head}"
    if receiver.startswith("a"):
        place, kind = receiver[1:-3], receiver[-2]
        layer, head = place.split(".h")
        receiver = f"{kind} {layer}.{head if kind == 'q' else int(head) // group}"
    elif receiver.startswith("m"):
        receiver = f"mlp {receiver[1:]}"
    return f"{sender} -> {receiver}"


def drawn(cfg: dict[str, Any], group: int) -> tuple[dict[str, float], set[str]]:
    """Scores of all edges, and a graph in which query heads of a group agree."""
    rng, names = chance.rng(), eap_ig_edges(cfg)
    chosen = {name for name in dict.fromkeys(ours(name, group) for name in names) if rng.random() < 0.3}
    scores = dict(zip(names, rng.normal(size=len(names)).tolist(), strict=True))
    return scores, {name for name in names if ours(name, group) in chosen}


@pytest.mark.diagonal
@pytest.mark.parametrize("layout", ["json", "pt", "pt of all neurons"])
@pytest.mark.parametrize(("cfg", "n_kv_heads"), [(SIZES, 4), (SIZES, 2), (PARALLEL, 4)])
def test_files_as_eap_ig_writes_them_are_read_edge_by_edge(cfg, n_kv_heads, layout, tmp_path):
    graph, group = Graph(3, 4, n_kv_heads, cfg["parallel_attn_mlp"]), 4 // n_kv_heads
    scores, inside = drawn(cfg, group)
    if layout.endswith("json"):
        file = tmp_path / "graph.json"
        file.write_text(as_json(cfg, scores, inside))
    else:
        file = tmp_path / "graph.pt"
        neurons = {"neurons_in_graph": torch.ones(16, 32).bool(), "neurons_scores": torch.zeros(16, 32)}
        torch.save(as_pt(cfg, scores, inside, **(neurons if "neurons" in layout else {})), file)
    circuit = read_graph_file(file, graph)
    expected: dict[str, float] = {}
    for name in inside:
        expected[ours(name, group)] = expected.get(ours(name, group), 0.0) + scores[name]
    assert len(scores) == graph.n_edges if group == 1 else len(scores) > graph.n_edges
    assert set(circuit.names) == set(expected)
    found = dict(zip(circuit.names, circuit.effects.tolist(), strict=True))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("ending", ["json", "pt"])
def test_graphs_of_single_neurons_are_refused(ending, tmp_path):
    scores, inside = drawn(SIZES, 1)
    file, some = tmp_path / f"graph.{ending}", [True] * 31 + [False]
    if ending == "json":
        file.write_text(as_json(SIZES, scores, inside, neurons=some, neurons_scores=[0.5] * 32))
    else:
        torch.save(as_pt(SIZES, scores, inside, neurons_in_graph=torch.tensor([some] * 16)), file)
    with pytest.raises(InputError, match="keeps single neurons of its nodes"):
        read_graph_file(file, Graph(3, 4, 4, False))


def test_files_of_other_tools_are_refused_by_their_ending_or_by_what_is_missing(tmp_path):
    graph = Graph(3, 4, 4, False)
    pickled = tmp_path / "edges.pkl"  # as ACDC keeps its edges, and AutoCircuit its scores
    pickled.write_bytes(pickle.dumps([(("blocks.2.hook_resid_post", "[:]", "blocks.1.hook_mlp_out", "[:]"), 0.5)]))
    with pytest.raises(InputError, match=r"ends in '.pkl'.* hw\.Circuit\.of"):
        read_graph_file(pickled, graph)
    scores = tmp_path / "scores.pt"
    torch.save({"blocks.0.hook_mlp_out": torch.zeros(3, 5)}, scores)
    with pytest.raises(InputError, match=r"scores.pt is not a graph that EAP-IG wrote \('edges_in_graph'\)"):
        read_graph_file(scores, graph)
    held = json.loads(as_json(SIZES, *drawn(SIZES, 1)))
    for torn, said in (
        (held | {"edges": {"a0.h1->a0.h2<q>": held["edges"]["input->m0"]}}, "cannot feed"),
        ({}, "nodes"),
    ):
        (tmp_path / "torn.json").write_text(json.dumps(torn))
        with pytest.raises(InputError, match=said):
            read_graph_file(tmp_path / "torn.json", graph)
    with pytest.raises(InputError, match=r"missing\.json"):
        read_graph_file(tmp_path / "missing.json", graph)


@pytest.mark.diagonal
@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
@pytest.mark.parametrize("ending", ["json", "pt"])
def test_what_is_written_is_read_back(family, ending, tmp_path):
    model = tiny_hooked(family)
    edges = hw.edges(
        model,
        " the capital of France is",
        " the capital of Italy is",
        metric=hw.logit_difference(5, 9),
        method="eap",
        progress=False,
    )
    circuit = edges.circuit(40)
    file = write_graph_file(circuit, tmp_path / f"graph.{ending}", model.shape.d_model)
    again = read_graph_file(file, model)
    assert again == circuit
    assert again.effects == pytest.approx(circuit.effects, rel=1e-5)
    with pytest.raises(InputError, match="is the graph of 3 layers"):
        read_graph_file(file, Graph(2, 4, 4, False))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held["cfg"].update(n_layers=float("inf")), "n_layers=inf must be a whole number"),
        (lambda held: held["cfg"].update(n_layers=3.9), r"n_layers=3\.9 must be a whole number"),
        (lambda held: held["cfg"].update(parallel_attn_mlp="false"), "parallel_attn_mlp='false' must be True or False"),
        (lambda held: held["edges"]["input->m0"].update(score=10**400), "too large to convert"),
        (lambda held: held["edges"]["input->m0"].update(score=float("nan")), "input->m0, score=nan must be a number"),
        (lambda held: held["edges"]["input->m0"].update(score=float("-inf")), "input->m0, score=-inf must be a number"),
        (lambda held: held["edges"]["input->m0"].update(score="1.5"), "input->m0, score='1.5' must be a number"),
        (lambda held: held["edges"]["input->m0"].update(in_graph="false"), "in_graph='false' must be True or False"),
        (lambda held: held.update(edges=[]), "not a graph that EAP-IG wrote"),
    ],
)
def test_values_that_no_graph_has_are_refused_in_one_line(change, said, tmp_path):
    held, file = json.loads(as_json(SIZES, *drawn(SIZES, 1))), tmp_path / "graph.json"
    change(held)
    file.write_text(json.dumps(held))
    with pytest.raises(InputError, match=said) as refused:
        read_graph_file(file, Graph(3, 4, 4, False))
    assert "\n" not in str(refused.value)


def test_pt_files_that_are_empty_or_not_finite_are_refused(tmp_path):
    scores, inside = drawn(SIZES, 1)
    file, graph = tmp_path / "graph.pt", Graph(3, 4, 4, False)
    file.write_bytes(b"")
    with pytest.raises(InputError, match="not a graph that EAP-IG wrote"):
        read_graph_file(file, graph)
    held = as_pt(SIZES, scores, inside)
    for more in (
        {"edges_scores": held["edges_scores"].fill_(torch.nan)},
        {"edges_in_graph": held["edges_in_graph"].float()},
    ):
        torch.save(held | more, file)
        with pytest.raises(InputError, match="not true or false, or edges_scores holds NaN"):
            read_graph_file(file, graph)


def test_a_graph_file_whose_heads_disagree_on_a_shared_key_is_refused(tmp_path):
    model = tiny_hooked("llama")
    file = write_graph_file(hw.Circuit.of(["embed -> k 1.0"], model), tmp_path / "graph.pt", 32)
    held = torch.load(file, weights_only=True)
    held["edges_in_graph"][0, held["dst_nodes"].index("a1.h0<k>")] = False
    torch.save(held, file)
    with pytest.raises(InputError, match=r"embed -> k 1\.0 for some of the 2 query heads.*groups=\"any\" to take it"):
        read_graph_file(file, model)
    assert read_graph_file(file, model, groups="any").names == ["embed -> k 1.0"]
    assert len(read_graph_file(file, model, groups="all")) == 0
    with pytest.raises(InputError, match="groups='some'"):
        read_graph_file(file, model, groups="some")
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(InputError, match="not a graph that EAP-IG wrote"):
        read_graph_file(tmp_path / "text.json", model)
