"""The transformers model inside a bridge without TransformerLens's wrappers, but for the layers with hooks.

A bridge puts wrappers and hook points around every module of the model that it wraps, which on one token costs up to
twice what the module itself does. `bare_model` rebuilds the model without them. What is put together shares
the parameters, the buffers and torch's hooks with the model, so that a change of these acts here too; its configs are
copies that ask for attention in one pass (`scaled_dot_product_attention`) where that is the same. Where a hook is to
act, the wrapper stays that it hangs in: that of a block alone, or of attention, MLP or norm with all within it. Where
that of attention stays, all of it is computed as the bridge does, which takes masks of one kind. What was put together
without a wrapper is kept with the model, for as long as each module and config in it holds the very same objects
(`headwater.models.fingerprint`).

It is given only where it computes what the bridge computes:

1. every module holds what it did when the model was loaded (`headwater.models.fingerprint`), nothing is hooked
   yet, and no norms were folded into weights;
2. the parameters that the bridge computes with are those of the transformers model, or hold the same numbers: of a
   fused matrix (GPT-NeoX) the bridge has parts of its own;
3. once for each model, and each choice of what stays: a few tokens have the same logits both ways.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.kernels.devices import to_device
from headwater.models.bridge_check import few_tokens, finite_output, same_but_for_rounding
from headwater.models.edits import Hook, points_of, read_hook
from headwater.models.families import family_named
from headwater.models.fingerprint import SameObjects, is_a, parameter_reader
from headwater.models.forward import DoneError, angles_by_row, last_logits_only, name_of_cache, padding_option, reached
from headwater.models.model import is_bridge, rotary_by_length
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch

if TYPE_CHECKING:
    from headwater.models.model import Model


SPLIT = re.compile(r"\.[qkv]\.(_original_component\.)?(weight|bias)$")
"""The parameters of a bridge that are parts of a fused matrix."""


class BareModel:
    """A transformers model put together of a bridge's modules, without its wrappers but for those with hook points.

    Attributes:
        model: the transformers model.
        kept: the wrappers that stay.
        firing: the modules, hook points among them, that the model still calls.
        rotary_by_length: what in it makes rotary embeddings that depend on a text's length.
        configs: the entries of the configs that were copied.
    """

    def __init__(self, raw: Any, attention: str, points: AbstractSet[int] = frozenset()):
        self.attention, self.kept, self.firing = attention, list[torch.nn.Module](), set[int]()
        self._made: dict[int, torch.nn.Module] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self.model = self._without_wrappers(raw.original_model, points)
        self.rotary_by_length = rotary_by_length(self.model)
        self.configs = SameObjects(vars(config) for config, _ in self._copies.values())
        # Attention that stays wrapped reads the cache by TransformerLens's name for it (`forward.reached`).
        whole = [wrapper for wrapper in self.kept if not is_a(wrapper, "BlockBridge")]
        self._attentions = [part for wrapper in whole for part in wrapper.modules() if is_a(part, "AttentionBridge")]
        self._last = last_logits_only(raw)

    def read(self, tokens: Int[Tensor, "row position"], **options: object) -> None:
        """Run tokens for what hooks see of it, without the head, whose matrix is the largest of a small model."""
        body: Any = self.model.base_model
        if body is self.model:
            self.last_logits(tokens, **options)
        else:
            body(tokens, use_cache=False, **options)

    def last_logits(
        self, tokens: Int[Tensor, "row position"], cache: Any = None, **options: object
    ) -> Float[Tensor, "row d_vocab"]:
        """Run tokens, which lie on the model's device, and return the logits at the last column.

        With a cache of the tokens before, the keys and values of these are added to it; `options` are passed on.
        """
        if cache is None:
            logits: Tensor = self.model(tokens, **self._last, use_cache=False, **options).logits
        else:
            name = str(name_of_cache(self.model))  # `cache_options` refuses models that have none
            with reached(self._attentions):
                logits = self.model(tokens, **self._last, **{name: cache}, use_cache=True, **options).logits
        return logits[:, -1]

    def in_place_of(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return what takes the place of a module, or of what a wrapper wraps."""
        while (inner := module._modules.get("_original_component")) is not None:
            module = inner
        return self._made[id(module)]

    def _without_wrappers(self, module: torch.nn.Module, points: AbstractSet[int]) -> torch.nn.Module:
        """Copy a module and those within it, not what they hold; a wrapper is replaced by what it wraps."""
        while (inner := module._modules.get("_original_component")) is not None:
            if points and any(id(part) in points for part in module.modules()):
                self.kept.append(module)
                break
            module = inner
        if inner is not None and not is_a(module, "BlockBridge"):  # all within it stays as the bridge computes it
            self.firing |= {id(part) for part in module.modules()}
            return module
        if id(module) not in self._made:
            # Without __init__, which would make parameters. Dictionaries of parameters and hooks are shared.
            twin = self._made[id(module)] = object.__new__(type(module))
            attributes = dict(vars(module))
            if inner is None and (config := attributes.get("config")) is not None:
                # A config is asked for its attention when the model runs.
                if id(config) not in self._copies:
                    self._copies[id(config)] = config, copy.copy(config)
                    self._copies[id(config)][1]._attn_implementation = self.attention
                attributes["config"] = self._copies[id(config)][1]
            # a block's wrapper calls what it wraps between two hook points of its own
            within = module._modules if inner is None else {"_original_component": inner}
            copies = {name: part and self._without_wrappers(part, points) for name, part in within.items()}
            attributes["_modules"] = module._modules | copies
            self.firing |= {id(part) for part in attributes["_modules"].values()}
            vars(twin).update(attributes)
        return self._made[id(module)]


