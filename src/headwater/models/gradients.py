"""Gradients with respect to every head's output (of a linear readout of one state) and every parameter (of a loss)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from headwater.errors import InputError, InterventionError, ModelError, NumericsError
from headwater.kernels.devices import to_device
from headwater.models.bridge_check import WRAPPED
from headwater.models.edits import Hook, at_tokens, keeping, replace_hook
from headwater.models.forward import FixedPrefix, KeysValues, attentions_of, reached, unpadded
from headwater.models.sites import hook_name

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel


# The gradient of a linear readout of one state at the output of every attention head, from the last layer down.
#
# A number read at position p of layer l depends on heads of layers <= l at positions <= p. For the positions from
# some first one on, everything before that position is constant. So
#
# 1. `forward.keys_values` runs the tokens before it once, without gradients; texts with the same prefix share it.
# 2. `Descent` runs the rest on top of it, up to layer l. Only the topmost layers record a graph; for the others it
#    keeps the arguments of each block.
# 3. `Descent.slopes` goes down: it differentiates the recorded layers, then reruns the layers below with a graph,
#    a few at a time. So only the graphs of a few layers are in memory, never those of all.
#
# Attention is the model's own: scale, soft cap, window and rotation are in the pattern at its hook. TransformerLens
# computes the pattern eagerly with or without a hook, so one layer's pattern `batch head query key` exists at a time.


GRAPH_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}
"""Approximate memory limit of the recorded graphs; at least one layer of one row is recorded."""


@dataclass(frozen=True)
class HeadSlopes:
    """Of one layer: the patterns and values of its heads, and the gradient at their outputs."""

    layer: int
    pattern: Float[Tensor, "batch head query key"]
    gradient: Float[Tensor, "batch query head d_head"]
    values: Float[Tensor, "batch kv_head key d_head"]


def refuse_without_gradients(model: HookedModel) -> None:
    """Raise InputError if the model's weights cannot take part in gradients."""
    if next(model.raw.parameters()).is_inference():
        raise InputError(
            f"{model.name} was loaded under torch.inference_mode(), which forbids gradients: load it outside."
        )


def refuse_cut_texts(model: HookedModel, what: str) -> None:
    """Raise InputError if texts cannot be cut after a token because later tokens change its states."""
    if model.is_bidirectional:
        raise InputError(f"{what} runs texts up to the token that is read, but {model.name} also reads later tokens.")


