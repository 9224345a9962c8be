"""One step of generation: the logits of the token that each row writes next, and the rows that go on.

1. Prompts are padded on the left, so that in every row the new tokens follow the prompt without a gap, also for layers
   that attend to a window only. Padding is masked, and positions are counted from each row's first real token.
2. Keys and values are kept, so that a step runs one token per row. A row that has ended leaves the batch, and its keys
   and values with it.
   What all prompts begin with, as worked examples, is run once where no layer's window is affected (`_common_start`).
3. Layers in which nobody looks go without TransformerLens's wrappers (`headwater.models.bare_model`), after the first
   step also beside layers with hooks. What is hung on the model while it writes, as a function that is called with each
   token might do, acts from the next call on.
4. Where hooks act, they see in the first step what they see in `model.run`: the prompts, row by row, padded on the
   right, each from column 0 on; in every step after it one column, each row's newest token (`models.forward` says at
   which position). Keys and values are pushed to the right after the first step, and rows that have ended stay, so that
   a row is the same prompt to the end.
5. Models that take no cache or have a state, and rows that grow past the length at which longrope turns every token
   otherwise while hooks act, run their whole texts at every step. Hooks see the same as in 4: each is called with the
   prompts and with every new token once, and what it wrote there is written again in the steps after it. Only where
   the angles change, or attention looks ahead, the activations there change, and it is called with all of
   these again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from headwater.errors import InterventionError
from headwater.kernels.devices import to_device
from headwater.models.bare_model import BareModel, bare_model
from headwater.models.bridge_check import finite_output
from headwater.models.edits import (
    Attached,
    Hook,
    HookFunction,
    PromptHook,
    TrustedHook,
    hooks_for,
    refuse_silent,
    replace_hook,
)
from headwater.models.forward import (
    Reading,
    angles_by_row,
    common_start,
    goes_on,
    now_reading,
    original_length,
    reads,
    takes_cache,
)
from headwater.models.sites import place_named
from headwater.models.tokens import Batch, pad_id
from headwater.runs.record import HOOKS

if TYPE_CHECKING:
    from headwater.models.model import Model


@contextlib.contextmanager
def steps_of(
    model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook], max_new_tokens: int
) -> Iterator[_Cached | _Rerun]:
    """Begin to continue prompts; hold the model's lock until the last step."""
    with contextlib.ExitStack() as stack:
        if not (steps_with_hooks(model, prompts, max_new_tokens) if hooks else keeps_keys(model)):
            yield _Rerun(model, prompts, hooks)
        elif not hooks and (bare := bare_model(model)) is not None:
            yield _Cached(model, prompts, bare, _common_start(model, prompts, max_new_tokens))
        elif hooks or HOOKS in model.interventions:
            yield _Watched(model, prompts, hooks, stack)
        else:
            yield _Cached(model, prompts)


def next_logits(model: Model, prompts: Batch) -> Float[Tensor, "row d_vocab"]:
    """Return the logits of the token that follows each prompt, as in the first step of generation."""
    with model.lock, torch.inference_mode(), steps_of(model, prompts, (), 1) as steps:
        return steps.logits()


def keeps_keys(model: Model) -> bool:
    """Whether keys and values are all that a model keeps of the tokens before; a recurrent state takes in padding."""
    original: Any = getattr(model.raw, "original_model", None)
    config = getattr(original, "config", None)
    kinds = getattr(config.get_text_config(), "layer_types", None) or () if config is not None else ()
    recurrent = any("attention" not in kind or "linear" in kind for kind in kinds)
    return takes_cache(model.raw) and not (recurrent or getattr(original, "_is_stateful", False))


def steps_with_hooks(model: Model, prompts: Batch, max_new_tokens: int) -> bool:
    """Whether hooks can act on one new token at a time: what they wrote before must stay in keys and values."""
    shortest, longest = int(prompts.lengths.min()), int(prompts.lengths.max()) + max_new_tokens
    return keeps_keys(model) and not shortest <= original_length(model.rotary_by_length) < longest


def _common_start(model: Model, prompts: Batch, max_new_tokens: int) -> int:
    """Return how many tokens all prompts begin with that are worth a run of their own.

    Padding comes between them and the rest of each prompt, and a window counts that padding: 0 where not everything
    fits into the shortest window.
    """
    config: Any = model.raw.original_model.config.get_text_config()
    # Families call it sliding_window, window_size (GPT-Neo) or attention_chunk_size (Llama 4).
    widths = (width for name, width in config.to_dict().items() if "window" in name or "chunk" in name)
    # `> 1` leaves out flags such as use_sliding_window, since True is the int 1.
    window = min((width for width in widths if isinstance(width, int) and width > 1), default=math.inf)
    if not goes_on(model) or window < prompts.tokens.shape[1] + max_new_tokens:
        return 0
    # Each prompt keeps at least its last token, from which its first logits come.
    return common_start(prompts.tokens[:, : int(prompts.lengths.min()) - 1])


