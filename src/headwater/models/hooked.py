"""A model that can be run, watched and edited: TransformerLens's bridge under a few names.

`model.tokenize` makes a batch, `model.run` gives logits (with hooks if asked), `model.cache` keeps activations. Hooks
go through one context manager, `model.hooks`, which promises four things:

1. every hook names an activation that exists, and it fired whenever the model ran: a dead hook is an error, because an
   experiment whose edit never happened looks like an experiment without effect;
2. an edit reaches all that the model computes from the activation, and no other hook (`headwater.models.edits`);
3. nothing remains, whatever is raised inside, KeyboardInterrupt included;
4. one thread at a time: TransformerLens's hooks are state of the model, so a second thread waits
   (`headwater.models.model` says what becomes of that in a forked process).

How activations are kept is in `headwater.models.cache_collection`, how a model writes in
`headwater.models.generation`.
"""

from __future__ import annotations

import contextlib
import html
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import InputError, InterventionError, UnknownNameError, did_you_mean
from headwater.foreign_names import missing
from headwater.kernels.devices import to_device
from headwater.models import cache_collection, generation
from headwater.models.bridge_check import finite_output
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
from headwater.models.forward import Keep, Reading, attentions_of, cache_options, columns_kept, forward, reached, reads
from headwater.models.model import RULES, settings
from headwater.models.packaged import is_packaged
from headwater.models.sites import hook_name, place_named
from headwater.models.tokens import Batch, ChatText, Inputs, make_batch, spelled_tokens, token_strings
from headwater.models.transformer_lens_names import TransformerLensNames
from headwater.options import checked_flag, checked_layer, shown, whole_numbers
from headwater.runs.record import HOOKS, PAST_HOOKS


class _WithAdvice(type):
    """The class of HookedModel: of a missing name, such as `from_pretrained`, the error says what to use."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            raise UnknownNameError(missing(f"The class {cls.__name__}", "model", name, dir(cls)))


@checked_calls
class HookedModel(TransformerLensNames, metaclass=_WithAdvice):
    """A transformer with hooks, in evaluation mode, its weights exactly as the checkpoint stores them.

    `headwater.models.model.Model` lists its attributes.
    """

    _own_graph = False
    """Whether a run of this class is going on, whose graph begins where a hook says."""

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):
                # A property that raised AttributeError ends here, too; asked again, it raises its own.
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

        A chat is a list of messages, `{"role": "user", "content": ...}`, and becomes the text that the tokenizer's chat
        template writes, up to where the answer begins; after a last message of the assistant, its continuation.
        Texts begin with `model.bos`, once; token ids are taken as they are.

        Raises:
            InputError: see `headwater.models.tokens.make_batch`.
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
        """Return the text of each token.

        Raises:
            InputError: these are not token ids of the model.
        """
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
            hooks: watched or edited activations, as pairs (name, function) or `hw.edit(...)`; each must fire.
            keep: positions whose logits are wanted; fewer are cheaper.
            stop_at: run only the layers before this one and return the residual stream that enters it.
            grad: record gradients (otherwise the run is under `torch.inference_mode()`).
            past_key_values: the keys and values of the tokens before, as a cache of transformers; the model gets it
                under the name that it knows.
            attention_mask: beside such a cache, `[batch, position]` over all tokens, 1 at real ones.
            position_ids: beside such a cache, `[batch, position]` of the inputs.

        Returns:
            Logits `[batch, position, d_vocab]` in the model's dtype and on its device, or with `stop_at` the residual
            stream `[batch, position, d_model]`.

        Raises:
            InputError: the inputs or positions cannot be used.
            InterventionError: a hook names no activation, or never fired.
            ModelError: the model takes no keys and values of tokens before, or an attention in it ran without them.
            NumericsError: the model computed NaN or infinity.
        """
        batch, past = self.tokenize(inputs), past_key_values
        beside = {"attention_mask": attention_mask, "position_ids": position_ids}
        options = {name: value for name, value in beside.items() if value is not None}
        listed = hooks_for(self, listed_hooks(hooks), batch, past is not None and past.get_seq_length() > 0)
        if stop_at is not None:
            stop_at = checked_layer("stop_at", stop_at, self.shape.n_layers, most=self.shape.n_layers)
        columns = None if stop_at is not None else columns_kept(keep, batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if checked_flag("grad", grad) else torch.inference_mode())
            stack.enter_context(self.hooks(listed))
            # The value from before, not False: runs nest, as where a hook runs the model.
            stack.callback(setattr, self, "_own_graph", self._own_graph)
            self._own_graph = True
            if past is None:
                stack.enter_context(reads(Reading.of(batch)))
            else:
                options |= cache_options(self, past)
                stack.enter_context(reached(attentions_of(self.raw)))
            out = forward(self, batch, columns, stop_at, options)
            finite_output(self, out, batch, columns, edited=bool(listed), cached=past is not None)
        if isinstance(keep, str) and columns is not None:
            # The columns of all rows' last tokens were computed; of each row its own is picked.
            here = to_device(torch.searchsorted(columns, batch.lengths - 1), out.device)
            out = out[torch.arange(len(out), device=out.device), here][:, None]
        return out

    @property
    def interventions(self) -> dict[str, object]:
        """What acts in the model now beside its weights, by the option that records it in a run.

        The hooks that `with model.hooks(...)` has attached and that may edit; what was put into the model past them
        since it was loaded (`headwater.models.fingerprint`); and the rules of its generation config. What another
        thread does is not seen: it is waited for.
        """
        with self.lock:
            acting: dict[str, object] = {HOOKS: self._attachments.edits(), PAST_HOOKS: self._modules.alterations()}
        acting["generation_config"] = settings(self.raw, RULES)
        return {option: what for option, what in acting.items() if what}

    @contextlib.contextmanager
    def hooks(self, hooks: Iterable[Hook | PromptHook]) -> Iterator[None]:
        """Attach hooks for as long as the context lasts; no other thread can run the model meanwhile.

        Raises:
            InputError: a hook is not a pair of a name and a function of (activation, hook).
            InterventionError: a hook names no activation, or one that is not what `shape` says; or the model ran in the
                context and a hook did not fire, returned what cannot replace the activation, wrote into it without
                returning it, or its edit was thrown away (attention patterns of GPT-J, GPT-Neo and OPT can only be
                read).
        """
        if not (listed := hooks_for(self, listed_hooks(hooks), None)):
            with self.lock:
                yield
            return
        with self.lock, discarded_edits_raise(self._reporters, self.shape):
            hook_dict = self.raw.hook_dict
            attached = []
            for name, function in listed:
                place = place_named(name)
                if place and (reason := place[0].lacks(self, place[1])):
                    raise InterventionError(reason)
                if name not in hook_dict:
                    raise InterventionError(
                        f"{self.name} has no activation named {name!r}.{did_you_mean(name, hook_dict)}"
                    )
                if place is None:
                    attached.append(Attached(name, function))
                else:
                    attached.append(Attached(name, function, place[0], place[0].lacks(self, place[1], edited=True)))
            # Tells a context in which the model never ran, where no hook can fire, from one with a dead hook.
            ran = Attached(hook_name("resid_pre"), read_hook(lambda activation, hook: None))
            with self._attachments.attached([*attached, ran]):
                yield
        if ran.fired:
            refuse_silent(attached)

    cache = cache_collection.cache
    generate = generation.generate

    def begin_graphs_at(self, embedding: torch.nn.Module) -> None:
        """Let `raw` be called with gradients though its parameters are frozen, as TransformerLens's own tools do.

        Their graphs begin at what this module gives; those of `run` begin where a hook says.
        """

        def begin(module: Any, args: Any, out: Tensor) -> Tensor | None:
            ours = self._own_graph or not torch.is_grad_enabled() or out.requires_grad
            # Cloned, since a leaf that takes gradients must not be written into, as hooks may do.
            return None if ours else out.detach().requires_grad_(True).clone()

        embedding.register_forward_hook(begin)

    @cached_property
    def _attachments(self) -> Attachments:
        return Attachments(self.raw)

    @cached_property
    def _reporters(self) -> list[torch.nn.Module]:
        """The attentions that show a hook what has been used already (GPT-J, GPT-Neo, OPT)."""
        return [module for module in self.raw.modules() if hasattr(type(module), REPORT)]


