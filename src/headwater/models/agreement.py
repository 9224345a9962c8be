"""Whether a model behind hooks computes what the model it wraps does, and its activations are what their names say.

Seen once, at load:

1. Before TransformerLens takes a model apart, five tokens go through it, and what each module takes and gives is kept.
2. Afterwards the same tokens go through the bridge. Its logits must be those of step 1 but for rounding; where they are
   not, the first module is named that gives something else for the same input. A forward method of one's own, or an
   option of the config that TransformerLens does not know, is such a case.
3. On the way every site is watched: what passes must have the size that `model.shape` says, and where edits have a
   carrier, what the carrier gives must be what passes. Multi-head latent attention has heads of other sizes, and in
   some models attention is scaled before it is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import ModelError
from headwater.models.sites import SITES, Site

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
    sites = Sites(model.shape, tokens.shape[1])
    known = model.raw.hook_dict  # put together anew whenever it is asked for
    hooks = [hook for hook in sites.hooks() if hook[0] in known]
    with watched(model.raw.original_model if seen else torch.nn.Module()) as calls:
        try:
            with model.lock, torch.no_grad(), model.raw.hooks(fwd_hooks=hooks):
                logits = model.raw(tokens, **({"use_cache": False} if bridge else {}))
        except FAULTS as error:
            raise ModelError(f"{model.name} cannot be run by TransformerLens: {error}") from None
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


class Sites:
    """Looks at what passes through the sites of a run of one row.

    Attributes:
        misfits: by site, how its activations are not of the size that the model's shape says.
        read_only: by site, why it can be read but not edited.
    """

    def __init__(self, shape: ModelShape, n_tokens: int):
        self.misfits: dict[str, str] = {}
        self.read_only: dict[str, str] = {}
        self._shape, self._n_tokens = shape, n_tokens
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
        if found != wanted:
            self.misfits.setdefault(
                site.name,
                f"{site.name} of {self._shape.architecture} cannot be used: {site.hook_name(layer)} holds {found} for "
                f"{self._n_tokens} tokens, where the sizes of this model make it {wanted}.",
            )
            return
        self._passed[site.name, layer] = activation
        if site.carrier is None:
            return
        parts = [self._passed.pop((name, layer), None) for name in (site.carrier.at, site.carrier.given)]
        if any(part is None for part in parts) or not same_but_for_rounding(activation, site.carrier.get(*parts)):  # type: ignore[arg-type]
            self.read_only.setdefault(
                site.name,
                f"{site.name} of {self._shape.architecture} can be read but not edited: it is not the sum of "
                f"{site.carrier.given} and {site.carrier.at}, by way of which an edit would be made.",
            )


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
