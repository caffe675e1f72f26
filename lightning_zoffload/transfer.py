"""Copies between device and host. Every byte that crosses the bus goes through here.

Gradients gather in *staging buffers* on the device, a few that are used in turn, so that device
memory for gradients does not grow with the model. :class:`InlineTransfer` is for a device that is
the host; :class:`StreamTransfer` overlaps copies with compute. Who must wait for whom is written in
this file alone; the streams themselves are behind :class:`Streams`, so that tests can put their own
in the place of the accelerator's.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.streams import Streams
from lightning_zoffload.trace import Phase, span


class Landing(Protocol):
    """The end of a copy to the host."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the bytes are there."""


class Transfer(Protocol):
    """What a step needs.

    Attributes:
        tile: Elements to update and upload as a unit.
        bytes_down: What has crossed the bus to the host so far.
        bytes_up: And back.
    """

    tile: int
    bytes_down: int
    bytes_up: int

    def lend(self, exchange: Tensor) -> Tensor | None:
        """A staging buffer of ``exchange``'s length and dtype; ``None`` if all are lent."""

    def stage(self, gradient: Tensor, place: Tensor) -> None:
        """Copies a gradient, flat, into a part of a staging buffer, in the order of compute."""

    def download(self, staged: Tensor, exchange: Tensor) -> Landing:
        """Sends a part of a staging buffer to the host."""

    def give_back(self, staging: Tensor) -> None:
        """Returns a staging buffer, whose downloads may still be under way."""

    def uploads_follow_compute(self) -> None:
        """Uploads from now on come after all compute so far, which may read the parameters."""

    def upload(self, exchange: Tensor, parameters: Tensor) -> None:
        """Sends parameters to the device. Any thread may call it."""

    def finish_uploads(self) -> None:
        """Compute from now on comes after all uploads so far."""

    def synchronize(self) -> None:
        """Blocks the calling thread until all copies are done."""


class InlineTransfer:
    """For a device that is the host: gradients are staged in the exchange buffer itself.

    Args:
        num_threads: Threads that copy parameters.
    """

    tile = sys.maxsize  # nothing overlaps, and each kernel call wakes threads

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self.bytes_down = 0
        self.bytes_up = 0

    def lend(self, exchange: Tensor) -> Tensor | None:
        """See :class:`Transfer`."""
        return exchange

    def stage(self, gradient: Tensor, place: Tensor) -> None:
        """See :class:`Transfer`."""
        with span(Phase.GRADIENT_DOWN):
            place.copy_(gradient)

    def download(self, staged: Tensor, exchange: Tensor) -> Landing:
        """See :class:`Transfer`. The bytes are there already; they count all the same."""
        self.bytes_down += exchange.nbytes
        return _LANDED

    def give_back(self, staging: Tensor) -> None:
        """See :class:`Transfer`."""

    def uploads_follow_compute(self) -> None:
        """See :class:`Transfer`."""

    def upload(self, exchange: Tensor, parameters: Tensor) -> None:
        """See :class:`Transfer`."""
        with span(Phase.PARAMETER_UP):
            kernels.copy(exchange, parameters, num_threads=self._num_threads)
        self.bytes_up += exchange.nbytes

    def finish_uploads(self) -> None:
        """See :class:`Transfer`."""

    def synchronize(self) -> None:
        """See :class:`Transfer`."""


class _Landed:
    def synchronize(self) -> None:
        pass


_LANDED = _Landed()


class StreamTransfer:
    """Copies on two streams of their own, one for each direction of the bus.

    Args:
        streams: The device's streams.
        device: The device.
        staging_buffers: How many may be in use at a time.
    """

    #: A few ms of host work: the last upload of a step is short, starting costs little beside it.
    tile = 2**22

    def __init__(self, streams: Streams, device: torch.device, staging_buffers: int = 4) -> None:
        self.bytes_down = 0
        self.bytes_up = 0
        self._streams = streams
        self._device = device
        self._down = streams.new()
        self._up = streams.new()
        self._free: list[tuple[Tensor, Any]] = [
            (torch.empty(0, dtype=torch.uint8, device=device), None) for _ in range(staging_buffers)
        ]
        self._lent: dict[int, Tensor] = {}

    def lend(self, exchange: Tensor) -> Tensor | None:
        """See :class:`Transfer`. The buffers grow to the largest bucket and stay."""
        if not self._free:
            return None
        buffer, sent = self._free.pop(0)
        if sent is not None:  # its last download must have read it before compute writes it anew
            self._streams.wait(self._streams.current(), sent)
        if buffer.nbytes < exchange.nbytes:
            buffer = torch.empty(exchange.nbytes, dtype=torch.uint8, device=self._device)
        staging = buffer[: exchange.nbytes].view(exchange.dtype).zero_()  # so that padding is zero
        self._lent[id(staging)] = buffer
        return staging

    def stage(self, gradient: Tensor, place: Tensor) -> None:
        """See :class:`Transfer`."""
        self._streams.copy(gradient, place, self._streams.current())

    def download(self, staged: Tensor, exchange: Tensor) -> Landing:
        """See :class:`Transfer`."""
        with span(Phase.GRADIENT_DOWN):
            # The gradients must have been staged. Compute has also waited for the last upload by
            # then, so that upload has read the exchange buffer before it is overwritten here.
            self._streams.wait(self._down, self._streams.record(self._streams.current()))
            self._streams.copy(staged, exchange, self._down)
            self.bytes_down += exchange.nbytes
            landing: Landing = self._streams.record(self._down)
            return landing

    def give_back(self, staging: Tensor) -> None:
        """See :class:`Transfer`."""
        self._free.append((self._lent.pop(id(staging)), self._streams.record(self._down)))

    def uploads_follow_compute(self) -> None:
        """See :class:`Transfer`."""
        self._streams.wait(self._up, self._streams.record(self._streams.current()))

    def upload(self, exchange: Tensor, parameters: Tensor) -> None:
        """See :class:`Transfer`."""
        with span(Phase.PARAMETER_UP):
            self._streams.copy(exchange, parameters, self._up)
            self.bytes_up += exchange.nbytes

    def finish_uploads(self) -> None:
        """See :class:`Transfer`."""
        self._streams.wait(self._streams.current(), self._streams.record(self._up))

    def synchronize(self) -> None:
        """See :class:`Transfer`."""
        for stream in (self._down, self._up):
            self._streams.record(stream).synchronize()