class _Cached:
    """The rows still going, their keys and values, and the token each reads next.

    Args:
        model: the model.
        prompts: padded on the right.
        bare: the model without wrappers, where it can be used for all steps.
        shared: with it, so many tokens that all prompts begin with are run once.
    """

    def __init__(self, model: Model, prompts: Batch, bare: BareModel | None = None, shared: int = 0):
        self._model, self._bare, self._cache = model, bare, DynamicCache()
        self._live = list(range(len(prompts)))
        self._original = original_length(model.rotary_by_length)
        self._padded = prompts.padded
        start, tokens, mask = prompts.tokens[:, :shared], prompts.tokens[:, shared:], prompts.mask[:, shared:]
        width = tokens.shape[1]
        # Turns each row until its last real token is in the last column, and padding in front.
        self._shift = (torch.arange(width) - (width - mask.sum(1))[:, None]) % width
        self._reads = Batch(tokens.gather(1, self._shift), mask.gather(1, self._shift))
        self._texts = torch.cat([start, self._reads.tokens], 1)
        self._mask = torch.cat([torch.ones_like(start), self._reads.mask.long()], 1)
        # Padding in front counts as -1, which no embedding of positions has.
        self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, shared:]
        if shared and bare is not None:
            ids, device = torch.arange(shared)[None], model.device
            bare.last_logits(to_device(start[:1], device), self._cache, position_ids=to_device(ids, device))
            self._cache.batch_select_indices(to_device(torch.zeros(len(prompts), dtype=torch.long), device))

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        """Run what was not yet run, and return the logits of the next token of each row."""
        return self._run((), self._bare)

    def _run(self, hooks: Sequence[Hook | PromptHook], bare: BareModel | None = None) -> Float[Tensor, "row d_vocab"]:
        """Run the columns that are read next, by the bridge or without its wrappers."""
        device, tokens = self._model.device, self._reads.tokens
        mask, positions = to_device(self._mask, device), to_device(self._positions, device)
        last = torch.tensor([tokens.shape[1] - 1])
        if bare is None:
            return self._model.run(
                self._reads,
                hooks,
                keep=last,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=self._cache,
            )[:, -1]
        with angles_by_row(bare.rotary_by_length):
            # Without one, transformers can leave causality to sdpa, which then is given no mask at all.
            mask_option = mask if self._padded else None
            out = bare.last_logits(
                to_device(tokens, device), self._cache, attention_mask=mask_option, position_ids=positions
            )
        # One wait for the device a step; the message, which costs more, is made only where something is wrong.
        if not bool(out[:, 0].isfinite().all()):
            finite_output(self._model, out[:, None], self._reads, last, edited=bool(bare.kept), cached=True)
        return out

    def follow(self, going: Mapping[int, int]) -> None:
        """Append to each row the token chosen for it; rows without one have ended, and are forgotten."""
        if len(going) < len(self._live):
            left = [i for i, row in enumerate(self._live) if row in going]
            self._cache.batch_select_indices(to_device(torch.tensor(left), self._model.device))
            self._texts, self._mask, self._positions = (x[left] for x in (self._texts, self._mask, self._positions))
            self._live = list(going)
        self._append(list(going.values()))

    def _append(self, tokens: Sequence[int]) -> None:
        """Let each row read one more token next."""
        new = torch.ones(len(tokens), 1, dtype=torch.bool)
        self._reads = Batch(torch.tensor(tokens)[:, None], new)
        self._texts = torch.cat([self._texts, self._reads.tokens], 1)
        self._mask = torch.cat([self._mask, new.to(self._mask)], 1)
        self._positions = self._positions[:, -1:] + 1
        # Keys are kept after rotation, so a text that has just grown too long has to be read again.
        if bool((self._positions == self._original).any()):  # all keys of the row are turned otherwise from here on
            self._cache, self._reads = DynamicCache(), Batch(self._texts, self._mask.bool())
            self._positions = (self._mask.cumsum(1) - 1).clamp(min=0)


