"""Likelihood statistics of tokens straight from hidden states: log p, entropy, variance of log p, top log p, rank.

With logits x = cap(scale · h W_U + b) and p = softmax(x), for each scored token t:

    log p(t)  = x_t - lse            lse = m + log S0         m = max x,  y = x - m
    entropy   = log S0 - S1 / S0     variance of log p = S2 / S0 - (S1 / S0)²
    top log p = -log S0              rank = #{v != t : x_v > x_t}
    S0 = Σ e^y      S1 = Σ y e^y      S2 = Σ y² e^y

`token_statistics_reference` is these lines on full logits. `token_statistics` goes once over tiles of the vocabulary,
never holding the logits of all of it: the sums of two tiles merge after both are moved to the larger of their maxima,
δ = m - m' ≤ 0:

    S0' = e^δ S0      S1' = e^δ (S1 + δ S0)      S2' = e^δ (S2 + 2 δ S1 + δ² S0)

From these follow loss, Min-K% (Shi et al. 2024), Min-K%++ (Zhang et al. 2025) and Gap-K% for every K at once.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.devices import full_float32, runs_triton

WORKSPACE_BYTES = 32 * 2**20
"""What the tiles of `token_statistics` may take beside its inputs and its five numbers per token."""

_TOKENS_AT_ONCE = 512


class TokenStatistics(NamedTuple):
    """Five numbers per scored token; log-probabilities and entropy in nats, variance in nats²."""

    log_probability: Float[Tensor, "token"]
    entropy: Float[Tensor, "token"]
    variance: Float[Tensor, "token"]
    """Of log p under p: the square of Min-K%++'s σ."""
    top1_log_probability: Float[Tensor, "token"]
    rank: Int[Tensor, "token"]
    """How many other tokens have a larger logit; 0 is the greedy choice."""


class UnembeddingHead(NamedTuple):
    """What turns a normed hidden state into logits."""

    W_U: Float[Tensor, "d_model d_vocab"]
    bias: Float[Tensor, "d_vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    """Gemma 2's final soft cap: x becomes softcap · tanh(x / softcap)."""

    def logits(
        self, hidden: Float[Tensor, "token d_model"], tile: slice, out: Tensor | None = None
    ) -> Float[Tensor, "token vocabulary_tile"]:
        """Return the logits of one tile of the vocabulary, computed in the precision of `hidden`, in `out` if given."""
        raw = torch.mm(hidden, self.W_U[:, tile].to(hidden.dtype), out=out)
        raw = raw if self.scale == 1 else raw.mul_(self.scale)
        raw = raw if self.bias is None else raw.add_(self.bias[tile].to(raw.dtype))
        return raw if self.softcap is None else raw.div_(self.softcap).tanh_().mul_(self.softcap)

    def target_logit(
        self, hidden: Float[Tensor, "token d_model"], target: Int[Tensor, "token"]
    ) -> Float[Tensor, "token"]:
        """Return each token's own target logit."""
        raw = torch.einsum("t d, d t -> t", hidden, self.W_U[:, target].to(hidden.dtype)) * self.scale
        return self.cap(raw if self.bias is None else raw + self.bias[target].to(raw.dtype))

    def cap(self, logits: Tensor) -> Tensor:
        """Apply the soft cap, if there is one."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Moments(NamedTuple):
    """The maximum of the logits seen so far, and Σ y^n e^y below it for n = 0, 1, 2, in float64."""

    peak: Float[Tensor, "*part token"]
    s0: Float[Tensor, "*part token"]
    s1: Float[Tensor, "*part token"]
    s2: Float[Tensor, "*part token"]

    def moved_to(self, peak: Float[Tensor, "token"]) -> "Moments":
        """Return the same sums below another maximum."""
        shift = self.peak - peak
        shrink = shift.exp()
        return Moments(
            peak,
            shrink * self.s0,
            shrink * (self.s1 + shift * self.s0),
            shrink * (self.s2 + 2 * shift * self.s1 + shift.square() * self.s0),
        )


def token_statistics_reference(
    hidden: Float[Tensor, "token d_model"], head: UnembeddingHead, target: Int[Tensor, "token"]
) -> TokenStatistics:
    """The formula on full float64 logits: what `token_statistics` must equal."""
    logits = head.logits(hidden.double(), slice(None))
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    mean = (p * log_p).sum(-1)
    own = logits.gather(-1, target[:, None])
    others_above = (logits > own).scatter(-1, target[:, None], False)
    return TokenStatistics(
        log_probability=log_p.gather(-1, target[:, None])[:, 0],
        entropy=-mean,
        variance=(p * (log_p - mean[:, None]).square()).sum(-1),
        top1_log_probability=log_p.amax(-1),
        rank=others_above.sum(-1),
    )


def token_statistics(
    hidden: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, "token"],
    *,
    precision: str = "highest",
) -> TokenStatistics:
    """Return the statistics of each scored token in one pass over the vocabulary.

    On a CUDA device this is the kernel of `likelihood_triton`, elsewhere tiles of torch operations.

    Args:
        hidden: the final hidden states at the scored positions, after the final norm, in any floating dtype.
        head: the unembedding. Padding columns that the tokenizer never uses count unless `W_U` is given without them.
        target: the token that came, at each position.
        precision: on CUDA, "highest" multiplies float32 inputs in full, "high" in three tensor-core products, good to
            about 22 bits. The CPU always multiplies in full.

    Returns:
        The five statistics, log-probabilities in nats, in float32; products and sums are in float32 or wider whatever
        the dtype of the inputs. Beside inputs and outputs at most about `WORKSPACE_BYTES` are held.
    """
    if runs_triton(hidden):
        from headwater.kernels import likelihood_triton

        return likelihood_triton.token_statistics(hidden, head, target, precision)
    rows, (d_model, d_vocab) = min(len(hidden), _TOKENS_AT_ONCE), head.W_U.shape
    tiles = _tiles(d_vocab, rows, d_model)
    workspace = _Workspace.allocate(rows, tiles[0].stop, head, hidden.device)
    with full_float32():
        chunks = [
            _statistics_of_chunk(h.float(), head, t, tiles, workspace)
            for h, t in zip(hidden.split(_TOKENS_AT_ONCE), target.split(_TOKENS_AT_ONCE), strict=True)
        ]
    return TokenStatistics(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


class _Workspace(NamedTuple):
    """Every array of a tile's size, allocated once: freed and allocated anew, they would scatter the heap."""

    weights: Float[Tensor, "d_model width"] | None
    logits: Float[Tensor, "size"]
    weighted: Float[Tensor, "size"]

    @classmethod
    def allocate(cls, rows: int, width: int, head: UnembeddingHead, device: torch.device) -> "_Workspace":
        """For so many rows and columns; `weights` only where W_U must be converted."""
        convert = head.W_U.dtype != torch.float32
        weights = torch.empty_like(head.W_U[:, :width], dtype=torch.float32) if convert else None
        logits, weighted = torch.empty(2, rows * width, device=device)
        return cls(weights, logits, weighted)

    def head_of(self, head: UnembeddingHead, tile: slice) -> UnembeddingHead:
        """Return the head for a tile alone, its weights in float32."""
        weights = head.W_U[:, tile]
        if self.weights is not None:
            weights = self.weights[:, : weights.shape[1]].copy_(weights)
        return head._replace(W_U=weights, bias=None if head.bias is None else head.bias[tile])

    def arrays(self, rows: int, tile: slice) -> list[Tensor]:
        """Return the array for the logits and the one to work in, as `rows` × tile."""
        size = rows * (tile.stop - tile.start)
        return [array[:size].view(rows, -1) for array in (self.logits, self.weighted)]


def _statistics_of_chunk(
    hidden: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, "token"],
    tiles: list[slice],
    workspace: _Workspace,
) -> TokenStatistics:
    own = head.target_logit(hidden, target)
    rank = torch.zeros_like(target)
    total: Moments | None = None
    for tile in tiles:
        logits, scratch = workspace.arrays(len(hidden), tile)
        workspace.head_of(head, tile).logits(hidden, slice(None), out=logits)
        rank += _count_above(logits, own, target - tile.start, scratch)
        found = _moments(logits, scratch)
        total = found if total is None else _merge(total, found)
    assert total is not None
    return statistics_of(own, total, rank)


