"""Hooks that stay attached while a model writes: they act in its steps, and in no other run meanwhile.

Attaching hooks costs as much as some layers of a small model, so it is done once and not at every step. What each hook
does is made anew for every step, where it hangs on the tokens that are read (`headwater.models.edits.PromptHook`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from headwater.models.edits import Attached, Hook, TrustedHook, refuse_silent
from headwater.models.sites import place_named

if TYPE_CHECKING:
    from headwater.models.model import Model


class _Gate:
    """What is attached in place of one hook, and lets it act while a step runs."""

    def __init__(self) -> None:
        self.now: Attached | None = None

    def __call__(self, activation: Any, hook: object) -> Tensor | None:
        return None if self.now is None else self.now.act(activation, hook)

    def waits(self) -> bool:
        """Whether no step runs."""
        return self.now is None


class StandingHooks:
    """The places of some hooks of a model, attached until `close`."""

    def __init__(self, model: Model, hooks: Sequence[Hook]):
        self._names = [name for name, _ in hooks]
        places = map(place_named, self._names)
        self._read_only = [at and at[0].lacks(model, at[1], edited=True) for at in places]
        self._gates = [_Gate() for _ in hooks]
        placed = [
            (name, TrustedHook(gate, _may_edit(function), may_be_silent=True, waits=gate.waits))
            for (name, function), gate in zip(hooks, self._gates, strict=True)
        ]
        self._attached = contextlib.ExitStack()
        self._attached.enter_context(model.hooks(placed))

    def fit(self, hooks: Sequence[Hook]) -> bool:
        """Whether these hooks act at the same places."""
        return self._names == [name for name, _ in hooks]

    @contextlib.contextmanager
    def acting(self, hooks: Sequence[Hook]) -> Iterator[None]:
        """Let hooks act at these places for as long as the context lasts, in which the model runs once.

        Raises:
            InterventionError: one did not fire.
        """
        attached = [Attached(*hook, why) for hook, why in zip(hooks, self._read_only, strict=True)]
        try:
            for gate, one in zip(self._gates, attached, strict=True):
                gate.now = one
            yield
        finally:
            for gate in self._gates:
                gate.now = None
        refuse_silent(attached)

    def close(self) -> None:
        """Take them away."""
        self._attached.close()


def _may_edit(function: Any) -> bool:
    return not isinstance(function, TrustedHook) or function.edits
