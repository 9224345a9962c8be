"""Softmax of short rows is torch's, whatever the width, what is masked, and under a gradient."""

import pytest
import torch

from headwater.kernels.elementwise import VECTOR, softmax


@pytest.mark.parametrize("width", [1, 3, VECTOR - 1, VECTOR, VECTOR + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_formula_also_where_keys_are_masked(width, dtype):
    scores = (4 * torch.randn(3, 2, 5, width)).to(dtype)
    hidden = torch.rand(5, width) < 0.4
    hidden[:, 0] = False
    scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    exponents = scores.double().exp()
    found = softmax(scores)
    assert (found.dtype, found.shape) == (dtype, scores.shape)
    expected = (exponents / exponents.sum(-1, keepdim=True)).to(dtype)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-7)
    assert bool((found[..., hidden] == 0).all())


def test_rows_without_any_finite_number_are_what_torch_makes_of_them():
    rows = torch.tensor([[-torch.inf, -torch.inf], [torch.finfo(torch.float32).min] * 2, [torch.nan, 1.0]])
    torch.testing.assert_close(softmax(rows), rows.softmax(-1), equal_nan=True)


def test_its_gradient_is_torchs():
    scores = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax, scores)