class _Watched(_Cached):
    """The same for hooks to act on: the first step is a run of the prompts.

    Every row stays where it is; those that have ended read padding, and their logits are left out. In later steps the
    layers without hooks go without wrappers, where the model allows it; hooks are attached once for all these steps.
    """

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook], stack: contextlib.ExitStack):
        super().__init__(model, prompts)
        self._hooks, self._stack = hooks, stack
        self._prompts, self._first = prompts, Reading.of(prompts)
        self._step = 0
        self._acting: list[Attached] | None = None

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        if self._step == 0:
            with reads(self._first):
                out = self._model.run(self._prompts, self._hooks, keep="last", past_key_values=self._cache)[:, -1]
            self._push_right()
        else:
            with reads(Reading(self._positions, self._first.prompts, self._first.rows)):
                out = self._next()
        self._step += 1
        return out[to_device(torch.tensor(self._live), out.device)]

    def follow(self, going: Mapping[int, int]) -> None:
        self._live, pad = list(going), pad_id(self._model.tokenizer)
        self._append([going.get(row, pad) for row in range(len(self._prompts))])

    def _next(self) -> Float[Tensor, "row d_vocab"]:
        """Run one new column, with hooks made for it."""
        listed = hooks_for(self._model, self._hooks, self._reads, goes_on=True)
        if self._step == 1 and listed:
            self._bare = bare_model(self._model, [name for name, _ in listed])
            if self._bare is not None:
                # Attaching hooks costs as much as some layers of a small model: once, and not at every step.
                self._stack.enter_context(self._model.hooks(list(map(self._standing, range(len(listed)), listed))))
        if self._bare is None:
            return self._run(listed)
        self._acting = attached = [Attached(*hook) for hook in listed]
        try:
            out = self._run((), self._bare)
        finally:
            self._acting = None
        refuse_silent(attached)
        return out

    def _standing(self, number: int, hook: Hook) -> Hook:
        """Return what stays attached in place of a hook: it lets the one of each step act, and no other run's."""

        def act(activation: Any, hook: object) -> Tensor | None:
            return None if self._acting is None else self._acting[number].act(activation, hook)

        name, function = hook
        edits = not isinstance(function, TrustedHook) or function.edits
        # Silent in other runs; whether each fired in a step of its own is asked in `_next`.
        return name, TrustedHook(act, edits, may_be_silent=True, is_idle=lambda: self._acting is None)

    def _push_right(self) -> None:
        """Move keys and values so that each row ends in the last column, as in a batch padded on the left."""
        if not self._prompts.padded:
            return
        for layer in self._cache.layers:
            where = to_device(self._shift, layer.keys.device)[:, None, :, None]
            layer.keys, layer.values = (
                kept.gather(2, where.expand(-1, kept.shape[1], -1, kept.shape[3]))
                for kept in (layer.keys, layer.values)
            )


class _Rerun:
    """The same by whole texts, without a cache. Where hooks act, rows that have ended stay and read padding."""

    def __init__(self, model: Model, prompts: Batch, hooks: Sequence[Hook | PromptHook]):
        self._model, self._hooks = model, hooks
        self._rows = [row[real].tolist() for row, real in zip(prompts.tokens, prompts.mask, strict=True)]
        self._live, self._first = list(range(len(prompts))), Reading.of(prompts)
        self._original = original_length(model.rotary_by_length)
        self._in_parts = [_InParts(name, function) for name, function in hooks_for(model, hooks, prompts)]
        for part in self._in_parts:
            part.reads.append((part.function, self._first))

    def logits(self) -> Float[Tensor, "row d_vocab"]:
        texts = Batch.of(self._rows, pad_id(self._model.tokenizer))
        if not self._hooks:
            return self._model.run(texts.take(self._live), keep="last")[:, -1]
        return self._model.run(texts, [part.hook for part in self._in_parts], keep="last")[self._live, -1]

    def follow(self, going: Mapping[int, int]) -> None:
        self._live, pad = list(going), pad_id(self._model.tokenizer)
        new = [going.get(row, pad) for row in range(len(self._rows))]
        self._rows = [[*row, token] for row, token in zip(self._rows, new, strict=True)]
        lengths = torch.tensor([len(row) for row in self._rows])
        reading = Reading(lengths[:, None] - 1, self._first.prompts, self._first.rows)
        listed = hooks_for(self._model, self._hooks, Batch.of([[token] for token in new], 0), goes_on=True)
        for part, (_, function) in zip(self._in_parts, listed, strict=True):
            part.reads.append((function, reading))
            if self._model.looks_ahead or bool((lengths == self._original + 1).any()):
                part.wrote.clear()


class _InParts:
    """A hook in runs of whole texts, which acts on the prompts and on each new token by itself."""

    def __init__(self, name: str, function: HookFunction):
        self.name, self.function = name, function
        self.reads: list[tuple[HookFunction, Reading]] = []
        self.wrote: list[Tensor | None] = []

    @property
    def hook(self) -> Hook:
        """What is attached."""
        own = self.function
        return self.name, replace(own, function=self._act) if isinstance(own, TrustedHook) else replace_hook(self._act)

    def _act(self, activation: Any, hook: object) -> Tensor | None:
        """Write what the hook wrote in earlier steps, and let it act on what is new."""
        whole, place = now_reading(), place_named(self.name)
        assert whole is not None, "a run reads"
        columns_first = place is None or place[0].axes[0] == "position"
        if not columns_first or getattr(activation, "shape", ())[:2] != whole.positions.shape:
            raise InterventionError(
                f"A hook at {self.name} cannot act while this model writes: it runs the whole text again for every "
                "token, and there no column is one token. Use another site."
            )
        edited: Tensor | None = None
        for step, (function, reading) in enumerate(self.reads):
            at = to_device(reading.positions, activation.device)
            if step == len(self.wrote):
                rows = torch.arange(len(at), device=at.device)[:, None]
                with reads(reading):
                    self.wrote.append(Attached(self.name, function).act(activation[rows, at], hook))
            if (wrote := self.wrote[step]) is not None:
                edited = activation.clone() if edited is None else edited
                row, column = (at >= 0).nonzero(as_tuple=True)
                edited[row, at[row, column]] = wrote[row, column]
        return edited
