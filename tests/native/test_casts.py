"""Loads and stores of 16-bit numbers: every number up, and all roundings down, as in torch."""

from __future__ import annotations

import pytest
import torch
from adam_reference import Hyper, bits
from torch import Tensor

from lightning_zoffload import kernels

#: New first moment = gradient; new parameter = old parameter.
UP = Hyper(betas=(0.0, 0.0))
DOWN = Hyper(lr=0.0, eps=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number_is_read_exactly(isa: str, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    zeros = torch.zeros(2**16)
    moment = UP.apply((zeros, zeros, zeros, every))[1]
    expected = every.float()
    assert torch.equal(moment.isnan(), expected.isnan())
    assert torch.equal(moment[~expected.isnan()], expected[~expected.isnan()])


def numbers_to_round(dtype: torch.dtype) -> Tensor:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()
    middle = every + (every.abs() + torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps / 2
    leading = torch.cat([every, middle, every * 0.999, torch.logspace(-45, 38, 100_000)])
    around = torch.stack([bits(leading) + i for i in (-1, 0, 1)]).flatten().view(torch.float32)
    # All patterns of the bits that are rounded away, after each exponent of either sign.
    exponents = torch.arange(-256, 256, dtype=torch.int32).reshape(-1, 1) << 23
    low_bits = torch.arange(2**17, dtype=torch.int32)[:: 2**5]
    numbers = torch.cat([around, (exponents | low_bits).flatten().view(torch.float32)])
    return numbers[numbers.isfinite()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_numbers_round_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    numbers = numbers_to_round(dtype)
    zeros = torch.zeros_like(numbers)
    written = DOWN.apply((numbers, zeros, zeros, zeros.to(dtype)))[3]
    wrong = (bits(written) != bits(numbers.to(dtype))).nonzero().flatten()
    assert not len(wrong), f"{numbers[wrong[:5]]} became {written[wrong[:5]]}"


@pytest.mark.parametrize(
    ("dtype", "pattern"), [(torch.float16, 0x7E00), (torch.bfloat16, 0x7FC0)], ids=str
)
def test_all_nans_are_one(isa: str, dtype: torch.dtype, pattern: int) -> None:
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    nans = nans.view(torch.float32)
    assert nans.isnan().all()
    zeros = torch.zeros_like(nans)
    after = DOWN.apply((nans, zeros, zeros, zeros.to(dtype)))
    assert bits(after[3]).tolist() == [pattern] * len(nans)
    assert bits(after[0]).tolist() == [0x7FC00000] * len(nans)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_cast_is_torchs(isa: str, dtype: torch.dtype, num_threads: int) -> None:
    numbers = torch.cat([numbers_to_round(torch.float16), torch.tensor([torch.inf, -torch.inf])])
    for n in (0, 1, 33, len(numbers)):
        narrow, back = torch.empty(n, dtype=dtype), torch.empty(n)
        kernels.cast(numbers[:n], narrow, num_threads=num_threads)
        assert torch.equal(bits(narrow), bits(numbers[:n].to(dtype)))
        kernels.cast(narrow, back, num_threads=num_threads)
        assert torch.equal(bits(back), bits(narrow.float()))


def test_cast_makes_all_nans_one(isa: str) -> None:
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    for dtype, pattern in ((torch.float16, 0x7E00), (torch.bfloat16, 0x7FC0)):
        narrow = torch.empty(3, dtype=dtype)
        kernels.cast(nans, narrow)
        assert bits(narrow).tolist() == [pattern] * 3
        kernels.cast(narrow, nans)
        assert bits(nans).tolist() == [0x7FC00000] * 3
