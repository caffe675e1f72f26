"""Host memory for masters, moments and exchange buffers.

Anonymous private mappings: zero-filled, committed page by page when first touched (the moments of
a parameter that never trains cost nothing), given back to the system when the last tensor on them
dies. Huge pages are asked for where the system offers them, since the update streams through them.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from lightning_zoffload.errors import HostMemoryError
from lightning_zoffload.layout import ParameterSpec


class HostBuffer:
    """A zero-filled 1-D run of host memory and tensors on parts of it.

    Each tensor handed out has a storage of exactly its own size, so ``torch.save`` of one segment
    writes that segment and not the whole buffer.

    Args:
        numel: Number of elements.
        dtype: Element type.

    Raises:
        HostMemoryError: The system refuses the mapping.
    """

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bytes = _map_anonymous(numel * dtype.itemsize)
        self.flat = self._tensor(0, numel)

    def segment(self, offset: int, spec: ParameterSpec) -> torch.Tensor:
        """The tensor of ``spec``'s shape and strides that starts ``offset`` elements in."""
        return self._tensor(offset, spec.numel).as_strided(spec.shape, spec.stride)

    def _tensor(self, offset: int, numel: int) -> torch.Tensor:
        if numel == 0:  # torch.frombuffer refuses empty tensors
            return torch.empty(0, dtype=self._dtype)
        return torch.frombuffer(
            self._bytes, dtype=self._dtype, count=numel, offset=offset * self._dtype.itemsize
        )


def _map_anonymous(nbytes: int) -> mmap.mmap:
    # Private, since a shared mapping would stay shared with forked DataLoader workers.
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise HostMemoryError(
            f"The system refused {nbytes:,} bytes of host memory ({error})."
            " Use a smaller model or a machine with more memory."
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages; ordinary ones do
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
