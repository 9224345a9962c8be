"""The statistics of `kernels.likelihood`, and predictions of layers, in one pass over tiles of the vocabulary.

To merge the statistics of two tiles, the sums of both are moved to the larger of their maxima, δ = m - m' ≤ 0:

    S0' = e^δ S0      S1' = e^δ (S1 + δ S0)      S2' = e^δ (S2 + 2 δ S1 + δ² S0)

On a CUDA device `token_statistics` is the kernel of `likelihood_triton`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.devices import full_float32, runs_triton
from headwater.kernels.likelihood import Moments, TokenStatistics, UnembeddingHead, statistics_of

WORKSPACE_BYTES = 32 * 2**20
"""Memory for the tiles of `token_statistics`, besides its inputs and its five numbers per token."""

_TOKENS_AT_ONCE = 512
_WIDEST = 4096
"""Most columns of a tile: for few tokens it is then multiplied and summed in the processor's caches."""


def token_statistics(
    hidden: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, " token"],
    *,
    precision: str = "highest",
) -> TokenStatistics:
    """Return the statistics of each scored token in one pass over the vocabulary.

    On a CUDA device this is the kernel of `likelihood_triton`, elsewhere tiles of torch operations.

    Args:
        hidden: the final hidden states at the scored positions, after the final norm, in any floating dtype.
        head: the unembedding. Padding columns that the tokenizer never uses count unless `W_U` is given without them.
        target: the actual next token, at each position.
        precision: "highest" or "high". On CUDA "highest" multiplies float32 states with all their bits. "high" takes
            three tensor-core products with float32 weights, with an error below 2⁻¹⁸ of Σ |h_i W_i|, and two instead of
            three with bfloat16 weights, with an error below 2⁻¹⁶ of it. The CPU always multiplies in full.

    Returns:
        The five statistics, log-probabilities in nats, in float32; products and sums are in float32 or wider whatever
        the dtype of the inputs. Besides inputs and outputs at most about `WORKSPACE_BYTES` are allocated.
    """
    if runs_triton(hidden):
        # Imported late: the file imports triton, which torch for CPUs does not install.
        from headwater.kernels import likelihood_triton

        return likelihood_triton.token_statistics(hidden, head, target, precision)
    rows, (d_model, d_vocab) = min(len(hidden), _TOKENS_AT_ONCE), head.W_U.shape
    width = min(d_vocab, _tile_width(rows, d_model))
    # Allocated once: allocating and freeing arrays of a tile's size each time would fragment the heap. A float32 W_U is
    # multiplied without a copy; only other dtypes need a tile to convert into.
    converted = None if head.W_U.dtype == torch.float32 else torch.empty_like(head.W_U[:, :width], dtype=torch.float32)
    logits_at, scratch_at = torch.empty(2, rows * width, device=hidden.device)
    chunks = []
    with full_float32():
        for h, t in zip(hidden.split(_TOKENS_AT_ONCE), target.split(_TOKENS_AT_ONCE), strict=True):
            h = h.float()
            # From W_U in the model's dtype: tiles are converted one by one, and a target may lie in any of them.
            target_logits, rank = head.target_logit(h, t), torch.zeros_like(t)
            total: Moments | None = None
            for start in range(0, d_vocab, width):
                weights = head.W_U[:, start : start + width]
                n = weights.shape[1]
                if converted is not None:
                    # copy_ converts into existing memory; .float() would allocate a tile of weights each time.
                    weights = converted[:, :n].copy_(weights)
                bias = None if head.bias is None else head.bias[start : start + width]
                logits, scratch = (array[: len(h) * n].view(len(h), n) for array in (logits_at, scratch_at))
                head._replace(W_U=weights, bias=bias).logits(h, slice(None), out=logits)
                # Before the moments, because they overwrite the logits.
                rank += _count_above(logits, target_logits, t - start, scratch)
                of_tile = _moments(logits, scratch)
                total = of_tile if total is None else _merge(total, of_tile)
            assert total is not None
            chunks.append(statistics_of(target_logits, total, rank))
    return TokenStatistics(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _tile_width(rows: int, d_model: int) -> int:
    """Return a width with which a tile's float32 weights and three arrays the size of its logits fit the workspace."""
    return min(_WIDEST, max(128, WORKSPACE_BYTES // (4 * (d_model + 3 * rows))))


def _count_above(
    logits: Float[Tensor, "token vocabulary_tile"],
    target_logits: Float[Tensor, " token"],
    column: Int[Tensor, " token"],
    above: Float[Tensor, "token vocabulary_tile"],
) -> Int[Tensor, " token"]:
    """Count larger logits, except in the target's column: computed separately, its logit may differ in the last bit."""
    torch.gt(logits, target_logits[:, None], out=above)
    inside = ((column >= 0) & (column < logits.shape[1])).nonzero()[:, 0]
    # By index, not by where(): a mask of a tile's size would be another pass over memory.
    above[inside, column[inside]] = 0
    # A sum of booleans would copy the tile to int64; ones in float32 are counted exactly up to 2^24.
    return above.sum(-1).long()


def _moments(logits: Float[Tensor, "token vocabulary_tile"], weighted: Tensor) -> Moments:
    """Sum over a tile; overwrites `logits`, and uses `weighted`, of the same size, as scratch memory.

    Sums within a tile are in float32 (torch adds pairwise): for float64, torch would first copy the tile.
    """
    # Finite even for a tile of nothing but -inf, because -inf - -inf is NaN.
    peak = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    # Relative to the tile's own maximum, so that no exponential overflows; the merge moves all tiles to a common one.
    # e^-200 is 0 in float32, so the bound changes no sum; it prevents -inf · 0, and lets NaN through.
    y = logits.sub_(peak[:, None]).clamp_(min=-200)
    torch.exp(y, out=weighted)
    s0 = weighted.sum(-1).double()
    # The next line turns y e^y into y² e^y, in the same memory.
    s1 = weighted.mul_(y).sum(-1).double()
    s2 = weighted.mul_(y).sum(-1).double()
    return Moments(peak.double(), s0, s1, s2)


def _merge(a: Moments, b: Moments) -> Moments:
    # To the larger maximum: shifts are then at most 0 and exponentials at most 1.
    peak = torch.maximum(a.peak, b.peak)
    return Moments(peak, *(x + y for x, y in zip(a.moved_to(peak)[1:], b.moved_to(peak)[1:], strict=True)))


# Predictions of several layers through one unembedding: top tokens, rank of a target, KL to the last layer.
#
# With logits x of a layer and x' of the last, p = softmax(x), p' = softmax(x'):
#
#     top       the k largest log p             rank = #{v != t : x_v > x_t} of a target t
#     KL        Σ p' (x' - x) - lse(x') + lse(x) = KL(p' ‖ p), in nats; 0 for the last layer itself
#
# `layer_predictions_reference` applies these formulas to full logits. `layer_predictions` makes one pass over tiles of
# the vocabulary, with the states of all layers in one product: sums are relative to the largest logit so far, and the k
# largest of a tile are merged with the earlier ones.


TILE_BYTES = 32 * 2**20
"""Memory for a tile's logits and its converted weights."""
ROWS_AT_ONCE = 1024
"""Most states of all layers in one product: with few, reading W_U would take longer than multiplying with it."""


class Predicted(NamedTuple):
    """Per layer and token: the largest log-probabilities (nats) with their tokens, a rank, and KL (nats)."""

    log_probability: Float[Tensor, "layer token k"]
    top: Int[Tensor, "layer token k"]
    rank: Int[Tensor, "layer token"]
    """Number of other tokens with a larger logit than the target."""
    kl: Float[Tensor, "layer token"]


def layer_predictions_reference(
    hidden: Float[Tensor, "layer token d_model"],
    last: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, " token"],
    k: int,
) -> Predicted:
    """Apply the formula to full float64 logits: `layer_predictions` must equal this."""
    wide = head._replace(W_U=head.W_U.double())
    final = wide.logits(last.double(), slice(None)).log_softmax(-1)
    by_layer = []
    for states in hidden:
        log_p = wide.logits(states.double(), slice(None)).log_softmax(-1)
        values, top = log_p.topk(k)
        own = log_p.gather(-1, target[:, None])
        rank = (log_p > own).sum(-1)
        by_layer.append(Predicted(values, top, rank, (final.exp() * (final - log_p)).sum(-1)))
    return Predicted(*(torch.stack(parts) for parts in zip(*by_layer, strict=True)))


def layer_predictions(
    hidden: Float[Tensor, "layer token d_model"],
    last: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, " token"],
    k: int,
) -> Predicted:
    """Return the predictions of layers, in one pass over the vocabulary.

    Args:
        hidden: states of several layers at some tokens, after the final norm.
        last: the same for the last layer.
        head: the unembedding.
        target: the token whose rank is requested, for each token.
        k: number of largest log-probabilities.

    Returns:
        Numbers in float32; products are in float32, sums in float64.
    """
    tokens = max(1, ROWS_AT_ONCE // (len(hidden) + 1))
    with full_float32():
        parts = [
            _of_chunk(torch.cat([states.float(), final.float()[None]]), own, head, k)
            for states, final, own in zip(
                hidden.split(tokens, dim=1), last.split(tokens), target.split(tokens), strict=True
            )
        ]
    return Predicted(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))


def _of_chunk(states: Tensor, target: Tensor, head: UnembeddingHead, k: int) -> Predicted:
    """Return the predictions of all layers except the last, for `states`, `layer token d_model`."""
    by_layer, rows, target = states.shape[:2], states.flatten(0, 1), target.repeat(len(states))
    d_model, d_vocab = head.W_U.shape
    # Four arrays of a tile's size: logits, and intermediate results of the sums.
    width = max(128, TILE_BYTES // (4 * (d_model + 4 * len(rows))))
    # Before the tiles: each tile is compared with the target's logit, and the target's own tile may come last.
    target_logits, rank = head.target_logit(rows, target), torch.zeros_like(target)
    # With -inf the first tile is merged like the others: exp(-inf) · 0 is 0.
    peak = torch.full(target.shape, -torch.inf, dtype=torch.float64, device=states.device)
    total, difference = torch.zeros_like(peak), torch.zeros_like(peak).view(by_layer)
    values = torch.empty(len(target), 0, device=states.device)
    top = torch.empty(len(target), 0, dtype=torch.long, device=states.device)
    for start in range(0, d_vocab, width):
        tile = head._replace(
            W_U=head.W_U[:, start : start + width].float(),
            bias=None if head.bias is None else head.bias[start : start + width],
        )
        logits = tile.logits(rows, slice(None))
        above, column = logits > target_logits[:, None], target - start
        inside = (column >= 0) & (column < logits.shape[1])
        own = column.clamp(0, logits.shape[1] - 1)[:, None]
        # By index: the target's logit in the tile may differ in the last bit from the separately computed one.
        rank += above.sum(-1) - (above.gather(1, own)[:, 0] & inside).long()
        del above
        # topk of the tile first: concatenating it with the earlier values would copy a whole tile.
        largest, places = logits.topk(min(k, logits.shape[1]))
        values, order = torch.cat([values, largest], -1).topk(min(k, values.shape[1] + largest.shape[1]))
        top = torch.cat([top, places + start], -1).gather(-1, order)
        before, peak = peak, torch.maximum(peak, logits.amax(-1).double())
        shrink = (before - peak).exp()
        # peak is a float32 number kept in float64, so that it is subtracted from float32 logits without rounding.
        total = total * shrink + (logits - peak[:, None].float()).exp().sum(-1).double()
        logits = logits.view(*by_layer, -1)
        weight = (logits[-1] - peak.view(by_layer)[-1][:, None].float()).exp()
        # The difference of logits, not of log-probabilities: neither normalizer is known before the last tile.
        gap = (logits[-1] - logits).mul_(weight).sum(-1).double()
        difference = difference * shrink.view(by_layer)[-1] + gap
    lse = (peak + total.log()).view(by_layer)
    # For equal distributions the result is rounding of either sign.
    kl = (difference / total.view(by_layer)[-1] - lse[-1] + lse).clamp(min=0)
    return Predicted(
        log_probability=(values.view(*by_layer, -1) - lse[..., None]).float()[:-1],
        top=top.view(*by_layer, -1)[:-1],
        rank=rank.view(by_layer)[:-1],
        kl=kl[:-1].float(),
    )
