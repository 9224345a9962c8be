"""Read a model's parameters, one layer at a time, from memory or from files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call
from headwater.errors import InputError, ModelError, did_you_mean, first_line
from headwater.kernels.devices import to_device, usable_device
from headwater.models.bridge_check import check_finite, difference, finite, rounding, tokenizer_fits
from headwater.models.checkpoint import Checkpoint, checkpoint_folder, load_tokenizer, open_checkpoint, revision_of
from headwater.models.conversion import UNEMBEDDING, expected_tensors, split_heads
from headwater.models.edits import Hook, read_hook
from headwater.models.effective_embedding import KINDS, bos_token, chunks, layer0, mlp0
from headwater.models.families import ModelShape, clip_limit, family_of, shape_of
from headwater.models.fingerprint import behaviour, fingerprint, fingerprint_of_files
from headwater.models.forward import unpadded
from headwater.models.model import is_bridge
from headwater.models.sites import hook_name
from headwater.models.transformers_names import PreTrainedTokenizerBase
from headwater.runs.identity import tokenizer_digest

if TYPE_CHECKING:
    from headwater.models.model import Model


# Factors are unchanged from the checkpoint: no norm folded in, nothing centred. With x the residual stream after the
# norm in front of attention, head h of a layer computes
#
# q = x W_Q[h] + b_Q[h]      k = x W_K[g] + b_K[g]      v = x W_V[g] + b_V[g]      g = h // group_size
# its output = pattern · v · W_O[h]
#
# and attention's output is the sum over heads + b_O. q and k are before rotary embedding and before the query and key
# norms of Qwen3 and Gemma 3. Gemma 2 and 3 apply one more norm to the sum before it reaches the residual stream.


@dataclass(frozen=True)
class OVWeights:
    """W_V and W_O of one layer, which map attended tokens to outputs. Grouped heads share values: see `value_head`.

    Attributes:
        layer: index of the block.
        W_V: residual stream to values.
        W_O: a head's weighted values to the residual stream.
        norm_gain: gain of the norm in front of attention (1 + weight in Gemma).
    """

    layer: int
    W_V: Float[Tensor, "kv_head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    norm_gain: Float[Tensor, " d_model"]

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key-value head."""
        return len(self.W_O) // len(self.W_V)

    def value_head(self, head: int) -> int:
        """Return the key-value head of a query head."""
        return head // self.group_size

    def expand_kv(self, factor: Float[Tensor, "kv_head ..."]) -> Float[Tensor, "head ..."]:
        """Repeat a factor of the key-value heads (W_K, W_V, b_K, b_V) for every query head."""
        return factor.repeat_interleave(self.group_size, dim=0)


@dataclass(frozen=True)
class HeadWeights(OVWeights):
    """All factors of one layer's heads.

    Attributes:
        W_Q: residual stream to queries.
        W_K: residual stream to keys.
        b_Q: bias of the queries; biases are None if the architecture has none.
        b_K: bias of the keys.
        b_V: bias of the values.
        b_O: bias of the sum over heads.
    """

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "kv_head d_model d_head"]
    b_Q: Float[Tensor, "head d_head"] | None
    b_K: Float[Tensor, "kv_head d_head"] | None
    b_V: Float[Tensor, "kv_head d_head"] | None
    b_O: Float[Tensor, " d_model"] | None


FACTORS = tuple(field.name for field in fields(HeadWeights) if field.name.startswith(("W_", "b_")))
PLACES = {"x": "attn_in", "z": "z", "weight": "pattern", "out": "attn_written"}
"""Hooks of a bridge for the input of attention, the outputs and the weights of its heads, and attention's output."""
N_TOKENS = 4
"""Number of tokens to check."""


