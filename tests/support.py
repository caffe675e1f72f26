"""Ordinary Lightning code for the tests, and one way to run it under any strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_zoffload import ZeroOffloadPrecision

OptimizerFactory = Callable[[list[nn.Parameter]], Any]


def adamw(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Classifier(L.LightningModule):
    """A small classifier as a user would write it; nothing about offloading in it."""

    def __init__(self, make_optimizer: OptimizerFactory = adamw, net: nn.Module | None = None):
        super().__init__()
        self.make_optimizer = make_optimizer
        self.net = net or nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3)
        )
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).float()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(list(self.parameters()))


def batches(count: int = 64, size: int = 8) -> DataLoader[Any]:
    """The same separable data at every call, unshuffled."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count * size, 16, generator=generator)
    y = (x[:, :3] + 0.1).argmax(dim=1)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def one_batch(count: int = 64, size: int = 8) -> DataLoader[Any]:
    """The same batch again and again: a resumed run, whose loader starts anew, sees what the
    uninterrupted one sees."""
    x, y = next(iter(batches(1, size)))
    return DataLoader(TensorDataset(x.repeat(count, 1), y.repeat(count)), batch_size=size)


def make_trainer(strategy: Any = "zero_offload", precision: str = "32-true", **options: Any):
    """A quiet Trainer on the CPU. fp16 on the CPU needs the plugin by name (Lightning swaps it)."""
    quiet = {
        "accelerator": "cpu",
        "max_epochs": -1,
        "max_steps": 20,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    if "plugins" in options:
        return L.Trainer(strategy=strategy, **{**quiet, **options})
    if precision == "16-mixed" and strategy != "auto":
        return L.Trainer(
            strategy=strategy, plugins=ZeroOffloadPrecision("16-mixed"), **{**quiet, **options}
        )
    return L.Trainer(strategy=strategy, precision=precision, **{**quiet, **options})


def fit(
    module: L.LightningModule,
    strategy: Any = "zero_offload",
    precision: str = "32-true",
    *,
    ckpt_path: Any = None,
    data: Any = None,
    **options: Any,
) -> L.Trainer:
    """Trains ``module`` and returns the Trainer."""
    trainer = make_trainer(strategy, precision, **options)
    trainer.fit(module, data or batches(), batches(4), ckpt_path=ckpt_path)
    return trainer


def seeded(make: Callable[[], Any], seed: int = 1) -> Any:
    """``make()`` under a fixed seed."""
    torch.manual_seed(seed)
    return make()


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest difference at most ``tolerance`` times the largest expected magnitude."""
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max().clamp_min(1e-30)
    assert difference <= tolerance * scale, f"relative difference {float(difference / scale):.2e}"
