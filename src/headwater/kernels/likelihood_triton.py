"""The likelihood statistics of `likelihood`, in one Triton kernel: no logit ever reaches memory.

1. A program takes a block of tokens and a share of the vocabulary's tiles, and iterates over them: the logits of a tile
   on tensor cores, then scale, bias and soft cap, then the online maximum and Σ y^n e^y (n = 0, 1, 2) and the count
   above the target, all in registers. Columns beyond the vocabulary are -inf; the target's column is excluded from the
   count by its index. Shares keep every multiprocessor busy when tokens are few.
2. The shares' sums, five numbers per token each, are merged in float64 by the recurrence of `likelihood`.

Accuracy: products and sums are float32 whatever the inputs. Two bfloat16 factors multiply exactly on tensor cores. A
float32 hidden state is multiplied with bfloat16 weights as a sum of bfloat16 parts; three parts hold all its 24 bits.
Two float32 factors are multiplied directly ("highest"), or as three tensor-core products of parts of 11 bits each
("high"). Tensor cores truncate their sums, always towards zero, and the error grows with the number of terms: every
`SUM` terms have a separate sum, and these sums are added with rounding.

The cost, predicted and seen in the compiled code, is in `benchmarks/NOTES.md`: a fifth more than the product. Two sums
of 128 × 256 would spill registers. Programs that share a tile of W_U run side by side: it is read from memory once.
"""

from functools import lru_cache
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.likelihood import Moments, TokenStatistics, UnembeddingHead, statistics_of

HALF = (torch.bfloat16, torch.float16)
SUM = 256
"""Number of products in one tensor-core sum, truncated at every step: a multiple of every tile's depth."""


class ProgramTile(NamedTuple):
    """The tile of a program: tokens × vocabulary, in steps along d_model; the warps that share it, stages in flight."""

    tokens: int
    vocabulary: int
    depth: int
    warps: int
    stages: int


@triton.jit
@no_type_check
def _own_logit_kernel(
    hidden, W_U, target, target_logits, d_model, token_stride, depth_stride, vocabulary_stride, BLOCK: tl.constexpr
):
    # int64: token · stride passes 2^31 at 524,288 states of width 4,096.
    token = tl.program_id(0).to(tl.int64)
    column = tl.load(target + token).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, d_model, BLOCK):
        depth = start + tl.arange(0, BLOCK)
        h = tl.load(hidden + token * token_stride + depth, mask=depth < d_model, other=0.0)
        w = tl.load(
            W_U + depth.to(tl.int64) * depth_stride + column * vocabulary_stride, mask=depth < d_model, other=0.0
        )
        # No tensor cores here: sums are rounded, not truncated (benchmarks/NOTES.md).
        total += h.to(tl.float32) * w.to(tl.float32)
    tl.store(target_logits + token, tl.sum(total, 0))


