"""A checkpoint's parameters, streamed from safetensors without building the model."""

import math
from dataclasses import asdict

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InputError, ModelError
from headwater.models.families import family_of
from headwater.models.shape import shape_of
from headwater.models.weights.checkpoint import Checkpoint
from headwater.models.weights.conversion import UNEMBEDDING, Conversion, split_heads
from headwater.models.weights.effective_embedding import bos_token, check_request, layer0, mlp0, refuse_clipped
from headwater.models.weights.fingerprint import behaviour, fingerprint, fingerprint_of_files
from headwater.models.weights.weight_source import HeadWeights, OVWeights, WeightSource, finite
from headwater.runs.identity import tokenizer_digest

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
        """The factors of one layer's heads; a bias that the model lacks is None."""
        attention = self._attention(layer)
        W_Q, W_K, W_V = self._query_key_value(attention, "weight")
        first_bias = f"{attention}{self.family.fused.name if self.family.fused else 'q_proj'}.bias"
        biases = self._query_key_value(attention, "bias") if first_bias in self.checkpoint.names else (None, None, None)
        b_Q, b_K, b_V = biases
        output = f"{attention}{self.family.output}.bias"
        b_O = self._read(output) if output in self.checkpoint.names else None
        return HeadWeights(layer, W_V, *self._output_and_gain(layer), W_Q, W_K, b_Q, b_K, b_V, b_O)

    def ov(self, layer: int) -> OVWeights:
        """W_V and W_O of one layer's heads; queries and keys are not read where they are stored separately."""
        attention = self._attention(layer)
        if self.family.fused:
            W_V = self._query_key_value(attention, "weight")[2]
        else:
            W_V = self._projection(f"{attention}v_proj.weight", self.shape.n_kv_heads)
        return OVWeights(layer, W_V, *self._output_and_gain(layer))

    def _attention(self, layer: int) -> str:
        """The prefix of the tensors of a layer's attention, which must be of single heads."""
        self._check_layer(layer)
        refuse_clipped(self.checkpoint.config, self.shape.architecture)
        return f"{self.family.block(layer)}{self.family.attention}."

    def _query_key_value(self, attention: str, part: str) -> list[Tensor]:
        """Weights or biases of the queries, keys and values, each split into its heads."""
        if self.family.fused:
            return split_heads(self._read(f"{attention}{self.family.fused.name}.{part}"), self.family.fused, self.shape)
        heads = {"q_proj": self.shape.n_heads, "k_proj": self.shape.n_kv_heads, "v_proj": self.shape.n_kv_heads}
        return [self._projection(f"{attention}{name}.{part}", count) for name, count in heads.items()]

    def _projection(self, name: str, heads: int) -> Tensor:
        """A weight or bias of one projection: `head d_model d_head`, or `head d_head`."""
        by_head = self._read(name).unflatten(0, (heads, -1))
        return by_head if by_head.ndim == 2 else by_head.transpose(1, 2)

    def _output_and_gain(self, layer: int) -> tuple[Tensor, Tensor]:
        """W_O of a layer, and the gain of the norm in front of its attention; ones where there is none (OLMo 2)."""
        family = self.family
        d_model_last = family.fused is not None and family.fused.d_model_first
        stored = "(head d_head) d_model" if d_model_last else "d_model (head d_head)"
        weight = self._read(f"{family.block(layer)}{family.attention}.{family.output}.weight")
        W_O = rearrange(weight, f"{stored} -> head d_head d_model", head=self.shape.n_heads)
        norm = family.norms.before_attention
        return W_O, self._norm_gain(None if norm is None else f"{family.block(layer)}{norm}")

    def _norm_gain(self, norm: str | None) -> Tensor:
        """The gain of a norm; ones where there is no norm, or it has no gain (OLMo 1)."""
        if norm is None or f"{norm}.weight" not in self.checkpoint.names:
            return torch.ones(self.shape.d_model, device=self.device, dtype=self.given_dtype)
        return self._read(f"{norm}.weight") + self.family.gain_offset

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
        return self._norm_gain(norm)

    @torch.inference_mode()
    def effective_embedding(self, tokens: Int[Tensor, "source"], kind: str) -> Float[Tensor, "source d_model"]:
        """What later heads read for each token."""
        check_request(tokens, kind, self.shape.d_vocab)
        if reason := self.family.cannot.get(kind):
            raise InputError(f"The effective embedding {kind!r} of {self.name} cannot be read from its files: {reason}")
        matrix = self.checkpoint.read(self._embedding_name)
        precision = torch.promote_types(torch.promote_types(matrix.dtype, self.given_dtype), torch.float32)
        # Rows are picked from the mapped matrix first: converted whole it would be as large as W_U in float32.
        rows = finite(matrix[tokens.cpu()], self._embedding_name).to(device=self.device, dtype=precision)
        config, read = self.checkpoint.config, self._stored
        if kind == "layer0":
            return self._given(layer0(config, read, rows, matrix[[bos_token(self.tokenizer)]].to(rows)))
        embeddings = self._entering(rows)
        if kind == "raw":
            return self._given(embeddings)
        output = mlp0(config, read, embeddings)
        return self._given(embeddings + output if kind == "embed+mlp0" else output)

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
            # As in transformers, the factor is rounded to the embedding's dtype before it multiplies.
            embeddings = embeddings * torch.tensor(scale(config)).to(embeddings)
        if norm is None:
            return embeddings
        gain, bias = (self._stored(f"{norm}.{part}").to(embeddings) for part in ("weight", "bias"))
        return torch.nn.functional.layer_norm(embeddings, gain.shape, gain, bias, config.layer_norm_epsilon)
