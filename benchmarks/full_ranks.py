"""Full ranks: how many tokens of the vocabulary have a greater logit than a pair's target, and how many a smaller one.

No analysis needs them: whether a target is among the k largest takes less (`headwater.kernels.ov_blocked`).
"""

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.kernels import ov_blocked
from headwater.kernels.devices import full_float32, runs_triton, to_device
from headwater.kernels.ov import OVMaps

RANK_TILE = 1024


@full_float32()
def count_ranks(
    maps: OVMaps, source: Int[Tensor, " pair"], target: Int[Tensor, " pair"]
) -> tuple[Int[Tensor, "head pair"], Int[Tensor, "head pair"]]:
    """Count as `ov.ranks` does, for pairs on the CPU; the counts are on the device of the maps.

    All heads go through tiles of the vocabulary together, with z = x W_V and W_O W_U computed once, both in float64, so
    that float32 is trusted up to a narrow margin; a pair with a token too near to call recounts that tile in float64.
    """
    source, target = (to_device(one, maps.x.device) for one in (source, target))
    # z of every row of x once, because pairs of several relations share sources.
    z = ov_blocked.head_values(maps, maps.x.double())[:, source]
    tie, every_value_head = maps.tie[:, source], ov_blocked.value_heads(maps, z.device)
    target_logits = torch.empty(maps.n_heads, len(target), dtype=torch.float64, device=target.device)
    n_columns = max(1, ov_blocked.factor_numbers(maps) // maps.x.shape[1])
    for pairs in torch.arange(len(target), device=target.device).split(n_columns):
        targets = ov_blocked.columns_of(maps, target[pairs]).double()
        for head in range(maps.n_heads):
            W_target = maps.W_O[head].double() @ targets
            target_logits[head, pairs] = (z[maps.value_head(head), pairs].T * W_target).sum(0)
    z32, size = z.float(), torch.linalg.vector_norm(z, dim=2)
    counts = torch.zeros(maps.n_heads, 2, len(source), dtype=torch.int64, device=source.device)
    # Logits of wider tiles leave the cache before they are counted (benchmarks/NOTES.md).
    tile_at_most = RANK_TILE * (ov_blocked.CUDA_WORKSPACE if maps.W_U.is_cuda else 1)
    width = min(tile_at_most, n_columns)
    for start in range(0, maps.d_vocab, width):
        tile = maps.W_U[:, start : start + width].double()
        column = target - start
        # How many tokens of the tile could be above or below: all except the target, if it is in this tile.
        others = tile.shape[1] - ((column >= 0) & (column < tile.shape[1])).long()
        # Twice the columns: W_O W_U is in memory in float64, and in float32 as well.
        for heads in ov_blocked.head_blocks(maps, 2 * tile.shape[1]):
            block = slice(heads.start, heads.stop)
            # float64: predicted to leave a third of a token per pair too near to call, instead of ten (NOTES.md).
            W_tile = (maps.W_O[block].double().flatten(0, 1) @ tile).unflatten(0, (len(heads), -1))
            W, value, own = W_tile.float(), every_value_head[block], target_logits[block].float()
            # The longest column of each head's W_O W_U in this tile gives the narrowest margin.
            longest = W.square().sum(1).amax(1).sqrt()
            margin = (ov_blocked.ROUNDING * size[value] * longest[:, None] + tie[block]).float()
            if runs_triton(W):
                from headwater.kernels import ov_triton

                # "highest": products of 11-bit parts would need a margin 16 times as wide (`TENSOR_ROUNDING`).
                by_sign = ov_triton.count_beyond(z32[value], W, own, margin, column, precision="highest")
                by_head = by_sign.long().transpose(0, 1)
            else:
                rows = zip((z32[maps.value_head(head)] for head in heads), W, own, margin, strict=True)
                by_head = torch.stack([torch.stack(ov_blocked.count_products(*of_head)) for of_head in rows]).long()
            for head, W_head, beyond in zip(heads, W_tile, by_head, strict=True):
                # If they do not add up, a token is within the margin: recount the pair's tile.
                near = (beyond.sum(0) < others).nonzero()[:, 0]
                exact = z[maps.value_head(head), near] @ W_head
                # column is relative to the tile: nothing is excluded if it is outside.
                ov_blocked.leave_out(exact, column[near])
                beyond[:, near] = torch.stack(
                    ov_blocked.count_beyond(exact, target_logits[head, near], tie[head, near])
                ).long()
                counts[head] += beyond
    return counts[:, 0], counts[:, 1]
