"""TransformerLens's names and shapes on a headwater model, with headwater's hooks and checks.

`run_with_cache`, `run_with_hooks`, `model(tokens)`, `cfg`, `to_tokens` and similar. Hooks follow the rules of
`headwater.models.edits`: a hook gets a copy and must return its edit, an unknown name or a hook that never fires is
an error, and an edit of `hook_resid_mid` reaches the skip connection.

The parameters are copies in the checkpoint's form: no norm is folded into the weights, nothing is centred. With x after
the norm in front of attention, q = x W_Q[layer, h] + b_Q[layer, h] before rotary embedding, likewise k and v, and the
head's output is pattern · v · W_O[layer, h]. Grouped keys and values are repeated for every query head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.calls import checked_call, checked_calls
from headwater.errors import InputError
from headwater.kernels.devices import failures_named, usable_device
from headwater.models.edits import Hook, HookFunction, read_hook
from headwater.models.model import Model
from headwater.models.sites import place_named
from headwater.models.tokens import Batch, encode, pad_id
from headwater.models.weights import WeightSource, open_weights
from headwater.options import checked_name, has_no_order, is_one, one_or_several, shown, whole_number

if TYPE_CHECKING:
    from transformer_lens import ActivationCache


class Config:
    """The sizes and settings of a model, by TransformerLens's names; read-only."""

    def __init__(self, model: Model):
        self.__dict__["_model"] = model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        model = self.__dict__["_model"]
        if name in ("device", "dtype"):
            return getattr(model, name)
        if name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx"):
            return getattr(model.shape, name)
        return getattr(model.raw.cfg, name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"cfg.{name} is read-only: setting it would not change the model. TransformerLens's own is model.raw.cfg."
        )

    def __dir__(self) -> list[str]:
        return sorted({name for name in dir(self._model.raw.cfg) if not name.startswith("_")} | {"device", "dtype"})

    def __repr__(self) -> str:
        sizes = ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab", "n_ctx", "act_fn", "dtype", "device")
        return f"cfg({', '.join(f'{name}={getattr(self, name, None)!r}' for name in sizes)})"


Names: TypeAlias = str | Sequence[str] | Callable[[str], bool] | None
"""Hooks by name: one, several, those for which a function returns True, or all."""
Given: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Tensor | Batch
SWITCHED = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "mlp_in": "use_hook_mlp_in",
    "attn_in": "use_attn_in",
}
"""The setting that TransformerLens needs to compute a hook, by the end of the hook's name."""
RETURNS = ("logits", "loss", "both")


def _factor(name: str, meaning: str) -> Any:
    """Return a property for one factor of all heads."""
    return property(lambda model: model._of_heads(name), doc=meaning)


