"""One bucket's bytes on both sides of the bus.

The life of the data in a segment, each form under the name used everywhere:

    grad (device) -> exchanged gradient (host, 16 bit) -> master and moments (host, fp32)
                  -> exchanged parameter (same bytes)  -> parameter (device)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

import torch
from torch import Tensor

from lightning_zoffload.host_memory import HostBuffer
from lightning_zoffload.layout import BucketLayout
from lightning_zoffload.transfer import Transfer


class Exchanged(Enum):
    """What the exchange bytes of a segment hold."""

    NOTHING_NEW = "nothing new"
    GRADIENT = "a gradient to apply"


@dataclass(eq=False)
class Segment:
    """One parameter's place in a bucket. All tensors have the parameter's shape and strides.

    Attributes:
        name: The parameter's name, for messages.
        parameter: The user's parameter; its data is ``device``.
        offset: First element in the bucket.
        end: Just past the last one.
        device: What forward and backward see.
        exchange: The bytes that cross the bus, in the device dtype.
        master: The fp32 parameter, a leaf tensor.
        moments: The optimizer's fp32 state tensors in the bucket.
        exchanged: What ``exchange`` holds.
    """

    name: str
    parameter: Tensor
    offset: int
    end: int
    device: Tensor
    exchange: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    exchanged: Exchanged = Exchanged.NOTHING_NEW

    def bind(self) -> None:
        """Makes the parameter a view of the device bucket (again)."""
        self.parameter.data = self.device

    def receive_gradient(self, transfer: Transfer) -> None:
        """Moves ``parameter.grad`` into the exchange buffer and frees it on the device.

        Raises:
            RuntimeError: The gradient is sparse.
        """
        gradient = self.parameter.grad
        if gradient is None:
            return
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"The gradient of `{self.name}` is sparse ({gradient.layout}), which zero_offload"
                " cannot exchange. Use a dense gradient, e.g. `nn.Embedding(..., sparse=False)`."
            )
        transfer.download(gradient, self.exchange)
        self.parameter.grad = None
        self.exchanged = Exchanged.GRADIENT

    def discard_gradient(self) -> None:
        """Forgets a gradient that is applied or skipped."""
        self.exchanged = Exchanged.NOTHING_NEW


class Bucket:
    """Device parameters, exchange buffer, masters and moments of one bucket.

    Takes each parameter over as it is built: copies it to its master, makes it a view of the
    device bucket, and so gives its old storage up.

    Args:
        layout: Where each parameter lies.
        parameters: ``(name, parameter)`` of each segment of ``layout``, in its order.
        group_index: The param group of the optimizer that they belong to.
        moment_count: How many fp32 state tensors per parameter the host update keeps.
        device: Where forward and backward run.
        transfer: How bytes cross the bus.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[tuple[str, Tensor]],
        group_index: int,
        moment_count: int,
        device: torch.device,
        transfer: Transfer,
    ) -> None:
        self.group_index = group_index
        self._transfer = transfer
        exchange = HostBuffer(layout.numel, layout.dtype)
        master = HostBuffer(layout.numel, torch.float32)
        moments = [HostBuffer(layout.numel, torch.float32) for _ in range(moment_count)]
        self.device = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.exchange = exchange.flat
        self.master = master.flat
        self.moments = tuple(buffer.flat for buffer in moments)
        self.segments: list[Segment] = []
        for place, (name, parameter) in zip(layout.segments, parameters, strict=True):
            spec, offset = place.spec, place.offset
            segment = Segment(
                name=name,
                parameter=parameter,
                offset=offset,
                end=place.end,
                device=self.device.as_strided(spec.shape, spec.stride, offset),
                exchange=exchange.segment(offset, spec),
                master=master.segment(offset, spec),
                moments=tuple(buffer.segment(offset, spec) for buffer in moments),
            )
            segment.master.copy_(parameter.detach())
            segment.exchange.copy_(segment.master)
            transfer.upload(segment.exchange, segment.device)
            segment.bind()
            self.segments.append(segment)

    def runs_with_gradient(
        self, key: Callable[[Segment], Hashable] = lambda segment: None
    ) -> Iterator[tuple[slice, list[Segment]]]:
        """Contiguous runs of segments that hold a gradient and agree in ``key``.

        Yields:
            The run's elements in the bucket, padding between its segments included, and its
            segments. A bucket whose parameters all got a gradient is one run.
        """

        def run_key(segment: Segment) -> tuple[bool, Hashable]:
            has_gradient = segment.exchanged is Exchanged.GRADIENT
            return has_gradient, key(segment) if has_gradient else None

        for (has_gradient, _), members in groupby(self.segments, run_key):
            if has_gradient:
                run = list(members)
                yield slice(run[0].offset, run[-1].end), run

    def upload(self, elements: slice = slice(None)) -> None:
        """Sends the exchanged parameters among ``elements`` to the device."""
        self._transfer.upload(self.exchange[elements], self.device[elements])

    def upload_masters(self) -> None:
        """Casts all masters into the exchange buffer and sends them to the device."""
        self.exchange.copy_(self.master)
        self.upload()