class _Weights:
    """Common base class for parameters from memory and from files.

    Attributes:
        name, revision, shape: as in `Model`.
        dtype: the stored dtype of the weights.
        given_dtype: the dtype of returned tensors: float32, or `dtype` if wider, unless another was requested.
        device: the device of returned tensors.
    """

    def __init__(self, name: str, revision: str | None, shape: ModelShape, dtype: torch.dtype):
        self.name, self.revision, self.shape, self.dtype = name, revision, shape, dtype
        self.device = torch.device("cpu")
        self.given_dtype = torch.promote_types(dtype, torch.float32)

    def __repr__(self) -> str:
        about = ", ".join(filter(None, (self.revision, self.shape.architecture)))
        return f"{type(self).__name__}({self.name!r}, {about}, {self.dtype} as {self.given_dtype})"

    def layer(self, layer: int) -> HeadWeights:
        """Return the factors of one layer's heads; a bias that the model lacks is None."""
        return HeadWeights(layer, **self._factors_of(layer, FACTORS))

    def ov(self, layer: int) -> OVWeights:
        """Return W_V and W_O of one layer's heads; does not read queries and keys that files store separately."""
        return OVWeights(layer, **self._factors_of(layer, ("W_V", "W_O")))

    @torch.inference_mode()
    def effective_embedding(self, tokens: Int[Tensor, " source"], kind: str) -> Float[Tensor, "source d_model"]:
        """Return the effective embedding of each token, as later heads read it; `kind` is "raw", "mlp0", ..."""
        if kind not in KINDS:
            raise InputError(f"The effective embedding {kind!r} does not exist.{did_you_mean(kind, KINDS)}")
        d_vocab = self.shape.d_vocab
        if not len(tokens) or not 0 <= int(tokens.min()) <= int(tokens.max()) < d_vocab:
            found = f"from {int(tokens.min())} to {int(tokens.max())}" if len(tokens) else "none"
            raise InputError(f"Effective embeddings need token ids from 0 to {d_vocab - 1}; {found} were given.")
        return self._given(self._effective(tokens, kind))

    def _given(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.given_dtype)

    def _factors_of(self, layer: int, names: Sequence[str]) -> dict[str, Any]:
        """Return factors of a layer's heads by name, and its norm's gain.

        Refuses attention that clips its values: the output of a head is then not x W_V W_O.
        """
        if not 0 <= layer < self.shape.n_layers:
            raise InputError(f"Layer {layer} was requested; the model has layers 0 to {self.shape.n_layers - 1}.")
        if limit := clip_limit(self._config):
            raise ModelError(
                f"{self.shape.architecture} clips queries, keys and values here (clip_qkv={limit}), so the output of a "
                "head is not x W_V W_O; no OV map is computed."
            )
        return self._factors(layer, names)

    if TYPE_CHECKING:  # of each class
        _config: Any
        _factors: Callable[[int, Sequence[str]], dict[str, Any]]
        _effective: Callable[[Tensor, str], Tensor]


