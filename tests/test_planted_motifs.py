"""Circuits in series, in parallel, redundant and suppressing: exactly the edges that were wired are recovered."""

from functools import cache

import pytest

import headwater as hw
from tests import planted_motifs as motifs

pytestmark = pytest.mark.planted
KINDS = ("serial", "parallel", "redundant", "suppressing")
PAIR = f" {motifs.CLEAN}", f" {motifs.CORRUPTED}"
ASKED = {"metric": hw.logit_difference(f" {motifs.ANSWER}", f" {motifs.OTHER}"), "progress": False}


@cache
def planted(kind: str) -> tuple[motifs.Motif, hw.HookedModel]:
    motif = getattr(motifs, kind)()
    return motif, hw.load(motif.planted.model, tokenizer=motif.planted.tokenizer)


@pytest.mark.diagonal
@pytest.mark.parametrize("options", [{"method": "exact"}, {"method": "screened", "verify": 12}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_wired_edges_are_recovered_with_their_effects(kind, options):
    motif, model = planted(kind)
    edges = hw.edges(model, *PAIR, direction=motif.direction, **options, **ASKED)
    top = edges.top(edges.graph.n_edges)
    found = {row.edge: row.effect for row in top.itertuples() if abs(row.effect) > 1e-4}
    assert found == pytest.approx(dict(motif.wired), abs=1e-4)
    assert sorted(edges.circuit(len(found)).names) == sorted(motif.wired)
    assert options.get("verify", 0) < edges.graph.n_edges / 20


@pytest.mark.parametrize("kind", KINDS)
def test_the_wired_edges_alone_are_the_model_whatever_is_taken_out_of_both(kind):
    motif, model = planted(kind)
    wired = hw.Circuit.of(list(motif.wired), model)
    assert len(wired.on_a_path) == len(wired)
    complete = hw.circuits.completeness(model, *PAIR, wired, sets=6, placebos=0, **ASKED)
    assert complete["incompleteness"].max() < 1e-4
    assert complete["circuit"].iloc[0] == pytest.approx(1, abs=1e-4)


def test_what_is_redundant_is_missed_by_no_single_edge_of_the_clean_run_and_found_by_minimality():
    motif, model = planted("redundant")
    edges = hw.edges(model, *PAIR, **ASKED).top(262)
    assert edges.loc[edges["effect"].abs() > 1e-4, "edge"].tolist() == ["mlp 1 -> logits"]
    wired = hw.Circuit.of(list(motif.wired), model)
    alone, some = (
        hw.circuits.minimality(model, *PAIR, wired, sets=sets, placebos=5, seed=1, **ASKED) for sets in (0, 40)
    )
    assert alone["needed"].sum() == 1
    assert some["needed"].all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_greedy_search_leaves_what_carries_the_answer(kind):
    motif, model = planted(kind)
    found = hw.find_circuit(model, *PAIR, threshold=0.1, placebos=0, **ASKED).circuit
    if kind == "redundant":  # one of the two ways is enough
        assert len(found) == 3
        assert set(found.names) < set(motif.wired)
    else:
        assert sorted(found.names) == sorted(motif.wired)
