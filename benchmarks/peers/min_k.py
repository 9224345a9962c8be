"""Likelihood scores the usual way: the logits of every position and token, then log_softmax over all of them.

`usual` is what a script does that needs the five statistics; `min_k_plus_plus` is the published Min-K%++ computation
(Zhang et al. 2025) written naively: log-probabilities and z-scores of every token, sorted anew for every share.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Usual(NamedTuple):
    """Per token, in the order of headwater's statistics."""

    log_probability: Float[Tensor, " token"]
    entropy: Float[Tensor, " token"]
    variance: Float[Tensor, " token"]
    top1_log_probability: Float[Tensor, " token"]
    rank: Int[Tensor, " token"]


def usual(
    hidden: Float[Tensor, "token d_model"], W_U: Float[Tensor, "d_model d_vocab"], target: Int[Tensor, " token"]
) -> Usual:
    """The statistics from full logits."""
    return of_logits((hidden @ W_U).float(), target)


def of_logits(logits: Float[Tensor, "token d_vocab"], target: Int[Tensor, " token"]) -> Usual:
    """The statistics of the tokens that came."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    mean = (p * log_p).sum(-1)
    own = log_p.gather(-1, target[:, None])
    return Usual(
        log_probability=own[:, 0],
        entropy=-mean,
        variance=(p * log_p.square()).sum(-1) - mean.square(),
        top1_log_probability=log_p.amax(-1),
        rank=(log_p > own).sum(-1),
    )


def min_k_plus_plus(
    hidden: Float[Tensor, "token d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    target: Int[Tensor, " token"],
    shares: tuple[float, ...],
) -> tuple[list[float], list[float]]:
    """Min-K% and Min-K%++ of one text at each share."""
    logits = (hidden @ W_U).float()
    probabilities = torch.softmax(logits, -1)
    log_probabilities = torch.log_softmax(logits, -1)
    own = log_probabilities.gather(-1, target[:, None])[:, 0]
    mean = (probabilities * log_probabilities).sum(-1)
    variance = (probabilities * log_probabilities.square()).sum(-1) - mean.square()
    z = (own - mean) / variance.sqrt()
    counts = [max(1, int(len(own) * share)) for share in shares]
    return tuple([values.sort().values[:count].mean().item() for count in counts] for values in (own, z))
