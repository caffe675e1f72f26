"""What runs on the host at a step: native kernels, or any torch optimizer on the masters.

``torch.optim.Optimizer.step`` of the user's own object runs in either case, so LR schedulers,
closures and step hooks keep working. With a native update (``native_update.py``) it finds no
gradients and does nothing; with :class:`MasterUpdate` it finds the fp32 masters in place of the
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zoffload.bucket import Bucket, Exchanged, Segment
from lightning_zoffload.state_dict import to_host


@dataclass(frozen=True)
class GradientScaling:
    """What is done to each gradient of one step: times ``factor``, then clamped to ±``clip_value``.

    ``factor`` is the norm's clip coefficient over the loss scale.
    """

    factor: float = 1.0
    clip_value: float = math.inf


class HostUpdate(Protocol):
    """One optimizer's update. ``expose`` comes before torch's own step code, ``apply`` after it."""

    def moment_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
        """Of the state tensors of a parameter of this param group that live in the bucket."""

    def expose(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """Prepares what torch's own step code will see."""

    def apply(self, buckets: Sequence[Bucket], scaling: GradientScaling) -> None:
        """Ends the update: the new parameters are in the exchange buffers' runs with a gradient."""

    def withdraw(self) -> None:
        """Takes back what ``expose`` showed; nothing if there is nothing."""

    def adopt_state(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """Makes ``state`` (torch's format) the optimizer's state of this parameter."""


class MasterUpdate:
    """Any element-wise torch optimizer, run by torch itself on the fp32 masters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._exposed: list[Segment] = []

    def moment_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
        """See :class:`HostUpdate`. Torch makes its state itself, beside the bucket."""
        return ()

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
            for elements in bucket.runs_with_gradient():
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
