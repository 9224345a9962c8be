"""The counts of `ov`, without the maps: ranks of targets in x W_V W_O W_U, in a workspace of fixed size.

Three things make it fast. Counting replaces sorting: whether t is in the top k takes one comparison per token. The maps
stay low rank: x W_V once for every source of the suite, and W_O W_U once for all heads. And almost every pair is
eliminated early: once k tokens are greater than t and k are smaller, no other token matters.

1. `screen_pairs` compares every pair of every head with a sample of the vocabulary (`ov.first_tokens`).
2. `settle`: for the few remaining pairs, compute their head's output y = x W_V W_O in float64, and compare y W_U, tile
   after tile, each as wide as all tiles before it; eliminated pairs leave after every tile. Pairs of one source share
   y.
3. Pairs that reach the end with a token too near their k-th place to call are decided in float64.

`topk_membership` combines the two.

Float32 is trusted up to a margin, `rounding` times the norms of the factors multiplied in float32; in wide models, and
on a CUDA device, z = x W_V is computed in float64, so that the margin is narrow there too. A token within the margin of
the target is too near to call. So results equal those of `ov`, ties included, for weights of any dtype. `ov_sweep` goes
through the whole vocabulary in the same way.

On a CUDA device the first screening of all heads is one launch of the kernel in `ov_triton`, over a wider sample, and
bfloat16 factors are multiplied by tensor cores; a workspace some 16 times as large keeps launches few. The host knows
the pairs, and waits only to learn which remain after the screening or a tile, and for the results.
"""

from collections.abc import Iterator

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from headwater.kernels.devices import exact_product, full_float32, runs_triton, to_device
from headwater.kernels.ov import OVMaps

ROUNDING = 2.0**-19
"""Float32 rounding, relative to the norms: 32 units in the last place. Sums that do not cancel (positive factors, 8,192
numbers) lose up to 12, random ones less than 3."""
TENSOR_ROUNDING = 2.0**-15
"""The rounding of tensor cores, which truncate sums: 512 steps (8,192 numbers) lose up to half a unit each, on average
at half the sum's final size, and three products of 11-bit parts two units more."""
WIDE = 2.0**-4
"""Largest margin, as a fraction of a typical logit, at which z is computed in float32."""
FIRST_TILE = 512
TILE_NUMBERS = 2**22
"""Most logits at a time (16 MB in float32) on a CPU."""
FACTOR_NUMBERS = 2**23
"""Most numbers of one factor converted at a time (64 MB in float64) on a CPU."""
CACHED_NUMBERS = 2**17
"""Logits that a thread compares at a time if each is read several times: 0.5 MB, and as much for the counts."""
CUDA_WORKSPACE = 16
"""Factor by which the workspace is larger on a CUDA device."""


@full_float32()
def topk_membership(
    maps: OVMaps, source: Int[Tensor, " pair"], target: Int[Tensor, " pair"], k: Int[Tensor, " pair"]
) -> tuple[Bool[Tensor, "head pair"], Bool[Tensor, "head pair"]]:
    """Return whether each pair's target is among the k largest, and among the k smallest, logits of its source.

    `source` are rows of `maps.x`, `target` token ids, and `k` may differ from pair to pair; these and the results are
    on the CPU.
    """
    top, bottom = settle_remaining(maps, screen_pairs(maps, source, target, k)[0].cpu(), (source, target, k))
    return top, bottom


def settle_remaining(
    maps: OVMaps, unsettled: Bool[Tensor, "sign head pair"], pairs: tuple[Int[Tensor, " pair"], ...]
) -> Bool[Tensor, "sign head pair"]:
    """Decide the pairs that the screening left unsettled, all on the CPU; the others are not hits."""
    source, target, k = pairs
    head, pair = unsettled.any(0).nonzero(as_tuple=True)
    hits = torch.zeros_like(unsettled)
    # Both signs, even if only one is unsettled: they share y and its logits.
    hits[:, head, pair] = settle(maps, head, source[pair], target[pair], k[pair])
    return hits


