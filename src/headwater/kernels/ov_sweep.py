"""Counts that need the whole vocabulary: every source with every target of a relation, and full ranks.

Both go through tiles of W_O W_U for all heads of a layer at once, with z = x W_V made once in float64, so that float32
is trusted up to a narrow margin; what is too near to call is decided in float64. Results equal those of `ov`.

Heads go through each step together, as many as the workspace holds: on a CPU one or a few, on a CUDA device most of a
layer's, because there it is launches that would take the time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.kernels.devices import exact_product, full_float32, runs_triton
from headwater.kernels.ov import OVMaps
from headwater.kernels.ov_blocked import (
    CUDA_WORKSPACE,
    FIRST_TILE,
    ROUNDING,
    Triples,
    count_beyond,
    factor_numbers,
    head_blocks,
    head_values,
    leave_out,
    rounding,
    settle,
    tile_numbers,
)

RANK_TILE = 1024
RANK_ROWS = 512


@dataclass(frozen=True)
class Grid:
    """Every source of a relation (rows of `OVMaps.x`) with every target of it (token ids)."""

    source: Int[Tensor, "item"]
    target: Int[Tensor, "pair"]
    k: int


class _GridLogits:
    """The logits of each relation's own targets, made again whenever they are asked for."""

    def __init__(self, maps: OVMaps, z: Float[Tensor, "kv_head source d_head"], grids: Sequence[Grid]):
        self.maps, self.z, self.grids = maps, z, grids
        tokens, column = torch.cat([grid.target for grid in grids]).unique(return_inverse=True)
        targets = maps.W_U[:, tokens]
        blocks = [exact_product(maps.W_O[heads].flatten(0, 1), targets) for heads in head_blocks(maps, len(tokens))]
        self.W_target = rearrange(torch.cat(blocks), "(head d_head) token -> head token d_head", head=maps.n_heads)
        self.W_target = self.W_target.contiguous()
        self.column = column.split([len(grid.target) for grid in grids])
        self.head_groups = [
            list(_head_groups(maps, range(maps.n_heads), len(grid.source) * len(grid.target))) for grid in grids
        ]

    def of_relation(self, index: int) -> Iterator[tuple[slice, Float[Tensor, "block item pair"]]]:
        """One relation's, some heads at a time."""
        source, column = self.grids[index].source, self.column[index]
        for heads in self.head_groups[index]:
            block = slice(heads.start, heads.stop)
            rows = self.z[_value_heads(self.maps, heads)[:, None], source]
            yield block, rows @ self.W_target[block, column].mT

    def extremes(self) -> Float[Tensor, "2 head row"]:
        """The largest target of every row of every relation, and the largest negated one."""
        parts = [
            torch.cat([torch.stack([own.amax(2), -own.amin(2)]) for _, own in self.of_relation(index)], dim=1)
            for index in range(len(self.grids))
        ]
        return torch.cat(parts, dim=2)


def topk_hits(
    maps: OVMaps, grids: Sequence[Grid]
) -> Iterator[tuple[Bool[Tensor, "head item pair"], Bool[Tensor, "head item pair"]]]:
    """Say for every source and every target of each relation whether the target is in the top k, and in the bottom k.

    1. The logits of the relation's own targets, and the largest and smallest of them in each row m_s.
    2. The k-th largest and smallest logit of each row, tile after tile of the vocabulary. A row whose targets all lie
       between the two found so far leaves: none can be in the top k or the bottom k any more.
    3. A target beyond the k-th logit is a hit; one too near to it is settled on its own.
    """
    z = head_values(maps, maps.x.double())
    margin = _margin(maps, z)
    logits = _GridLogits(maps, z.float(), grids)
    source = torch.cat([grid.source for grid in grids])
    k = torch.cat([torch.full_like(grid.source, grid.k) for grid in grids])
    kth = _kth_logits(maps, logits.z[:, source], k, logits.extremes() + margin[:, source])
    for index, (grid, bound) in enumerate(zip(grids, kth.split([len(grid.source) for grid in grids], 2), strict=True)):
        shape = (maps.n_heads, len(grid.source), len(grid.target))
        hits = torch.empty(2, *shape, dtype=torch.bool, device=source.device)
        unsure = torch.empty(shape, dtype=torch.bool, device=source.device)
        for heads, own in logits.of_relation(index):
            near = margin[heads, grid.source, None]
            excess = torch.stack([own, -own]) - bound[:, heads, :, None]
            hits[:, heads] = excess >= near
            unsure[heads] = (excess.abs() < near).any(0)
        cell_head, item, pair = unsure.nonzero(as_tuple=True)
        cells = Triples(cell_head, grid.source[item], grid.target[pair])
        hits[:, cell_head, item, pair] = torch.stack(settle(maps, cells, torch.full_like(item, grid.k)))
        yield hits[0], hits[1]


