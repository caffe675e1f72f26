"""Where host work runs beside backward: one thread, first in first out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol


class HostWorker(Protocol):
    """Runs jobs one after another, in the order of submission."""

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queues a job; its future's ``result()`` raises what the job raised."""

    def drain(self) -> None:
        """Waits for all jobs; raises what the first failed one raised, with its traceback."""

    def close(self) -> None:
        """Waits for all jobs and ends the thread. What they raised is dropped."""


class ThreadWorker:
    """A thread that starts with the first job and ends with :meth:`close`."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="zero_offload")
        self._pending: list[Future[Any]] = []

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """See :class:`HostWorker`."""
        future = self._executor.submit(job)
        self._pending.append(future)
        return future

    def drain(self) -> None:
        """See :class:`HostWorker`."""
        pending, self._pending = self._pending, []
        failures = [error for future in pending if (error := future.exception()) is not None]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """See :class:`HostWorker`."""
        self._executor.shutdown(wait=True)


class InlineWorker:
    """Runs each job at once in the calling thread.

    For a device that is the host: another thread would take its cores from backward.
    """

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """See :class:`HostWorker`. A job that fails raises here."""
        future: Future[Any] = Future()
        future.set_result(job())
        return future

    def drain(self) -> None:
        """See :class:`HostWorker`."""

    def close(self) -> None:
        """See :class:`HostWorker`."""
