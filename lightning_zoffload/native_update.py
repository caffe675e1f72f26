"""Updates by the native kernels: which optimizers they know, and where torch finds their state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_zoffload import kernels
from lightning_zoffload.bucket import Bucket
from lightning_zoffload.errors import CheckpointMismatchError
from lightning_zoffload.host_update import (
    GradientScaling,
    GradientsOnHost,
    HostUpdate,
    MasterUpdate,
)
from lightning_zoffload.lion import Lion
from lightning_zoffload.slab import Segment
from lightning_zoffload.state_dict import to_host
from lightning_zoffload.trace import Phase, span

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Formula:
    """How a class of torch optimizers maps to a kernel.

    Attributes:
        moment_keys: The keys of the state tensors in the slab, for a param group. Not ``step``.
        keeps_step: Whether torch has a ``step`` in the state.
        hyper: The kernel's hyper-parameters, from a param group.
        kernel: Takes ``(master, moments by key, exchange, **arguments)``.
        initial: A moment's value before the first step, for a param group.
    """

    moment_keys: Callable[[Group], tuple[str, ...]]
    keeps_step: bool
    hyper: Callable[[Group], dict[str, Any]]
    kernel: Callable[..., None]
    initial: Callable[[Group], float] = lambda group: 0.0


def choose_update(
    optimizer: Optimizer, moment_dtype: torch.dtype, num_threads: int | None
) -> HostUpdate:
    """The native update where a kernel has the formula, torch's on the masters elsewhere.

    Subclasses may have changed the formula: torch runs them.

    Raises:
        ValueError: The optimizer evaluates its closure several times per step.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "zero_offload cannot run LBFGS: it evaluates the model several times per step and"
            " needs all parameters at once. Use an element-wise optimizer such as"
            " `torch.optim.AdamW`."
        )
    formula = _FORMULAS.get(type(optimizer))
    if formula is None:
        return MasterUpdate(optimizer)
    return NativeUpdate(optimizer, formula, moment_dtype, num_threads)


