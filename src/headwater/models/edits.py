"""How hooks read activations and edit runs: the same rules for hooks, sweeps, knockouts and generation.

1. Each hook receives its own copy, so nothing that happens later changes what it keeps. The tensor that it returns,
   such as the copy modified in place, is the edit; modifying the copy and returning None is an error.
2. Hooks at one activation act in the order in which they were attached; each receives what the previous hook returned.
3. If a site has a carrier (`headwater.models.sites`), hooks at the site act on the activation computed from the
   carrier, after all hooks at the carrying activation, which receive what the model computed.
4. An activation that a hook returns must have the shape, dtype and device of the one it received.

Hooks of this package that neither keep nor modify their input are marked (`read_hook`, `replace_hook`) and receive the
activation itself, so that hooks on a whole model cost no copies.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from jaxtyping import Int
from torch import Tensor

from headwater.errors import InputError, InterventionError
from headwater.foreign_names import hint_for
from headwater.kernels.devices import to_device
from headwater.models.forward import Reading, now_reading
from headwater.models.sites import SITES, EditVia, Site, place_named
from headwater.options import shown

if TYPE_CHECKING:
    from headwater.models.families import ModelShape
    from headwater.models.tokens import Batch

HookFunction: TypeAlias = Callable[..., Tensor | None]
"""Takes (activation, hook); returns the replacement, or None. The activation is a copy and may be modified in place."""
Hook: TypeAlias = tuple[str, HookFunction]
"""The name of an activation, such as "blocks.3.hook_resid_post", and the function to call there."""
REPORT = "_fire_post_hoc_hook"
"""The method with which a TransformerBridge's attention reports an activation whose edits it ignores."""


@dataclass(frozen=True)
class TrustedHook:
    """A hook that receives the activation itself, and whose result is used without a check."""

    function: HookFunction
    edits: bool
    may_be_silent: bool = False

    def __call__(self, activation: Any, hook: object) -> Tensor | None:
        """Call the function."""
        return self.function(activation, hook=hook)


class PromptHook(ABC):
    """A hook that is built once the prompts of a run are known, because its positions or values depend on them."""

    @abstractmethod
    def hook_for(self, model: Any, batch: Batch | None, new: Reading | None = None) -> Hook:
        """Return the hook for these prompts (None: for any input), at an activation that does not depend on them.

        With `new`, the hook is for these tokens, which follow the prompts.
        """

    def over(self, model: Any, prompts: Batch) -> PromptHook:
        """Return the hook for all prompts of a call that runs them in parts: rows are named by their index in these."""
        return self


def hooks_for(
    model: Any, listed: Sequence[Hook | PromptHook], batch: Batch | None, new: Reading | None = None
) -> list[Hook]:
    """Return the hooks from `listed_hooks`, with each `PromptHook` built for a batch; arguments as in `hook_for`."""
    return [hook.hook_for(model, batch, new) if isinstance(hook, PromptHook) else hook for hook in listed]


def hooks_over(model: Any, listed: Sequence[Hook | PromptHook], prompts: Batch) -> list[Hook | PromptHook]:
    """Return the hooks from `listed_hooks`, with each `PromptHook` built for all prompts of a call; see `over`."""
    return [hook.over(model, prompts) if isinstance(hook, PromptHook) else hook for hook in listed]


def read_hook(function: HookFunction, may_be_silent: bool = False) -> TrustedHook:
    """Mark a read-only hook, which keeps nothing that shares memory with the activation unless it is used at once.

    It receives the activation as the model uses it: after every carried edit. With `may_be_silent`, a run that never
    reaches the hook is not an error.
    """
    return TrustedHook(function, edits=False, may_be_silent=may_be_silent)


def replace_hook(function: HookFunction) -> TrustedHook:
    """Mark a hook that returns a new tensor and does not modify its input."""
    return TrustedHook(function, edits=True)


def keeping(
    names: Iterable[str], kept: dict[str, Tensor], take: Callable[[Tensor], Tensor] = torch.clone
) -> list[Hook]:
    """Return hooks that store what `take` returns for each named activation in `kept`, by name.

    `take` must return a copy, unless nothing writes into the activation later.
    """

    def keep(activation: Tensor, hook: object, name: str) -> None:
        kept[name] = take(activation)

    return [(name, read_hook(partial(keep, name=name))) for name in dict.fromkeys(names)]


def at_tokens(rows: Int[Tensor, " token"], columns: Int[Tensor, " token"]) -> Callable[[Tensor], Tensor]:
    """Return a function that copies the states at some tokens of a batch: `batch position ...` to `token ...`."""
    return lambda activation: activation[to_device(rows, activation.device), to_device(columns, activation.device)]


begin_graph = replace_hook(lambda activation, hook: activation.detach().clone().requires_grad_(True))
"""A hook at which the graph of a run with gradients begins."""


