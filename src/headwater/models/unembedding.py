"""The last step of a model: the final norm, and the head that turns what it gives into logits.

    logits = cap(scale · (normalise(residual) W_U + b_U))

cap(x) = c · tanh(x / c) where the architecture has one (Gemma 2). scale is 1 but in few (Cohere, Granite), where it
is in what `normalise` gives and in b_U, so that W_U stays as it is.

A residual stream as a bfloat16 or float16 model holds it goes through the model's own norm, and stays in that dtype:
it is what the model itself multiplies with W_U, which tensor cores do exactly and in one product. Anything else (a lens
gives float32) is normed in float32. W_U stays as the model holds it. Padded vocabularies keep their padding columns:
the model's own softmax runs over them too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.likelihood import UnembeddingHead
from headwater.models.norms import final_norm, logit_scale
from headwater.models.tokens import Batch
from headwater.models.weights.weight_source import finite
from headwater.runs.record import HOOKS, PAST_HOOKS, RunRecord

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel

Normalise: TypeAlias = Callable[[Tensor], Tensor]
"""The final norm: residual stream `[..., d_model]` to the same shape, in half precision if given in the model's own."""

HALF = (torch.bfloat16, torch.float16)


@torch.inference_mode()
def unembedding_head(model: HookedModel, record: RunRecord | None = None) -> tuple[Normalise, UnembeddingHead]:
    """Return the final norm and the head behind it, after checking them against the model's own logits.

    Args:
        model: the model.
        record: of the run that asks. What was checked of the same weights, while nothing else acted in the model, is
            not checked again.

    Raises:
        ModelError: together they do not give the model's logits (the architecture does something more to them).
    """
    raw = model.raw
    bias, scale = getattr(raw.unembed, "b_U", None), logit_scale(model)
    cap = float(getattr(raw.cfg, "output_logits_soft_cap", None) or -1.0)
    head = UnembeddingHead(
        W_U=raw.unembed.W_U.detach(),
        bias=scale * bias.detach() if bias is not None and bool(bias.any()) else None,
        softcap=cap if cap > 0 else None,
    )
    normalise = _final_norm(model, scale)
    seen = None if record is None or record.options.keys() & {HOOKS, PAST_HOOKS} else _seen(head, record)
    if seen is None or model.head_checked != seen:
        finite(head.W_U, "unembed.W_U")
        _check(model, normalise, head)
        model.head_checked = seen
    return normalise, head


def _seen(head: UnembeddingHead, record: RunRecord) -> tuple[object, ...]:
    """What tells whether a head is the one that was checked: the model's weights, and where it lies in which type."""
    return record.fingerprint, head.W_U.data_ptr(), head.W_U.dtype, head.W_U.device


def _final_norm(model: HookedModel, scale: float) -> Normalise:
    norm = final_norm(model)

    def normalise(residual: Tensor) -> Tensor:
        if residual.dtype == model.dtype and residual.dtype in HALF:
            with model.lock:
                return scale * model.raw.ln_final(residual.to(norm.gain.device)[None])[0]
        return norm(residual)

    return normalise


def _check(model: HookedModel, normalise: Normalise, head: UnembeddingHead) -> None:
    """Run a few tokens both ways: what is not known about an architecture must not go unnoticed."""
    tokens = torch.arange(min(4, model.shape.d_vocab, model.shape.n_ctx))[None]
    batch = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool))
    expected = model.run(batch)[0]
    hidden = normalise(model.run(batch, stop_at=model.shape.n_layers)[0])
    found = head.logits(hidden, slice(None))
    refuse_other_logits(model, found, expected)


def refuse_other_logits(model: HookedModel, found: Tensor, expected: Tensor) -> None:
    """Refuse logits read from a residual stream that are not the model's own, to the rounding of its dtype.

    Raises:
        ModelError: they differ.
    """
    found, expected = found.float().cpu(), expected.float().cpu()
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not error <= max(1e-4, 8 * torch.finfo(model.dtype).eps):
        raise ModelError(
            f"The logits of {model.name} are not its final norm, unembedding and soft cap alone: they differ by "
            f"{error:.1%} of the largest. Likelihoods read from its residual stream would be wrong."
        )
