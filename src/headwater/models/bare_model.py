"""The transformers model inside a bridge, without TransformerLens's wrappers except around layers with hooks.

On one token, a bridge's wrappers and hook points cost up to twice as much as the modules themselves. `bare_model`
rebuilds the model without them. The rebuilt model shares the parameters, buffers and torch hooks of the original. Its
configs are copies that request attention in one pass (`scaled_dot_product_attention`) where the result is the same.
Where a hook must act, its wrapper stays: the wrapper of a block alone, or of attention, MLP or norm with everything
inside it. Attention that keeps its wrapper is computed by the bridge, which accepts only the masks of eager attention.

`bare_model` returns a rebuild only where it computes what the bridge computes:

1. every module holds the same objects as when the model was loaded (`headwater.models.fingerprint`), there are no
   hooks yet, and no norms were folded into weights;
2. the bridge computes with the parameters of the transformers model, or with copies that hold the same numbers: the
   bridge keeps the parts of a fused matrix (GPT-NeoX) separately;
3. a few tokens give the same logits both ways. This is checked once per model and per set of remaining wrappers.
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
from headwater.models.bridge_check import few_tokens, same_but_for_rounding
from headwater.models.edits import Hook, points_of, read_hook
from headwater.models.families import known_family
from headwater.models.fingerprint import SameObjects, is_a, parameter_reader
from headwater.models.forward import (
    DoneError,
    finite_output,
    last_logits_only,
    name_of_cache,
    padding_option,
    reached,
)
from headwater.models.model import is_bridge
from headwater.models.sites import hook_name
from headwater.models.tokens import Batch

if TYPE_CHECKING:
    from headwater.models.model import Model


SPLIT = re.compile(r"\.[qkv]\.(_original_component\.)?(weight|bias)$")
"""Matches the names of a bridge's parameters that are parts of a fused matrix."""


