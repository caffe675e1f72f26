from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_zoffload.loss_scale import ConstantLossScale, DynamicLossScale


def torch_scaler(**options: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", **options)  # type: ignore[arg-type]
    scaler.scale(torch.ones(()))  # makes its lazily created tensors
    return scaler


def step_torch_scaler(scaler: torch.amp.GradScaler, nonfinite: bool) -> bool:
    """One step of a one-parameter model; returns whether torch skipped the update."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([float("inf") if nonfinite else 1.0])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.step(optimizer)
    scaler.update()
    return bool(parameter.item() == 0.0)


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4))
def test_follows_torch_grad_scaler_step_by_step(overflows: list[bool], interval: int) -> None:
    options = {"init_scale": 8.0, "growth_interval": interval}
    theirs, ours = torch_scaler(**options), DynamicLossScale(8.0, growth_interval=interval)
    for nonfinite in overflows:
        assert ours.settle(nonfinite) == step_torch_scaler(theirs, nonfinite)
        assert ours.state_dict() == theirs.state_dict()


def test_state_goes_both_ways_with_torch() -> None:
    ours = DynamicLossScale(4.0, growth_interval=3)
    ours.settle(False)
    theirs = torch_scaler()
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    fresh = DynamicLossScale()
    fresh.load_state_dict(theirs.state_dict())
    assert fresh.state_dict() == ours.state_dict()


def test_scale_stops_at_the_largest_fp32_power_of_two() -> None:
    scale = DynamicLossScale(2.0**127, growth_interval=1)
    scale.settle(False)
    assert scale.scale == 2.0**127


def test_constant_without_skipping_lets_nonfinite_gradients_pass() -> None:
    assert ConstantLossScale().settle(True) is False
    assert ConstantLossScale(128.0, skips_nonfinite=True).settle(True) is True
    assert ConstantLossScale(128.0, skips_nonfinite=True).settle(False) is False


@pytest.mark.parametrize(
    "make",
    [
        lambda: ConstantLossScale(0.0),
        lambda: DynamicLossScale(-1.0),
        lambda: DynamicLossScale(growth_factor=1.0),
        lambda: DynamicLossScale(backoff_factor=1.0),
    ],
)
def test_refuses_scales_without_meaning(make: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()  # type: ignore[operator]
