"""What stands in ``p.grad`` while the gradient is on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

#: Keeps torch functions whole until they reach ``__torch_dispatch__``.
_PLAIN: Any = torch._C._disabled_torch_function_impl


class HostGradient(Tensor):
    """A tensor of the gradient's shape and dtype without memory of its own.

    Any operation on it first brings the gradient back to ``p.grad`` on the device and is then done
    there, so reads are right and edits count. Two cost nothing: ``zero_grad()``, which only takes
    the placeholder away, and the sum that ``backward()`` makes, which goes to the host as well.

    Args:
        parameter: The parameter whose gradient it stands for.
        fetch: Brings the gradient back and returns it.
        add: Adds a gradient to the one on the host.
    """

    __torch_function__ = _PLAIN

    @staticmethod
    def __new__(
        cls,
        parameter: Tensor,
        fetch: Callable[[], Tensor],
        add: Callable[[Tensor], None],
    ) -> HostGradient:
        """As :func:`torch.empty_like` of ``parameter``, without the memory."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
        )

    def __init__(
        self, parameter: Tensor, fetch: Callable[[], Tensor], add: Callable[[Tensor], None]
    ) -> None:
        self._fetch = fetch
        self._add = add

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Does ``func`` on the gradient itself."""
        if func is torch.ops.aten.add_.Tensor and not kwargs and isinstance(args[0], cls):
            gradient = args[1]
            if not isinstance(gradient, cls) and gradient.shape == args[0].shape:
                args[0]._add(gradient)
                return args[0]
        args, kwargs = _pytree.tree_map_only(cls, lambda g: g._fetch(), (args, kwargs or {}))
        return func(*args, **kwargs)