def forking(names: Iterable[str], kept: dict[str, Tensor]) -> list[Hook]:
    """Return hooks that store a view of each named activation in `kept`, with which the run continues.

    A gradient there omits whatever else uses the same tensor (Gemma 4's later layers also read the embedding). Hooks of
    q, k, v and z get a reshaped view from which nothing later is computed, so the view must be returned.
    """

    def fork(activation: Tensor, hook: object, name: str) -> Tensor:
        kept[name] = activation.view_as(activation)
        return kept[name]

    return [(name, replace_hook(partial(fork, name=name))) for name in dict.fromkeys(names)]


def listed_hooks(hooks: Any) -> list[Any]:
    """Return hooks as a list, after checking each; a single one needs no list."""
    is_one_hook = isinstance(hooks, tuple) and hooks and isinstance(hooks[0], str)
    listed = [hooks] if is_one_hook or not isinstance(hooks, Iterable) else list(hooks)
    for hook in listed:
        is_pair = isinstance(hook, tuple | list) and len(hook) == 2
        if not isinstance(hook, PromptHook) and not (is_pair and isinstance(hook[0], str) and callable(hook[1])):
            raise InputError(
                f"{shown(hook)} is not a hook: give [hw.edit(site, layer, value)] or "
                "[(activation's name, function(activation, hook))]."
            )
    return listed


@dataclass(eq=False)
class Attached:
    """An attached hook."""

    name: str
    function: HookFunction
    site: Site | None = None
    """The site of the activation, which must hold all texts and tokens of the run."""
    read_only: str | None = None
    """Why the activation can only be read; None if it can be edited."""
    fired: bool = False

    @property
    def only_reads(self) -> bool:
        """Whether the hook is marked as one that edits nothing."""
        return isinstance(self.function, TrustedHook) and not self.function.edits

    def act(self, activation: Any, point: Any) -> Tensor | None:
        """Call the hook; return the activation with which the model continues, or None if it is unchanged."""
        self.fired = True
        if self.site is not None and (reading := now_reading()) is not None:
            size = activation.shape[0], activation.shape[1 + self.site.axes.index("position")]
            read = tuple(reading.positions.shape)
            if size != read:
                raise InterventionError(
                    f"{self.name} holds {size[0]} texts of {size[1]} tokens in a run of {read[0]} texts of {read[1]}: "
                    "the model does not compute it for every token here. Use another site or layer."
                )
        if isinstance(self.function, TrustedHook) or not isinstance(activation, Tensor):
            result = self.function(activation, hook=point)
            if result is not None and not isinstance(activation, Tensor):
                raise InterventionError(f"{self.name} is a {type(activation).__name__} and can only be read.")
            if self.read_only and result is not None and result is not activation:
                raise InterventionError(self.read_only)
            return result
        copy = activation.clone()
        result = self.function(copy, hook=point)
        if result is None:
            if not _same(copy, activation):
                raise InterventionError(
                    f"A hook at {self.name} wrote into the activation and returned None. It received a copy, so "
                    "nothing would change: return the activation."
                )
            return copy.clone() if copy.requires_grad else None  # so that a gradient at the copy can be requested
        if self.read_only:
            raise InterventionError(self.read_only)
        returned = _described(result) if isinstance(result, Tensor) else f"a {type(result).__name__}"
        if returned != _described(activation):
            raise InterventionError(
                f"A hook at {self.name} was given {_described(activation)} and returned {returned}; it must return an "
                "activation like the one it was given, or None."
            )
        # The hook may keep the tensor it returned, and modify it in its next call.
        return result.clone()


def refuse_silent(attached: Sequence[Attached]) -> None:
    """Refuse hooks that did not fire in a run of the model."""
    silent = [hook for hook in attached if not hook.fired]
    dead = {one.name for one in silent if not (isinstance(one.function, TrustedHook) and one.function.may_be_silent)}
    if dead:
        raise InterventionError(
            f"The model ran, but nothing passed through {', '.join(sorted(dead)[:3])}: this activation is not computed "
            "on this architecture or in this run, so the hook had no effect."
        )


def _carried(hook: Attached, carrier: EditVia, point: Any) -> tuple[Callable[..., None], HookFunction]:
    """Return the functions to call at `given` and at the carrier of a hook whose edit is carried."""
    given: list[Tensor] = []

    def take(activation: Tensor, _: object) -> None:
        given[:] = [activation]

    def act(activation: Tensor, _: object) -> Tensor | None:
        before = given.pop()  # a block computes what its carriers are given before the carrier
        edited = hook.act(carrier.get(activation, before), point)
        return None if edited is None else carrier.put(edited, before)

    return take, act


@dataclass(eq=False, repr=False)
class _Place:
    """The hooks at one hook point. `repr=False` because TransformerLens formats the repr of each hook it attaches."""

    hooks: list[Attached] = field(default_factory=list)
    carrying: list[HookFunction] = field(default_factory=list)

    def __call__(self, activation: Any, hook: Any) -> Tensor | None:
        """Call the hooks one after the other; return the result of the last edit, or None without edits."""
        edited: Tensor | None = None
        for act in (*(each.act for each in self.hooks), *self.carrying):
            result = act(activation if edited is None else edited, hook)
            edited = edited if result is None else result
        return edited