@full_float32()
def screen_pairs(
    maps: OVMaps, source: Int[Tensor, " pair"], target: Int[Tensor, " pair"], k: Int[Tensor, " pair"]
) -> tuple[Bool[Tensor, "sign head pair"], Float[Tensor, "head pair"]]:
    """Compare each pair's target with a sample of the vocabulary. The arguments are those of `topk_membership`.

    Returns, on the device of the maps, the pairs for which the sample does not have k tokens above the target, then
    the same for below (the others are certainly not hits); and the targets' logits, to float32 rounding.
    """
    # Every head reads it: copied once into the layout that the product needs.
    sample = columns_of(maps, maps.first).contiguous()
    # Pairs of a suite share sources and targets: z and W_O W_U are computed once for each distinct one.
    distinct = (*source.unique(return_inverse=True), *target.unique(return_inverse=True))
    rows, row, tokens, column, k = (to_device(one, maps.x.device) for one in (*distinct, k))
    targets = columns_of(maps, tokens)
    z, margin = _values_and_margin(maps, rows)
    # The margin depends only on the source: all its targets have the same margin.
    margin = margin[:, row]
    unsettled = torch.empty(2, *margin.shape, dtype=torch.bool, device=margin.device)
    target_logits = torch.empty_like(margin)
    for heads in head_blocks(maps, sample.shape[1] + len(tokens)):
        W_O = maps.W_O[heads.start : heads.stop].flatten(0, 1)
        # Transposed: a target's d_head numbers are contiguous, since W_target[column] copies them pair by pair.
        to_target = rearrange(
            exact_product(targets.T, W_O.T), "token (head d_head) -> head token d_head", d_head=z.shape[-1]
        )
        to_sample = rearrange(
            exact_product(W_O, sample), "(head d_head) token -> head d_head token", d_head=z.shape[-1]
        )
        if runs_triton(z):
            some = slice(heads.start, heads.stop)
            # Here z is repeated for each query head of a group: one launch takes all heads, and indexes them by number.
            z_pairs = z[value_heads(maps, z.device)[some]][:, row]
            target_logits[some] = (z_pairs * to_target[:, column]).sum(-1)
            from headwater.kernels.ov_triton import count_beyond as count_at_once

            # A target in the sample is within the margin of itself: it counts on neither side, and needs no column.
            nowhere = torch.full((len(row),), -1, device=z.device)
            unsettled[:, some] = count_at_once(z_pairs, to_sample, target_logits[some], margin[some], nowhere) < k
            continue
        for head, W_target, W_sample in zip(heads, to_target, to_sample, strict=True):
            z_pair = z[maps.value_head(head)][row]
            # float32, like the sample's logits: the margin covers the rounding of both.
            target_logits[head] = (z_pair * W_target[column]).sum(-1)
            unsettled[:, head] = torch.stack(count_products(z_pair, W_sample, target_logits[head], margin[head])) < k
    return unsettled, target_logits


def _values_and_margin(
    maps: OVMaps, rows: Int[Tensor, " source"]
) -> tuple[Float[Tensor, "kv_head source d_head"], Float[Tensor, "head source"]]:
    """Return z = x W_V in float32 for some sources, and the largest error of the logits computed from it.

    If z is computed in float32 the error is relative to `OVMaps.scale`. Random factors have logits of scale / (d_model
    √d_head): if the margin would exceed `WIDE` times these, z is computed in float64, after which no sum has larger
    terms than Σ_j |z_j| |W_O[j]| max_v |W_U[:, v]|, some √d_model times less.
    """
    # With heads 128 wide, float32 is used up to a width of 2,896 on a CPU, and of 181 on a CUDA device.
    if rounding(maps) * maps.W_O.shape[2] * maps.W_O.shape[1] ** 0.5 < WIDE:
        return head_values(maps, maps.x[rows].float()), (rounding(maps) * maps.scale[:, rows]).float()
    z = head_values(maps, maps.x[rows].double())
    # Rounded once, after the sum: an error in the last bit of z, not of d_model terms.
    return z.float(), exact_values_margin(maps, z, rows)


