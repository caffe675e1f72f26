"""Accumulation in fp32, with the statistics of the sum in the same pass."""

from __future__ import annotations

import math

import pytest
import torch
from adam_reference import bits
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_zoffload import kernels

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@given(
    n=st.sampled_from([0, 1, 31, 32, 33, 16384, 40001]),
    dtype=st.sampled_from(DTYPES),
    isa=st.sampled_from(kernels.available_isas()),
    num_threads=st.integers(1, 3),
    micro_batches=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_sum_is_torchs_and_its_squares_are_grad_stats(
    n: int, dtype: torch.dtype, isa: str, num_threads: int, micro_batches: int
) -> None:
    generator = torch.Generator().manual_seed(n)
    gradients = torch.randn(micro_batches, n, generator=generator).to(dtype)
    accumulator, expected = torch.zeros(n), torch.zeros(n)
    for gradient in gradients:
        expected += gradient
        with kernels._forced_isa(isa):
            stats = kernels.accumulate(accumulator, gradient, num_threads=num_threads)
    assert torch.equal(bits(accumulator), bits(expected))
    assert stats == kernels.grad_stats(expected)
    assert stats[0] == pytest.approx(float(expected.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 31, 63, 64])
def test_one_bad_element_shows(isa: str, value: float, place: int) -> None:
    gradient = torch.ones(65).bfloat16()
    gradient[place] = value
    accumulator = torch.ones(65)
    assert kernels.accumulate(accumulator, gradient)[1]
    assert accumulator.isfinite().sum() == 64


def test_first_touch_leaves_zeros() -> None:
    for n in (0, 1, 5000, 1_000_003):
        fresh = torch.zeros(n)
        kernels.first_touch(fresh, num_threads=2)
        assert not fresh.any()