def check_model(model: Any, option: str = "model") -> None:
    """Refuse what `hw.load` did not give."""
    if not isinstance(model, HookedModel):
        found = type(model).__name__
        raise InputError(f"{option} must be what hw.load returns, found a {found}: hw.load(...) it first.")


# Hints, not errors, since each of these has a use; but what comes out is another thing than most who write it mean.


MARKS = ("<|", "[INST]", "<start_of_turn>")
"""What chat templates write that need not be a special token of the tokenizer."""


def warn_of_two_beginnings(batch: Batch, beginning: int | None) -> None:
    """Warn where a sequence begins with two beginning-of-sequence tokens: models know texts with one or none."""
    if beginning is None or batch.tokens.shape[1] < 2:
        return
    if twice := ((batch.tokens[:, :2] == beginning) & batch.mask[:, :2]).all(1).nonzero().flatten().tolist():
        others = f" ({len(twice):,} of {len(batch):,} prompts do)" if len(twice) > 1 else ""
        warnings.warn(
            f"Prompt {batch.name(twice[0])} begins with two beginning-of-sequence tokens{others}. A chat template "
            "writes one itself, and token ids may hold one: leave the second out.",
            stacklevel=2,
        )


def warn_of_no_template(model: HookedModel, texts: Sequence[str]) -> None:
    """Warn, once per model, where one whose tokenizer has a chat template reads texts that hold none of its marks.

    Of a model in a package, which is looked into with texts that break off, this is said of questions alone.
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
            f"{model.name} has a chat template and reads plain text without it: an instruct model may do otherwise in "
            "a chat. Use context='chat' where there is such an option, or give messages in place of a text: "
            "[{'role': 'user', 'content': text}]. This warning is given once.",
            stacklevel=2,
        )
