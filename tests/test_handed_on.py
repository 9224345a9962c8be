"""States handed on from a trace to detection: the same bytes as computed anew, and never those of anything else."""

from contextlib import nullcontext
from dataclasses import replace

import pandas as pd
import pytest
import torch

import headwater as hw
from headwater.detection.detection import detect
from headwater.detection.reweighting import Reweighting
from headwater.pathways import handed_on
from headwater.pathways.handed_on import handing_on, keep, states_of
from headwater.pathways.interventions import Setup, after_states, block_exact_tokens, untouched
from headwater.questions.states import probe_states
from tests import chance

SETUP = Setup("mlp_out", "exact_answer_last", "mask", "after", 8)


def only_piece(rows):
    """Rows that fit into one piece, in its order."""
    (chosen,) = handed_on.chunks(rows)
    return rows.rows(chosen)


@pytest.fixture(scope="module")
def model():
    return hw.load()


@pytest.fixture(scope="module")
def answered(model):
    questions = hw.load_questions("natural", sample=60, seed=int(chance.rng().integers(1000)))
    return hw.answer(model, questions, progress=False)


@pytest.fixture
def computed(monkeypatch):
    """How many rows were run for states that were not handed on."""
    rows = []

    def counted(model, piece, setup):
        rows.append(len(piece.tokens))
        return after_states(model, piece, setup)

    monkeypatch.setattr(handed_on, "after_states", counted)
    monkeypatch.setattr(handed_on, "CHUNK", 20)
    return rows


def test_detection_after_a_trace_runs_no_answer_for_its_states_and_gives_the_same_to_the_last_bit(
    model, answered, computed, tmp_path
):
    options = {"seeds": 1, "batch_size": 8, "progress": False}
    found = []
    for number, context in enumerate((handing_on(), nullcontext())):
        with context:
            hw.trace_pathways(model, answered, controls=False, **options)
            given = options | {"reweighting": Reweighting(epochs=1), "out": tmp_path / str(number)}
            found.append(detect(model, answered, **given))
        assert sum(computed) == number * 2 * len(answered.table)
    pd.testing.assert_frame_equal(found[0].scores, found[1].scores, check_exact=True)
    pd.testing.assert_frame_equal(found[0].table, found[1].table, check_exact=True)
    assert torch.equal(found[0].weight, found[1].weight)
    files = [{file.name: file.read_bytes() for file in (tmp_path / n).glob("*.parquet")} for n in "01"]
    assert files[0]
    assert files[0] == files[1]


def test_states_in_pieces_are_those_of_all_rows_at_once(model, answered, computed):
    plain = probe_states(model, answered, batch_size=64, progress=False)
    torch.testing.assert_close(states_of(model, untouched(answered, SETUP), SETUP), plain, atol=1e-5, rtol=1e-4)
    severed = block_exact_tokens(answered, SETUP)
    whole = after_states(model, severed, SETUP)
    torch.testing.assert_close(states_of(model, severed, SETUP), whole, atol=1e-5, rtol=1e-4)
    assert computed


def test_only_the_same_rows_read_the_same_way_are_handed_on_and_once(model, answered, monkeypatch):
    severed, plain = block_exact_tokens(answered, SETUP), untouched(answered, SETUP)
    kept = torch.zeros(model.shape.n_layers, len(answered.table), model.shape.d_model)
    another = [(*tokens[:-1], tokens[-1] + 1) for tokens in severed.tokens]
    others = [
        (replace(severed, tokens=another), SETUP),
        (replace(severed, positions=[at - 1 for at in severed.positions]), SETUP),
        (replace(severed, keys=[keys[:1] for keys in severed.keys]), SETUP),
        (replace(severed, queries=[(at,) for at in severed.positions]), SETUP),
        (severed.rows(range(len(severed.tokens) - 1)), SETUP),
        (plain, SETUP),
        (severed, replace(SETUP, site="resid_post")),
        (severed, replace(SETUP, variant="zero")),
        (severed, replace(SETUP, batch_size=9)),
    ]
    monkeypatch.setattr(handed_on, "after_states", lambda model, piece, setup: torch.ones(()))
    with handing_on():
        keep(model, only_piece(severed), SETUP, kept)
        assert all((states_of(model, *other) == 1).all() for other in others)
        assert [float(states_of(model, severed, SETUP).mean()) for _ in range(2)] == [0, 1]
    assert (states_of(model, severed, SETUP) == 1).all()


def test_nothing_is_handed_on_of_other_weights_or_of_a_model_that_hooks_act_in(answered, monkeypatch):
    model = hw.load()
    rows = untouched(answered, SETUP)
    kept = torch.zeros(model.shape.n_layers, len(answered.table), model.shape.d_model)
    double = ("blocks.0.hook_mlp_out", lambda activation, hook: 2 * activation)
    monkeypatch.setattr(handed_on, "after_states", lambda model, piece, setup: torch.ones(()))
    with handing_on():
        with model.hooks([double]):
            keep(model, only_piece(rows), SETUP, kept)
        assert (states_of(model, rows, SETUP) == 1).all()
        keep(model, only_piece(rows), SETUP, kept)
        with model.hooks([double]):
            assert (states_of(model, rows, SETUP) == 1).all()
        weight = next(model.raw.parameters())
        with torch.no_grad():
            weight.add_(1)
            assert (states_of(model, rows, SETUP) == 1).all()
            weight.sub_(1)


def test_what_has_no_room_is_computed_again(model, answered, monkeypatch):
    severed, plain = block_exact_tokens(answered, SETUP), untouched(answered, SETUP)
    kept = torch.zeros(model.shape.n_layers, len(answered.table), model.shape.d_model)
    monkeypatch.setattr(handed_on, "KEPT_BYTES", kept.numel() * 4 + 1)
    monkeypatch.setattr(handed_on, "after_states", lambda model, piece, setup: torch.ones(()))
    with handing_on():
        keep(model, only_piece(plain), SETUP, kept)
        keep(model, only_piece(severed), SETUP, kept)
        assert (states_of(model, severed, SETUP) == 1).all()
        assert (states_of(model, plain, SETUP) == 0).all()
