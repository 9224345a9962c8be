"""What is computed while a model is put together and that nobody reads: left out.

TransformerLens looks at every attribute of its bridge, also at the embeddings joined with the positions, a copy of the
largest matrix of a small model; and torch fills new modules with random numbers, which are replaced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

RANDOM = frozenset((torch.nn.init.kaiming_uniform_, torch.nn.init.uniform_, torch.nn.init.normal_))
"""What fills the weights of `Linear`, `Embedding` and transformers' `Conv1D` when they are made."""


class NothingUnread(TorchFunctionMode):
    """While it lasts, in this thread alone: new weights hold no numbers yet, and embeddings are joined with nothing.

    Args:
        embedding: the token embeddings of the model that is put together; whoever joins them gets a `RuntimeError`, on
            which TransformerLens goes on to the next attribute.
    """

    def __init__(self, embedding: Tensor | None = None):
        super().__init__()
        self._embedding = embedding

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
        if func is torch.cat and self._embedding is not None and self._is_embedding(args[0][0]):
            raise RuntimeError("the embeddings are not joined while the model is put together")
        return func(*args, **kwargs)

    def _is_embedding(self, joined: Tensor) -> bool:
        assert self._embedding is not None
        return joined.data_ptr() == self._embedding.data_ptr() and joined.shape == self._embedding.shape
