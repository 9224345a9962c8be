"""Layers read ahead: while a CUDA device works on one layer's heads, the next layer's are on their way to it.

A thread reads the next layer from the checkpoint into pinned memory and has a stream of its own copy it over; the
caller's stream waits for the copy only when it asks for that layer. What is read ahead is the layer as far from the
last one as that was from the one before, so that processes that share the layers read ahead their own. On a CPU, and
for a model already in memory, layers are simply read when asked for.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor

from headwater.models.weights.streamed_weights import StreamedWeights
from headwater.models.weights.weight_source import OVWeights, WeightSource

_Arrival: TypeAlias = tuple[OVWeights, torch.cuda.Event | None]
"""A layer's factors, and what to wait for before they are there."""


class LayersAhead:
    """Calls `weights.ov`, one layer ahead where that pays. A context manager: leaving it ends the thread."""

    def __init__(self, weights: WeightSource, *, ahead: bool | None = None):
        """Read ahead on CUDA devices, or as `ahead` says."""
        self.weights = weights
        on_cuda = weights.device.type == "cuda"
        self.ahead = on_cuda and isinstance(weights, StreamedWeights) if ahead is None else ahead
        self._stream = torch.cuda.Stream(weights.device) if self.ahead and on_cuda else None
        self._reader = ThreadPoolExecutor(1, "layers-ahead") if self.ahead else None
        self._last: int | None = None
        self._coming: tuple[int, Future[_Arrival]] | None = None

    def __enter__(self) -> LayersAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def __call__(self, layer: int) -> OVWeights:
        """Return one layer's factors, ready for the current stream.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        if self._reader is None:
            return self.weights.ov(layer)
        if self._coming is None or self._coming[0] != layer:
            self._coming = layer, self._reader.submit(self._read, layer)
        factors, arrived = self._coming[1].result()
        following = layer + (1 if self._last is None else layer - self._last)
        self._last, self._coming = layer, None
        if layer < following < self.weights.shape.n_layers:
            self._coming = following, self._reader.submit(self._read, following)
        if arrived is not None:
            here = torch.cuda.current_stream(self.weights.device)
            here.wait_event(arrived)
            for tensor in vars(factors).values():
                if isinstance(tensor, Tensor):
                    tensor.record_stream(here)
        return factors

    def _read(self, layer: int) -> _Arrival:
        if self._stream is None:
            return self.weights.ov(layer), None
        with torch.cuda.stream(self._stream):
            return self.weights.ov(layer), self._stream.record_event()
