"""What runs on the host at a step: the native fused Adam(W), or any torch optimizer on the masters.

``torch.optim.Optimizer.step`` of the user's own object runs in either case, so LR schedulers,
closures and step hooks keep working. With the native update it finds no gradients and does
nothing; with :class:`MasterUpdate` it finds the fp32 masters in place of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import LBFGS, Adam, AdamW, Optimizer

from lightning_zoffload import kernels
from lightning_zoffload.bucket import Bucket, Exchanged, Segment
from lightning_zoffload.errors import CheckpointMismatchError
from lightning_zoffload.state_dict import to_host
from lightning_zoffload.trace import Phase, span


@dataclass(frozen=True)
class GradientScaling:
    """What is done to each gradient of one step: times ``factor``, then clamped to ±``clip_value``.

    ``factor`` is the norm's clip coefficient over the loss scale.
    """

    factor: float = 1.0
    clip_value: float = math.inf


class HostUpdate(Protocol):
    """One optimizer's update. ``expose`` comes before torch's own step code, ``apply`` after it."""

    @property
    def moment_count(self) -> int:
        """fp32 state tensors per parameter that live in the bucket."""

    def expose(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """Prepares what torch's own step code will see."""

    def apply(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """Ends the update: the new parameters are in the exchange buffers' runs with a gradient."""

    def withdraw(self) -> None:
        """Takes back what ``expose`` showed; nothing if there is nothing."""

    def adopt_state(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """Makes ``state`` (torch's format) the optimizer's state of this parameter."""


def choose_update(optimizer: Optimizer, num_threads: int | None) -> HostUpdate:
    """The native update where it knows the optimizer's formula, torch's on the masters elsewhere.

    Raises:
        ValueError: The optimizer evaluates its closure several times per step.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "zero_offload cannot run LBFGS: it evaluates the model several times per step and"
            " needs all parameters at once. Use an element-wise optimizer such as"
            " `torch.optim.AdamW`."
        )
    if type(optimizer) in (Adam, AdamW) and not any(
        group["amsgrad"] or group["maximize"] for group in optimizer.param_groups
    ):
        return NativeAdam(optimizer, num_threads)
    return MasterUpdate(optimizer)


class NativeAdam:
    """``torch.optim.Adam`` and ``AdamW`` by the fused kernel.

    The state of parameter ``p`` stays where torch keeps it, ``optimizer.state[p]``, with torch's
    keys; its moments are views of the bucket.
    """

    moment_count = 2
    _moment_keys = ("exp_avg", "exp_avg_sq")

    def __init__(self, optimizer: Optimizer, num_threads: int | None) -> None:
        self._optimizer = optimizer
        self._num_threads = num_threads

    def expose(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. The gradients are gone from the parameters: torch sees none."""

    def withdraw(self) -> None:
        """See :class:`HostUpdate`."""

    def apply(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. One kernel call per run of segments with equal step counts."""
        for bucket in buckets:
            group = self._optimizer.param_groups[bucket.group_index]
            for elements, segments in bucket.runs_with_gradient(self._next_step):
                step = self._next_step(segments[0])
                with span(Phase.HOST_UPDATE):
                    self._update(bucket, elements, group, step, scaling)
                for segment in segments:
                    self._state(segment)["step"].fill_(step)

    def adopt_state(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """See :class:`HostUpdate`.

        Raises:
            CheckpointMismatchError: A moment is missing or of another shape.
        """
        if not state:
            return
        host_state = to_host(state)
        for key, moment in zip(self._moment_keys, segment.moments, strict=True):
            _check_moment(segment, key, host_state.get(key))
            moment.copy_(host_state[key])
            host_state[key] = moment
        host_state["step"] = _step_tensor(float(state["step"]))
        self._optimizer.state[segment.parameter] = host_state

    def _update(
        self,
        bucket: Bucket,
        elements: slice,
        group: Mapping[str, Any],
        step: int,
        scaling: GradientScaling,
    ) -> None:
        beta1, beta2 = group["betas"]
        kernels.adam_step(
            bucket.master[elements],
            bucket.moments[0][elements],
            bucket.moments[1][elements],
            bucket.exchange[elements],
            lr=float(group["lr"]),
            betas=(float(beta1), float(beta2)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            grad_scale=scaling.factor,
            clip_value=scaling.clip_value,
            decoupled=self._decoupled(group),
            num_threads=self._num_threads,
        )

    def _decoupled(self, group: Mapping[str, Any]) -> bool:
        if group["amsgrad"] or group["maximize"]:
            raise ValueError(
                "`amsgrad` or `maximize` was switched on after zero_offload had taken the optimizer"
                " over. Set it where the optimizer is made, in `configure_optimizers`."
            )
        # torch before 2.7 has no such key: there AdamW is a class of its own.
        return bool(group.get("decoupled_weight_decay", isinstance(self._optimizer, AdamW)))

    def _next_step(self, segment: Segment) -> int:
        return int(self._state(segment)["step"]) + 1

    def _state(self, segment: Segment) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[segment.parameter]
        if not state:  # first update, as torch's lazy initialisation
            state["step"] = _step_tensor(0.0)
            for key, moment in zip(self._moment_keys, segment.moments, strict=True):
                state[key] = moment.zero_()
        return state


class MasterUpdate:
    """Any element-wise torch optimizer, run by torch itself on the fp32 masters."""

    moment_count = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._exposed: list[Segment] = []

    def expose(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. Puts masters, with fp32 gradients, in the parameters' place."""
        self._exposed = [segment for bucket in buckets for segment in bucket.segments]
        masters = {segment.parameter: segment.master for segment in self._exposed}
        self._rename(masters)
        for segment in self._exposed:
            if segment.exchanged is Exchanged.GRADIENT:
                segment.master.grad = _scaled(segment.exchange, scaling)

    def apply(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. Torch has updated the masters: casts them for the way up."""
        self.withdraw()
        for bucket in buckets:
            for elements, _ in bucket.runs_with_gradient():
                bucket.exchange[elements].copy_(bucket.master[elements])

    def withdraw(self) -> None:
        """See :class:`HostUpdate`."""
        self._rename({segment.master: segment.parameter for segment in self._exposed})
        for segment in self._exposed:
            segment.master.grad = None
        self._exposed = []

    def adopt_state(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """See :class:`HostUpdate`."""
        self._optimizer.state[segment.parameter] = to_host(state)

    def _rename(self, names: Mapping[Tensor, Tensor]) -> None:
        """Replaces tensors by others in the optimizer's param groups and as keys of its state."""
        for group in self._optimizer.param_groups:
            group["params"][:] = _renamed(group["params"], names)
        state = self._optimizer.state
        for old, new in names.items():
            if old in state:
                state[new] = state.pop(old)


def _renamed(tensors: Iterable[Tensor], names: Mapping[Tensor, Tensor]) -> list[Tensor]:
    return [names.get(tensor, tensor) for tensor in tensors]


def _scaled(gradient: Tensor, scaling: GradientScaling) -> Tensor:
    scaled = gradient.to(torch.float32, copy=True).mul_(scaling.factor)
    if math.isfinite(scaling.clip_value):
        scaled.clamp_(-scaling.clip_value, scaling.clip_value)
    return scaled


def _step_tensor(step: float) -> Tensor:
    return torch.tensor(step, dtype=torch.float32, device="cpu")


def _check_moment(segment: Segment, key: str, value: Tensor | None) -> None:
    if value is None:
        raise CheckpointMismatchError(
            f"The optimizer state of `{segment.name}` has no `{key}`."
            " Load the state of an Adam or AdamW optimizer."
        )
    if value.shape != segment.parameter.shape:
        raise CheckpointMismatchError(
            f"The optimizer state `{key}` of `{segment.name}` has shape {tuple(value.shape)},"
            f" expected {tuple(segment.parameter.shape)}."
            " Load a checkpoint of the same model."
        )
