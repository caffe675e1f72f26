"""One Adam step: within 2 ulp of extended precision, and the same bits wherever it runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from adam_reference import Hyper, assert_same_bits, errors_in_ulp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_zoffload import kernels

Tensors = tuple[Tensor, Tensor, Tensor, Tensor]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HYPERS = [
    Hyper(),
    Hyper(step=1),
    Hyper(step=10_000, weight_decay=0.1),
    Hyper(grad_scale=1 / 65536, weight_decay=0.01),
    Hyper(grad_scale=0.0123456789),
    Hyper(grad_scale=-3.7, lr=0.3, weight_decay=1.0),
    Hyper(grad_scale=0.0),
    Hyper(grad_scale=1e-30),
    Hyper(grad_scale=1e12),
    Hyper(eps=0.0),
    Hyper(eps=1e-30),
    Hyper(eps=1e-3),
    Hyper(eps=1.0, step=3),
    Hyper(weight_decay=0.1, decoupled=False),
    Hyper(weight_decay=0.1, decoupled=False, grad_scale=0.3331, clip_value=0.1),
    Hyper(clip_value=0.01, grad_scale=1.7),
    Hyper(betas=(0.875, 0.875)),
    Hyper(betas=(0.5, 0.6), lr=0.2),
    Hyper(betas=(0.1, 0.2)),
    Hyper(betas=(0.0, 0.99), lr=0.1),
    Hyper(betas=(0.95, 0.0)),
]


def powers(low: float, high: float) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Numbers of either sign, with exponents spread evenly from ``low`` to ``high``."""
    return lambda rng, n: np.exp2(rng.uniform(low, high, n)) * rng.choice([-1.0, 1.0], n)


def zero(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.zeros(n)


def sometimes_zero(draw: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda rng, n: draw(rng, n) * rng.integers(0, 2, n)


#: Master, then exp_avg and the root of exp_avg_sq (both relative to the gradient in the second
#: table), then gradient. Where the master is 0, the update alone is the result.
ABSOLUTE = {
    "first step": (zero, zero, zero, powers(-20, 5)),
    "no gradient": (zero, powers(-30, 0), powers(-30, 0), zero),
    "wide": (sometimes_zero(powers(-40, 20)), powers(-80, 40), powers(-63, 50), powers(-80, 40)),
    "subnormal": (
        sometimes_zero(powers(-149, -120)),
        powers(-149, -110),
        sometimes_zero(powers(-74, -55)),
        powers(-149, -100),
    ),
    "huge": (powers(-10, 127), powers(40, 127), powers(20, 63), powers(40, 127)),
}
RELATIVE = {
    "training": (powers(-8, 0), powers(-4, 2), powers(-2, 2), powers(-20, -4)),
    "update alone": (zero, powers(-3, 3), powers(-2, 3), powers(-30, 0)),
    "update like master": (powers(-14, -8), powers(-1, 1), powers(-1, 2), powers(-6, 0)),
}


def draw(kind: str, dtype: torch.dtype, n: int) -> Tensors:
    rng = np.random.default_rng(n)
    p, m, root, g = (make(rng, n) for make in (ABSOLUTE | RELATIVE)[kind])
    if kind in RELATIVE:
        m, root = m * g, root * g
    limit = float(torch.finfo(dtype).max)
    gradient = torch.tensor(np.clip(g, -limit, limit)).to(dtype)
    master, exp_avg, exp_avg_sq = (torch.tensor(x, dtype=torch.float32) for x in (p, m, root**2))
    return master, exp_avg, exp_avg_sq, gradient


@pytest.mark.parametrize("kind", [*ABSOLUTE, *RELATIVE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_result_is_within_2_ulp(isa: str, dtype: torch.dtype, kind: str) -> None:
    before = draw(kind, dtype, 1500)
    for hyper in HYPERS:
        after = hyper.apply(before)
        for name, errors in errors_in_ulp(hyper, before, after).items():
            worst = int(np.nanargmax(errors))
            assert errors[worst] <= 2, (
                f"{name} is {errors[worst]:.3f} ulp off with {hyper},"
                f" from {[float(t[worst]) for t in before]} to {[float(t[worst]) for t in after]}"
            )
        assert torch.equal(after[3], after[0].to(dtype))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_follow_torch(isa: str, dtype: torch.dtype, decoupled: bool) -> None:
    gradients = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 1000).double())
    ours = [parameter.detach().float(), torch.zeros(1000), torch.zeros(1000)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=1e-2, weight_decay=0.1)
    hyper = Hyper(lr=1e-2, weight_decay=0.1, decoupled=decoupled)
    for step, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.double()
        optimizer.step()
        exchange = gradient.clone()
        kernels.adam_step(*ours, exchange, **{**vars(hyper), "step": step})
    state = optimizer.state[parameter]
    expected = (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1.0, 0.0123456789])
def test_an_l2_penalty_that_cancels_the_gradient(isa: str, scale: float) -> None:
    """What is left to square may be 2^-18 of either term: it must have all its bits."""
    rng = np.random.default_rng(3)
    n = 1500
    hyper = Hyper(weight_decay=0.1, decoupled=False, grad_scale=scale, betas=(0.9, 0.1))
    gradient = powers(-8, 8)(rng, n).astype(np.float32)
    penalised = -gradient.astype(np.float64) * scale / hyper.weight_decay
    master = torch.tensor(penalised * (1 + powers(-18, -2)(rng, n)), dtype=torch.float32)
    before = (master, torch.zeros(n), torch.zeros(n), torch.tensor(gradient))
    after = hyper.apply(before)
    assert errors_in_ulp(hyper, before, after)["exp_avg_sq"].max() <= 2


SIZES = [0, 1, 15, 16, 17, 31, 32, 33, 4095, 4096, 4097, 65537, 1_000_003]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_on_neither_isa_nor_threads_nor_alignment(dtype: torch.dtype, n: int) -> None:
    hypers = [Hyper(weight_decay=0.1), Hyper(weight_decay=0.1, decoupled=False)]
    before = draw("training", dtype, n)
    for hyper in hypers if n < 100_000 else hypers[:1]:
        with kernels._forced_isa("scalar"):
            expected = hyper.apply(before)
        for isa in kernels.available_isas():
            with kernels._forced_isa(isa):
                for num_threads in (1, 2, 3):
                    assert_same_bits(hyper.apply(before, num_threads), expected)
                shifted = tuple(torch.cat([t[:1], t])[1:] if n else t.clone() for t in before)
                kernels.adam_step(*shifted, **vars(hyper))
                assert_same_bits(shifted, expected)


@pytest.mark.parametrize("kind", [*ABSOLUTE, *RELATIVE])
def test_bits_of_unusual_numbers_depend_on_no_isa(kind: str) -> None:
    for dtype in DTYPES:
        before = draw(kind, dtype, 1003)
        for hyper in HYPERS:
            with kernels._forced_isa("scalar"):
                expected = hyper.apply(before)
            for isa in kernels.available_isas():
                with kernels._forced_isa(isa):
                    assert_same_bits(hyper.apply(before), expected)


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 1.2e-38, 3e-30, 1e-8, 65520.0, 2e19, -3.4e38]
NON_FINITE = [math.inf, -math.inf, math.nan]
numbers = st.sampled_from(SPECIAL + NON_FINITE) | st.floats(width=32)
squares = numbers.filter(lambda x: not x < 0.0)  # NaN stays


