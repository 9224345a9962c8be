"""Where an analysis of parameters reads them: the factors of one layer's heads at a time, embeddings, norm gains.

`open_weights` gives the same `WeightSource` for a checkpoint, streamed from safetensors without building the model,
and for a model in memory. Factors are as the checkpoint stores them: no norm folded in, nothing centred. With x the
residual stream behind the norm in front of attention, head h of a layer computes

    q = x W_Q[h] + b_Q[h]      k = x W_K[g] + b_K[g]      v = x W_V[g] + b_V[g]      g = h // group_size
    its output = pattern · v · W_O[h]

and attention writes the sum over heads + b_O. q and k are as they are before rotary embedding and before the norms
that Qwen3 and Gemma 3 put on them. Gemma 2 and 3 apply one more norm to the sum before it reaches the residual stream.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import InputError, ModelError
from headwater.kernels.devices import usable_device
from headwater.models.checkpoint import Checkpoint, checkpoint_folder, first_line, open_checkpoint
from headwater.models.checks import tokenizer_fits
from headwater.models.conversion import UNEMBEDDING, Conversion
from headwater.models.effective_embedding import bos_token, check_request, chunks, layer0, mlp0
from headwater.models.families import family_of
from headwater.models.fingerprint import behaviour, fingerprint, fingerprint_of_files
from headwater.models.head_tensors import head_factors, ov_factors
from headwater.models.lone_tokens import HeadsOfLoneTokens, adds_positions, entering, first_mlp, refuse_clipped
from headwater.models.model import is_bridge
from headwater.models.shape import ModelShape, shape_of
from headwater.models.tokens import Batch, load_tokenizer
from headwater.runs.identity import tokenizer_digest

if TYPE_CHECKING:
    from headwater.models.model import Model

PINNED_AT_MOST = 2**29
"""Bytes of a tensor that goes to a CUDA device by way of pinned memory, which torch keeps."""


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
        revision: the commit on the hub, where there is one.
        shape: the model's sizes.
        dtype: the dtype the weights are held in; they are handed out in `given_dtype`.
        given_dtype: float32, or `dtype` where that is wider, unless another was asked for.
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
        return f"{type(self).__name__}({self.name!r}, {self.shape.architecture}, {self.dtype} as {self.given_dtype})"

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of config and weights, the same however they were opened."""

    @property
    @abstractmethod
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""

    @property
    def interventions(self) -> Mapping[str, Any]:
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
        """W_V and W_O of one layer's heads; queries and keys are not read where they are stored apart."""

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


