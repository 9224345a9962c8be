"""The Triton kernel that counts logits equals counting, and what is built on it equals the formula."""

import pytest
import torch
from benchmarks import full_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kernels import ov, ov_blocked, ov_sweep
from tests.kernel_inputs import SIGNS, layers

pytest.importorskip("triton")
from headwater.kernels import ov_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def through_the_kernel(monkeypatch):
    """Choose the kernel on the CPU too, and poison the memory it writes to."""
    empty = torch.empty

    def poisoned(*size, **options):
        made = empty(*size, **options)
        return made.fill_(-(2**30) if options.get("dtype") == torch.int32 else 1)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(ov_blocked, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(full_ranks, "runs_triton", lambda tensor: True)


def on_device(maps, *pairs):
    factors = (factor.to(DEVICE) for factor in (maps.x, maps.W_V, maps.W_O, maps.W_U))
    moved = ov.OVMaps(*factors, maps.longest, maps.first.to(DEVICE))
    return moved, *pairs


@settings(max_examples=25)
@given(
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    pairs=st.integers(0, 150),
    tokens=st.integers(1, 700),
    d_head=st.integers(1, 70),
    precision=st.sampled_from(["high", "highest"]),
    seed=st.integers(0, 10**6),
)
def test_the_kernel_counts_what_is_beyond_the_margin(kv_heads, group, pairs, tokens, d_head, precision, seed):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(kv_heads, pairs, d_head, generator=generator, dtype=torch.float64)
    W = torch.randn(kv_heads * group, d_head, tokens, generator=generator, dtype=torch.float64)
    column = torch.randint(-3, tokens + 3, (pairs,), generator=generator)
    logits = z.repeat_interleave(group, dim=0) @ W
    own = torch.randn(kv_heads * group, pairs, generator=generator, dtype=torch.float64)
    margin = torch.rand(kv_heads * group, pairs, generator=generator, dtype=torch.float64)
    other = torch.arange(tokens) != column[:, None]
    bounds = torch.stack([own + margin, own - margin])[..., None]
    near = ((logits - bounds).abs() < 1e-4 * d_head).sum((0, 3))
    found = ov_triton.count_beyond(
        *(part.float().to(DEVICE) for part in (z, W, own, margin)), column.to(DEVICE), precision
    ).cpu()
    expected = torch.stack([((logits > bounds[0]) & other).sum(2), ((logits < bounds[1]) & other).sum(2)])
    assert ((found - expected).abs() <= near).all()


def test_a_pairs_own_column_counts_on_neither_side_whatever_the_margin():
    z, W = torch.ones(1, 5, 3), torch.ones(2, 3, 40)
    own = torch.zeros(2, 5)
    column = torch.arange(5)
    above, below = ov_triton.count_beyond(*(part.to(DEVICE) for part in (z, W, own, own, column)))
    assert (above == 39).all()
    assert (below == 0).all()


@given(layers())
@settings(max_examples=15)
def test_membership_by_the_kernel_is_membership_in_the_whole_map(layer):
    maps, source, target, k = layer
    found = ov_blocked.topk_membership(*on_device(maps, source, target, k))
    for sign, hits, expected in zip(SIGNS, found, ov.topk_membership(maps, source, target, k), strict=True):
        assert torch.equal(hits.cpu(), expected), sign


@given(layers())
@settings(max_examples=25)
def test_ranks_by_the_kernel_are_ranks_in_the_whole_map(layer):
    maps, source, target, _ = layer
    found = full_ranks.count_ranks(*on_device(maps, source, target))
    for sign, ranks, expected in zip(SIGNS, found, ov.ranks(maps, source, target), strict=True):
        assert torch.equal(ranks.cpu(), expected), sign


@given(layers(), st.integers(1, 12), st.sampled_from([2**9, 2**11, 2**14]))
@settings(max_examples=20)
def test_hits_do_not_depend_on_how_many_heads_go_together(layer, k, numbers):
    maps, source, target, _ = layer
    if not len(source):
        return
    grid = ov_sweep.Grid(source, target, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ov_blocked, "TILE_NUMBERS", numbers)
        patch.setattr(ov_blocked, "FIRST_TILE", 32)
        [found] = ov_sweep.topk_hits(maps, [grid])
    for sign, hits, wanted in zip(SIGNS, found, ov.topk_hits(maps, source, target, k), strict=True):
        assert torch.equal(hits, wanted), sign


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positive", [False, True])
def test_on_the_card_every_count_is_that_of_the_formula_at_the_width_of_a_model(dtype, positive):
    def random(*shape):
        return torch.rand(shape) if positive else torch.randn(shape)

    factors = random(2, 2048, 128), random(8, 128, 2048), random(2048, 3000)
    W_V, W_O, W_U = (factor.to("cuda", dtype) for factor in factors)
    maps = ov.OVMaps(random(60, 2048).cuda(), W_V, W_O, W_U, ov.longest_column(W_U), ov.first_tokens(W_U, 64))
    source, target, k = torch.arange(60), torch.randint(3000, (60,)), torch.full((60,), 10)
    pairs, there = (source, target), (source.cuda(), target.cuda())
    for found, expected in (
        (ov_blocked.topk_membership(maps, *pairs, k), ov.topk_membership(maps, *there, k.cuda())),
        (full_ranks.count_ranks(maps, *pairs), ov.ranks(maps, *there)),
        (next(ov_sweep.topk_hits(maps, [ov_sweep.Grid(*pairs, 10)])), ov.topk_hits(maps, *there, 10)),
    ):
        for ours, exact in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), exact.cpu())
