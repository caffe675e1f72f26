"""Masters and optimizer state in torch's own formats. A pure mapping: no engine, no copies kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def swapped_data(parameters: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Lends each parameter (key) the data of another tensor (value) while the context lasts.

    With fp32 masters as values, ``module.state_dict()`` inside gives fp32 tensors under the
    module's own names, through all its hooks and ties, and ``module.load_state_dict()`` writes
    the masters.
    """
    own = {parameter: parameter.data for parameter in parameters}
    for parameter, lent in parameters.items():
        parameter.data = lent
    try:
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data


def split_state(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, Any], list[dict[str, Any] | None]]:
    """Takes an optimizer's state dict apart.

    Returns:
        The state dict with its ``"state"`` empty, and the state of each parameter in the order of
        the param groups (``None`` for one that was never updated).
    """
    state: Mapping[Any, dict[str, Any]] = state_dict["state"]
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    return {**state_dict, "state": {}}, [state.get(index) for index in ids]


def to_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of one parameter as ``torch.optim`` would keep it for a fp32 parameter on the CPU.

    Floating-point tensors become fp32 on the CPU; ``step`` keeps its dtype, as in
    ``Optimizer.load_state_dict``.
    """
    return {key: _to_host(key, value) for key, value in state.items()}


def _to_host(key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key == "step" or not value.is_floating_point():
        return value.detach().cpu()
    return value.detach().to("cpu", torch.float32)