# Triton recompiles for a number that is 1 or a multiple of 16; these numbers change from call to call.
@triton.jit(do_not_specialize=["n_tokens", "n_shares", "tiles_per_share"])
@no_type_check
def _statistics_kernel(
    hidden,  # [part, token, d_model], contiguous
    W_U,
    bias,
    target,
    target_logits,
    sums,  # [5, share, token]: peak, s0, s1, s2, above
    n_tokens,
    d_model,
    d_vocab,
    n_shares,
    tiles_per_share,
    depth_stride,
    vocabulary_stride,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token_blocks = tl.cdiv(n_tokens, BLOCK_T)
    share = tl.program_id(0) // token_blocks
    # Neighbouring programs share a tile of W_U and differ in tokens, so that it is read from memory once.
    rows = (tl.program_id(0) % token_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows past the end compute the first row again and store nothing: no load needs a mask for tokens.
    row = tl.where(rows < n_tokens, rows, 0)
    own_logit = tl.load(target_logits + row)
    own_column = tl.load(target + row)
    h_row = hidden + row.to(tl.int64)[:, None] * d_model
    part_size = n_tokens.to(tl.int64) * d_model

    # The least float32 and not -inf: a tile may contain nothing but -inf, and -inf - -inf is NaN.
    peak = tl.full((BLOCK_T,), -3.4028234663852886e38, tl.float32)
    s0 = tl.zeros((BLOCK_T,), tl.float32)
    s1 = tl.zeros((BLOCK_T,), tl.float32)
    s2 = tl.zeros((BLOCK_T,), tl.float32)
    above = tl.zeros((BLOCK_T,), tl.float32)
    first = share * tiles_per_share
    last = tl.minimum(first + tiles_per_share, tl.cdiv(d_vocab, BLOCK_V))
    for tile in range(first, last):
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        in_vocabulary = columns < d_vocab
        # int64 offsets: a W_U of 8,192 × 262,144 has 2^31 elements.
        w_column = W_U + columns.to(tl.int64)[None, :] * vocabulary_stride
        logits = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        partial = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        for start in range(0, d_model, BLOCK_D):
            depth = start + tl.arange(0, BLOCK_D)
            w_tile = w_column + depth.to(tl.int64)[:, None] * depth_stride
            h_tile = h_row + depth[None, :]
            inside = depth < d_model
            # A mask, not clamped columns: the compiler must see that these are consecutive to read 16 bytes at once.
            w_mask = in_vocabulary[None, :] if EVEN_DEPTH else inside[:, None] & in_vocabulary[None, :]
            w = tl.load(w_tile, mask=w_mask, other=0.0)
            for part in tl.static_range(PARTS):
                h_part = h_tile + part * part_size
                h = tl.load(h_part) if EVEN_DEPTH else tl.load(h_part, mask=inside[None, :], other=0.0)
                # Summed into `partial`: Triton makes `logits += tl.dot(h, w)` one sum, which tensor cores truncate.
                partial = tl.dot(h.to(OPERAND), w.to(OPERAND), partial, input_precision=PRECISION)
            # One loop with a branch: a separate loop over sums would empty the pipeline of loads at every sum.
            if (start + BLOCK_D) % TERMS == 0:
                logits += partial
                partial = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
        logits = (logits + partial) * scale
        if HAS_BIAS:
            logits += tl.load(bias + columns, mask=in_vocabulary, other=0.0).to(tl.float32)[None, :]
        if HAS_SOFTCAP:
            # tanh from the exponential of a negative number, which cannot overflow; the sign is restored below.
            shrunk = tl.exp(-2.0 * tl.abs(logits) / softcap)
            size = softcap * (1.0 - shrunk) / (1.0 + shrunk)
            logits = tl.where(logits < 0, -size, size)
        # After the soft cap, which would make -inf finite.
        logits = tl.where(in_vocabulary[None, :], logits, float("-inf"))

        # By index: the target's logit in the tile may differ in the last bit from the separately summed one.
        is_above = (logits > own_logit[:, None]) & (columns[None, :] != own_column[:, None])
        above += tl.sum(is_above.to(tl.float32), 1)
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        # e^-200 is 0 in float32, so the bound changes no sum; it prevents -inf · 0, and lets NaN through.
        shift = tl.maximum(peak - new_peak, -200.0)
        shrink = tl.exp(shift)
        y = tl.maximum(logits - new_peak[:, None], -200.0, propagate_nan=tl.PropagateNan.ALL)
        weight = tl.exp(y)
        # From the highest moment down: each update uses the old values of the lower ones.
        s2 = shrink * (s2 + 2.0 * shift * s1 + shift * shift * s0) + tl.sum(weight * y * y, 1)
        s1 = shrink * (s1 + shift * s0) + tl.sum(weight * y, 1)
        s0 = shrink * s0 + tl.sum(weight, 1)
        peak = new_peak

    pointers = sums + share.to(tl.int64) * n_tokens + rows
    step = n_shares.to(tl.int64) * n_tokens
    inside_rows = rows < n_tokens
    tl.store(pointers, peak, mask=inside_rows)
    tl.store(pointers + step, s0, mask=inside_rows)
    tl.store(pointers + 2 * step, s1, mask=inside_rows)
    tl.store(pointers + 3 * step, s2, mask=inside_rows)
    tl.store(pointers + 4 * step, above, mask=inside_rows)


def token_statistics(
    hidden: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, " token"],
    precision: str = "highest",
) -> TokenStatistics:
    """Return the result of `likelihood_blocked.token_statistics`, storing only five numbers per token and share.

    The arguments are those of `likelihood_blocked.token_statistics`; W_U may have any alignment and strides.
    """
    n_tokens, (d_model, d_vocab) = len(hidden), head.W_U.shape
    target = target.contiguous()
    bias = None if head.bias is None else head.bias.contiguous()
    parts = operand_parts(hidden, head.W_U.dtype, precision).contiguous()
    blocks = blocks_for(n_tokens, len(parts), parts.element_size(), hidden.device)
    n_tiles = triton.cdiv(d_vocab, blocks.vocabulary)
    n_blocks = triton.cdiv(n_tokens, blocks.tokens)
    per_share = triton.cdiv(n_tiles, shares(n_blocks, n_tiles, multiprocessors(hidden.device)))
    # After rounding up, the last shares may have no tile.
    n_shares = triton.cdiv(n_tiles, per_share)
    sums = torch.empty(5, n_shares, n_tokens, device=hidden.device)
    # Triton's interpreter lacks bfloat16 products.
    native = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16} if parts.is_cuda else {}
    # Triton launches on the current device, not on the device of its arguments.
    with torch.cuda.device_of(hidden):
        target_logits = own_logits(hidden, head, target)
        _statistics_kernel[(n_blocks * n_shares,)](
            parts,
            head.W_U,
            bias,
            target,
            target_logits,
            sums,
            n_tokens,
            d_model,
            d_vocab,
            n_shares,
            per_share,
            *head.W_U.stride(),
            head.scale,
            head.softcap or 1.0,
            HAS_BIAS=bias is not None,
            HAS_SOFTCAP=head.softcap is not None,
            EVEN_DEPTH=d_model % blocks.depth == 0,
            PARTS=len(parts),
            OPERAND=native.get(parts.dtype, tl.float32),
            PRECISION="ieee" if precision == "highest" else "tf32x3",
            TERMS=SUM,
            BLOCK_T=blocks.tokens,
            BLOCK_V=blocks.vocabulary,
            BLOCK_D=blocks.depth,
            enable_fp_fusion=True,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    moments = Moments(*sums[:4].double())
    # A few numbers per token and share: float64 costs nothing here.
    moved = moments.moved_to(moments.peak.amax(0))
    total = Moments(moved.peak, *(part.sum(0) for part in moved[1:]))
    return statistics_of(target_logits, total, sums[4].sum(0).long())


def own_logits(
    hidden: Float[Tensor, "token d_model"], head: UnembeddingHead, target: Int[Tensor, " token"]
) -> Float[Tensor, " token"]:
    """Return the logit of each token's target in float32."""
    # The kernel steps along d_model one element at a time.
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    raw = torch.empty(len(hidden), device=hidden.device)
    sizes = hidden.shape[1], hidden.stride(0), *head.W_U.stride()
    _own_logit_kernel[(len(hidden),)](hidden, head.W_U, target, raw, *sizes, BLOCK=1024, enable_fp_fusion=True)
    raw = raw * head.scale
    return head.cap(raw if head.bias is None else raw + head.bias[target].float())


def operand_parts(
    hidden: Float[Tensor, "token d_model"], weights: torch.dtype, precision: str
) -> Float[Tensor, "part token d_model"]:
    """Return the factors that the kernel multiplies with the weights: tensors of one dtype that sum to the states."""
    if hidden.dtype == weights and weights in HALF:
        return hidden[None]
    rest = hidden.float()
    # float16 parts could leave its narrow range; for float16 and float32 weights the kernel multiplies in float32.
    if weights != torch.bfloat16:
        return rest[None]
    parts = []
    for _ in range(3 if precision == "highest" else 2):
        parts.append(rest.bfloat16())
        # Exact: a number minus its rounding fits in the same format.
        rest = rest - parts[-1].float()
    return torch.stack(parts)


def blocks_for(n_tokens: int, n_parts: int, element_size: int, device: torch.device) -> ProgramTile:
    """Choose the tile: as large as registers allow for two sums, with as many stages as shared memory holds.

    What fits the registers of sm_90 was found by compiling (`tests/compile_triton.py`).
    """
    # tl.dot takes at least 16 rows; rows beyond the number of tokens would be wasted work.
    tokens = min(128, max(16, triton.next_power_of_2(n_tokens)))
    # float32 spills registers at 128 × 128 (88 bytes in three products, 288 in one) but not at 128 × 64.
    vocabulary, depth = 128 if element_size == 2 else 64, 64 if element_size == 2 and n_parts == 1 else 32
    shared = shared_memory(device)
    while True:
        stage = (n_parts * tokens + vocabulary) * depth * element_size
        stages = min(4, shared // stage)
        # With one stage, loads wait for products.
        if stages >= 2 or vocabulary == 32:
            return ProgramTile(tokens, vocabulary, depth, 8 if tokens * vocabulary >= 128 * 64 else 4, max(1, stages))
        vocabulary //= 2


@lru_cache(maxsize=1024)
def shares(n_blocks: int, n_tiles: int, processors: int) -> int:
    """Return the number of shares of the vocabulary: the smallest for which the last wave of programs wastes least."""

    def tiles_in_sequence(count: int) -> int:
        return triton.cdiv(n_blocks * count, processors) * triton.cdiv(n_tiles, count)

    return min(range(1, min(n_tiles, 4 * processors) + 1), key=lambda count: (tiles_in_sequence(count), count))


def multiprocessors(device: torch.device) -> int:
    """Return the number of programs that run at once, one per multiprocessor; in the interpreter 4, to have shares."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use."""
    if device.type != "cuda":
        return 2**17
    found = torch.cuda.get_device_properties(device)
    return getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
