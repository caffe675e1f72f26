from __future__ import annotations

import torch
from torch import nn

from lightning_zoffload.layout import ParameterSpec, build_slabs, dense_stride
from lightning_zoffload.slab import Slab, host_bytes
from lightning_zoffload.transfer import InlineTransfer


def slab_of(parameters: list[nn.Parameter], dtype: torch.dtype = torch.bfloat16) -> Slab:
    specs = [
        ParameterSpec(i, tuple(p.shape), dense_stride(p), dtype) for i, p in enumerate(parameters)
    ]
    (layout,) = build_slabs(specs, 10_000)
    members = [(f"p{s.spec.index}", parameters[s.spec.index]) for s in layout.segments]
    moments = (torch.float32, torch.bfloat16)
    return Slab(layout, members, 0, moments, torch.device("cpu"), InlineTransfer())


def some_parameters() -> list[nn.Parameter]:
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = [torch.randn(3, 4), channels_last, torch.randn(()), torch.randn(0, 2)]
    return [nn.Parameter(tensor) for tensor in tensors]


def test_takes_parameters_over_exactly_and_keeps_shape_and_strides() -> None:
    parameters = some_parameters()
    before = [p.detach().clone() for p in parameters]
    strides = [p.stride() for p in parameters]
    slab = slab_of(parameters)
    masters = {s.parameter: s.master for s in slab.segments}
    for p, old, stride in zip(parameters, before, strides, strict=True):
        assert torch.equal(masters[p], old)
        assert torch.equal(p.detach(), old.bfloat16())
        assert (p.shape, p.stride()) == (old.shape, stride)
        in_slab = slab.device.untyped_storage().data_ptr()
        assert p.untyped_storage().data_ptr() == in_slab


def test_the_table_of_segments_covers_the_slab_with_its_padding() -> None:
    slab = slab_of([nn.Parameter(torch.zeros(n)) for n in (10, 64, 65)])
    assert [s.offset for s in slab.segments] == [0, 128, 192]
    assert slab.ends.tolist() == [128, 192, len(slab.master)]
    slab.segments[1].step.fill_(3)
    assert slab.steps.tolist() == [0, 3, 0]


def test_seeds_are_of_the_names_only() -> None:
    together = slab_of([nn.Parameter(torch.zeros(4)) for _ in range(3)])
    alone = slab_of([nn.Parameter(torch.zeros(1000))])
    by_name = {s.name: int(seed) for s, seed in zip(together.segments, together.seeds, strict=True)}
    assert len(set(by_name.values())) == 3
    assert int(alone.seeds[0]) == by_name["p0"]


def test_moments_have_the_dtypes_asked_for_and_the_bytes_are_told() -> None:
    slab = slab_of([nn.Parameter(torch.ones(100))])
    assert [m.dtype for m in slab.moments] == [torch.float32, torch.bfloat16]
    assert [m.dtype for m in slab.segments[0].moments] == [torch.float32, torch.bfloat16]
    spec = ParameterSpec(0, (128,), (1,), torch.bfloat16)
    (layout,) = build_slabs([spec], 10_000)
    assert host_bytes(layout, (torch.bfloat16, torch.bfloat16)) == 10 * 128
    assert host_bytes(layout, (torch.float32, torch.float32)) == 14 * 128


def test_padding_can_be_cleared() -> None:
    slab = slab_of([nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(70))])
    for flat in (slab.exchange, slab.master, *slab.moments):
        flat.fill_(7.0)
    slab.clear_padding()
    for flat in (slab.exchange, slab.master, *slab.moments):
        assert (flat != 0).nonzero().flatten().tolist() == [*range(70), *range(128, 138)]


def test_uploaded_masters_reach_the_parameters() -> None:
    parameters = some_parameters()
    slab = slab_of(parameters)
    slab.master.fill_(3.0)
    slab.upload_masters()
    assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in parameters)


def test_bind_brings_a_moved_parameter_back() -> None:
    parameter = nn.Parameter(torch.randn(4))
    slab = slab_of([parameter])
    parameter.data = torch.zeros(4)
    slab.segments[0].bind()
    assert torch.equal(parameter.detach(), slab.segments[0].master.bfloat16())


def test_flat_is_a_view_in_the_slabs_order_and_shaped_its_inverse() -> None:
    slab = slab_of(some_parameters())
    for segment in slab.segments:
        value = torch.empty_like(segment.device).copy_(torch.randn(segment.device.shape))
        flat = segment.flat(value)
        assert flat.data_ptr() == value.data_ptr()
        assert torch.equal(segment.shaped(flat), value)
        segment.exchange.copy_(value)
        assert torch.equal(slab.exchange[segment.offset : segment.end], flat)
