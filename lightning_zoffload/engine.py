"""The offload engine: owns the buckets of every optimizer and carries a step through.

Synchronous schedule: gradients stay on the device until ``begin_step``, which moves them to the
host, takes their statistics and decides on scale, clipping and skipping; ``finish_step`` updates
and uploads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zoffload import kernels
from lightning_zoffload.bucket import Bucket, Segment, host_bytes
from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.host_memory import require_host_memory
from lightning_zoffload.host_update import GradientScaling, HostUpdate
from lightning_zoffload.layout import BucketLayout, ParameterSpec, build_buckets, dense_stride
from lightning_zoffload.loss_scale import LossScale
from lightning_zoffload.machine import default_host_threads
from lightning_zoffload.native_update import choose_update
from lightning_zoffload.state_dict import swapped_data
from lightning_zoffload.trace import Phase, span
from lightning_zoffload.transfer import InlineTransfer, Transfer

#: Gives a parameter's dtype on the device.
DeviceDtype = Callable[[Tensor], torch.dtype]


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping asked for one step, in units of the unscaled gradient."""

    max_norm: float = math.inf
    clip_value: float = math.inf


@dataclass
class OptimizerShare:
    """What the engine holds of one optimizer."""

    optimizer: Optimizer
    update: HostUpdate
    buckets: list[Bucket] = field(default_factory=list)
    segments: dict[Tensor, Segment] = field(default_factory=dict)
    clipping: Clipping = field(default_factory=Clipping)
    scaling: GradientScaling | None = None
    unscaled: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """A bucket to build, and for whom."""

    share: OptimizerShare
    group_index: int
    layout: BucketLayout
    parameters: Sequence[Tensor]
    moment_dtypes: Sequence[torch.dtype]


