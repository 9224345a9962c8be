"""The cross-entropy of a linear layer, block by block: the logits of all rows never exist at once."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def linear_cross_entropy(
    hidden: Float[Tensor, "position d_model"],
    weight: Float[Tensor, "d_vocab d_model"],
    targets: Int[Tensor, " position"],
    block: int = 256,
) -> Float[Tensor, ""]:
    """Return the mean cross-entropy of the logits `hidden @ weight.T` without holding them all."""
    return _LinearCrossEntropy.apply(hidden, weight, targets, block)


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward and backward in one pass: the gradients are kept, and scaled by what comes back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, block: int) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), block):
            rows = slice(start, start + block)
            logits = hidden[rows] @ weight.T
            log_sum = logits.logsumexp(-1, keepdim=True)
            total += (log_sum - logits.gather(1, targets[rows, None])).sum()
            probabilities = logits.sub_(log_sum).exp_()
            probabilities[torch.arange(len(probabilities)), targets[rows]] -= 1
            grad_hidden[rows] = probabilities @ weight
            grad_weight.addmm_(probabilities.T, hidden[rows])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.count = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad[0] / ctx.count
        return grad_hidden * scale, grad_weight * scale, None, None
