"""A model's parameters under TransformerLens's names, one factor per query head, all layers in one tensor.

Numbers are those of the checkpoint: no norm is folded into the weights, nothing is centred (TransformerLens:
`from_pretrained_no_processing`). With x behind the norm in front of attention, head h of a layer computes

    q = x W_Q[layer, h] + b_Q[layer, h]   k = x W_K[layer, h] + b_K[layer, h]   v = x W_V[layer, h] + b_V[layer, h]
    what it writes = pattern · v · W_O[layer, h]

where query heads that share keys and values each have them; q and k are those before rotary embedding. Each is a copy:
writing into it does not change the model. `headwater.models.open_weights` reads layer by layer, folders too.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from headwater.models.weights.opening import open_weights
from headwater.models.weights.weight_source import WeightSource

if TYPE_CHECKING:
    from headwater.models.model import Model as Surface
else:
    Surface = object


class ParametersByHead(Surface):
    """`W_E`, `W_U`, `W_Q` ... `W_O` and their biases."""

    @cached_property
    def _source(self) -> WeightSource:
        return open_weights(self, dtype=self.dtype)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding as the residual stream receives it (Gemma: times √d_model)."""
        return self._source.embedding().clone()

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding; the final norm's gain is not in it."""
        return self._source.unembedding().clone()

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The bias of the unembedding; zeros where there is none."""
        bias = getattr(self.raw.unembed, "b_U", None)
        return self.W_U.new_zeros(self.shape.d_vocab) if bias is None else bias.detach().clone()

    @property
    def W_Q(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Residual stream, behind the norm, to queries."""
        return self._of_heads("W_Q")

    @property
    def W_K(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Residual stream, behind the norm, to keys, for each query head."""
        return self._of_heads("W_K")

    @property
    def W_V(self) -> Float[Tensor, "layer head d_model d_head"]:
        """Residual stream, behind the norm, to values, for each query head."""
        return self._of_heads("W_V")

    @property
    def W_O(self) -> Float[Tensor, "layer head d_head d_model"]:
        """A head's weighted values to what it writes."""
        return self._of_heads("W_O")

    @property
    def b_Q(self) -> Float[Tensor, "layer head d_head"]:
        """The bias of the queries; zeros where there is none."""
        return self._of_heads("b_Q")

    @property
    def b_K(self) -> Float[Tensor, "layer head d_head"]:
        """The bias of the keys, for each query head; zeros where there is none."""
        return self._of_heads("b_K")

    @property
    def b_V(self) -> Float[Tensor, "layer head d_head"]:
        """The bias of the values, for each query head; zeros where there is none."""
        return self._of_heads("b_V")

    @property
    def b_O(self) -> Float[Tensor, "layer d_model"]:
        """The bias of what all heads of a layer write together; zeros where there is none."""
        return self._of_heads("b_O")

    def _of_heads(self, name: str) -> Tensor:
        shape = self.shape
        size = (shape.d_model,) if name == "b_O" else (shape.n_heads, shape.d_head)
        layers = []
        for layer in range(shape.n_layers):
            weights = self._source.layer(layer)
            factor = getattr(weights, name)
            if factor is None:
                factor = weights.W_O.new_zeros(size)
            elif name[-1] in "KV":
                factor = weights.expand_kv(factor)
            layers.append(factor)
        return torch.stack(layers).clone()
