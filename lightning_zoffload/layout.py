"""Where each parameter lies: parameters -> buckets -> segments. Pure and frozen; owns no memory.

A *bucket* is a contiguous run of parameters of one param group and one device dtype, in reverse
order of registration (the order in which backward finishes them). A *segment* is one parameter's
place in a bucket. Device and host use the same offsets, so a bucket moves in one copy.
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
    """One parameter's place in a bucket; ``offset`` counts elements from the bucket's start."""

    spec: ParameterSpec
    offset: int

    @property
    def end(self) -> int:
        """Offset just past the last element."""
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class BucketLayout:
    """A bucket: its dtype on the device, its segments in order, its length with padding."""

    dtype: torch.dtype
    segments: tuple[SegmentLayout, ...]
    numel: int


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides that keep ``tensor``'s memory format where it is dense, and row-major ones elsewhere.

    The rule is ``torch.preserve_format``'s: channels_last and transposed parameters keep their
    strides, expanded or sliced ones become contiguous.
    """
    return tuple(torch.empty_like(tensor, device="meta").stride())


def build_buckets(parameters: Sequence[ParameterSpec], bucket_size: int) -> list[BucketLayout]:
    """Lays the parameters of one param group into buckets.

    Args:
        parameters: The group's parameters in order of registration.
        bucket_size: Elements per bucket, padding included; a larger parameter is a bucket alone.

    Returns:
        Buckets that hold every parameter exactly once, last registered first within each dtype.
    """
    by_dtype: dict[torch.dtype, list[ParameterSpec]] = {}
    for spec in reversed(parameters):
        by_dtype.setdefault(spec.dtype, []).append(spec)
    return [
        bucket
        for dtype, specs in by_dtype.items()
        for bucket in _fill_buckets(dtype, specs, bucket_size)
    ]


def _fill_buckets(
    dtype: torch.dtype, specs: Iterable[ParameterSpec], bucket_size: int
) -> Iterator[BucketLayout]:
    segments: list[SegmentLayout] = []
    filled = 0
    for spec in specs:
        if segments and filled + spec.numel > bucket_size:
            yield BucketLayout(dtype, tuple(segments), filled)
            segments, filled = [], 0
        segments.append(SegmentLayout(spec, filled))
        filled = _aligned(filled + spec.numel)
    if segments:
        yield BucketLayout(dtype, tuple(segments), filled)


def _aligned(numel: int) -> int:
    return -(-numel // SEGMENT_ALIGNMENT) * SEGMENT_ALIGNMENT
