"""ZeRO-Offload for PyTorch Lightning: ``Trainer(strategy="zero_offload")`` after this import."""

from __future__ import annotations

from importlib.metadata import version

from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.errors import CheckpointMismatchError, HostMemoryError
from lightning_zoffload.inspection import full_grad, master_param, optimizer_state
from lightning_zoffload.lion import Lion
from lightning_zoffload.precision import ZeroOffloadPrecision
from lightning_zoffload.registration import register
from lightning_zoffload.strategy import ZeroOffloadStrategy

__all__ = [
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
__version__ = version("lightning-zoffload")

register()
