from __future__ import annotations

import io
import os
import warnings

import pytest
import torch

from lightning_zoffload import HostMemoryError, host_memory
from lightning_zoffload.host_memory import HostBuffer, require_host_memory
from lightning_zoffload.layout import ParameterSpec


def spec(*shape: int, stride: tuple[int, ...] | None = None) -> ParameterSpec:
    return ParameterSpec(0, shape, stride or tuple(torch.empty(shape).stride()), torch.float32)


def test_is_zero_filled_and_segments_share_its_memory() -> None:
    buffer = HostBuffer(100, torch.bfloat16)
    assert buffer.flat.dtype is torch.bfloat16
    assert torch.equal(buffer.flat, torch.zeros(100, dtype=torch.bfloat16))
    buffer.segment(10, spec(2, 3)).fill_(7)
    assert buffer.flat.tolist() == [0.0] * 10 + [7.0] * 6 + [0.0] * 84


def test_segments_keep_strides_and_odd_shapes() -> None:
    buffer = HostBuffer(12, torch.float32)
    buffer.flat.copy_(torch.arange(12.0))
    transposed = buffer.segment(0, spec(3, 4, stride=(1, 3)))
    assert torch.equal(transposed, torch.arange(12.0).view(4, 3).t())
    assert buffer.segment(5, spec()).item() == 5.0
    assert buffer.segment(12, spec(0, 3)).shape == (0, 3)


def test_saving_a_segment_writes_the_segment_alone() -> None:
    file = io.BytesIO()
    torch.save(HostBuffer(1_000_000, torch.float32).segment(500, spec(10)), file)
    assert file.tell() < 10_000


def resident() -> int:
    """Bytes of this process's memory that are in use; needs Linux."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_lives_as_long_as_a_tensor_on_it_and_no_longer() -> None:
    size = 64 * 2**20
    segment = HostBuffer(size // 4, torch.float32).segment(0, spec(size // 4))
    segment.fill_(1.0)
    assert segment[-1] == 1.0
    before = resident()
    del segment
    assert before - resident() > 0.9 * size


def test_tensors_have_storages_of_exactly_their_size() -> None:
    buffer = HostBuffer(2**20, torch.float32)
    assert buffer.flat.untyped_storage().nbytes() == 2**22
    for segment in (buffer.segment(64, spec(2, 3)), buffer.segment(0, spec(3, 4, stride=(1, 3)))):
        assert segment.untyped_storage().nbytes() == 4 * segment.numel()
        assert segment.storage_offset() == 0


def test_refused_memory_is_a_memory_error_with_the_size() -> None:
    with pytest.raises(HostMemoryError, match="bytes of host memory") as caught:
        HostBuffer(2**60, torch.float32)
    assert isinstance(caught.value, MemoryError)
    assert f"{2**62:,}" in str(caught.value)


def test_large_buffers_start_on_a_huge_page() -> None:
    for numel in (2**19, 2**19 + 1, 3 * 2**20):
        assert HostBuffer(numel, torch.float32).flat.data_ptr() % 2**21 == 0


def test_memory_is_there_at_once() -> None:
    """Touched when made: running out of memory shows before training, not in it."""
    before = resident()
    buffer = HostBuffer(16 * 2**20, torch.float32, num_threads=2)
    assert resident() - before > 0.9 * 64 * 2**20
    del buffer


@pytest.mark.parametrize("threads", [None, 3])
def test_is_touched_first_by_the_threads_asked_for(
    monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    calls = []

    def first_touch(fresh: torch.Tensor, *, num_threads: int | None = None) -> None:
        calls.append((fresh.data_ptr(), fresh.shape, num_threads))

    monkeypatch.setattr(host_memory.kernels, "first_touch", first_touch)
    buffer = HostBuffer(1000, torch.bfloat16, num_threads=threads)
    assert calls == [(buffer.flat.data_ptr(), (1000,), threads)]


def is_mapped(address: int) -> bool:
    """Whether this process has memory there; needs Linux."""
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


class FakeCuda:
    """Takes note of what is pinned."""

    def __init__(self, error: int = 0) -> None:
        self.pinned: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address)
        del self.pinned[address]
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(host_memory, "_cudart", lambda: fake)
    return fake


@pytest.mark.parametrize("numel", [3, 5_000_003])
def test_pins_exactly_its_bytes_once(cuda: FakeCuda, numel: int) -> None:
    buffer = HostBuffer(numel, torch.bfloat16)
    for _ in range(2):
        buffer.pin()
        assert cuda.pinned == {buffer.flat.data_ptr(): 2 * numel}
    for _ in range(2):
        buffer.unpin()
        assert cuda.pinned == {}


def test_pinned_memory_is_unpinned_before_it_goes(cuda: FakeCuda) -> None:
    buffer = HostBuffer(100, torch.float32)
    buffer.pin()
    segment = buffer.segment(10, spec(5))
    del buffer
    assert len(cuda.pinned) == 1
    del segment
    assert cuda.pinned == {}


def test_a_forked_worker_reads_pinned_memory_and_leaves_it_pinned(cuda: FakeCuda) -> None:
    """There torch refuses to give out the CUDA runtime."""
    buffer = HostBuffer(100, torch.float32)
    buffer.flat[99] = 7.0
    buffer.pin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about forking a process that has threads
        child = os.fork()
    if child == 0:
        failed = True
        try:
            read = buffer.flat[99].item()
            del buffer
            failed = read != 7.0 or len(cuda.pinned) != 1
        finally:
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0
    buffer.unpin()
    assert cuda.pinned == {}


def test_nothing_to_pin_in_an_empty_buffer(cuda: FakeCuda) -> None:
    buffer = HostBuffer(0, torch.float32)
    buffer.pin()
    assert cuda.pinned == {}
    buffer.unpin()


def test_refused_pinning_says_how_much(cuda: FakeCuda) -> None:
    cuda.error = 2
    buffer = HostBuffer(1000, torch.float32)
    with pytest.raises(HostMemoryError, match=r"could not pin 4,000 bytes .*\(2\).*ulimit -l"):
        buffer.pin()
    cuda.pinned.clear()  # it was not


def test_what_cannot_fit_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: 3 * 2**30)
    require_host_memory(3 * 2**30, "this")
    with pytest.raises(
        MemoryError,
        match=r"^this needs 3,221,225,473 bytes \(3\.0 GiB\).* 3,221,225,472 bytes \(3\.0 GiB\)",
    ):
        require_host_memory(3 * 2**30 + 1, "this")


def test_what_cannot_fit_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: 0)
    with pytest.raises(HostMemoryError, match="container limits counted") as caught:
        require_host_memory(1, "this")
    for advice in ("fewer parameters", "`moment_dtype='bfloat16'`", "more memory"):
        assert advice in str(caught.value)
