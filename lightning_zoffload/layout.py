"""Where each parameter lies: parameters -> slabs -> segments and buckets. Pure; owns no memory.

A *slab* is a contiguous run of parameters of one param group and one device dtype, in reverse order
of registration (the order in which backward finishes them). A *segment* is one parameter's place in
it. A *bucket* is what moves and is updated as a unit: a whole slab, or, where one parameter is
larger than a bucket, a part of that parameter's slab. Device and host use the same offsets, so a
bucket moves in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

#: Segments start at multiples of this many elements: 128 bytes of 16-bit data, which keeps device
#: kernels on their aligned paths and cache lines from being shared by two segments. The padding in
#: between is zero and stays zero under every update (zero gradient, zero parameter).
SEGMENT_ALIGNMENT = 64


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of a parameter.

    Attributes:
        index: The caller's number for it.
        shape: Its shape.
        stride: Its strides in elements, dense and non-overlapping.
        dtype: Its dtype on the device.
    """

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim parameter, 0 for an empty one."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class SegmentLayout:
    """One parameter's place in a slab; ``offset`` counts elements from the slab's start."""

    spec: ParameterSpec
    offset: int

    @property
    def end(self) -> int:
        """Offset just past the last element."""
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class SlabLayout:
    """A slab: its dtype on the device, its segments in order, its length with padding."""

    dtype: torch.dtype
    segments: tuple[SegmentLayout, ...]
    numel: int

    def buckets(self, bucket_size: int) -> list[slice]:
        """The elements of each bucket of the slab: at most ``bucket_size``, in order."""
        starts = range(0, self.numel, bucket_size) or range(1)
        return [slice(start, min(start + bucket_size, self.numel)) for start in starts]


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that keep ``tensor``'s memory format where it is dense, and row-major ones elsewhere.

    The rule is ``torch.preserve_format``'s: channels_last and transposed parameters keep their
    strides, expanded or sliced ones become contiguous.
    """
    return tuple(torch.empty_like(tensor, device="meta").stride())


def build_slabs(parameters: Sequence[ParameterSpec], bucket_size: int) -> list[SlabLayout]:
    """Lays the parameters of one param group into slabs.

    Args:
        parameters: The group's parameters in order of registration.
        bucket_size: Elements per slab, padding included; a larger parameter has a slab to itself.

    Returns:
        Slabs that hold every parameter exactly once, last registered first within each dtype.
    """
    by_dtype: dict[torch.dtype, list[ParameterSpec]] = {}
    for spec in reversed(parameters):
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return [
        slab for dtype, specs in by_dtype.items() for slab in _fill_slabs(dtype, specs, bucket_size)
    ]


def _fill_slabs(
    dtype: torch.dtype, specs: Iterable[ParameterSpec], bucket_size: int
) -> Iterator[SlabLayout]:
    segments: list[SegmentLayout] = []
    filled = 0
    for spec in specs:
        if segments and filled + spec.numel > bucket_size:
            yield SlabLayout(dtype, tuple(segments), filled)
            segments, filled = [], 0
        segments.append(SegmentLayout(spec, filled))
        filled = _aligned(filled + spec.numel)
    if segments:
        yield SlabLayout(dtype, tuple(segments), filled)


def _aligned(numel: int) -> int:
    return -(-numel // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
