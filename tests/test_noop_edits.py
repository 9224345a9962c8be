"""Cells that write what stands there already have effect 0 and are not run; all others are what whole runs give."""

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import InterventionError
from headwater.patching import walk
from headwater.patching.edits import CellTemplate
from tests.own_models import own_model
from tests.tiny import tiny_model, tiny_tokenizer

QUIET = {"metric": hw.logit_difference(4, 6), "progress": False}
CHANGED = (2, 5)
"""Where the two prompts differ, of each pair."""


def models(name):
    return own_model("plain") if name == "own" else hw.load(tiny_model(name), tokenizer=tiny_tokenizer())


def pairs(n=3, length=8):
    clean = torch.randint(8, 20, (n, length))
    corrupted = clean.clone()
    corrupted[:, CHANGED] = clean[:, CHANGED] - 3
    return clean, corrupted


def rows_walked(monkeypatch):
    counted, plainly = [], walk.rows_of

    def rows_of(variants):
        counted.append(len(rows := plainly(variants)))
        return rows

    monkeypatch.setattr(walk, "rows_of", rows_of)
    return counted


@pytest.mark.parametrize("name", ["own", "gpt2", "llama"])
def test_of_the_first_layers_input_only_the_tokens_that_differ_are_run(name, monkeypatch):
    model, (clean, corrupted) = models(name), pairs()
    hw.patch(model, clean, corrupted, sites="resid_pre", **QUIET)  # checks the model
    counted = rows_walked(monkeypatch)
    table = hw.patch(model, clean, corrupted, sites="resid_pre", layers=[0, 1], **QUIET).table
    n_above = clean.shape[1] - CHANGED[0]
    assert sum(counted) == len(clean) * (len(CHANGED) + n_above)
    first = table[table["layer"] == 0]
    assert (first["effect"] != 0).tolist() == first["position"].isin(CHANGED).tolist()
    assert (table[(table["layer"] == 1) & (table["position"] >= CHANGED[0])]["effect"] != 0).all()


OPTIONS = {
    "positions": {"sites": "resid_pre"},
    "positions of noise": {"sites": "resid_pre", "direction": "noise"},
    "a window of positions": {"sites": "resid_pre", "window": {"position": 3}},
    "a window of layers": {"sites": "resid_pre", "over": ["layer", "position"], "window": 2},
    "ever more layers": {"sites": "resid_pre", "over": ["layer", "position"], "window": "cumulative"},
    "another layer's values": {"sites": "resid_pre", "from_layer": [0, 1]},
    "heads at positions": {"sites": ["q", "v", "z"], "over": ["layer", "head", "position"]},
    "all positions": {"sites": ["resid_pre", "mlp_out"], "over": ["layer"]},
    "zeros": {"sites": "resid_pre", "values": "zero"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_sweeps_with_cells_that_change_nothing_equal_whole_runs_of_every_cell(options, monkeypatch):
    model, (clean, corrupted) = own_model("plain"), pairs(2)
    found = hw.patch(model, clean, corrupted, **options, **QUIET)
    assert found.engine == "wavefront"
    monkeypatch.setattr(CellTemplate, "writes_inputs_outside", lambda *_: False)
    whole = hw.patch(model, clean, corrupted, engine="whole runs", **options, **QUIET)
    np.testing.assert_allclose(found.table["effect"], whole.table["effect"], atol=1e-5)
    assert (whole.table["effect"].abs() > 1e-3).any()


def test_with_hooks_that_mix_tokens_every_cell_is_run():
    model, (clean, corrupted) = own_model("plain"), pairs(2)
    with model.hooks([("hook_embed", lambda activation, hook: activation + activation.cumsum(1))]):
        table = hw.patch(model, clean, corrupted, sites="resid_pre", layers=[0], engine="whole runs", **QUIET).table
    assert (table[table["position"] >= CHANGED[0]]["effect"].abs() > 1e-4).all()


def test_an_edit_that_was_made_for_some_rows_only_is_told(monkeypatch):
    model, (clean, corrupted) = own_model("plain"), pairs()
    plainly = walk.Walk._span_edits

    def without_the_first_row(self, *place):
        span_edits = plainly(self, *place)
        self._applied = {edit: [runs[1:] for runs in tiles] for edit, tiles in self._applied.items()}
        return span_edits

    monkeypatch.setattr(walk.Walk, "_span_edits", without_the_first_row)
    with pytest.raises(InterventionError, match="did not take effect: its hook never fired"):
        hw.patch(model, clean, corrupted, sites="resid_pre", **QUIET)
