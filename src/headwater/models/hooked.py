"""A model that can be run, read and edited with hooks: a small interface to TransformerLens's bridge.

Hooks are attached by one context manager, `model.hooks`, which guarantees four things:

1. every hook names an existing activation and fired whenever the model ran: a dead hook is an error, because an
   experiment whose edit never happened looks like an experiment without effect;
2. an edit reaches everything the model computes from the activation; each hook gets a copy, and the tensor that it
   returns is the edit (`headwater.models.edits`);
3. nothing stays attached, whatever exception is raised inside, KeyboardInterrupt included;
4. one thread at a time: TransformerLens's hooks are state of the model, so a second thread waits
   (`headwater.models.model` describes the behaviour in a forked process).
"""

from __future__ import annotations

import contextlib
import html
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import InputError, InterventionError, UnknownNameError, did_you_mean
from headwater.foreign_names import missing
from headwater.kernels.devices import to_device
from headwater.models import cache_collection, generation
from headwater.models.edits import (
    REPORT,
    Attached,
    Attachments,
    Hook,
    PromptHook,
    discarded_edits_raise,
    hooks_for,
    listed_hooks,
    read_hook,
    refuse_silent,
)
from headwater.models.forward import (
    Keep,
    Reading,
    attentions_of,
    cache_options,
    columns_kept,
    finite_output,
    forward,
    now_reading,
    reached,
    reads,
)
from headwater.models.model import TOKEN_RULES, settings
from headwater.models.packaged import is_packaged
from headwater.models.sites import hook_name, place_named
from headwater.models.tokens import Batch, ChatText, Inputs, make_batch, spelled_tokens, token_strings
from headwater.models.transformer_lens_names import TransformerLensNames
from headwater.options import checked_layer, shown, whole_numbers
from headwater.runs.record import MODEL_HOOKS, PAST_HOOKS


