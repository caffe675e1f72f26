"""Host memory for masters, moments and exchange buffers.

Anonymous private mappings: zero-filled, on huge pages where the system offers them (the update
streams through them), touched first by the threads that will update them, and given back to the
system at once when the last tensor on them dies.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from typing import Any

import torch

from lightning_zoffload import kernels
from lightning_zoffload.errors import HostMemoryError
from lightning_zoffload.layout import ParameterSpec
from lightning_zoffload.machine import available_memory

#: Transparent huge pages need this alignment; a mapping's start need not have it.
_HUGE_PAGE = 2 * 2**20
_GIB = 2**30


def require_host_memory(needed: int, what: str) -> None:
    """Refuses what cannot fit, before any of it is allocated.

    Args:
        needed: Bytes.
        what: Who needs them.

    Raises:
        HostMemoryError: There is less.
    """
    available = available_memory()
    if needed > available:
        raise HostMemoryError(
            f"{what} needs {needed:,} bytes ({needed / _GIB:.1f} GiB) of host memory, but"
            f" {available:,} bytes ({available / _GIB:.1f} GiB) are available (container limits"
            " counted). Train fewer parameters, keep the moments in 16 bit"
            " (`moment_dtype='bfloat16'`), or use a machine with more memory."
        )


class HostBuffer:
    """A zero-filled 1-D run of host memory and tensors on parts of it.

    Each tensor handed out has a storage of exactly its own size, so ``torch.save`` of one segment
    writes that segment and not the whole buffer.

    Args:
        numel: Number of elements.
        dtype: Element type.
        num_threads: Threads that touch the memory first.

    Raises:
        HostMemoryError: The system refuses the mapping.
    """

    def __init__(self, numel: int, dtype: torch.dtype, *, num_threads: int | None = None) -> None:
        self._dtype = dtype
        self._pages, self._start = _map_anonymous(numel * dtype.itemsize)
        self.flat = self._tensor(0, numel)
        kernels.first_touch(self.flat, num_threads=num_threads)

    def segment(self, offset: int, spec: ParameterSpec) -> torch.Tensor:
        """The tensor of ``spec``'s shape and strides that starts ``offset`` elements in."""
        return self._tensor(offset, spec.numel).as_strided(spec.shape, spec.stride)

    def pin(self) -> None:
        """Makes the bytes page-locked for CUDA, so that copies need no detour and can overlap.

        Exactly these bytes: torch's own pinned allocator rounds up to a power of two.

        Raises:
            HostMemoryError: CUDA refuses.
        """
        if self.flat.numel():
            self._pages.pin(self.flat.data_ptr(), self.flat.nbytes)

    def unpin(self) -> None:
        """Makes them ordinary memory again. So does the end of the last tensor on them."""
        self._pages.unpin()

    def _tensor(self, offset: int, numel: int) -> torch.Tensor:
        if numel == 0:  # torch.frombuffer refuses empty tensors
            return torch.empty(0, dtype=self._dtype)
        start = self._start + offset * self._dtype.itemsize
        return torch.frombuffer(self._pages, dtype=self._dtype, count=numel, offset=start)


class _Pages(mmap.mmap):
    """A mapping that is unpinned before it goes. All tensors on it hold it."""

    _pinned: int | None = None
    _pinned_by = 0  # process

    def pin(self, address: int, nbytes: int) -> None:
        if self._pinned is not None:
            return
        error = _cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) != 0:
            raise HostMemoryError(
                f"CUDA could not pin {nbytes:,} bytes of host memory ({error})."
                " Raise the limit on locked memory (`ulimit -l`), or train fewer parameters."
            )
        self._pinned, self._pinned_by = address, os.getpid()

    def unpin(self) -> None:
        address, self._pinned = self._pinned, None
        # Forked workers have the pages, but neither the registration nor a usable CUDA.
        if address is not None and self._pinned_by == os.getpid():
            _cudart().cudaHostUnregister(address)

    def __del__(self) -> None:
        self.unpin()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _map_anonymous(nbytes: int) -> tuple[_Pages, int]:
    """A mapping, and where in it the bytes start: on a huge page if they fill one."""
    slack = _HUGE_PAGE if nbytes >= _HUGE_PAGE else 0
    # Private, since a shared mapping would stay shared with forked DataLoader workers.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = _Pages(-1, max(nbytes + slack, 1), flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise HostMemoryError(
            f"The system refused {nbytes:,} bytes of host memory ({error})."
            " Use a smaller model or a machine with more memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages; ordinary ones do
            pages.madvise(mmap.MADV_HUGEPAGE)
    address = torch.frombuffer(pages, dtype=torch.uint8, count=1).data_ptr()
    return pages, -address % _HUGE_PAGE if slack else 0
