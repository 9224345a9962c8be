"""A ∂L/∂A = A ⟨g, v⟩ gives what autograd gives at stored patterns; reweighting is the edit that it describes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kernels.attention import edge_saliency, over_pairs, reweighted, saliency_reference


def attention(batch, kv_heads, group, length, d_head):
    """A causal pattern with its values, and a scalar that depends on each head's output in no simple way."""
    scores = torch.randn(batch, kv_heads * group, length, length, dtype=torch.float64)
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    pattern = scores.softmax(-1).requires_grad_()
    values = torch.randn(batch, kv_heads, length, d_head, dtype=torch.float64)
    z = torch.einsum("bhij,bhjd->bihd", pattern, values.repeat_interleave(group, 1))
    mix = torch.randn(kv_heads * group * d_head, dtype=torch.float64)
    total = torch.sin(z.flatten(2) @ mix).cumsum(1).square().sum()
    return pattern, values, z, total


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(2, 9),
    heads=st.sampled_from(["mean_abs", "abs_mean"]),
    data=st.data(),
)
def test_the_identity_equals_autograd_through_the_pattern_at_any_rows_and_columns(
    batch, kv_heads, group, length, heads, data
):
    pattern, values, z, total = attention(batch, kv_heads, group, length, 5)
    at_pattern, at_z = torch.autograd.grad(total, [pattern, z])
    expected = saliency_reference(pattern.detach(), at_pattern, heads)
    rows = data.draw(st.lists(st.integers(0, length - 1), min_size=1))
    columns = data.draw(st.lists(st.integers(0, length - 1), min_size=1))
    found = edge_saliency(pattern.detach()[:, :, rows][..., columns], at_z[:, rows], values[:, :, columns], heads=heads)
    torch.testing.assert_close(found, expected[:, rows][..., columns])


def test_heads_that_pull_in_opposite_directions_cancel_only_under_the_absolute_value_of_the_mean():
    pattern, gradient = torch.rand(1, 1, 3, 3), torch.randn(1, 1, 3, 3)
    both = pattern.repeat(1, 2, 1, 1), torch.cat([gradient, -gradient], 1)
    assert not saliency_reference(*both, heads="abs_mean").any()
    torch.testing.assert_close(saliency_reference(*both), saliency_reference(pattern, gradient))


def test_low_precision_patterns_are_multiplied_in_float32():
    pattern, values, z, total = attention(2, 1, 2, 6, 5)
    at_z = torch.autograd.grad(total, z)[0]
    coarse = [x.detach().bfloat16() for x in (pattern, at_z, values)]
    found = edge_saliency(*coarse)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), edge_saliency(*(x.double() for x in coarse)), rtol=1e-5, atol=1e-6)


def test_pairs_are_averaged_or_summed_over_the_edges_alone():
    saliency, edges = torch.rand(4, 5, 3), torch.rand(4, 5, 3) < 0.5
    edges[3] = False
    expected = torch.stack([saliency[i][edges[i]].mean() for i in range(4)])
    torch.testing.assert_close(over_pairs(saliency, edges), expected, equal_nan=True)
    expected = torch.stack([saliency[i][edges[i]].sum() for i in range(3)])
    torch.testing.assert_close(over_pairs(saliency, edges, "sum")[:3], expected)
    assert over_pairs(saliency, edges, "sum")[3].isnan()


@pytest.mark.parametrize("shape", [(), (2, 1), (2, 3)])
def test_reweighting_scales_the_edges_asked_for_and_its_gradient_is_the_flow_through_them(shape):
    pattern, rows, columns = torch.rand(2, 3, 4, 6), torch.rand(2, 4) < 0.5, torch.rand(2, 6) < 0.5
    scale = torch.randn(shape, dtype=torch.float32, requires_grad=bool(shape))
    found = reweighted(pattern, rows, columns, scale if shape else scale.item())
    edges = (rows[:, :, None] & columns[:, None, :])[:, None].expand_as(pattern)
    assert torch.equal(found[~edges], pattern[~edges])
    by_edge = scale.detach().reshape(shape or (1, 1))[..., None, None].expand_as(pattern)
    torch.testing.assert_close(found[edges], (pattern * (1 + by_edge))[edges])
    if shape:
        slope = torch.randn_like(pattern)
        expected = (pattern * slope * edges).sum((2, 3)).sum_to_size(shape)
        torch.testing.assert_close(torch.autograd.grad((found * slope).sum(), scale)[0], expected)
