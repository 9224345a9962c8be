"""What a model is to the files below `headwater.models.hooked`: its fields and its identity in the record of a run.

Identity. A record that named the model it was loaded from would be wrong of weights that were edited since, and of a
model into which something was put. So weights are hashed when a run asks, and modules are compared with what they
contained when the model was loaded (`headwater.models.fingerprint`, which knows when neither can have changed).

The lock. One thread runs a model at a time. A fork copies the memory and one thread. Locks of the others stay locked
for ever, so the copy of a model that another thread was running is refused there: its hooks are halfway, and nobody
will take them off. OpenMP's threads are gone too, and its next parallel loop would wait for them for ever; so, as in
the workers of torch's data loaders, a forked process computes with one thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import ModelError
from headwater.models.families import ModelShape, family_named, text_config
from headwater.models.fingerprint import KnownModules, KnownWeights, SameModules, is_a
from headwater.models.tokens import Batch, Bos, Inputs, Tokenizer, resolve_bos
from headwater.runs.identity import tokenizer_digest


class RunLock:
    """Held while a model runs; the thread that holds it may take it again.

    Raises:
        ModelError: on entering, in a process that was forked while another thread was running it.
    """

    def __init__(self) -> None:
        self._lock, self._torn = threading.RLock(), False
        _LOCKS.add(self)

    def __enter__(self) -> None:
        if self._torn:
            raise ModelError(
                "This process was forked while another thread was running the model, so its copy of the model is "
                "halfway through that run; fork while no thread runs it, or load the model in the new process."
            )
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def forked(self) -> None:
        """Find out, in a new process, whether a thread that is not there holds the lock."""
        # Reentrant: this succeeds too where the thread that forked holds the lock, and that thread is here.
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._torn = True


# Weak: a lock whose model is gone needs no look after a fork.
_LOCKS: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forked() -> None:
    if _LOCKS:
        torch.set_num_threads(1)
    for lock in _LOCKS:
        lock.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forked)


@checked_calls
class Model:
    """A transformer with hooks; what it does is in `headwater.models.hooked.HookedModel`.

    Attributes:
        raw: the TransformerBridge (or, under transformer-lens 3.9, the HookedTransformer) itself.
        name: the hub name, folder or class the model came from.
        revision: the revision of the hub, when known; of a GGUF file its name, types of numbers and SHA-256.
        shape: the sizes.
        config: the transformers config, or TransformerLens's own for models that have no other.
        tokenizer: may be None.
        bos: the ids that every text begins with; `hw.load(..., bos=)` chooses others.
        default_bos: those that it would begin with by default.
        lock: taken while the model runs; take it to make several runs one.
        hinted: which hints were given that are given once.
        misfits: by site and layer, why there is none, or one that is not what its name says; it is refused.
        read_only: by site and layer, why it can be read but not edited.
        looks_ahead: whether its attention reads later positions, too, as was seen when it was loaded.
        takes_padding: whether a text beside a longer one has the logits that it has alone, as was seen then.
        steps_checked: whether its blocks, called one by one, have been seen to give what the whole model gives.
        start_checked: whether rows after what they begin with were seen to give what whole ones give; None before that.
        heads_checked: whether each head was seen to depend on its own queries, keys and values alone.
        factors_checked: which factors of which layers' heads were checked, with the fingerprint of these weights.
        head_checked: which unembedding was seen to give its logits; see `headwater.models.unembedding`.
        unwrapped_checked: whether it gives the same without TransformerLens's wrappers but for some modules, by these.
        without_wrappers: itself so, put together for the last run that took it; see `headwater.models.bare_model`.
    """

    def __init__(
        self,
        raw: Any,
        *,
        name: str,
        shape: ModelShape,
        config: Any,
        tokenizer: Tokenizer | None = None,
        revision: str | None = None,
    ):
        self.raw = raw
        self.name = name
        self.revision = revision
        self.shape = shape
        self.config = config
        self.tokenizer = tokenizer
        self.bos = self.default_bos = self.resolve_bos(None)
        self.lock = RunLock()
        self.hinted = set[str]()
        self.misfits: Mapping[tuple[str, int], str] = {}
        self.read_only: Mapping[tuple[str, int], str] = {}
        self.looks_ahead = False
        self.takes_padding = True
        self.steps_checked = False
        self.start_checked: bool | None = None
        self.heads_checked = False
        self.factors_checked: tuple[str, set[str]] | None = None
        self.head_checked: tuple[object, ...] | None = None
        self.unwrapped_checked: dict[frozenset[int], bool] = {}
        self.without_wrappers: Any = None
        self._weights = KnownWeights(raw, shape, self.rotary_by_length)
        self._modules = KnownModules(raw)
        self._hashes: tuple[str, str] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(p.dtype for p in self.raw.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Where the inputs of the model go."""
        return next(iter(self.raw.parameters())).device

    @cached_property
    def spread(self) -> bool:
        """Whether its layers lie on several devices."""
        return len({parameter.device for parameter in self.raw.parameters()}) > 1

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

    def resolve_bos(self, bos: Bos) -> tuple[int, ...]:
        """Return the ids that texts would begin with, by the option `bos` of `hw.load`."""
        return resolve_bos(bos, self.tokenizer, getattr(self.raw.cfg, "default_prepend_bos", True))

    # Identity

    @property
    def fingerprint(self) -> str:
        """A hash of the weights and the configuration as they are now, the same for a folder loaded or streamed."""
        return self._hashes[0] if self._hashes else self._weights.fingerprint()

    @property
    def tokenizer_digest(self) -> str:
        """A hash of the tokenizer and of how texts begin; "none" without one."""
        if self._hashes:
            return self._hashes[1]
        begins = "" if self.bos == self.default_bos else f", texts begin with {self.bos}"
        return tokenizer_digest(self.tokenizer) + begins

    def digest(self) -> str:
        """Name this model in the identity of what holds it."""
        return f"{self.fingerprint} {self.tokenizer_digest}"

    @contextlib.contextmanager
    def hashed_once(self) -> Iterator[None]:
        """Hash weights and tokenizer once for all runs inside: they must stay as they are."""
        before, self._hashes = self._hashes, (self.fingerprint, self.tokenizer_digest)
        try:
            yield
        finally:
            self._hashes = before

    def settle(self) -> None:
        """Take what is in the model's modules now for what belongs there: it has been loaded."""
        self._modules = KnownModules(self.raw)

    def as_loaded(self) -> SameModules | None:
        """Return what its modules hold where nothing acts in the model beside its weights, and nobody watches it.

        The same object as last time where they hold the same objects; None where something acts or watches.
        """
        with self.lock:
            return self._modules.as_loaded()

    if TYPE_CHECKING:  # HookedModel's own

        @property
        def interventions(self) -> dict[str, object]:
            """What acts in the model beside its weights."""

        def tokenize(self, inputs: Inputs, *, mask: Tensor | None = None) -> Batch:
            """Make a right-padded batch."""

        def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
            """Return the text of each token."""

        def run(
            self,
            inputs: Inputs,
            hooks: Iterable[Any] = (),
            *,
            keep: Any = None,
            stop_at: int | None = None,
            grad: bool = False,
            past_key_values: Any = None,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
        ) -> Tensor:
            """Run inputs, with hooks."""

        def hooks(self, hooks: Iterable[Any]) -> AbstractContextManager[None]:
            """Attach hooks for as long as the context lasts."""


