"""SGD, Adagrad, Lion, and Adam's ``amsgrad`` and ``maximize``: their formulas, step by step.

The reference is torch's own optimizer in fp64, and extended precision for single steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from adam_reference import WIDE, ulp, wide
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.lion import Lion

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
N = 1003

Step = Callable[..., None]


def adam(state: dict[str, Tensor], **hyper: Any) -> Step:
    largest = {"max_exp_avg_sq": state["max_exp_avg_sq"]} if hyper.pop("amsgrad") else {}

    def step(master: Tensor, exchange: Tensor, number: int) -> None:
        moments = state["exp_avg"], state["exp_avg_sq"]
        kernels.adam_step(master, *moments, exchange, **hyper, **largest, step=number)

    return step


def sgd(state: dict[str, Tensor], **hyper: Any) -> Step:
    buffer = state["momentum_buffer"] if hyper["momentum"] else None

    def step(master: Tensor, exchange: Tensor, number: int) -> None:
        kernels.sgd_step(master, buffer, exchange, **hyper, step=number)

    return step


def adagrad(state: dict[str, Tensor], **hyper: Any) -> Step:
    def step(master: Tensor, exchange: Tensor, number: int) -> None:
        kernels.adagrad_step(master, state["sum"], exchange, **hyper, step=number)

    return step


def lion(state: dict[str, Tensor], **hyper: Any) -> Step:
    def step(master: Tensor, exchange: Tensor, number: int) -> None:
        kernels.lion_step(master, state["exp_avg"], exchange, **hyper, step=number)

    return step


ADAM = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0}
LION = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
CASES: list[tuple[Callable[..., Step], type[torch.optim.Optimizer], dict[str, Any]]] = [
    (adam, torch.optim.Adam, ADAM | {"amsgrad": True}),
    (adam, torch.optim.Adam, ADAM | {"amsgrad": True, "maximize": True}),
    (adam, torch.optim.Adam, ADAM | {"amsgrad": False, "maximize": True}),
    (sgd, torch.optim.SGD, SGD),
    (sgd, torch.optim.SGD, SGD | {"weight_decay": 0.1, "maximize": True}),
    (sgd, torch.optim.SGD, SGD | {"momentum": 0.9}),
    (sgd, torch.optim.SGD, SGD | {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
    (sgd, torch.optim.SGD, SGD | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (adagrad, torch.optim.Adagrad, ADAGRAD),
    (adagrad, torch.optim.Adagrad, ADAGRAD | {"lr_decay": 0.1, "weight_decay": 0.1}),
    (adagrad, torch.optim.Adagrad, ADAGRAD | {"eps": 0.1, "maximize": True}),
    (lion, Lion, LION),
    (lion, Lion, LION | {"weight_decay": 0.0, "maximize": True}),
]
IDS = [f"{kind.__name__}-{i}" for i, (_, kind, _) in enumerate(CASES)]
STATES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("make", "kind", "hyper"), CASES, ids=IDS)
def test_steps_follow_torch_in_fp64(
    isa: str,
    dtype: torch.dtype,
    make: Callable[..., Step],
    kind: type[torch.optim.Optimizer],
    hyper: dict[str, Any],
) -> None:
    gradients = torch.randn(20, N, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, N).double())
    theirs = {name: value for name, value in hyper.items() if name != "amsgrad" or value}
    optimizer = kind([parameter], **theirs)
    master, state = torch.linspace(-1, 1, N), {name: torch.zeros(N) for name in STATES}
    ours = {"decoupled": False} if kind is torch.optim.Adam else {}
    step = make(state, **hyper, **ours)
    for number, gradient in enumerate(gradients, start=1):
        parameter.grad = gradient.double()
        optimizer.step()
        exchange = gradient.clone()
        step(master, exchange, number)
        assert torch.equal(exchange, master.to(dtype))
    torch.testing.assert_close(master.double(), parameter.detach(), rtol=2e-6, atol=1e-6)
    for name, value in optimizer.state[parameter].items():
        if name in STATES and value is not None:
            torch.testing.assert_close(state[name].double(), value, rtol=2e-6, atol=1e-6)


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Masters, states and gradients over many sizes."""
    rng = np.random.default_rng(0)
    sizes = np.exp2(rng.uniform(-12, 4, (3, N))) * rng.choice([-1.0, 1.0], (3, N))
    master, state, gradient = torch.tensor(sizes, dtype=torch.float32)
    return master, state, gradient.to(dtype)


