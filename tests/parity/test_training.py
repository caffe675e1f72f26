"""The same LightningModule, seed and data under plain Lightning and under zero_offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Classifier, assert_relative, fit, seeded
from torch import nn

MakeOptimizer = Callable[[Any], Any]


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3)


def adam_l2(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1)


def scheduled_groups(parameters: list[nn.Parameter]) -> Any:
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=60)
    return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def both(
    make: Callable[[], Classifier], precision: str = "32-true", **options: Any
) -> tuple[Classifier, Classifier]:
    plain, ours = seeded(make), seeded(make)
    fit(plain, "auto", precision, **options)
    fit(ours, "zero_offload", precision, **options)
    assert len(plain.losses) == len(ours.losses)
    return plain, ours


def assert_same_parameters(plain: nn.Module, ours: nn.Module, tolerance: float) -> None:
    for (name, a), b in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert_relative(b.detach(), a.detach(), tolerance)
        assert a.dtype is b.dtype, name


@pytest.mark.parametrize("make_optimizer", [adamw, adam_l2, scheduled_groups])
def test_fp32_parameters_agree_after_50_steps(make_optimizer: MakeOptimizer) -> None:
    plain, ours = both(lambda: Classifier(make_optimizer), max_steps=50)
    # What remains is torch's: it rounds the factor 1 - lr * weight_decay to fp32 at every step.
    vectors = [nn.utils.parameters_to_vector(m.parameters()).detach() for m in (plain, ours)]
    assert torch.dist(*vectors) <= 1e-6 * vectors[0].norm()
    assert_same_parameters(plain, ours, 2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
    ],
    ids=["norm", "value", "accumulation", "both"],
)
def test_fp32_parameters_agree_with_clipping_and_accumulation(options: dict[str, Any]) -> None:
    plain, ours = both(lambda: Classifier(adamw), max_steps=50, **options)
    assert_same_parameters(plain, ours, 2e-6)


class Tied(Classifier):
    """Tied and unused weights, a 0-dim parameter, an unregistered order of use."""

    def __init__(self) -> None:
        super().__init__(adamw)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.second(self.first(x).relu())) * self.temperature


class Images(Classifier):
    """channels_last convolutions with batch norm."""

    def __init__(self) -> None:
        net = nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3),
            nn.Flatten(),
            nn.Linear(32, 3),
        )
        # A bias before batch norm has no true gradient, only rounding noise that Adam amplifies.
        net[1].register_parameter("bias", None)
        super().__init__(adamw, net.to(memory_format=torch.channels_last))


class Recurrent(Classifier):
    """An LSTM keeps references to its weights of its own."""

    def __init__(self) -> None:
        super().__init__(adamw, nn.Linear(8, 3))
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.lstm(x.unflatten(1, (4, 4)))[0][:, -1])


@pytest.mark.parametrize("make", [Tied, Images, Recurrent])
def test_fp32_parameters_agree_for_unusual_modules(make: type[Classifier]) -> None:
    plain, ours = both(make, max_steps=20)
    assert_same_parameters(plain, ours, 2e-6)
    for a, b in zip(plain.buffers(), ours.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [Classifier, Tied, Images, Recurrent])
def test_bf16_mixed_losses_stay_together(make: type[Classifier]) -> None:
    plain, ours = both(make, "bf16-mixed", max_steps=60)
    assert ours.losses == pytest.approx(plain.losses, rel=0.05, abs=0.02)
    assert sum(ours.losses[-10:]) < sum(ours.losses[:10])


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "16-true"])
def test_other_16_bit_precisions_follow_fp32(precision: str) -> None:
    reference, ours = seeded(Classifier), seeded(Classifier)
    fit(reference, "auto", "32-true", max_steps=60)
    trainer = fit(ours, "zero_offload", precision, max_steps=60)
    assert trainer.global_step == 60
    assert ours.losses == pytest.approx(reference.losses, rel=0.1, abs=0.1)
