"""Membership of every target of a relation in the top k of every source, which needs the whole vocabulary.

It goes through tiles of W_O W_U for all heads of a layer at once, with z = x W_V computed once in float64, so float32
is trusted up to a narrow margin; what is too near to call is decided in float64. Results equal those of `ov.topk_hits`.

Heads go through each step together, as many as the workspace holds: on a CPU one or a few, on a CUDA device most of a
layer's, because there launches would take most of the time.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.kernels import ov_blocked
from headwater.kernels.devices import exact_product, to_device, to_device_many
from headwater.kernels.ov import OVMaps


@dataclass(frozen=True)
class Grid:
    """Every source of a relation (rows of `OVMaps.x`) with every target of it (token ids), on the CPU."""

    source: Int[Tensor, " item"]
    target: Int[Tensor, " pair"]
    k: int

    @cached_property
    def tokens(self) -> tuple[Int[Tensor, " token"], Int[Tensor, " pair"]]:
        """The distinct targets, and the index of each pair's target among them."""
        return self.target.unique(return_inverse=True)


def topk_hits(
    maps: OVMaps, grids: Sequence[Grid], requested: Bool[Tensor, "sign head relation"] | None = None
) -> Iterator[tuple[Bool[Tensor, "head item pair"], Bool[Tensor, "head item pair"]]]:
    """Yield, for every source and target of each relation, whether the target is in the top k, and in the bottom k.

    1. Compute the logits of the relation's own targets, and the largest and smallest of them in each row m_s. A row is
       a source with a k; relations that have the same row share the work.
    2. Find the k-th and the next largest (smallest) logit of each row, tile after tile of the vocabulary. A row whose
       targets all lie between the k-th ones found so far leaves: none can be in the top k or the bottom k any more.
    3. A target beyond the middle of the two is a hit, unless it is too near to it: then it is settled separately.

    `requested`, on the CPU: for which heads and relations, for the top k and for the bottom k; None for all. For the
    others nothing is computed, and nothing is a hit.
    """
    if requested is None:
        requested = torch.ones(2, maps.n_heads, len(grids), dtype=torch.bool)
    rows = _Rows(grids, maps.x.device)
    z = _values_of(maps, rows.source, rows.needed(requested.any(0)))
    margin = ov_blocked.exact_values_margin(maps, z, rows.source)
    logits = _GridLogits(maps, z.float(), grids, rows, requested)
    # The margin is added: a row leaves only when its best target is certainly out.
    bound = _kth_logits(maps, logits.z, rows, logits.extremes() + margin)
    # Of each requested relation, which targets are hits, and which are too near the k-th place to tell for either sign.
    tables: dict[int, tuple[Bool[Tensor, "sign head token item"], Bool[Tensor, "head token item"]]] = {}
    for index, row in enumerate(rows.of_grid):
        # Relations requested for no head have no logits, and all of their cells share one False below.
        if not len(logits.heads[index]):
            continue
        shape = maps.n_heads, len(logits.tokens[index]), len(row)
        hits, unsure = (torch.zeros(*signs, *shape, dtype=torch.bool, device=z.device) for signs in ((2,), ()))
        for heads, own in logits.of_grid(index):
            near = margin[heads[:, None], row][:, None]
            # The bottom k are the top k of negated logits: one formula for both signs.
            excess = torch.stack([own, -own]) - bound[:, heads[:, None], row][:, :, None]
            chosen = logits.requested[:, heads, index, None, None]
            hits[:, heads] = (excess >= near) & chosen
            unsure[heads] = ((excess.abs() < near) & chosen).any(0)
        tables[index] = hits, unsure
    _settle_unsure(maps, grids, tables, requested)
    nothing = torch.zeros((), dtype=torch.bool, device=margin.device)
    for index, grid in enumerate(grids):
        if index in tables:
            # Popped, so that a relation's table is freed once it is yielded; tokens are expanded to pairs only here.
            top, bottom = tables.pop(index)[0].index_select(2, logits.column[index]).mT
            yield top, bottom
        else:
            # Expanded from one False: nothing is allocated for it.
            yield (nothing.expand(maps.n_heads, len(grid.source), len(grid.target)),) * 2


