"""The counts that give ranks, in one Triton kernel: the logits z W of each head beyond the logit of each pair's target.

A program takes one head, a block of pairs and a share of the tokens. For each tile it multiplies, compares with
own + margin and own - margin, and accumulates counts in registers; no logit reaches memory. Tokens between the two
bounds are in neither count: they are too near to call, and the caller decides them in float64. A pair's target is
excluded by its column. Heads that share values read the same z.

Two float32 factors are multiplied as three tensor-core products of 11-bit parts ("high"), or directly ("highest").
Tensor cores truncate sums instead of rounding them, so "high" needs a wider margin (`ov_blocked.rounding`).

Predicted speed: a tile is 128 pairs × 128 tokens at depth d_head, a tenth of the arithmetic of W_O W_U for the same
tokens when pairs are a tenth of d_model · heads; memory moves W once per block of 128 pairs, from the L2 cache, since
programs of one head and share run side by side.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.likelihood_triton import multiprocessors, shares

BLOCK_PAIRS, BLOCK_TOKENS, BLOCK_DEPTH = 128, 128, 32


@triton.jit(do_not_specialize=["n_pairs", "tiles_per_share"])
@no_type_check
def _count_kernel(
    z,  # [kv_head, pair, d_head]
    W,  # [head, d_head, token]
    target_logits,  # [head, pair], as are margin and counts
    margin,
    column,
    counts,  # [share, 2, head, pair]
    n_pairs,
    n_tokens,
    d_head,
    group,
    tiles_per_share,
    EVEN_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pair_blocks = tl.cdiv(n_pairs, BLOCK_P)
    share = tl.program_id(0) // pair_blocks
    # int64 offsets into W: 64 heads of width 128 over 262,144 tokens are 2^31 numbers.
    head = tl.program_id(1).to(tl.int64)
    rows = (tl.program_id(0) % pair_blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
    # Rows past the end compute the first pair again and store nothing: no load needs a mask for pairs.
    row = tl.where(rows < n_pairs, rows, 0)
    own_logit = tl.load(target_logits + head * n_pairs + row)
    near = tl.load(margin + head * n_pairs + row)
    # Both bounds are computed once: a tile then needs only two comparisons per logit.
    upper, lower = own_logit + near, own_logit - near
    own_column = tl.load(column + row)
    z_row = z + (head // group) * n_pairs * d_head + row.to(tl.int64)[:, None] * d_head
    W_head = W + head * d_head * n_tokens

    above = tl.zeros((BLOCK_P,), tl.int32)
    below = tl.zeros((BLOCK_P,), tl.int32)
    first = share * tiles_per_share
    last = tl.minimum(first + tiles_per_share, tl.cdiv(n_tokens, BLOCK_V))
    for tile in range(first, last):
        tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        in_tile = tokens < n_tokens
        logits = tl.zeros((BLOCK_P, BLOCK_V), tl.float32)
        for start in range(0, d_head, BLOCK_D):
            depth = start + tl.arange(0, BLOCK_D)
            z_tile = z_row + depth[None, :]
            w_tile = W_head + depth.to(tl.int64)[:, None] * n_tokens + tokens[None, :]
            inside = depth < d_head
            left = tl.load(z_tile) if EVEN_DEPTH else tl.load(z_tile, mask=inside[None, :], other=0.0)
            # Masks, not clamped tokens: the compiler must see that these are consecutive to read 16 bytes at once.
            w_mask = in_tile[None, :] if EVEN_DEPTH else inside[:, None] & in_tile[None, :]
            right = tl.load(w_tile, mask=w_mask, other=0.0)
            # Sums are short here (d_head terms), so truncation is acceptable: the caller's margin covers it.
            logits = tl.dot(left, right, logits, input_precision=PRECISION)
        # Masked columns have logits of 0, which would count; the target could count itself because of rounding.
        other = in_tile[None, :] & (tokens[None, :] != own_column[:, None])
        above += tl.sum(((logits > upper[:, None]) & other).to(tl.int32), 1)
        below += tl.sum(((logits < lower[:, None]) & other).to(tl.int32), 1)

    n_heads = tl.num_programs(1)
    here = counts + ((share * 2).to(tl.int64) * n_heads + head) * n_pairs + rows
    tl.store(here, above, mask=rows < n_pairs)
    tl.store(here + n_heads.to(tl.int64) * n_pairs, below, mask=rows < n_pairs)


def count_beyond(
    z: Float[Tensor, "kv_head pair d_head"],
    W: Float[Tensor, "head d_head token"],
    target_logits: Float[Tensor, "head pair"],
    margin: Float[Tensor, "head pair"],
    column: Int[Tensor, " pair"],
    precision: str = "high",
) -> Int[Tensor, "2 head pair"]:
    """Count the logits z W above own + margin, and those below own - margin, for every head and pair.

    z is shared by heads in groups; W is W_O W_U of each head, for some tokens. A token within `margin` of the target's
    logit is too near to call. `column` is the column of each pair's target among these tokens; if it is not there, any
    number beyond them. `precision` "highest" multiplies in float32, "high" in three tensor-core products.
    """
    (n_heads, d_head, n_tokens), n_pairs = W.shape, z.shape[1]
    n_tiles = triton.cdiv(n_tokens, BLOCK_TOKENS)
    n_blocks = triton.cdiv(n_pairs, BLOCK_PAIRS)
    per_share = triton.cdiv(n_tiles, shares(n_blocks * n_heads, n_tiles, multiprocessors(W.device)))
    # After rounding up, the last shares may have no tile: launch no programs for those.
    n_shares = triton.cdiv(n_tiles, per_share)
    # Each share has its own counts, added up below: without atomics nothing needs to be zeroed first.
    counts = torch.empty(n_shares, 2, n_heads, n_pairs, dtype=torch.int32, device=W.device)
    # Triton launches on the current device, not on the device of its arguments.
    with torch.cuda.device_of(W):
        _count_kernel[(n_blocks * n_shares, n_heads)](
            *(tensor.contiguous() for tensor in (z, W, target_logits, margin, column)),
            counts,
            n_pairs,
            n_tokens,
            d_head,
            n_heads // len(z),
            per_share,
            EVEN_DEPTH=d_head % BLOCK_DEPTH == 0,
            PRECISION="ieee" if precision == "highest" else "tf32x3",
            BLOCK_P=BLOCK_PAIRS,
            BLOCK_V=BLOCK_TOKENS,
            BLOCK_D=BLOCK_DEPTH,
            enable_fp_fusion=True,
            num_warps=8,
            num_stages=2,
        )
    return counts.sum(0)
