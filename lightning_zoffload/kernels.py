"""The compiled kernels: one Adam step and gradient statistics, on CPU tensors.

The only file that touches the C library. Arguments are checked here, so that the C code may trust
them. The interpreter lock is released while a kernel runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

try:
    from lightning_zoffload._native import ffi as _ffi
    from lightning_zoffload._native import lib as _lib
except ImportError as error:
    raise ImportError(
        f"The compiled part of lightning-zoffload cannot be loaded ({error})."
        " Run `pip install .` in the source folder to build it, or install a wheel."
    ) from error

_EXCHANGE_DTYPES = {
    torch.float16: _lib.ZO_F16,
    torch.bfloat16: _lib.ZO_BF16,
    torch.float32: _lib.ZO_F32,
}
_STATE_DTYPES = {torch.float32: _lib.ZO_F32}
_ISAS: tuple[str, ...] = tuple(
    _ffi.string(_lib.zo_isa_name(i)).decode() for i in range(_lib.zo_isa_count())
)


def available_isas() -> tuple[str, ...]:
    """Names of the instruction sets that this build and this CPU have, the best one last."""
    return tuple(name for i, name in enumerate(_ISAS) if _lib.zo_isa_supported(i))


def isa() -> str:
    """Name of the instruction set in use: the best available, or what ``ZOFFLOAD_ISA`` says."""
    name: str = _ISAS[_lib.zo_isa_active()]
    return name


def adam_step(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exchange: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    clip_value: float = math.inf,
    num_threads: int | None = None,
) -> None:
    """One step of Adam or AdamW, in place, in a single pass over memory.

    The formula is that of :class:`torch.optim.Adam` and :class:`torch.optim.AdamW` (arXiv 1412.6980
    and 1711.05101) without ``amsgrad``, for the gradient ``exchange * grad_scale``, clamped. All
    results have the same bits on every instruction set and for any number of threads, and are
    within 2 ulp of the formula computed exactly (of its larger term, where terms cancel), for
    hyper-parameters in fp32's normal range and ``lr * weight_decay`` below 1/2.

    The tensors are on the CPU, one-dimensional, contiguous, of one length, and do not overlap.

    Args:
        master: The parameters, fp32.
        exp_avg: First moment, fp32.
        exp_avg_sq: Second moment, fp32.
        exchange: fp16, bf16 or fp32. Holds the gradient on entry, and on return the new parameters,
            rounded to nearest even.
        lr: Learning rate.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Its coefficient: decoupled as in AdamW, or an L2 penalty as in Adam.
        step: Number of this step, counted from 1.
        grad_scale: The gradient is multiplied by this first.
        decoupled: Whether weight decay is AdamW's.
        clip_value: Bound on the absolute value of the scaled gradient, taken in fp32.
        num_threads: Default: :func:`torch.get_num_threads`.

    Raises:
        TypeError: An argument is not a tensor or not of a dtype named above.
        ValueError: A tensor of another layout, device or length, overlapping tensors, or a
            hyper-parameter out of range.
    """
    _check_buffers(master=master, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exchange=exchange)
    _check_hyper_parameters(lr, betas, eps, weight_decay, step, clip_value)
    hyper = (lr, *betas, eps, weight_decay, grad_scale, clip_value, step, decoupled)
    _lib.zo_adam_step(
        _ffi.new("struct zo_adam *", hyper),
        len(master),
        *(_pointer("float *", tensor) for tensor in (master, exp_avg, exp_avg_sq)),
        _pointer("void *", exchange),
        _EXCHANGE_DTYPES[exchange.dtype],
        _threads(num_threads),
    )


def grad_stats(exchange: torch.Tensor, *, num_threads: int | None = None) -> tuple[float, bool]:
    """Sum of squares of a gradient, and whether any of its elements is infinite or NaN.

    The sum is made in fp64, in an order that depends neither on the instruction set nor on the
    number of threads.

    Args:
        exchange: One-dimensional contiguous CPU tensor, fp16, bf16 or fp32.
        num_threads: Default: :func:`torch.get_num_threads`.

    Returns:
        The sum, itself infinite or NaN if an element is; and whether it is.

    Raises:
        TypeError: ``exchange`` is not a tensor or not of a dtype named above.
        ValueError: ``exchange`` has another layout or device, or ``num_threads`` is less than 1.
        MemoryError: No memory for one number per 16384 elements.
    """
    _check_tensor("exchange", exchange, _EXCHANGE_DTYPES)
    result = _ffi.new("double *")
    status = _lib.zo_grad_stats(
        len(exchange),
        _pointer("void *", exchange),
        _EXCHANGE_DTYPES[exchange.dtype],
        _threads(num_threads),
        result,
    )
    if status != _lib.ZO_OK:
        raise MemoryError("`grad_stats` found no memory for its partial sums.")
    sum_of_squares: float = result[0]
    return sum_of_squares, not math.isfinite(sum_of_squares)


def _check_tensor(name: str, tensor: object, dtypes: dict[torch.dtype, Any]) -> None:
    if not isinstance(tensor, torch.Tensor):
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


def _check_buffers(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, _EXCHANGE_DTYPES if name == "exchange" else _STATE_DTYPES)
    length = len(tensors["master"])
    for name, tensor in tensors.items():
        if len(tensor) != length:
            raise ValueError(
                f"`{name}` must be as long as `master`: expected {length} elements,"
                f" got {len(tensor)}."
            )
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in tensors.items())
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"`{name}` and `{next_name}` must not overlap, but they share memory."
                " Pass buffers of their own."
            )


def _check_hyper_parameters(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    clip_value: float,
) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"`{name}` must be a finite number, 0 or more, got {value}.")
    beta1, beta2 = betas
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        raise ValueError(f"`betas` must be 0 or more and less than 1, got ({beta1}, {beta2}).")
    if not clip_value > 0.0:
        raise ValueError(f"`clip_value` must be more than 0, got {clip_value}.")
    _check_positive("step", step)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise TypeError(f"`{name}` must be an integer, got {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`{name}` must be 1 or more, got {value}.")


def _threads(num_threads: int | None) -> int:
    if num_threads is None:
        return torch.get_num_threads()
    _check_positive("num_threads", num_threads)
    return num_threads


def _pointer(c_type: str, tensor: torch.Tensor) -> Any:
    return _ffi.cast(c_type, tensor.data_ptr())


def _use_isa(name: str) -> None:
    if name not in _ISAS:
        raise ValueError(
            f"ZOFFLOAD_ISA={name!r} is not known. Available here: {', '.join(available_isas())}."
        )
    if _lib.zo_isa_use(_ISAS.index(name)) != _lib.ZO_OK:
        raise RuntimeError(
            f"ZOFFLOAD_ISA={name} needs instructions that this CPU or its operating system does not"
            f" offer. Available here: {', '.join(available_isas())}."
        )


@contextmanager
def _forced_isa(name: str) -> Iterator[None]:
    """For tests: switches the instruction set of the whole process."""
    before = isa()
    _use_isa(name)
    try:
        yield
    finally:
        _use_isa(before)


if "ZOFFLOAD_ISA" in os.environ:
    _use_isa(os.environ["ZOFFLOAD_ISA"])
