"""The graph of a model: its nodes and edges are counted, numbered and named as they come after one another."""

import numpy as np
import pytest

from headwater.circuits.graph import Graph
from headwater.errors import InputError

SIZES = [
    (12, 12, 12, False, 32_491),
    (48, 25, 25, False, 2_235_025),
    (16, 32, 8, False, 195_865),
    (32, 32, 32, True, 1_591_857),
]
SERIAL, PARALLEL = Graph(3, 4, 2, False), Graph(2, 3, 3, True)


@pytest.mark.parametrize(("layers", "heads", "kv_heads", "parallel", "published"), SIZES)
def test_the_number_of_edges_is_the_published_one(layers, heads, kv_heads, parallel, published):
    graph = Graph(layers, heads, kv_heads, parallel)
    assert graph.n_edges == published
    assert len(graph.senders) == 1 + layers * (heads + 1)
    assert len(graph.receivers) == layers * (heads + 2 * kv_heads + 1) + 1


@pytest.mark.parametrize("graph", [SERIAL, PARALLEL])
def test_an_edge_leads_from_what_comes_before_to_what_comes_after(graph):
    senders, receivers = graph.senders.names(), graph.receivers.names()

    def comes_before(sender: str, receiver: str) -> bool:
        if sender == "embed" or receiver == "logits":
            return True
        (kind, place), (reading, where) = sender.split(), receiver.split()
        layer, below = int(where.split(".")[0]), int(place.split(".")[0])
        return below < layer or (below == layer and kind == "head" and reading == "mlp" and not graph.parallel)

    expected = [f"{s} -> {r}" for r in receivers for s in senders if comes_before(s, r)]
    assert [graph.name(edge) for edge in range(graph.n_edges)] == expected
    assert [graph.edge_named(name) for name in expected] == list(range(graph.n_edges))


def test_names_choose_a_node_a_layer_or_a_kind():
    assert len(SERIAL.find(SERIAL.senders, ["head"])) == 12
    assert len(SERIAL.find(SERIAL.receivers, ["k 1"])) == 2
    assert SERIAL.senders.names()[SERIAL.find(SERIAL.senders, ["head 2.3"]).item()] == "head 2.3"
    chosen = SERIAL.among(["embed", "mlp 0"], "q 1.2")
    assert [SERIAL.name(edge) for edge in chosen] == ["embed -> q 1.2", "mlp 0 -> q 1.2"]
    assert np.array_equal(SERIAL.among(None, None), np.arange(SERIAL.n_edges))


@pytest.mark.parametrize(
    ("senders", "receivers", "said"),
    [
        ("head 2.1", "q 2.3", "cannot feed"),
        ("hed 1.1", None, "'hed 1.1' names no part of a model. Write"),
        ("q 1.1", None, "'q 1.1' is a receiver, not a sender"),
        (None, "embed", "'embed' is a sender, not a receiver"),
        ("head 3.0", None, "There is no layer 3; they are 0 to 2"),
        (
            None,
            "k 1.3",
            "There is no head 3 in layer 1; they are 0 to 1; k counts key-value heads, each read by 2 query",
        ),
        ([], None, "empty list"),
        (3, None, "give a name such as"),
        ([3], None, "3 names no part of a model"),
    ],
)
def test_what_is_no_node_or_comes_too_late_is_refused_with_what_there_is(senders, receivers, said):
    with pytest.raises(InputError, match=said):
        SERIAL.among(senders, receivers)


def test_a_sender_after_its_receiver_is_refused():
    with pytest.raises(InputError, match=r"head 1\.1 cannot feed q 1\.3"):
        SERIAL.edge_named("head 1.1 -> q 1.3")
    with pytest.raises(InputError, match="names no edge"):
        SERIAL.edge_named("head 1.1")
    assert SERIAL.edge_named("head 1.1 -> mlp 1") > 0
    with pytest.raises(InputError, match="cannot feed"):
        PARALLEL.edge_named("head 1.1 -> mlp 1")