def bare_model(model: Model, hooked: Iterable[str] = ()) -> BareModel | None:
    """Return the model inside a bridge without wrappers; None where it might compute something else.

    Hold the model's lock while it is used: it is what it is only as long as the model stays as it is. `hooked` are the
    activations at which hooks will be attached and must fire.
    """
    raw, names = model.raw, {point for name in hooked for point in points_of(name)}
    if not is_bridge(raw) or model.spread or getattr(raw, "compatibility_mode", False):
        return None
    if (modules := model.as_loaded()) is None:
        return None
    hook_dict = raw.hook_dict if names else {}
    if not all(name in hook_dict for name in names):
        return None
    attention = "sdpa" if is_the_same_in_one_pass(model) else "eager"
    bare, made_of, shares_weights = model.without_wrappers or (None, None, False)
    if bare is None or made_of is not modules or bare.attention != attention or not bare.configs.are_there():
        bare = BareModel(raw, attention)
        own = set(map(id, bare.model.parameters()))
        shares_weights = all(id(parameter) in own for parameter in raw.parameters())
        model.without_wrappers = bare, modules, shares_weights
    if not shares_weights and not _holds_the_same_weights(model, bare.model):
        return None
    if points := {id(hook_dict[name]) for name in names}:
        bare = BareModel(raw, attention, points)
        # a wrapper of attention that stays takes masks of one kind
        masked = [one for one in bare.kept if not is_a(one, "BlockBridge", "MLPBridge", "NormalizationBridge")]
        if masked and attention != "eager":
            bare = BareModel(raw, "eager", points)
    if not points <= bare.firing:
        return None
    # Ids are safe as keys: the model holds its wrappers for as long as it lives.
    wrappers = frozenset(map(id, bare.kept))
    if wrappers not in model.unwrapped_checked:
        tokens = few_tokens(model.shape.d_vocab, model.shape.n_ctx, model.device)
        with torch.inference_mode():
            expected = model.run(tokens, keep="last")[:, -1]
            model.unwrapped_checked[wrappers] = same_but_for_rounding(expected, bare.last_logits(tokens))
    return bare if model.unwrapped_checked[wrappers] else None


def _holds_the_same_weights(model: Model, bare: torch.nn.Module) -> bool:
    """Whether all that the bridge computes with is in the transformers model too."""
    # By storage: what a bridge splits is a view of the fused matrix in GPT-2, and a copy of its parts in GPT-NeoX.
    memory = {parameter.untyped_storage().data_ptr() for parameter in bare.parameters()}
    unshared = [name for name, p in model.raw.named_parameters() if p.untyped_storage().data_ptr() not in memory]
    if not unshared:
        return True
    family = family_named(model.shape.architecture)
    if family is None or family.fused is None or not all(SPLIT.search(name) for name in unshared):
        return False
    parts = parameter_reader(model.raw, family, model.shape)
    prefix, fused = f"{bare.base_model_prefix}.", f".{family.fused.name}."  # type: ignore[operator]
    named: Mapping[str, Tensor] = {name.removeprefix(prefix): p for name, p in bare.named_parameters()}
    return all(torch.equal(parts(name), parameter) for name, parameter in named.items() if fused in name)


def is_the_same_in_one_pass(model: Model) -> bool:
    """Whether attention in one pass is what the architecture computes, with nothing between its steps."""
    inner, family = model.raw.original_model, family_named(model.shape.architecture)
    if family is None or not getattr(inner, "_supports_sdpa", False):
        return False
    return not any(getattr(inner.config, option, None) for option in family.not_in_one_pass)


# The residual stream after layers of a model that nobody edits, for results that are compared with no other run.
#
# The model runs without TransformerLens's wrappers (`BareModel`, above) and no further than the last layer that is
# read: what a block returns is the residual stream after it. Where that might be something else, the bridge runs.
#
# Both are the run of the model to the rounding of its dtype. A sweep or a knockout, whose runs are compared with one
# another, takes neither.


@torch.inference_mode()
def residual_streams(
    model: Model, batch: Batch, layers: Sequence[int], take: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Run a batch and return what is taken of the residual stream `batch position d_model` after each of these layers.

    It must be a copy: the stream is read while the model runs.
    """
    residuals: dict[int, Tensor] = {}
    last: list[Tensor] = []

    def keep(residual: Tensor, hook: object, layer: int) -> None:
        residuals[layer] = take(residual)

    def look(block: object, args: object, out: Tensor | tuple[Tensor, ...], layer: int) -> None:
        residual = out[0] if isinstance(out, tuple) else out
        keep(residual, block, layer)
        if layer == max(layers):
            last.append(residual)
            raise DoneError

    with model.lock:
        if (bare := bare_model(model)) is None:
            hooks: list[Hook] = [(hook_name("resid_post", one), read_hook(partial(keep, layer=one))) for one in layers]
            model.run(batch, hooks, stop_at=max(layers) + 1)
            return residuals
        with contextlib.suppress(DoneError), contextlib.ExitStack() as stack:
            for layer in layers:
                block = bare.in_place_of(model.raw.blocks[layer])
                stack.callback(block.register_forward_hook(partial(look, layer=layer)).remove)
            stack.enter_context(angles_by_row(bare.rotary_by_length, batch.lengths))
            bare.read(to_device(batch.tokens, model.device), **padding_option(model, batch))
        finite_output(model, last[0], batch, None)
    return residuals
