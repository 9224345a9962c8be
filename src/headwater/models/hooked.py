"""A model that can be run, watched and edited: TransformerLens's bridge behind a surface of a few names.

`model.tokenize` makes a batch, `model.run` gives logits (with hooks if asked), `model.cache` keeps activations. Hooks
go through one context manager, `model.hooks`, which promises four things:

1. every hook names an activation that exists, and it fired whenever the model ran: a dead hook is an error, because an
   experiment whose edit never happened looks like an experiment without effect;
2. an edit reaches all that the model computes from the activation, and no other hook (`headwater.models.edits`);
3. nothing is left behind, whatever is raised inside, KeyboardInterrupt included;
4. one thread at a time: TransformerLens's hooks are state of the model, so a second thread waits
   (`headwater.models.model` says what becomes of that in a forked process).
"""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.calls import checked_calls
from headwater.errors import InputError, InterventionError, did_you_mean
from headwater.foreign_names import missing
from headwater.kernels.devices import to_device
from headwater.models.bare_model import CachedBareModel
from headwater.models.cache_names import attentions_of, cache_options, reached
from headwater.models.caches.cache import Cache
from headwater.models.caches.collection import fill_cache
from headwater.models.checks import finite_output
from headwater.models.edits import (
    Attached,
    Hook,
    HookFunction,
    PromptHook,
    discarded_edits_raise,
    hooks_for,
    read_hook,
    refuse_silent,
    reporters,
)
from headwater.models.forward import forward, rotary_by_length
from headwater.models.generation.loop import checked_sampling
from headwater.models.generation.writing import Stream, Texts, write
from headwater.models.hints import warn_of_no_template, warn_of_two_beginnings
from headwater.models.identified import Identified
from headwater.models.model import RunLock
from headwater.models.part_names import Heads
from headwater.models.positions import Where
from headwater.models.reading import Keep, Reading, columns_kept, reads
from headwater.models.shape import ModelShape
from headwater.models.sites import Site, SiteName, hook_name, place_named
from headwater.models.tokenizers import said_tokens
from headwater.models.tokens import Batch, Inputs, make_batch, token_strings
from headwater.models.transformer_lens_names import TransformerLensNames
from headwater.options import checked_flag, checked_layer, shown, whole_numbers