def statistics_of(own: Float[Tensor, "token"], total: Moments, rank: Int[Tensor, "token"]) -> TokenStatistics:
    """Return the five statistics from each token's own logit, the sums over the vocabulary, and the rank."""
    mean = total.s1 / total.s0
    log_s0 = total.s0.log()
    return TokenStatistics(
        log_probability=(own - total.peak - log_s0).float(),
        entropy=(log_s0 - mean).float(),
        variance=(total.s2 / total.s0 - mean.square()).clamp(min=0).float(),
        top1_log_probability=(-log_s0).float(),
        rank=rank,
    )


def _tiles(d_vocab: int, rows: int, d_model: int) -> list[slice]:
    """Cut the vocabulary so that a tile's float32 weights and three arrays the size of its logits fit the workspace."""
    width = max(128, WORKSPACE_BYTES // (4 * (d_model + 3 * rows)))
    return [slice(start, min(start + width, d_vocab)) for start in range(0, d_vocab, width)]


def _count_above(
    logits: Float[Tensor, "token vocabulary_tile"],
    own: Float[Tensor, "token"],
    column: Int[Tensor, "token"],
    above: Float[Tensor, "token vocabulary_tile"],
) -> Int[Tensor, "token"]:
    """Count larger logits without the target's own column: computed apart, its logit may differ in the last bit."""
    torch.gt(logits, own[:, None], out=above)
    inside = ((column >= 0) & (column < logits.shape[1])).nonzero()[:, 0]
    above[inside, column[inside]] = 0
    return above.sum(-1).long()


def _moments(logits: Float[Tensor, "token vocabulary_tile"], weighted: Tensor) -> Moments:
    """Sum over a tile; `logits` is used up, `weighted` is an array of its size to work in.

    Sums within a tile are in float32 (torch adds pairwise): asked for float64, torch would first copy the tile.
    """
    peak = logits.amax(-1)
    y = logits.sub_(peak[:, None])
    torch.exp(y, out=weighted)
    s0 = weighted.sum(-1).double()
    s1 = weighted.mul_(y).sum(-1).double()
    s2 = weighted.mul_(y).sum(-1).double()
    return Moments(peak.double(), s0, s1, s2)


def _merge(a: Moments, b: Moments) -> Moments:
    peak = torch.maximum(a.peak, b.peak)
    return Moments(peak, *(x + y for x, y in zip(a.moved_to(peak)[1:], b.moved_to(peak)[1:], strict=True)))
