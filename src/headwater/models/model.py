"""A model as the modules below `headwater.models.hooked` see it: its fields and its identity in the record of a run.

Identity. A record with only the name of the loaded model would be wrong after an edit of the weights or of the
modules. So weights are hashed when a run requests it, and modules are compared with their contents at load
(`headwater.models.fingerprint`, which knows when neither can have changed).

The lock. One thread runs a model at a time. A fork copies the memory but only one thread, so locks of other threads
stay locked forever. If another thread was running a model at the fork, the copy is refused: its run was interrupted
halfway, and no thread would remove its hooks. OpenMP's threads are gone too, and its next parallel loop would wait for
them forever; so a forked process computes with one thread, like the workers of torch's data loaders.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.calls import checked_calls
from headwater.errors import ModelError
from headwater.models.families import ModelShape, known_family, text_config
from headwater.models.fingerprint import KnownModules, KnownWeights, SameModules, is_a
from headwater.models.tokens import Batch, Bos, Tokenizer, resolve_bos
from headwater.runs.identity import tokenizer_digest


class RunLock:
    """Reentrant lock held while a model runs.

    Raises:
        ModelError: on entering, in a process that was forked while another thread was running the model.
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
        """Detect, in a forked process, whether a thread that no longer exists holds the lock."""
        # Reentrant: this also succeeds if the thread that forked holds the lock, since that thread exists here.
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._torn = True


