"""The published way to score heads by their OV maps (Elhelo & Geva, ACL 2025), written naively.

Per relation, per head: make W_VO = W_V W_O, take the relation's sources through it and through W_U, and look the
targets up among the top k of every row, then among the top k of its negation. Nothing is shared.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor


def topk_membership(
    sources: Float[Tensor, "pair d_model"],
    W_V: Float[Tensor, "d_model d_head"],
    W_O: Float[Tensor, "d_head d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    targets: Int[Tensor, "pair accepted"],
    k: int,
) -> tuple[Bool[Tensor, " pair"], Bool[Tensor, " pair"]]:
    """One head on one relation; a pair may have several accepted targets, filled up with -1."""
    logits = sources @ (W_V @ W_O) @ W_U
    best = logits.topk(k).indices, (-logits).topk(k).indices
    top, bottom = ((found[:, :, None] == targets[:, None]).any((1, 2)) for found in best)
    return top, bottom


def ranks(
    sources: Float[Tensor, "pair d_model"],
    W_V: Float[Tensor, "d_model d_head"],
    W_O: Float[Tensor, "d_head d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    targets: Int[Tensor, " pair"],
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """How many logits are greater, and smaller, than the target's: one head on one relation."""
    logits = sources @ (W_V @ W_O) @ W_U
    own = logits.gather(1, targets[:, None])
    return (logits > own).sum(1), (logits < own).sum(1)


def ranks_by_tiles(
    sources: Float[Tensor, "pair d_model"],
    W_V: Float[Tensor, "d_model d_head"],
    W_O: Float[Tensor, "d_head d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    targets: Int[Tensor, " pair"],
    width: int = 4096,
) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """The same as `ranks` where the logits, or W_U in the precision of the sources, would not fit in memory."""
    outputs = sources @ W_V @ W_O
    own = (outputs * W_U[:, targets].T.to(outputs.dtype)).sum(1)[:, None]
    greater = smaller = 0
    for start in range(0, W_U.shape[1], width):
        logits = outputs @ W_U[:, start : start + width].to(outputs.dtype)
        inside = ((targets >= start) & (targets < start + width)).nonzero()[:, 0]
        logits[inside, targets[inside] - start] = own[inside, 0]
        greater = greater + (logits > own).sum(1)
        smaller = smaller + (logits < own).sum(1)
    return greater, smaller
