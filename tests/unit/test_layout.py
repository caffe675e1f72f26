from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zoffload.layout import (
    SEGMENT_ALIGNMENT,
    ParameterSpec,
    build_slabs,
    dense_stride,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def specs_of(shapes_and_dtypes: list[tuple[tuple[int, ...], torch.dtype]]) -> list[ParameterSpec]:
    return [
        ParameterSpec(index, shape, tuple(torch.empty(shape).stride()), dtype)
        for index, (shape, dtype) in enumerate(shapes_and_dtypes)
    ]


@given(
    st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), max_size=30),
    st.integers(1, 5000),
)
def test_every_parameter_has_exactly_one_place_of_its_own(
    parameters: list[tuple[tuple[int, ...], torch.dtype]], bucket_size: int
) -> None:
    specs = specs_of(parameters)
    buckets = build_slabs(specs, bucket_size)

    places = [place.spec.index for bucket in buckets for place in bucket.segments]
    assert sorted(places) == list(range(len(specs)))
    for bucket in buckets:
        end = 0
        for place in bucket.segments:
            assert place.spec.dtype is bucket.dtype
            assert place.offset >= end, "segments overlap"
            assert place.offset % SEGMENT_ALIGNMENT == 0
            end = place.end
        assert bucket.numel >= end
        assert bucket.numel - end < SEGMENT_ALIGNMENT, "needless padding"
        assert len(bucket.segments) == 1 or end <= bucket_size
        indices = [place.spec.index for place in bucket.segments]
        assert indices == sorted(indices, reverse=True), "not in order of backward"


def test_a_parameter_larger_than_a_bucket_is_a_bucket_alone() -> None:
    specs = specs_of([((8,), torch.float32), ((1000,), torch.float32), ((8,), torch.float32)])
    lengths = [[s.spec.numel for s in b.segments] for b in build_slabs(specs, 100)]
    assert lengths == [[8], [1000], [8]]


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.empty(3, 4).t(), (1, 4)),
        (torch.empty(3, 1).expand(3, 4), (4, 1)),
        (torch.empty(6, 4)[::2], (4, 1)),
        (torch.empty(()), ()),
        (torch.empty(0, 3), (3, 1)),
    ],
    ids=["channels_last", "transposed", "expanded", "sliced", "0-dim", "empty"],
)
def test_dense_strides_are_kept_and_others_made_contiguous(
    tensor: torch.Tensor, stride: tuple[int, ...]
) -> None:
    assert dense_stride(tensor) == stride
