"""The Lion optimizer, which torch lacks. Runs natively under zero_offload, and anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Lion, "EvoLved sIgn mOmeNtum" (arXiv 2302.06675, program 1).

    For a gradient ``g``, with the old momentum ``m`` in both::

        p = (1 - lr * weight_decay) * p - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    Every element moves by ``lr``, so learning rates are 3 to 10 times smaller than AdamW's and
    weight decay as much larger (section 5 there).

    Args:
        params: Parameters, or param groups.
        lr: Learning rate.
        betas: Decay rates for the direction and for the momentum, each in [0, 1).
        weight_decay: Its coefficient, decoupled.
        maximize: Ascends instead of descending.

    Raises:
        ValueError: A hyper-parameter is out of its range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0.0:
            raise ValueError(f"`lr` must be 0 or more, got {lr}.")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"`betas` must be 0 or more and less than 1, got {betas}.")
        if not weight_decay >= 0.0:
            raise ValueError(f"`weight_decay` must be 0 or more, got {weight_decay}.")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step.

        Args:
            closure: Evaluates the model and returns the loss.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)
        return loss

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if group["maximize"]:
            gradient = -gradient
        beta1, beta2 = group["betas"]
        direction = state["exp_avg"].mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(gradient, alpha=1 - beta2)