class LoadedWeights(_Weights):
    """The parameters of a model in memory, as the model itself computes with them; views wherever possible.

    The weights of a layer's heads are checked at the first read, and assumed unchanged afterwards. If the caller knows
    the fingerprint, checks that an earlier reader made of the same weights are not repeated.

    Factors and embeddings that are found in modules by name are right only if the architecture uses them as expected. A
    sequence of one token, which attends only to itself, shows it:

        embedding   the input of the first block is E; with added positions, E plus the same vector for every token
        first MLP   block 0, with input E and attention's output set to 0, returns E + MLP₀(LN(E))
        heads       with x the input of attention, p a head's weight on the token (1, or less with a sink):
                    z[h] = p[h] · (x W_V[g] + b_V[g])        output of attention = Σ_h z[h] W_O[h] + b_O
    """

    def __init__(self, model: Model, fingerprint: str | None = None):
        super().__init__(model.name, model.revision, model.shape, model.dtype)
        self.model, self._config = model, model.config
        self.device = model.device
        self._sound: set[str] = set()
        """Tensors already checked for NaN, and layers whose heads were already compared with a run."""
        if fingerprint is not None:
            if model.factors_checked is None or model.factors_checked[0] != fingerprint:
                model.factors_checked = fingerprint, self._sound
            self._sound = model.factors_checked[1]

    @property
    def fingerprint(self) -> str:
        """Hash of config and weights, equal for the same weights opened from memory or files."""
        return self.model.fingerprint

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""
        return self.model.tokenizer_digest

    @property
    def interventions(self) -> Mapping[str, object]:
        """Everything besides the weights that affects the model, by the option that records it."""
        return self.model.interventions

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        if self.model.tokenizer is None:
            raise ModelError(f"{self.name} was loaded without a tokenizer; pass tokenizer= to hw.load.")
        return self.model.tokenizer

    @torch.inference_mode()
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """Return W_E as the residual stream receives it (Gemma: times √d_model), without positions."""
        return self._given(finite(self._embed(torch.arange(self.shape.d_vocab)), "embed.W_E"))

    def unembedding(self) -> Float[Tensor, "d_model d_vocab"]:
        """Return W_U, without the bias of Phi's head."""
        return self._given(finite(self.model.raw.unembed.W_U.detach(), "unembed.W_U"))

    def final_norm_gain(self) -> Float[Tensor, " d_model"]:
        """Return the gain of the norm in front of the unembedding."""
        if (norm := getattr(self.model.raw, "ln_final", None)) is None:
            raise ModelError(f"{self.shape.architecture} has no norm in front of its unembedding here.")
        return self._gain(norm, "ln_final")

    def attention_post_gain(self, layer: int) -> Float[Tensor, " d_model"] | None:
        """Return the gain of the norm after a layer's attention; None if there is no such norm."""
        norm = getattr(self.model.raw.blocks[layer], "ln1_post", None)
        return None if norm is None else self._gain(norm, f"blocks.{layer}.ln1_post")

    def _factors(self, layer: int, names: Sequence[str]) -> dict[str, Any]:
        at, block = f"blocks.{layer}", self.model.raw.blocks[layer]
        refused = f"{self.shape.architecture} has no factors of single heads in layer {layer}:"
        if (attention := getattr(block, "attn", None)) is None:
            raise ModelError(f"{refused} there is no attention.")
        stored: dict[str, Tensor] = {}
        for name in dict.fromkeys([*names, "b_V", "b_O"]):  # the biases for the comparison with a run
            try:
                # A HookedTransformer's W_K, W_V repeat grouped heads, and _W_K, _W_V are the parameters.
                value = getattr(attention, f"_{name}", None)
                value = value if isinstance(value, Tensor) else getattr(attention, name, None)
            except NotImplementedError as error:  # multi-head latent attention
                raise ModelError(f"{refused} {first_line(error).split('. ')[0]}.") from None
            if value is not None:
                stored[name] = value.detach()
        if missing := {"W_V", "W_O"} - stored.keys():
            raise ModelError(f"{refused} TransformerLens does not expose {max(missing)}.")
        self._look({f"{at}.attn.{name}": factor for name, factor in stored.items()})
        given = {name: self._given(factor) for name, factor in stored.items()}
        gain = self._gain(getattr(block, "ln1", None), f"{at}.ln1")
        # A HookedTransformer computes with these same tensors; in a bridge they are found in modules by name.
        if f"{at}: heads" not in self._sound and is_bridge(self.model.raw):
            self._compare_with_run(layer, given)
            self._sound.add(f"{at}: heads")
        return {name: given.get(name) for name in names} | {"norm_gain": gain}

    @cached_property
    def _recorded(self) -> dict[tuple[str, int], Tensor]:
        """Activations of every layer's heads for a few tokens, by name in `PLACES` and layer, from one run."""
        recorded: dict[tuple[str, int], Tensor] = {}

        def keep(activation: Tensor, hook: object, name: str, layer: int) -> None:
            recorded[name, layer] = (activation[:, :, 0] if name == "weight" else activation[:, 0]).clone()

        listed = self.model.raw.hook_dict  # built at every access
        hooks = [
            (hook_name(place, layer), read_hook(partial(keep, name=name, layer=layer)))
            for layer in range(self.shape.n_layers)
            for name, place in PLACES.items()
            if hook_name(place, layer) in listed
        ]
        self.model.run(unpadded(self._some_tokens[:, None]), hooks, stop_at=self.shape.n_layers)
        return recorded

    def _compare_with_run(self, layer: int, factors: Mapping[str, Tensor]) -> None:
        """Check that a layer's heads computed with these W_V, W_O, b_V and b_O."""
        W_V, W_O, recorded = factors["W_V"], factors["W_O"], self._recorded
        if lacking := [hook_name(place, layer) for name, place in PLACES.items() if (name, layer) not in recorded]:
            raise ModelError(
                f"TransformerLens does not expose {lacking[0]} of {self.shape.architecture}, so W_V and W_O cannot be "
                "checked against what its heads compute."
            )
        x, z, weight, out = (recorded[name, layer].to(W_V) for name in PLACES)
        ending = f"in layer {layer}: they differ by {{}}. No OV map is computed."
        values = einsum(x, W_V, "token m, head m d -> token head d") + factors.get("b_V", 0)
        expected = values.repeat_interleave(len(W_O) // len(W_V), dim=1) * weight
        z = z.reshape(len(x), len(W_O), -1)
        self._refuse_difference(expected, z, f"The heads of {{}} do not pass on their weight times x W_V {ending}")
        written = einsum(z, W_O, "token head d, head d m -> token m") + factors.get("b_O", 0)
        message = f"The attention of {{}} does not write the sum of its heads' z W_O {ending}"
        self._refuse_difference(written, out, message)

    def _refuse_difference(self, expected: Tensor, actual: Tensor, message: str) -> None:
        """Raise an error if two results differ; `message` has placeholders for the architecture and the difference."""
        if expected.shape != actual.shape:
            gap = f"{tuple(expected.shape)} and {tuple(actual.shape)}"
        elif (error := difference(expected, actual)) <= rounding(self.dtype):
            return
        else:
            gap = f"{error:.1%}"
        raise ModelError(message.format(self.shape.architecture, gap))

    def _look(self, named: Mapping[str, Tensor]) -> None:
        """Check all tensors that were not checked before for NaN and infinity, in one call."""
        if new := {name: tensor for name, tensor in named.items() if name not in self._sound}:
            check_finite(new)
            self._sound.update(new)

    @cached_property
    def _some_tokens(self) -> Int[Tensor, " token"]:
        return torch.arange(min(N_TOKENS, self.shape.d_vocab))

    def _entering(self, tokens: Int[Tensor, " token"], before: int = 0) -> Float[Tensor, "token d_model"]:
        """Return the input of the first block for each token, after `before` copies of the token."""
        rows = tokens[:, None].expand(-1, before + 1).contiguous().cpu()
        return self.model.run(unpadded(rows), stop_at=0)[:, -1]

    @cached_property
    def _adds_positions(self) -> bool:
        """Whether a position is added to the embedding, which must then equal `raw.embed`."""
        tokens = self._some_tokens
        first = self._entering(tokens)
        if self.shape.n_ctx < 2 or torch.equal(first, self._entering(tokens, before=1)):
            return False
        embedded = self.model.raw.embed(tokens.to(self.model.device)[None])[0]
        if embedded.shape == first.shape:
            positions = (first - embedded).float()
            if bool((positions - positions[0]).abs().max() <= rounding(self.dtype) * first.float().abs().max()):
                return True
        raise ModelError(
            f"{self.shape.architecture} starts from more than its embedding and a position, so its input for a token "
            "alone is unknown, and so is its effective embedding."
        )

    @torch.no_grad()
    def _embed(self, tokens: Tensor) -> Tensor:
        if self._adds_positions:
            return self.model.raw.embed(tokens.to(self.model.device)[None])[0]
        return self._entering(tokens)

    def _first_mlp(
        self, tokens: Int[Tensor, " token"], embeddings: Float[Tensor, "token d_model"]
    ) -> Float[Tensor, "token d_model"]:
        """Return MLP₀(LN(E)): what the first block adds to its input E when the output of its attention is 0."""
        listed, written = self.model.raw.hook_dict, list[Tensor]()
        silent = next((name for name in ("attn_written", "attn_out") if hook_name(name) in listed), "")
        if not silent or hook_name("mlp_out") not in listed:
            raise ModelError(
                f"The first block of {self.shape.architecture} is not attention and an MLP; use embedding='raw' or "
                "'layer0'."
            )
        hooks: list[Hook] = [
            (hook_name("resid_pre"), lambda residual, hook: embeddings[:, None].to(residual)),
            (hook_name(silent), lambda output, hook: torch.zeros_like(output)),
            (hook_name("mlp_out"), lambda output, hook: written.append(output)),
        ]
        after = self.model.run(unpadded(tokens[:, None].cpu()), hooks, stop_at=1)[:, 0]
        output = written[0][:, 0]
        self._refuse_difference(
            embeddings + output,
            after,
            "The first block of {} does not output the residual stream plus the outputs of attention and MLP: it "
            "differs by {}. Use embedding='raw' or 'layer0'.",
        )
        return output

    def _effective(self, tokens: Tensor, kind: str) -> Tensor:
        rows = list[Tensor]()
        with self.model.lock:
            for chunk in chunks(tokens, self.shape.d_mlp):
                if kind == "layer0":
                    pairs = torch.stack([torch.full_like(chunk, bos_token(self.tokenizer)), chunk], dim=1)
                    rows.append(self.model.run(unpadded(pairs), stop_at=1)[:, 1])
                elif kind == "raw":
                    rows.append(self._embed(chunk))
                else:
                    embedded = self._embed(chunk)
                    output = self._first_mlp(chunk, embedded)
                    rows.append(output if kind == "mlp0" else embedded + output)
        return finite(torch.cat(rows), f"effective embedding {kind}")

    def _gain(self, norm: Any, name: str) -> Tensor:
        """Return a norm's gain; ones without one (OLMo 2, EXAONE 4, or folded into the next weights).

        A HookedTransformer names it w, and includes Gemma's 1 in it.
        """
        weight, w = (getattr(norm, part, None) for part in ("weight", "w"))
        stored = w if weight is None else weight
        if stored is None:
            return torch.ones(self.shape.d_model, device=self.device, dtype=self.given_dtype)
        self._look({f"{name}.weight": stored.detach()})
        adds_one = weight is not None and getattr(self.model.raw.cfg, "rmsnorm_uses_offset", False)
        return self._given(stored.detach()) + (1.0 if adds_one else 0.0)


class StreamedWeights(_Weights):
    """A checkpoint's parameters, read from memory-mapped files on request and never cached."""

    def __init__(self, name: str, revision: str | None, checkpoint: Checkpoint, tokenizer: Any):
        self.checkpoint, self._config, self.family = checkpoint, checkpoint.config, family_of(checkpoint.config)
        self._embedding_name = f"{self.family.embedding}.weight"
        is_dequantised = checkpoint.gguf is not None  # to float32, as each tensor is read
        dtype = torch.float32 if is_dequantised else checkpoint.read(self._embedding_name).dtype
        super().__init__(name, revision, shape_of(checkpoint.config), dtype)
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        # Nothing besides the weights affects the model.
        self.interventions: Mapping[str, object] = {}

    @property
    def fingerprint(self) -> str:
        """Hash of config and weights; unchanged files are not read again."""
        config, read = self.checkpoint.config, self.checkpoint.read
        about = [asdict(self.shape), behaviour(config), self.checkpoint.names]

        def compute() -> str:
            expected = expected_tensors(config)
            total = sum(map(math.prod, expected.values()))
            return fingerprint(self.shape, config, ((name, read(name)) for name in expected), total)

        return fingerprint_of_files(set(self.checkpoint.files.values()), about, compute)

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""
        return tokenizer_digest(self.tokenizer)

    def _factors(self, layer: int, names: Sequence[str]) -> dict[str, Any]:
        family, block = self.family, self.family.block(layer)
        attention, fused = f"{block}{family.attention}.", family.fused
        factors: dict[str, Any] = dict.fromkeys(names)
        for kind, part in (("W", "weight"), ("b", "bias")):
            for letters in ("Q", "K", "V") if fused is None else ("QKV",):
                module = f"{letters.lower()}_proj" if fused is None else fused.name
                stored, wanted = f"{attention}{module}.{part}", [f"{kind}_{letter}" for letter in letters]
                # A missing bias is None; a missing weight is an error.
                if factors.keys().isdisjoint(wanted) or (kind == "b" and stored not in self.checkpoint.names):
                    continue
                tensor = self._read(stored)
                if fused is None:
                    heads = self.shape.n_heads if letters == "Q" else self.shape.n_kv_heads
                    by_head = tensor.unflatten(0, (heads, -1))
                    found = [by_head if kind == "b" else by_head.transpose(1, 2)]
                else:
                    found = split_heads(tensor, fused, self.shape)
                factors |= {name: one for name, one in zip(wanted, found, strict=True) if name in factors}
        output = f"{attention}{family.output}"
        d_model_last = fused is not None and fused.d_model_first
        layout = "(head d_head) d_model" if d_model_last else "d_model (head d_head)"
        W_O = self._read(f"{output}.weight")
        factors["W_O"] = rearrange(W_O, f"{layout} -> head d_head d_model", head=self.shape.n_heads)
        if "b_O" in factors and f"{output}.bias" in self.checkpoint.names:
            factors["b_O"] = self._read(f"{output}.bias")
        norm = family.norms.before_attention
        factors["norm_gain"] = self._norm_gain(None if norm is None else f"{block}{norm}")
        return factors

    def _norm_gain(self, norm: str | None) -> Tensor:
        """Return the gain of a norm; ones if there is no norm (OLMo 2), or it has no gain (OLMo 1)."""
        if norm is None or f"{norm}.weight" not in self.checkpoint.names:
            return torch.ones(self.shape.d_model, device=self.device, dtype=self.given_dtype)
        return self._read(f"{norm}.weight") + self.family.gain_offset

    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """Return W_E as the residual stream receives it (Gemma: times √d_model), without positions."""
        return self._entering(self._read(self._embedding_name))

    def unembedding(self) -> Float[Tensor, "d_model d_vocab"]:
        """Return W_U, without the bias of Phi's head; the transposed embedding if the two are tied."""
        return self._read(UNEMBEDDING if UNEMBEDDING in self.checkpoint.names else self._embedding_name).T

    def final_norm_gain(self) -> Float[Tensor, " d_model"]:
        """Return the gain of the norm in front of the unembedding."""
        if (norm := self.family.final_norm) is None:
            raise ModelError(f"{self.shape.architecture} has no norm in front of its unembedding here.")
        return self._norm_gain(norm)

    def _effective(self, tokens: Tensor, kind: str) -> Tensor:
        if reason := self.family.cannot.get(kind):
            raise InputError(f"The effective embedding {kind!r} of {self.name} cannot be read from its files: {reason}")
        matrix = self.checkpoint.read(self._embedding_name)
        precision = torch.promote_types(torch.promote_types(matrix.dtype, self.given_dtype), torch.float32)
        # Pick rows from the mapped matrix first: the whole matrix converted would be as large as W_U in float32.
        rows = finite(matrix[tokens.cpu()], self._embedding_name).to(device=self.device, dtype=precision)
        config, read = self.checkpoint.config, self._stored
        if kind == "layer0":
            return layer0(config, read, rows, matrix[[bos_token(self.tokenizer)]].to(rows))
        embeddings = self._entering(rows)
        if kind == "raw":
            return embeddings
        output = mlp0(config, read, embeddings)
        return embeddings + output if kind == "embed+mlp0" else output

    def _stored(self, name: str) -> Tensor:
        """Return one tensor on the device, after checking there that it is finite."""
        return finite(to_device(self.checkpoint.read(name), self.device), name)

    def _read(self, name: str) -> Tensor:
        return self._given(self._stored(name))

    def _entering(self, embeddings: Tensor) -> Tensor:
        """Return rows of the embedding as the first block receives them, without positions."""
        scale, norm, config = self.family.embedding_scale, self.family.embedding_norm, self.checkpoint.config
        if scale is not None:
            # As in transformers, the factor is rounded to the embedding's dtype before the multiplication.
            embeddings = embeddings * torch.tensor(scale(config)).to(embeddings)
        if norm is None:
            return embeddings
        gain, bias = (self._stored(f"{norm}.{part}").to(embeddings) for part in ("weight", "bias"))
        return torch.nn.functional.layer_norm(embeddings, gain.shape, gain, bias, config.layer_norm_epsilon)


WeightSource: TypeAlias = LoadedWeights | StreamedWeights
"""Source of the parameters for an analysis."""


@checked_call
def open_weights(
    what: Model | str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> WeightSource:
    """Open a model's parameters for reading.

    Args:
        what: a checkpoint folder, GGUF file or hub name, streamed with one layer in memory at a time, or a model in
            memory.
        device: device of returned tensors; by default the CPU, or the device of the model in memory.
        dtype: dtype of returned tensors; by default float32, or the stored dtype if that is wider.
        revision: branch, tag or commit on the hub.
        trust_remote_code: allow the checkpoint's own config and tokenizer code to run.

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
        source = StreamedWeights(str(what), revision_of(what, folder), checkpoint, tokenizer)
    source.device = usable_device(device or source.device)
    source.given_dtype = dtype or source.given_dtype
    return source


class LayersAhead:
    """Calls `weights.ov` one layer ahead where that pays. A context manager: leaving it ends the thread.

    While a CUDA device works on one layer's heads, a thread copies the next layer from the checkpoint to the device on
    a separate stream; the caller's stream waits for it only when that layer is requested. The last step between layers
    is repeated, so that processes that share the layers each read ahead their own. On a CPU, and for a model in memory,
    layers are read on request, unless `ahead` says otherwise.
    """

    def __init__(self, weights: WeightSource, *, ahead: bool | None = None):
        self.weights = weights
        on_cuda = weights.device.type == "cuda"
        self.ahead = on_cuda and isinstance(weights, StreamedWeights) if ahead is None else ahead
        self._stream = torch.cuda.Stream(weights.device) if self.ahead and on_cuda else None
        self._reader = ThreadPoolExecutor(1, "layers-ahead") if self.ahead else None
        self._last: int | None = None
        self._coming: tuple[int, Future[tuple[OVWeights, torch.cuda.Event | None]]] | None = None

    def __enter__(self) -> LayersAhead:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def __call__(self, layer: int) -> OVWeights:
        """Return one layer's factors, ready for the current stream."""
        if self._reader is None:
            return self.weights.ov(layer)
        if self._coming is None or self._coming[0] != layer:
            self._coming = layer, self._reader.submit(self._read, layer)
        factors, arrived = self._coming[1].result()
        following = layer + (1 if self._last is None else layer - self._last)
        self._last, self._coming = layer, None
        if layer < following < self.weights.shape.n_layers:
            self._coming = following, self._reader.submit(self._read, following)
        if arrived is not None:
            stream = torch.cuda.current_stream(self.weights.device)
            stream.wait_event(arrived)
            for tensor in vars(factors).values():
                if isinstance(tensor, Tensor):
                    # Allocated on the reader's stream: else its memory could be reused while `stream` still reads it.
                    tensor.record_stream(stream)
        return factors

    def _read(self, layer: int) -> tuple[OVWeights, torch.cuda.Event | None]:
        """Return a layer's factors, and the event after which they are on the device (if any)."""
        if self._stream is None:
            return self.weights.ov(layer), None
        with torch.cuda.stream(self._stream):
            return self.weights.ov(layer), self._stream.record_event()
