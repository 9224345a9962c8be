"""Where an analysis of parameters reads them: the factors of one layer's heads at a time, embeddings, norm gains.

Factors are as the checkpoint stores them: no norm folded in, nothing centred. With x the
residual stream after the norm in front of attention, head h of a layer computes

    q = x W_Q[h] + b_Q[h]      k = x W_K[g] + b_K[g]      v = x W_V[g] + b_V[g]      g = h // group_size
    its output = pattern · v · W_O[h]

and attention writes the sum over heads + b_O. q and k are as they are before rotary embedding and before the norms
that Qwen3 and Gemma 3 put on them. Gemma 2 and 3 apply one more norm to the sum before it reaches the residual stream.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InputError, ModelError
from headwater.models.shape import ModelShape


@dataclass(frozen=True)
class OVWeights:
    """What one layer's heads write for what they attend to: W_V and W_O. Grouped heads share values: see `value_head`.

    Attributes:
        layer: which block.
        W_V: residual stream to values.
        W_O: a head's weighted values to the residual stream.
        norm_gain: gain of the norm in front of attention (1 + weight in Gemma).
    """

    layer: int
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    norm_gain: Float[Tensor, "d_model"]

    @property
    def group_size(self) -> int:
        """How many query heads share one key and value head."""
        return len(self.W_O) // len(self.W_V)

    def value_head(self, head: int) -> int:
        """The key and value head that a query head reads with."""
        return head // self.group_size

    def expand_kv(self, factor: Float[Tensor, "kv_head ..."]) -> Float[Tensor, "head ..."]:
        """Repeat a factor of the key and value heads (W_K, W_V, b_K, b_V) for every query head."""
        return factor.repeat_interleave(self.group_size, dim=0)


@dataclass(frozen=True)
class HeadWeights(OVWeights):
    """All factors of one layer's heads.

    Attributes:
        W_Q: residual stream to queries.
        W_K: residual stream to keys.
        b_Q: bias of the queries, None where the architecture has none.
        b_K: bias of the keys.
        b_V: bias of the values.
        b_O: bias of the sum over heads.
    """

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    b_Q: Float[Tensor, "head d_head"] | None
    b_K: Float[Tensor, "kv_head d_head"] | None
    b_V: Float[Tensor, "kv_head d_head"] | None
    b_O: Float[Tensor, "d_model"] | None


class WeightSource(ABC):
    """Where an analysis of parameters reads them.

    Attributes:
        name: the folder or hub name.
        revision: the commit on the hub, where there is one; of a GGUF file its name, types of numbers and SHA-256.
        shape: the model's sizes.
        dtype: the dtype the weights are stored in; they are handed out in `given_dtype`.
        given_dtype: float32, or `dtype` where that is wider, unless another was requested.
        device: where they are handed out.
    """

    def __init__(self, name: str, revision: str | None, shape: ModelShape, dtype: torch.dtype):
        self.name = name
        self.revision = revision
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.given_dtype = torch.promote_types(dtype, torch.float32)

    def __repr__(self) -> str:
        about = ", ".join(filter(None, (self.revision, self.shape.architecture)))
        return f"{type(self).__name__}({self.name!r}, {about}, {self.dtype} as {self.given_dtype})"

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of config and weights, the same however they were opened."""

    @property
    @abstractmethod
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""

    @property
    def interventions(self) -> Mapping[str, object]:
        """What acts in the model beside them, by the option that records it: nothing, but on a model in memory."""
        return {}

    @property
    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""

    @abstractmethod
    def layer(self, layer: int) -> HeadWeights:
        """The factors of one layer's heads; nothing of it is kept here."""

    @abstractmethod
    def ov(self, layer: int) -> OVWeights:
        """W_V and W_O of one layer's heads; queries and keys are not read where they are stored separately."""

    @abstractmethod
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E as the residual stream receives it (Gemma: times √d_model), without positions."""

    @abstractmethod
    def unembedding(self) -> Float[Tensor, "d_model d_vocab"]:
        """W_U, without the bias that Phi's head has."""

    @abstractmethod
    def final_norm_gain(self) -> Float[Tensor, "d_model"]:
        """The gain of the norm in front of the unembedding."""

    @abstractmethod
    def effective_embedding(self, tokens: Int[Tensor, "source"], kind: str) -> Float[Tensor, "source d_model"]:
        """What later heads read for each token: "raw", "mlp0", "embed+mlp0" or "layer0" (see `effective`)."""

    def _given(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.given_dtype)

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.n_layers:
            raise InputError(f"Layer {layer} was asked for; the model has layers 0 to {self.shape.n_layers - 1}.")


def finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself."""
    check_finite({name: tensor})
    return tensor


def check_finite(named: Mapping[str, Tensor]) -> None:
    """Look for NaN and infinite values in some tensors of one device, for which a GPU's host waits once."""
    if not named:
        return
    # aminmax hands NaN on, so two numbers a tensor are enough. In float64, which holds those of every dtype.
    ends = torch.stack([end.double() for tensor in named.values() for end in torch.aminmax(tensor.detach())])
    if bool(ends.isfinite().all()):
        return
    name, tensor, bad = next(
        (name, tensor, bad) for name, tensor in named.items() if (bad := int(torch.count_nonzero(~tensor.isfinite())))
    )
    raise ModelError(
        f"Tensor {name!r} holds {bad} values of {tensor.numel()} that are NaN or infinite; fetch or save it again."
    )