class OffloadEngine:
    """Masters, moments and optimizer on the host; 16-bit parameters on the device.

    Args:
        module: The module to train. Parameters that require a gradient and belong to an
            optimizer are taken over; all others are left alone.
        optimizers: The user's optimizers over them.
        device: Where forward and backward run.
        device_dtype: The dtype of each parameter there.
        loss_scale: The scale that the loss is multiplied by before backward.
        config: Options.
        transfer: How bytes cross the bus.

    Raises:
        ValueError: An optimizer cannot be offloaded, or two optimizers share a parameter.
        TypeError: A parameter is complex or fp64.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        device: torch.device,
        device_dtype: DeviceDtype,
        loss_scale: LossScale,
        config: OffloadConfig,
        transfer: Transfer | None = None,
    ) -> None:
        self._device = device
        self._device_dtype = device_dtype
        self._loss_scale = loss_scale
        self._config = config
        self._transfer = transfer or InlineTransfer()
        self._host_threads = config.host_threads or default_host_threads(device)
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in module.named_parameters()
        }
        self._shares = {
            optimizer: OptimizerShare(
                optimizer, choose_update(optimizer, config.torch_moment_dtype, self._host_threads)
            )
            for optimizer in optimizers
        }
        self._validate(optimizers)
        try:
            self._take_over(self._shares.values(), lambda parameter: parameter.requires_grad)
        except BaseException:  # out of memory half-way: the module must stay usable
            self.release()
            raise

    @property
    def masters(self) -> dict[Tensor, Tensor]:
        """The fp32 master of every parameter taken over."""
        return {
            parameter: segment.master
            for share in self._shares.values()
            for parameter, segment in share.segments.items()
        }

    def clip_next_step(self, optimizer: Optimizer, clipping: Clipping) -> None:
        """Clips the gradients of ``optimizer`` at its next step, in the passes made anyway."""
        self._shares[optimizer].clipping = clipping

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divides ``p.grad`` by the loss scale now, for code that looks at it before the step."""
        share = self._shares[optimizer]
        if share.unscaled or self._loss_scale.scale == 1.0:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(self._loss_scale.scale)
        share.unscaled = True

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether a parameter of ``optimizer`` has a gradient that no step has taken yet."""
        return any(parameter.grad is not None for parameter in self._shares[optimizer].segments)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Moves the gradients to the host and decides what the step does with them."""
        share = self._shares[optimizer]
        self._take_over([share], lambda parameter: parameter.grad is not None)
        for segment in share.segments.values():
            segment.receive_gradient(self._transfer)
        share.scaling = self._settle(share)
        share.clipping, share.unscaled = Clipping(), False
        if share.scaling is not None:
            share.update.expose(share.buckets, share.scaling)

    def finish_step(self, optimizer: Optimizer) -> None:
        """Updates masters and moments from the gradients and sends the parameters up."""
        share = self._shares[optimizer]
        if share.scaling is not None:
            share.update.apply(share.buckets, share.scaling)
            for bucket in share.buckets:
                for elements in bucket.runs_with_gradient():
                    bucket.upload(elements)
        self._end_step(share)

    def abandon_step(self, optimizer: Optimizer) -> None:
        """Ends a step that began but whose optimizer raised; the gradients are dropped."""
        share = self._shares[optimizer]
        share.update.withdraw()
        self._end_step(share)

    def adopt_states(
        self, optimizer: Optimizer, states: Iterable[Mapping[str, Any] | None]
    ) -> None:
        """Loads optimizer state, one entry per parameter in the order of the param groups.

        Raises:
            CheckpointMismatchError: A state does not fit its parameter.
        """
        share = self._shares[optimizer]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for parameter, state in zip(parameters, states, strict=True):
            if state is not None and parameter in share.segments:
                share.update.adopt_state(share.segments[parameter], state)
            elif state is not None:
                optimizer.state[parameter] = dict(state)

    @contextmanager
    def masters_in_module(self) -> Iterator[None]:
        """While the context lasts the parameters hold their fp32 masters, for reading."""
        with swapped_data(self.masters):
            yield

    @contextmanager
    def masters_loaded(self) -> Iterator[None]:
        """Like :meth:`masters_in_module`, for writing: the device follows at the end."""
        with self.masters_in_module():
            yield
        for share in self._shares.values():
            for bucket in share.buckets:
                bucket.upload_masters()

    def bind(self) -> None:
        """Makes every parameter a view of its device bucket again, whatever moved it."""
        for share in self._shares.values():
            for segment in share.segments.values():
                segment.bind()

    def release(self) -> None:
        """Gives the parameters back as fp32 tensors on the CPU. The engine is empty then."""
        for share in self._shares.values():
            share.update.withdraw()
            for bucket in share.buckets:
                bucket.release()
        for parameter, master in self.masters.items():
            parameter.grad = None
            parameter.data = master
        self._shares = {}

    def _end_step(self, share: OptimizerShare) -> None:
        share.scaling = None
        for segment in share.segments.values():
            segment.discard_gradient()

    def _settle(self, share: OptimizerShare) -> GradientScaling | None:
        """Statistics, loss scale and clipping of a step; ``None`` if there is nothing to apply."""
        runs = [
            bucket.exchange[elements]
            for bucket in share.buckets
            for elements in bucket.runs_with_gradient()
        ]
        if not runs:
            return None
        clipping = share.clipping
        scale = 1.0 if share.unscaled else self._loss_scale.scale
        factor, nonfinite = 1.0 / scale, False
        if self._loss_scale.skips_nonfinite or math.isfinite(clipping.max_norm):
            norm, nonfinite = self._norm(runs)
            factor *= _clip_coefficient(norm / scale, clipping.max_norm)
        if self._loss_scale.settle(nonfinite):
            return None
        return GradientScaling(factor, clipping.clip_value)

    def _norm(self, runs: Sequence[Tensor]) -> tuple[float, bool]:
        with span(Phase.STATISTICS):
            stats = [kernels.grad_stats(run, num_threads=self._host_threads) for run in runs]
        total = math.fsum(square_sum for square_sum, _ in stats) if stats else 0.0
        return math.sqrt(total), any(nonfinite for _, nonfinite in stats)

    def _take_over(
        self, shares: Iterable[OptimizerShare], wanted: Callable[[Tensor], bool]
    ) -> None:
        """Builds buckets for the wanted parameters of the shares that have none yet."""
        plans = [plan for share in shares for plan in self._plan(share, wanted)]
        if plans:
            require_host_memory(sum(self._bytes_needed(plan) for plan in plans), "zero_offload")
        for plan in plans:
            self._build(plan)

    def _plan(
        self, share: OptimizerShare, wanted: Callable[[Tensor], bool]
    ) -> Iterator[BucketPlan]:
        for group_index, group in enumerate(share.optimizer.param_groups):
            newcomers = [p for p in group["params"] if p not in share.segments and wanted(p)]
            for parameter in newcomers:
                _check_parameter(self._name(parameter), parameter)
            specs = [
                ParameterSpec(index, tuple(p.shape), dense_stride(p), self._device_dtype(p))
                for index, p in enumerate(newcomers)
            ]
            for layout in build_buckets(specs, self._config.bucket_size):
                members = [newcomers[place.spec.index] for place in layout.segments]
                moment_dtypes = share.update.moment_dtypes(group)
                yield BucketPlan(share, group_index, layout, members, moment_dtypes)

    def _bytes_needed(self, plan: BucketPlan) -> int:
        """Host memory that the bucket takes beyond what its parameters, on the host, give up."""
        on_host = self._device.type == "cpu"
        device_bytes = plan.layout.numel * plan.layout.dtype.itemsize if on_host else 0
        given_up = sum(p.nbytes for p in plan.parameters if p.device.type == "cpu")
        return host_bytes(plan.layout, plan.moment_dtypes) + device_bytes - given_up

    def _build(self, plan: BucketPlan) -> None:
        share = plan.share
        bucket = Bucket(
            plan.layout,
            [(self._name(p), p) for p in plan.parameters],
            plan.group_index,
            plan.moment_dtypes,
            self._device,
            self._transfer,
            self._host_threads,
        )
        share.buckets.append(bucket)
        for segment in bucket.segments:
            share.segments[segment.parameter] = segment
            self._adopt_existing_state(share, segment)

    def _adopt_existing_state(self, share: OptimizerShare, segment: Segment) -> None:
        if segment.parameter in share.optimizer.state:
            share.update.adopt_state(segment, share.optimizer.state[segment.parameter])

    def _validate(self, optimizers: Sequence[Optimizer]) -> None:
        owners: dict[Tensor, Optimizer] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    _check_parameter(self._name(parameter), parameter)
                    if owners.setdefault(parameter, optimizer) is not optimizer:
                        raise ValueError(
                            f"`{self._name(parameter)}` belongs to two optimizers, but its master"
                            " can follow one only. Give each parameter to one optimizer."
                        )

    def _name(self, parameter: Tensor) -> str:
        return self._names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")


def _clip_coefficient(norm: float, max_norm: float) -> float:
    """``torch.nn.utils.clip_grad_norm_``'s factor; a NaN norm gives NaN, as there."""
    if math.isinf(max_norm):
        return 1.0
    coefficient = max_norm / (norm + 1e-6)
    return 1.0 if coefficient > 1.0 else coefficient


def _check_parameter(name: str, parameter: Tensor) -> None:
    if parameter.is_complex():
        raise TypeError(
            f"`{name}` is complex ({parameter.dtype}), which zero_offload does not support."
            " Store its real and imaginary parts as real parameters (`torch.view_as_real`)."
        )
    if parameter.dtype is torch.float64:
        raise TypeError(
            f"`{name}` is fp64, but zero_offload keeps its masters in fp32."
            " Convert it (`module.float()`) or train with `strategy='auto'`."
        )
    if parameter.is_meta:
        raise ValueError(
            f"`{name}` is on the meta device and has no values."
            " Initialise it before training, e.g. create the module under `trainer.init_module()`."
        )