def _settle_unsure(
    maps: OVMaps,
    grids: Sequence[Grid],
    tables: Mapping[int, tuple[Bool[Tensor, "sign head token item"], Bool[Tensor, "head token item"]]],
    requested: Bool[Tensor, "sign head relation"],
) -> None:
    """Settle the unsure targets of all relations together: the host waits only once to learn which they are."""
    if not tables:
        return
    # All relations' tables end to end: one nonzero finds the unsure targets of all of them.
    begins = [0, *itertools.accumulate(unsure.numel() for _, unsure in tables.values())]
    places = torch.cat([unsure.flatten() for _, unsure in tables.values()]).nonzero()[:, 0].cpu()
    # Places are ascending, so that each relation's places are one slice of them.
    bounds = torch.searchsorted(places, torch.tensor(begins)).tolist()
    cells: list[tuple[Tensor, Tensor, Tensor]] = []
    columns: list[Tensor] = []
    for (index, (_, unsure)), begin, mine in zip(tables.items(), begins, itertools.pairwise(bounds), strict=False):
        head, token, item = torch.unravel_index(places[slice(*mine)] - begin, unsure.shape)
        grid = grids[index]
        cells.append((head, token, item))
        columns.append(torch.stack([head, grid.source[item], grid.tokens[0][token], torch.full_like(head, grid.k)]))
    settled = ov_blocked.settle(maps, *torch.cat(columns, dim=1))
    parts = settled.split([len(head) for head, _, _ in cells], dim=1)
    for (index, (hits, _)), cell, part in zip(tables.items(), cells, parts, strict=True):
        if part.shape[1]:
            head, token, item = (to_device(one, hits.device) for one in cell)
            # settle decides both signs; a sign that is not requested stays False.
            hits[:, head, token, item] = to_device(part & requested[:, cell[0], index], hits.device)


