"""Whether a model behind hooks computes what the model it wraps does, and its activations are what their names say.

Seen once, at load:

1. Before TransformerLens takes a model apart, five tokens go through it, and what each module takes and gives is kept.
2. Afterwards the same tokens go through the bridge. Its logits must be those of step 1 but for rounding; where they are
   not, the first module is named that gives something else for the same input. A forward method of one's own, or an
   option of the config that TransformerLens does not know, is such a case.
3. On the way every site is watched, layer by layer: what passes must have the size that `model.shape` says. Multi-head
   latent attention has heads of other sizes, a mixture of experts no row of neurons, a recurrent layer no attention.
4. What passed must add up: resid_pre + attn_out = resid_mid, resid_mid + mlp_out = resid_post, in parallel blocks
   resid_pre + attn_out + mlp_out = resid_post. In some models attention is scaled before it is added, or something else
   is added beside it; and resid_mid can be edited only where it is the sum of what carries the edit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import ModelError
from headwater.models.sites import SITES, STATES, Site

if TYPE_CHECKING:
    from headwater.models.model import Model
    from headwater.models.shape import ModelShape

Calls: TypeAlias = dict[str, tuple[Tensor, Tensor]]
"""By module: the first tensor it takes and the first it gives."""
N_TOKENS = 5
"""Not a usual number of heads, so that the axes of a site are told apart."""
DEPTH = 4
"""Modules nested deeper than this, such as experts, are not watched."""
LEAST = 1e-2
"""Numbers that are all smaller than this are compared as if the largest were this."""
WRAPPED = "._original_component"
FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError)


@dataclass(frozen=True)
class Seen:
    """What one run of the wrapped model gave."""

    tokens: Int[Tensor, "1 position"]
    logits: Float[Tensor, "1 position d_vocab"]
    calls: Calls


def see(hf: Any, name: str) -> Seen:
    """Run a few tokens through a transformers model that is still whole.

    Raises:
        ModelError: it cannot be run on tokens, or gives no logits.
    """
    config = hf.config.get_text_config(decoder=True)
    n_ctx = getattr(config, "max_position_embeddings", None) or N_TOKENS
    tokens = few_tokens(config.vocab_size, n_ctx, next(iter(hf.parameters())).device)
    with watched(hf) as calls:
        try:
            with torch.no_grad():
                logits = hf(tokens).logits
        except FAULTS as error:
            raise ModelError(f"{name} gives no logits for token ids alone: {error}") from None
    return Seen(tokens, logits, calls)


def few_tokens(d_vocab: int, n_ctx: int, device: torch.device) -> Int[Tensor, "1 position"]:
    """Return some ids from the middle of the vocabulary, where no special ones are."""
    n = min(N_TOKENS, n_ctx)
    return ((torch.arange(n) + 1) * d_vocab // (n + 2))[None].to(device)


@contextmanager
def watched(hf: Any) -> Iterator[Calls]:
    """Keep what the modules of a transformers model take and give, by name, in the order in which they end."""
    calls: Calls = {}

    def note(module: object, args: Any, options: Any, out: Any, name: str) -> None:
        taken, given = _first([*args, *options.values()]), _first(out)
        if taken is not None and given is not None and name not in calls:
            calls[name] = taken.detach().clone(), given.detach().clone()

    modules = {name.replace(WRAPPED, ""): module for name, module in reversed(list(hf.named_modules()))}
    with ExitStack() as stack:
        for name, module in modules.items():  # of a module and what wraps it, the wrapper
            if name and name.count(".") <= DEPTH:
                handle = module.register_forward_hook(partial(note, name=name), with_kwargs=True)
                stack.callback(handle.remove)
        yield calls


def agree(model: Model, seen: Seen | None) -> None:
    """Run the same tokens through the bridge; note which sites can be used, and compare the logits.

    Args:
        model: the model, whose `misfits` and `read_only` are filled.
        seen: what the wrapped model gave; None where there is none.

    Raises:
        ModelError: the model cannot be run, or gives other logits than the model it wraps.
    """
    bridge = hasattr(model.raw, "original_model")
    tokens = few_tokens(model.shape.d_vocab, model.shape.n_ctx, model.device) if seen is None else seen.tokens
    experts = {layer for layer, block in enumerate(getattr(model.raw, "blocks", ())) if _has_experts(block)}
    sites = Sites(model.shape, tokens.shape[1], experts)
    known = model.raw.hook_dict  # put together anew whenever it is asked for
    hooks = [hook for hook in sites.hooks() if hook[0] in known]
    with watched(model.raw.original_model if seen else torch.nn.Module()) as calls:
        try:
            with model.lock, torch.no_grad(), model.raw.hooks(fwd_hooks=hooks):
                logits = model.raw(tokens, **({"use_cache": False} if bridge else {}))
        except FAULTS as error:
            raise ModelError(f"{model.name} cannot be run by TransformerLens: {error}") from None
    sites.judge()
    model.misfits, model.read_only = sites.misfits, sites.read_only
    if seen is not None and not same_but_for_rounding(seen.logits, logits):
        difference = float((seen.logits - logits).abs().max())
        raise ModelError(
            f"TransformerLens computes other logits than {model.name} itself, by up to {difference:.2g}: "
            f"{_first_difference(model, seen.calls, calls)} Load the model without what is special there."
        )


def _first_difference(model: Model, whole: Calls, bridged: Calls) -> str:
    """Say which module gives something else for the same input."""
    for name, (taken, given) in whole.items():
        if (
            name in bridged
            and same_but_for_rounding(taken, bridged[name][0])
            and not same_but_for_rounding(given, bridged[name][1])
        ):
            return f"the first module that differs is {name}."
    return "no single module gives something else for the same input."


def _has_experts(block: Any) -> bool:
    """Whether a block's MLP is a mixture of experts."""
    mlp = getattr(block, "mlp", None)
    modules = mlp.named_modules() if isinstance(mlp, torch.nn.Module) else ()
    return any("expert" in f"{name} {type(module).__name__}".lower() for name, module in modules)


