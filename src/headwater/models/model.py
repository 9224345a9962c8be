"""What a model is to the files that `headwater.models.hooked` stands on: its surface, without what is behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwater.models.shape import ModelShape
    from headwater.models.tokens import Batch, Inputs


class Model(Protocol):
    """Something that makes batches of inputs and runs them with hooks; `HookedModel` says what each name means."""

    raw: Any
    name: str
    shape: ModelShape
    misfits: Mapping[str, str]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""

    @property
    def device(self) -> torch.device:
        """Where the inputs go."""

    def tokenize(self, inputs: Inputs) -> Batch:
        """Make a right-padded batch."""

    def token_strings(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each token."""

    def run(
        self,
        inputs: Inputs,
        hooks: Iterable[tuple[str, Callable[..., Tensor | None]]] = (),
        *,
        stop_at: int | None = None,
    ) -> Tensor:
        """Run inputs, with hooks."""