# Weak: a lock whose model is gone needs no check after a fork.
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
    """A transformer with hooks; `headwater.models.hooked.HookedModel` adds its methods.

    Attributes:
        raw: the TransformerBridge (or, with transformer-lens 3.9, the HookedTransformer) itself.
        name: the hub name, folder or class the model came from.
        revision: the revision on the hub, if known; for a GGUF file its name, tensor types and SHA-256.
        shape: the sizes.
        config: the transformers config, or TransformerLens's own config for models without one.
        tokenizer: may be None.
        bos: the ids that every text begins with; set by `hw.load(..., bos=)`.
        lock: held while the model runs; hold it to make several runs atomic.
        hinted: the names of one-time hints that were already given.
        misfits: by site and layer, why the activation is missing or is not what its name says; using it is an error.
        read_only: by site and layer, why it can be read but not edited.
        is_bidirectional: whether its attention also reads later positions; tested at load.
        takes_padding: whether a text padded next to a longer one has the same logits as alone; tested at load.
        steps_checked: whether its blocks, called one by one, were found to reproduce the whole model.
        start_checked: whether rows run after a shared prefix were found to reproduce whole rows; None before the test.
        heads_checked: whether each head was found to depend only on its own queries, keys and values.
        factors_checked: which factors of which layers' heads were checked, with the fingerprint of these weights.
        head_checked: the unembedding that was found to reproduce its logits; see `headwater.models.unembedding`.
        unwrapped_checked: by the set of modules that keep wrappers, whether the model gives the same without the rest.
        without_wrappers: the model without wrappers, as built for its last run; see `headwater.models.bare_model`.
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
        self.bos = self.resolve_bos(None)
        self.lock = RunLock()
        self.hinted = set[str]()
        self.misfits: Mapping[tuple[str, int], str] = {}
        self.read_only: Mapping[tuple[str, int], str] = {}
        self.is_bidirectional = False
        self.takes_padding = True
        self.steps_checked = False
        self.start_checked: bool | None = None
        self.heads_checked = False
        self.factors_checked: tuple[str, set[str]] | None = None
        self.head_checked: tuple[object, ...] | None = None
        self.unwrapped_checked: dict[frozenset[int], bool] = {}
        self.without_wrappers: Any = None
        # vars, not getattr: a bridge's wrapper forwards attributes of the module it wraps, which would be listed twice.
        longrope = [module for module in raw.modules() if vars(module).get("rope_type") == "longrope"]
        self._weights = KnownWeights(raw, shape, longrope)
        self._modules = KnownModules(raw)
        self._hashes: tuple[str, str] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(p.dtype for p in self.raw.parameters() if p.is_floating_point())

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return next(iter(self.raw.parameters())).device

    @cached_property
    def spread(self) -> bool:
        """Whether its layers are on several devices."""
        return len({parameter.device for parameter in self.raw.parameters()}) > 1

    @property
    def n_logits(self) -> int:
        """Number of logits per token: `d_vocab`, except for models with a separate output vocabulary."""
        cfg = self.raw.cfg
        given = getattr(cfg, "d_vocab_out", -1)
        return given if given > 0 and given != cfg.d_vocab else self.shape.d_vocab

    def resolve_bos(self, bos: Bos) -> tuple[int, ...]:
        """Return the ids that texts begin with for a value of the option `bos` of `hw.load`."""
        return resolve_bos(bos, self.tokenizer, getattr(self.raw.cfg, "default_prepend_bos", True))

    # Identity

    @property
    def fingerprint(self) -> str:
        """A hash of the current weights and configuration, equal for a loaded and a streamed checkpoint folder."""
        return self._hashes[0] if self._hashes else self._weights.fingerprint()

    @property
    def tokenizer_digest(self) -> str:
        """A hash of the tokenizer; "none" without one."""
        return self._hashes[1] if self._hashes else tokenizer_digest(self.tokenizer)

    def digest(self) -> str:
        """Return this model's part of the identity of an object that contains it."""
        return f"{self.fingerprint} {self.tokenizer_digest} {self.bos}"

    @contextlib.contextmanager
    def hashed_once(self) -> Iterator[None]:
        """Hash weights and tokenizer once for all runs inside: they must not change."""
        before, self._hashes = self._hashes, (self.fingerprint, self.tokenizer_digest)
        try:
            yield
        finally:
            self._hashes = before

    def settle(self) -> None:
        """Record the current contents of the model's modules as those of the loaded model."""
        self._modules = KnownModules(self.raw)

    def as_loaded(self) -> SameModules | None:
        """Return the contents of its modules if only the weights act in the model and no hook reads from it.

        Returns the same object as last time if the modules hold the same objects; None if any hook or change is there.
        """
        with self.lock:
            return self._modules.as_loaded()

    if TYPE_CHECKING:  # HookedModel's own

        @property
        def interventions(self) -> dict[str, object]:
            """Everything besides the weights that now affects the model."""

        tokenize: Callable[..., Batch]
        token_strings: Callable[..., tuple[str, ...]]
        run: Callable[..., Tensor]
        hooks: Callable[..., AbstractContextManager[None]]


def is_bridge(raw: object) -> bool:
    """Whether a model is a TransformerBridge rather than a HookedTransformer."""
    return is_a(raw, "TransformerBridge")


TOKEN_RULES: dict[str, object] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    **dict.fromkeys(("sequence_bias", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
}
"""Generation config settings that generation applies, each with the value without effect; None never has an effect."""


def settings(raw: object, names: Mapping[str, object]) -> dict[str, object]:
    """Return those settings in `names` that the model's generation config sets, for the record of a run."""
    config = generation_config(raw)
    found = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None and value != names[name]}


def generation_config(raw: object) -> Any:
    """Return the generation config of the transformers model (if any)."""
    return getattr(getattr(raw, "original_model", None), "generation_config", None)


def logit_scale(model: Model) -> float:
    """Return the factor by which a model multiplies the output of its unembedding (Cohere, Granite)."""
    family = known_family(model.config)
    return 1.0 if family is None or family.logit_scale is None else float(family.logit_scale(text_config(model.config)))


def residual_scale(model: Model) -> float:
    """Return the factor that a model's blocks apply to attention and MLP outputs before adding them (Granite)."""
    family = known_family(model.config)
    name = None if family is None else family.residual_scale
    return 1.0 if name is None else float(getattr(text_config(model.config), name))
