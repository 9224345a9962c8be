"""The residual streams that likelihoods are read from are those of the model's own run, whichever way they come."""

import pytest
import torch

import headwater as hw
from headwater.errors import NumericsError
from headwater.models.bare_model import BareModel, residual_streams
from tests.tiny import padded_batch


@pytest.fixture
def bare(monkeypatch):
    """How a model ran without wrappers: "read", or to its logits."""
    runs = []

    def noted(name, usual):
        return lambda *args, **options: (runs.append(name), usual(*args, **options))[1]

    for name in ("read", "last_logits"):
        monkeypatch.setattr(BareModel, name, noted(name, getattr(BareModel, name)))
    return runs


def by_hooks(model, batch):
    kept = {}
    layers = range(model.shape.n_layers)

    def keep(layer):
        return f"blocks.{layer}.hook_resid_post", lambda x, hook: kept.update({layer: x.clone()})

    model.run(batch, [keep(layer) for layer in layers])
    return kept


def test_every_layer_is_what_hooks_see_there(models, family, bare):
    model = models(family)
    batch, layers = padded_batch(model), list(range(model.shape.n_layers))
    expected = by_hooks(model, batch)
    bare.clear()
    for asked in (layers, layers[:-1]):
        found = residual_streams(model, batch, asked, torch.clone)
        assert list(found) == asked
        for layer in asked:
            error = (found[layer] - expected[layer])[batch.mask].abs().max() / expected[layer][batch.mask].abs().max()
            assert error < 64 * torch.finfo(torch.float32).eps
    # compared with the bridge, if no test before has; without wrappers; with them
    ways = ["last_logits", "read", "read"], ["read", "read"], []
    assert bare in ways
    without_wrappers = bool(bare)
    bare.clear()
    residual_streams(model, batch, layers, torch.clone)
    assert bare == ["read"] * without_wrappers, "no logits are computed"
    after = by_hooks(model, batch)
    assert all(torch.equal(after[layer], expected[layer]) for layer in layers)


def test_a_run_without_wrappers_is_taken_where_nobody_acts_and_a_hook_acts_where_somebody_does(checkpoint, bare):
    model = hw.load(checkpoint("llama"))
    batch, last = padded_batch(model), model.shape.n_layers - 1
    plain = residual_streams(model, batch, [last], torch.clone)[last]
    assert bare == ["last_logits", "read"]
    bare.clear()
    with model.hooks([("blocks.0.hook_resid_post", lambda x, hook: x * 0.5)]):
        assert not torch.allclose(residual_streams(model, batch, [last], torch.clone)[last], plain, atol=1e-3)
    assert not bare


def test_numbers_that_are_not_finite_are_an_error_that_names_the_layer(checkpoint):
    model = hw.load(checkpoint("llama"))
    batch, last = padded_batch(model), model.shape.n_layers - 1
    residual_streams(model, batch, [last], torch.clone)
    weight = model.raw.blocks[1].mlp.original_component.down_proj.original_component.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3, 2] = float("nan")
        with pytest.raises(NumericsError, match="first in the output of layer 1"):
            residual_streams(model, batch, [last], torch.clone)
        weight.copy_(kept)
