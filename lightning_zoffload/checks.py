"""Checks of the kernels' arguments: each raises one sentence that names the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor


def check_tensor(name: str, tensor: object, dtypes: Iterable[torch.dtype]) -> None:
    """A one-dimensional contiguous CPU tensor of one of the dtypes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(tensor).__name__}.")
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"`{name}` must be of dtype {expected}, got {tensor.dtype}.")
    if tensor.device.type != "cpu":
        raise ValueError(f"`{name}` must be on the CPU, got device {tensor.device}.")
    if tensor.layout is not torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"`{name}` must be one-dimensional and contiguous, got shape {tuple(tensor.shape)},"
            f" layout {tensor.layout}"
            + (f", stride {tensor.stride()}." if tensor.layout is torch.strided else ".")
        )


def check_length(name: str, tensor: Tensor, other: str, length: int) -> None:
    """As long as ``other``, which is ``length``."""
    if len(tensor) != length:
        raise ValueError(
            f"`{name}` must be as long as `{other}`: expected {length} elements, got {len(tensor)}."
        )


def check_together(**tensors: Tensor) -> None:
    """One length, and no byte of one in another."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        check_length(name, tensor, first, len(tensors[first]))
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items())
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"`{name}` and `{next_name}` must not overlap, but they share memory."
                " Pass buffers of their own."
            )


def check_numbers(**values: float) -> None:
    """Finite, and not negative."""
    for name, value in values.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a finite number, 0 or more, got {value}.")


def check_betas(betas: tuple[float, float]) -> None:
    """Decay rates in [0, 1)."""
    beta1, beta2 = betas
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"`betas` must be 0 or more and less than 1, got ({beta1}, {beta2}).")


def check_positive(name: str, value: object) -> None:
    """An integer, 1 or more."""
    if not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`{name}` must be 1 or more, got {value}.")
