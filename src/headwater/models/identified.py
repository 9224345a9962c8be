"""What tells a model from others in the record of a run: its weights as they are now, tokenizer, and what acts in it.

A record that named the model it was loaded from would be wrong of weights that were edited since, and of a model into
which something was put. So weights are hashed when a run asks (`headwater.models.weights.fingerprint` knows when they
cannot have changed), and modules are compared with what they held when the model was loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater.models.edits import Attachments
from headwater.models.foreign_modules import KnownModules
from headwater.models.generation_config import RULES, settings
from headwater.models.tokenizers import Bos, resolve_bos
from headwater.models.weights.fingerprint import KnownWeights
from headwater.runs.identity import tokenizer_digest
from headwater.runs.record import HOOKS, PAST_HOOKS

if TYPE_CHECKING:
    from headwater.models.foreign_modules import SameModules
    from headwater.models.model import Model as Surface
    from headwater.models.shape import ModelShape
else:
    Surface = object


class Identified(Surface):
    """A model that runs are recorded of."""

    def __init__(self, raw: object, shape: ModelShape):
        self._attachments = Attachments(raw)
        self._weights = KnownWeights(raw, shape)
        self._modules = KnownModules(raw)
        self._held: tuple[str, str] | None = None

    @property
    def fingerprint(self) -> str:
        """A hash of the weights and the configuration as they are now, the same for a folder loaded or streamed."""
        return self._held[0] if self._held else self._weights.fingerprint()

    @property
    def tokenizer_digest(self) -> str:
        """A hash of the tokenizer and of how texts begin; "none" without one."""
        if self._held:
            return self._held[1]
        begins = "" if self.bos == self.default_bos else f", texts begin with {self.bos}"
        return tokenizer_digest(self.tokenizer) + begins

    @property
    def interventions(self) -> dict[str, object]:
        """What acts in the model now beside its weights, by the option that records it in a run.

        The hooks that `with model.hooks(...)` has attached and that may edit; what was put into the model past them
        since it was loaded (`headwater.models.foreign_modules`); and the rules of its generation config. What another
        thread does is not seen: it is waited for.
        """
        with self.lock:
            found: dict[str, object] = {HOOKS: self._attachments.edits(), PAST_HOOKS: self._modules.alterations()}
        found["generation_config"] = settings(self.raw, RULES)
        return {option: what for option, what in found.items() if what}

    def resolve_bos(self, bos: Bos) -> tuple[int, ...]:
        """Return the ids that texts would begin with, by the option `bos` of `hw.load`."""
        return resolve_bos(bos, self.tokenizer, getattr(self.raw.cfg, "default_prepend_bos", True))

    def settle(self) -> None:
        """Take what stands in the model's modules now for what belongs there: it has been loaded."""
        self._modules = KnownModules(self.raw)

    def as_loaded(self) -> SameModules | None:
        """Return what its modules hold where nothing acts in the model beside its weights, and nobody watches it.

        The same object as last time where they hold the same objects; None where something acts or watches.
        """
        with self.lock:
            return self._modules.as_loaded()

    def digest(self) -> str:
        """Name this model in the identity of what holds it."""
        return f"{self.fingerprint} {self.tokenizer_digest}"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hash weights and tokenizer once for all runs inside: they must stay as they are."""
        before, self._held = self._held, (self.fingerprint, self.tokenizer_digest)
        try:
            yield
        finally:
            self._held = before
