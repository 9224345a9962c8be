"""Copying by eigenvalues: those of the small twin are those of the whole map from token to token."""

import numpy as np
import pytest
import torch

import headwater as hw
from headwater.errors import ModelError
from headwater.heads import patterns
from headwater.heads.patterns import copying_scores, eigenvalue_share
from headwater.models.loading import weights_of
from headwater.planted import induction, name_mover
from headwater.planted.circuits import INDUCTION_HEAD, NAME_MOVER_HEAD
from tests.own_models import own_model
from tests.tiny import tiny_hooked

QUIET = {"progress": False, "sequences": 2, "length": 4}


def tiny(family):
    return tiny_hooked(family, seed=7)


@pytest.mark.diagonal
@pytest.mark.oracle
@pytest.mark.parametrize("embedding", ["raw", "mlp0", "embed+mlp0", "layer0"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "neox"])
def test_the_share_is_that_of_the_eigenvalues_of_the_whole_map_from_token_to_token(family, embedding):
    model = tiny(family)
    weights = weights_of(model)
    found, _ = copying_scores(weights, embedding, seed=0)
    every = torch.arange(model.shape.d_vocab)
    for layer, head in ((0, 1), (1, 3), (2, 0)):
        E = weights.effective_embedding(every, embedding if layer else "raw").double()
        factors = weights.layer(layer)
        W_V, W_O = factors.W_V[factors.value_head(head)].double(), factors.W_O[head].double()
        values = np.linalg.eigvals((E @ W_V @ W_O @ weights.unembedding().double()).numpy())
        expected = values.sum().real / np.abs(values).sum()
        assert float(found[layer, head]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.planted
def test_heads_that_copy_have_1_and_heads_that_write_nothing_none():
    for build, head in ((induction, INDUCTION_HEAD), (name_mover, NAME_MOVER_HEAD)):
        made = build()
        model = hw.load(made.model, tokenizer=made.tokenizer)
        heads = hw.attention_behaviour(model, embedding="raw", **QUIET).heads.set_index(["layer", "head"])
        assert heads.loc[head, "copying"] == pytest.approx(1, abs=1e-4)
        assert heads.loc[head, "copying"] > heads.loc[head, "copying_high"]
        assert heads["copying"].notna().sum() == 1  # the others write for heads, not for the logits


@pytest.mark.planted
def test_copying_suppressing_swapping_and_passing_on_have_1_minus_1_0_and_nothing():
    words = torch.eye(8).double()  # embedded and unembedded as themselves
    read = torch.eye(8)[None, :, :4].expand(4, -1, -1)
    passed_on = torch.eye(8)[4:]
    swapped = torch.eye(8)[[1, 0, 3, 2]]
    written = torch.stack([torch.eye(8)[:4], -torch.eye(8)[:4], swapped, passed_on])
    found = eigenvalue_share(written, words, read)
    torch.testing.assert_close(found[:3], torch.tensor([1.0, -1.0, 0.0]).double())
    assert found[3].isnan()  # no word is written as itself, however often it is passed on


def test_of_random_heads_as_many_lie_beyond_the_bounds_as_the_level_says(monkeypatch):
    joined = torch.randn(24, 24).double() + 0.3
    bounds = patterns._bounds(joined, 6, seed=3)
    shares = eigenvalue_share(torch.randn(4000, 6, 24), joined, torch.randn(4000, 24, 6))
    beyond = ((shares < bounds[0]) | (shares > bounds[1])).double().mean()
    assert 0.005 < float(beyond) < 0.15


def test_the_share_does_not_depend_on_the_size_of_the_factors():
    W_O, joined, W_V = torch.randn(3, 4, 10), torch.randn(10, 10).double(), torch.randn(3, 10, 4)
    torch.testing.assert_close(eigenvalue_share(W_O, joined, W_V), eigenvalue_share(5 * W_O, 2 * joined, W_V / 7))
    torch.testing.assert_close(eigenvalue_share(-W_O, joined, W_V), -eigenvalue_share(W_O, joined, W_V))


def test_pieces_of_the_vocabulary_add_up(monkeypatch):
    weights = weights_of(tiny("llama"))
    whole, _ = copying_scores(weights, "mlp0", seed=0)
    monkeypatch.setattr(patterns, "PIECE", 17)
    parts, _ = copying_scores(weights, "mlp0", seed=0)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_without_copying_there_are_no_eigenvalues_and_the_rest_is_the_same():
    model = tiny("llama")
    without, whole = (hw.attention_behaviour(model, copying=copying, **QUIET) for copying in (False, True))
    assert without.heads.filter(like="copying").isna().all(axis=None)
    assert not any("eigenvalues" in said for said in without.report())
    assert any("eigenvalues" in said for said in whole.report())
    assert without.table.equals(whole.table)


def test_where_heads_have_no_map_from_token_to_token_it_is_said_and_how_to_go_on():
    model = own_model("answers in other tokens")
    with pytest.raises(ModelError, match=r"answers in 7 others.*With copying=False the rest is computed"):
        hw.attention_behaviour(model, **QUIET)
    assert len(hw.attention_behaviour(model, copying=False, **QUIET).heads) == 8
    alone = hw.attention_behaviour(own_model("attention alone"), **QUIET)
    assert alone.run.options["embedding"] == "raw"
    assert alone.heads["copying"].notna().all()
