"""The likelihood statistics of `likelihood`, going once over tiles of the vocabulary instead of holding its logits.

The sums of two tiles merge after both are moved to the larger of their maxima, δ = m - m' ≤ 0:

    S0' = e^δ S0      S1' = e^δ (S1 + δ S0)      S2' = e^δ (S2 + 2 δ S1 + δ² S0)

On a CUDA device `token_statistics` is the kernel of `likelihood_triton`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.devices import full_float32, runs_triton
from headwater.kernels.likelihood import Moments, TokenStatistics, UnembeddingHead, statistics_of

WORKSPACE_BYTES = 32 * 2**20
"""What the tiles of `token_statistics` may take beside its inputs and its five numbers per token."""

_TOKENS_AT_ONCE = 512
_WIDEST = 4096
"""Columns of a tile at most: those of few tokens are then multiplied and summed in the processor's caches."""


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
        target: the token that came, at each position.
        precision: one of `PRECISIONS`. On CUDA "highest" multiplies float32 states with all their bits. "high" takes
            three tensor-core products with float32 weights, off by less than 2⁻¹⁸ of Σ |h_i W_i|, and two in place of
            three with bfloat16 weights, off by less than 2⁻¹⁶ of it. The CPU always multiplies in full.

    Returns:
        The five statistics, log-probabilities in nats, in float32; products and sums are in float32 or wider whatever
        the dtype of the inputs. Beside inputs and outputs at most about `WORKSPACE_BYTES` are kept.
    """
    if runs_triton(hidden):
        # Imported late: the file imports triton, which torch for CPUs does not bring.
        from headwater.kernels import likelihood_triton

        return likelihood_triton.token_statistics(hidden, head, target, precision)
    rows, (d_model, d_vocab) = min(len(hidden), _TOKENS_AT_ONCE), head.W_U.shape
    tiles = _tiles(d_vocab, rows, d_model)
    # No tile is wider than the first.
    workspace = _Workspace(rows, tiles[0].stop, head, hidden.device)
    with full_float32():
        chunks = [
            _statistics_of_chunk(h.float(), head, t, tiles, workspace)
            for h, t in zip(hidden.split(_TOKENS_AT_ONCE), target.split(_TOKENS_AT_ONCE), strict=True)
        ]
    return TokenStatistics(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


class _Workspace:
    """Every array of a tile's size, allocated once: freed and allocated anew, they would scatter the heap."""

    def __init__(self, rows: int, width: int, head: UnembeddingHead, device: torch.device):
        # A float32 W_U is multiplied where it lies; its tile would be a copy for nothing.
        convert = head.W_U.dtype != torch.float32
        self.weights = torch.empty_like(head.W_U[:, :width], dtype=torch.float32) if convert else None
        self.logits, self.weighted = torch.empty(2, rows * width, device=device)

    def head_of(self, head: UnembeddingHead, tile: slice) -> UnembeddingHead:
        """Return the head for a tile alone, its weights in float32."""
        weights = head.W_U[:, tile]
        if self.weights is not None:
            # copy_ converts into memory that is there; .float() would allocate a tile of weights each time.
            weights = self.weights[:, : weights.shape[1]].copy_(weights)
        return head._replace(W_U=weights, bias=None if head.bias is None else head.bias[tile])

    def arrays(self, rows: int, tile: slice) -> list[Tensor]:
        """Return the array for the logits and the one to work in, as `rows` × tile."""
        size = rows * (tile.stop - tile.start)
        return [array[:size].view(rows, -1) for array in (self.logits, self.weighted)]


def _statistics_of_chunk(
    hidden: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, " token"],
    tiles: list[slice],
    workspace: _Workspace,
) -> TokenStatistics:
    # From W_U as the model keeps it: tiles are converted one by one, and a target may lie in any of them.
    target_logits = head.target_logit(hidden, target)
    rank = torch.zeros_like(target)
    total: Moments | None = None
    for tile in tiles:
        logits, scratch = workspace.arrays(len(hidden), tile)
        workspace.head_of(head, tile).logits(hidden, slice(None), out=logits)
        # Before the moments: they use the logits up.
        rank += _count_above(logits, target_logits, target - tile.start, scratch)
        of_tile = _moments(logits, scratch)
        total = of_tile if total is None else _merge(total, of_tile)
    assert total is not None
    return statistics_of(target_logits, total, rank)


def _tiles(d_vocab: int, rows: int, d_model: int) -> list[slice]:
    """Cut the vocabulary so that a tile's float32 weights and three arrays the size of its logits fit the workspace."""
    width = min(_WIDEST, max(128, WORKSPACE_BYTES // (4 * (d_model + 3 * rows))))
    return [slice(start, min(start + width, d_vocab)) for start in range(0, d_vocab, width)]


def _count_above(
    logits: Float[Tensor, "token vocabulary_tile"],
    target_logits: Float[Tensor, " token"],
    column: Int[Tensor, " token"],
    above: Float[Tensor, "token vocabulary_tile"],
) -> Int[Tensor, " token"]:
    """Count larger logits without the target's own column: computed apart, its logit may differ in the last bit."""
    torch.gt(logits, target_logits[:, None], out=above)
    inside = ((column >= 0) & (column < logits.shape[1])).nonzero()[:, 0]
    # By index, not by where(): a mask of a tile's size would be a further pass over memory.
    above[inside, column[inside]] = 0
    # A sum of booleans would copy the tile to int64; ones in float32 are counted exactly up to 2^24.
    return above.sum(-1).long()


def _moments(logits: Float[Tensor, "token vocabulary_tile"], weighted: Tensor) -> Moments:
    """Sum over a tile; `logits` is used up, `weighted` is an array of its size to work in.

    Sums within a tile are in float32 (torch adds pairwise): given float64, torch would first copy the tile.
    """
    # A finite number also for a tile of nothing but -inf: -inf - -inf is NaN.
    peak = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    # Below the tile's own maximum, so that no exponential overflows; the merge moves all to a common one.
    # e^-200 is 0 in float32, so the bound changes no sum; it keeps -inf · 0 out of them, and NaN in.
    y = logits.sub_(peak[:, None]).clamp_(min=-200)
    torch.exp(y, out=weighted)
    s0 = weighted.sum(-1).double()
    # y e^y becomes y² e^y in the next line, in the same memory.
    s1 = weighted.mul_(y).sum(-1).double()
    s2 = weighted.mul_(y).sum(-1).double()
    return Moments(peak.double(), s0, s1, s2)


def _merge(a: Moments, b: Moments) -> Moments:
    # To the larger one: shifts are then at most 0 and exponentials at most 1.
    peak = torch.maximum(a.peak, b.peak)
    return Moments(peak, *(x + y for x, y in zip(a.moved_to(peak)[1:], b.moved_to(peak)[1:], strict=True)))