class Descent:
    """A forward pass up to the state that is read, and the backward pass from it.

    Parameters are frozen, as `hw.load` leaves them. The pass runs `tokens` (padding, if any, last) after the tokens of
    `before`, the result of `keys_values`. `states` holds the activations of a hook at a layer (`reading`) at
    `positions` among the tokens; layers before `lowest` need no gradient.
    """

    def __init__(
        self,
        model: HookedModel,
        tokens: Int[Tensor, "batch position"],
        before: KeysValues,
        reading: tuple[str, int],
        positions: Int[Tensor, " batch"],
        lowest: int = 0,
    ):
        self.model, self._cache = model, FixedPrefix(before)
        self._lowest, self._top = lowest, reading[1]
        self._entries: dict[int, Tensor] = {}
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._z: dict[int, Tensor] = {}
        self._patterns: dict[str, Tensor] = {}
        n_keys = tokens.shape[1] + (next(iter(before.values()))[0].shape[2] if before else 0)
        # As many layers at once as fit: each segment below the first costs a second forward pass of its layers.
        at_once = max(1, graphs_in_memory(model, tokens.numel(), n_keys))
        stops = range(reading[1] + 1, lowest, -at_once)
        self._segments = [range(max(lowest, stop - at_once), stop) for stop in stops]
        self._states = self._run(tokens, reading[0], positions)
        self.states = self._states.detach()

    def slopes(self, weight: Float[Tensor, " d_model"]) -> Iterator[HeadSlopes]:
        """Yield, from the top layer down, the gradients of state · weight at each head's output; usable once."""
        gradient: Tensor | None = None
        for segment in self._segments:
            if gradient is None:
                with torch.enable_grad():
                    reached = (self._states.to(weight) @ weight).sum()
                del self._states
            else:
                reached = self._again(segment)
            heads = {layer: self._z.pop(layer) for layer in segment}
            entry = [] if segment.start == self._lowest else [self._entries[segment.start]]
            gradients = torch.autograd.grad(reached, [*entry, *heads.values()], gradient, allow_unused=True)
            # Free the graph before the caller works on the yielded gradients.
            del reached
            gradient = gradients[0]
            for layer, slope in reversed(list(zip(heads, gradients[len(entry) :], strict=True))):
                at_head = torch.zeros_like(heads[layer]) if slope is None else slope
                pattern, (_, values) = self._patterns.pop(hook_name("pattern", layer)), self._cache.after.pop(layer)
                yield HeadSlopes(layer, pattern, at_head, values)

    def _run(self, tokens: Tensor, name: str, positions: Tensor) -> Float[Tensor, "batch d_model"]:
        """Run the model up to the state, recording the graph of the topmost segment."""
        states: dict[str, Tensor] = {}
        first = self._segments[0].start
        hooks = self._watch(self._segments[0]) + keeping(
            [name], states, at_tokens(torch.arange(len(tokens)), positions)
        )
        hooks.append((hook_name("resid_pre", first), replace_hook(lambda residual, hook: self._enter(residual, first))))
        with self.model.lock, contextlib.ExitStack() as stack:
            for layer in range(self._lowest, first):
                # A torch hook, since TransformerLens's hooks receive activations, not the block's other arguments.
                block, note = self.model.raw.blocks[layer], partial(self._note_call, layer)
                stack.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
            self.model.run(unpadded(tokens), hooks, stop_at=self._top + 1, grad=True, past_key_values=self._cache)
        return states[name]

    def _again(self, segment: range) -> Tensor:
        """Rerun some blocks with their recorded arguments, now with a graph; return the residual stream after them."""
        residual = self._enter(self._entries[segment.start], segment.start)
        with torch.enable_grad(), self.model.hooks(self._watch(segment)), reached(attentions_of(self.model.raw)):
            for layer in segment:
                args, options = self._calls.pop(layer)
                out = self.model.raw.blocks[layer](residual, *args, **options)
                residual = out[0] if isinstance(out, tuple) else out
        first = self._entries.pop(segment.stop)
        # A block that keeps state between calls would silently give the gradients of a different run.
        difference = float((residual.detach() - first.detach()).abs().max())
        if not difference <= 1e-2 * float(first.detach().abs().max()):
            raise InterventionError(
                f"{self.model.name}: blocks {segment.start} to {segment.stop - 1}, run again as the model ran them, "
                f"have another residual stream (by {difference:.1e}); their gradients cannot be trusted."
            )
        return residual

    def _enter(self, residual: Tensor, layer: int) -> Tensor:
        """Begin a graph here, or at the heads of this layer if no gradient is needed before them."""
        entry = residual.detach()
        self._entries[layer] = entry if layer == self._lowest else entry.requires_grad_(True)
        return self._entries[layer]

    def _watch(self, segment: range) -> list[Hook]:
        self._cache.kept = segment

        def keep_z(z: Tensor, hook: object, layer: int) -> Tensor:
            self._z[layer] = z.detach().requires_grad_(True) if layer == self._lowest else z
            return self._z[layer]

        hooks = keeping((hook_name("pattern", layer) for layer in segment), self._patterns, Tensor.detach)
        return hooks + [(hook_name("z", layer), replace_hook(partial(keep_z, layer=layer))) for layer in segment]

    def _note_call(self, layer: int, _: object, args: tuple[Any, ...], options: dict[str, object]) -> None:
        """Record a block's arguments; the residual stream only where a segment begins."""
        if not args:
            raise InterventionError(
                f"{self.model.name} does not pass its blocks the residual stream as first argument."
            )
        if any(segment.start == layer for segment in self._segments):
            self._entries[layer] = args[0]
        self._calls[layer] = (args[1:], dict(options))


