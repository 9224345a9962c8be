"""GELU in passes that stay in the cache is torch's; blocks that run fused are whole again afterwards."""

import pytest
import torch

from headwater.kernels import elementwise
from headwater.models.blocks import Blocks
from tests.tiny import tiny_hooked


def plainly(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("shape", [(3, 7), (0, 5), (1, 2, 33), (5,)])
def test_it_is_the_tanh_form_whatever_the_shape(shape, monkeypatch):
    monkeypatch.setattr(elementwise, "AT_ONCE", 8)
    x = 4 * torch.randn(shape)
    torch.testing.assert_close(elementwise.tanh_gelu(x), plainly(x.double()).float(), rtol=1e-5, atol=1e-6)


def test_large_numbers_of_either_sign_and_none_at_all_come_out_as_they_should():
    x = torch.tensor([-1e4, -30.0, 0.0, 30.0, 1e4])
    assert elementwise.tanh_gelu(x).tolist() == [0.0, 0.0, 0.0, 30.0, 1e4]
    assert elementwise.tanh_gelu(torch.tensor([torch.nan])).isnan().all()


def test_columns_of_a_wider_tensor_other_types_and_gradients_are_served():
    x = torch.randn(6, 10)
    torch.testing.assert_close(elementwise.tanh_gelu(x[:, ::2]), plainly(x[:, ::2]))
    assert torch.equal(elementwise.tanh_gelu(x.bfloat16()), plainly(x.bfloat16()))
    leaf = x.clone().requires_grad_(True)
    elementwise.tanh_gelu(leaf).sum().backward()
    assert float(leaf.grad.abs().max()) > 0.1


@pytest.mark.parametrize("family", ["gpt2", "neox", "phi", "llama", "gemma3"])
def test_fused_blocks_give_the_same_and_norms_that_are_watched_are_left_alone(family):
    model = tiny_hooked(family)
    blocks, x = Blocks(model), torch.randn(5, model.shape.d_model)
    with torch.no_grad(), model.lock:
        plain = blocks.feed_forward(1, x), blocks.normed(1, x[None], mlp=False)
        with blocks.fused():
            fused = blocks.feed_forward(1, x), blocks.normed(1, x[None], mlp=False)
        seen: list[torch.Tensor] = []
        point = model.raw.blocks[1].ln1.hook_scale
        point.add_hook(lambda activation, hook: seen.append(activation))
        with blocks.fused():
            blocks.normed(1, x[None], mlp=False)
        point.remove_hooks()
    assert len(seen) == 1
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
    assert not any("forward" in module.__dict__ for module, _ in blocks._faster)
