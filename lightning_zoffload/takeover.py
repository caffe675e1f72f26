"""Takes parameters over: checks them, plans slabs, asks for the memory, builds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zoffload.bucket import Bucket
from lightning_zoffload.grad_hooks import GradientHooks, Intake
from lightning_zoffload.host_memory import require_host_memory
from lightning_zoffload.host_update import GradientScaling, HostUpdate
from lightning_zoffload.layout import ParameterSpec, SlabLayout, build_slabs, dense_stride
from lightning_zoffload.slab import Segment, Slab, host_bytes
from lightning_zoffload.transfer import Transfer

#: Gives a parameter's dtype on the device.
DeviceDtype = Callable[[Tensor], torch.dtype]


@dataclass(frozen=True)
class Clipping:
    """Gradient clipping asked for one step, in units of the unscaled gradient."""

    max_norm: float = math.inf
    clip_value: float = math.inf


@dataclass(eq=False)
class OptimizerShare:
    """What the engine holds of one optimizer.

    Attributes:
        optimizer: The user's.
        update: What runs on the host at its steps.
        intake: Its gradients.
        slabs: Its memory.
        segments: By parameter.
        clipping: Of the next step.
        scaling: Of the step under way; ``None`` if there is nothing to apply.
        unscaled: Whether the loss scale has been taken out of the gradients already.
        in_step: Whether a step is under way.
        steps: Steps made.
    """

    optimizer: Optimizer
    update: HostUpdate
    intake: Intake = field(default_factory=Intake)
    slabs: list[Slab] = field(default_factory=list)
    segments: dict[Tensor, Segment] = field(default_factory=dict)
    clipping: Clipping = field(default_factory=Clipping)
    scaling: GradientScaling | None = None
    unscaled: bool = False
    in_step: bool = False
    steps: int = 0

    def end_step(self) -> None:
        """Forgets what belongs to one step."""
        for bucket in self.intake.all_buckets():
            bucket.end_step()
        self.intake.apply = None
        self.clipping = Clipping()
        self.scaling = None
        self.unscaled = self.in_step = False
        self.steps += 1


@dataclass(frozen=True)
class _SlabPlan:
    """A slab to build, and for whom."""

    share: OptimizerShare
    group_index: int
    layout: SlabLayout
    parameters: Sequence[Tensor]
    moment_dtypes: Sequence[torch.dtype]


@dataclass(frozen=True)
class Takeover:
    """How parameters are taken over.

    Attributes:
        names: Of the module's parameters.
        device: Where forward and backward run.
        device_dtype: The dtype of each parameter there.
        bucket_size: Elements per bucket.
        num_threads: Threads of the host update.
        transfer: How bytes cross the bus.
        hooks: What takes their gradients.
    """

    names: Mapping[Tensor, str]
    device: torch.device
    device_dtype: DeviceDtype
    bucket_size: int
    num_threads: int
    transfer: Transfer
    hooks: GradientHooks

    def validate(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuses, before anything is touched, what cannot be taken over.

        Raises:
            ValueError: Two optimizers share a parameter, or one has no values.
            TypeError: A parameter is complex or fp64.
        """
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

    def run(
        self, shares: Iterable[OptimizerShare], wanted: Callable[[Tensor], bool]
    ) -> list[tuple[Tensor, Optimizer]]:
        """Builds slabs for the wanted parameters of the shares that have none yet.

        Returns:
            These parameters, each with its optimizer.

        Raises:
            HostMemoryError: They do not fit. Nothing is taken then.
        """
        plans = [plan for share in shares for plan in self._plan(share, wanted)]
        if plans:
            require_host_memory(sum(map(self._bytes_needed, plans)), "zero_offload")
        for plan in plans:
            self._build(plan)
        return [
            (parameter, plan.share.optimizer) for plan in plans for parameter in plan.parameters
        ]

    def _plan(self, share: OptimizerShare, wanted: Callable[[Tensor], bool]) -> Iterator[_SlabPlan]:
        for group_index, group in enumerate(share.optimizer.param_groups):
            newcomers = [p for p in group["params"] if p not in share.segments and wanted(p)]
            for parameter in newcomers:
                _check_parameter(self._name(parameter), parameter)
            specs = [
                ParameterSpec(index, tuple(p.shape), dense_stride(p), self.device_dtype(p))
                for index, p in enumerate(newcomers)
            ]
            for layout in build_slabs(specs, self.bucket_size):
                members = [newcomers[place.spec.index] for place in layout.segments]
                moment_dtypes = share.update.moment_dtypes(group)
                yield _SlabPlan(share, group_index, layout, members, moment_dtypes)

    def _bytes_needed(self, plan: _SlabPlan) -> int:
        """Host memory that the slab takes beyond what its parameters, on the host, give up."""
        on_host = self.device.type == "cpu"
        device_bytes = plan.layout.numel * plan.layout.dtype.itemsize if on_host else 0
        given_up = sum(p.nbytes for p in plan.parameters if p.device.type == "cpu")
        return host_bytes(plan.layout, plan.moment_dtypes) + device_bytes - given_up

    def _build(self, plan: _SlabPlan) -> None:
        share = plan.share
        slab = Slab(
            plan.layout,
            [(self._name(p), p) for p in plan.parameters],
            plan.group_index,
            plan.moment_dtypes,
            self.device,
            self.transfer,
            self.num_threads,
        )
        share.slabs.append(slab)
        buckets = [Bucket(slab, part) for part in plan.layout.buckets(self.bucket_size)]
        for segment in slab.segments:
            parameter = segment.parameter
            gradient, parameter.grad = parameter.grad, None
            share.segments[parameter] = segment
            self.hooks.attach(share.intake, segment, buckets)
            if parameter in share.optimizer.state:
                share.update.adopt_state(segment, share.optimizer.state[parameter])
            if gradient is not None:
                parameter.grad = gradient.to(segment.device.dtype)

    def _name(self, parameter: Tensor) -> str:
        return self.names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")


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
