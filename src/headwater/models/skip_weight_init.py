"""New modules are left unfilled: torch fills their weights with random numbers, which a model's own replace at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

RANDOM = frozenset((torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_, torch.nn.init.normal_))
"""What fills the weights of `Linear`, `Embedding` and transformers' `Conv1D` when they are made."""


class SkipWeightInit(TorchFunctionMode):
    """While it lasts, in this thread alone: new weights hold no numbers yet, and torch's random state stays."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or leave it out."""
        kwargs = kwargs or {}
        if func in RANDOM:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