def points_of(name: str) -> list[str]:
    """Return the hook points at which hooks of an activation may act, including those of its carrier, if any."""
    place = place_named(name)
    if place is None or place[0].carrier is None:
        return [name]
    carrier, layer = place[0].carrier, place[1]
    return [name, *(SITES[other].hook_name(layer) for other in (carrier.given, carrier.at))]


class Attachments:
    """The hooks of a model, from all contexts that attached any."""

    def __init__(self, raw: Any):
        self._raw = raw
        self._places: dict[int, _Place] = {}
        self._hooks: list[Attached] = []

    def edits(self) -> list[Hook]:
        """Return the hooks that are currently attached and may edit, in the order in which they were attached."""
        return [(hook.name, hook.function) for hook in self._hooks if not hook.only_reads]

    @contextlib.contextmanager
    def attached(self, hooks: Sequence[Attached], points: Mapping[str, Any]) -> Iterator[None]:
        """Attach hooks, after any existing ones, for the duration of the context; `points` are the model's hook points.

        TransformerLens makes the dictionary of hook points anew whenever it is asked, in a millisecond.
        """
        new = dict[str, _Place]()
        with contextlib.ExitStack() as stack:

            def append(listed: list[Any], hook: Attached | HookFunction) -> None:
                listed.append(hook)
                stack.callback(listed.remove, hook)

            def at(name: str) -> _Place:
                key, own_name = id(points[name]), points[name].name
                if key not in self._places:
                    # TransformerLens may call a hook twice if it is registered under another name than the point's own.
                    self._places[key] = new[own_name if own_name in points else name] = _Place()
                    stack.callback(self._places.pop, key)
                return self._places[key]

            for hook in hooks:
                append(self._hooks, hook)
                carrier = None if hook.site is None else hook.site.carrier
                if carrier is None or hook.only_reads or hook.read_only:
                    append(at(hook.name).hooks, hook)
                    continue
                _, *places = points_of(hook.name)
                for place, act in zip(places, _carried(hook, carrier, points[hook.name]), strict=True):
                    append(at(place).carrying, act)
            try:
                if new:
                    stack.enter_context(self._raw.hooks(fwd_hooks=list(new.items())))
            except (ValueError, AssertionError) as error:
                named, hint = ", ".join(dict.fromkeys(hook.name for hook in hooks)), str(error)
                if "set_use_" in hint:
                    hint = (
                        f"copies of inputs or outputs of heads are not made; {hint_for('model', 'set_use_attn_result')}"
                    )
                raise InterventionError(f"TransformerLens refused a hook at {named}: {hint}.") from None
            yield


@contextlib.contextmanager
def discarded_edits_raise(attentions: Sequence[Any], shape: ModelShape) -> Iterator[None]:
    """Raise an error when TransformerLens discards an edit: it only warns, but the experiment must not continue.

    A warning filter could not do this: filters apply to the whole process, and so to models in other threads.
    Knockouts before the softmax still take effect: they edit the mask, which such attention adds to its scores.
    """

    def severing(attention: Any) -> Callable[..., Any]:
        def act(module: object, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            mask, point = options.get("attention_mask"), attention.hook_attn_scores
            if not (isinstance(mask, Tensor) and mask.ndim == 4 and mask.is_floating_point() and _are_knockouts(point)):
                return None
            rows = len(args[0] if args else options["hidden_states"])
            return args, options | {"attention_mask": point(mask.expand(rows, shape.n_heads, -1, -1))}

        return act

    def report(point: Any, activation: Tensor, label: str) -> Tensor:
        if label == "hook_attn_scores" and _are_knockouts(point):
            return activation
        result = point(activation)
        if not (result is activation or (result.dtype == activation.dtype and torch.equal(result, activation))):
            raise InterventionError(
                f"An edit of {label} did not take effect: {shape.architecture} computes its attention in its own code, "
                "so this activation can only be read."
            )
        return cast("Tensor", result)

    ours = [module for module in attentions if REPORT not in module.__dict__]
    with contextlib.ExitStack() as stack:
        for module in ours:
            module.__dict__[REPORT] = report
            stack.callback(module.__dict__.pop, REPORT, None)
            if module.original_component is not None:
                before = module.original_component.register_forward_pre_hook(severing(module), with_kwargs=True)
                stack.callback(before.remove)
        yield


def _are_knockouts(point: Any) -> bool:
    """Return whether the hooks at attention scores are all this package's own, which cut edges or read them."""
    places = [handle.user_hook for handle in point.fwd_hooks]
    # A hook added without `model.hooks` expects scores, and would receive a mask.
    if not places or not all(isinstance(place, _Place) for place in places):
        return False
    return all(isinstance(hook.function, TrustedHook) for place in places for hook in place.hooks)


def _same(copy: Tensor, activation: Tensor) -> bool:
    """Return whether a copy still equals the original exactly (NaN equals NaN)."""
    if copy.shape != activation.shape:
        return False
    copy, activation = copy.detach(), activation.detach()
    return torch.equal(copy, activation) or torch.allclose(copy, activation, rtol=0, atol=0, equal_nan=True)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
