"""Attention in one pass gives what the bridge's attention gives, and only where nothing inside attention is watched."""

import pytest
import torch

import headwater as hw
from headwater.models.bare_model import residual_streams
from tests.tiny import padded_batch

SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def passes(monkeypatch):
    """How often the one pass was taken."""
    taken = []
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (taken.append(1), SDPA(*a, **k))[1]
    )
    return taken


def residuals(model, batch):
    kept = []
    layers = range(model.shape.n_layers)
    model.run(batch, [(f"blocks.{i}.hook_resid_post", lambda x, hook: kept.append(x.clone())) for i in layers])
    return torch.stack(kept)[:, batch.mask].float()


def read(model, batch):
    """The same, as statistics of tokens read it."""
    kept = residual_streams(model, batch, range(model.shape.n_layers), torch.clone)
    return torch.stack(list(kept.values()))[:, batch.mask].float()


@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_has_the_residual_stream_it_has_with_the_bridges_attention(checkpoint, family, dtype, passes):
    model = hw.load(checkpoint(family, dtype=dtype))
    batch = padded_batch(model)
    expected = residuals(model, batch)
    assert not passes
    read(model, batch)  # the first also compares with the bridge
    passes.clear()
    found = read(model, batch)
    assert len(passes) == (0 if family == "gemma2" else model.shape.n_layers)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < (64 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps
    assert torch.equal(residuals(model, batch), expected)


def test_a_hook_inside_attention_acts_in_the_bridges_attention(checkpoint, passes):
    model = hw.load(checkpoint("llama"))
    batch, name = padded_batch(model), "blocks.1.attn.hook_pattern"
    with model.hooks([(name, lambda pattern, hook: pattern.roll(1, 1))]):
        edited = residuals(model, batch)
        assert torch.equal(read(model, batch), edited)
    assert not passes
    assert not torch.equal(residuals(model, batch), edited)


def test_layers_on_several_devices_unknown_architectures_and_unusual_options_keep_the_bridges_attention(
    checkpoint, passes
):
    model = hw.load(checkpoint("gpt2"))
    batch = padded_batch(model)
    model.config.model_type = "some"
    read(model, batch)
    model = hw.load(checkpoint("gpt2"))
    model.raw.original_model.config.scale_attn_by_inverse_layer_idx = True
    read(model, batch)
    model = hw.load(checkpoint("gpt2"))
    model.__dict__["spread"] = True
    read(model, batch)
    assert not passes


def test_what_is_raised_inside_leaves_the_model_as_it_was(checkpoint):
    model = hw.load(checkpoint("llama"))

    def take(residual):
        raise KeyError

    with pytest.raises(KeyError):
        residual_streams(model, padded_batch(model), [0], take)
    assert model.raw.original_model.config._attn_implementation == "eager"
    assert model.as_loaded() is not None, "no hook is left"


def test_statistics_of_texts_take_the_one_pass(checkpoint, passes):
    model = hw.load(checkpoint("llama"))
    for layers, times in (("final", 2), ("final", 1), (0, 1 / model.shape.n_layers)):  # the first compares, too
        passes.clear()
        hw.token_statistics(model, "w1 w2 w3", layers=layers, progress=False)
        assert len(passes) == times * model.shape.n_layers
