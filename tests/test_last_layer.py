"""In the last layer only what is read is computed: the same numbers as without, in as many operations as predicted."""

from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headwater as hw
from headwater.circuits.exact import EdgeRows
from headwater.circuits.pairs import Pairs
from headwater.models.blocks import Blocks
from headwater.models.edits import read_hook
from headwater.models.sites import SITES
from headwater.patching.walk import Walk
from tests.own_models import own_model
from tests.tiny import FAMILIES, tiny_hooked

CLEAN, CORRUPTED = [5, 7, 11, 13, 17, 19, 8, 2], [5, 7, 12, 14, 17, 19, 4, 2]
OWN = ("plain", "rotary", "capped")
DIFFERENCE = hw.logit_difference(5, 9)
QUIET = {"metric": DIFFERENCE, "progress": False}


@cache
def loaded(family: str) -> hw.HookedModel:
    if family in OWN:
        return own_model(family)
    return tiny_hooked(family)


@cache
def rows_of(family: str) -> EdgeRows:
    """The rows of a pair, from the first position on at which its prompts differ."""
    model = loaded(family)
    pairs = Pairs(model, [CLEAN], [CORRUPTED], DIFFERENCE)
    with torch.no_grad(), model.lock:
        runs = pairs.runs(0)
        return EdgeRows(runs, runs.start)


@pytest.mark.diagonal
@pytest.mark.parametrize("kept", [[5], [1, 4]], ids=["the last position", "two before it"])
@pytest.mark.parametrize("family", [*FAMILIES, "plain", "rotary", "capped"])
def test_attention_where_it_is_read_is_that_of_all_positions_there(family, kept, monkeypatch):
    rows = rows_of(family)
    layer = rows.n_layers - 1
    monkeypatch.setattr(rows, "kept", torch.tensor(kept))
    entering = rows.base("resid_pre", layer) + 0.3 * torch.randn(3, 6, rows.runs.model.shape.d_model)
    with torch.no_grad(), rows.runs.model.lock:
        whole = rows.attention(layer, entering, whole=True)
        torch.testing.assert_close(rows.attention(layer, entering), whole[:, kept], rtol=1e-5, atol=1e-6)
        seen: list[torch.Tensor] = []
        look = read_hook(lambda activation, hook: seen.append(activation))
        with rows.runs.model.hooks([(SITES["z"].hook_name(layer), look)]):
            watched = rows.attention(layer, entering)
    torch.testing.assert_close(watched, whole[:, kept], rtol=1e-5, atol=1e-6)
    assert seen[0].shape[1] == 6  # who looks into attention sees all of it


def counted(work) -> int:
    """Operations of matrix products."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_the_last_layer_takes_keys_and_values_of_all_positions_and_the_rest_where_it_is_read(family):
    rows, shape = rows_of(family), loaded(family).shape
    layer, n_rows, n = rows.n_layers - 1, 4, 6
    entering = rows.base("resid_pre", layer).expand(n_rows, -1, -1).contiguous()
    with torch.no_grad(), loaded(family).lock:
        found = counted(lambda: rows.through(layer, entering))
    inner, kv = shape.n_heads * shape.d_head, shape.n_kv_heads * shape.d_head
    mlp = (3 if family == "llama" else 2) * shape.d_mlp * shape.d_model
    attention = 2 * inner * len(CLEAN)  # scores and values of one query
    a_query, a_key = 2 * inner * shape.d_model + mlp + attention, 2 * kv * shape.d_model
    queries_of_first = inner * shape.d_model  # of one position, to say how large a query is
    assert found == 2 * n_rows * (n * a_key + a_key + a_query + queries_of_first)


@pytest.mark.diagonal
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "phi"])
@pytest.mark.parametrize("sites", ["resid_pre", "z", ["q", "attn_out"]])
def test_a_sweep_is_what_it_was_in_fewer_operations(family, sites, monkeypatch):
    model, found = loaded(family), []
    options = {"sites": sites, "over": ["layer", "position"], **QUIET}
    hw.patch(model, [CLEAN], [CORRUPTED], **options)  # what is checked once is checked

    def sweep():
        found.append(hw.patch(model, [CLEAN], [CORRUPTED], **options).table["effect"].to_numpy())

    fewer = counted(sweep)
    monkeypatch.setattr(Walk, "_needs_all", lambda *_: True)
    assert fewer < counted(sweep)
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)


def test_edges_are_what_they_were_without_it(monkeypatch):
    model = loaded("llama")
    trimmed = hw.edges(model, [CLEAN], [CORRUPTED], **QUIET)
    plain = Blocks.attention

    def everywhere(self, layer, residual, positions, mask, prefix, kept=None, **call):
        added = plain(self, layer, residual, positions, mask, prefix, **call)
        return added if kept is None else added[:, kept[0]]

    monkeypatch.setattr(Blocks, "attention", everywhere)
    whole = hw.edges(model, [CLEAN], [CORRUPTED], **QUIET)
    torch.testing.assert_close(trimmed.effects, whole.effects, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "plain"])
def test_the_recorded_run_reads_the_unembedding_only_where_its_logits_are_read(family, monkeypatch):
    model, recorded, plain = loaded(family), [], Blocks.record

    def record(self, *args, **options):
        recorded.append(plain(self, *args, **options).last_logits)
        return plain(self, *args, **options)

    monkeypatch.setattr(Blocks, "record", record)
    model.steps_checked = False
    first = hw.patch(model, [CLEAN], [CORRUPTED], sites="resid_post", **QUIET)
    again = hw.patch(model, [CLEAN], [CORRUPTED], sites="resid_post", **QUIET)
    # The first call checks the model with the logits of its recorded run.
    assert [logits is None for logits in recorded] == [False, True]
    assert first.table["effect"].tolist() == again.table["effect"].tolist()


def test_an_edit_that_looks_at_what_is_not_read_sees_what_the_model_has_there():
    """A function of the last layer's attention output is given that of every position, not zeros where none is read."""
    model, seen = loaded("gpt2"), []
    last = model.shape.n_layers - 1

    def kept(activation, *_):
        seen.append(activation.clone())
        return 2 * activation

    hw.patch(model, [CLEAN], values=kept, sites="attn_out", layers=[last], over=["layer"], **QUIET)
    assert all(bool((one != 0).any(-1).all()) for one in seen)
