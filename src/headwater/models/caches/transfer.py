"""Activations copied into a cache: from an accelerator by two pinned buffers, elsewhere at once.

What lies on a CUDA device and goes to the host takes this way, while the model runs on:

1. A copy is made on the device, in the order of the model's operations: the model may write into the activation
   afterwards. It keeps its dtype, so bfloat16 is two bytes a number on the wire.
2. Another stream waits for that copy, and moves it into one of two pinned buffers; an event marks the end.
3. Before a buffer is used again, and when the batch ends, its event is waited for; then the host reads the buffer and
   writes the numbers into the cache, in the cache's dtype.

When a `with` block of `Transfer` ends, everything is written; if it ends with an error, whatever is still moving is
waited for and not read. Everything else (a CPU, a cache on the device) is written at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

BUFFER_BYTES = 2**26
"""Of each of the two buffers; what is larger goes in parts. One row that is larger has a buffer of its size."""


class CudaLane:
    """A way from a device to the host: a stream beside the one in which the model runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Return pinned memory of the host."""
        # A buffer made in inference mode could not be written into by a later call outside of it.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy once the current stream has made `source`; return what waits until it is there."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event.synchronize


def lane_from(device: torch.device) -> CudaLane | None:
    """Return a way from a device to the host that does not stop it; None where there is none to gain."""
    return CudaLane(device) if device.type == "cuda" else None


class _Buffer:
    """Pinned memory of the host, and the rows that are on their way into it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._moving: tuple[Tensor, Callable[[], None], Tensor, Tensor, Tensor | None] | None = None

    def send(self, lane: CudaLane, source: Tensor, target: Tensor, where: Tensor | None) -> None:
        """Begin to copy rows that `settle` writes into their place."""
        if self._memory is None or len(self._memory) < source.nbytes:
            self._memory = None  # the old one goes before the new one is made
            self._memory = lane.buffer(max(source.nbytes, BUFFER_BYTES))
        arriving = self._memory[: source.nbytes].view(source.dtype).view(source.shape)
        # With the source, so that the memory that is read stays alive.
        self._moving = source, lane.copy(arriving, source), arriving, target, where

    def settle(self) -> None:
        """Wait for what is on its way, and write it into the cache."""
        if self._moving is not None:
            _, wait, arriving, target, where = self._moving
            wait()
            self._moving = None
            _put(arriving, target, where)

    def abandon(self) -> None:
        """Wait for what is on its way, so that nothing is written into memory that is free."""
        if self._moving is not None:
            with contextlib.suppress(Exception):  # an error is raised already
                self._moving[1]()
        self._moving = None


class Transfer:
    """Writes activations into a cache; for one batch after another, as `with transfer:`."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, CudaLane | None] = {}
        self._buffers = [_Buffer(), _Buffer()]  # the older first

    def write(
        self,
        activation: Shaped[Tensor, "row ..."],
        target: Shaped[Tensor, "place ..."],
        where: Int[Tensor, " row"] | None = None,
    ) -> None:
        """Write an activation into the rows `where` of a tensor, now or before the `with` block ends.

        With where=None it is written into the whole tensor.
        """
        if where is not None and len(where) and bool((where.diff() == 1).all()):
            # Rows that follow one another are a slice, and copying into one is quicker.
            target, where = target[int(where[0]) : int(where[-1]) + 1], None
        device = activation.device
        if device not in self._lanes:
            self._lanes[device] = lane_from(device)
        lane = self._lanes[device] if target.device.type == "cpu" else None
        if lane is None or not activation.numel():
            _put(activation, target, where)
            return
        source = activation.detach().clone(memory_format=torch.contiguous_format)
        n_rows = max(1, BUFFER_BYTES // source[0].nbytes)
        for start in range(0, len(source), n_rows):
            rows = slice(start, start + n_rows)
            self._buffers.reverse()
            self._buffers[1].settle()
            self._buffers[1].send(
                lane, source[rows], *((target[rows], None) if where is None else (target, where[rows]))
            )

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is None:
                for buffer in self._buffers:
                    buffer.settle()
        finally:
            for buffer in self._buffers:
                buffer.abandon()


def _put(rows: Tensor, target: Tensor, where: Tensor | None) -> None:
    if where is None:
        target.copy_(rows)
    else:
        target[where] = rows.to(target.device, target.dtype)
