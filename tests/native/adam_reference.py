"""Adam(W) as its papers write it, in extended precision, and how far a result is from it in ulp."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_zoffload import kernels

WIDE = np.longdouble
SUBNORMAL = WIDE(2.0) ** -149
NAMES = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Hyper:
    """The arguments of ``adam_step``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 10
    grad_scale: float = 1.0
    decoupled: bool = True
    clip_value: float = math.inf

    def update(self, m: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What a step subtracts from the parameter, given its new moments."""
        beta1, beta2 = map(WIDE, self.betas)
        denominator = np.sqrt(v) / np.sqrt(1 - beta2**self.step) + WIDE(self.eps)
        return WIDE(self.lr) / (1 - beta1**self.step) * m / denominator

    def step_size(self) -> np.longdouble:
        beta1, beta2 = map(WIDE, self.betas)
        return WIDE(self.lr) * np.sqrt(1 - beta2**self.step) / (1 - beta1**self.step)

    def apply(self, tensors: tuple[Tensor, ...], num_threads: int = 1) -> tuple[Tensor, ...]:
        """What ``adam_step`` makes of copies of the tensors."""
        results = tuple(tensor.clone() for tensor in tensors)
        kernels.adam_step(*results, **vars(self), num_threads=num_threads)
        return results


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().numpy().astype(WIDE)


def ulp(x: np.ndarray) -> np.ndarray:
    """Distance of neighbours in fp32 at ``x``."""
    exponent = np.frexp(np.abs(x))[1]
    return np.maximum(np.ldexp(WIDE(1), exponent - 24), SUBNORMAL)


def errors_in_ulp(
    hyper: Hyper, before: tuple[Tensor, Tensor, Tensor, Tensor], after: tuple[Tensor, ...]
) -> dict[str, np.ndarray]:
    """Errors of master, exp_avg and exp_avg_sq, in ulp of the larger of result and terms.

    Where the terms of the first moment cancel, so does the update that it makes.

    At the bottom of fp32's range moments and their low parts are multiples of 2^-149. One such step
    in a moment, two in those that make the parameter, and one in the quotient are not counted.
    Where an exact result is infinite or NaN the error is NaN.
    """
    with np.errstate(all="ignore"):
        return _errors_in_ulp(hyper, *map(wide, before), after)


def _errors_in_ulp(
    hyper: Hyper,
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    raw: np.ndarray,
    after: tuple[Tensor, ...],
) -> dict[str, np.ndarray]:
    beta1, beta2 = map(WIDE, hyper.betas)
    gradient = raw * WIDE(hyper.grad_scale)
    limit = WIDE(np.float32(hyper.clip_value))
    gradient = np.clip(gradient, -limit, limit)
    if hyper.decoupled:
        decayed = p - WIDE(hyper.lr) * WIDE(hyper.weight_decay) * p
    else:
        decayed = p
        gradient = gradient + WIDE(hyper.weight_decay) * p
    m_terms = beta1 * m, (1 - beta1) * gradient
    new_m = m_terms[0] + m_terms[1]
    new_v = beta2 * v + (1 - beta2) * gradient**2
    update = hyper.update(new_m, new_v)
    new_p = decayed - update
    update_of_larger_term = hyper.update(np.max(np.abs([*m_terms, new_m]), axis=0), new_v)

    m_step = np.sign(new_m) * 2 * SUBNORMAL
    most = hyper.update(new_m + m_step, np.maximum(new_v - 2 * SUBNORMAL, 0))
    least = hyper.update(new_m - m_step, new_v + 2 * SUBNORMAL)
    slack = np.maximum(np.abs(most - update), np.abs(update - least))
    slack = slack + hyper.step_size() * SUBNORMAL

    return {
        "master": _error(after[0], new_p, (p, decayed, update_of_larger_term, most), slack),
        "exp_avg": _error(after[1], new_m, m_terms, SUBNORMAL),
        "exp_avg_sq": _error(after[2], new_v, (), SUBNORMAL),
    }


def _error(
    got: Tensor, exact: np.ndarray, terms: tuple[np.ndarray, ...], slack: np.ndarray
) -> np.ndarray:
    largest = np.max(np.abs([exact, *terms]), axis=0)
    difference = np.maximum(np.abs(wide(got) - exact) - slack, 0)
    # Past the end of fp32's range infinity is the nearest number.
    overflow = np.isinf(wide(got)) & (np.sign(exact) == np.sign(wide(got)))
    overflow &= np.abs(exact) >= WIDE(torch.finfo(torch.float32).max)
    return np.where(overflow, 0, difference / ulp(largest))


def bits(tensor: Tensor) -> Tensor:
    """To compare NaNs and signed zeros too."""
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def assert_same_bits(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, a, b in zip((*NAMES, "exchange"), actual, expected, strict=True):
        different = (bits(a) != bits(b)).nonzero().flatten().tolist()
        assert not different, f"{name} differs at {different[:5]}: {a[different]}, {b[different]}"
