"""Full ranks: how many tokens of the vocabulary have a greater logit than a pair's target, and how many a smaller.

All heads of a layer go through tiles of W_O W_U together, with z = x W_V made once in float64, so that float32 is
trusted up to a narrow margin; what is too near to call is counted in float64. Counts equal those of `ov.ranks`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.devices import full_float32, runs_triton, to_device
from headwater.kernels.ov import OVMaps
from headwater.kernels.ov_blocked import (
    CUDA_WORKSPACE,
    ROUNDING,
    columns_of,
    count_beyond,
    count_products,
    factor_numbers,
    head_blocks,
    head_values,
    leave_out,
    value_heads,
)

RANK_TILE = 1024


@full_float32()
def count_ranks(
    maps: OVMaps, source: Int[Tensor, "pair"], target: Int[Tensor, "pair"]
) -> tuple[Int[Tensor, "head pair"], Int[Tensor, "head pair"]]:
    """Count the tokens with a greater and with a smaller logit than each pair's target, over the whole vocabulary.

    W_O W_U is made in float64, z W_O W_U in float32; pairs with a token too near to call count that tile in float64.

    Args:
        maps: the heads of one layer.
        source: rows of `maps.x`; on the CPU, as the targets. Counts lie on the device of the maps.
        target: token ids.
    """
    source, target = (to_device(one, maps.x.device) for one in (source, target))
    # z of every row of x once: pairs of several relations share their sources.
    z = head_values(maps, maps.x.double())[:, source]
    own, tie = _own_logits(maps, z, target), maps.tie[:, source]
    z32, size = z.float(), torch.linalg.vector_norm(z, dim=2)
    counts = torch.zeros(maps.n_heads, 2, len(source), dtype=torch.int64, device=source.device)
    # Logits of wider tiles leave the cache before they are counted (benchmarks/NOTES.md).
    tile_at_most = RANK_TILE * (CUDA_WORKSPACE if maps.W_U.is_cuda else 1)
    width = min(tile_at_most, max(1, factor_numbers(maps) // maps.x.shape[1]))
    for start in range(0, maps.d_vocab, width):
        tile = maps.W_U[:, start : start + width].double()
        column = target - start
        # How many tokens of the tile could be above or below: all but the target where it lies here.
        others = tile.shape[1] - ((column >= 0) & (column < tile.shape[1])).long()
        # Twice the columns: W_O W_U is in memory in float64, and in float32 beside it.
        for heads in head_blocks(maps, 2 * tile.shape[1]):
            block = slice(heads.start, heads.stop)
            # float64: predicted to leave a third of a token a pair too near to call, in place of ten (NOTES.md).
            W_tile = (maps.W_O[block].double().flatten(0, 1) @ tile).unflatten(0, (len(heads), -1))
            by_head = _count_tile(maps, block, z32, size, W_tile.float(), own[block].float(), tie[block], column)
            for head, W, beyond in zip(heads, W_tile, by_head, strict=True):
                value = maps.value_head(head)
                # They do not add up: a token is within the margin, and the pair's tile is counted anew.
                near = (beyond.sum(0) < others).nonzero()[:, 0]
                exact = z[value, near] @ W
                # column is relative to the tile: outside of it nothing is left out.
                leave_out(exact, column[near])
                beyond[:, near] = torch.stack(count_beyond(exact, own[head, near], tie[head, near])).long()
                counts[head] += beyond
    return counts[:, 0], counts[:, 1]


def _count_tile(
    maps: OVMaps,
    heads: slice,
    z: Float[Tensor, "kv_head pair d_head"],
    size: Float[Tensor, "kv_head pair"],
    W: Float[Tensor, "block d_head token"],
    own: Float[Tensor, "block pair"],
    tie: Float[Tensor, "block pair"],
    column: Int[Tensor, "pair"],
) -> Int[Tensor, "block 2 pair"]:
    """Count for some heads the logits z W certainly above and certainly below each pair's own."""
    value = value_heads(maps, z.device)[heads]
    # The longest column of each head's W_O W_U in this tile: a margin as narrow as it can be.
    longest = W.square().sum(1).amax(1).sqrt()
    margin = (ROUNDING * size[value] * longest[:, None] + tie).float()
    if runs_triton(W):
        from headwater.kernels import ov_triton

        # "highest": products of 11-bit parts would need a margin 16 times as wide (`TENSOR_ROUNDING`).
        return ov_triton.count_beyond(z[value], W, own, margin, column, precision="highest").long().transpose(0, 1)
    rows = (z[maps.value_head(head)] for head in range(heads.start, heads.stop))
    counts = [torch.stack(count_products(*of_head)) for of_head in zip(rows, W, own, margin, strict=True)]
    return torch.stack(counts).long()


def _own_logits(
    maps: OVMaps, z: Float[Tensor, "kv_head pair d_head"], target: Int[Tensor, "pair"]
) -> Float[Tensor, "head pair"]:
    own = torch.empty(maps.n_heads, len(target), dtype=torch.float64, device=target.device)
    for pairs in torch.arange(len(target), device=target.device).split(max(1, factor_numbers(maps) // maps.x.shape[1])):
        targets = columns_of(maps, target[pairs]).double()
        for head in range(maps.n_heads):
            own[head, pairs] = (z[maps.value_head(head), pairs].T * (maps.W_O[head].double() @ targets)).sum(0)
    return own