def assert_within_2_ulp(actual: Tensor, exact: np.ndarray, *terms: np.ndarray) -> None:
    largest = np.max(np.abs([exact, *terms]), axis=0)
    errors = np.abs(wide(actual) - exact) / ulp(largest)
    assert errors.max() <= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_is_within_2_ulp(isa: str, dtype: torch.dtype, nesterov: bool) -> None:
    master, buffer, gradient = draw(dtype)
    p, b, g = wide(master), wide(buffer), wide(gradient)
    mu, damp = (0.9, 0.0) if nesterov else (0.95, 0.1)
    hyper = {"lr": 0.3, "momentum": mu, "dampening": damp, "weight_decay": 0.01}
    kernels.sgd_step(master, buffer, gradient, **hyper, nesterov=nesterov, step=5, grad_scale=0.37)
    penalty = WIDE(0.01) * p
    a = g * WIDE(0.37) + penalty
    terms = WIDE(mu) * b, (1 - WIDE(damp)) * a, (1 - WIDE(damp)) * penalty
    new_b = terms[0] + terms[1]
    direction = a + WIDE(mu) * new_b if nesterov else new_b
    lr = WIDE(0.3)
    assert_within_2_ulp(buffer, new_b, *terms)
    assert_within_2_ulp(master, p - lr * direction, p, lr * direction, *(lr * t for t in terms))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adagrad_is_within_2_ulp(isa: str, dtype: torch.dtype) -> None:
    master, state, gradient = draw(dtype)
    square_sum = state.square()
    p, s, a = wide(master), wide(square_sum), wide(gradient) * WIDE(0.37)
    hyper = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.0, "eps": 1e-3}
    kernels.adagrad_step(master, square_sum, gradient, **hyper, step=7, grad_scale=0.37)
    new_s = s + a**2
    update = WIDE(0.1) / (1 + 6 * WIDE(0.01)) * a / (np.sqrt(new_s) + WIDE(1e-3))
    assert_within_2_ulp(square_sum, new_s)
    assert_within_2_ulp(master, p - update, p, update)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lion_is_within_2_ulp(isa: str, dtype: torch.dtype) -> None:
    master, momentum, gradient = draw(dtype)
    p, m, a = wide(master), wide(momentum), wide(gradient) * WIDE(0.37)
    hyper = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
    kernels.lion_step(master, momentum, gradient, **hyper, step=1, grad_scale=0.37)
    direction = np.sign(WIDE(0.9) * m + (1 - WIDE(0.9)) * a)
    terms = WIDE(0.99) * m, (1 - WIDE(0.99)) * a
    assert_within_2_ulp(momentum, sum(terms), *terms)
    assert_within_2_ulp(master, p - WIDE(1e-3) * (WIDE(0.1) * p + direction), p)


def test_amsgrad_keeps_the_largest(isa: str) -> None:
    largest = torch.tensor([0.0, 4.0])
    state = torch.ones(2), torch.zeros(2), torch.ones(2), torch.zeros(2)
    hyper = {"lr": 1.0, "betas": (0.9, 0.5), "eps": 0.0, "weight_decay": 0.0, "step": 10**6}
    state[1].fill_(1 / 0.9)
    kernels.adam_step(*state, **hyper, max_exp_avg_sq=largest)
    assert largest.tolist() == [0.5, 4.0]
    expected = torch.tensor([1 - 0.5**-0.5, 1 - 0.5])
    torch.testing.assert_close(state[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_gradients_as_in_the_formula(isa: str, value: float) -> None:
    def gradient() -> Tensor:
        row = torch.ones(40)
        row[17] = value
        return row

    master, state = torch.ones(40), torch.ones(40)
    kernels.sgd_step(master, None, gradient(), **SGD, step=1)
    assert master[17].item() == -value or master[17].isnan() == (value != value)
    master = torch.ones(40)
    kernels.lion_step(master, state, gradient(), **(LION | {"weight_decay": 0.0}), step=1)
    moved = 0.99 if value == value else 1.0  # the sign of infinity; none of NaN
    assert master[17].item() == pytest.approx(moved)
    torch.testing.assert_close(state[17], torch.tensor(value), equal_nan=True)
    master, state = torch.ones(40), torch.ones(40)
    kernels.adagrad_step(master, state, gradient(), **ADAGRAD, step=1)
    assert master[17].isnan()  # inf / inf, as torch
    assert bool(torch.isfinite(master).sum() == 39)
