"""The first glance at a layer's heads leaves few pairs, with the constants of a CUDA device too, and none that hits."""

import pytest
import torch
from benchmarks import outliers
from hypothesis import given, settings

from headwater.kernels import ov, ov_blocked
from tests import tensor_cores
from tests.kernel_inputs import SIGNS, layers

PAIRS = 1500
CUDA_SAMPLE = 8 * ov_blocked.FIRST_TILE


@pytest.fixture
def as_on_the_card(monkeypatch):
    """Trust of float32 and width of the sample as on a CUDA device."""
    monkeypatch.setattr(ov_blocked, "rounding", lambda maps: ov_blocked.TENSOR_ROUNDING)
    monkeypatch.setattr(ov_blocked, "sample_size", lambda W_U: CUDA_SAMPLE)


def head_of(d_model, d_head, with_outliers):
    """A random head of a model's width, with the tokens of the sample and as many more as there are targets."""
    x, W_V, W_O = torch.randn(PAIRS, d_model), torch.randn(1, d_model, d_head), torch.randn(1, d_head, d_model)
    W_U = torch.randn(CUDA_SAMPLE + PAIRS, d_model).T
    if with_outliers:
        outliers.in_embeddings(x)
        outliers.in_unembedding(W_U.T)
    maps = ov.OVMaps(x, W_V, W_O, W_U, ov.longest_column(W_U), torch.arange(CUDA_SAMPLE))
    return maps, torch.arange(PAIRS), CUDA_SAMPLE + torch.arange(PAIRS)


def left_after_a_glance(maps, source, target, k=25):
    left = ov_blocked.screen_pairs(maps, source, target, torch.full_like(source, k))[0]
    return float(left.any(0).float().mean())


@pytest.mark.parametrize(("d_model", "with_outliers"), [(4096, False), (8192, True)])
def test_with_a_cards_constants_screening_leaves_two_pairs_in_a_hundred(d_model, with_outliers, as_on_the_card):
    """A sample of 4,096 leaves 2k/4096 = 1.2 % without any margin; three deviations of 1,500 pairs are one per cent."""
    layer = head_of(d_model, 128, with_outliers)
    assert 0.003 < left_after_a_glance(*layer) < 0.03


def test_a_margin_relative_to_all_norms_would_leave_nearly_every_pair(as_on_the_card, monkeypatch):
    layer = head_of(4096, 128, with_outliers=True)
    monkeypatch.setattr(ov_blocked, "WIDE", float("inf"))
    assert left_after_a_glance(*layer) > 0.9


@pytest.mark.parametrize("d_model", [4096, 8192])
def test_sums_that_are_cut_off_at_every_step_stay_within_half_the_margin(d_model):
    """No term cancels, which is the worst case: every cut goes the same way."""
    W_O, W_U = torch.rand(8, d_model).bfloat16(), torch.rand(d_model, 50).bfloat16()
    off = (tensor_cores.product(W_O, W_U) - W_O.double() @ W_U.double()).abs()
    most = W_O.double().norm(dim=1)[:, None] * W_U.double().norm(dim=0)
    assert 0 < (off / most).max() < ov_blocked.TENSOR_ROUNDING / 2


@given(layers())
@settings(max_examples=60)
def test_membership_is_that_of_the_formula_where_products_are_those_of_tensor_cores(layer):
    maps, source, target, k = layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ov_blocked, "rounding", lambda maps: ov_blocked.TENSOR_ROUNDING)
        patch.setattr(ov_blocked, "exact_product", tensor_cores.product)
        patch.setattr(ov_blocked, "WIDE", 0.0)
        found = ov_blocked.topk_membership(maps, source, target, k)
    for sign, hits, expected in zip(SIGNS, found, ov.topk_membership(maps, source, target, k), strict=True):
        assert torch.equal(hits, expected), sign