def exact_values_margin(
    maps: OVMaps, z: Float[Tensor, "kv_head row d_head"], source: Int[Tensor, " row"]
) -> Float[Tensor, "head row"]:
    """Return the largest error of logits if z is exact: terms of a sum are ≤ Σ_j |z_j| |W_O[j]| max_v |W_U[:, v]|."""
    lengths = torch.linalg.vector_norm(maps.W_O, dim=2, dtype=torch.float64)
    sizes = (z.abs() @ lengths.unflatten(0, (len(z), -1)).mT).mT.flatten(0, 1)
    return (rounding(maps) * maps.longest * sizes + maps.tie[:, source]).float()


def sample_size(W_U: Float[Tensor, "d_model d_vocab"]) -> int:
    """Return the number of tokens to compare first, on this device."""
    return FIRST_TILE * (8 if W_U.is_cuda else 1)


def settle(
    maps: OVMaps,
    head: Int[Tensor, " triple"],
    source: Int[Tensor, " triple"],
    target: Int[Tensor, " triple"],
    k: Int[Tensor, " triple"],
) -> Bool[Tensor, "2 triple"]:
    """Decide top-k and bottom-k membership of targets in chosen rows: the staged count, then float64 if too near.

    All arguments and the result are on the CPU.
    """
    hits = torch.zeros(2, len(head), dtype=torch.bool)
    # Triples of one head and source side by side: they share y and its logits, which cost most.
    row = head * len(maps.x) + source
    by_row = row.argsort(stable=True)
    step = max(1, factor_numbers(maps) // maps.x.shape[1])
    for part in by_row.split(step):
        hits[:, part] = _settle(maps, row[part], target[part], k[part]).cpu()
    return hits


def _settle(
    maps: OVMaps, row: Int[Tensor, " triple"], target: Int[Tensor, " triple"], k: Int[Tensor, " triple"]
) -> Bool[Tensor, "2 triple"]:
    """Settle triples sorted by row: a number for each head and source."""
    rows, row = row.unique_consecutive(return_inverse=True)
    # float64, then rounded once to float32 below: so the margin needs the norm of y, not of all four factors.
    exact = head_outputs(maps, rows // len(maps.x), rows % len(maps.x))
    rows, row, target, k = (to_device(one, exact.device) for one in (rows, row, target, k))
    logits64, tie = token_logits(maps, exact[row], target), maps.tie.flatten()[rows][row]
    y, target_logits = exact.float(), logits64.float()
    # ROUNDING also on a GPU: callers use `full_float32`, so that these products never run on tensor cores.
    margin = (ROUNDING * maps.longest * torch.linalg.vector_norm(exact, dim=1)[row] + tie).float()
    alive, live, of_live = torch.arange(len(row), device=k.device), torch.arange(len(y), device=k.device), row
    # Tokens certainly above, certainly below, then each with those too near to call: fewer than k of these is a hit.
    counts = torch.zeros(4, len(row), device=k.device)
    start = 0
    while start < maps.d_vocab and len(alive):
        stop = min(maps.d_vocab, start + next_width(maps, start, len(alive)))
        if start:  # before that all rows are live, so the host need not wait to learn which
            live, of_live = row[alive].unique_consecutive(return_inverse=True)
        logits = y[live] @ maps.W_U[:, start:stop].float()
        above, below = count_beyond(logits[of_live], target_logits[alive], margin[alive])
        # A token that is neither, and is not the target, is too near to call: it may be above as well as below.
        inside = (target[alive] >= start) & (target[alive] < stop)
        near = stop - start - inside.float() - above - below
        counts[:, alive] += torch.stack([above, below, above + near, below + near])
        # Eliminated once certainly beaten on both sides; the rest meets a tile twice as wide.
        alive = alive[(counts[:2, alive] < k[alive]).any(0)]
        start = stop
    hit = torch.zeros(2, len(row), dtype=torch.bool, device=k.device)
    hit[:, alive] = counts[2:, alive] < k[alive]
    # If the certain and possible counts disagree, a token is too near to call.
    unsure = alive[((counts[:2, alive] < k[alive]) & ~hit[:, alive]).any(0)]
    hit[:, unsure] = _exact_counts(maps, exact[row[unsure]], logits64[unsure], target[unsure], tie[unsure]) < k[unsure]
    return hit


def _exact_counts(
    maps: OVMaps,
    y: Float[Tensor, "triple d_model"],
    target_logits: Float[Tensor, " triple"],
    target: Int[Tensor, " triple"],
    tie: Float[Tensor, " triple"],
) -> Int[Tensor, "2 triple"]:
    """Count greater and smaller logits over the whole vocabulary in float64."""
    counts = torch.zeros(2, len(target), dtype=torch.int64, device=y.device)
    start = 0
    while start < maps.d_vocab and len(target):
        # As if everything had been seen: with few rows, use the full width that the workspace allows in float64.
        stop = min(maps.d_vocab, start + next_width(maps, maps.d_vocab, len(target)) // 2 + 1)
        logits = y @ maps.W_U[:, start:stop].double()
        leave_out(logits, target - start)
        counts += torch.stack(count_beyond(logits, target_logits, tie)).long()
        start = stop
    return counts


def head_values(maps: OVMaps, x: Float[Tensor, "source d_model"]) -> Float[Tensor, "kv_head source d_head"]:
    """Return z = x W_V in the precision of x."""
    z = x @ rearrange(maps.W_V.to(x.dtype), "kv_head d_model d_head -> d_model (kv_head d_head)")
    return rearrange(z, "source (kv_head d_head) -> kv_head source d_head", kv_head=len(maps.W_V)).contiguous()


def head_outputs(maps: OVMaps, head: Int[Tensor, " row"], source: Int[Tensor, " row"]) -> Float[Tensor, "row d_model"]:
    """Return y = x_s W_V W_O in float64, a head's output for a source; rows must be sorted by head, on the CPU."""
    y = torch.empty(len(head), maps.x.shape[1], dtype=torch.float64, device=maps.x.device)
    source, start = to_device(source, y.device), 0
    # Sorted by head, so that each head's rows are one slice and one product.
    for number, count in enumerate(head.bincount(minlength=maps.n_heads).tolist()):
        if not count:
            continue
        rows = slice(start, start + count)
        z = maps.x[source[rows]].double() @ maps.W_V[maps.value_head(number)].double()
        y[rows] = z @ maps.W_O[number].double()
        start += count
    return y


def token_logits(
    maps: OVMaps, y: Float[Tensor, "triple d_model"], token: Int[Tensor, " triple"]
) -> Float[Tensor, " triple"]:
    """Return the logit y W_U[:, token] of one token per triple, in float64."""
    return (y * columns_of(maps, token).T.double()).sum(-1)


def columns_of(maps: OVMaps, token: Int[Tensor, " token"]) -> Float[Tensor, "d_model token"]:
    """Return columns of W_U for some tokens; models store W_U token after token, so that whole rows are copied."""
    # Gathered along W_U's columns, numbers are copied one at a time: 0.05 of a layer's 0.57 s (benchmarks/NOTES.md).
    return maps.W_U.T.index_select(0, token).T


def logit_difference(
    maps: OVMaps,
    head: Int[Tensor, " row"],
    source: Int[Tensor, " row"],
    target: Int[Tensor, " row"],
    other: Int[Tensor, " row"],
) -> Float[Tensor, " row"]:
    """Return in float64 the logit of a target minus that of another token, in rows sorted by head, on the CPU."""
    differences = []
    for part in torch.arange(len(head)).split(max(1, factor_numbers(maps) // maps.x.shape[1])):
        y = head_outputs(maps, head[part], source[part])
        of_target, of_other = (token_logits(maps, y, to_device(one[part], y.device)) for one in (target, other))
        differences.append(of_target - of_other)
    return torch.cat(differences)


def rounding(maps: OVMaps) -> float:
    """Return the relative rounding of float32 on this device: larger on CUDA, where tensor cores may multiply."""
    return TENSOR_ROUNDING if maps.W_U.is_cuda else ROUNDING


def factor_numbers(maps: OVMaps) -> int:
    """Return the most numbers of one factor converted at a time on this device."""
    return FACTOR_NUMBERS * (CUDA_WORKSPACE if maps.W_U.is_cuda else 1)


def tile_numbers(maps: OVMaps) -> int:
    """Return the most logits at a time on this device."""
    return TILE_NUMBERS * (CUDA_WORKSPACE if maps.W_U.is_cuda else 1)


def next_width(maps: OVMaps, n_seen: int, rows: int) -> int:
    """Return the width of the next tile: all tokens seen so far, if W_U's tile and the logits fit the workspace."""
    # Tiles that double cost the same each, since half of the rows leave after every one.
    most = min(2 * factor_numbers(maps) // maps.x.shape[1], tile_numbers(maps) // rows)
    return max(1, min(max(FIRST_TILE, n_seen), most))


def heads_at_once(maps: OVMaps, columns: int) -> int:
    """Return the number of heads whose W_O, and W_O W_U over this many columns, fit the workspace."""
    return max(1, 2 * factor_numbers(maps) // (maps.W_O.shape[1] * max(columns, maps.W_O.shape[2])))


def head_blocks(maps: OVMaps, columns: int) -> Iterator[range]:
    """Yield blocks of as many heads as the workspace holds, all heads in turn."""
    size = heads_at_once(maps, columns)
    for start in range(0, maps.n_heads, size):
        yield range(start, min(start + size, maps.n_heads))


def count_products(
    z: Float[Tensor, "row d_head"],
    W: Float[Tensor, "d_head token"],
    target_logits: Float[Tensor, " row"],
    margin: Float[Tensor, " row"],
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Count the logits z W as `count_beyond` does, with as many rows at a time as keep theirs in the CPU's cache."""
    # Per thread: with this many numbers for both threads together, ranks took 261 s instead of 230.
    n_rows = max(1, CACHED_NUMBERS * torch.get_num_threads() // W.shape[1])
    parts = zip(z.split(n_rows), target_logits.split(n_rows), margin.split(n_rows), strict=True)
    above, below = zip(*(count_beyond(some @ W, *bounds) for some, *bounds in parts), strict=True)
    return torch.cat(above), torch.cat(below)


def count_beyond(
    logits: Float[Tensor, "row token"], target_logits: Float[Tensor, " row"], margin: Float[Tensor, " row"]
) -> tuple[Float[Tensor, " row"], Float[Tensor, " row"]]:
    """Count logits above each row's own + margin and below own - margin (as floats: these comparisons vectorize)."""
    # One array for both signs, filled by out=: booleans were ten times slower to compare and to sum.
    beyond = torch.empty_like(logits)
    above = torch.gt(logits, (target_logits + margin)[:, None], out=beyond).sum(-1)
    below = torch.lt(logits, (target_logits - margin)[:, None], out=beyond).sum(-1)
    return above, below


def value_heads(maps: OVMaps, device: torch.device) -> Int[Tensor, " head"]:
    """Return the value head that each head reads."""
    return maps.value_head(torch.arange(maps.n_heads, device=device))


def leave_out(logits: Float[Tensor, "row token"], column: Int[Tensor, " row"]) -> None:
    """Exclude each row's own target from the count: nothing compares with NaN."""
    inside = ((column >= 0) & (column < logits.shape[1]))[:, None]
    own = column.clamp(0, logits.shape[1] - 1)[:, None]
    logits.scatter_(1, own, torch.where(inside, torch.nan, logits.gather(1, own)))
