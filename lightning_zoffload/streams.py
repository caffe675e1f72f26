"""Streams of an accelerator: queues of work that run beside each other. Nothing CUDA-only."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

#: A queue and a point in one, opaque to the caller.
Stream = Any
Event = Any


class Streams(Protocol):
    """What copies need of a device's streams."""

    def current(self) -> Stream:
        """The stream that the calling thread's compute goes to."""

    def new(self) -> Stream:
        """Another stream."""

    def record(self, stream: Stream) -> Event:
        """The point that ``stream`` has been filled to; has ``synchronize()`` for host threads."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on starts after ``event``."""

    def copy(self, source: Tensor, destination: Tensor, stream: Stream) -> None:
        """Adds a copy to ``stream``. The caller keeps both tensors alive until it is done."""


class AcceleratorStreams:
    """The streams of ``torch.accelerator``.

    Args:
        device: Which device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        """See :class:`Streams`."""
        return torch.accelerator.current_stream(self._device)

    def new(self) -> Stream:
        """See :class:`Streams`."""
        return torch.Stream(self._device)

    def record(self, stream: Stream) -> Event:
        """See :class:`Streams`."""
        return stream.record_event()

    def wait(self, stream: Stream, event: Event) -> None:
        """See :class:`Streams`."""
        stream.wait_event(event)

    def copy(self, source: Tensor, destination: Tensor, stream: Stream) -> None:
        """See :class:`Streams`."""
        before = self.current()
        torch.accelerator.set_stream(stream)
        try:
            destination.copy_(source, non_blocking=True)
        finally:
            torch.accelerator.set_stream(before)
