"""Activations brought to where a cache holds them: from an accelerator by two pinned buffers, elsewhere as they are.

What lies on a CUDA device and goes to the host takes this way, while the model runs on:

1. A copy of its own is made on the device, in the order of the model's operations: the model may write into the
   activation afterwards. It keeps its dtype, so bfloat16 is two bytes a number on the wire.
2. A stream of its own waits for that copy, and moves it into one of two pinned buffers; an event marks the end.
3. Before a buffer is used again, and when the batch ends, its event is waited for; then the host reads the buffer and
   writes the numbers into their place, in the cache's dtype.

When a `with` block of `Transfer` ends, everything is in its place; if it ends with an error, whatever is still moving
is waited for and not read. Everything else (a CPU, a cache on the device) is written at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

BUFFER_BYTES = 2**26
"""Of each of the two buffers; what is larger goes in parts. One row that is larger has a buffer of its size."""

Place: TypeAlias = Callable[[slice, Tensor], None]
"""Writes rows of an activation where they belong: which of its rows, and these. What it is given it must not keep."""


@runtime_checkable
class Lane(Protocol):
    """A way from one device to the host."""

    def buffer(self, nbytes: int) -> Tensor:
        """Return memory of the host, in bytes, that the device can write to."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy what the device's operations so far have made; return what waits until it is there."""
        ...


class CudaLane:
    """A stream beside the one in which the model runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        """Return pinned memory."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, into: Tensor, source: Tensor) -> Callable[[], None]:
        """Begin to copy once the current stream has made `source`, which must live until the copy was waited for."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event.synchronize


def lane_from(device: torch.device) -> Lane | None:
    """Return a way from a device to the host that does not stop it; None where there is none to gain."""
    return CudaLane(device) if device.type == "cuda" else None


class _Moving(NamedTuple):
    """What is on its way: it holds on to the memory that is read and to that which is written."""

    source: Tensor
    arriving: Tensor
    rows: slice
    place: Place
    wait: Callable[[], None]


class _Pair:
    """The two buffers of a device, used in turn."""

    def __init__(self, lane: Lane):
        self.lane = lane
        self.buffers: list[Tensor | None] = [None, None]
        self.moving: list[_Moving | None] = [None, None]
        self.turn = 0

    def send(self, source: Tensor, rows: slice, place: Place) -> None:
        """Begin to move rows into the buffer whose turn it is, after what it held has been put into its place."""
        self.settle(self.turn)
        nbytes = source.numel() * source.element_size()
        buffer = self.buffers[self.turn]
        if buffer is None or len(buffer) < nbytes:
            self.buffers[self.turn] = None  # the old one goes before the new one is made
            buffer = self.buffers[self.turn] = self.lane.buffer(max(nbytes, BUFFER_BYTES))
        arriving = buffer[:nbytes].view(source.dtype).view(source.shape)
        self.moving[self.turn] = _Moving(source, arriving, rows, place, self.lane.copy(arriving, source))
        self.turn = 1 - self.turn

    def settle(self, which: int) -> None:
        """Wait for what is on its way into a buffer, and put it into its place."""
        moving = self.moving[which]
        if moving is not None:
            moving.wait()
            self.moving[which] = None
            moving.place(moving.rows, moving.arriving)

    def settle_all(self) -> None:
        """Wait for both, the older first."""
        for which in (self.turn, 1 - self.turn):
            self.settle(which)

    def abandon(self) -> None:
        """Wait for both, so that nothing is written into memory that is free, and read neither."""
        for which, moving in enumerate(self.moving):
            if moving is not None:
                with contextlib.suppress(Exception):  # an error is on its way already
                    moving.wait()
            self.moving[which] = None


class Transfer:
    """Brings activations into their places; for one batch after another, as `with transfer:`."""

    def __init__(self) -> None:
        self._pairs: dict[torch.device, _Pair | None] = {}

    def bring(self, activation: Tensor, target: Tensor, place: Place) -> None:
        """Have rows of an activation written into their place, now or before the `with` block ends.

        Args:
            activation: rows along its first axis, on any device.
            target: what `place` writes into, for the device on which it lies.
            place: what writes them.
        """
        pair = self._pair_of(activation.device) if target.device.type == "cpu" else None
        if pair is None or not activation.numel():
            place(slice(0, len(activation)), activation)
            return
        own = activation.detach().clone(memory_format=torch.contiguous_format)
        each = max(1, BUFFER_BYTES // (own[0].numel() * own.element_size()))
        for start in range(0, len(own), each):
            rows = slice(start, min(start + each, len(own)))
            pair.send(own[rows], rows, place)

    def _pair_of(self, device: torch.device) -> _Pair | None:
        if device not in self._pairs:
            lane = lane_from(device)
            self._pairs[device] = None if lane is None else _Pair(lane)
        return self._pairs[device]

    def __enter__(self) -> Transfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pairs = [pair for pair in self._pairs.values() if pair is not None]
        try:
            if error is None:
                for pair in pairs:
                    pair.settle_all()
        finally:
            for pair in pairs:
                pair.abandon()