class Sites:
    """Looks at what passes through the sites of a run of one row.

    Attributes:
        misfits: by site and layer, why there is none, or one that is not what its name says.
        read_only: by site and layer, why it can be read but not edited.
    """

    def __init__(self, shape: ModelShape, n_tokens: int, experts: Collection[int] = ()):
        self.misfits: dict[tuple[str, int], str] = {}
        self.read_only: dict[tuple[str, int], str] = {}
        self._shape, self._n_tokens, self._experts = shape, n_tokens, experts
        self._passed: dict[tuple[str, int], Tensor] = {}

    def hooks(self) -> list[tuple[str, object]]:
        """Return a hook for every site of every layer."""
        return [
            (site.hook_name(layer), partial(self._look, site=site, layer=layer))
            for site in SITES.values()
            for layer in range(self._shape.n_layers)
        ]

    def _look(self, activation: Any, hook: object, site: Site, layer: int) -> None:
        found = tuple(activation.shape) if isinstance(activation, Tensor) else type(activation).__name__
        wanted = (1, *site.size(self._shape, self._n_tokens))
        if "d_mlp" in site.axes and layer in self._experts:
            self._misfits(site, layer, "its MLP is a mixture of experts and has no single row of neurons. Use mlp_out.")
        elif found != wanted:
            said = f"{site.hook_name(layer)} holds {found} for {self._n_tokens} tokens"
            self._misfits(site, layer, f"{said}, where the sizes of this model make it {wanted}.")
        else:
            self._passed[site.name, layer] = activation.clone() if site.name in STATES else activation

    def judge(self) -> None:
        """Say, after the run, what did not pass and what does not add up."""
        for site in SITES.values():
            if site.absent(self._shape) is None:
                for layer in range(self._shape.n_layers):
                    if (site.name, layer) not in {*self._passed, *self.misfits}:
                        self._misfits(site, layer, f"nothing passes through {site.hook_name(layer)}.")
        for layer in range(self._shape.n_layers):
            self._add_up(layer)

    def _add_up(self, layer: int) -> None:
        before, middle, after, attended, added = (self._passed.get((name, layer)) for name in STATES)
        if SITES["resid_mid"].absent(self._shape) is not None:
            writing = ("attn_out", "mlp_out") if self._shape.d_mlp else ("attn_out",)
            written = [self._passed.get((name, layer)) for name in writing]
            if all(one is not None for one in written) and not _is_sum(after, before, *written):
                for name in writing:
                    self._misfits(SITES[name], layer, "it is not all that is added between resid_pre and resid_post.")
        elif middle is not None and not _is_sum(middle, before, attended):
            site = SITES["resid_mid"]
            if not _is_sum(after, middle, added):
                self._misfits(site, layer, "it is neither resid_pre + attn_out nor what mlp_out is added to.")
                return
            self.read_only[site.name, layer] = (
                f"{site.name} of {self._shape.architecture} can be read but not edited in layer {layer}: it is not the "
                "sum of resid_pre and attn_out, by way of which an edit would be made."
            )
            if attended is not None:
                self._misfits(SITES["attn_out"], layer, "it is not what is added to resid_pre, or not all of it.")

    def _misfits(self, site: Site, layer: int, why: str) -> None:
        self.misfits[site.name, layer] = (
            f"{site.name} of {self._shape.architecture} cannot be used in layer {layer}: {why}"
        )


def _is_sum(whole: Tensor | None, *parts: Tensor | None) -> bool:
    """Whether a tensor is the sum of others, number by number, to the rounding of its dtype."""
    if whole is None or any(part is None for part in parts):
        return False
    wide = torch.promote_types(whole.dtype, torch.float32)
    every = torch.stack([whole, *(-part.to(whole) for part in parts if part is not None)]).to(wide)
    rounding = 8 * torch.finfo(whole.dtype).eps * every.abs().sum(0)
    return bool((every.sum(0).abs() <= rounding).logical_or(~whole.isfinite()).all())


def same_but_for_rounding(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same but for rounding; what is NaN or infinite in one must be so in the other."""
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    here, there = (x.detach().float().nan_to_num(posinf=0, neginf=0) for x in (one, other.to(one.device)))
    tolerance = torch.finfo(one.dtype).eps ** 0.5 * max(float(here.abs().max()), LEAST)
    return float((here - there).abs().max()) <= tolerance


def _first(values: object) -> Tensor | None:
    """The first tensor among values, which may be one itself."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    found = (value for value in values if isinstance(value, Tensor)) if isinstance(values, list | tuple) else ()
    return next(iter(found), None)