@checked_calls
class TransformerLensNames(Model):
    """TransformerLens's methods and properties, each implemented with headwater's own."""

    @property
    def cfg(self) -> Config:
        """Sizes and settings by TransformerLens's names, such as `n_layers`, `d_vocab`, `act_fn`; read-only."""
        return Config(self)

    @checked_call
    def __call__(
        self,
        input: Given,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
    ) -> Any:
        """Run the model; see `run_with_hooks` for the arguments."""
        return self.run_with_hooks(
            input, return_type, loss_per_token=loss_per_token, prepend_bos=prepend_bos, stop_at_layer=stop_at_layer
        )

    def run_with_hooks(
        self,
        input: Given,
        return_type: str | None = "logits",
        fwd_hooks: Iterable[tuple[Names, HookFunction]] = (),
        *,
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
        bwd_hooks: Sequence[Any] = (),
    ) -> Any:
        """Run the model with hooks.

        Args:
            input: a text, texts, or token ids; every id of a tensor counts as a real token.
            return_type: "logits", "loss" (the mean -ln p of the tokens after the first, without padding), "both", or
                None for nothing.
            fwd_hooks: (name, function(activation, hook)); instead of a name also several names, or a function that
                returns whether to hook a name. The hook functions return their edit.
            loss_per_token: return the loss of every token, `batch position` without the first; NaN at padding.
            prepend_bos: whether texts begin with the BOS token; by default they begin with `model.bos`.
            stop_at_layer: return the residual stream that enters this layer.
            bwd_hooks: not supported; `model.run(..., grad=True)` records gradients.

        Raises:
            InterventionError: a hook names no activation, or never fired.
        """
        if one_or_several(bwd_hooks):
            raise InputError("There are no bwd_hooks here: model.run(tokens, hooks, grad=True) records gradients.")
        batch = self._given(input, prepend_bos)
        listed = one_or_several(fwd_hooks)
        if any(is_one(hook) or len(hook) != 2 for hook in listed):
            raise InputError(f"fwd_hooks={shown(fwd_hooks)} must be a list of (name, function(activation, hook)).")
        hooks = [(same[0], function) for names, function in listed for same in self._by_place(self._named(names))]
        return self._returned(batch, hooks, return_type, loss_per_token, stop_at_layer)

    def run_with_cache(
        self,
        input: Given,
        return_type: str | None = "logits",
        *,
        names_filter: Names = None,
        remove_batch_dim: bool = False,
        device: str | torch.device | None = None,
        prepend_bos: bool | None = None,
        stop_at_layer: int | None = None,
    ) -> tuple[Any, ActivationCache]:
        """Run the model and keep activations.

        `model.cache` keeps activations of many texts, without padding, and in files if memory is short.

        Args:
            input: as in `run_with_hooks`.
            return_type: as in `run_with_hooks`.
            names_filter: activations to keep: a name, names, a function of a name, or None for all computed ones
                (except sites whose activation does not match the model's shape).
            remove_batch_dim: drop the first axis of activations; for a single text only.
            device: device of the kept activations; default: unchanged.
            prepend_bos: as in `run_with_hooks`.
            stop_at_layer: as in `run_with_hooks`.

        Returns:
            The result of `run_with_hooks`, and TransformerLens's `ActivationCache`: `cache["pattern", 0]`,
            `cache["blocks.0.attn.hook_pattern"]`. Its methods take parameters from `model.raw`.

        Raises:
            InterventionError: a name belongs to no activation, or its hook never fired.
        """
        from transformer_lens import ActivationCache

        batch, activations = self._given(input, prepend_bos), dict[str, Tensor]()
        device = None if device is None else usable_device(device)
        if remove_batch_dim and len(batch) > 1:
            raise InputError(f"remove_batch_dim=True is for a single text, and {len(batch)} were given.")
        must_fire = names_filter is not None and not callable(names_filter)
        names = self._named(names_filter)

        def keep(activation: object, hook: object, aliases: list[str]) -> None:
            if isinstance(activation, Tensor):
                # A tensor made in inference mode could not be modified in place later, nor take part in gradients.
                with torch.inference_mode(False):
                    copy = activation.detach().clone().to(device or activation.device)
                activations.update(dict.fromkeys(aliases, copy))

        hooks: list[Hook] = [
            (aliases[0], read_hook(partial(keep, aliases=aliases), may_be_silent=not must_fire))
            for aliases in self._by_place(names)
        ]
        out = self._returned(batch, hooks, return_type, False, stop_at_layer)
        cache = ActivationCache({name: activations[name] for name in names if name in activations}, self.raw)
        return out, cache.remove_batch_dim() if remove_batch_dim else cache

    def to_tokens(
        self, input: str | Sequence[str], prepend_bos: bool | None = None, *, truncate: bool = True
    ) -> Int[Tensor, "batch position"]:
        """Return the token ids of a text or texts, padded on the right.

        Args:
            input: the text or texts.
            prepend_bos: whether each begins with the BOS token; by default they begin with `model.bos`.
            truncate: cut texts that exceed the model's context length.
        """
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer: pass tokenizer= to hw.load.")
        bos = self.bos if prepend_bos is None else self.resolve_bos(prepend_bos)
        texts = [] if has_no_order(input) else one_or_several(input)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InputError(f"{shown(input)} is neither a text nor a list of texts.")
        rows = [encode(self.tokenizer, text, bos)[0] for text in texts]
        return Batch.of([row[: self.shape.n_ctx] if truncate else row for row in rows], pad_id(self.tokenizer)).tokens

    def to_string(self, tokens: Any) -> str | list[str]:
        """Return the text of token ids; a list for several rows."""
        if self.tokenizer is None:
            raise InputError(f"{self.name} has no tokenizer: pass tokenizer= to hw.load.")
        rows = one_or_several(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
        if rows and not is_one(rows[0]):
            return [str(self.to_string(row)) for row in rows]
        self.token_strings(rows)
        return str(self.tokenizer.decode(rows, clean_up_tokenization_spaces=False))

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None) -> list[str] | list[list[str]]:
        """Return the text of each token of a text or of token ids; a list of lists for several texts."""
        if isinstance(input, str):
            return list(self.token_strings(self.to_tokens(input, prepend_bos, truncate=False)[0].tolist()))
        if not isinstance(input, Tensor) and not is_one(input) and any(isinstance(one, str) for one in input):
            return [list(map(str, self.to_str_tokens(one, prepend_bos))) for one in input]
        rows = one_or_several(input.tolist() if hasattr(input, "tolist") else input)
        if len(rows) == 1 and not is_one(rows[0]):
            rows = rows[0]
        return list(self.token_strings(rows))

    def to_single_token(self, text: str) -> int:
        """Return the id of a text that is a single token."""
        tokens = self.to_tokens(text, prepend_bos=False)[0].tolist()
        if len(tokens) != 1:
            pieces = " + ".join(repr(piece) for piece in self.token_strings(tokens))
            raise InputError(f"{shown(text)} is not a single token: {pieces}.")
        return int(tokens[0])

    def to_single_str_token(self, token: int) -> str:
        """Return the text of one token id."""
        try:
            return self.token_strings([whole_number(token)])[0]
        except TypeError:
            raise InputError(f"{shown(token)} is not a token id.") from None

    @cached_property
    def _source(self) -> WeightSource:
        return open_weights(self, dtype=self.dtype)

    @property
    def W_E(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding as the residual stream receives it (Gemma: times √d_model)."""
        return self._source.embedding().clone()

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding, without the final norm's gain."""
        return self._source.unembedding().clone()

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """The bias of the unembedding; zeros if there is none."""
        return self.raw.unembed.b_U.detach().clone()

    W_Q: Float[Tensor, "layer head d_model d_head"] = _factor("W_Q", "Normed residual stream to queries.")
    W_K: Float[Tensor, "layer head d_model d_head"] = _factor("W_K", "Normed residual stream to keys, by query head.")
    W_V: Float[Tensor, "layer head d_model d_head"] = _factor("W_V", "Normed residual stream to values, by query head.")
    W_O: Float[Tensor, "layer head d_head d_model"] = _factor("W_O", "A head's weighted values to its output.")
    b_Q: Float[Tensor, "layer head d_head"] = _factor("b_Q", "Bias of queries; zeros without one.")
    b_K: Float[Tensor, "layer head d_head"] = _factor("b_K", "Bias of keys, by query head; zeros without one.")
    b_V: Float[Tensor, "layer head d_head"] = _factor("b_V", "Bias of values, by query head; zeros without one.")
    b_O: Float[Tensor, "layer d_model"] = _factor("b_O", "Bias of the output of a layer's heads; zeros without one.")

    def _of_heads(self, name: str) -> Tensor:
        shape = self.shape
        size = (shape.d_model,) if name == "b_O" else (shape.n_heads, shape.d_head)
        layers = []
        for layer in range(shape.n_layers):
            weights = self._source.layer(layer)
            if (factor := getattr(weights, name)) is None:
                factor = weights.W_O.new_zeros(size)
            elif name[-1] in "KV":
                factor = weights.expand_kv(factor)
            layers.append(factor)
        return torch.stack(layers)

    def _given(self, input: Any, prepend_bos: bool | None) -> Batch:
        """Make a batch as TransformerLens does: every id of a tensor is a real token."""
        if isinstance(input, Tensor):
            batch = self.tokenize(input, mask=torch.ones(input.shape, dtype=torch.bool))
            pad = pad_id(self.tokenizer)
            begins = self.bos[:1] == (pad,)
            if batch.tokens.shape[1] > 1 and not begins and bool((batch.tokens[:, 0] == pad).any()):
                raise InputError(
                    "A row of the tokens begins with padding, which would shift its positions: give texts, lists of "
                    "token ids, or model.tokenize(tokens, mask=...)."
                )
            return batch
        texts = [] if prepend_bos is None or has_no_order(input) else one_or_several(input)
        if not texts or not all(isinstance(text, str) for text in texts):
            return self.tokenize(input)
        return self.tokenize([self.to_tokens(text, prepend_bos, truncate=False)[0].tolist() for text in texts])

    def _named(self, names: object) -> list[str]:
        known = self.raw.hook_dict
        if names is None or callable(names):
            with failures_named("The filter for names failed"):
                shown_names = [name for name in known if names is None or bool(names(name))]
            shown_names = [name for name in shown_names if self._is_shown(name)]
            if not shown_names:
                raise InputError("The filter is True for no hook; model.raw.hook_dict has the names.")
            return shown_names
        listed = [] if has_no_order(names) else one_or_several(names)
        if not listed or not all(isinstance(name, str) for name in listed):
            raise InputError(f"{shown(names)} names no hooks: give a name, a list of names, or a function of a name.")
        return listed

    def _is_shown(self, hook: str) -> bool:
        """Whether a hook fires and, if it belongs to a site, has the site's expected activation."""
        place, cfg = place_named(hook), self.raw.cfg
        if place is not None and (place[0].name, place[1]) in self.misfits:
            return False
        return not any(hook.endswith(ends) and not getattr(cfg, flag, False) for ends, flag in SWITCHED.items())

    def _by_place(self, names: Sequence[str]) -> list[list[str]]:
        """Group names of the same hook point, site names first, since their edits have carriers."""
        places: dict[Any, list[str]] = {}
        for name in sorted(names, key=lambda name: place_named(name) is None):
            # Aliases are one object in hook_dict, and a function passed for both would act twice.
            places.setdefault(id(self.raw.hook_dict.get(name, name)), []).append(name)
        return list(places.values())

    def _returned(
        self, batch: Batch, hooks: Sequence[Hook], return_type: str | None, per_token: bool, stop_at: int | None
    ) -> Any:
        """Run the model; return its logits, the loss of each token but the first (or the mean), or both.

        The loss is -ln p; per token it is NaN at padding.
        """
        if return_type is not None:
            checked_name("return_type", return_type, RETURNS)
        # Cloned outside the run's inference mode, for the same reason as activations above.
        out = self.run(batch, hooks, stop_at=stop_at).clone()
        if stop_at is not None or return_type == "logits":
            return out
        if return_type is None:
            return None
        tokens, real = batch.tokens.to(out.device), batch.mask[:, 1:].to(out.device)
        loss = -out[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        if per_token:
            loss = loss.masked_fill(~real, torch.nan)
        else:
            if not bool(real.any()):
                raise InputError("There is no loss of a single token: the first token of a text is not predicted.")
            loss = loss[real].mean()
        return (out, loss) if return_type == "both" else loss
