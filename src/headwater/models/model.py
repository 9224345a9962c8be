"""What a model is to the files that `headwater.models.hooked` stands on: its surface, without what is behind it.

The lock that a model runs under: one thread at a time, and what becomes of it in a forked process.

A fork copies the memory and one thread. What the others held stays held for ever, so the copy of a model that another
thread was running is refused there: its hooks are halfway, and nobody will take them off. OpenMP's threads are gone
too, and its next parallel loop would wait for them for ever; so, as in the workers of torch's data loaders, a forked
process computes with one thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headwater.errors import ModelError
from headwater.models.tokens import Batch, Inputs
from headwater.runs.record import Recorded

if TYPE_CHECKING:
    from headwater.models.foreign_modules import SameModules
    from headwater.models.shape import ModelShape
    from headwater.models.tokenizers import Bos


class RunLock:
    """Held while a model runs; the thread that holds it may take it again.

    Raises:
        ModelError: on entering, in a process that was forked while another thread held it.
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
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._torn = True


_LOCKS: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forked() -> None:
    if _LOCKS:
        torch.set_num_threads(1)
    for lock in _LOCKS:
        lock.forked()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_forked)


class Model(Recorded, Protocol):
    """Something that makes batches of inputs and runs them with hooks; `HookedModel` says what each name means."""

    raw: Any
    name: str
    revision: str | None
    bos: tuple[int, ...]
    default_bos: tuple[int, ...]
    shape: ModelShape
    misfits: Mapping[tuple[str, int], str]
    read_only: Mapping[tuple[str, int], str]
    looks_ahead: bool
    takes_padding: bool
    config: Any
    tokenizer: PreTrainedTokenizerBase | None
    lock: RunLock
    hinted: set[str]
    unwrapped_checked: dict[frozenset[int], bool]
    without_wrappers: Any
    factors_checked: tuple[str, set[str]] | None

    @property
    def device(self) -> torch.device:
        """Where the inputs of the model go."""

    @property
    def rotary_by_length(self) -> Sequence[torch.nn.Module]:
        """What in it makes rotary embeddings that depend on a text's length."""

    @property
    def spread(self) -> bool:
        """Whether its layers lie on several devices."""

    def resolve_bos(self, bos: Bos) -> tuple[int, ...]:
        """Return the ids that texts would begin with, by the option `bos` of `hw.load`."""

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

    def as_loaded(self) -> SameModules | None:
        """Return what its modules hold where nothing acts in the model beside its weights, and nobody watches it."""


def is_bridge(raw: object) -> bool:
    """Whether a model is a TransformerBridge, and not a HookedTransformer."""
    return any(kind.__name__ == "TransformerBridge" for kind in type(raw).__mro__)
