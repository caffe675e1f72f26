"""The strategy on a CUDA device; `make gpu-check` runs these."""

from __future__ import annotations

import pytest
import torch
from support import Classifier, fit, seeded
from torch import nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_losses_follow_plain_fp32_and_the_module_comes_back(precision: str) -> None:
    plain, ours = seeded(Classifier), seeded(Classifier)
    fit(plain, "auto", "32-true", accelerator="cuda", devices=1)
    fit(ours, "zero_offload", precision, accelerator="cuda", devices=1)
    assert ours.losses == pytest.approx(plain.losses, rel=0.1, abs=0.1)
    for tensor in [*ours.parameters(), *ours.buffers()]:
        assert tensor.device.type == "cpu"
        assert tensor.dtype in (torch.float32, torch.int64)


def test_the_device_holds_16_bit_parameters_and_gradients_only() -> None:
    def peak_bytes_per_parameter(strategy: str) -> float:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        net = nn.Sequential(nn.Linear(16, 4096), *(nn.Linear(4096, 4096) for _ in range(4)))
        module = Classifier(net=net.append(nn.Linear(4096, 3)))
        count = sum(p.numel() for p in module.parameters())
        fit(module, strategy, "bf16-mixed", accelerator="cuda", devices=1, max_steps=3)
        return (torch.cuda.max_memory_allocated() - base) / count

    ours, plain = peak_bytes_per_parameter("zero_offload"), peak_bytes_per_parameter("auto")
    assert ours < 6.0
    assert ours < plain / 2


def test_an_lstm_keeps_its_weights_in_the_bucket() -> None:
    """cuDNN moves an LSTM's weights together when the module moves."""

    class Recurrent(Classifier):
        def __init__(self) -> None:
            super().__init__(net=nn.Linear(8, 3))
            self.lstm = nn.LSTM(4, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.lstm(x.unflatten(1, (4, 4)))[0][:, -1])

    plain, ours = seeded(Recurrent), seeded(Recurrent)
    fit(plain, "auto", accelerator="cuda", devices=1)
    fit(ours, "zero_offload", accelerator="cuda", devices=1)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-3)
