"""What several layers would predict, read through one unembedding: top tokens, rank of a target, KL to the last one.

With logits x of a layer and x' of the last, p = softmax(x), p' = softmax(x'):

    top       the k largest log p             rank = #{v != t : x_v > x_t} of a target t
    KL        Σ p' (x' - x) - lse(x') + lse(x) = KL(p' ‖ p), in nats; 0 for the last layer itself

`layer_predictions_reference` is these lines on full logits. `layer_predictions` goes once over tiles of the vocabulary,
with the states of all layers in one product: sums are kept below the largest logit seen so far, and the k largest of a
tile are joined with those before.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.devices import full_float32
from headwater.kernels.likelihood import UnembeddingHead

TILE_BYTES = 32 * 2**20
"""What a tile's logits and its converted weights may take."""
ROWS_AT_ONCE = 1024
"""States of all layers in one product: with few, reading W_U would take longer than multiplying with it."""


class Predicted(NamedTuple):
    """Per layer and token: the largest log-probabilities (nats) with their tokens, a rank, and KL (nats)."""

    log_probability: Float[Tensor, "layer token k"]
    top: Int[Tensor, "layer token k"]
    rank: Int[Tensor, "layer token"]
    """How many other tokens have a larger logit than the target."""
    kl: Float[Tensor, "layer token"]


def layer_predictions_reference(
    hidden: Float[Tensor, "layer token d_model"],
    last: Float[Tensor, "token d_model"],
    head: UnembeddingHead,
    target: Int[Tensor, " token"],
    k: int,
) -> Predicted:
    """The formula on full float64 logits: what `layer_predictions` must equal."""
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
    """Return what layers predict, in one pass over the vocabulary.

    Args:
        hidden: states of several layers at some tokens, after the final norm.
        last: the same of the last layer.
        head: the unembedding.
        target: the token whose rank is requested, for each.
        k: how many of the largest.

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


class _Running:
    """The sums of each row over the tiles seen so far."""

    def __init__(self, states: Tensor, head: UnembeddingHead, target: Tensor):
        # Before the tiles: every one of them is compared with it, and the target's own may come last.
        self.target, self.own = target, head.target_logit(states, target)
        self.rank = torch.zeros_like(target)
        # -inf makes the first tile a merge like the others: exp(-inf) · 0 is 0.
        self.peak = torch.full(target.shape, -torch.inf, dtype=torch.float64, device=states.device)
        self.total = torch.zeros_like(self.peak)
        self.values = torch.empty(len(target), 0, device=states.device)
        self.top = torch.empty(len(target), 0, dtype=torch.long, device=states.device)

    def add(self, logits: Float[Tensor, "row vocabulary_tile"], start: int, k: int) -> None:
        """Take in a tile whose first column is `start`."""
        above = logits > self.own[:, None]
        column = self.target - start
        inside = (column >= 0) & (column < logits.shape[1])
        own = column.clamp(0, logits.shape[1] - 1)[:, None]
        # By index: the target's logit in the tile may differ in the last bit from the one computed apart.
        self.rank += above.sum(-1) - (above.gather(1, own)[:, 0] & inside).long()
        # topk of the tile first: joining it with those before would copy a whole tile.
        values, places = logits.topk(min(k, logits.shape[1]))
        values, top = torch.cat([self.values, values], -1), torch.cat([self.top, places + start], -1)
        self.values, order = values.topk(min(k, values.shape[1]))
        self.top = top.gather(-1, order)
        peak = torch.maximum(self.peak, logits.amax(-1).double())
        # peak is a float32 number kept in float64, so that it is subtracted from float32 logits without rounding.
        self.total = self.total * (self.peak - peak).exp() + (logits - peak[:, None].float()).exp().sum(-1).double()
        self.peak = peak

    @property
    def lse(self) -> Tensor:
        return self.peak + self.total.log()


def _of_chunk(states: Tensor, target: Tensor, head: UnembeddingHead, k: int) -> Predicted:
    """Return what layers predict but the last, `states` being `layer token d_model`."""
    by_layer, rows = states.shape[:2], states.flatten(0, 1)
    d_model, d_vocab = head.W_U.shape
    # Four arrays of a tile's size: logits, and what is made of them on the way to a sum.
    width = max(128, TILE_BYTES // (4 * (d_model + 4 * len(rows))))
    running = _Running(rows, head, target.repeat(by_layer[0]))
    difference = torch.zeros(by_layer, dtype=torch.float64, device=states.device)
    for start in range(0, d_vocab, width):
        tile = head._replace(
            W_U=head.W_U[:, start : start + width].float(),
            bias=None if head.bias is None else head.bias[start : start + width],
        )
        logits = tile.logits(rows, slice(None))
        # The weights below are relative to the new peak, the sums of earlier tiles to this one.
        before = running.peak.view(by_layer)[-1]
        running.add(logits, start, k)
        peak, logits = running.peak.view(by_layer)[-1], logits.view(*by_layer, -1)
        weight = (logits[-1] - peak[:, None].float()).exp()
        # The difference of logits, not of log-probabilities: neither normalizer is known before the last tile.
        gap = (logits[-1] - logits).mul_(weight).sum(-1).double()
        difference = difference * (before - peak).exp() + gap
    lse, total = running.lse.view(by_layer), running.total.view(by_layer)[-1]
    # Equal distributions leave rounding of either sign.
    kl = (difference / total - lse[-1] + lse).clamp(min=0)
    log_probability = (running.values - running.lse[:, None]).float()
    return Predicted(
        log_probability=log_probability.view(*by_layer, -1)[:-1],
        top=running.top.view(*by_layer, -1)[:-1],
        rank=running.rank.view(by_layer)[:-1],
        kl=kl[:-1].float(),
    )
