"""Open a model's parameters: the same `WeightSource` for a checkpoint, streamed, and for a model in memory.

Layers read ahead: while a CUDA device works on one layer's heads, the next layer's are on their way to it.

A thread reads the next layer from the checkpoint into pinned memory and has a stream of its own copy it over; the
caller's stream waits for the copy only when it asks for that layer. What is read ahead is the layer as far from the
last one as that was from the one before, so that processes that share the layers read ahead their own. On a CPU, and
for a model already in memory, layers are simply read when requested.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from headwater.calls import checked_call
from headwater.kernels.devices import usable_device
from headwater.models.checks import tokenizer_fits
from headwater.models.tokenizers import load_tokenizer
from headwater.models.weights.checkpoint import checkpoint_folder, open_checkpoint, revision_of
from headwater.models.weights.loaded_weights import LoadedWeights
from headwater.models.weights.streamed_weights import StreamedWeights
from headwater.models.weights.weight_source import OVWeights, WeightSource

if TYPE_CHECKING:
    from headwater.models.model import Model


@checked_call
def open_weights(
    what: Model | str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> WeightSource:
    """Open a model's parameters for reading.

    Args:
        what: a checkpoint folder, GGUF file or hub name, streamed with one layer in memory at a time, or a model in
            memory.
        device: where tensors are handed out; by default the CPU, or where the model in memory is.
        dtype: the dtype tensors are handed out in; by default float32, or the stored dtype where that is wider.
        revision: branch, tag or commit on the hub.
        trust_remote_code: let the checkpoint's own config and tokenizer code run.

    Raises:
        ModelError: the checkpoint cannot be found, is damaged or incomplete, or is of an unsupported architecture.
    """
    if not isinstance(what, str | Path):
        source: WeightSource = LoadedWeights(what)
    else:
        folder = checkpoint_folder(what, revision)
        checkpoint = open_checkpoint(folder, trust_remote_code)
        tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
        tokenizer_fits(tokenizer, checkpoint.config.vocab_size)
        source = StreamedWeights(str(what), revision_of(what, folder), checkpoint, tokenizer)
    source.device = usable_device(device or source.device)
    source.given_dtype = dtype or source.given_dtype
    return source


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

    def __exit__(self, *exception: object) -> None:
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)

    def __call__(self, layer: int) -> OVWeights:
        """Return one layer's factors, ready for the current stream."""
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
                    # Made on the reader's stream: else its memory could be handed out while `here` still reads it.
                    tensor.record_stream(here)
        return factors

    def _read(self, layer: int) -> _Arrival:
        if self._stream is None:
            return self.weights.ov(layer), None
        with torch.cuda.stream(self._stream):
            return self.weights.ov(layer), self._stream.record_event()