@checked_calls
class HookedModel(TransformerLensNames):
    """A transformer with hooks, in evaluation mode, with the checkpoint's weights: no folded norms, no centring.

    `headwater.models.model.Model` lists its attributes.
    """

    returned_by = "hw.load(...)"

    _own_graph = False
    """Whether a run of this class is in progress, whose graph begins where a hook starts it."""

    if not TYPE_CHECKING:  # a type checker would accept every name as existing

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):
                # A property that raised AttributeError also ends here; this call raises the property's own error.
                return object.__getattribute__(self, name)
            raise UnknownNameError(missing("A HookedModel", "model", name, dir(type(self)), vars(self).get("raw")))

    def __repr__(self) -> str:
        shape, weights = self.shape, f" ({self.revision.split(', sha256')[0]})" if self.revision else ""
        begins = f", texts begin with {self._begins}" if self._begins else ""
        return (
            f"HookedModel({self.name}{weights}: {shape.n_layers} layers × {shape.n_heads} heads, "
            f"d_model {shape.d_model}, {str(self.dtype).removeprefix('torch.')} on {self.device}{begins})"
        )

    def _repr_html_(self) -> str:
        rows = {"model": self.name, "revision": self.revision or "", **vars(self.shape), "dtype": self.dtype}
        rows |= {"texts begin with": self._begins, "device": self.device}
        cells = "".join(f"<tr><th>{key}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items())
        return f"<table>{cells}</table>"

    @property
    def _begins(self) -> str:
        return "" if self.tokenizer is None else spelled_tokens(self.tokenizer, self.bos)

    def tokenize(self, inputs: Inputs, *, mask: Tensor | None = None) -> Batch:
        """Make a right-padded batch of a text, texts, lists of token ids, or a tensor of ids (with a mask if padded).

        A chat is a list of messages, `{"role": "user", "content": ...}`. The tokenizer's chat template turns it into a
        text that ends where the answer begins, or, if the assistant's message is last, where that message continues.
        `model.bos` is prepended to texts, once; token ids are unchanged.
        """
        batch = make_batch(
            inputs,
            self.tokenizer,
            bos=self.bos,
            mask=mask,
            config=self.config,
            d_vocab=self.shape.d_vocab,
            n_ctx=self.shape.n_ctx,
        )
        if batch is not inputs:
            warn_of_two_beginnings(batch, getattr(self.tokenizer, "bos_token_id", None))
            warn_of_no_template(self, batch.texts or ())
        return batch

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token."""
        try:
            ids = whole_numbers(tokens)
        except TypeError:
            raise InputError(f"{shown(tokens)} are not token ids: give whole numbers.") from None
        if outside := [token for token in ids if not 0 <= token < self.shape.d_vocab]:
            raise InputError(f"Token id {outside[0]} is outside the model's vocabulary of {self.shape.d_vocab}.")
        return token_strings(self.tokenizer, ids)

    def run(
        self,
        inputs: Inputs,
        hooks: Iterable[Hook | PromptHook] = (),
        *,
        keep: Keep = None,
        stop_at: int | None = None,
        grad: bool = False,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the model.

        Args:
            inputs: anything `tokenize` takes.
            hooks: hooks that read or edit activations: pairs (name, function) or `hw.edit(...)`; each must fire.
            keep: positions whose logits are returned; fewer are cheaper.
            stop_at: run only the layers before this one and return its input, the residual stream.
            grad: record gradients (otherwise the run is under `torch.inference_mode()`). The parameters are frozen: a
                graph begins where a hook returns a tensor that requires gradients.
            past_key_values: the keys and values of earlier tokens, as a transformers cache; passed to the model
                under the argument name that it expects.
            attention_mask: with such a cache, `[batch, position]` over all tokens, 1 at real ones.
            position_ids: with such a cache, `[batch, position]` of the inputs.

        Returns:
            Logits `[batch, position, d_vocab]` in the model's dtype and on its device, or with `stop_at` the residual
            stream `[batch, position, d_model]`.

        Raises:
            InterventionError: a hook names no activation, or never fired.
            ModelError: the model takes no keys and values of earlier tokens, or one of its attentions ran without them.
        """
        batch, past = self.tokenize(inputs), past_key_values
        beside = {"attention_mask": attention_mask, "position_ids": position_ids}
        options = {name: value for name, value in beside.items() if value is not None}
        new = None
        if past is not None and (before := past.get_seq_length()):
            whole = Reading.of(batch)
            follow = whole.positions + before if position_ids is None else position_ids.cpu()
            new = replace(whole, positions=follow.where(batch.mask, -1))
            if (longest := int(new.positions.max()) + 1) > self.shape.n_ctx:
                raise InputError(
                    f"With the earlier tokens, a sequence has {longest} tokens; the model reads at most "
                    f"{self.shape.n_ctx}."
                )
        listed = hooks_for(self, listed_hooks(hooks), batch, new)
        if stop_at is not None:
            stop_at = checked_layer("stop_at", stop_at, self.shape.n_layers, most=self.shape.n_layers)
        columns = None if stop_at is not None else columns_kept(keep, batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if grad else torch.inference_mode())
            stack.enter_context(self.hooks(listed))
            # Restore the previous value, not False: runs nest when a hook runs the model.
            stack.callback(setattr, self, "_own_graph", self._own_graph)
            self._own_graph = True
            # Generation knows more of its new tokens: their prompts.
            known = None if new is None else now_reading() or new
            stack.enter_context(reads(known or Reading.of(batch)))
            if past is not None:
                options |= cache_options(self, past)
                stack.enter_context(reached(attentions_of(self.raw)))
            out = forward(self, batch, columns, stop_at, options)
            finite_output(self, out, batch, columns, cached=past is not None)
        if isinstance(keep, str) and columns is not None:
            # The columns of all rows' last tokens were computed; pick the row's own column.
            here = to_device(torch.searchsorted(columns, batch.lengths - 1), out.device)
            out = out[torch.arange(len(out), device=out.device), here][:, None]
        return out

    @property
    def interventions(self) -> dict[str, object]:
        """Everything besides the weights that now affects the model, by the option that records it in a run.

        These are the attached hooks of `with model.hooks(...)` that may edit; other changes to the model since it was
        loaded (`headwater.models.fingerprint`); and the rules of its generation config. Another thread's hooks are not
        included: this property waits until that thread has finished.
        """
        with self.lock:
            acting: dict[str, object] = {MODEL_HOOKS: self._attachments.edits()}
            acting[PAST_HOOKS] = self._modules.alterations()
        acting["generation_config"] = settings(self.raw, TOKEN_RULES)
        return {option: what for option, what in acting.items() if what}

    @contextlib.contextmanager
    def hooks(self, hooks: Iterable[Hook | PromptHook]) -> Iterator[None]:
        """Attach hooks for the duration of the context; no other thread can run the model meanwhile.

        Raises:
            InterventionError: a hook names no activation, or one that differs from what `shape` says; or the model ran
                in the context and a hook did not fire, returned something that cannot replace the activation, modified
                it in place without returning it, or its edit was discarded (attention patterns of GPT-J, GPT-Neo and
                OPT are read-only).
        """
        if not (listed := hooks_for(self, listed_hooks(hooks), None)):
            with self.lock:
                yield
            return
        with self.lock, discarded_edits_raise(self._reporters, self.shape):
            hook_dict = self.raw.hook_dict
            attached = []
            for name, function in listed:
                site, layer = place_named(name) or (None, 0)
                if site is not None and (reason := site.lacks(self, layer)):
                    raise InterventionError(reason)
                if name not in hook_dict:
                    raise InterventionError(
                        f"{self.name} has no activation named {name!r}.{did_you_mean(name, hook_dict)}"
                    )
                read_only = None if site is None else site.lacks(self, layer, edited=True)
                attached.append(Attached(name, function, site, read_only))
            # Distinguishes a context in which the model never ran (so no hook could fire) from one with a dead hook.
            ran = Attached(hook_name("resid_pre"), read_hook(lambda activation, hook: None))
            with self._attachments.attached([*attached, ran], hook_dict):
                yield
        if ran.fired:
            refuse_silent(attached)

    cache = cache_collection.cache
    generate = generation.generate

    def begin_graphs_at(self, embedding: torch.nn.Module) -> None:
        """Allow calls of `raw` with gradients although its parameters are frozen, as TransformerLens's own tools do.

        The graphs of such calls begin at this module's output; the graphs of `run` begin where a hook starts them.
        """

        def begin(module: Any, args: Any, out: Tensor) -> Tensor | None:
            ours = self._own_graph or not torch.is_grad_enabled() or out.requires_grad
            # Cloned, since hooks may write in place, which a leaf that requires gradients forbids.
            return None if ours else out.detach().requires_grad_(True).clone()

        embedding.register_forward_hook(begin)

    @cached_property
    def _attachments(self) -> Attachments:
        return Attachments(self.raw)

    @cached_property
    def _reporters(self) -> list[torch.nn.Module]:
        """The attentions; where Hugging Face's own code computes them, hooks on scores and pattern come too late."""
        return [module for module in self.raw.modules() if hasattr(type(module), REPORT)]


# Warnings, not errors: each of these inputs has valid uses, but usually the result is not what the user intends.


MARKS = ("<|", "[INST]", "<start_of_turn>")
"""Marks in chat templates that need not be special tokens of the tokenizer."""


def warn_of_two_beginnings(batch: Batch, beginning: int | None) -> None:
    """Warn if a sequence begins with two beginning-of-sequence tokens: models are trained on texts with one or none."""
    if beginning is None or batch.tokens.shape[1] < 2:
        return
    if twice := ((batch.tokens[:, :2] == beginning) & batch.mask[:, :2]).all(1).nonzero().flatten().tolist():
        others = f" ({len(twice):,} of {len(batch):,} prompts do)" if len(twice) > 1 else ""
        warnings.warn(
            f"Prompt {batch.name(twice[0])} begins with two beginning-of-sequence tokens{others}. A chat template "
            "writes one itself, and token ids may contain one: remove the second.",
            stacklevel=2,
        )


def warn_of_no_template(model: HookedModel, texts: Sequence[str]) -> None:
    """Warn once per model if its tokenizer has a chat template, but the texts contain none of the template's marks.

    For a packaged model, which is usually studied with incomplete texts, only questions cause the warning.
    """
    tokenizer = model.tokenizer
    if not texts or "template" in model.hinted or not getattr(tokenizer, "chat_template", None):
        return
    if is_packaged(model.name) and not any(text.rstrip().endswith("?") for text in texts):
        return
    assert tokenizer is not None
    marks = {*MARKS, *(mark for mark in tokenizer.all_special_tokens if mark in str(tokenizer.chat_template))}
    if not any(isinstance(text, ChatText) or any(mark in text for mark in marks) for text in texts):
        model.hinted.add("template")
        warnings.warn(
            f"{model.name} has a chat template and reads plain text without it: an instruct model may behave "
            "differently in a chat. Use context='chat' where available, or give messages instead of a text: "
            "[{'role': 'user', 'content': text}]. This warning is given once.",
            stacklevel=2,
        )