class BareModel:
    """A transformers model assembled from a bridge's modules, without the wrappers that no requested hook needs.

    Attributes:
        model: the transformers model.
        kept: the wrappers that stay.
        firing: ids of the modules, including hook points, that the model still calls.
        configs: the entries of the configs that were copied.
    """

    def __init__(self, raw: Any, attention: str, points: AbstractSet[int] = frozenset()):
        self.attention, self.kept, self.firing = attention, list[torch.nn.Module](), set[int]()
        self._made: dict[int, torch.nn.Module] = {}
        self._copies: dict[int, tuple[Any, Any]] = {}
        self.model = self._without_wrappers(raw.original_model, points)
        self.configs = SameObjects(vars(config) for config, _ in self._copies.values())
        # Attention that stays wrapped looks up the cache under TransformerLens's name for it (`forward.reached`).
        whole = [wrapper for wrapper in self.kept if not is_a(wrapper, "BlockBridge")]
        self._attentions = [part for wrapper in whole for part in wrapper.modules() if is_a(part, "AttentionBridge")]
        self._last = last_logits_only(raw)

    def read(self, tokens: Int[Tensor, "row position"], **options: object) -> None:
        """Run tokens for the hooks only, without the head: its matrix is the largest of a small model."""
        body: Any = self.model.base_model
        if body is self.model:
            self.last_logits(tokens, **options)
        else:
            body(tokens, use_cache=False, **options)

    def last_logits(
        self, tokens: Int[Tensor, "row position"], cache: Any = None, **options: object
    ) -> Float[Tensor, "row d_vocab"]:
        """Run tokens that are on the model's device and return the logits at the last column.

        A cache of the preceding tokens is extended by the keys and values of `tokens`; `options` go to the model.
        """
        if cache is None:
            logits: Tensor = self.model(tokens, **self._last, use_cache=False, **options).logits
        else:
            name = str(name_of_cache(self.model))  # `cache_options` refuses models without a cache
            with reached(self._attentions):
                logits = self.model(tokens, **self._last, **{name: cache}, use_cache=True, **options).logits
        return logits[:, -1]

    def in_place_of(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the replacement of a module, or of the module inside a wrapper."""
        while (inner := module._modules.get("_original_component")) is not None:
            module = inner
        return self._made[id(module)]

    def _without_wrappers(self, module: torch.nn.Module, points: AbstractSet[int]) -> torch.nn.Module:
        """Copy a module and its submodules but not their contents, and replace each wrapper by the module it wraps."""
        while (inner := module._modules.get("_original_component")) is not None:
            if points and any(id(part) in points for part in module.modules()):
                self.kept.append(module)
                break
            module = inner
        if inner is not None and not is_a(module, "BlockBridge"):  # the bridge computes everything inside it
            self.firing |= {id(part) for part in module.modules()}
            return module
        if id(module) not in self._made:
            # Without __init__, which would make parameters. Dictionaries of parameters and hooks are shared.
            twin = self._made[id(module)] = object.__new__(type(module))
            attributes = dict(vars(module))
            if inner is None and (config := attributes.get("config")) is not None:
                # The model looks up the attention implementation in its config at every run.
                if id(config) not in self._copies:
                    self._copies[id(config)] = config, copy.copy(config)
                    self._copies[id(config)][1]._attn_implementation = self.attention
                attributes["config"] = self._copies[id(config)][1]
            # the wrapper of a block has its own hook points, before and after the block it wraps
            within = module._modules if inner is None else {"_original_component": inner}
            copies = {name: part and self._without_wrappers(part, points) for name, part in within.items()}
            attributes["_modules"] = module._modules | copies
            self.firing |= {id(part) for part in attributes["_modules"].values()}
            vars(twin).update(attributes)
        return self._made[id(module)]


def bare_model(model: Model, hooked: Iterable[str] = ()) -> BareModel | None:
    """Return the model inside a bridge without wrappers; None where it might compute something else.

    Hold the model's lock while using the result: it is valid only while the model does not change. `hooked` are the
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
        # a remaining wrapper of attention accepts only the masks of eager attention
        masked = [one for one in bare.kept if not is_a(one, "BlockBridge", "MLPBridge", "NormalizationBridge")]
        if masked and attention != "eager":
            bare = BareModel(raw, "eager", points)
    if not points <= bare.firing:
        return None
    # Ids are safe as keys: the wrappers live as long as the model.
    wrappers = frozenset(map(id, bare.kept))
    if wrappers not in model.unwrapped_checked:
        tokens = few_tokens(model.shape.d_vocab, model.shape.n_ctx, model.device)
        with torch.inference_mode():
            expected = model.run(tokens, keep="last")[:, -1]
            model.unwrapped_checked[wrappers] = same_but_for_rounding(expected, bare.last_logits(tokens))
    return bare if model.unwrapped_checked[wrappers] else None


def _holds_the_same_weights(model: Model, bare: torch.nn.Module) -> bool:
    """Return whether every parameter of the bridge has its numbers in the transformers model too."""
    # Compared by storage: the parts of a fused matrix are views of it in GPT-2, and copies in GPT-NeoX.
    memory = {parameter.untyped_storage().data_ptr() for parameter in bare.parameters()}
    unshared = [name for name, p in model.raw.named_parameters() if p.untyped_storage().data_ptr() not in memory]
    if not unshared:
        return True
    family = known_family(model.config)
    if family is None or family.fused is None or not all(SPLIT.search(name) for name in unshared):
        return False
    parts = parameter_reader(model.raw, family, model.shape)
    prefix, fused = f"{bare.base_model_prefix}.", f".{family.fused.name}."  # type: ignore[operator]
    named: Mapping[str, Tensor] = {name.removeprefix(prefix): p for name, p in bare.named_parameters()}
    return all(torch.equal(parts(name), parameter) for name, parameter in named.items() if fused in name)


def is_the_same_in_one_pass(model: Model) -> bool:
    """Return whether attention in one pass computes the same as the architecture, with nothing between its steps."""
    inner, family = model.raw.original_model, known_family(model.config)
    if family is None or not getattr(inner, "_supports_sdpa", False):
        return False
    return not any(getattr(inner.config, option, None) for option in family.not_in_one_pass)


# The residual stream after given layers of an unedited model, for results that are not compared with another run.
#
# The model runs without TransformerLens's wrappers and stops after the last layer needed. It agrees with the bridge up
# to rounding; a sweep or a knockout does not use it, because it compares its runs with one another.


@torch.inference_mode()
def residual_streams(
    model: Model, batch: Batch, layers: Sequence[int], take: Callable[[Tensor], Tensor]
) -> dict[int, Tensor]:
    """Run a batch and return `take` of the residual stream `batch position d_model` after each of the layers.

    `take` must return a copy, because it is called while the model still runs.
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
            bare.read(to_device(batch.tokens, model.device), **padding_option(model, batch))
        finite_output(model, last[0], batch, None)
    return residuals