def rotary_by_length(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules of a model that make rotary embeddings which depend on a text's length (longrope)."""
    # vars, not getattr: a bridge's wrapper answers for the module that it wraps, which would be listed twice.
    return [module for module in model.modules() if vars(module).get("rope_type") == "longrope"]


def is_bridge(raw: object) -> bool:
    """Whether a model is a TransformerBridge, and not a HookedTransformer."""
    return is_a(raw, "TransformerBridge")


RULES: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}
"""Settings of a generation config that generation obeys, each with the value that says nothing; None never does."""


def settings(raw: object, names: Mapping[str, object]) -> dict[str, object]:
    """Return which of some settings the generation config of a model has, for the record of a run."""
    config = generation_config(raw)
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None and value != names[name]}


def generation_config(raw: object) -> Any:
    """Return the generation config of the model of transformers, where there is one."""
    return getattr(getattr(raw, "original_model", None), "generation_config", None)


def logit_scale(model: Model) -> float:
    """By what a model multiplies what its unembedding gives (Cohere, Granite)."""
    family = family_named(model.shape.architecture)
    return 1.0 if family is None or family.logit_scale is None else float(family.logit_scale(text_config(model.config)))


def residual_scale(model: Model) -> float:
    """By what a model's blocks multiply what attention and MLP write before it is added (Granite)."""
    family = family_named(model.shape.architecture)
    name = None if family is None else family.residual_scale
    return 1.0 if name is None else float(getattr(text_config(model.config), name))
