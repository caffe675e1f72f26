"""bf16 moments: rounded to a neighbour, up or down with the chance that makes the mean exact."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.kernels import SegmentSteps

HYPER: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
N = 200_000


def state(n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    master, m, v, g = torch.randn(4, n, generator=generator).unbind()
    return master, m.bfloat16(), v.square().bfloat16(), g.bfloat16()


def apply(
    tensors: tuple[Tensor, ...], *, step: int = 10, seed: int = 0, **options: Any
) -> list[Tensor]:
    results = [tensor.clone() for tensor in tensors]
    one = torch.tensor([len(tensors[0])]), torch.tensor([step]), torch.tensor([seed])
    kernels.adam_step(*results, **HYPER, step=SegmentSteps(*one), **options)
    return results


def exact_moments(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    _, m, v, g = (tensor.double() for tensor in tensors)
    return 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2


def test_parameters_come_from_the_unrounded_moments(isa: str) -> None:
    before = state()
    wide = [tensor.float() for tensor in before[:3]] + [before[3]]
    narrow = apply(before)
    fp32 = apply(tuple(wide))
    assert torch.equal(narrow[0], fp32[0])
    assert torch.equal(narrow[3], fp32[3])


def test_moments_are_neighbours_of_the_exact_ones(isa: str) -> None:
    before = state()
    _, *moments, _ = apply(before)
    for rounded, exact in zip(moments, exact_moments(before), strict=True):
        spacing = 2.0 ** (torch.frexp(exact)[1] - 8).double()
        of_fp32 = 2.0**-22  # where the terms of exp_avg cancel the fp32 result is not exact
        assert ((rounded.double() - exact).abs() < spacing + of_fp32).all()


def test_the_chance_to_round_up_is_what_is_missing(isa: str) -> None:
    """Elements that lie at the same place between their neighbours go up as often as that says."""
    before = state()
    _, *moments, _ = apply(before)
    for rounded, exact in zip(moments, exact_moments(before), strict=True):
        magnitude = exact.abs()
        spacing = 2.0 ** (torch.frexp(exact)[1] - 8).double()
        fraction = magnitude / spacing % 1.0
        went_up = (rounded.double().abs() > magnitude).double()
        for low in torch.arange(0, 1, 0.1).tolist():
            chosen = (fraction >= low) & (fraction < low + 0.1)
            expected, count = fraction[chosen].mean(), int(chosen.sum())
            five_sigma = 5 * 0.5 / count**0.5
            assert abs(went_up[chosen].mean() - expected) < five_sigma


def random_halves(step: int, seed: int, n: int = N) -> tuple[Tensor, Tensor]:
    """Whether each element went up where both chances are one half."""
    half = torch.tensor(1.0 + 2**-8)  # between 1 and its neighbour in bf16
    beta = 0.5
    gradient = torch.full((n,), float(2 * half - 1))
    root = torch.full((n,), float((2 * half - 1) ** 0.5))
    results = []
    for g in (gradient, root):
        tensors = [torch.ones(n), torch.ones(n).bfloat16(), torch.ones(n).bfloat16(), g]
        table = SegmentSteps(torch.tensor([n]), torch.tensor([step]), torch.tensor([seed]))
        kernels.adam_step(*tensors, **(HYPER | {"betas": (beta, beta)}), step=table)
        results.append(tensors)
    return results[0][1] > 1, results[1][2] > 1


def correlation(a: Tensor, b: Tensor) -> float:
    return float((a.double() - 0.5).mul(b.double() - 0.5).mean() * 4)


def test_random_bits_are_independent() -> None:
    first, second = random_halves(10, 0)
    bound = 5 / N**0.5
    assert abs(first.double().mean() - 0.5) < bound / 2
    assert abs(second.double().mean() - 0.5) < bound / 2
    others = [
        second,
        *(first.roll(distance) for distance in (1, 2, 16, 32, 64, 1024, 16384)),
        *random_halves(11, 0),
        *random_halves(10, 1),
        *random_halves(11, -1),
    ]
    for other in others:
        assert abs(correlation(first, other)) < bound


def test_the_second_moment_does_not_stand_still(isa: str) -> None:
    """A constant gradient: v must approach its square, though each step is below bf16's spacing."""
    n, steps = 4096, 2000
    tensors = (torch.ones(n), torch.zeros(n).bfloat16(), torch.full((n,), 0.5).bfloat16())
    for step in range(1, steps + 1):
        *results, _ = apply((*tensors, torch.ones(n).bfloat16()), step=step)
        tensors = tuple(results)
    expected = 1 - 0.5 * 0.999**steps
    nearest = 0.5  # what rounding to nearest would leave: 0.001 * 0.5 < 2^-9
    assert abs(float(tensors[2].double().mean()) - expected) < 0.002
    assert expected - nearest > 0.4


def test_infinity_and_nan_stay(isa: str) -> None:
    master, m, v, g = (tensor[:64].clone() for tensor in state(64))
    m[3], v[5], g[7] = float("nan"), float("inf"), float("inf")
    after = apply((master, m, v, g))
    assert after[1].isnan().nonzero().flatten().tolist() == [3]
    assert after[2].isinf().nonzero().flatten().tolist() == [5, 7]
    assert after[1].isinf().nonzero().flatten().tolist() == [7]
    assert after[0].isnan().nonzero().flatten().tolist() == [3, 7]
