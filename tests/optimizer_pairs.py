"""A small module with its optimizer, twice: plain, and offloaded without Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from support import assert_relative
from torch import nn
from torch.optim import Optimizer

from lightning_zoffload import Lion
from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.engine import OffloadEngine
from lightning_zoffload.loss_scale import ConstantLossScale, LossScale
from lightning_zoffload.optimizer import OffloadedStep

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "adam_l2": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw_tensor_lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(1e-2)),
    "amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True),
    "maximize": lambda ps: torch.optim.Adam(ps, lr=1e-2, maximize=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_plain": lambda ps: torch.optim.SGD(ps, lr=1e-2, weight_decay=0.1),
    "lion": lambda ps: Lion(ps, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=1e-2),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=1e-2),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.5),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-2),
}


def engine_on(
    module: nn.Module,
    *optimizers: Optimizer,
    config: OffloadConfig | None = None,
    dtype: torch.dtype | None = None,
    loss_scale: LossScale | None = None,
    **pipeline: Any,
) -> OffloadEngine:
    """Puts the module's masters on the host, without Lightning."""
    return OffloadEngine(
        module,
        optimizers,
        device=torch.device("cpu"),
        device_dtype=lambda p: dtype or p.dtype,
        loss_scale=loss_scale or ConstantLossScale(),
        config=config or OffloadConfig(),
        **pipeline,
    )


def offload(
    module: nn.Module, optimizer: Optimizer, config: OffloadConfig | None = None
) -> OffloadedStep:
    """The same, and the optimizer steps there."""
    return OffloadedStep(optimizer, engine_on(module, optimizer, config=config))


def pair(
    make: Callable[[Any], Optimizer], config: OffloadConfig | None = None
) -> tuple[list[Any], list[Any]]:
    """[module, optimizer] plain, and the same offloaded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    ours = copy.deepcopy(plain)
    plain_optimizer, our_optimizer = make(plain.parameters()), make(ours.parameters())
    offload(ours, our_optimizer, config)
    return [plain, plain_optimizer], [ours, our_optimizer]


def step(module: nn.Module, optimizer: Optimizer, seed: int, skip: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if name == skip else gradient.to(parameter.dtype)
    optimizer.step()


def state_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{key}": value
        for index, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(plain: list[Any], ours: list[Any], tolerance: float = 2e-6) -> None:
    for a, b in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), tolerance)
    plain_state, our_state = state_of(plain[1]), state_of(ours[1])
    assert our_state.keys() == plain_state.keys()
    for key, value in plain_state.items():
        assert our_state[key].shape == value.shape
        assert our_state[key].dtype == value.dtype
        assert_relative(our_state[key], value, tolerance)
