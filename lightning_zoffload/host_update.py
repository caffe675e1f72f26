"""What runs on the host at a step: native kernels, or any torch optimizer on the masters.

``torch.optim.Optimizer.step`` of the user's own object runs in either case, so LR schedulers,
closures and step hooks keep working. With a native update (``native_update.py``) it finds no
gradients and does nothing; with :class:`MasterUpdate` it finds the fp32 masters in place of the
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_zoffload.bucket import Bucket, gradient_on_host
from lightning_zoffload.slab import Segment
from lightning_zoffload.state_dict import to_host

#: All segments of an optimizer with their buckets, which know what gradients there are.
GradientsOnHost = Mapping[Segment, list[Bucket]]


@dataclass(frozen=True)
class GradientScaling:
    """What is done to each gradient of one step: times ``factor``, then clamped to ±``clip_value``.

    ``factor`` is the norm's clip coefficient over the loss scale.
    """

    factor: float = 1.0
    clip_value: float = math.inf


class HostUpdate(Protocol):
    """One optimizer's update.

    At a step come ``expose``, torch's own step code, ``withdraw``, and then for each bucket
    ``prepare`` and, tile by tile, ``update``. Where ``is_local``, buckets may be updated before the
    others' gradients are there, without ``expose``.
    """

    is_local: bool

    def moment_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
        """Of the state tensors of a parameter of this param group that live in the slab."""

    def expose(self, gradients: GradientsOnHost, scaling: GradientScaling) -> None:
        """Prepares what torch's own step code will see."""

    def withdraw(self) -> None:
        """Takes back what ``expose`` showed; nothing if there is nothing."""

    def prepare(self, bucket: Bucket, segments: Collection[Segment]) -> None:
        """Begins the update of these segments of a bucket."""

    def update(self, bucket: Bucket, tile: slice, scaling: GradientScaling) -> None:
        """Updates some elements: their new parameters are in the exchange buffer then."""

    def finish(self, bucket: Bucket) -> None:
        """Ends the update of a bucket."""

    def adopt_state(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """Makes ``state`` (torch's format) the optimizer's state of this parameter."""


class MasterUpdate:
    """Any element-wise torch optimizer, run by torch itself on the fp32 masters."""

    is_local = False

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._exposed: list[Segment] = []

    def moment_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
        """See :class:`HostUpdate`. Torch makes its state itself, beside the slab."""
        return ()

    def expose(self, gradients: GradientsOnHost, scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. Puts masters, with fp32 gradients, in the parameters' place."""
        self._exposed = list(gradients)
        self._rename({segment.parameter: segment.master for segment in self._exposed})
        for segment, buckets in gradients.items():
            if buckets and segment in buckets[0].on_host:
                segment.master.grad = _scaled(gradient_on_host(segment, buckets), scaling)

    def withdraw(self) -> None:
        """See :class:`HostUpdate`."""
        self._rename({segment.master: segment.parameter for segment in self._exposed})
        for segment in self._exposed:
            segment.master.grad = None
        self._exposed = []

    def prepare(self, bucket: Bucket, segments: Collection[Segment]) -> None:
        """See :class:`HostUpdate`."""

    def update(self, bucket: Bucket, tile: slice, scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. Torch has updated the masters: casts them for the way up."""
        bucket.exchange[tile].copy_(bucket.master[tile])

    def finish(self, bucket: Bucket) -> None:
        """See :class:`HostUpdate`."""

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
    gradient.mul_(scaling.factor)
    if math.isfinite(scaling.clip_value):
        gradient.clamp_(-scaling.clip_value, scaling.clip_value)
    return gradient
