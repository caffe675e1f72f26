"""The Lightning strategy: setup order, hooks to the engine, save and load. No tensor arithmetic."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.init import _EmptyInit
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.engine import OffloadEngine
from lightning_zoffload.optimizer import OffloadedStep
from lightning_zoffload.precision import (
    ZeroOffloadPrecision,
    announced_clipping,
    gradient_watcher,
)
from lightning_zoffload.state_dict import swapped_data


class ZeroOffloadStrategy(SingleDeviceStrategy):
    """ZeRO-Offload (arXiv 2101.06840): optimizer, masters and moments on the host.

    Use it by name, ``Trainer(strategy="zero_offload")``, or pass an instance for options.

    Args:
        bucket_size: Parameters per bucket, the unit of transfer and update.
        host_threads: Threads of the host update; default: the CPUs that this process may use, less
            one where the device is an accelerator.
        moment_dtype: Of the optimizer's moments: ``"float32"`` or ``"bfloat16"``.
        schedule: ``"auto"`` updates in backward where that is exact; ``"synchronous"`` at the step.
        accumulate_on: Where gradients of several micro-batches add up: ``"host"`` or ``"device"``.
        keep_gradients: Whether ``p.grad`` stays on the device until the step; default: where a
            hook may look at it.
        delayed_update: One-step delayed parameter update (paper, section 5.2). Not available yet.
        delayed_update_warmup: Synchronous steps before the delay sets in.
        accelerator: As for any Lightning strategy.
        parallel_devices: The device to use, as a list of one; Lightning fills it in.
        checkpoint_io: As for any Lightning strategy.
        precision_plugin: As for any Lightning strategy; Lightning's own plugins are turned into
            :class:`ZeroOffloadPrecision` of the same meaning.

    Raises:
        ValueError: An option is out of its range, or the precision is not supported.
        NotImplementedError: ``delayed_update=True``.
    """

    strategy_name = "zero_offload"

    def __init__(
        self,
        *,
        bucket_size: int = OffloadConfig.bucket_size,
        host_threads: int | None = OffloadConfig.host_threads,
        moment_dtype: str = OffloadConfig.moment_dtype,
        schedule: str = OffloadConfig.schedule,
        accumulate_on: str = OffloadConfig.accumulate_on,
        keep_gradients: bool | None = OffloadConfig.keep_gradients,
        delayed_update: bool = OffloadConfig.delayed_update,
        delayed_update_warmup: int = OffloadConfig.delayed_update_warmup,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self.config = OffloadConfig(
            bucket_size=bucket_size,
            host_threads=host_threads,
            moment_dtype=moment_dtype,
            schedule=schedule,
            accumulate_on=accumulate_on,
            keep_gradients=keep_gradients,
            delayed_update=delayed_update,
            delayed_update_warmup=delayed_update_warmup,
        )
        self._engine: OffloadEngine | None = None
        self._steps: list[OffloadedStep] = []
        self._told_of_watcher = False
        self._homes: dict[Tensor, Tensor] = {}
        self._cast_residents: set[str] = set()
        self._parallel_devices: list[torch.device] = []
        super().__init__(
            accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin
        )
        self.parallel_devices = parallel_devices or []

    def __repr__(self) -> str:
        # `pytorch_lightning.Trainer` refuses us with a message that shows this text.
        return f"<{type(self).__name__}, a strategy of `lightning`, not of `pytorch_lightning`>"

    @property
    def is_distributed(self) -> bool:
        """Lightning asks custom strategies whether samplers and logging must be distributed."""
        return False

    @property
    def num_nodes(self) -> int:
        """One; the Trainer sets it."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes != 1:
            raise ValueError(
                f"`zero_offload` runs on one device for now, got `num_nodes={num_nodes}`."
                " Pass `num_nodes=1`."
            )

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device of this run, in a list, once the Trainer has chosen it."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ValueError(
                f"`zero_offload` runs on one device for now, got {len(devices)} devices."
                " Pass `Trainer(devices=1)`."
            )
        self._parallel_devices = devices
        if devices:
            self._root_device = torch.device(devices[0])

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if plugin is None else ZeroOffloadPrecision.from_lightning(plugin)
        )

    @property
    def _precision(self) -> ZeroOffloadPrecision:
        if self._precision_plugin is None:
            self._precision_plugin = ZeroOffloadPrecision()
        return self._precision_plugin  # type: ignore[return-value]

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Optimizers are made from the fp32 module on the host; then parameters move over."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self._precision.device_type = self.root_device.type
        self.model = self._setup_model(self._precision.convert_module(self.model))
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._offload()
        else:
            self._lend_parameters()
        self.setup_precision_plugin()
        self._cast_residents = self._precision.convert_residents(self.model)
        self.model_to_device()

    @override
    def model_to_device(self) -> None:
        """Moves buffers, metrics and frozen parameters; offloaded parameters are there already."""
        super().model_to_device()
        if self._engine is not None:
            self._engine.bind()

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As any strategy's, and the engine takes the gradients as they come."""
        if self._engine is None or self.lightning_module is None:
            return super().backward(closure_loss, *args, **kwargs)
        module = self.lightning_module
        watcher = gradient_watcher(module)
        keeps = self.config.keep_gradients
        if keeps is None and watcher is not None and not self._told_of_watcher:
            self._told_of_watcher = True
            mebibytes = sum(p.nbytes for p in self._engine.masters) / 2**20
            rank_zero_info(
                f"`{watcher}` may look at gradients, so zero_offload keeps them on the device"
                f" until the step, {mebibytes:,.0f} MiB."
                " Pass `keep_gradients=False` to bring them back only when they are looked at."
            )
        with self._engine.backward(
            watched=watcher is not None if keeps is None else keeps,
            automatic=module.automatic_optimization and watcher is None,
            clipping=announced_clipping(module) if module.automatic_optimization else None,
        ):
            return super().backward(closure_loss, *args, **kwargs)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are created on the host, where their masters stay."""
        with (
            _EmptyInit(enabled=bool(empty_init)),
            torch.device("cpu"),
            self._precision.tensor_init_context(),
        ):
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._masters_in_module():
            return super().lightning_module_state_dict()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with self._engine.masters_in_module(write=True) if self._engine else nullcontext():
            super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # Unlike the base class, leaves the state on the host. A missing state is no error there.
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            optimizer.load_state_dict(state)

    @override
    def teardown(self) -> None:
        """The module is fp32 on the CPU again, its optimizers are plain ones again."""
        for step in self._steps:
            step.detach()
        self._steps = []
        if self._engine is not None:
            self._engine.release()
            self._engine = None
        self._precision.engine = None
        for parameter, home in self._homes.items():
            parameter.data = home
        self._homes = {}
        super().teardown()
        if self.lightning_module is not None:
            self._precision.restore_residents(self.lightning_module, self._cast_residents)
        self._cast_residents = set()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="ZeRO-Offload: optimizer, masters and moments on the host",
        )
        strategy_registry.register(
            f"{cls.strategy_name}_delayed",
            cls,
            description="ZeRO-Offload with one-step delayed parameter update",
            delayed_update=True,
        )

    def _offload(self) -> None:
        assert self.model is not None
        self._engine = OffloadEngine(
            self.model,
            self.optimizers,
            device=self.root_device,
            device_dtype=self._precision.device_dtype(self.model),
            loss_scale=self._precision.loss_scale,
            config=self.config,
        )
        self._precision.engine = self._engine
        self._steps = [OffloadedStep(optimizer, self._engine) for optimizer in self.optimizers]

    def _lend_parameters(self) -> None:
        """Without training: device copies of the parameters, the fp32 ones wait on the host."""
        assert self.model is not None
        device_dtype = self._precision.device_dtype(self.model)
        self._homes = {p: p.data for p in self.model.parameters() if p.requires_grad}
        for parameter, home in self._homes.items():
            if home.is_floating_point():
                parameter.data = home.to(self.root_device, device_dtype(parameter))

    def _masters_in_module(self) -> Any:
        if self._engine is not None:
            return self._engine.masters_in_module()
        return swapped_data(self._homes)
