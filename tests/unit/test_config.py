from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_zoffload import OffloadConfig


def test_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().bucket_size = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("bucket_size", 0),
        ("bucket_size", 1.5),
        ("bucket_size", True),
        ("host_threads", 0),
        ("host_threads", "2"),
        ("moment_dtype", "float16"),
        ("delayed_update_warmup", -1),
    ],
)
def test_refuses_values_out_of_range_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=option):
        OffloadConfig(**{option: value})  # type: ignore[arg-type]


def test_moment_dtype_by_name() -> None:
    assert OffloadConfig().torch_moment_dtype is torch.float32
    assert OffloadConfig(moment_dtype="bfloat16").torch_moment_dtype is torch.bfloat16


def test_delayed_update_is_refused_with_the_way_out() -> None:
    with pytest.raises(NotImplementedError, match="strategy='zero_offload'"):
        OffloadConfig(delayed_update=True)