class _Rows:
    """The rows of all relations: each source with each k requested for it, without duplicates."""

    def __init__(self, grids: Sequence[Grid], device: torch.device):
        source = torch.cat([grid.source for grid in grids])
        k = torch.cat([torch.full_like(grid.source, grid.k) for grid in grids])
        self.k_at_most = max(grid.k for grid in grids)
        # Source and k as one number, so that one unique() finds the rows that relations share.
        both, row = (source * (self.k_at_most + 1) + k).unique(return_inverse=True)
        self._of_grid = row.split([len(grid.source) for grid in grids])
        self.source, self.k = (
            to_device(one, device) for one in (both // (self.k_at_most + 1), both % (self.k_at_most + 1))
        )
        self.of_grid = to_device_many(self._of_grid, device)

    def needed(self, requested: Bool[Tensor, "head relation"]) -> Bool[Tensor, "head row"]:
        """Return which rows are requested for each head, on the CPU."""
        needed = torch.zeros(len(requested), len(self.source), dtype=torch.bool)
        for index, row in enumerate(self._of_grid):
            needed[:, row] |= requested[:, index, None]
        return needed


def _values_of(
    maps: OVMaps, source: Int[Tensor, " row"], needed: Bool[Tensor, "head row"]
) -> Float[Tensor, "kv_head row d_head"]:
    """Return z = x W_V in float64 for the rows requested for some head of the value head's group, else 0."""
    by_value = needed.unflatten(0, (len(maps.W_V), -1)).any(1)
    # One product for all value heads, if nothing would be saved.
    if bool(by_value.all()):
        return ov_blocked.head_values(maps, maps.x[source].double())
    z = torch.zeros(*by_value.shape, maps.W_V.shape[2], dtype=torch.float64, device=source.device)
    for value in by_value.any(1).nonzero()[:, 0].tolist():
        chosen = to_device(by_value[value].nonzero()[:, 0], source.device)
        z[value, chosen] = maps.x[source[chosen]].double() @ maps.W_V[value].double()
    return z


class _GridLogits:
    """The logits of each relation's distinct targets, recomputed whenever they are requested."""

    def __init__(
        self,
        maps: OVMaps,
        z: Float[Tensor, "kv_head row d_head"],
        grids: Sequence[Grid],
        rows: _Rows,
        requested: Bool[Tensor, "sign head relation"],
    ):
        self.maps, self.z, self.rows = maps, z, rows
        self.heads = to_device_many([one.nonzero()[:, 0] for one in requested.any(0).T], z.device)
        self.requested = to_device(requested, z.device)
        self.tokens, self.column = (to_device_many([grid.tokens[i] for grid in grids], z.device) for i in range(2))

    def of_grid(self, index: int) -> Iterator[tuple[Int[Tensor, " block"], Float[Tensor, "block token item"]]]:
        """Yield the logits of one relation, for some of its requested heads at a time."""
        tokens, row, heads = self.tokens[index], self.rows.of_grid[index], self.heads[index]
        if not len(heads):
            return
        # One relation's columns at a time: all relations together may have more columns than W_U.
        targets = self.maps.W_U[:, tokens]
        numbers = max(len(tokens) * max(len(row), self.z.shape[2]), 1)
        for some in heads.split(max(1, ov_blocked.tile_numbers(self.maps) // numbers)):
            W_target = exact_product(self.maps.W_O[some].flatten(0, 1), targets).unflatten(0, (len(some), -1))
            yield some, W_target.mT @ self.z[self.maps.value_head(some)[:, None], row].mT

    def extremes(self) -> Float[Tensor, "sign head row"]:
        """Return the largest requested target of each row, over its relations, and the largest negated one; or -inf."""
        shape = (2, self.maps.n_heads, len(self.rows.source))
        extremes = torch.full(shape, -torch.inf, device=self.z.device)
        for index, row in enumerate(self.rows.of_grid):
            for heads, own in self.of_grid(index):
                both = torch.stack([own.amax(1), -own.amin(1)])
                # -inf if nothing is requested: such a row is not alive from the start, and costs no logits.
                both = torch.where(self.requested[:, heads, index, None], both, -torch.inf)
                # amax, since relations share rows: a row stays while any of its relations needs it.
                extremes[:, heads] = extremes[:, heads].scatter_reduce(2, row.expand_as(both), both, "amax")
        return extremes


class _Kept:
    """The largest logits of each row so far, the largest negated ones, and which rows need more."""

    def __init__(self, rows: _Rows, best: Float[Tensor, "sign head row"]):
        # One more than k: the bound lies midway between the k-th and the next.
        self.values = best.new_full((*best.shape, rows.k_at_most + 1), -torch.inf)
        self.k, self.best, self.alive = rows.k, best, best > -torch.inf

    def left(self) -> list[int]:
        """Return the number of alive rows of each head; the host waits for it before a tile, to plan the work."""
        return self.alive.any(0).sum(1).tolist()

    def rows(self, heads: Int[Tensor, " block"], most: int) -> Int[Tensor, "block alive"]:
        """Return the alive rows of each head in order; if a head has fewer than `most`, padded with other rows."""
        # Heads have different numbers of rows left; dead rows pad them, so that the block is one product.
        return self.alive[:, heads].any(0).byte().argsort(dim=1, descending=True, stable=True)[:, :most]

    def merge(
        self, head: Int[Tensor, "block 1"], row: Int[Tensor, "block alive"], logits: Float[Tensor, "block alive token"]
    ) -> None:
        """Merge new logits, and their negatives, into the largest of their rows; many rows have nothing to merge."""
        alive = [self.alive[sign, head, row] for sign in range(2)]
        # One wait for both signs.
        for sign, some_left in enumerate(torch.stack([one.any() for one in alive]).tolist()):
            if not some_left:
                continue
            # Negated in place, because the positive sign no longer needs them.
            parts = _Parts(logits.neg_() if sign else logits)
            # The smallest value a row keeps, at place k: a tile without a larger one changes nothing, and isn't sorted.
            last = self.values[sign, head, row, self.k[row]]
            block, place = ((parts.largest() > last) & alive[sign]).nonzero(as_tuple=True)
            into = sign, head[block, 0], row[block, place]
            n_kept = self.values.shape[-1]
            candidates = torch.cat([self.values[into], parts.candidates(block, place, n_kept)], dim=1)
            self.values[into] = candidates.topk(n_kept).values
            at_k = self.values[sign, head, row, self.k[row] - 1]
            self.alive[sign, head, row] = alive[sign] & (at_k <= self.best[sign, head, row])

    def bounds(self) -> Float[Tensor, "sign head row"]:
        """Return the bound beyond which a logit is among the k largest: the k-th, for rows that left before the end."""
        place = self.k.expand(self.best.shape)[..., None]
        kth, following = (self.values.gather(3, place - before)[..., 0] for before in (1, 0))
        # Midway: otherwise the k-th target would lie within the margin of itself, and always need settling.
        return torch.where(self.alive, (kth + following) / 2, kth)


class _Parts:
    """The logits of rows in interleaved parts: the largest n logits lie in the n parts with the largest maxima.

    So nearly all of a row is read only once, for the maximum of each part, and only n parts of it are sorted.
    """

    SIZE = 32
    FEWEST = 64

    def __init__(self, logits: Float[Tensor, "block alive token"]):
        size = min(max(logits.shape[-1] // self.FEWEST, 1), self.SIZE)
        n_parts = logits.shape[-1] // size
        # Part j has tokens j, j + n_parts, ...: maxima of parts are then taken over contiguous rows of memory.
        self.parts = logits[..., : n_parts * size].unflatten(-1, (size, n_parts))
        self.rest = logits[..., n_parts * size :]
        self.maxima = self.parts.amax(-2) if n_parts else self.rest

    def largest(self) -> Float[Tensor, "block alive"]:
        largest = self.maxima.amax(-1)
        return torch.maximum(largest, self.rest.amax(-1)) if self.rest.shape[-1] else largest

    def candidates(
        self, block: Int[Tensor, " block"], place: Int[Tensor, " block"], n: int
    ) -> Float[Tensor, "row token"]:
        """Return logits of some rows, including the largest n of each."""
        rest = self.rest[block, place]
        # With no more parts than numbers wanted, selecting parts would leave nothing out.
        if self.parts.shape[-1] <= n:
            return torch.cat([self.parts[block, place].flatten(1), rest], dim=1)
        # A part without one of the n largest maxima has no number among the n largest.
        part = self.maxima[block, place].topk(n, sorted=False).indices
        return torch.cat([self.parts[block[:, None], place[:, None], :, part].flatten(1), rest], dim=1)


def _kth_logits(
    maps: OVMaps, z: Float[Tensor, "kv_head row d_head"], rows: _Rows, best: Float[Tensor, "sign head row"]
) -> Float[Tensor, "sign head row"]:
    """Return the middle of the k-th and the next largest logit of each row, and the same of the negated logits.

    Once the k-th is above a row's `best` target the row leaves, and the bound found so far is returned.
    """
    table = _Kept(rows, best)
    most = max(1, 2 * ov_blocked.factor_numbers(maps) // maps.x.shape[1])
    start = 0
    while start < maps.d_vocab and any(n_left := table.left()):
        # Tiles that double: a first tile of full width would process rows that a narrow one eliminates.
        tile = maps.W_U[:, start : start + min(max(ov_blocked.FIRST_TILE, start), most)]
        _merge_tile(maps, z, table, n_left, tile)
        start += tile.shape[1]
    return table.bounds()


def _merge_tile(
    maps: OVMaps,
    z: Float[Tensor, "kv_head row d_head"],
    table: _Kept,
    n_left: Sequence[int],
    tile: Float[Tensor, "d_model token"],
) -> None:
    """Merge a tile's logits into all remaining rows, `n_left` of them for each head.

    As z (W_O W_U) a tile costs d_head rows through W_U, as (z W_O) W_U the number of remaining rows: use the fewer.
    """
    width, d_head = tile.shape[1], z.shape[2]
    with_many = [head for head, n in enumerate(n_left) if n >= d_head]
    with_few = [head for head, n in enumerate(n_left) if 0 < n < d_head]
    for block in _chunks(with_many, ov_blocked.heads_at_once(maps, width)):
        W_O = maps.W_O[to_device(torch.tensor(block), z.device)].flatten(0, 1)
        W_tile = exact_product(W_O, tile).unflatten(0, (len(block), -1))
        # W_O W_U of a block of heads is one product; its logits are computed for as many heads as the cache holds.
        size = max(1, _logits_at_once(maps) // (max(n_left[head] for head in block) * width))
        for heads, W in zip(_chunks(block, size), W_tile.split(size), strict=True):
            group, most = to_device(torch.tensor(heads), z.device), max(n_left[head] for head in heads)
            for row in table.rows(group, most).split(max(1, _logits_at_once(maps) // (len(group) * width)), dim=1):
                table.merge(group[:, None], row, z[maps.value_head(group)[:, None], row] @ W)
    for heads in _chunks(with_few, ov_blocked.heads_at_once(maps, maps.x.shape[1])):
        group = to_device(torch.tensor(heads), z.device)
        alive = table.alive[:, group].any(0)
        place, row = alive.nonzero(as_tuple=True)
        padded = table.rows(group, max(n_left[head] for head in heads))
        y = z[maps.value_head(group)[:, None], padded] @ maps.W_O[group].float()
        # Without the padding rows, because the product with the tile is the expensive one.
        y = y[place, (alive.cumsum(1) - 1)[place, row]]
        head = group[place]
        size = max(1, ov_blocked.tile_numbers(maps) // width)
        for start in range(0, len(y), size):
            part = slice(start, start + size)
            table.merge(head[part, None], row[part, None], exact_product(y[part], tile)[:, None])


def _logits_at_once(maps: OVMaps) -> int:
    """Return the number of logits at a time: few enough on a CPU for its cache."""
    return ov_blocked.tile_numbers(maps) if maps.W_U.is_cuda else max(1, ov_blocked.tile_numbers(maps) // 8)


def _chunks(heads: list[int], size: int) -> list[list[int]]:
    return [heads[start : start + size] for start in range(0, len(heads), size)]
