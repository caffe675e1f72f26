"""Stand-ins for an accelerator's streams and for the host worker that run at awkward times.

*Late* copies are put off to the last moment that their ordering allows, and what they will
overwrite is NaN until then, so a missing wait shows. *Early* ones run as soon as they are enqueued,
so a copy that should have waited for the host shows. Late jobs run when someone waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_zoffload.host_worker import HostWorker, InlineWorker, ThreadWorker
from lightning_zoffload.transfer import InlineTransfer, StreamTransfer, Transfer

CPU = torch.device("cpu")


@dataclass(eq=False)
class LateStream:
    operations: list[Callable[[], None]] = field(default_factory=list)
    touched: list[tuple[Tensor, ...]] = field(default_factory=list)
    done: int = 0

    def run_to(self, position: int) -> None:
        while self.done < position:
            operation = self.operations[self.done]
            self.done += 1
            operation()

    def pending(self) -> list[tuple[Tensor, ...]]:
        return self.touched[self.done :]


@dataclass
class LateEvent:
    streams: LateStreams
    stream: LateStream
    position: int

    def synchronize(self) -> None:
        with self.streams.lock:
            self.stream.run_to(self.position)


class LateStreams:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.compute = LateStream()
        self.all = [self.compute]

    def current(self) -> LateStream:
        return self.compute

    def new(self) -> LateStream:
        self.all.append(LateStream())
        return self.all[-1]

    def record(self, stream: LateStream) -> LateEvent:
        with self.lock:
            return LateEvent(self, stream, len(stream.operations))

    def wait(self, stream: LateStream, event: LateEvent) -> None:
        if stream is self.compute:  # torch's own operations follow at once
            event.synchronize()
        else:
            self.enqueue(stream, event.synchronize)

    def enqueue(self, stream: LateStream, operation: Callable[[], None], *touched: Tensor) -> None:
        with self.lock:
            stream.operations.append(operation)
            stream.touched.append(touched)

    def copy(self, source: Tensor, destination: Tensor, stream: LateStream) -> None:
        with self.lock:
            used = [t for s in self.all for touched in s.pending() for t in touched]
            if not any(overlap(destination, tensor) for tensor in used):
                destination.fill_(torch.nan)
            self.enqueue(stream, lambda: copy(source, destination), source, destination)


class EarlyStreams(LateStreams):
    def enqueue(self, stream: LateStream, operation: Callable[[], None], *touched: Tensor) -> None:
        operation()


def copy(source: Tensor, destination: Tensor) -> None:
    destination.copy_(source)


def overlap(a: Tensor, b: Tensor) -> bool:
    def span(t: Tensor) -> tuple[int, int]:
        extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
        return t.data_ptr(), t.data_ptr() + extent * t.element_size()

    if not a.numel() or not b.numel():
        return False
    (a_start, a_end), (b_start, b_end) = span(a), span(b)
    return a_start < b_end and b_start < a_end


class LateWorker:
    """Runs jobs when someone waits for them, in the waiting thread."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        worker = self

        class LateFuture(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                while not self.done():
                    worker.run_next()
                return super().result(timeout)

        future = LateFuture()
        self.jobs.append((job, future))
        return future

    def run_next(self) -> None:
        job, future = self.jobs.pop(0)
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
            raise

    def drain(self) -> None:
        while self.jobs:
            self.run_next()

    def close(self) -> None:
        self.jobs = []


def stream_transfer(streams: LateStreams, staging_buffers: int = 2) -> StreamTransfer:
    transfer = StreamTransfer(streams, CPU, staging_buffers)
    transfer.tile = 50  # several tiles in small tests
    return transfer


PIPELINES: dict[str, Callable[[], tuple[Transfer, HostWorker]]] = {
    "inline": lambda: (InlineTransfer(), InlineWorker()),
    "late": lambda: (stream_transfer(LateStreams()), LateWorker()),
    "early": lambda: (stream_transfer(EarlyStreams()), LateWorker()),
    "thread": lambda: (stream_transfer(LateStreams()), ThreadWorker()),
}
