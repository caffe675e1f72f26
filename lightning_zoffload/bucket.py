"""One bucket's bytes on both sides of the bus.

The life of the data in a segment, each form under the name used everywhere:

    grad (device) -> exchanged gradient (host, 16 bit) -> master and moments (host, fp32)
                  -> exchanged parameter (same bytes)  -> parameter (device)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from zlib import crc32

import torch
from torch import Tensor

from lightning_zoffload.host_memory import HostBuffer
from lightning_zoffload.layout import BucketLayout, ParameterSpec
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
        group_index: The param group of the optimizer that it belongs to.
        parameter: The user's parameter; its data is ``device``.
        offset: First element in the bucket.
        end: Just past the last one.
        device: What forward and backward see.
        exchange: The bytes that cross the bus, in the device dtype.
        master: The fp32 parameter, a leaf tensor.
        moments: The optimizer's state tensors in the bucket.
        step: How many updates the parameter has had: an element of the bucket's ``steps``.
        exchanged: What ``exchange`` holds.
    """

    name: str
    group_index: int
    parameter: Tensor
    offset: int
    end: int
    device: Tensor
    exchange: Tensor
    master: Tensor
    moments: tuple[Tensor, ...]
    step: Tensor
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
        moment_dtypes: Of the state tensors that the host update keeps here.
        device: Where forward and backward run.
        transfer: How bytes cross the bus.
        num_threads: Threads of the host update, which then touch the memory first.

    Attributes:
        exchange, master, moments: All segments' on the host, flat.
        steps: Each segment's count of updates, fp32 as torch has it.
        ends: Where each segment ends, ``int64``, the padding behind it included.
        seeds: Each segment's random seed, of its name only: the same in any bucket and run.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[tuple[str, Tensor]],
        group_index: int,
        moment_dtypes: Sequence[torch.dtype],
        device: torch.device,
        transfer: Transfer,
        num_threads: int | None = None,
    ) -> None:
        self.group_index = group_index
        self._transfer = transfer

        def host_buffer(dtype: torch.dtype) -> HostBuffer:
            return HostBuffer(layout.numel, dtype, num_threads=num_threads)

        self._exchange_buffer = exchange = host_buffer(layout.dtype)
        if device.type == "cuda":
            exchange.pin()
        master = host_buffer(torch.float32)
        moments = [host_buffer(dtype) for dtype in moment_dtypes]
        steps = HostBuffer(len(layout.segments), torch.float32, num_threads=1)
        self.device = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.exchange = exchange.flat
        self.master = master.flat
        self.moments = tuple(buffer.flat for buffer in moments)
        self.steps = steps.flat
        starts = [place.offset for place in layout.segments]
        self.ends = torch.tensor([*starts[1:], layout.numel], dtype=torch.int64)
        self.seeds = torch.tensor([crc32(name.encode()) for name, _ in parameters])
        self.segments: list[Segment] = []
        for number, (place, (name, parameter)) in enumerate(
            zip(layout.segments, parameters, strict=True)
        ):
            spec, offset = place.spec, place.offset
            segment = Segment(
                name=name,
                group_index=group_index,
                parameter=parameter,
                offset=offset,
                end=place.end,
                device=self.device.as_strided(spec.shape, spec.stride, offset),
                exchange=exchange.segment(offset, spec),
                master=master.segment(offset, spec),
                moments=tuple(buffer.segment(offset, spec) for buffer in moments),
                step=steps.segment(number, ParameterSpec(number, (), (), torch.float32)),
            )
            segment.master.copy_(parameter.detach())
            segment.exchange.copy_(segment.master)
            transfer.upload(segment.exchange, segment.device)
            segment.bind()
            self.segments.append(segment)

    def has_gradient(self) -> Tensor:
        """Whether each segment holds a gradient to apply: bool, one per segment."""
        return torch.tensor([s.exchanged is Exchanged.GRADIENT for s in self.segments])

    def runs_with_gradient(self) -> Iterator[slice]:
        """The elements of each contiguous run of segments that hold a gradient.

        Padding between them is included. A bucket whose parameters all got a gradient is one run.
        """
        for exchanged, members in groupby(self.segments, lambda segment: segment.exchanged):
            if exchanged is Exchanged.GRADIENT:
                run = list(members)
                yield slice(run[0].offset, run[-1].end)

    def clear_padding(self) -> None:
        """Makes the padding zero again after an update that divides zero by zero there."""
        for segment, end in zip(self.segments, self.ends.tolist(), strict=True):
            for flat in (self.exchange, self.master, *self.moments):
                flat[segment.end : end].zero_()

    def release(self) -> None:
        """Ends the transfers' hold on the memory; the tensors live on."""
        self._exchange_buffer.unpin()

    def upload(self, elements: slice = slice(None)) -> None:
        """Sends the exchanged parameters among ``elements`` to the device."""
        self._transfer.upload(self.exchange[elements], self.device[elements])

    def upload_masters(self) -> None:
        """Casts all masters into the exchange buffer and sends them to the device."""
        self.exchange.copy_(self.master)
        self.upload()


def host_bytes(layout: BucketLayout, moment_dtypes: Sequence[torch.dtype]) -> int:
    """Host memory that a bucket takes, in bytes."""
    dtypes = (layout.dtype, torch.float32, *moment_dtypes)
    return layout.numel * sum(dtype.itemsize for dtype in dtypes)
