"""The unit that moves and is updated: part of a slab, and how far its gradients have come.

A gradient is *staged* (in a staging buffer on the device), then *on the host* (sent to the exchange
buffer, or added up in the accumulator), and at last *applied*. A parameter larger than a bucket has
several buckets and is in each of these states in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.host_memory import HostBuffer, require_host_memory
from lightning_zoffload.kernels import SegmentSteps
from lightning_zoffload.slab import Segment, Slab


class Bucket:
    """A part of a slab and the gradients that have arrived for it since the last step.

    Args:
        slab: The memory.
        elements: The part.

    Attributes:
        exchange, device, master, moments: The bucket's elements of the slab's buffers.
        staging: The staging buffer that it fills, if any.
        staged: Segments whose gradient is in ``staging``.
        on_host: Segments whose gradient is sent.
        applied: Segments whose gradient is in the master already.
        arrived: Segments that have had a gradient since the bucket was last full.
        expected: Segments that fill it: those that had a gradient in the last step.
        accumulates: Whether gradients are added up in ``accumulator`` since the last step.
        landing: The last job that reads ``exchange``.
        changes: Counts what makes statistics out of date.
        statistics: ``changes`` and the sum of squares of the gradients ``on_host`` at that time.
    """

    def __init__(self, slab: Slab, elements: slice) -> None:
        self.slab = slab
        self.elements = elements
        self.exchange = slab.exchange[elements]
        self.device = slab.device[elements]
        self.master = slab.master[elements]
        self.moments = tuple(moment[elements] for moment in slab.moments)
        self.staging: Tensor | None = None
        self.staged: set[Segment] = set()
        self.on_host: set[Segment] = set()
        self.applied: set[Segment] = set()
        self.arrived: set[Segment] = set()
        self.expected: set[Segment] = set(slab.segments)
        self._seen: set[Segment] = set()
        self.accumulates = False
        self.landing: Future[Any] | None = None
        self.changes = 0
        self.statistics: tuple[int, float] | None = None
        self._accumulator: HostBuffer | None = None

    @property
    def starts_slab(self) -> bool:
        """Whether the bucket has its segments from their first element on."""
        return bool(self.elements.start == 0)

    @property
    def has_accumulator(self) -> bool:
        """Whether fp32 memory to add gradients up in is there."""
        return self._accumulator is not None

    def place(self, segment: Segment) -> tuple[slice, slice]:
        """The elements that bucket and segment share: counted in the bucket, in the segment."""
        first = max(segment.offset, self.elements.start)
        last = max(first, min(segment.end, self.elements.stop))
        start = self.elements.start
        return (
            slice(first - start, last - start),
            slice(first - segment.offset, last - segment.offset),
        )

    def runs(self, member: Callable[[Segment], bool]) -> Iterator[slice]:
        """The elements of each contiguous run of such segments, the padding between included."""
        for is_member, group in groupby(self.slab.segments, member):
            if is_member:
                segments = list(group)
                yield slice(self.place(segments[0])[0].start, self.place(segments[-1])[0].stop)

    def tiles(self, segments: set[Segment], size: int) -> Iterator[slice]:
        """The elements of these segments in pieces of at most ``size``."""
        for run in self.runs(segments.__contains__):
            for start in range(run.start, run.stop, size):
                yield slice(start, min(start + size, run.stop))

    def stage(self, segment: Segment) -> tuple[Tensor, slice]:
        """Where in ``staging`` the segment's part goes, and which part of the segment it is."""
        assert self.staging is not None
        in_bucket, in_segment = self.place(segment)
        self.staged.add(segment)
        self.arrived.add(segment)
        self._seen.add(segment)
        self.changes += 1
        return self.staging[in_bucket], in_segment

    @property
    def square_sum(self) -> float | None:
        """Sum of squares of the gradients on the host, if it is known."""
        if self.statistics is None or self.statistics[0] != self.changes:
            return None
        return self.statistics[1]

    def is_full(self) -> bool:
        """Whether all gradients that backward will bring have arrived, as far as one can know."""
        return self.arrived >= self.expected

    def drop(self, segment: Segment) -> None:
        """Forgets a gradient that is not applied."""
        self.staged.discard(segment)
        self.on_host.discard(segment)
        self.changes += 1

    def gradient(self, elements: slice) -> Tensor:
        """The gradients on the host: exchanged ones, or their fp32 sum."""
        source = self._accumulator.flat if self.accumulates and self._accumulator else self.exchange
        return source[elements]

    def allocate_accumulator(self, num_threads: int | None) -> None:
        """Takes 4 bytes per parameter more, if it has not yet.

        Raises:
            HostMemoryError: There is not so much.
        """
        if self._accumulator is None:
            numel = len(self.exchange)
            require_host_memory(4 * numel, "Gradient accumulation on the host")
            self._accumulator = HostBuffer(numel, torch.float32, num_threads=num_threads)

    def land(self, elements: slice, *, added: bool, num_threads: int | None) -> None:
        """Puts exchanged gradients into the accumulator, or adds them to what is there."""
        assert self._accumulator is not None
        accumulator, exchange = self._accumulator.flat[elements], self.exchange[elements]
        if added:
            kernels.accumulate(accumulator, exchange, num_threads=num_threads)
        else:
            kernels.cast(exchange, accumulator, num_threads=num_threads)

    def segment_steps(self, elements: slice) -> SegmentSteps:
        """The kernels' table of the segments among some elements of the bucket."""
        first = self.elements.start + elements.start
        last = self.elements.start + elements.stop
        slab = self.slab
        low, high = torch.searchsorted(
            slab.ends, torch.tensor([first, last - 1]), right=True
        ).tolist()
        begin = int(slab.ends[low - 1]) if low else 0
        members = slice(low, high + 1)
        return SegmentSteps(
            (slab.ends[members] - first).clamp_(max=last - first),
            slab.steps[members].to(torch.int64),
            slab.seeds[members],
            begin=begin - first,
        )

    def end_step(self) -> None:
        """Forgets all gradients, and learns which ones to expect at the next step."""
        if not self.accumulates:
            self._accumulator = None
        if self._seen:
            self.expected = {s for s in self._seen if s in self.on_host or s in self.applied}
        for segments in (self.staged, self.on_host, self.applied, self.arrived, self._seen):
            segments.clear()
        self.accumulates = False
        self.landing = None
        self.statistics = None


def gradient_on_host(segment: Segment, buckets: list[Bucket]) -> Tensor:
    """A fp32 copy of a segment's gradient, of the parameter's shape, from all its buckets."""
    parts = [bucket.gradient(bucket.place(segment)[0]).float() for bucket in buckets]
    return segment.shaped(torch.cat(parts))