def graphs_in_memory(model: HookedModel, n_tokens: int, n_keys: int) -> int:
    """Return how many one-layer graphs of `n_tokens` tokens fit in memory.

    For one layer, autograd keeps roughly, per token, 12 d_model numbers, 8 d_mlp numbers and 4 rows of a pattern for
    each head.
    """
    shape = model.shape
    numbers = n_tokens * (12 * shape.d_model + 8 * shape.d_mlp + 4 * shape.n_heads * n_keys)
    return GRAPH_BYTES.get(model.device.type, GRAPH_BYTES["cpu"]) // (numbers * model.dtype.itemsize)


# The gradient norm of a text's loss at each parameter of a model.
#
# 1. Run one text with gradients at every parameter; the loss is the mean negative log-likelihood of some tokens.
# 2. Run one backward pass. Each parameter's gradient is reduced to its norm as soon as it is complete, and dropped:
#    the gradients of all parameters together would take as much memory as the model.
# 3. TransformerLens computes with parts of fused matrices (queries, keys and values; gate and input). The norm of the
#    matrix is computed from the norms of its parts, so that the parameters are the checkpoint's.


FUSED = {"qkv": ("q", "k", "v"), "gate_up_proj": ("gate", "in")}
"""Names of fused matrices, and of their parts."""


def parameter_gradient_norms(
    model: HookedModel, ids: Sequence[int], scored: Sequence[int], order: float = math.inf
) -> dict[str, float]:
    """Return the gradient norm of a text's mean negative log-likelihood at every parameter that the gradient reaches.

    `scored` are the indices in `ids` of the tokens that the loss covers; at least one, and not the first. The order of
    the norm is 1, 2 or infinity (the largest entry). The model is unchanged afterwards.
    """
    refuse_without_gradients(model)
    parameters = {name.replace(WRAPPED, ""): one for name, one in model.raw.named_parameters()}
    assert len(parameters) == len(list(model.raw.parameters())), "two parameters have one name"
    norms: dict[str, float] = {}

    def reduce(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        norms[name] = float(torch.linalg.vector_norm(parameter.grad, order, dtype=torch.float32))
        parameter.grad = None

    def put_back(weight: Tensor, required: bool, gradient: Tensor | None) -> None:
        weight.requires_grad_(required).grad = gradient

    with model.lock, contextlib.ExitStack() as stack:
        for name, weight in parameters.items():
            stack.callback(put_back, weight, weight.requires_grad, weight.grad)
            weight.requires_grad_(True).grad = None
            stack.callback(weight.register_post_accumulate_grad_hook(partial(reduce, name)).remove)
        logits = model.run([list(ids)], grad=True)[0]
        places = to_device(torch.tensor(list(scored)), logits.device)
        target = to_device(torch.tensor(list(ids)), logits.device)[places]
        log_probs = logits[places - 1].float().log_softmax(-1)
        (-log_probs.gather(-1, target[:, None]).mean()).backward()  # type: ignore[no-untyped-call]
    if wrong := next((name for name, norm in norms.items() if not math.isfinite(norm)), None):
        raise NumericsError(
            f"The gradient at {wrong} is NaN or infinite in {model.name} ({model.dtype}). Load the model with "
            "dtype='float32'."
        )
    return _joined(parameters, norms, order)


def _joined(parameters: dict[str, torch.nn.Parameter], norms: dict[str, float], order: float) -> dict[str, float]:
    """Replace the norms of the parts of fused matrices by the norm of the whole matrix."""
    joined = dict(norms)
    for name, whole in parameters.items():
        module, _, kind = name.rpartition(".")
        above, _, fused = module.rpartition(".")
        if name in norms or fused not in FUSED:
            continue
        parts = [f"{above}.{part}.{kind}" for part in FUSED[fused]]
        if not all(part in norms for part in parts) or sum(parameters[p].numel() for p in parts) != whole.numel():
            raise ModelError(f"{name} has no gradient, and {', '.join(parts)} are not all of its parts.")
        part_norms = torch.tensor([joined.pop(part) for part in parts], dtype=torch.float64)
        joined[name] = float(torch.linalg.vector_norm(part_norms, order))
    return joined
