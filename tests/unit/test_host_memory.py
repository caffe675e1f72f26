from __future__ import annotations

import io
import os

import pytest
import torch

from lightning_zoffload import HostMemoryError
from lightning_zoffload.host_memory import HostBuffer
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


def test_memory_lives_as_long_as_a_tensor_on_it_and_no_longer() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 64 * 2**20
    segment = HostBuffer(size // 4, torch.float32).segment(0, spec(size // 4))
    segment.fill_(1.0)
    assert segment[-1] == 1.0
    before = resident()
    del segment
    assert before - resident() > 0.9 * size


def test_refused_memory_is_a_memory_error_with_the_size() -> None:
    with pytest.raises(HostMemoryError, match="bytes of host memory") as caught:
        HostBuffer(2**60, torch.float32)
    assert isinstance(caught.value, MemoryError)
    assert f"{2**62:,}" in str(caught.value)