class NativeUpdate:
    """A torch optimizer's step by a fused kernel, one call per tile.

    The state of parameter ``p`` stays where torch keeps it, ``optimizer.state[p]``, with torch's
    keys; its moments and its step count are views of the slab.
    """

    is_local = True

    def __init__(
        self,
        optimizer: Optimizer,
        formula: Formula,
        moment_dtype: torch.dtype,
        num_threads: int | None,
    ) -> None:
        self._optimizer = optimizer
        self._formula = formula
        self._moment_dtype = moment_dtype
        self._num_threads = num_threads

    def moment_dtypes(self, group: Mapping[str, Any]) -> tuple[torch.dtype, ...]:
        """See :class:`HostUpdate`."""
        return (self._moment_dtype,) * len(self._formula.moment_keys(group))

    def expose(self, gradients: GradientsOnHost, scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`. The gradients are gone from the parameters: torch sees none."""

    def withdraw(self) -> None:
        """See :class:`HostUpdate`."""

    def prepare(self, bucket: Bucket, segments: Collection[Segment]) -> None:
        """See :class:`HostUpdate`. Counts the step, once for all buckets of a large parameter."""
        if not bucket.starts_slab:
            return
        group = self._group(bucket)
        self._moments(bucket, group)
        for segment in segments:
            self._ensure_state(segment, group)
            segment.step += 1

    def update(self, bucket: Bucket, tile: slice, scaling: GradientScaling) -> None:
        """See :class:`HostUpdate`."""
        group = self._group(bucket)
        moments = {key: m[tile] for key, m in self._moments(bucket, group).items()}
        gradient, exchange = bucket.gradient(tile), bucket.exchange[tile]
        with span(Phase.HOST_UPDATE):
            # The kernel reads a gradient and writes the parameter to the same bytes.
            self._formula.kernel(
                bucket.master[tile],
                moments,
                gradient,
                **self._formula.hyper(group),
                step=bucket.segment_steps(tile),
                grad_scale=scaling.factor,
                clip_value=scaling.clip_value,
                maximize=bool(group["maximize"]),
                num_threads=self._num_threads,
            )
            if bucket.accumulates:
                kernels.cast(gradient, exchange, num_threads=self._num_threads)

    def finish(self, bucket: Bucket) -> None:
        """See :class:`HostUpdate`."""
        if self._group(bucket).get("eps") == 0.0:
            bucket.slab.clear_padding()

    def adopt_state(self, segment: Segment, state: Mapping[str, Any]) -> None:
        """See :class:`HostUpdate`.

        Raises:
            CheckpointMismatchError: A moment is missing or of another shape.
        """
        host_state = to_host(state)
        if all(value is None for value in host_state.values()):
            segment.step.zero_()
            return
        for key, moment in zip(self._keys_of(segment), segment.moments, strict=True):
            _check_moment(segment, key, host_state.get(key))
            moment.copy_(host_state[key])
            host_state[key] = moment
        # SGD counts nothing: a buffer that exists has had its first step.
        segment.step.fill_(float(state["step"]) if self._formula.keeps_step else 1.0)
        if self._formula.keeps_step:
            host_state["step"] = segment.step
        self._optimizer.state[segment.parameter] = host_state

    def _group(self, bucket: Bucket) -> Group:
        group: Group = self._optimizer.param_groups[bucket.slab.group_index]
        return group

    def _moments(self, bucket: Bucket, group: Group) -> dict[str, Tensor]:
        keys = self._formula.moment_keys(group)
        if len(keys) > len(bucket.moments):
            raise ValueError(
                f"`{keys[len(bucket.moments)]}` is needed since a hyper-parameter of"
                f" {type(self._optimizer).__name__} (amsgrad or momentum) was switched on after"
                " zero_offload had taken the optimizer over."
                " Set it where the optimizer is made, in `configure_optimizers`."
            )
        return dict(zip(keys, bucket.moments, strict=False))

    def _ensure_state(self, segment: Segment, group: Group) -> None:
        """At the first update, as torch's lazy initialisation."""
        state: dict[str, Any] = self._optimizer.state[segment.parameter]
        if state:
            return
        segment.step.zero_()
        if self._formula.keeps_step:
            state["step"] = segment.step
        keys = self._formula.moment_keys(group)
        for key, moment in zip(keys, segment.moments, strict=False):
            state[key] = moment.fill_(self._formula.initial(group))

    def _keys_of(self, segment: Segment) -> tuple[str, ...]:
        group = self._optimizer.param_groups[segment.group_index]
        return self._formula.moment_keys(group)[: len(segment.moments)]


def _check_moment(segment: Segment, key: str, value: Tensor | None) -> None:
    if value is None:
        raise CheckpointMismatchError(
            f"The optimizer state of `{segment.name}` has no `{key}`."
            " Load the state of an optimizer of the same class and options."
        )
    if value.shape != segment.parameter.shape:
        raise CheckpointMismatchError(
            f"The optimizer state `{key}` of `{segment.name}` has shape {tuple(value.shape)},"
            f" expected {tuple(segment.parameter.shape)}."
            " Load a checkpoint of the same model."
        )


def _floats(group: Group, *names: str) -> dict[str, Any]:
    return {name: float(group[name]) for name in names}


def _betas(group: Group) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {"betas": (float(beta1), float(beta2))}


def _adam(decoupled_by_class: bool) -> Formula:
    def moment_keys(group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def hyper(group: Group) -> dict[str, Any]:
        # torch before 2.7 has no such key: there AdamW is a class of its own.
        decoupled = bool(group.get("decoupled_weight_decay", decoupled_by_class))
        numbers = _floats(group, "lr", "eps", "weight_decay")
        return {**numbers, **_betas(group), "decoupled": decoupled}

    def kernel(master: Tensor, moments: dict[str, Any], exchange: Tensor, **arguments: Any) -> None:
        kernels.adam_step(master, exchange=exchange, **moments, **arguments)

    return Formula(moment_keys, True, hyper, kernel)


def _sgd() -> Formula:
    def moment_keys(group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def hyper(group: Group) -> dict[str, Any]:
        numbers = _floats(group, "lr", "momentum", "dampening", "weight_decay")
        return {**numbers, "nesterov": bool(group["nesterov"])}

    def kernel(master: Tensor, moments: dict[str, Any], exchange: Tensor, **arguments: Any) -> None:
        buffer = moments.get("momentum_buffer")
        kernels.sgd_step(master, buffer, exchange, **arguments)

    return Formula(moment_keys, False, hyper, kernel)


def _adagrad() -> Formula:
    def hyper(group: Group) -> dict[str, Any]:
        return _floats(group, "lr", "lr_decay", "weight_decay", "eps")

    def kernel(master: Tensor, moments: dict[str, Any], exchange: Tensor, **arguments: Any) -> None:
        kernels.adagrad_step(master, moments["sum"], exchange, **arguments)

    def initial(group: Group) -> float:
        return float(group["initial_accumulator_value"])

    return Formula(lambda group: ("sum",), True, hyper, kernel, initial)


def _lion() -> Formula:
    def hyper(group: Group) -> dict[str, Any]:
        return {**_floats(group, "lr", "weight_decay"), **_betas(group)}

    def kernel(master: Tensor, moments: dict[str, Any], exchange: Tensor, **arguments: Any) -> None:
        kernels.lion_step(master, moments["exp_avg"], exchange, **arguments)

    return Formula(lambda group: ("exp_avg",), False, hyper, kernel)


_FORMULAS: dict[type[Optimizer], Formula] = {
    Adam: _adam(decoupled_by_class=False),
    AdamW: _adam(decoupled_by_class=True),
    SGD: _sgd(),
    Adagrad: _adagrad(),
    Lion: _lion(),
}
