from __future__ import annotations

from typing import get_args

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import nn

from lightning_zoffload import ZeroOffloadPrecision
from lightning_zoffload.precision import PrecisionName

# precision: (linear weight, norm weight, buffer, output of a linear under forward_context)
TABLE = {
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16),
    "16-mixed": (torch.float16, torch.float32, torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16, torch.float16, torch.float16),
}


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(get_args(PrecisionName))


@pytest.mark.parametrize("precision", TABLE)
def test_dtypes_follow_the_table(precision: str) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plugin = ZeroOffloadPrecision(precision)  # type: ignore[arg-type]
    rule = plugin.device_dtype(module)
    linear, norm, buffer, output = TABLE[precision]
    assert rule(module[0].weight) is linear
    assert rule(module[1].weight) is norm

    for parameter in module.parameters():
        parameter.data = parameter.data.to(rule(parameter))
    cast = plugin.convert_residents(module)
    assert module[1].running_mean.dtype is buffer
    assert module[1].num_batches_tracked.dtype is torch.int64
    assert cast == (set() if buffer is torch.float32 else {"1.running_mean", "1.running_var"})
    with plugin.forward_context():
        assert module[0](plugin.convert_input(torch.ones(1, 2))).dtype is output
    assert torch.get_default_dtype() is torch.float32
    plugin.restore_residents(module, cast)
    assert module[1].running_mean.dtype is torch.float32


@pytest.mark.parametrize(
    "layer",
    [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.RMSNorm(2), nn.BatchNorm2d(2), nn.SyncBatchNorm(2)],
    ids=lambda layer: type(layer).__name__,
)
def test_every_normalisation_layer_stays_fp32_under_autocast(layer: nn.Module) -> None:
    rule = ZeroOffloadPrecision("bf16-mixed").device_dtype(layer)
    assert rule(layer.weight) is torch.float32


def test_a_parameter_the_user_made_16_bit_keeps_its_dtype() -> None:
    module = nn.Linear(2, 2).half()
    assert ZeroOffloadPrecision("32-true").device_dtype(module)(module.weight) is torch.float16


@pytest.mark.parametrize(
    ("plugin", "precision"),
    [
        (Precision(), "32-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (MixedPrecision("16-mixed", "cpu"), "16-mixed"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
    ],
)
def test_lightnings_plugins_become_ours_of_the_same_meaning(
    plugin: Precision, precision: str
) -> None:
    assert ZeroOffloadPrecision.from_lightning(plugin).precision == precision


def test_a_scaler_given_to_lightnings_plugin_is_taken_over() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)  # type: ignore[call-arg]
    ours = ZeroOffloadPrecision.from_lightning(MixedPrecision("16-mixed", "cpu", scaler))
    assert ours.loss_scale.state_dict() == scaler.state_dict()


class CustomMixed(MixedPrecision):
    """A user's own; its overrides would be lost."""


@pytest.mark.parametrize("plugin", [DoublePrecision(), CustomMixed("bf16-mixed", "cpu")])
def test_plugins_without_a_counterpart_are_refused_by_name(plugin: Precision) -> None:
    with pytest.raises(ValueError, match=f"`{type(plugin).__name__}`.*bf16-mixed"):
        ZeroOffloadPrecision.from_lightning(plugin)


def test_unknown_precision_and_needless_loss_scale_are_refused() -> None:
    with pytest.raises(ValueError, match=r"64-true.*Choose one of"):
        ZeroOffloadPrecision("64-true")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no loss scale"):
        ZeroOffloadPrecision("bf16-mixed", loss_scale=128.0)


def test_loss_scale_goes_to_lightnings_place_in_the_checkpoint() -> None:
    checkpoint: dict[str, object] = {}
    ZeroOffloadPrecision("16-mixed").on_save_checkpoint(checkpoint)
    plain = MixedPrecision("16-mixed", "cpu")
    assert checkpoint.keys() == {"MixedPrecision"}
    assert plain.scaler is not None
    plain.load_state_dict(checkpoint["MixedPrecision"])  # type: ignore[arg-type]
    assert plain.scaler.state_dict() == checkpoint["MixedPrecision"]

    without_scale: dict[str, object] = {}
    ZeroOffloadPrecision("bf16-mixed").on_save_checkpoint(without_scale)
    assert without_scale == {}
