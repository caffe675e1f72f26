"""The memory of a run of parameters on both sides of the bus.

The life of the data in a segment, each form under the name used everywhere:

    grad (device) -> exchanged gradient (host, 16 bit) -> master and moments (host, fp32)
                  -> exchanged parameter (same bytes)  -> parameter (device)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from lightning_zoffload.host_memory import HostBuffer
from lightning_zoffload.layout import ParameterSpec, SlabLayout
from lightning_zoffload.transfer import Transfer

#: Elements that are cast and sent at a time where that needs memory of its own.
_PIECE = 2**22


@dataclass(eq=False)
class Segment:
    """One parameter's place in a slab. All tensors have the parameter's shape and strides.

    Attributes:
        name: The parameter's name, for messages.
        group_index: The param group of the optimizer that it belongs to.
        parameter: The user's parameter; its data is ``device``.
        offset: First element in the slab.
        end: Just past the last one.
        device: What forward and backward see.
        exchange: The bytes that cross the bus, in the device dtype.
        master: The fp32 parameter, a leaf tensor.
        moments: The optimizer's state tensors in the slab.
        step: How many updates the parameter has had: an element of the slab's ``steps``.
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

    def bind(self) -> None:
        """Makes the parameter a view of the device's slab (again)."""
        self.parameter.data = self.device

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape as one run of elements, in the slab's order.

        A view where its memory format is the parameter's, as gradients have it, else a copy.
        """
        strides = self.device.stride()
        return tensor.permute(sorted(range(len(strides)), key=lambda d: -strides[d])).reshape(-1)

    def shaped(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`flat`."""
        return flat.as_strided(self.device.shape, self.device.stride())


class Slab:
    """Device parameters, exchange buffer, masters and moments of one slab.

    Takes each parameter over as it is built: copies it to its master, makes it a view of the
    device's slab, and so gives its old storage up.

    Args:
        layout: Where each parameter lies.
        parameters: ``(name, parameter)`` of each segment of ``layout``, in its order.
        group_index: The param group of the optimizer that they belong to.
        moment_dtypes: Of the state tensors that the host update keeps here.
        device: Where forward and backward run.
        transfer: How bytes cross the bus.
        num_threads: Threads of the host update, which then touch the memory first.

    Attributes:
        device: The parameters there, flat.
        exchange, master, moments: All segments' on the host, flat.
        steps: Each segment's count of updates, fp32 as torch has it.
        ends: Where each segment ends, ``int64``, the padding behind it included.
        seeds: Each segment's random seed, of its name only: the same in any slab and run.
    """

    def __init__(
        self,
        layout: SlabLayout,
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
        self.device = torch.zeros(layout.numel, dtype=layout.dtype, device=device)
        self.exchange = exchange.flat
        self.master = master.flat
        starts = [place.offset for place in layout.segments]
        self.ends = torch.tensor([*starts[1:], layout.numel], dtype=torch.int64)
        self.seeds = torch.tensor([crc32(name.encode()) for name, _ in parameters])
        masters = [master.segment(place.offset, place.spec) for place in layout.segments]
        for (_, parameter), own in zip(parameters, masters, strict=True):
            own.copy_(parameter.detach())
            parameter.data = own  # gives its old memory up before more is taken
        moments = [host_buffer(dtype) for dtype in moment_dtypes]
        steps = HostBuffer(len(layout.segments), torch.float32, num_threads=1)
        self.moments = tuple(buffer.flat for buffer in moments)
        self.steps = steps.flat
        self.segments: list[Segment] = []
        for number, place in enumerate(layout.segments):
            (name, parameter), spec, offset = parameters[number], place.spec, place.offset
            segment = Segment(
                name=name,
                group_index=group_index,
                parameter=parameter,
                offset=offset,
                end=place.end,
                device=self.device.as_strided(spec.shape, spec.stride, offset),
                exchange=exchange.segment(offset, spec),
                master=masters[number],
                moments=tuple(buffer.segment(offset, spec) for buffer in moments),
                step=steps.segment(number, ParameterSpec(number, (), (), torch.float32)),
            )
            segment.bind()
            self.segments.append(segment)
        self.upload_masters()

    def clear_padding(self) -> None:
        """Makes the padding zero again after an update that divides zero by zero there."""
        for segment, end in zip(self.segments, self.ends.tolist(), strict=True):
            for flat in (self.exchange, self.master, *self.moments):
                flat[segment.end : end].zero_()

    def upload_masters(self) -> None:
        """Sends all masters to the device, past the exchange buffer, which may hold gradients."""
        for start in range(0, len(self.master), _PIECE):
            piece = slice(start, start + _PIECE)
            self._transfer.upload(self.master[piece].to(self.device.dtype), self.device[piece])
            self._transfer.synchronize()  # the copy that is sent lives until then

    def release(self) -> None:
        """Ends the transfers' hold on the memory; the tensors live on."""
        self._transfer.synchronize()
        self._exchange_buffer.unpin()


def host_bytes(layout: SlabLayout, moment_dtypes: Sequence[torch.dtype]) -> int:
    """Host memory that a slab takes, in bytes."""
    dtypes = (layout.dtype, torch.float32, *moment_dtypes)
    return layout.numel * sum(dtype.itemsize for dtype in dtypes)
