"""Sums of squares: right, and the same bits wherever they are made."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_zoffload import kernels

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SIZES = [0, 1, 15, 31, 32, 33, 16383, 16384, 16385, 65537, 1_000_003]


def gradient(n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_sum_of_squares(isa: str, dtype: torch.dtype, n: int) -> None:
    exchange = gradient(n, dtype)
    total, nonfinite = kernels.grad_stats(exchange)
    exact = math.fsum(x * x for x in exchange.tolist())
    assert total == pytest.approx(exact, rel=1e-14, abs=0)
    assert not nonfinite


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_neither_isa_nor_threads_nor_alignment(dtype: torch.dtype) -> None:
    for n in SIZES:
        exchange = gradient(n, dtype)
        shifted = torch.cat([torch.zeros(1, dtype=dtype), exchange])[1:]
        totals = set()
        for isa in kernels.available_isas():
            with kernels._forced_isa(isa):
                for num_threads in (1, 2, 3, 7):
                    totals.add(kernels.grad_stats(exchange, num_threads=num_threads)[0])
                totals.add(kernels.grad_stats(shifted)[0])
        assert len(totals) == 1, f"{n} elements: {totals}"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_element_is_found_anywhere(isa: str, dtype: torch.dtype, bad: float) -> None:
    for n in (1, 33, 50_000):
        for position in {0, n // 2, n - 1}:
            exchange = torch.ones(n, dtype=dtype)
            exchange[position] = bad
            total, nonfinite = kernels.grad_stats(exchange, num_threads=2)
            assert nonfinite
            assert not math.isfinite(total)


def test_extremes_are_finite(isa: str) -> None:
    largest = torch.full((100_000,), torch.finfo(torch.float32).max)
    total, nonfinite = kernels.grad_stats(largest)
    assert total == pytest.approx(1e5 * float(largest[0]) ** 2, rel=1e-12)
    assert not nonfinite
    smallest = torch.full((10,), 2.0**-149)
    assert kernels.grad_stats(smallest)[0] == 10 * 2.0**-298
