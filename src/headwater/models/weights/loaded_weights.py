"""The parameters of a model in memory, with the norm gains and embeddings that the model itself computes with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import ModelError
from headwater.models.model import is_bridge
from headwater.models.tokens import Batch
from headwater.models.weights.checkpoint import first_line
from headwater.models.weights.effective_embedding import (
    HeadsOfLoneTokens,
    adds_positions,
    bos_token,
    check_request,
    chunks,
    entering,
    first_mlp,
    refuse_clipped,
)
from headwater.models.weights.weight_source import HeadWeights, OVWeights, WeightSource, check_finite, finite

if TYPE_CHECKING:
    from headwater.models.model import Model


class LoadedWeights(WeightSource):
    """The parameters of a model in memory, as the model itself computes with them; views of them wherever possible.

    What is read of a layer's heads is checked when it is read first, and then is taken to stay as it is.

    Args:
        model: whose.
        known: the fingerprint of its weights, where the caller has it: then what an earlier reader checked of the same
            weights is not checked again.
    """

    def __init__(self, model: "Model", known: str | None = None):
        super().__init__(model.name, model.revision, model.shape, model.dtype)
        self.model = model
        self.device = model.device
        self._sound: set[str] = set()
        """The tensors that were looked at for NaN, and the layers whose heads were compared with a run."""
        if known is not None:
            if model.factors_checked is None or model.factors_checked[0] != known:
                model.factors_checked = known, self._sound
            self._sound = model.factors_checked[1]

    @property
    def fingerprint(self) -> str:
        """Hash of config and weights."""
        return self.model.fingerprint

    @property
    def tokenizer_digest(self) -> str:
        """Hash of the tokenizer."""
        return self.model.tokenizer_digest

    @property
    def interventions(self) -> Mapping[str, object]:
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
        return HeadWeights(layer, **self._factors(layer, names))

    def ov(self, layer: int) -> OVWeights:
        """W_V and W_O of one layer's heads."""
        factors = self._factors(layer, ("W_V", "W_O", "b_V", "b_O"))
        return OVWeights(layer, factors["W_V"], factors["W_O"], norm_gain=factors["norm_gain"])

    def attention_out(self, layer: int) -> tuple[Float[Tensor, "head d_head d_model"], Float[Tensor, "d_model"] | None]:
        """W_O and b_O of one layer's heads."""
        factors = self._factors(layer, ("W_V", "W_O", "b_V", "b_O"))
        return factors["W_O"], factors["b_O"]

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
        """The gain of the norm after a layer's attention, None where there is none."""
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
        """Factors of one layer's heads by name, and its norm's gain; values and outputs were compared with a run."""
        self._check_layer(layer)
        refuse_clipped(self.model.config, self.shape.architecture)
        stored = {name: self._factor(layer, name) for name in names}
        at = f"blocks.{layer}"
        norm = self._norm(getattr(self.model.raw.blocks[layer], "ln1", None), f"{at}.ln1")
        self._look({f"{at}.attn.{name}": factor for name, factor in stored.items() if factor is not None} | norm)
        factors = {name: None if factor is None else self._given(factor) for name, factor in stored.items()}
        factors["norm_gain"] = self._gain_of(norm)
        if missing := next((name for name in ("W_V", "W_O") if factors[name] is None), None):
            raise self._no_factors(layer, f"TransformerLens shows no {missing}")
        # A HookedTransformer computes with these very tensors; under a bridge they are read out of modules by name.
        if is_bridge(self.model.raw) and f"{at}: heads" not in self._sound:
            self._heads_seen.check(layer, factors)
            self._sound.add(f"{at}: heads")
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
        return None if value is None else value.detach()

    def _look(self, named: Mapping[str, Tensor]) -> None:
        """Look for NaN and infinity in those that were not looked at before, in all at once."""
        new = {name: tensor for name, tensor in named.items() if name not in self._sound}
        check_finite(new)
        self._sound.update(new)

    def _no_factors(self, layer: int, reason: str) -> ModelError:
        return ModelError(f"{self.shape.architecture} has no factors of single heads in layer {layer}: {reason}.")

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
        """A norm's gain."""
        named = self._norm(norm, name)
        self._look(named)
        return self._gain_of(named)

    def _norm(self, norm: Any, name: str) -> dict[str, Tensor]:
        """What a norm multiplies by, by name. A HookedTransformer calls it w, or has folded it into what follows."""
        part = "weight" if getattr(norm, "weight", None) is not None else "w"
        gain = getattr(norm, part, None)
        return {} if gain is None else {f"{name}.{part}": gain.detach()}

    def _gain_of(self, named: Mapping[str, Tensor]) -> Tensor:
        """The gain of a norm; ones where there is none (OLMo 2, EXAONE 4). In w of a HookedTransformer Gemma's 1 is."""
        if not named:
            return torch.ones(self.shape.d_model, device=self.device, dtype=self.given_dtype)
        [(name, tensor)] = named.items()
        offset = getattr(self.model.raw.cfg, "rmsnorm_uses_offset", False) and name.endswith(".weight")
        return self._given(tensor) + (1.0 if offset else 0.0)

    def _checked(self, tensor: Tensor, name: str) -> Tensor:
        return self._given(finite(tensor.detach(), name))
