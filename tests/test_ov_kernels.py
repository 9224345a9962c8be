"""The blocked OV kernels equal the formula, ties included, for any shape, dtype and vocabulary."""

import pytest
import torch
from benchmarks.full_ranks import count_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.kernels import ov, ov_blocked, ov_sweep
from tests.kernel_inputs import SIGNS, layers


def naive_ranks(maps, source, target):
    """The published computation, head by head and pair by pair, in float64."""
    greater, smaller = torch.zeros(2, maps.n_heads, len(source), dtype=torch.int64)
    for head in range(maps.n_heads):
        W_V = maps.W_V[head // (maps.n_heads // len(maps.W_V))].double()
        rows = maps.x.double() @ (W_V @ maps.W_O[head].double()) @ maps.W_U.double()
        for pair, (s, t) in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            near = 1e-9 * rows[s].abs().max()
            greater[head, pair] = (rows[s] > rows[s, t] + near).sum()
            smaller[head, pair] = (rows[s] < rows[s, t] - near).sum()
    return greater, smaller


@pytest.mark.oracle
@given(layers())
@settings(max_examples=60)
def test_ranks_counted_over_whole_maps_are_those_of_the_published_computation(layer):
    maps, source, target, _ = layer
    for counted, expected in zip(ov.ranks(maps, source, target), naive_ranks(maps, source, target), strict=True):
        assert torch.equal(counted, expected)


@given(layers())
@settings(max_examples=150)
def test_blocked_membership_is_membership_in_the_whole_map(layer):
    maps, source, target, k = layer
    found = ov_blocked.topk_membership(maps, source, target, k)
    for sign, hits, expected in zip(SIGNS, found, ov.topk_membership(maps, source, target, k), strict=True):
        assert torch.equal(hits, expected), sign


@given(layers())
def test_tokens_to_look_at_first_are_there_once_and_half_of_them_lie_farthest_from_the_mean(layer):
    W_U = layer[0].W_U
    n = min(W_U.shape[1], 40)
    first = ov.first_tokens(W_U, n)
    assert len(first) == n == len(set(first.tolist()))
    lengths = (W_U.double() - W_U.double().mean(1, keepdim=True)).norm(dim=0)
    others = torch.ones_like(lengths, dtype=torch.bool).index_fill(0, first[: n // 2], False)
    if n > 1 and bool(others.any()):
        assert lengths[first[: n // 2]].min() >= (1 - 1e-2) * lengths[others].max() - 1e-3


def test_long_sums_that_do_not_cancel_round_within_the_margin():
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 31, ())))
    x, W_V, W_O, W_U = (
        torch.rand(shape, generator=generator) for shape in ((30, 4096), (1, 4096, 16), (2, 16, 4096), (4096, 1500))
    )
    maps = ov.OVMaps(x, W_V, W_O, W_U, ov.longest_column(W_U), ov.first_tokens(W_U, 64))
    source = torch.arange(30)
    best = ov.ov_logits(maps)[0].topk(20).indices
    for place in (0, 8, 9, 10, 11, 19):
        target, k = best[:, place], torch.full((30,), 10)
        found = ov_blocked.topk_membership(maps, source, target, k)
        assert found[0][0].all() == (place < 10)
        for hits, expected in zip(found, ov.topk_membership(maps, source, target, k), strict=True):
            assert torch.equal(hits, expected)


@given(layers())
@settings(max_examples=100)
def test_ranks_counted_by_tiles_are_ranks_in_the_whole_map(layer):
    maps, source, target, _ = layer
    found = count_ranks(maps, source, target)
    for sign, ranks, expected in zip(SIGNS, found, ov.ranks(maps, source, target), strict=True):
        assert torch.equal(ranks, expected), sign


@given(layers(), st.integers(1, 12), st.integers(0, 10**6))
@settings(max_examples=40)
def test_hits_of_the_heads_and_relations_asked_about_are_those_of_all(layer, k, seed):
    maps, source, target, _ = layer
    if not len(source):
        return
    half = len(source) // 2 + 1
    grids = [ov_sweep.Grid(source, target, k), ov_sweep.Grid(source[:half], target[:half], 1)]
    wanted = torch.rand(2, maps.n_heads, 2, generator=torch.Generator().manual_seed(seed)) < 0.4
    asked, everything = (list(ov_sweep.topk_hits(maps, grids, which)) for which in (wanted, None))
    for index in range(2):
        for sign in range(2):
            chosen = wanted[sign, :, index, None, None]
            assert torch.equal(asked[index][sign], everything[index][sign] & chosen)


@given(layers(), layers(), st.integers(1, 12))
@settings(max_examples=100)
def test_hits_of_every_source_with_every_target_are_those_of_the_whole_map(layer, other, k):
    maps, source, target, _ = layer
    sizes = len(maps.x), maps.d_vocab
    grids = [
        ov_sweep.Grid(source, target, k),
        ov_sweep.Grid(other[1] % sizes[0], other[2] % sizes[1], k + 3),
    ]
    grids = [grid for grid in grids if len(grid.source)]
    hits_of_all = list(ov_sweep.topk_hits(maps, grids)) if grids else []
    for grid, found in zip(grids, hits_of_all, strict=True):
        expected = ov.topk_hits(maps, grid.source, grid.target, grid.k)
        for sign, hits, wanted in zip(SIGNS, found, expected, strict=True):
            assert torch.equal(hits, wanted), sign
