"""What each head of a layer adds to the residual stream, given the heads' outputs z.

    share_h = z_h W_O^h                                             where attention's output is added as it is
    share_h = gain · centred(z_h W_O^h) / scale(Σ z W_O + b_O)      where a norm stands behind attention (Gemma)

times the model's own factor of what blocks add, where it has one (Granite). The scale is that of the run whose z these
are, so that the shares of the heads, with what the biases give, sum to what attention adds.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.models.hooked import HookedModel
from headwater.models.norms import attention_post_norm, residual_scale
from headwater.models.weights.loaded_weights import LoadedWeights


class HeadShares:
    """The shares of the heads of one layer.

    Args:
        model: whose layer.
        layer: its number.
        weights: the model's, opened once for all layers.
    """

    def __init__(self, model: HookedModel, layer: int, weights: LoadedWeights):
        self.weight, bias = weights.attention_out(layer)
        self.scale = residual_scale(model)
        self.bias = self.scale * bias if bias is not None else torch.zeros_like(self.weight[0, 0])
        self.norm = attention_post_norm(model, layer)

    def of(self, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*row head d_model"]:
        """Return what each head adds."""
        outputs = self._outputs(z)
        if self.norm is None:
            return outputs
        return self.norm.share(self._written(outputs)[..., None, :], outputs)

    def of_bias(self, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*#row d_model"]:
        """Return what the biases add."""
        if self.norm is None:
            return self.bias
        outputs = self._outputs(z)
        written = self._written(outputs)
        added = self.norm.share(written, self.bias.expand_as(written))
        return added if self.norm.bias is None else added + self.norm.bias

    def _outputs(self, z: Float[Tensor, "*row head d_head"]) -> Float[Tensor, "*row head d_model"]:
        return self.scale * torch.einsum("...hk,hkd->...hd", z.to(self.weight), self.weight)

    def _written(self, outputs: Float[Tensor, "*row head d_model"]) -> Float[Tensor, "*row d_model"]:
        return outputs.sum(-2) + self.bias
