from __future__ import annotations

import torch
from torch import nn

from lightning_zoffload.bucket import Bucket, Exchanged, host_bytes
from lightning_zoffload.layout import ParameterSpec, build_buckets, dense_stride
from lightning_zoffload.transfer import InlineTransfer


def bucket_of(parameters: list[nn.Parameter], dtype: torch.dtype = torch.bfloat16) -> Bucket:
    specs = [
        ParameterSpec(i, tuple(p.shape), dense_stride(p), dtype) for i, p in enumerate(parameters)
    ]
    (layout,) = build_buckets(specs, 10_000)
    members = [(f"p{s.spec.index}", parameters[s.spec.index]) for s in layout.segments]
    moments = (torch.float32, torch.bfloat16)
    return Bucket(layout, members, 0, moments, torch.device("cpu"), InlineTransfer())


def some_parameters() -> list[nn.Parameter]:
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensors = [torch.randn(3, 4), channels_last, torch.randn(()), torch.randn(0, 2)]
    return [nn.Parameter(tensor) for tensor in tensors]


def test_takes_parameters_over_exactly_and_keeps_shape_and_strides() -> None:
    parameters = some_parameters()
    before = [p.detach().clone() for p in parameters]
    strides = [p.stride() for p in parameters]
    bucket = bucket_of(parameters)
    masters = {s.parameter: s.master for s in bucket.segments}
    for p, old, stride in zip(parameters, before, strides, strict=True):
        assert torch.equal(masters[p], old)
        assert torch.equal(p.detach(), old.bfloat16())
        assert (p.shape, p.stride()) == (old.shape, stride)
        in_bucket = bucket.device.untyped_storage().data_ptr()
        assert p.untyped_storage().data_ptr() == in_bucket


def test_a_gradient_moves_to_the_exchange_buffer_and_is_freed() -> None:
    parameters = some_parameters()
    bucket = bucket_of(parameters)
    gradient = torch.randn(2, 3, 4, 5)
    parameters[1].grad = gradient.bfloat16()
    (segment,) = (s for s in bucket.segments if s.parameter is parameters[1])
    segment.receive_gradient(InlineTransfer())
    assert parameters[1].grad is None
    assert torch.equal(segment.exchange, gradient.bfloat16())
    assert segment.exchanged is Exchanged.GRADIENT


def test_runs_cover_neighbours_with_gradients() -> None:
    parameters = [nn.Parameter(torch.zeros(64)) for _ in range(5)]
    bucket = bucket_of(parameters)
    for index, segment in enumerate(bucket.segments):
        if index != 1:
            segment.exchanged = Exchanged.GRADIENT
    assert bucket.has_gradient().tolist() == [True, False, True, True, True]
    assert list(bucket.runs_with_gradient()) == [slice(0, 64), slice(128, 320)]
    for segment in bucket.segments:
        segment.discard_gradient()
    assert list(bucket.runs_with_gradient()) == []
    assert not bucket.has_gradient().any()


def test_the_table_of_segments_covers_the_bucket_with_its_padding() -> None:
    bucket = bucket_of([nn.Parameter(torch.zeros(n)) for n in (10, 64, 65)])
    assert [s.offset for s in bucket.segments] == [0, 128, 192]
    assert bucket.ends.tolist() == [128, 192, len(bucket.master)]
    bucket.segments[1].step.fill_(3)
    assert bucket.steps.tolist() == [0, 3, 0]


def test_seeds_are_of_the_names_only() -> None:
    together = bucket_of([nn.Parameter(torch.zeros(4)) for _ in range(3)])
    alone = bucket_of([nn.Parameter(torch.zeros(1000))])
    by_name = {s.name: int(seed) for s, seed in zip(together.segments, together.seeds, strict=True)}
    assert len(set(by_name.values())) == 3
    assert int(alone.seeds[0]) == by_name["p0"]


def test_moments_have_the_dtypes_asked_for_and_the_bytes_are_told() -> None:
    bucket = bucket_of([nn.Parameter(torch.ones(100))])
    assert [m.dtype for m in bucket.moments] == [torch.float32, torch.bfloat16]
    assert [m.dtype for m in bucket.segments[0].moments] == [torch.float32, torch.bfloat16]
    spec = ParameterSpec(0, (128,), (1,), torch.bfloat16)
    (layout,) = build_buckets([spec], 10_000)
    assert host_bytes(layout, (torch.bfloat16, torch.bfloat16)) == 10 * 128
    assert host_bytes(layout, (torch.float32, torch.float32)) == 14 * 128


def test_padding_can_be_cleared() -> None:
    bucket = bucket_of([nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(70))])
    for flat in (bucket.exchange, bucket.master, *bucket.moments):
        flat.fill_(7.0)
    bucket.clear_padding()
    for flat in (bucket.exchange, bucket.master, *bucket.moments):
        assert (flat != 0).nonzero().flatten().tolist() == [*range(70), *range(128, 138)]


def test_uploaded_masters_reach_the_parameters() -> None:
    parameters = some_parameters()
    bucket = bucket_of(parameters)
    bucket.master.fill_(3.0)
    bucket.upload_masters()
    assert all(torch.equal(p, torch.full_like(p, 3.0)) for p in parameters)


def test_bind_brings_a_moved_parameter_back() -> None:
    parameter = nn.Parameter(torch.randn(4))
    bucket = bucket_of([parameter])
    parameter.data = torch.zeros(4)
    bucket.segments[0].bind()
    assert torch.equal(parameter.detach(), bucket.segments[0].master.bfloat16())
