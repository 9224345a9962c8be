"""A circuit is a set of edges; its placebos have its shape; and it is kept and read back whole."""

import itertools

import numpy as np
import pytest

import headwater as hw
from headwater.circuits.circuit import checked_circuits, circuit_from_edges
from headwater.circuits.graph import Graph
from headwater.errors import InputError, RunFolderError, UnknownNameError
from tests import chance
from tests.tiny import tiny_hooked

CLEAN, CORRUPTED = " the capital of France is in A", " the capital of Italy is of A"
SERIAL, PARALLEL = Graph(3, 4, 2, False), Graph(2, 3, 3, True)
QUIET = {"metric": hw.logit_difference(5, 9), "progress": False}


def drawn(graph: Graph, share: float = 0.4) -> hw.Circuit:
    return circuit_from_edges(graph, np.flatnonzero(chance.rng().random(graph.n_edges) < share))


def paths(graph: Graph, edges: set[int]) -> set[int]:
    """The edges of every path from the embedding to the logits, walked one by one."""
    after: dict[int, list[int]] = {}
    for edge in edges:
        after.setdefault(int(graph.sender[edge]), []).append(edge)
    found: set[int] = set()

    def walk(sender: int, path: tuple[int, ...]) -> None:
        for edge in after.get(sender, []):
            receiver = int(graph.receiver[edge])
            if graph.receivers.name(receiver) == "logits":
                found.update((*path, edge))
            kind, _, place = graph.receivers.name(receiver).partition(" ")
            layer, _, head = place.partition(".")
            heads = graph.n_heads // graph.n_kv_heads
            if kind == "mlp":
                on = [f"mlp {layer}"]
            elif kind == "q":
                on = [f"head {layer}.{head}"]
            else:
                on = [f"head {layer}.{int(head) * heads + i}" for i in range(heads)] if kind in "kv" else []
            for name in on:
                walk(int(graph.find(graph.senders, [name])[0]), (*path, edge))

    walk(0, ())
    return found


@pytest.mark.parametrize("graph", [SERIAL, PARALLEL])
def test_the_operations_are_those_of_sets(graph):
    a, b = drawn(graph), drawn(graph)
    one, other = set(a.edges.tolist()), set(b.edges.tolist())
    everything = set(range(graph.n_edges))
    for made_of, expected in ((a | b, one | other), (a & b, one & other), (a - b, one - other), (~a, everything - one)):
        assert made_of.edges.tolist() == sorted(expected)
    assert a == circuit_from_edges(graph, reversed(a.edges.tolist()))
    assert hash(a) == hash(circuit_from_edges(graph, a.edges))
    assert a != ~a
    assert a != "a circuit"
    assert a.names[0] in a
    assert (~a).names[0] not in a
    assert hw.Circuit.of(a.names, graph) == a
    assert len(hw.Circuit.of([], graph)) == 0


@pytest.mark.parametrize("graph", [SERIAL, PARALLEL])
def test_edges_on_a_path_are_those_that_a_walk_meets(graph):
    for share in (0.02, 0.05, 0.1):
        circuit = drawn(graph, share) | hw.Circuit.of(["embed -> mlp 0", "mlp 1 -> logits"], graph)
        assert set(circuit.on_a_path.edges.tolist()) == paths(graph, set(circuit.edges.tolist()))
    lone = hw.Circuit.of(["embed -> k 1.0", "head 1.1 -> logits", "head 0.1 -> q 1.1"], graph)
    on = {"embed -> k 1.0", "head 1.1 -> logits"} if graph.n_kv_heads < graph.n_heads else set()
    assert set(lone.on_a_path.names) == on


def test_names_of_a_kind_or_layer_stand_for_all_of_their_edges():
    assert hw.Circuit.of("head 1 -> mlp 1", SERIAL).names == [f"head 1.{h} -> mlp 1" for h in range(4)]
    assert len(~hw.Circuit.of([], SERIAL)) == SERIAL.n_edges


def test_placebos_have_the_shape_of_the_circuit_and_are_never_the_circuit():
    circuit = drawn(SERIAL, 0.3)
    kinds = circuit.table.groupby(["sender", "sender_layer", "receiver", "receiver_layer"], dropna=False).size()
    for placebo in circuit.placebos(20, seed=3):
        other = placebo.table.groupby(["sender", "sender_layer", "receiver", "receiver_layer"], dropna=False).size()
        assert other.equals(kinds)
        assert placebo != circuit
        assert circuit.overlap(placebo) == len(circuit & placebo) / len(circuit)
    first, again = circuit.placebos(3, seed=3), circuit.placebos(3, seed=3)
    assert first == again
    whole = ~hw.Circuit.of([], SERIAL)
    assert whole.placebos(2) == [whole, whole]
    nearly = whole - hw.Circuit.of(["head 0.0 -> q 1.0"], SERIAL)
    assert all(placebo != nearly for placebo in nearly.placebos(40))