def _margin(maps: OVMaps, z: Float[Tensor, "kv_head source d_head"]) -> Float[Tensor, "head source"]:
    """How far float32 may be off once z is exact: no sum has more terms than sum_j |z_j| |W_O[j]| max_v |W_U[:, v]|."""
    lengths = torch.linalg.vector_norm(maps.W_O, dim=2, dtype=torch.float64)
    sizes = torch.stack([z[maps.value_head(head)].abs() @ lengths[head] for head in range(maps.n_heads)])
    return (rounding(maps) * maps.longest * sizes + maps.tie).float()


def _kth_logits(
    maps: OVMaps,
    z: Float[Tensor, "kv_head row d_head"],
    k: Int[Tensor, "row"],
    wanted: Float[Tensor, "2 head row"],
) -> Float[Tensor, "2 head row"]:
    """Find the k-th largest logit of each row, and the k-th largest negated one.

    Once that is above what is `wanted` of it the row leaves, and the bound found so far is returned.
    """
    kept = _Kept(torch.full((*wanted.shape, int(k.max())), -torch.inf, device=wanted.device), k, wanted)
    start = 0
    while start < maps.d_vocab and (rows_at_most := int(kept.alive.any(0).sum(1).max())):
        most = min(2 * factor_numbers(maps) // maps.x.shape[1], tile_numbers(maps) // rows_at_most)
        tile = maps.W_U[:, start : start + max(1, min(max(FIRST_TILE, start), most))]
        for block in head_blocks(maps, tile.shape[1]):
            W_tile = exact_product(maps.W_O[block].flatten(0, 1), tile).unflatten(0, (len(block), -1))
            for heads in _head_groups(maps, block, rows_at_most * tile.shape[1]):
                head = torch.tensor(heads, device=z.device)[:, None]
                row = kept.rows(heads)
                logits = (
                    z[_value_heads(maps, heads)[:, None], row]
                    @ W_tile[heads.start - block.start : heads.stop - block.start]
                )
                kept.merge(0, head, row, logits)
                kept.merge(1, head, row, logits.neg_())
        start += tile.shape[1]
    return kept.values.gather(3, (k - 1).expand(wanted.shape)[..., None])[..., 0]


@dataclass
class _Kept:
    """The largest logits of each row so far, the largest negated ones, and which rows still want more."""

    values: Float[Tensor, "2 head row k"]
    k: Int[Tensor, "row"]
    wanted: Float[Tensor, "2 head row"]

    def __post_init__(self) -> None:
        self.alive = torch.ones_like(self.wanted, dtype=torch.bool)

    def rows(self, heads: range) -> Int[Tensor, "block alive"]:
        """The rows of each head that are alive; where heads differ in their number, some that are not."""
        alive = self.alive[:, heads.start : heads.stop].any(0)
        if len(heads) == 1:
            return alive.nonzero()[None, :, 1]
        return alive.byte().argsort(dim=1, descending=True, stable=True)[:, : int(alive.sum(1).max())]

    def merge(
        self,
        sign: int,
        head: Int[Tensor, "block 1"],
        row: Int[Tensor, "block alive"],
        logits: Float[Tensor, "block alive token"],
    ) -> None:
        """Merge new logits into the largest of their rows; most rows have nothing to merge."""
        if not row.numel():
            return
        alive = self.alive[sign, head, row]
        new = ((logits.amax(2) > self.values[sign, head, row, -1]) & alive).nonzero(as_tuple=True)
        into = sign, head[new[0], 0], row[new]
        merged = torch.cat([self.values[into], logits[new]], dim=1)
        self.values[into] = merged.topk(self.values.shape[-1]).values
        at_k = self.values[sign, head, row, self.k[row] - 1]
        self.alive[sign, head, row] = alive & (at_k <= self.wanted[sign, head, row])


def _value_heads(maps: OVMaps, heads: range) -> Int[Tensor, "block"]:
    return torch.tensor([maps.value_head(head) for head in heads], device=maps.W_U.device)


def _head_groups(maps: OVMaps, heads: range, numbers: int) -> Iterator[range]:
    """Cut heads into groups whose logits, so many numbers per head, are few enough to make at a time."""
    size = max(1, tile_numbers(maps) // max(1, numbers))
    for start in range(heads.start, heads.stop, size):
        yield range(start, min(start + size, heads.stop))


@full_float32()
def count_ranks(
    maps: OVMaps, source: Int[Tensor, "pair"], target: Int[Tensor, "pair"]
) -> tuple[Int[Tensor, "head pair"], Int[Tensor, "head pair"]]:
    """Count the tokens with a greater and with a smaller logit than each pair's target, over the whole vocabulary.

    W_O W_U is made in float64, z W_O W_U in float32; pairs with a token too near to call count that tile in float64.

    Args:
        maps: the heads of one layer.
        source: rows of `maps.x`.
        target: token ids.
    """
    z = head_values(maps, maps.x.double())[:, source]
    own, tie = _own_logits(maps, z, target), maps.tie[:, source]
    z32, size = z.float(), torch.linalg.vector_norm(z, dim=2)
    counts = torch.zeros(maps.n_heads, 2, len(source), dtype=torch.int64, device=source.device)
    tile_at_most = RANK_TILE * (CUDA_WORKSPACE if maps.W_U.is_cuda else 1)
    width = min(tile_at_most, max(1, factor_numbers(maps) // maps.x.shape[1]))
    for start in range(0, maps.d_vocab, width):
        tile = maps.W_U[:, start : start + width].double()
        column = target - start
        others = tile.shape[1] - ((column >= 0) & (column < tile.shape[1])).long()
        for heads in head_blocks(maps, 2 * tile.shape[1]):
            W_tile = (maps.W_O[heads].double().flatten(0, 1) @ tile).unflatten(0, (len(heads), -1))
            found = _count_tile(maps, heads, z32, size, W_tile.float(), own[heads].float(), tie[heads], column)
            for head, W, beyond in zip(heads, W_tile, found, strict=True):
                value = maps.value_head(head)
                near = (beyond.sum(0) < others).nonzero()[:, 0]
                exact = z[value, near] @ W
                leave_out(exact, column[near])
                beyond[:, near] = torch.stack(count_beyond(exact, own[head, near], tie[head, near])).long()
                counts[head] += beyond
    return counts[:, 0], counts[:, 1]


def _count_tile(
    maps: OVMaps,
    heads: range,
    z: Float[Tensor, "kv_head pair d_head"],
    size: Float[Tensor, "kv_head pair"],
    W: Float[Tensor, "block d_head token"],
    own: Float[Tensor, "block pair"],
    tie: Float[Tensor, "block pair"],
    column: Int[Tensor, "pair"],
) -> Int[Tensor, "block 2 pair"]:
    """Count for some heads the logits z W certainly above and certainly below each pair's own."""
    value = [maps.value_head(head) for head in heads]
    longest = torch.linalg.vector_norm(W, dim=1).amax(1)
    margin = (ROUNDING * size[value] * longest[:, None] + tie).float()
    if runs_triton(W):
        from headwater.kernels import ov_triton

        return ov_triton.count_beyond(z[value], W, own, margin, column, precision="highest").long().transpose(0, 1)
    return torch.stack([_count_head(z[v], *of_head) for v, *of_head in zip(value, W, own, margin, strict=True)])


def _count_head(
    z: Float[Tensor, "pair d_head"],
    W: Float[Tensor, "d_head token"],
    own: Float[Tensor, "pair"],
    margin: Float[Tensor, "pair"],
) -> Int[Tensor, "2 pair"]:
    """Count one head's, a cache's worth of pairs at a time."""
    parts = (part.split(RANK_ROWS) for part in (z, own, margin))
    counts = [torch.stack(count_beyond(rows @ W, *bounds)) for rows, *bounds in zip(*parts, strict=True)]
    return torch.cat(counts, dim=1).long()


def _own_logits(
    maps: OVMaps, z: Float[Tensor, "kv_head pair d_head"], target: Int[Tensor, "pair"]
) -> Float[Tensor, "head pair"]:
    own = torch.empty(maps.n_heads, len(target), dtype=torch.float64, device=target.device)
    for pairs in torch.arange(len(target), device=target.device).split(max(1, factor_numbers(maps) // maps.x.shape[1])):
        targets = maps.W_U[:, target[pairs]].double()
        for head in range(maps.n_heads):
            own[head, pairs] = (z[maps.value_head(head), pairs].T * (maps.W_O[head].double() @ targets)).sum(0)
    return own
