from __future__ import annotations

import torch
from torch import nn

from lightning_zoffload.bucket import Bucket, Exchanged
from lightning_zoffload.layout import ParameterSpec, build_buckets, dense_stride
from lightning_zoffload.transfer import InlineTransfer


def bucket_of(parameters: list[nn.Parameter], dtype: torch.dtype = torch.bfloat16) -> Bucket:
    specs = [
        ParameterSpec(i, tuple(p.shape), dense_stride(p), dtype) for i, p in enumerate(parameters)
    ]
    (layout,) = build_buckets(specs, 10_000)
    members = [(f"p{s.spec.index}", parameters[s.spec.index]) for s in layout.segments]
    return Bucket(layout, members, 0, 2, torch.device("cpu"), InlineTransfer())


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


def test_runs_cover_neighbours_with_gradients_and_equal_keys() -> None:
    parameters = [nn.Parameter(torch.zeros(64)) for _ in range(5)]
    bucket = bucket_of(parameters)
    for index, segment in enumerate(bucket.segments):
        if index != 1:
            segment.exchanged = Exchanged.GRADIENT
    runs = [elements for elements, _ in bucket.runs_with_gradient()]
    assert runs == [slice(0, 64), slice(128, 320)]
    last = bucket.segments[-1]
    runs = [elements for elements, _ in bucket.runs_with_gradient(lambda s: s is last)]
    assert runs == [slice(0, 64), slice(128, 256), slice(256, 320)]
    for segment in bucket.segments:
        segment.discard_gradient()
    assert list(bucket.runs_with_gradient()) == []


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