def zero_or(low: float, high: float) -> st.SearchStrategy[float]:
    """Nothing between 0 and ``low``: hyper-parameters are in fp32's normal range."""
    return st.just(0.0) | st.floats(low, high)


hypers = st.builds(
    Hyper,
    lr=zero_or(1e-20, 1),
    betas=st.tuples(zero_or(1e-10, 0.9999), zero_or(1e-10, 0.9999)),
    eps=st.sampled_from([1e-8, 1.0]) | zero_or(1e-30, 1),
    weight_decay=zero_or(1e-10, 0.5),
    step=st.integers(1, 100_000),
    grad_scale=st.sampled_from([1.0, 1 / 65536, -3.0]) | zero_or(1e-30, 1e6),
    decoupled=st.booleans(),
    clip_value=st.sampled_from([math.inf, 1.0]) | st.floats(1e-6, 1e6),
)


@given(
    rows=st.lists(st.tuples(numbers, numbers, squares, numbers), max_size=70),
    hyper=hypers,
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=400, deadline=None)
def test_any_numbers(
    rows: list[tuple[float, float, float, float]], hyper: Hyper, dtype: torch.dtype
) -> None:
    columns = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).T.contiguous()
    p, m, v, g = columns.float().unbind()
    before = p, m, v, g.to(dtype)
    with kernels._forced_isa("scalar"):
        after = hyper.apply(before)
    for isa in kernels.available_isas():
        with kernels._forced_isa(isa):
            assert_same_bits(hyper.apply(before), after)
    for name, errors in errors_in_ulp(hyper, before, after).items():
        # NaN where the exact result is not finite. Where it is, ours may not be NaN.
        assert np.all(np.isnan(errors) | (errors <= 2)), f"{name}: {errors}"


@pytest.mark.parametrize(
    ("before", "finite"),
    [
        ((1.0, 0.1, math.inf, 1.0), 1.0),  # divided by infinity: only weight decay is left
        ((1.0, 0.1, 3e38, 1.0), 1.0),
        ((1.0, 0.0, 0.0, 0.0), 1.0),
        ((1.0, 1.0, 1.0, math.nan), math.nan),
        ((1.0, 1.0, 1.0, math.inf), math.nan),
        ((math.inf, 1.0, 1.0, 1.0), math.inf),
        ((math.nan, 1.0, 1.0, 1.0), math.nan),
    ],
)
def test_non_finite_numbers_as_in_the_formula(
    isa: str, before: tuple[float, ...], finite: float
) -> None:
    for neighbour in (0.5, math.nan):  # whatever shares the register
        row = torch.full((4, 40), neighbour)
        row[:, 17] = torch.tensor(before)
        after = Hyper().apply(tuple(row))
        torch.testing.assert_close(
            after[0][17], torch.tensor(finite), rtol=1e-6, atol=0, equal_nan=True
        )


def test_zero_eps_divides_by_zero_as_torch_does(isa: str) -> None:
    gradient = torch.tensor([0.0, 1.0])
    after = Hyper(eps=0.0).apply((torch.ones(2), torch.zeros(2), torch.zeros(2), gradient))
    assert after[0].isnan().tolist() == [True, False]
