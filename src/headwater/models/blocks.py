"""Step through a model's blocks one sublayer at a time, on rows that start at any layer and any position.

An intervention at layer l and position p changes nothing before layer l and nothing at positions before p. To
recompute only the rest, a sweep needs three things that a whole forward pass does not offer:

1. `record`: one ordinary run that keeps the residual stream, the keys and values of each layer, and the arguments with
   which the model calls each attention (rotary angles, masks).
2. `attention` and `feed_forward`: one sublayer of one layer, on any batch of rows, where each row specifies its
   positions. The keys and values of the positions before it come from the recording and are shared by all rows.
3. `logits`: the final norm and the unembedding, at the rows requested.

The composition (pre-norm, post-norm, serial, parallel, attention alone) is the model's own, read from its blocks.
Attention that supports a cache, as in Hugging Face models, gets the recorded keys and values as one. For
TransformerLens's own models, `OwnAttention` computes attention. Every sweep includes a row without any edit, whose
outcome must equal the plain run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import NormalizationBridge

from headwater.errors import NumericsError
from headwater.kernels.devices import to_device
from headwater.kernels.elementwise import softmax, tanh_gelu
from headwater.models.bridge_check import difference, rounding
from headwater.models.edits import Hook, begin_graph, forking, keeping
from headwater.models.families import known_family
from headwater.models.forward import (
    DoneError,
    FixedPrefix,
    KeysValues,
    Reading,
    cache_options,
    can_continue,
    common_start,
    finite_output,
    forward,
    forward_replaced,
    keeps_an_index,
    last_logits_only,
    reads,
    with_cache,
)
from headwater.models.model import is_bridge, logit_scale, residual_scale
from headwater.models.sites import STATES, hook_name, place_named
from headwater.models.transformers_names import NewGELUActivation
from headwater.runs.identity import unknown_in
from headwater.runs.record import PAST_HOOKS

if TYPE_CHECKING:
    from headwater.models.hooked import HookedModel
    from headwater.models.tokens import Batch


WIRING = "transformer_lens.model_bridge.component_setup"
"""The module of the hooks by which TransformerLens fires an MLP's hook points if its layers are attributes of the block
(OPT)."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """The data that one run of a right-padded batch records for the rows that will share it."""

    activations: Mapping[str, Tensor]
    """By hook name, in the form the hook receives."""
    keys: dict[int, Float[Tensor, "batch kv_head key d_head"]]
    values: dict[int, Float[Tensor, "batch kv_head key _"]]
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]]
    """By layer: the positional and keyword arguments of the model's call of its attention."""
    visible: dict[int, Bool[Tensor, "query key"]]
    """By layer: the keys a query may see (causal, and within the window if the layer has a sliding window)."""
    last_logits: Float[Tensor, "batch d_vocab"] | None
    """At the last column of the batch; None if they were not computed."""
    forks: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """By hook name, the tensors at which gradients are taken: forks in the graph with which the run continued."""


