"""The figure of a circuit: every edge a line in the colour of its sign, no node on another, its effects where few."""

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch

from headwater.circuits.circuit import Circuit, circuit_from_edges
from headwater.circuits.graph import Graph
from headwater.colors import FAINT
from headwater.figures import circuits as drawing
from tests import chance

GROUPED = Graph(3, 4, 2, False)


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def lines_in(ax):
    return [patch for patch in ax.patches if isinstance(patch, PathPatch)]


@pytest.mark.parametrize(("n", "graph"), [(20, Graph(4, 8, 2, True)), (200, Graph(12, 12, 12, False))])
def test_no_node_stands_on_another_and_every_edge_is_drawn(n, graph):
    generator = chance.rng()
    edges = np.sort(generator.choice(graph.n_edges, n, replace=False)).tolist()
    circuit = circuit_from_edges(graph, edges, [float(generator.normal()) for _ in edges])
    lines = drawing.lines_of(circuit)
    assert {line.edge for line in lines} == set(range(n))
    places = list(drawing.layout(graph, lines).values())
    assert len(set(places)) == len(places)
    assert len(lines_in(circuit.plot())) == len(lines)


def test_colours_are_those_of_signs_and_the_strongest_is_the_thickest():
    named = {"embed -> mlp 0": -8.0, "mlp 0 -> logits": 2.0, "embed -> logits": np.nan}
    edges = {GROUPED.edge_named(name): effect for name, effect in named.items()}
    ax = circuit_from_edges(GROUPED, edges, list(edges.values())).plot()
    found = {to_hex(line.get_edgecolor()): line.get_linewidth() for line in lines_in(ax)}
    assert set(found) == {drawing.ABOVE, drawing.BELOW, FAINT}
    assert max(found, key=lambda color: found[color]) == drawing.BELOW
    said = [text.get_text() for text in ax.get_legend().get_texts()]
    assert said == ["effect above 0", "effect below 0", "effect unknown", "thickest: 8"]
    assert "\N{MINUS SIGN}8" in [text.get_text() for text in ax.texts]


def test_a_key_that_several_heads_read_leads_to_those_of_them_that_take_part():
    both = Circuit.of(["embed -> k 1.1", "head 1.3 -> logits"], GROUPED)
    assert [GROUPED.senders.name(line.target) for line in drawing.lines_of(both)[:1]] == ["head 1.3"]
    alone = Circuit.of(["embed -> k 1.1"], GROUPED)
    assert [GROUPED.senders.name(line.target) for line in drawing.lines_of(alone)] == ["head 1.2"]


def test_effects_are_written_beside_few_edges_and_not_beside_many():
    graph = Graph(4, 4, 4, False)
    for n, written in ((10, True), (60, False)):
        edges = list(range(n))
        ax = circuit_from_edges(graph, edges, np.ones(len(edges))).plot()
        assert any("+1" in text.get_text() for text in ax.texts) == written


def test_it_is_drawn_where_it_is_asked_for_and_without_any_edge_too():
    figure, ax = plt.subplots()
    assert Circuit.of(["embed -> logits"], GROUPED).plot(ax) is ax
    assert not lines_in(Circuit.of([], GROUPED).plot())
    assert len(figure.axes) == 1


def test_the_title_begins_with_the_models_name_where_it_is_known():
    circuit = Circuit.of(["embed -> logits"], GROUPED)
    assert circuit.plot().get_title(loc="left") == "Circuit of 1 edges, 1 on a path"
    found = replace(circuit, model="runs/models/mine")
    assert found.plot().get_title(loc="left") == "mine: circuit of 1 edges, 1 on a path"
    assert found == circuit


def test_a_circuit_keeps_the_name_of_its_model_through_sets_and_files(tmp_path):
    one = replace(Circuit.of(["embed -> logits"], GROUPED), model="mine")
    other = replace(Circuit.of(["embed -> mlp 0"], GROUPED), model="another")
    assert [(~one).model, (one | one).model, one.placebos(1)[0].model] == ["mine"] * 3
    assert (one | Circuit.of(["embed -> mlp 0"], GROUPED)).model == "mine"
    assert (one | other).model == ""
    assert Circuit.load(one.save(tmp_path / "one.parquet")).model == "mine"
