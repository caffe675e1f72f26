"""Looks at what is on the host, for code in hooks and callbacks. All return copies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_zoffload.engine import engine_of


def master_param(parameter: Tensor) -> Tensor:
    """The fp32 master of a parameter.

    Args:
        parameter: One that ``zero_offload`` trains.

    Returns:
        fp32 on the CPU, of the parameter's shape.

    Raises:
        ValueError: It is not trained by ``zero_offload``.
    """
    engine, _ = engine_of(parameter)
    return engine.masters[parameter].detach().clone()


def full_grad(parameter: Tensor) -> Tensor | None:
    """The gradient of a parameter before the step uses it, without the loss scale.

    ``p.grad`` brings it back to the device; this leaves it on the host.

    Args:
        parameter: One that ``zero_offload`` trains.

    Returns:
        fp32 on the CPU, of the parameter's shape; ``None`` if there is none, or the parameter has
        been updated with it already (``schedule="auto"`` may do so in backward).

    Raises:
        ValueError: It is not trained by ``zero_offload``.
    """
    engine, _ = engine_of(parameter)
    return engine.gradient(parameter)


def optimizer_state(parameter: Tensor) -> dict[str, Any]:
    """The optimizer's state of a parameter, with torch's keys; empty before its first update.

    Args:
        parameter: One that ``zero_offload`` trains.

    Raises:
        ValueError: It is not trained by ``zero_offload``.
    """
    engine, optimizer = engine_of(parameter)
    _ = engine.masters  # waits for an update under way
    state = optimizer.state.get(parameter, {})
    return {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
