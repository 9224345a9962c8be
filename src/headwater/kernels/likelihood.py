"""Likelihood statistics of tokens from hidden states: log p, entropy, variance of log p, top log p, rank.

With logits x = cap(scale · h W_U + b) and p = softmax(x), for each scored token t:

    log p(t)  = x_t - lse            lse = m + log S0         m = max x,  y = x - m
    entropy   = log S0 - S1 / S0     variance of log p = S2 / S0 - (S1 / S0)²
    top log p = -log S0              rank = #{v != t : x_v > x_t}
    S0 = Σ e^y      S1 = Σ y e^y      S2 = Σ y² e^y

This file states the formulas: `token_statistics_reference` applies them to full logits, `Moments` holds the sums.
`likelihood_blocked` computes the same without the logits of the whole vocabulary, and `likelihood_triton` on a GPU.

Loss, Min-K% (Shi et al. 2024), Min-K%++ (Zhang et al. 2025) and Gap-K% for every K at once follow from these.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

PrecisionName: TypeAlias = Literal["highest", "high"]
"""How a CUDA device multiplies float32 states with W_U: with every bit, or in fewer tensor-core products."""


class TokenStatistics(NamedTuple):
    """Five numbers per scored token; log-probabilities and entropy in nats, variance in nats²."""

    log_probability: Float[Tensor, " token"]
    entropy: Float[Tensor, " token"]
    variance: Float[Tensor, " token"]
    """Variance of log p under p: the square of Min-K%++'s σ."""
    top1_log_probability: Float[Tensor, " token"]
    rank: Int[Tensor, " token"]
    """Number of other tokens with a larger logit; 0 is the greedy choice."""


class UnembeddingHead(NamedTuple):
    """The unembedding, which maps a normed hidden state to logits."""

    W_U: Float[Tensor, "d_model d_vocab"]
    bias: Float[Tensor, " d_vocab"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    """Gemma 2's final soft cap: x becomes softcap · tanh(x / softcap)."""

    def logits(
        self, hidden: Float[Tensor, "token d_model"], tile: slice, out: Tensor | None = None
    ) -> Float[Tensor, "token vocabulary_tile"]:
        """Return the logits of one tile of the vocabulary, computed in the dtype of `hidden`, in `out` (if any)."""
        # In place from here on: mm has made a new array, or filled `out`.
        raw = torch.mm(hidden, self.W_U[:, tile].to(hidden.dtype), out=out)
        raw = raw if self.scale == 1 else raw.mul_(self.scale)
        raw = raw if self.bias is None else raw.add_(self.bias[tile].to(raw.dtype))
        return raw if self.softcap is None else raw.div_(self.softcap).tanh_().mul_(self.softcap)

    def target_logit(
        self, hidden: Float[Tensor, "token d_model"], target: Int[Tensor, " token"]
    ) -> Float[Tensor, " token"]:
        """Return the logit of each token's target."""
        # Only the targets' columns are converted, never all of W_U.
        raw = torch.einsum("t d, d t -> t", hidden, self.W_U[:, target].to(hidden.dtype)) * self.scale
        return self.cap(raw if self.bias is None else raw + self.bias[target].to(raw.dtype))

    def cap(self, logits: Tensor) -> Tensor:
        """Apply the soft cap (if any)."""
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Moments(NamedTuple):
    """The maximum of the logits seen so far, and Σ y^n e^y below it for n = 0, 1, 2, in float64."""

    peak: Float[Tensor, "*part token"]
    s0: Float[Tensor, "*part token"]
    s1: Float[Tensor, "*part token"]
    s2: Float[Tensor, "*part token"]

    def moved_to(self, peak: Float[Tensor, " token"]) -> "Moments":
        """Return the same sums relative to another maximum."""
        # Σ (y + shift)ⁿ e^(y + shift) is expanded in the sums relative to the old maximum: no logit is read twice.
        shift = self.peak - peak
        shrink = shift.exp()
        return Moments(
            peak,
            shrink * self.s0,
            shrink * (self.s1 + shift * self.s0),
            shrink * (self.s2 + 2 * shift * self.s1 + shift.square() * self.s0),
        )


def token_statistics_reference(
    hidden: Float[Tensor, "token d_model"], head: UnembeddingHead, target: Int[Tensor, " token"]
) -> TokenStatistics:
    """Apply the formula to full float64 logits: `token_statistics` must equal this."""
    logits = head.logits(hidden.double(), slice(None))
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    # 0 log 0 is 0 if a logit is -inf.
    finite = log_p.masked_fill(p == 0, 0.0)
    mean = (p * finite).sum(-1)
    target_logits = logits.gather(-1, target[:, None])
    return TokenStatistics(
        log_probability=log_p.gather(-1, target[:, None])[:, 0],
        entropy=-mean,
        variance=(p * (finite - mean[:, None]).square()).sum(-1),
        top1_log_probability=log_p.amax(-1),
        rank=(logits > target_logits).sum(-1),
    )


def statistics_of(logit: Float[Tensor, " token"], total: Moments, rank: Int[Tensor, " token"]) -> TokenStatistics:
    """Return the five statistics from the targets' logits, the sums over the vocabulary, and the rank."""
    mean = total.s1 / total.s0
    log_s0 = total.s0.log()
    return TokenStatistics(
        log_probability=(logit - total.peak - log_s0).float(),
        entropy=(log_s0 - mean).float(),
        # For a nearly certain token both terms cancel up to rounding of either sign, and Min-K%++ takes the root.
        variance=(total.s2 / total.s0 - mean.square()).clamp(min=0).float(),
        top1_log_probability=(-log_s0).float(),
        rank=rank,
    )
