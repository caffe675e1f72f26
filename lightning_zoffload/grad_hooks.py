"""Takes each gradient as backward makes it: stages it, sends full buckets, frees ``p.grad``.

``p.grad`` always tells the truth. A :class:`HostGradient` in it stands for the gradient that was
taken; ``None`` means that the user cleared it, so what was taken is dropped; an ordinary tensor is
the whole gradient, whatever was taken before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.bucket import Bucket, gradient_on_host
from lightning_zoffload.host_worker import HostWorker
from lightning_zoffload.placeholder import HostGradient
from lightning_zoffload.slab import Segment
from lightning_zoffload.trace import Phase, span
from lightning_zoffload.transfer import Landing, Transfer

#: Updates some segments of a bucket whose gradients have landed.
Apply = Callable[[Bucket, set[Segment]], None]


@dataclass(eq=False)
class Intake:
    """What is known of the gradients of one optimizer.

    Attributes:
        buckets: Of each segment, in the order of its elements.
        placeholders: Each segment's, made once.
        leave: Whether gradients stay in ``p.grad`` until the step.
        is_last: Whether the backward under way is the last one before the step. If not, no
            statistics are needed yet, and nothing may be applied.
        wants_norm: Whether the step will ask for the gradients' norm, as far as one can know.
        apply: Updates what has landed, at once; ``None`` where that must wait for the step.
        held: Segments whose gradient comes in several parts in one backward; they stay in
            ``p.grad`` until it ends.
        backward: The number of the backward under way; 0 if that is not known.
        seen_in: The last backward that brought each segment's gradient.
    """

    buckets: dict[Segment, list[Bucket]] = field(default_factory=dict)
    placeholders: dict[Segment, HostGradient] = field(default_factory=dict)
    leave: bool = False
    is_last: bool = True
    wants_norm: bool = False
    apply: Apply | None = None
    held: set[Segment] = field(default_factory=set)
    backward: int = 0
    seen_in: dict[Segment, int] = field(default_factory=dict)

    def all_buckets(self) -> list[Bucket]:
        """Each bucket once, in their order."""
        return list(dict.fromkeys(b for buckets in self.buckets.values() for b in buckets))


class GradientHooks:
    """The hooks on all parameters taken over, and the staging buffers they share.

    Args:
        transfer: How bytes cross the bus.
        worker: Where what has landed is looked at.
        num_threads: Threads of the host's passes.
    """

    def __init__(self, transfer: Transfer, worker: HostWorker, num_threads: int | None) -> None:
        self._transfer = transfer
        self._worker = worker
        self._num_threads = num_threads
        self._open: dict[Bucket, Intake] = {}
        self._handles: list[Any] = []

    def attach(self, intake: Intake, segment: Segment, buckets: list[Bucket]) -> None:
        """Takes the gradients of a segment from now on."""
        intake.buckets[segment] = buckets
        intake.placeholders[segment] = HostGradient(
            segment.device,
            partial(self.fetch, intake, segment),
            partial(self._on_further_gradient, intake, segment),
        )
        hook = partial(self._on_gradient, intake, segment)
        handle = segment.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    def detach(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def take(self, intake: Intake, segment: Segment, gradient: Tensor) -> None:
        """Stages a gradient, in addition to what was taken before, and sends what is full.

        Raises:
            RuntimeError: The gradient is sparse, or comes after its parameter was updated.
        """
        _check_dense(segment, gradient)
        placeholder = intake.placeholders[segment]
        if segment.parameter.grad is not placeholder:  # autograd may be holding it
            segment.parameter.grad = placeholder
        flat = segment.flat(gradient.detach())
        for bucket in intake.buckets[segment]:
            if segment in bucket.staged:
                self._send(bucket)
            if segment in bucket.applied:
                raise RuntimeError(
                    f"A second gradient of `{segment.name}` came in one backward, after its"
                    " parameter had been updated with the first."
                    " Pass `schedule='synchronous'` to zero_offload."
                )
            if segment in bucket.on_host:
                self._start_accumulating(bucket)
            if bucket.staging is None:
                self._open_bucket(intake, bucket)
            place, part = bucket.stage(segment)
            self._transfer.stage(flat[part], place)
            if bucket.is_full():
                self._send(bucket)

    def collect(self, intake: Intake) -> None:
        """Ends the wait for gradients: what ``p.grad`` says is sent, and ``p.grad`` is empty."""
        for segment in intake.buckets:
            self._reconcile(intake, segment)
            segment.parameter.grad = None
        self.send_staged(intake)

    def send_staged(self, intake: Intake) -> None:
        """Sends buckets that are not full too."""
        for bucket in [b for b, owner in self._open.items() if owner is intake]:
            self._send(bucket)

    def collect_held(self, intake: Intake) -> None:
        """Takes what was left in ``p.grad`` until the end of backward."""
        for segment in intake.held:
            if segment.parameter.grad is not None:
                self._reconcile(intake, segment)

    def fetch(self, intake: Intake, segment: Segment) -> Tensor:
        """Brings a gradient back into ``p.grad``."""
        gradient = self.read(intake, segment)
        if gradient is None:
            raise RuntimeError(
                f"The gradient of `{segment.name}` has been used for an update already."
                " Pass `keep_gradients=True` to zero_offload to look at it after backward, or copy"
                " it before the step (`p.grad.clone()`)."
            )
        on_device = torch.empty_like(segment.device).copy_(gradient)
        self._transfer.bytes_up += on_device.nbytes
        self._drop(intake, segment)
        segment.parameter.grad = on_device
        return on_device

    def read(self, intake: Intake, segment: Segment) -> Tensor | None:
        """A fp32 copy on the host of a gradient that was taken."""
        buckets = intake.buckets[segment]
        for bucket in buckets:
            if segment in bucket.staged:
                self._send(bucket)
        self._worker.drain()
        if not all(segment in bucket.on_host for bucket in buckets):
            return None
        return gradient_on_host(segment, buckets)

    def _on_gradient(self, intake: Intake, segment: Segment, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is intake.placeholders[segment] or gradient is None:
            return  # it was added to the one on the host
        if intake.leave or segment in intake.held:
            return
        intake.seen_in[segment] = intake.backward
        self._reconcile(intake, segment)

    def _on_further_gradient(self, intake: Intake, segment: Segment, gradient: Tensor) -> None:
        if intake.backward and intake.seen_in.get(segment) == intake.backward:
            intake.held.add(segment)
        intake.seen_in[segment] = intake.backward
        self.take(intake, segment, gradient)

    def _reconcile(self, intake: Intake, segment: Segment) -> None:
        gradient = segment.parameter.grad
        if gradient is not intake.placeholders[segment]:
            self._drop(intake, segment)
            if gradient is not None:
                self.take(intake, segment, gradient)

    def _drop(self, intake: Intake, segment: Segment) -> None:
        for bucket in intake.buckets[segment]:
            bucket.drop(segment)

    def _open_bucket(self, intake: Intake, bucket: Bucket) -> None:
        while (staging := self._transfer.lend(bucket.exchange)) is None:
            self._send(next(iter(self._open)))
        bucket.staging = staging
        self._open[bucket] = intake

    def _start_accumulating(self, bucket: Bucket) -> None:
        """Moves what has landed to the accumulator, so that more can land."""
        if not bucket.accumulates:
            bucket.allocate_accumulator(self._num_threads)
            for run in list(bucket.runs(bucket.on_host.__contains__)):
                job = partial(bucket.land, run, added=False, num_threads=self._num_threads)
                bucket.landing = self._worker.submit(job)
            bucket.accumulates = True
        _wait(bucket)  # the next gradient comes down into the bytes that are read there

    def _send(self, bucket: Bucket) -> None:
        """Sends what is staged, and has it looked at when it lands."""
        intake = self._open.pop(bucket)
        staging, bucket.staging = bucket.staging, None
        assert staging is not None
        if bucket.accumulates:
            _wait(bucket)
        elif not intake.is_last and bucket.has_accumulator and not bucket.on_host:
            bucket.accumulates = True  # as in the last step: others will follow
        fresh, added = bucket.staged - bucket.on_host, bucket.staged & bucket.on_host
        runs = [(run, False) for run in bucket.runs(fresh.__contains__)]
        runs += [(run, True) for run in bucket.runs(added.__contains__)]
        landings = [self._transfer.download(staging[run], bucket.exchange[run]) for run, _ in runs]
        self._transfer.give_back(staging)
        is_full = bucket.is_full()
        segments = set(bucket.staged)
        bucket.on_host |= segments
        bucket.staged.clear()
        if is_full:
            bucket.arrived.clear()
        after: Callable[[], None] | None = None
        if intake.is_last and intake.apply is not None:
            ready = segments - intake.held  # more may come of the others
            bucket.applied |= ready
            bucket.on_host -= ready
            after = partial(intake.apply, bucket, ready)
        elif intake.is_last and is_full and intake.wants_norm:
            after = self.statistics_job(bucket)
        additions = [
            partial(bucket.land, run, added=added, num_threads=self._num_threads)
            for run, added in runs
            if bucket.accumulates
        ]
        bucket.landing = self._worker.submit(partial(_land, landings, additions, after))

    def statistics_job(self, bucket: Bucket) -> Callable[[], None]:
        """Takes the sum of squares of the gradients that are on the host now."""
        runs = list(bucket.runs(bucket.on_host.__contains__))
        gradients = [bucket.gradient(run) for run in runs]
        changes = bucket.changes

        def take_statistics() -> None:
            with span(Phase.STATISTICS):
                sums = [
                    kernels.grad_stats(gradient, num_threads=self._num_threads)[0]
                    for gradient in gradients
                ]
            bucket.statistics = (changes, sum(sums))

        return take_statistics


def _land(
    landings: Sequence[Landing],
    jobs: Sequence[Callable[[], None]],
    after: Callable[[], None] | None,
) -> None:
    for landing in landings:
        landing.synchronize()
    for job in jobs:
        job()
    if after is not None:
        after()


def _wait(bucket: Bucket) -> None:
    if bucket.landing is not None:
        bucket.landing.result()


def _check_dense(segment: Segment, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"The gradient of `{segment.name}` is sparse ({gradient.layout}), which zero_offload"
            " cannot exchange. Use a dense gradient, e.g. `nn.Embedding(..., sparse=False)`."
        )