class _WithAdvice(type):
    """The class of HookedModel: what it is asked for and has not, as `from_pretrained`, is told what to use."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            raise AttributeError(missing(f"The class {cls.__name__}", "model", name, dir(cls)))


@checked_calls
class HookedModel(Identified, TransformerLensNames, metaclass=_WithAdvice):
    """A transformer with hooks, in evaluation mode, its weights exactly as the checkpoint stores them.

    Attributes:
        raw: the TransformerBridge (or, under transformer-lens 3.9, the HookedTransformer) itself.
        name: the hub name, folder or class the model came from.
        revision: the revision of the hub, when known; of a GGUF file its name, types of numbers and SHA-256.
        shape: the sizes.
        config: the transformers config, or TransformerLens's own for models that have no other.
        tokenizer: may be None.
        bos: the ids that every text begins with; `hw.load(..., bos=)` chooses others.
        default_bos: those that it would begin with by default.
        lock: held while the model runs; hold it to make several runs one.
        hinted: which hints were given that are given once.
        steps_checked: whether its blocks, called one by one, have been seen to give what the whole model gives.
        heads_checked: whether each head was seen to depend on its own queries, keys and values alone.
        factors_checked: which factors of which layers' heads were checked, with the fingerprint of these weights.
        head_checked: which unembedding was seen to give its logits; see `headwater.models.unembedding`.
        unwrapped_checked: whether it gives the same without TransformerLens's wrappers but for some modules, by these.
        without_wrappers: itself so, put together for the last run that took it; see `headwater.models.bare_model`.
        misfits: by site and layer, why there is none, or one that is not what its name says; it is refused.
        read_only: by site and layer, why it can be read but not edited.
        looks_ahead: whether its attention reads later positions, too, as was seen when it was loaded.
        takes_padding: whether a text beside a longer one has the logits that it has alone, as was seen then.
    """

    def __init__(
        self,
        raw: Any,
        *,
        name: str,
        shape: ModelShape,
        config: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        revision: str | None = None,
    ):
        super().__init__(raw, shape)
        self.raw = raw
        self.name = name
        self.revision = revision
        self.shape = shape
        self.config = config
        self.tokenizer = tokenizer
        self.bos = self.default_bos = self.resolve_bos(None)
        self.lock = RunLock()
        self.hinted = set[str]()
        self.steps_checked = False
        self.heads_checked = False
        self.factors_checked: tuple[str, set[str]] | None = None
        self.unwrapped_checked: dict[frozenset[int], bool] = {}
        self.without_wrappers: CachedBareModel | None = None
        self.head_checked: tuple[object, ...] | None = None
        self.misfits: Mapping[tuple[str, int], str] = {}
        self.read_only: Mapping[tuple[str, int], str] = {}
        self.looks_ahead = False
        self.takes_padding = True
        self._own_graph = False

    if not TYPE_CHECKING:  # a type checker would take every name for one that is there

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            raise AttributeError(missing("A HookedModel", "model", name, dir(type(self)), vars(self).get("raw")))

    def __repr__(self) -> str:
        shape, weights = self.shape, f" ({self.revision})" if self.revision else ""
        return (
            f"HookedModel({self.name}{weights}: {shape.n_layers} layers × {shape.n_heads} heads, "
            f"d_model {shape.d_model}, {str(self.dtype).removeprefix('torch.')} on {self.device}{self._begins})"
        )

    def _repr_html_(self) -> str:
        begins = self._begins.removeprefix(", texts begin with ")
        rows = {"model": self.name, "revision": self.revision or "", **vars(self.shape), "dtype": self.dtype}
        rows["texts begin with"] = begins
        cells = "".join(f"<tr><th>{key}</th><td>{html.escape(str(value))}</td></tr>" for key, value in rows.items())
        return f"<table>{cells}<tr><th>device</th><td>{self.device}</td></tr></table>"

    @property
    def _begins(self) -> str:
        if self.tokenizer is None:
            return ""
        return f", texts begin with {said_tokens(self.tokenizer, self.bos)}"

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(p.dtype for p in self.raw.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where the inputs of the model go."""
        return next(iter(self.raw.parameters())).device

    @property
    def n_logits(self) -> int:
        """How many numbers it gives per token: as many as it knows tokens, but for models that answer in others."""
        cfg = self.raw.cfg
        given = getattr(cfg, "d_vocab_out", -1)
        return given if given > 0 and given != cfg.d_vocab else self.shape.d_vocab

    @cached_property
    def rotary_by_length(self) -> list[torch.nn.Module]:
        """What in it makes rotary embeddings that depend on a text's length."""
        return rotary_by_length(self.raw)

    @cached_property
    def spread(self) -> bool:
        """Whether its layers lie on several devices."""
        return len({parameter.device for parameter in self.raw.parameters()}) > 1

    def tokenize(self, inputs: Inputs, *, mask: Tensor | None = None) -> Batch:
        """Make a right-padded batch of a text, texts, lists of token ids, or a tensor of ids (with a mask if padded).

        A chat is a list of messages, `{"role": "user", "content": ...}`, and becomes the text that the tokenizer's chat
        template writes, up to where the answer begins; after a last message of the assistant, its continuation.
        Texts begin with `model.bos`, once; token ids are taken as they are.

        Raises:
            InputError: see `headwater.models.tokens.make_batch`.
        """
        shape = self.shape
        limits = {"d_vocab": shape.d_vocab, "n_ctx": shape.n_ctx}
        batch = make_batch(inputs, self.tokenizer, bos=self.bos, mask=mask, config=self.config, **limits)
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
            raise InputError(f"{shown(tokens)} are no token ids: give whole numbers.") from None
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
        batch = self.tokenize(inputs)
        past = past_key_values
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        options = {name: value for name, value in given.items() if value is not None}
        listed = hooks_for(self, hooks, batch, past is not None and past.get_seq_length() > 0)
        if stop_at is not None:
            stop_at = checked_layer("stop_at", stop_at, self.shape.n_layers, most=self.shape.n_layers)
        columns = None if stop_at is not None else columns_kept(keep, batch)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad() if checked_flag("grad", grad) else torch.inference_mode())
            stack.enter_context(self.hooks(listed))
            stack.enter_context(self._graph_begins_where_a_hook_says())
            if past is None:
                stack.enter_context(reads(Reading.of(batch)))
            else:
                options |= cache_options(self, past)
                stack.enter_context(reached(attentions_of(self.raw)))
            out = forward(self, batch, columns, stop_at, options)
            finite_output(self, out, batch, columns, edited=bool(listed), cached=past is not None)
        if isinstance(keep, str) and columns is not None:
            here = to_device(torch.searchsorted(columns, batch.lengths - 1), out.device)
            out = out[torch.arange(len(out), device=out.device), here][:, None]
        return out

    @contextlib.contextmanager
    def hooks(self, hooks: Iterable[Hook | PromptHook]) -> Iterator[None]:
        """Attach hooks for as long as the context lasts; no other thread can run the model meanwhile.

        Raises:
            InputError: a hook is no pair of a name and a function of (activation, hook).
            InterventionError: a hook names no activation, or one that is not what `shape` says; or the model ran in the
                context and a hook did not fire, returned what cannot stand for the activation, wrote into it without
                returning it, or its edit was thrown away (attention patterns of GPT-J, GPT-Neo and OPT can only be
                read).
        """
        listed = hooks_for(self, hooks, None)
        if not listed:
            with self.lock:
                yield
            return
        with self.lock, discarded_edits_raise(self._reporters, self.shape):
            known = self.raw.hook_dict
            attached = [self._attached(name, function, known) for name, function in listed]
            ran = Attached(hook_name("resid_pre"), read_hook(lambda activation, hook: None))
            with self._attachments.attached([*attached, ran]):
                yield
        if ran.fired:
            refuse_silent(attached)

    def cache(
        self,
        inputs: Inputs,
        *,
        sites: SiteName | str | Site | Iterable[SiteName | str | Site] | None = None,
        residual: bool | str | None = None,
        attention: bool | None = None,
        layers: Sequence[int] | None = None,
        positions: Where | Sequence[int] | None = None,
        heads: Heads = None,
        out: str | Path | None = None,
        batch_size: int = 16,
        device: str | torch.device = "cpu",
        progress: bool = True,
    ) -> Cache:
        """Run the model and keep what is asked for; see `headwater.models.caches.collection.fill_cache`."""
        return fill_cache(
            self,
            inputs,
            sites=sites,
            residual=residual,
            attention=attention,
            layers=layers,
            positions=positions,
            heads=heads,
            out=out,
            batch_size=batch_size,
            device=device,
            progress=progress,
        )

    def generate(
        self,
        prompts: Inputs,
        hooks: Iterable[Hook | PromptHook] = (),
        *,
        max_new_tokens: int = 32,
        do_sample: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        stop: str | Iterable[str] = (),
        return_tokens: bool = False,
        stream: Stream | None = None,
        batch_size: int = 64,
        progress: bool = True,
    ) -> Texts | tuple[Texts, list[list[int]]]:
        """Let the model continue prompts, with hooks if asked; see `headwater.models.generation.writing`.

        Greedy unless `do_sample`, and then the tokens are those of `generate` in transformers. Hooks act at every step.
        The first run reads the prompts, as in `run`: row by row, from column 0 on, shorter ones padded on the right.
        Each run after it reads one new token per row, so that activations have one column; which position that is, says
        `headwater.models.reading.now_reading()`. Rows are the prompts in their order, `batch_size` at a time.

        Args:
            prompts: anything `tokenize` takes.
            hooks: watched or edited activations; each must fire at every step.
            max_new_tokens: at most so many per prompt.
            do_sample: draw tokens at random.
            temperature: of the draws, default 1; lower is less random, and 0 takes the most probable token.
            top_p: draw only from the most probable tokens that together have this probability.
            top_k: draw only from so many most probable tokens.
            seed: of the draws. A prompt's draws depend on it and on the prompt alone (and on how many equal ones stand
                before it: repeat a prompt for several samples).
            stop: a text or texts; what a model writes ends right before the first of them, wherever tokens begin.
            return_tokens: return the ids too.
            stream: called with (number of a prompt, piece of its text) as the text grows.
            batch_size: prompts in one run.
            progress: show a bar while several batches run.

        Returns:
            The new text of each prompt, a list also for one prompt; its `run` is the record of what made it, hooks
            included. With `return_tokens` also the ids of the new tokens, with the end token or those of the stop
            string where a text ended by one.

        Raises:
            InputError: an option cannot be used or contradicts another, or prompts and new tokens are too long.
            InterventionError: see `run`.
            NumericsError: see `run`.
        """
        texts = write(
            self,
            prompts,
            hooks,
            sampling=checked_sampling(do_sample, temperature, top_p, top_k, self.shape.d_vocab),
            max_new_tokens=max_new_tokens,
            seed=seed,
            stop=stop,
            stream=stream,
            batch_size=batch_size,
            progress=checked_flag("progress", progress),
        )
        return (texts, texts.tokens) if checked_flag("return_tokens", return_tokens) else texts

    def begin_graphs_at(self, embedding: torch.nn.Module) -> None:
        """Let `raw` be called with gradients though its parameters are frozen, as TransformerLens's own tools do.

        Their graphs begin at what this module gives; those of `run` begin where a hook says.
        """

        def begin(module: Any, args: Any, out: Tensor) -> Tensor | None:
            ours = self._own_graph or not torch.is_grad_enabled() or out.requires_grad
            return None if ours else out.detach().requires_grad_(True).clone()

        embedding.register_forward_hook(begin)

    @contextlib.contextmanager
    def _graph_begins_where_a_hook_says(self) -> Iterator[None]:
        before, self._own_graph = self._own_graph, True
        try:
            yield
        finally:
            self._own_graph = before

    @cached_property
    def _reporters(self) -> list[torch.nn.Module]:
        return reporters(self.raw)

    def _attached(self, name: str, function: HookFunction, known: Mapping[str, Any]) -> Attached:
        place = place_named(name)
        if place and (reason := place[0].lacks(self, place[1])):
            raise InterventionError(reason)
        if name not in known:
            raise InterventionError(
                f"{self.name} has no activation named {name!r}.{did_you_mean(name, known, shown=3)}"
            )
        if place is None:
            return Attached(name, function)
        read_only = place[0].lacks(self, place[1], edited=True)
        return Attached(name, function, read_only, 1 + place[0].axes.index("position"))


def check_model(model: Any, option: str = "model") -> None:
    """Refuse what `hw.load` did not give."""
    if not isinstance(model, HookedModel):
        found = type(model).__name__
        raise InputError(f"{option} must be what hw.load returns, found a {found}: hw.load(...) it first.")
