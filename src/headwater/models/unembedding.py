"""The last step of a model (its final norm and unembedding), and the effect of a norm on parts of its input.

    logits = cap(scale · (normalise(residual) W_U + b_U))

cap(x) = c · tanh(x / c) if the architecture has a soft cap (Gemma 2). scale is 1 except in a few architectures (Cohere,
Granite), for which it is applied in `normalise` and b_U, so that W_U is unchanged.

In a bfloat16 or float16 model, a residual stream of the model's dtype goes through the model's own norm and keeps that
dtype: the model itself multiplies it with W_U, which tensor cores do exactly and in one product. Anything else (such as
a lens's float32) is normed in float32. W_U stays as it is in the model. Padded vocabularies keep their padding columns:
the model's own softmax also runs over them.

The contribution of a part of a norm's input (a share) while the norm's scale is held fixed:

    norm(x)      = gain · centred(x) / scale(x) + bias      centred(x) = x - mean(x) in a LayerNorm, x in an RMSNorm
    scale(x)     = sqrt(mean(centred(x)²) + eps)

With the scale of one x held fixed, the norm is linear: norm(Σ share) = bias + Σ gain · centred(share) / scale(x). The
contribution of a share along a direction w is then share · pulled_back(x, w).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.errors import ModelError
from headwater.kernels.likelihood import UnembeddingHead
from headwater.models.bridge_check import difference, finite, rounding
from headwater.models.model import logit_scale
from headwater.models.tokens import Batch
from headwater.models.weights import LoadedWeights
from headwater.runs.record import MODEL_HOOKS, PAST_HOOKS, RunRecord

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel


@dataclass(frozen=True)
class Norm:
    """A LayerNorm or an RMSNorm, in float32."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"] | None
    centred: bool
    eps: float

    def __call__(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        """Return the norm of x."""
        x = self._centre(x.to(self.gain.device).float())
        x = x * self._scale(x).reciprocal() * self.gain
        return x if self.bias is None else x + self.bias

    def share(
        self, x: Float[Tensor, "... d_model"], part: Float[Tensor, "... d_model"]
    ) -> Float[Tensor, "... d_model"]:
        """Return the contribution of a part of x to norm(x), with the scale of x held fixed."""
        x, part = (tensor.to(self.gain.device).float() for tensor in (x, part))
        return self._centre(part) / self._scale(self._centre(x)) * self.gain

    def pulled_back(
        self, x: Float[Tensor, "row d_model"], direction: Float[Tensor, "row d_model"]
    ) -> Float[Tensor, "row d_model"]:
        """Return d such that share · d is the share's contribution to norm(x) · direction, with x's scale fixed."""
        x, direction = (part.to(self.gain.device).float() for part in (x, direction))
        return self._centre(direction * self.gain) / self._scale(self._centre(x))

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _scale(self, centred: Tensor) -> Tensor:
        return (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


def final_norm(model: HookedModel) -> Norm:
    """Return the norm in front of the unembedding, multiplied by the model's logit scale."""
    raw, scale = model.raw, logit_scale(model)
    norm = _norm(model, LoadedWeights(model).final_norm_gain().to(raw.unembed.W_U.device), raw.ln_final)
    return replace(norm, gain=scale * norm.gain, bias=None if norm.bias is None else scale * norm.bias)


def attention_post_norm(model: HookedModel, layer: int) -> Norm | None:
    """Return the norm after the attention of a layer (Gemma); None if there is none."""
    gain = LoadedWeights(model).attention_post_gain(layer)
    return None if gain is None else _norm(model, gain, model.raw.blocks[layer].ln1_post)


def _norm(model: HookedModel, gain: Tensor, module: torch.nn.Module) -> Norm:
    # A bridge's norm has `bias`, as transformers does; a HookedTransformer's has `b`.
    bias = next((b for b in (getattr(module, name, None) for name in ("bias", "b")) if b is not None), None)
    cfg = model.raw.cfg
    # The types are LN and LNPre, which centre, and RMS and RMSPre, which do not.
    centred = str(cfg.normalization_type).startswith("LN")
    return Norm(gain.detach().float(), None if bias is None else bias.detach().float(), centred, float(cfg.eps))


Normalise: TypeAlias = Callable[[Tensor], Tensor]
"""The final norm: maps `[..., d_model]` to the same shape; keeps half precision if that is the model's dtype."""


@torch.inference_mode()
def unembedding_head(model: HookedModel, record: RunRecord | None = None) -> tuple[Normalise, UnembeddingHead]:
    """Return the final norm and the unembedding head, after checking them against the model's own logits.

    With the `record` of a run, the check is skipped if the same weights already passed it; a record with hooks or
    other changes to the model never skips it.
    """
    raw = model.raw
    bias, scale = raw.unembed.b_U.detach(), logit_scale(model)
    # TransformerLens writes -1 for a model without a cap.
    cap = float(getattr(raw.cfg, "output_logits_soft_cap", None) or -1.0)
    head = UnembeddingHead(
        W_U=raw.unembed.W_U.detach(),
        # b_U is zero if the model has no bias: adding it would cost a pass over all logits.
        bias=scale * bias if bool(bias.any()) else None,
        softcap=cap if cap > 0 else None,
    )
    norm = final_norm(model)

    def normalise(residual: Tensor) -> Tensor:
        if residual.dtype == model.dtype and residual.dtype in (torch.bfloat16, torch.float16):
            # ln_final has hook points, on which another thread's run may have hooks.
            with model.lock:
                return scale * model.raw.ln_final(residual.to(norm.gain.device)[None])[0]
        return norm(residual)

    checked: tuple[object, ...] | None = None  # the weights' fingerprint; the head's address, dtype and device
    if record is not None and not record.options.keys() & {MODEL_HOOKS, PAST_HOOKS}:
        checked = record.fingerprint, head.W_U.data_ptr(), head.W_U.dtype, head.W_U.device
    if checked is None or model.head_checked != checked:
        finite(head.W_U, "unembed.W_U")
        # The logits of a few tokens both ways, to detect unknown features of an architecture.
        batch = Batch.of([range(min(4, model.shape.d_vocab, model.shape.n_ctx))], pad=0)
        hidden = normalise(model.run(batch, stop_at=model.shape.n_layers)[0])
        refuse_other_logits(model, head.logits(hidden, slice(None)), model.run(batch)[0])
        model.head_checked = checked
    return normalise, head


def refuse_other_logits(model: HookedModel, found: Tensor, expected: Tensor) -> None:
    """Raise ModelError if logits from a residual stream differ from the model's own beyond its dtype's rounding."""
    error = difference(found, expected)
    # `not ... <=`, so that NaN is refused too.
    if not error <= rounding(model.dtype):
        raise ModelError(
            f"The logits of {model.name} are more than its final norm, unembedding and soft cap: they differ by "
            f"{error:.1%} of the largest. Likelihoods read from its residual stream would be wrong."
        )
