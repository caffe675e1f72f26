"""A table of segments gives what one call for each segment gives."""

from __future__ import annotations

from typing import Any

import torch
from adam_reference import Hyper, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.kernels import SegmentSteps

HYPER: dict[str, Any] = {
    name: value for name, value in vars(Hyper(weight_decay=0.1)).items() if name != "step"
}
Tensors = tuple[Tensor, ...]


def random_state(n: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(n)
    master, m, v, g = torch.randn(4, n, generator=generator).unbind()
    return master, m.to(dtype), v.square().to(dtype), g.to(torch.bfloat16)


def table(lengths: list[int], steps: list[int], seeds: list[int] | None = None) -> SegmentSteps:
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    columns = (torch.tensor(values, dtype=torch.int64) for values in (steps, seeds or []))
    steps_column, seeds_column = columns
    return SegmentSteps(ends, steps_column, seeds_column if seeds else None)


@given(
    segments=st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 64, 1000, 16384, 40000]), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    rest=st.integers(0, 100),
    num_threads=st.integers(1, 3),
    isa=st.sampled_from(kernels.available_isas()),
)
@settings(max_examples=60, deadline=None)
def test_one_call_is_as_many(
    segments: list[tuple[int, int]], rest: int, num_threads: int, isa: str
) -> None:
    lengths, steps = map(list, zip(*segments, strict=True))
    before = random_state(sum(lengths) + rest)
    expected = tuple(tensor.clone() for tensor in before)
    offset = 0
    for length, step in segments:
        if step:
            part = tuple(tensor[offset : offset + length] for tensor in expected)
            kernels.adam_step(*part, **HYPER, step=step)
        offset += length
    actual = tuple(tensor.clone() for tensor in before)
    with kernels._forced_isa(isa):
        steps_table = table(lengths, steps)
        kernels.adam_step(*actual, **HYPER, step=steps_table, num_threads=num_threads)
    assert_same_bits(actual, expected)


def test_no_segment_changes_nothing() -> None:
    before = random_state(100)
    after = tuple(tensor.clone() for tensor in before)
    kernels.adam_step(*after, **HYPER, step=table([], []))
    kernels.adam_step(*after, **HYPER, step=table([50, 50], [0, 0]))
    assert_same_bits(after, before)


@given(
    lengths=st.lists(st.sampled_from([0, 1, 5, 64, 300, 20000]), min_size=1, max_size=6),
    shift=st.integers(0, 40),
)
@settings(max_examples=40, deadline=None)
def test_random_bits_depend_on_seed_and_place_in_the_segment_only(
    lengths: list[int], shift: int
) -> None:
    """Not on where the segment lies: other bucket sizes and more ranks change no bit."""
    seeds = [7 * i + 1 for i in range(len(lengths))]
    n = sum(lengths)
    before = random_state(n + shift, torch.bfloat16)
    together = tuple(tensor.clone() for tensor in before)
    steps = table([shift, *lengths], [0] + [5] * len(lengths), [0, *seeds])
    kernels.adam_step(*together, **HYPER, step=steps)
    apart = tuple(tensor.clone() for tensor in before)
    offset = shift
    for length, seed in zip(lengths, seeds, strict=True):
        part = tuple(tensor[offset : offset + length].clone() for tensor in apart)
        kernels.adam_step(*part, **HYPER, step=table([length], [5], [seed]))
        for whole, piece in zip(apart, part, strict=True):
            whole[offset : offset + length] = piece
        offset += length
    for a, b in zip(together, apart, strict=True):
        assert torch.equal(a, b)