def open_weights(
    what: "Model | str | Path",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> WeightSource:
    """Open a model's parameters for reading.

    Args:
        what: a checkpoint folder or hub name, streamed with one layer in memory at a time, or a model in memory.
        device: where tensors are handed out; by default the CPU, or where the model in memory is.
        dtype: the dtype tensors are handed out in; by default float32, or the stored dtype where that is wider.
        revision: branch, tag or commit on the hub.
        trust_remote_code: let the checkpoint's own config and tokenizer code run.

    Raises:
        ModelError: the checkpoint cannot be found, is damaged or incomplete, or is of an unsupported architecture.
    """
    if not isinstance(what, str | Path):
        source: WeightSource = LoadedWeights(what)
    else:
        folder = checkpoint_folder(what, revision)
        checkpoint = open_checkpoint(folder, trust_remote_code)
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        tokenizer_fits(tokenizer, checkpoint.config.vocab_size)
        commit = None if Path(what).is_dir() else folder.name
        source = StreamedWeights(str(what), commit, checkpoint, tokenizer)
    source.device = usable_device(device or source.device)
    source.given_dtype = dtype or source.given_dtype
    return source


def finite(tensor: Tensor, name: str) -> Tensor:
    """The tensor itself.

    Raises:
        ModelError: it holds NaN or infinite values.
    """
    low, high = torch.aminmax(tensor.detach())
    if not (low.isfinite() and high.isfinite()):
        bad = int(torch.count_nonzero(~tensor.isfinite()))
        raise ModelError(
            f"Tensor {name!r} holds {bad} values of {tensor.numel()} that are NaN or infinite; fetch or save it again."
        )
    return tensor


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
        return OVWeights(layer, **ov_factors(self._read, self.family, self.shape, layer))

    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E as the residual stream receives it."""
        return self._scaled(self._read(self._embedding_name))

    def unembedding(self) -> Float[Tensor, "d_model d_vocab"]:
        """W_U; the embedding transposed where the two are tied."""
        return self._read(UNEMBEDDING if UNEMBEDDING in self.checkpoint.names else self._embedding_name).T

    def final_norm_gain(self) -> Float[Tensor, "d_model"]:
        """The gain of the norm in front of the unembedding."""
        return self._read(f"{self.family.final_norm}.weight") + self.family.gain_offset

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
        embeddings = self._scaled(rows)
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

    def _scaled(self, embeddings: Tensor) -> Tensor:
        scale = self.family.embedding_scale
        return embeddings if scale is None else embeddings * torch.tensor(scale(self.checkpoint.config)).to(embeddings)


class LoadedWeights(WeightSource):
    """The parameters of a model in memory, as the model itself computes with them; views of them wherever possible."""

    def __init__(self, model: "Model"):
        super().__init__(model.name, model.revision, model.shape, model.dtype)
        self.model = model
        self.device = model.device

    @property
    def fingerprint(self) -> str:
        """Hash of config and weights."""
        return self.model.fingerprint

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""
        return self.model.tokenizer_digest

    @property
    def interventions(self) -> Mapping[str, Any]:
        """What acts in the model beside them, by the option that records it."""
        return self.model.interventions

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        if self.model.tokenizer is None:
            raise ModelError(f"{self.name} was loaded without a tokenizer; pass tokenizer= to hw.load.")
        return self.model.tokenizer

    def layer(self, layer: int) -> HeadWeights:
        """The factors of one layer's heads."""
        names = [field.name for field in fields(HeadWeights) if field.name.startswith(("W_", "b_"))]
        return HeadWeights(layer, **self._factors(layer, names), norm_gain=self._attention_gain(layer))

    def ov(self, layer: int) -> OVWeights:
        """W_V and W_O of one layer's heads."""
        factors = self._factors(layer, ("W_V", "W_O", "b_V", "b_O"))
        return OVWeights(layer, factors["W_V"], factors["W_O"], norm_gain=self._attention_gain(layer))

    @torch.inference_mode()
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E as the residual stream receives it."""
        return self._checked(self._embed(torch.arange(self.shape.d_vocab)), "embed.W_E")

    def unembedding(self) -> Float[Tensor, "d_model d_vocab"]:
        """W_U."""
        return self._checked(self.model.raw.unembed.W_U, "unembed.W_U")

    def final_norm_gain(self) -> Float[Tensor, "d_model"]:
        """The gain of the norm in front of the unembedding."""
        norm = getattr(self.model.raw, "ln_final", None)
        if norm is None:
            raise ModelError(f"{self.shape.architecture} has no norm in front of its unembedding here.")
        return self._gain(norm, "ln_final")

    def attention_post_gain(self, layer: int) -> Float[Tensor, "d_model"] | None:
        """The gain of the norm behind a layer's attention, None where there is none."""
        block = self.model.raw.blocks[layer]
        return self._gain(block.ln1_post, f"blocks.{layer}.ln1_post") if hasattr(block, "ln1_post") else None

    @torch.inference_mode()
    def effective_embedding(self, tokens: Int[Tensor, "source"], kind: str) -> Float[Tensor, "source d_model"]:
        """What later heads read for each token."""
        check_request(tokens, kind, self.shape.d_vocab)
        compute: Callable[[Tensor], Tensor] = {
            "raw": self._embed,
            "mlp0": lambda chunk: first_mlp(self.model, chunk, self._embed(chunk)),
            "embed+mlp0": lambda chunk: (embedded := self._embed(chunk)) + first_mlp(self.model, chunk, embedded),
            "layer0": self._layer0,
        }[kind]
        with self.model.lock:
            rows = [compute(chunk) for chunk in chunks(tokens, self.shape.d_mlp)]
        return self._checked(torch.cat(rows), f"effective embedding {kind}")

    def _factors(self, layer: int, names: Iterable[str]) -> dict[str, Any]:
        """Factors of one layer's heads by name, after those of values and outputs were held against a run."""
        self._check_layer(layer)
        refuse_clipped(self.model.config, self.shape.architecture)
        factors = {name: self._factor(layer, name) for name in names}
        if missing := next((name for name in ("W_V", "W_O") if factors[name] is None), None):
            raise self._no_factors(layer, f"TransformerLens shows no {missing}")
        if is_bridge(self.model.raw):
            self._heads_seen.check(layer, factors)
        return factors

    @cached_property
    def _heads_seen(self) -> HeadsOfLoneTokens:
        return HeadsOfLoneTokens(self.model)

    def _factor(self, layer: int, name: str) -> Tensor | None:
        """One factor; HookedTransformer repeats grouped keys and values in W_K, the parameter itself is _W_K."""
        attention = getattr(self.model.raw.blocks[layer], "attn", None)
        if attention is None:
            raise self._no_factors(layer, "there is no attention")
        try:
            own = getattr(attention, f"_{name}", None)
            value = own if isinstance(own, Tensor) else getattr(attention, name, None)
        except NotImplementedError as error:  # multi-head latent attention
            raise self._no_factors(layer, first_line(error).split(". ")[0]) from None
        return None if value is None else self._checked(value, f"blocks.{layer}.attn.{name}")

    def _no_factors(self, layer: int, reason: str) -> ModelError:
        return ModelError(f"{self.shape.architecture} has no factors of single heads in layer {layer}: {reason}.")

    def _attention_gain(self, layer: int) -> Tensor:
        """The gain of the norm in front of attention; ones where there is none (OLMo 2, EXAONE 4)."""
        return self._gain(getattr(self.model.raw.blocks[layer], "ln1", None), f"blocks.{layer}.ln1")

    @cached_property
    def _adds_positions(self) -> bool:
        return adds_positions(self.model)

    @torch.no_grad()
    def _embed(self, tokens: Tensor) -> Tensor:
        if self._adds_positions:
            return self.model.raw.embed(tokens.to(self.model.device)[None])[0]
        return entering(self.model, tokens)

    def _layer0(self, tokens: Tensor) -> Tensor:
        pairs = torch.stack([torch.full_like(tokens, bos_token(self.tokenizer)), tokens], dim=1)
        return self.model.run(Batch(pairs, torch.ones_like(pairs, dtype=torch.bool)), stop_at=1)[:, 1]

    def _gain(self, norm: Any, name: str) -> Tensor:
        """A norm's gain. A HookedTransformer calls it w (Gemma's 1 is in it), or has folded it into what follows."""
        if getattr(norm, "weight", None) is not None:
            offset = 1.0 if getattr(self.model.raw.cfg, "rmsnorm_uses_offset", False) else 0.0
            return self._checked(norm.weight, f"{name}.weight") + offset
        if hasattr(norm, "w"):
            return self._checked(norm.w, f"{name}.w")
        return torch.ones(self.shape.d_model, device=self.device, dtype=self.given_dtype)

    def _checked(self, tensor: Tensor, name: str) -> Tensor:
        return self._given(finite(tensor.detach(), name))
