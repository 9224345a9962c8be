"""What all rows of a sweep begin with is recorded once: the same effects as whole rows give, or whole rows again."""

import dataclasses

import pytest
import torch

import headwater as hw
from headwater.models import forward
from headwater.models.blocks import Blocks
from headwater.models.tokens import Batch
from tests import chance
from tests.tiny import FEW, tiny_model

BEGINS = [5, 33, 12, 40, 7, 21, 9, 30, 11, 14]
CLEAN, CORRUPTED = ([[*BEGINS, one, 8], [*BEGINS, two, 8, 6, 3]] for one, two in ((44, 45), (46, 47)))
OPTIONS = {"sites": ["resid_pre", "z", "mlp_out"], "metric": hw.logit_difference(5, 9), "progress": False}


def effects(model):
    return torch.tensor(hw.patch(model, CLEAN, CORRUPTED, **OPTIONS).table["effect"].to_numpy())


@pytest.mark.oracle
@pytest.mark.parametrize("family", [*FEW, "neox", "qwen3", "gemma3"])
def test_what_rows_begin_with_is_recorded_once_and_a_sweep_is_the_same(family, monkeypatch):
    model = hw.load(tiny_model(family, seed=chance.seed_of(family)))
    expected = effects(model)
    monkeypatch.setattr(forward, "WORTH_A_RUN", 4)
    monkeypatch.setattr(forward, "SAVED", 4)
    effects(model)  # the first time both ways are run, and compared
    assert model.start_checked
    widths, record = [], Blocks.record

    def recorded(blocks, batch, *args, **options):
        widths.append(tuple(batch.tokens.shape))
        return record(blocks, batch, *args, **options)

    monkeypatch.setattr(Blocks, "record", recorded)
    found = effects(model)
    assert widths == [(1, 14), (3, 4)], "the longest row, and what comes after the start of the others"
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_model_that_gives_something_else_on_top_of_a_start_is_recorded_whole(monkeypatch):
    model = hw.load(tiny_model("llama"))
    expected = effects(model)
    monkeypatch.setattr(forward, "WORTH_A_RUN", 4)
    monkeypatch.setattr(forward, "SAVED", 4)
    after = Batch.after
    monkeypatch.setattr(
        Batch, "after", lambda batch, n: dataclasses.replace(after(batch, n), tokens=batch.tokens[:, n:] * 0)
    )
    for _ in range(2):
        torch.testing.assert_close(effects(model), expected, atol=1e-6, rtol=1e-5)
        assert model.start_checked is False
