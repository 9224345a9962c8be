"""A checkpoint's parameters, streamed from safetensors without building the model."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InputError, ModelError
from headwater.models.families import family_of
from headwater.models.shape import shape_of
from headwater.models.weights.checkpoint import Checkpoint
from headwater.models.weights.conversion import UNEMBEDDING, Conversion
from headwater.models.weights.effective_embedding import bos_token, check_request, layer0, mlp0, refuse_clipped
from headwater.models.weights.fingerprint import behaviour, fingerprint, fingerprint_of_files
from headwater.models.weights.head_tensors import head_factors, norm_gain, ov_factors
from headwater.models.weights.weight_source import HeadWeights, OVWeights, WeightSource, finite
from headwater.runs.identity import tokenizer_digest

if TYPE_CHECKING:
    pass

PINNED_AT_MOST = 2**29
"""Bytes of a tensor that goes to a CUDA device by way of pinned memory, which torch keeps."""


class StreamedWeights(WeightSource):
    """A checkpoint's parameters, read from memory-mapped safetensors when they are asked for and never kept."""

    def __init__(
        self, name: str, revision: str | None, checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase | None
    ):
        super().__init__(name, revision, shape_of(checkpoint.config), checkpoint.dtype)
        self.checkpoint = checkpoint
        self.family = family_of(checkpoint.config)
        self._tokenizer = tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer beside the weights."""
        if self._tokenizer is None:
            raise ModelError(f"{self.name} was opened without a tokenizer.")
        return self._tokenizer

    @property
    def fingerprint(self) -> str:
        """Hash of config and weights; files that are as they were are not read again."""
        config, read = self.checkpoint.config, self.checkpoint.read
        about = [asdict(self.shape), behaviour(config), self.checkpoint.names]

        def compute() -> str:
            expected = [part for group in Conversion(config).groups for part in group.tensors.items()]
            total = sum(math.prod(shape) for _, shape in expected)
            return fingerprint(self.shape, config, ((name, read(name)) for name, _ in expected), total)

        return fingerprint_of_files(set(self.checkpoint.files.values()), about, compute)

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""
        return tokenizer_digest(self._tokenizer)

    def layer(self, layer: int) -> HeadWeights:
        """The factors of one layer's heads."""
        self._check_heads(layer)
        names = frozenset(self.checkpoint.names)
        return HeadWeights(layer, **head_factors(self._read, names, self.family, self.shape, layer))  # type: ignore[arg-type]

    def ov(self, layer: int) -> OVWeights:
        """W_V and W_O of one layer's heads."""
        self._check_heads(layer)
        return OVWeights(
            layer, **ov_factors(self._read, frozenset(self.checkpoint.names), self.family, self.shape, layer)
        )

    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E as the residual stream receives it."""
        return self._entering(self._read(self._embedding_name))

    def unembedding(self) -> Float[Tensor, "d_model d_vocab"]:
        """W_U; the embedding transposed where the two are tied."""
        return self._read(UNEMBEDDING if UNEMBEDDING in self.checkpoint.names else self._embedding_name).T

    def final_norm_gain(self) -> Float[Tensor, "d_model"]:
        """The gain of the norm in front of the unembedding."""
        if (norm := self.family.final_norm) is None:
            raise ModelError(f"{self.shape.architecture} has no norm in front of its unembedding here.")
        like = torch.empty(self.shape.d_model, device=self.device, dtype=self.given_dtype)
        return norm_gain(self._read, frozenset(self.checkpoint.names), self.family, norm, like)

    @torch.inference_mode()
    def effective_embedding(self, tokens: Int[Tensor, "source"], kind: str) -> Float[Tensor, "source d_model"]:
        """What later heads read for each token."""
        check_request(tokens, kind, self.shape.d_vocab)
        if reason := self.family.cannot.get(kind):
            raise InputError(f"The effective embedding {kind!r} of {self.name} cannot be read from its files: {reason}")
        matrix = self.checkpoint.read(self._embedding_name)
        precision = torch.promote_types(torch.promote_types(matrix.dtype, self.given_dtype), torch.float32)
        rows = finite(matrix[tokens.cpu()], self._embedding_name).to(device=self.device, dtype=precision)
        config, read = self.checkpoint.config, self._stored
        if kind == "layer0":
            return self._given(layer0(config, read, rows, matrix[[bos_token(self.tokenizer)]].to(rows)))
        embeddings = self._entering(rows)
        if kind == "raw":
            return self._given(embeddings)
        output = mlp0(config, read, embeddings)
        return self._given(embeddings + output if kind == "embed+mlp0" else output)

    def _check_heads(self, layer: int) -> None:
        self._check_layer(layer)
        refuse_clipped(self.checkpoint.config, self.shape.architecture)

    @property
    def _embedding_name(self) -> str:
        return f"{self.family.embedding}.weight"

    def _stored(self, name: str) -> Tensor:
        """One tensor on the device; its values are checked there."""
        tensor = self.checkpoint.read(name)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory() if tensor.nbytes <= PINNED_AT_MOST else tensor
            tensor = tensor.to(self.device, non_blocking=True)
        return finite(tensor, name)

    def _read(self, name: str) -> Tensor:
        return self._given(self._stored(name))

    def _entering(self, embeddings: Tensor) -> Tensor:
        """Rows of the embedding as the first block receives them, positions aside."""
        scale, norm, config = self.family.embedding_scale, self.family.embedding_norm, self.checkpoint.config
        if scale is not None:
            embeddings = embeddings * torch.tensor(scale(config)).to(embeddings)
        if norm is None:
            return embeddings
        gain, bias = (self._stored(f"{norm}.{part}").to(embeddings) for part in ("weight", "bias"))
        return torch.nn.functional.layer_norm(embeddings, gain.shape, gain, bias, config.layer_norm_epsilon)
