"""The public surface, frozen: a new option or name is a decision, not an accident."""

from __future__ import annotations

import dataclasses
import inspect

import lightning_zoffload
from lightning_zoffload import OffloadConfig, ZeroOffloadPrecision, ZeroOffloadStrategy, kernels


def parameters(function: object) -> list[str]:
    return [p for p in inspect.signature(function).parameters if p != "self"]  # type: ignore[arg-type]


def test_exported_names() -> None:
    assert sorted(lightning_zoffload.__all__) == [
        "CheckpointMismatchError",
        "HostMemoryError",
        "Lion",
        "OffloadConfig",
        "ZeroOffloadPrecision",
        "ZeroOffloadStrategy",
        "full_grad",
        "master_param",
        "optimizer_state",
    ]


def test_options() -> None:
    options = [field.name for field in dataclasses.fields(OffloadConfig)]
    assert options == [
        "bucket_size",
        "host_threads",
        "moment_dtype",
        "schedule",
        "accumulate_on",
        "keep_gradients",
        "delayed_update",
        "delayed_update_warmup",
    ]
    assert len(options) <= 12
    assert parameters(ZeroOffloadStrategy.__init__) == [
        *options,
        "accelerator",
        "parallel_devices",
        "checkpoint_io",
        "precision_plugin",
    ]
    assert parameters(ZeroOffloadPrecision.__init__) == ["precision", "loss_scale"]


def test_kernels() -> None:
    assert parameters(kernels.adam_step) == [
        "master",
        "exp_avg",
        "exp_avg_sq",
        "exchange",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "step",
        "grad_scale",
        "decoupled",
        "max_exp_avg_sq",
        "maximize",
        "clip_value",
        "num_threads",
    ]
    assert parameters(kernels.sgd_step)[:3] == ["master", "momentum_buffer", "exchange"]
    assert parameters(kernels.adagrad_step)[:3] == ["master", "square_sum", "exchange"]
    assert parameters(kernels.lion_step)[:3] == ["master", "exp_avg", "exchange"]
    assert parameters(kernels.accumulate) == ["accumulator", "gradient", "num_threads"]
    assert parameters(kernels.cast) == ["source", "destination", "num_threads"]
    assert parameters(kernels.grad_stats) == ["exchange", "num_threads"]
    assert parameters(kernels.available_isas) == parameters(kernels.isa) == []