def test_all_other_circuits_of_the_shape_are_equally_likely_placebos():
    circuit = hw.Circuit.of(["embed -> k 0.0", "embed -> v 0.0"], Graph(1, 2, 2, parallel=False))
    kept = np.array([[name in placebo for name in circuit.names] for placebo in circuit.placebos(900)])
    # Of the three others, one has each of the two edges, and one has neither.
    assert kept.sum(0) == pytest.approx([300, 300], abs=60)


@pytest.fixture(scope="module")
def model():
    return tiny_hooked("llama")


@pytest.fixture(scope="module")
def found(model):
    return hw.edges(model, [CLEAN, " Paris is in A"], [CORRUPTED, " Rome is in A"], **QUIET)


def test_the_strongest_edges_make_a_circuit_that_knows_what_it_was_chosen_on(found, model):
    means = found.effects[:, 0, :, 0].double().mean(0)
    circuit = found.circuit(20)
    assert circuit.edges.tolist() == sorted(means.abs().topk(20).indices.tolist())
    assert circuit.effects == pytest.approx(means[circuit.edges].numpy())
    assert circuit.seen == tuple(tuple(ids) for ids in found.run.options["prompts"][0])
    gap = float((found.baselines[:, 0, 0] - found.baselines[:, 0, 1]).mean())
    helped = found.circuit(20, by="signed")
    assert helped.edges.tolist() == sorted((-means * (1 if gap > 0 else -1)).topk(20).indices.tolist())
    assert np.isnan((~circuit).effects).all()
    assert (~circuit).seen == circuit.seen
    joined = circuit | hw.Circuit.of(["embed -> logits"], model)
    known = dict(zip(joined.names, joined.effects, strict=True))
    assert known[circuit.names[0]] == circuit.effects[0]


def test_a_screened_run_fills_a_circuit_with_estimates(model):
    found = hw.edges(model, CLEAN, CORRUPTED, method="screened", verify=3, **QUIET)
    circuit = found.circuit(found.graph.n_edges)
    assert len(circuit) == found.graph.n_edges
    assert not np.isnan(circuit.effects).any()


def test_edges_of_single_positions_make_no_circuit(model):
    found = hw.edges(model, CLEAN, CORRUPTED, over="position", receivers="logits", **QUIET)
    with pytest.raises(InputError, match="without over='position'"):
        found.circuit(3)


def test_a_circuit_is_kept_in_one_file_and_read_back(found, tmp_path):
    circuit = found.circuit(15)
    again = hw.Circuit.load(circuit.save(tmp_path / "deep" / "circuit.parquet"))
    assert again == circuit
    assert again.effects == pytest.approx(circuit.effects, rel=0, abs=0)
    assert again.seen == circuit.seen
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["circuit.parquet"]


def test_what_holds_no_circuit_is_not_read(tmp_path, found):
    (tmp_path / "text.parquet").write_text("no parquet")
    found.circuit(3).table.to_parquet(tmp_path / "table.parquet")
    found.save(tmp_path / "result")
    said = {"text.parquet": "", "table.parquet": "", "missing.parquet": "[Nn]o such file", "result": "it is a folder"}
    for name, reason in said.items():
        with pytest.raises(RunFolderError, match=f"holds no circuit.*{reason}"):
            hw.Circuit.load(tmp_path / name)


def test_what_a_circuit_does_not_have_is_named_with_what_does_it(found):
    with pytest.raises(UnknownNameError, match=r"no 'prune': circuit\.strongest\(n\) keeps"):
        found.circuit(15).prune(3)


def test_a_circuit_says_what_it_is(found):
    circuit = found.circuit(15)
    assert repr(circuit) == f"Circuit(15 of {found.graph.n_edges} edges, {len(circuit.on_a_path)} on a path)"
    assert "Circuit(15 of" in circuit._repr_html_()
    columns = "edge sender sender_layer sender_head receiver receiver_layer receiver_head effect"
    assert list(circuit.table) == columns.split()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["head 1.1 -> q 1.3"], r"head 1\.1 cannot feed q 1\.3"),
        (["head 9.9 -> logits"], "There is no layer 9; they are 0 to 2"),
        (["embed -> k 1.3"], "key-value heads"),
        (["embed"], "names no edge"),
        ([3], "names no edge"),
        (3, "give a list of names"),
        (["hed 1.1 -> logits"], "'hed 1.1' names no part of a model. Write"),
    ],
)
def test_what_names_no_edge_is_refused(names, said):
    with pytest.raises(InputError, match=said):
        hw.Circuit.of(names, SERIAL)


def test_circuits_of_another_graph_are_refused():
    for operate in ("__or__", "__and__", "__sub__", "overlap"):
        with pytest.raises(InputError, match=r"a model of 2 layers.* not of 3 layers of 4 heads on 2 key-value heads"):
            getattr(drawn(SERIAL), operate)(drawn(PARALLEL))
    with pytest.raises(InputError, match="b is from a model of 2 layers"):
        checked_circuits({"a": drawn(SERIAL), "b": drawn(PARALLEL)}, SERIAL)
    for empty, wrong in itertools.product(([], {}), (["no"], 3, {1: drawn(SERIAL)})):
        with pytest.raises(InputError, match="empty"):
            checked_circuits(empty, SERIAL)
        with pytest.raises(InputError):
            checked_circuits(wrong, SERIAL)
