"""Adam(W) as its papers write it, in extended precision, and how far a result is from it in ulp."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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

    Below fp32's normal range a moment is a multiple of 2^-149, and the parameter can be no better
    than two such steps in each moment make it; what they make is not counted as its error.
    """
    p, m, v, raw = map(wide, before)
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

    m_step = np.sign(new_m) * 2 * SUBNORMAL
    most = hyper.update(new_m + m_step, np.maximum(new_v - 2 * SUBNORMAL, 0))
    least = hyper.update(new_m - m_step, new_v + 2 * SUBNORMAL)
    slack = np.maximum(np.abs(most - update), np.abs(update - least))

    return {
        "master": _error(after[0], new_p, (decayed, update), slack),
        "exp_avg": _error(after[1], new_m, m_terms),
        "exp_avg_sq": _error(after[2], new_v, ()),
    }


def _error(
    got: Tensor, exact: np.ndarray, terms: tuple[np.ndarray, ...], slack: np.ndarray | int = 0
) -> np.ndarray:
    largest = np.max(np.abs([exact, *terms]), axis=0)
    difference = np.maximum(np.abs(wide(got) - exact) - slack, 0)
    # Past the end of fp32's range infinity is the nearest number.
    overflow = np.isinf(wide(got)) & (np.sign(exact) == np.sign(wide(got)))
    overflow &= np.abs(exact) >= WIDE(torch.finfo(torch.float32).max)
    return np.where(overflow, 0, difference / ulp(largest))