class SharedPrefix:
    """A cache that puts the recorded keys and values of one layer before those of a row, and never changes."""

    def __init__(self, keys: Float[Tensor, "row kv_head key d_head"], values: Float[Tensor, "row kv_head key _"]):
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Return the recorded keys and values followed by the new ones."""
        return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)


class Blocks:
    """The blocks of a model as functions of rows. Use inside `torch.inference_mode()` and the model's lock."""

    def __init__(self, model: HookedModel):
        self.model = model
        self._blocks = list(model.raw.blocks)
        self._own = own_attention(self._blocks)
        # Whether this class computes attention step by step.
        self.has_own_steps = self._own is not None
        self.parallel = model.shape.parallel_blocks
        self._scale, self._residual_scale = logit_scale(model), residual_scale(model)
        self._soft_cap = float(getattr(model.raw.cfg, "output_logits_soft_cap", None) or -1.0)

    def attention(
        self,
        layer: int,
        residual: Float[Tensor, "row position d_model"],
        positions: Int[Tensor, "row position"],
        mask: Float[Tensor, "row head_or_one position key"],
        prefix: SharedPrefix | None,
        query_positions: Int[Tensor, "row kept"] | None = None,
        *,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        recorded: Int[Tensor, " row"] | None = None,
    ) -> Float[Tensor, "row _ d_model"]:
        """Return what a layer's attention adds to the residual stream of rows with the given positions.

        `recorded` maps each row to its row of the recorded batch; by default all rows map to the first.

        With `query_positions`, queries and outputs are computed only at these positions of a row, unless the layer's
        attention has a hook. Keys and values are computed at all positions.
        """
        block = self._blocks[layer]
        if query_positions is not None and _is_watched(block.attn):
            added = self.attention(layer, residual, positions, mask, prefix, call=call, recorded=recorded)
            return _taken(added, query_positions)
        normed, cache = _through(block, "ln1", residual), cast("Any", prefix)
        if self._own is not None:
            return self._added(block, "ln1_post", self._own[layer](normed, positions, mask, prefix, query_positions))
        if query_positions is not None:
            # The model's own code rotates the keys and values of all positions. The call never uses its queries, so
            # only one position of them is projected.
            made: list[Tensor] = []

            def stop(keys: Tensor, values: Tensor, *_: object, **__: object) -> None:
                made.extend((keys, values) if prefix is None else prefix.update(keys, values))
                raise DoneError

            with _first_alone(block.attn, 1, ("q",)), contextlib.suppress(DoneError):
                self._attended(layer, normed, call, positions, mask, SimpleNamespace(update=stop), recorded)
            keys, values = made
            cache = SimpleNamespace(update=lambda *_, **__: (keys, values))
            normed, positions = _taken(normed, query_positions), positions.gather(1, query_positions)
            mask = mask.gather(2, query_positions[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        return self._added(block, "ln1_post", self._attended(layer, normed, call, positions, mask, cache, recorded))

    def _attended(
        self,
        layer: int,
        normed: Tensor,
        call: Any,
        positions: Tensor,
        mask: Tensor,
        cache: Any,
        recorded: Tensor | None,
    ) -> Float[Tensor, "row position d_model"]:
        """Call a layer's attention as the model called it, with other inputs."""
        (args, options), attention = call, self._blocks[layer].attn
        options = {name: _at_positions(value, positions, recorded) for name, value in options.items()}
        # The recorded mask covers whole prompts; the rows' mask replaces it, whatever `_at_positions` made of it.
        options = with_cache(attention, options, cache) | {"attention_mask": mask}
        if "hidden_states" in options:
            options["hidden_states"] = normed
        else:
            args = (normed, *args[1:])
        with without_own_mask(attention, mask.shape[-1]):
            out = attention(*args, **options)
        return out[0] if isinstance(out, tuple) else out

    def alike(self, layer: int) -> contextlib.AbstractContextManager[None]:
        """Let a layer's attention project only its first row and repeat it, because all rows are the same."""
        return _first_alone(self._blocks[layer].attn, 0, ("q", "k", "v"))

    def project_heads(self, layer: int, z: Float[Tensor, "position head d_head"]) -> Float[Tensor, "position d_model"]:
        """Return what a layer's attention adds, computed from the output of each of its heads."""
        block = self._blocks[layer]
        written = block.attn.o(z.flatten(1)[None]) if self._own is None else self._own[layer].output(z[None])
        return self._added(block, "ln1_post", written)[0]

    def fused(self) -> contextlib.AbstractContextManager[None]:
        """Compute the tanh form of GELU and norms in as few passes over memory as torch can.

        The model (GPT-2, Phi) takes eight passes for this GELU. For a norm, the bridge takes seven passes in addition
        to the norm's own, so that hooks can read the steps between; a norm with a hook inside is not replaced.
        """
        return forward_replaced([(part, faster) for part, faster in self._faster if not _is_watched(part)])

    @functools.cached_property
    def _faster(self) -> list[tuple[torch.nn.Module, Callable[[Tensor], Tensor]]]:
        """The modules to replace, with replacements: GELUs, and norms (also of q, k) that equal the wrapped module."""
        mlps = [block.mlp for block in self._blocks if has_part(block, "mlp")]
        gelus = [module for mlp in mlps for module in mlp.modules() if type(module) is NewGELUActivation]
        # Not modules(): a block has dozens, most of them hooks, and every sweep makes this search.
        attentions = (block.attn for block in self._blocks if has_part(block, "attn"))
        parts = (part for home in (*self._blocks, *attentions, self.model.raw) for part in home.children())
        norms = [(part, part.original_component) for part in parts if _is_as_wrapped(part)]
        return [*((gelu, tanh_gelu) for gelu in gelus), *norms]

    def normed(self, layer: int, residual: Float[Tensor, "row position d_model"], mlp: bool) -> Tensor:
        """Apply the norm before a layer's attention, or before its MLP, to the residual stream."""
        block = self._blocks[layer]
        # In Phi, attention and MLP share one norm; in GPT-NeoX each has its own.
        has_own_norm = has_part(block, "ln2") or not self.parallel
        return _through(block, "ln2" if mlp and has_own_norm else "ln1", residual)

    def feed_forward(self, layer: int, residual: Float[Tensor, "*row d_model"]) -> Float[Tensor, "*row d_model"]:
        """Return what a layer's MLP adds, from the residual stream before its norm; 0 where the layer has no MLP."""
        block = self._blocks[layer]
        if not has_part(block, "mlp"):
            return torch.zeros_like(residual)
        rows = residual.flatten(0, -2)
        normed = self.normed(layer, rows[None], mlp=True)
        # The parts of OPT's MLP are in the block itself: `fc1`, `activation_fn`, `fc2`.
        if getattr(block.mlp, "name", "mlp") is None and hasattr(block.original_component, "activation_fn"):
            out = block.mlp.out(block.original_component.activation_fn(getattr(block.mlp, "in")(normed)))
        else:
            out = block.mlp(normed)
        out = out[0] if isinstance(out, tuple) else out
        return self._added(block, "ln2_post", out.view(1, *rows.shape))[0].view_as(residual)

    def logits(self, residual: Float[Tensor, "row d_model"]) -> Float[Tensor, "row d_vocab"]:
        """Apply final norm, unembedding, scale and soft cap to the residual stream after the last block."""
        raw = self.model.raw
        return self._capped(self._scale * raw.unembed(_through(raw, "ln_final", residual[None]))[0])

    def logits_of(
        self, residual: Float[Tensor, "row d_model"], tokens: Int[Tensor, "row answer"]
    ) -> Float[Tensor, "row answer"]:
        """Return the logits of each row's tokens, from the columns of the unembedding for these tokens alone."""
        raw = self.model.raw
        normed = _through(raw, "ln_final", residual[None])[0]
        columns = raw.unembed.W_U.T[tokens]
        return self._capped(self._scale * (torch.einsum("rd,rad->ra", normed, columns) + raw.unembed.b_U[tokens]))

    def _added(self, block: Any, norm: str, written: Tensor) -> Tensor:
        """Return what a part's output adds to the residual stream: the output after norm and scale, if any."""
        added = _through(block, norm, written)
        return added if self._residual_scale == 1.0 else added * self._residual_scale

    def _capped(self, logits: Tensor) -> Tensor:
        return self._soft_cap * torch.tanh(logits / self._soft_cap) if self._soft_cap > 0 else logits

    def record(
        self,
        batch: Batch,
        names: Iterable[str],
        before: Sequence[Hook] = (),
        gradients_at: Sequence[str] = (),
        unembed: bool = True,
        start: KeysValues | None = None,
    ) -> Recording:
        """Run a batch once and keep the named activations, the keys and values and the calls.

        Args:
            batch: right-padded.
            names: names of hooks.
            before: hooks that act before anything is kept, such as noise at the embeddings.
            gradients_at: names of hooks where gradients will be taken; the run's graph begins at the first of them.
            unembed: whether to compute the last logits.
            start: the keys and values of tokens that precede the batch; `visible` is then empty.
        """
        tap = FixedPrefix(start or {}, range(len(self._blocks)))
        calls: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        last = hook_name("resid_post", len(self._blocks) - 1)
        activations: dict[str, Tensor] = {}
        forked: dict[str, Tensor] = {}

        def tapped(layer: int, _: object, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
            calls[layer] = (args, dict(options))
            return args, with_cache(self._blocks[layer].attn, options, tap)

        k_and_v = [hook_name(site, layer) for layer in range(len(self._blocks)) for site in ("k", "v")]
        kept_names = [*names, last, *(k_and_v if self._own is not None else [])]
        hooks: list[Hook] = [(name, begin_graph) for name in gradients_at[:1]]
        hooks += forking(gradients_at, forked)
        hooks += keeping(kept_names, activations, lambda activation: activation.detach().clone())
        options: dict[str, Any] = {**last_logits_only(self.model.raw)}
        if start is not None:
            options |= cache_options(self.model, FixedPrefix(start))
        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(self._blocks if self._own is None else []):
                handle = block.attn.register_forward_pre_hook(functools.partial(tapped, layer), with_kwargs=True)
                stack.callback(handle.remove)
            stack.enter_context(self.model.hooks([*before, *hooks]))
            stack.enter_context(reads(Reading.of(batch)))
            stack.enter_context(self.fused())
            stack.enter_context(torch.enable_grad() if gradients_at else contextlib.nullcontext())
            if not unembed:
                # One logit of 0 in place of the whole vocabulary.
                nothing = (self.model.raw.unembed, lambda residual: residual.new_zeros(*residual.shape[:-1], 1))
                stack.enter_context(forward_replaced([nothing]))
            logits = forward(self.model, batch, options=options).detach()
        last_logits = logits[:, -1] if unembed else None
        finite_output(self.model, activations[last], batch, None)
        keys = {layer: keys for layer, (keys, _) in tap.after.items()}
        values = {layer: values for layer, (_, values) in tap.after.items()}
        # The longest row has no padding: its mask shows only what the architecture lets a query see.
        # After a `start`, the recording of the whole row holds this instead (`record_in_two`).
        longest, width, device = int(batch.lengths.argmax()), batch.tokens.shape[1], self.model.device
        visible: dict[int, Tensor] = {}
        for layer, (_, given) in calls.items() if start is None else ():
            seen = _visible(given.get("attention_mask"), longest, width, device)
            causal = own_mask(self._blocks[layer].attn, len(seen))
            visible[layer] = seen if causal is None else seen & causal
        for layer, attention in enumerate(self._own or ()):
            # This attention accepts no cache: keys and values come from its hooks.
            k, v = (activations[hook_name(site, layer)] for site in ("k", "v"))
            positions = torch.arange(k.shape[1], device=k.device).expand(k.shape[:2])
            keys[layer], values[layer] = attention.remembered(attention.past_hook(k), v, positions)
            calls[layer], visible[layer] = ((), {}), attention.visible(k.shape[1])
        return Recording(activations, keys, values, calls, visible, last_logits, forked)

    def common_start(self, batch: Batch, names: Iterable[str]) -> int:
        """Return the number of first tokens, common to all rows, that `record_in_two` runs in one row only."""
        keyed = any(place is not None and place[0].has_keys for place in map(place_named, names))
        if self.model.start_checked is False or self._own or keyed or not can_continue(self.model):
            return 0
        return common_start(batch.tokens[:, : int(batch.lengths.min()) - 1])

    def record_in_two(self, batch: Batch, names: Sequence[str]) -> Recording | None:
        """Record the common start of all rows in one row, and only the rest of the others; None if that is impossible.

        It is impossible where rows have little in common, a hook does not receive rows of tokens, the model was found
        to give different results this way, or a number is not finite: the whole run then reports where. Few-shot
        prompts have most tokens in common: recording them whole takes a quarter more time for a sweep over heads.
        """
        if not (shared := self.common_start(batch, names)):
            return None
        longest, width = int(batch.lengths.argmax()), batch.tokens.shape[1]
        others = [row for row in range(len(batch)) if row != longest]
        try:
            full = self.record(batch.take([longest]), names, unembed=False)
            if any(activation.shape[:2] != (1, width) for activation in full.activations.values()):
                return None
            start = {
                layer: (keys[:, :, :shared], full.values[layer][:, :, :shared]) for layer, keys in full.keys.items()
            }
            rest = self.record(batch.take(others).after(shared), names, unembed=False, start=start)
        except NumericsError:
            return None
        end = shared + rest.activations[names[0]].shape[1]

        def joined(whole: Tensor, ends: Tensor, *at: Any) -> Tensor:
            # Every row starts as a copy of the longest; the other rows then get their own ends.
            rows = whole.expand(len(batch), *whole.shape[1:]).clone()
            rows[(others, *at)] = ends
            return rows

        kept, every = slice(shared, end), slice(None)
        in_two = dataclasses.replace(
            full,
            activations={name: joined(whole, rest.activations[name], kept) for name, whole in full.activations.items()},
            keys={layer: joined(keys, rest.keys[layer], every, slice(end)) for layer, keys in full.keys.items()},
            values={layer: joined(full.values[layer], rest.values[layer], every, slice(end)) for layer in full.values},
        )
        if self.model.start_checked is None:
            # Families may use a cache differently, so the first call runs both ways and compares them.
            self.model.start_checked = _alike(in_two, self.record(batch, names, unembed=False), batch)
        return in_two if self.model.start_checked else None


def cannot_step(model: HookedModel) -> str | None:
    """Return why a model's blocks cannot be stepped through, or None if they can (as far as its structure shows)."""
    raw = model.raw
    blocks = getattr(raw, "blocks", None)
    if blocks is None or not all(hasattr(block, "submodules") or not is_bridge(raw) for block in blocks):
        return "it is not a stack of blocks"
    if model.spread:
        return "its layers are spread over several devices"
    for block in blocks:
        needed = ("attn", "mlp") if model.shape.d_mlp else ("attn",)
        if missing := [part for part in needed if not has_part(block, part)]:
            return f"its blocks have no {' or '.join(missing)}"
    handles = [handle for point in raw.hook_dict.values() for handle in point.fwd_hooks]
    # TransformerLens's own wiring hooks (OPT's MLP) are harmless; any other hook could change a step's result.
    if any(getattr(getattr(handle, "user_hook", None), "__module__", "") != WIRING for handle in handles):
        return "it already has hooks"
    # Hooks may act on whole modules, some of which are not called in steps, and expect rows of whole prompts. A norm
    # with another eps, or an exchanged module, may differ from what the steps call in its place.
    changes: Any = model.interventions.get(PAST_HOOKS)
    if changes:
        return f"it was changed since it was loaded: {unknown_in(changes) or changes[0]}"
    if keeps_an_index(raw):
        return "its attention caches an index of tokens in addition to keys and values"
    if is_bridge(raw) and (family := known_family(model.config)) is not None and family.positions_by_place:
        return "its attention takes positions from the columns of whole rows (ALiBi)"
    if any(site in STATES and site != "resid_mid" for site, _ in model.misfits):
        return "its blocks add something other than the outputs of attention and MLP to the residual stream"
    if is_bridge(raw) and hasattr(raw, "project_out"):
        return "its residual stream is projected before the unembedding"
    return None


def _alike(one: Recording, other: Recording, batch: Batch) -> bool:
    """Return whether two recordings hold the same activations at every token, up to rounding."""
    for name, kept in one.activations.items():
        real = to_device(batch.mask, kept.device)
        if not difference(kept[real], other.activations[name][real]) <= rounding(kept.dtype):
            return False
    return True


def has_part(block: Any, part: str) -> bool:
    """Return whether a block itself has a part of this name; `hasattr` also finds parts of a wrapped module."""
    return part in getattr(block, "submodules", block._modules)


def _is_as_wrapped(module: Any) -> bool:
    """Return whether a module is a norm with the same output as the module it wraps."""
    if not isinstance(module, NormalizationBridge):
        return False
    is_layer_norm = type(module) is NormalizationBridge and type(module.original_component) is torch.nn.LayerNorm
    return is_layer_norm or module.use_native_layernorm_autograd


def _is_watched(part: torch.nn.Module) -> bool:
    """Return whether a part of a block has a hook, at it or inside it."""
    return any(point.fwd_hooks or point.bwd_hooks for point in part.modules() if isinstance(point, HookPoint))


def _first_alone(
    attention: torch.nn.Module, axis: int, names: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Let projections of an attention compute only the first entry of an axis (rows 0, positions 1) and repeat it."""

    def first(x: Tensor, *, forward: Callable[[Tensor], Tensor]) -> Tensor:
        projected = forward(x.narrow(axis, 0, 1))
        return projected.expand(*x.shape[:2], *projected.shape[2:]) if projected.shape[axis] == 1 else projected

    modules = [getattr(attention, name) for name in names if has_part(attention, name)]
    # Modules whose forward is already replaced are left alone: `forward_replaced` would remove that replacement.
    free = [module for module in modules if isinstance(module, torch.nn.Module) and "forward" not in module.__dict__]
    return forward_replaced([(module, functools.partial(first, forward=module.forward)) for module in free])


def _taken(rows: Float[Tensor, "row position d"], kept: Int[Tensor, "row kept"]) -> Float[Tensor, "row kept d"]:
    return rows.gather(1, kept[:, :, None].expand(-1, -1, rows.shape[2]))


def _through(block: Any, norm: str, x: Tensor) -> Tensor:
    """Apply a norm of a block or model; a no-op if it has no norm of this name (OLMo 2: no `ln1`)."""
    return getattr(block, norm)(x) if has_part(block, norm) else x


def _at_positions(value: object, positions: Int[Tensor, "row position"], recorded: Int[Tensor, " row"] | None) -> Any:
    """Index an argument over the positions of the recorded batch at each row's own positions."""
    if isinstance(value, tuple) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(_at_positions(item, positions, recorded) for item in value)
    # Recognised by dtype and axes: integers with two are position ids, floats with three are rotary cosines and sines.
    if isinstance(value, Tensor) and value.ndim >= 2 and not value.is_floating_point():
        return positions
    if isinstance(value, Tensor) and value.ndim == 3:
        return value[0 if recorded is None or len(value) == 1 else recorded[:, None], positions]
    return value


def _visible(mask: Tensor | None, longest: int, length: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """Return the keys that each query of the longest row sees, from a four-axis mask; causal without such a mask."""
    if mask is None or mask.ndim < 4:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()
    # The mask may have one row for the whole batch; non-boolean masks are added to scores and are 0 where seen.
    row_mask = mask[min(longest, len(mask) - 1), 0, :length, :length]
    return row_mask if row_mask.dtype == torch.bool else row_mask == 0


# Attention step by step, for models that accept no keys and values of earlier positions.
#
# TransformerLens's own models and HookedTransformers compute attention of whole prompts: they accept no keys and values
# of earlier positions, or count positions from the first token passed to them. So that a row can begin anywhere, the
# steps run one by one, through the model's own projections and hooks:
#
#     q, k, v = projections of the normed residual stream           hook_q, hook_k, hook_v
#     q, k    = rotated by their own positions                      where positions are rotary
#     scores  = cap(q · k / scale) - slope (query - key)            the slopes where positions are ALiBi
#     pattern = softmax(scores + mask)                              hook_pattern
#     z       = pattern · v                                         hook_z
#     out     = z · W_O + b_O


class OwnAttention:
    """The attention of one layer of a TransformerLens-native model, inside its bridge."""

    def __init__(self, attention: Any):
        self.attention, self.inner = attention, attention.original_component
        self.scale, self.soft_cap = float(self.inner.scale), float(self.inner.attn_scores_soft_cap)

    def __call__(
        self,
        normed: Float[Tensor, "row position d_model"],
        positions: Int[Tensor, "row position"],
        mask: Float[Tensor, "row head_or_one position key"],
        prefix: SharedPrefix | None,
        query_positions: Int[Tensor, "row kept"] | None = None,
    ) -> Float[Tensor, "row _ d_model"]:
        """Return the output of attention, before any norm after it; only at `query_positions`, if specified."""
        queries_of, queries_at = normed, positions
        if query_positions is not None:
            queries_of, queries_at = _taken(normed, query_positions), positions.gather(1, query_positions)
            mask = mask.gather(2, query_positions[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3]))
        q, k, v = self.project(queries_of, normed)
        q, keys, values = self.turned(q, queries_at).transpose(1, 2), *self.remembered(k, v, positions)
        if prefix is not None:
            keys, values = prefix.update(keys, values)
        repeats = q.shape[1] // keys.shape[1]
        if repeats > 1:
            keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        scores = q @ keys.transpose(-2, -1) / self.scale
        if self.soft_cap > 0:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if (slopes := self.slopes()) is not None:
            n_before = keys.shape[2] - positions.shape[1]
            before = torch.arange(n_before, device=positions.device).expand(len(positions), -1)
            keys_at = torch.cat([before, positions], 1)[:, None, None, :]
            # Keys after the query, if attention sees them, get no slope, as in TransformerLens.
            scores = scores + slopes[:, None, None] * (keys_at - queries_at[:, None, :, None]).clamp_max(0)
        pattern = self.attention.hook_pattern(softmax(scores + mask)).to(values.dtype)
        return self.output((pattern @ values).transpose(1, 2))

    def remembered(
        self,
        k: Float[Tensor, "row position kv_head d_head"],
        v: Float[Tensor, "row position kv_head d_head"],
        positions: Int[Tensor, "row position"],
    ) -> tuple[Float[Tensor, "row kv_head position d_head"], Float[Tensor, "row kv_head position d_head"]]:
        """Return keys and values in the form that queries attend to and that a prefix stores."""
        return self.turned(k, positions).transpose(1, 2), v.transpose(1, 2)

    def project(
        self, queries_of: Float[Tensor, "row kept d_model"], normed: Float[Tensor, "row position d_model"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and keys and values of all positions, `row position head d_head`, after their hooks."""
        q, k, v = self.attention.q(queries_of), self.attention.k(normed), self.attention.v(normed)
        split = (*normed.shape[:2], -1, self.inner.d_head)
        return q.view(*queries_of.shape[:2], -1, self.inner.d_head), k.view(split), v.view(split)

    def turned(self, x: Float[Tensor, "row position head d_head"], positions: Int[Tensor, "row position"]) -> Tensor:
        """Rotate queries or keys by their positions; return them unchanged where positions are not rotary."""
        if self.inner.rotary is None:
            return x
        turned = x.transpose(1, 2)
        return self.inner.rotary.apply_rope(turned, turned, position_ids=positions)[0].transpose(1, 2)

    def past_hook(self, k: Float[Tensor, "row position kv_head d_head"]) -> Tensor:
        """Convert keys from the form at their hook to the form `project` returns."""
        return k

    def slopes(self) -> Float[Tensor, " head"] | None:
        """Return how much the score of each head falls per token of distance; None without ALiBi."""
        return None

    def output(self, z: Float[Tensor, "row position head d_head"]) -> Float[Tensor, "row position d_model"]:
        """Apply the hook of `z`, and return what the outputs of the heads add together."""
        return self.attention.o(z.flatten(2))

    def visible(self, length: int) -> Bool[Tensor, "query key"]:
        """Return the keys that each query of a prompt sees."""
        seen = torch.ones(length, length, dtype=torch.bool, device=self.inner.causal_mask.device)
        return ~self.inner.causal_mask[:length, :length] if self.inner.causal else seen


class _HookedAttention(OwnAttention):
    """Attention of a HookedTransformer (transformer-lens 3.9)."""

    def __init__(self, attention: Any):
        self.attention = attention
        self.scale, self.soft_cap = float(attention.attn_scale), float(attention.cfg.attn_scores_soft_cap)
        self._rotary = attention.cfg.positional_embedding_type == "rotary"
        self._alibi = attention.cfg.positional_embedding_type == "alibi"
        # All heads in one product, in the layout of a linear map; made once, because it is a copy of W_O.
        self._output = attention.W_O.flatten(0, 1).T.contiguous()

    def project(self, queries_of: Tensor, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.calculate_qkv_matrices(queries_of, normed, normed)

    def past_hook(self, k: Tensor) -> Tensor:
        return self.attention._apply_qk_norm(k, self.attention.k_norm) if self.attention.cfg.use_qk_norm else k

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        if not self._rotary:
            return x
        n = self.attention.cfg.rotary_dim
        cos, sin = (table[positions][:, :, None] for table in (self.attention.rotary_cos, self.attention.rotary_sin))
        part = x[..., :n]
        return torch.cat([part * cos + self.attention.rotate_every_two(part) * sin, x[..., n:]], -1)

    def slopes(self) -> Tensor | None:
        if not self._alibi:
            return None
        # In the bias of two tokens, the second query at the first key has distance one: its entry is minus the slope.
        bias = self.attention.create_alibi_bias(self.attention.cfg.n_heads, 2, self._output.device)
        return -bias[:, 1, 0]

    def output(self, z: Tensor) -> Tensor:
        z = self.attention.hook_z(z)
        return torch.nn.functional.linear(z.flatten(2), self._output, self.attention.b_O)

    def visible(self, length: int) -> Tensor:
        seen = torch.ones(length, length, dtype=torch.bool, device=self._output.device)
        if self.attention.cfg.attention_dir != "causal":
            return seen
        return self.attention._make_causal_mask(length, length, 0, self._output.device)[0, 0]


def own_attention(blocks: list[Any]) -> list[OwnAttention] | None:
    """Return the attention of each block of one of TransformerLens's own models; None for any other model."""
    inner = [getattr(block.attn, "original_component", None) for block in blocks]
    if all(getattr(attention, "accepts_pattern_fn", False) for attention in inner):
        return [OwnAttention(block.attn) for block in blocks]
    if all(hasattr(block.attn, "calculate_qkv_matrices") for block in blocks):
        return [_HookedAttention(block.attn) for block in blocks]
    return None


def own_mask(attention: Any, length: int) -> Bool[Tensor, "query key"] | None:
    """Return the keys each query may see according to an attention's own matrix; None if it has no such matrix."""
    mask = getattr(getattr(attention, "original_component", None), "bias", None)
    # A linear map also has a `bias`, a vector; GPT-Neo's matrix is boolean, with axes for batch and head.
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 4:
        return None
    return mask[0, 0, :length, :length]


@contextlib.contextmanager
def without_own_mask(attention: Any, n_keys: int) -> Iterator[None]:
    """Let an attention's own matrix allow every key during a call.

    GPT-Neo keeps a matrix of the keys each query may see (causal, local in every second layer) and indexes it by the
    number of keys. Rows that share recorded keys have other numbers of keys, so the mask passed to them includes the
    matrix.
    """
    if own_mask(attention, 1) is None:
        yield
        return
    buffers = attention.original_component._buffers
    causal_mask = buffers["bias"]
    # GPT-Neo slices it by the number of keys on both axes; expanded, it takes one byte.
    buffers["bias"] = causal_mask.new_ones(1, 1, 1, 1).expand(1, 1, n_keys, n_keys)
    try:
        yield
    finally:
        buffers["bias"] = causal_mask
