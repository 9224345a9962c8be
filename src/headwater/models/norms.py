"""A norm, and what it makes of a share of what it reads while its scale is held.

    norm(x)      = gain · centred(x) / scale(x) + bias      centred(x) = x - mean(x) in a LayerNorm, x in an RMSNorm
    scale(x)     = sqrt(mean(centred(x)²) + eps)

With the scale of one x held the norm is linear: norm(Σ share) = bias + Σ gain · centred(share) / scale(x). What a share
adds along a direction w is then share · pulled_back(x, w).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.models.families import family_named, text_config
from headwater.models.weights.loaded_weights import LoadedWeights

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
        """Return what a part of x adds to norm(x), x's scale held."""
        x, part = (one.to(self.gain.device).float() for one in (x, part))
        return self._centre(part) / self._scale(self._centre(x)) * self.gain

    def pulled_back(
        self, x: Float[Tensor, "row d_model"], direction: Float[Tensor, "row d_model"]
    ) -> Float[Tensor, "row d_model"]:
        """Return the direction along which a share of x says what it adds to norm(x) · direction, x's scale held."""
        x, direction = (part.to(self.gain.device).float() for part in (x, direction))
        return self._centre(direction * self.gain) / self._scale(self._centre(x))

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def _scale(self, centred: Tensor) -> Tensor:
        return (centred.square().mean(-1, keepdim=True) + self.eps).sqrt()


def final_norm(model: HookedModel) -> Norm:
    """Return the norm in front of the unembedding, times what the model multiplies its logits by."""
    raw, scale = model.raw, logit_scale(model)
    norm = _norm(model, LoadedWeights(model).final_norm_gain().to(raw.unembed.W_U.device), raw.ln_final)
    return replace(norm, gain=scale * norm.gain, bias=None if norm.bias is None else scale * norm.bias)


def logit_scale(model: HookedModel) -> float:
    """By what a model multiplies what its unembedding gives (Cohere, Granite)."""
    family = family_named(model.shape.architecture)
    return 1.0 if family is None or family.logit_scale is None else float(family.logit_scale(text_config(model.config)))


def residual_scale(model: HookedModel) -> float:
    """By what a model's blocks multiply what attention and MLP write before it is added (Granite)."""
    family = family_named(model.shape.architecture)
    name = None if family is None else family.residual_scale
    return 1.0 if name is None else float(getattr(text_config(model.config), name))


def attention_post_norm(model: HookedModel, layer: int) -> Norm | None:
    """Return the norm behind the attention of a layer (Gemma), None where there is none."""
    gain = LoadedWeights(model).attention_post_gain(layer)
    return None if gain is None else _norm(model, gain, model.raw.blocks[layer].ln1_post)


def _norm(model: HookedModel, gain: Tensor, module: torch.nn.Module) -> Norm:
    bias = next((b for b in (getattr(module, name, None) for name in ("bias", "b")) if b is not None), None)
    cfg = model.raw.cfg
    centred = str(cfg.normalization_type).startswith("LN")
    return Norm(gain.detach().float(), None if bias is None else bias.detach().float(), centred, float(cfg.eps))
