"""The compiled kernels: fused optimizer steps, gradient statistics and casts, on CPU tensors.

The only file that touches the C library. Arguments are checked here, so that the C code may trust
them. The interpreter lock is released while a kernel runs.

All results have the same bits on every instruction set and for any number of threads. A step's are
within 2 ulp of its formula computed exactly (2 ulp of its larger term, where terms cancel), for
hyper-parameters in fp32's normal range and ``lr * weight_decay`` below 1/2.

Tensors are on the CPU, one-dimensional, contiguous, of one length, and do not overlap. All steps
share these arguments:

- ``master``: the parameters, fp32.
- ``exchange``: fp16, bf16 or fp32. Holds the gradient on entry, and on return the new parameters,
  rounded to nearest even.
- The state tensors, named as in torch: all fp32, or all bf16. bf16 is rounded stochastically, or a
  second moment would stand still: its steps of ``1 - beta2`` are below bf16's resolution.
- ``step``: number of this step, counted from 1, or a :class:`SegmentSteps`.
- ``grad_scale``: the gradient is multiplied by this first.
- ``clip_value``: then clamped to ± this, in fp32.
- ``maximize``: as in torch.
- ``num_threads``: default :func:`torch.get_num_threads`.

They raise ``TypeError`` where an argument is not a tensor or has another dtype, and ``ValueError``
for a tensor of another layout, device or length, overlapping tensors, or a hyper-parameter out of
range.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_zoffload.checks import (
    check_betas,
    check_length,
    check_numbers,
    check_positive,
    check_tensor,
    check_together,
)

try:
    from lightning_zoffload._native import ffi as _ffi
    from lightning_zoffload._native import lib as _lib
except ImportError as error:
    raise ImportError(
        f"The compiled part of lightning-zoffload cannot be loaded ({error})."
        " Run `pip install .` in the source folder to build it, or install a wheel."
    ) from error

_DTYPES = {
    torch.float16: _lib.ZO_F16,
    torch.bfloat16: _lib.ZO_BF16,
    torch.float32: _lib.ZO_F32,
}
_FP32 = (torch.float32,)
_STATE_DTYPES = (torch.float32, torch.bfloat16)
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


@dataclass(frozen=True)
class SegmentSteps:
    """Step counts of the segments of a bucket, so that one call updates it all.

    Attributes:
        ends: Where each segment ends, exclusive, in elements; ascending. It begins where the one
            before it ends. ``int64``, CPU, one-dimensional, as are the others.
        steps: Each segment's step, counted from 1; where it is 0 the segment is left as it is.
        seeds: What each segment's random numbers depend on, besides its step and the element's
            number in it. Of use for bf16 state only; default zeros.
        begin: Where the first segment begins: 0, or less where the tensors start in its middle.
    """

    ends: Tensor
    steps: Tensor
    seeds: Tensor | None = None
    begin: int = 0


def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exchange: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int | SegmentSteps,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    max_exp_avg_sq: Tensor | None = None,
    maximize: bool = False,
    clip_value: float = math.inf,
    num_threads: int | None = None,
) -> None:
    """One step of Adam or AdamW, in place, in a single pass over memory.

    The formula is that of :class:`torch.optim.Adam` and :class:`torch.optim.AdamW` (arXiv 1412.6980
    and 1711.05101). See the head of this file for what is not listed here.

    Args:
        master: The parameters.
        exp_avg: First moment.
        exp_avg_sq: Second moment.
        exchange: Gradient, then new parameters.
        lr: Learning rate.
        betas: Decay rates of the two moments, each in [0, 1).
        eps: Added to the denominator.
        weight_decay: Its coefficient: decoupled as in AdamW, or an L2 penalty as in Adam.
        step: Number of this step.
        grad_scale: Factor of the gradient.
        decoupled: Whether weight decay is AdamW's.
        max_exp_avg_sq: Largest second moment so far; given, the step is ``amsgrad``'s.
        maximize: Ascends instead of descending.
        clip_value: Bound of the scaled gradient.
        num_threads: Threads to use.
    """
    check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    states = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if max_exp_avg_sq is not None:
        states["max_exp_avg_sq"] = max_exp_avg_sq
    gradient = _gradient(grad_scale, clip_value, maximize)
    hyper = (gradient, lr, *betas, eps, weight_decay, decoupled, max_exp_avg_sq is not None)
    _step("adam", hyper, master, states, exchange, step, num_threads)


def sgd_step(
    master: Tensor,
    momentum_buffer: Tensor | None,
    exchange: Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int | SegmentSteps,
    grad_scale: float = 1.0,
    maximize: bool = False,
    clip_value: float = math.inf,
    num_threads: int | None = None,
) -> None:
    """One step of :class:`torch.optim.SGD`, in place, in a single pass over memory.

    Args:
        master: The parameters.
        momentum_buffer: Step 1 fills it, as torch does where there is none yet. ``None`` with
            ``momentum=0``.
        exchange: Gradient, then new parameters.
        lr: Learning rate.
        momentum: Factor of the buffer.
        dampening: One minus the factor of the gradient that enters the buffer.
        weight_decay: Coefficient of the L2 penalty.
        nesterov: Nesterov momentum.
        step: Number of this step.
        grad_scale: Factor of the gradient.
        maximize: Ascends instead of descending.
        clip_value: Bound of the scaled gradient.
        num_threads: Threads to use.
    """
    check_numbers(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if not math.isfinite(dampening):
        raise ValueError(f"`dampening` must be a finite number, got {dampening}.")
    if (momentum_buffer is None) != (momentum == 0.0):
        raise ValueError(
            f"`momentum_buffer` must be a tensor where `momentum` is not 0, and None where it is,"
            f" got momentum={momentum} and {type(momentum_buffer).__name__}."
        )
    states = {} if momentum_buffer is None else {"momentum_buffer": momentum_buffer}
    gradient = _gradient(grad_scale, clip_value, maximize)
    hyper = (gradient, lr, momentum, dampening, weight_decay, nesterov)
    _step("sgd", hyper, master, states, exchange, step, num_threads)


def adagrad_step(
    master: Tensor,
    square_sum: Tensor,
    exchange: Tensor,
    *,
    lr: float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    step: int | SegmentSteps,
    grad_scale: float = 1.0,
    maximize: bool = False,
    clip_value: float = math.inf,
    num_threads: int | None = None,
) -> None:
    """One step of :class:`torch.optim.Adagrad`, in place, in a single pass over memory.

    Args:
        master: The parameters.
        square_sum: Sum of squared gradients: torch's ``sum``.
        exchange: Gradient, then new parameters.
        lr: Learning rate.
        lr_decay: The rate is divided by ``1 + (step - 1) * lr_decay``.
        weight_decay: Coefficient of the L2 penalty.
        eps: Added to the denominator.
        step: Number of this step.
        grad_scale: Factor of the gradient.
        maximize: Ascends instead of descending.
        clip_value: Bound of the scaled gradient.
        num_threads: Threads to use.
    """
    check_numbers(lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    hyper = (_gradient(grad_scale, clip_value, maximize), lr, lr_decay, eps, weight_decay)
    _step("adagrad", hyper, master, {"square_sum": square_sum}, exchange, step, num_threads)


def lion_step(
    master: Tensor,
    exp_avg: Tensor,
    exchange: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    step: int | SegmentSteps,
    grad_scale: float = 1.0,
    maximize: bool = False,
    clip_value: float = math.inf,
    num_threads: int | None = None,
) -> None:
    """One step of Lion (arXiv 2302.06675, program 1), in place, in a single pass over memory.

    Args:
        master: The parameters.
        exp_avg: The momentum.
        exchange: Gradient, then new parameters.
        lr: Learning rate: what every element moves by.
        betas: Decay rates for the direction and for the momentum, each in [0, 1).
        weight_decay: Its coefficient, decoupled.
        step: Number of this step; only segments and random numbers depend on it.
        grad_scale: Factor of the gradient.
        maximize: Ascends instead of descending.
        clip_value: Bound of the scaled gradient.
        num_threads: Threads to use.
    """
    check_numbers(lr=lr, weight_decay=weight_decay)
    check_betas(betas)
    hyper = (_gradient(grad_scale, clip_value, maximize), lr, *betas, weight_decay)
    _step("lion", hyper, master, {"exp_avg": exp_avg}, exchange, step, num_threads)


def grad_stats(exchange: Tensor, *, num_threads: int | None = None) -> tuple[float, bool]:
    """Sum of squares of a gradient, and whether any of its elements is infinite or NaN.

    The sum is made in fp64, in an order that depends neither on the instruction set nor on the
    number of threads.

    Args:
        exchange: fp16, bf16 or fp32.
        num_threads: Default: :func:`torch.get_num_threads`.

    Returns:
        The sum, itself infinite or NaN if an element is; and whether it is.

    Raises:
        TypeError: ``exchange`` is not a tensor or not of a dtype named above.
        ValueError: ``exchange`` has another layout or device, or ``num_threads`` is less than 1.
        MemoryError: No memory for one number per 16384 elements.
    """
    check_tensor("exchange", exchange, _DTYPES)
    result = _ffi.new("double *")
    status = _lib.zo_grad_stats(len(exchange), *_typed(exchange), _threads(num_threads), result)
    return _stats("grad_stats", status, result[0])


def accumulate(
    accumulator: Tensor, gradient: Tensor, *, num_threads: int | None = None
) -> tuple[float, bool]:
    """``accumulator += gradient``, and the statistics of the sum in the same pass.

    Args:
        accumulator: fp32.
        gradient: fp16, bf16 or fp32.
        num_threads: Default: :func:`torch.get_num_threads`.

    Returns:
        What :func:`grad_stats` would say of the new ``accumulator``. It costs nothing beside the
        memory traffic; only the last micro-batch's is of use.

    Raises:
        TypeError: As :func:`grad_stats`.
        ValueError: As :func:`grad_stats`, or the tensors differ in length or overlap.
        MemoryError: As :func:`grad_stats`.
    """
    check_tensor("accumulator", accumulator, _FP32)
    check_tensor("gradient", gradient, _DTYPES)
    check_together(accumulator=accumulator, gradient=gradient)
    result = _ffi.new("double *")
    status = _lib.zo_accumulate(
        len(accumulator),
        _pointer("float *", accumulator),
        *_typed(gradient),
        _threads(num_threads),
        result,
    )
    return _stats("accumulate", status, result[0])


def cast(source: Tensor, destination: Tensor, *, num_threads: int | None = None) -> None:
    """``destination.copy_(source)``: fp32 to 16 bit, rounded to nearest even, or back.

    Every NaN becomes the positive quiet one.

    Args:
        source: fp16, bf16 or fp32.
        destination: The same, but one of the two is fp32.
        num_threads: Default: :func:`torch.get_num_threads`.

    Raises:
        TypeError: An argument is not a tensor or of another dtype.
        ValueError: A tensor has another layout or device, or they differ in length or overlap.
    """
    check_tensor("source", source, _DTYPES)
    narrows = source.dtype is torch.float32
    check_tensor("destination", destination, _DTYPES if narrows else _FP32)
    check_together(source=source, destination=destination)
    _lib.zo_cast(len(source), *_typed(source), *_typed(destination), _threads(num_threads))


def copy(source: Tensor, destination: Tensor, *, num_threads: int | None = None) -> None:
    """``destination.copy_(source)`` by this library's threads.

    Torch's own threads spin for a while after each of their copies, and would take the CPUs from
    the step that runs in turns with it.

    Args:
        source: fp16, bf16 or fp32.
        destination: The same dtype.
        num_threads: Default: :func:`torch.get_num_threads`.

    Raises:
        TypeError: An argument is not a tensor or of another dtype.
        ValueError: A tensor has another layout or device, or they differ in length or overlap.
    """
    check_tensor("source", source, _DTYPES)
    check_tensor("destination", destination, (source.dtype,))
    check_together(source=source, destination=destination)
    pointers = _pointer("void *", source), _pointer("void *", destination)
    _lib.zo_copy(source.nbytes, *pointers, _threads(num_threads))


def first_touch(fresh: Tensor, *, num_threads: int | None = None) -> None:
    """Writes a zero to every page of freshly mapped memory, by the threads that will update it.

    The system then provides the pages at once, near the CPU that uses them, and running out of
    memory shows here.

    Args:
        fresh: Zero-filled so far, any dtype.
        num_threads: Default: :func:`torch.get_num_threads`.
    """
    _lib.zo_first_touch(fresh.nbytes, _pointer("void *", fresh), _threads(num_threads))


def _step(
    optimizer: str,
    hyper: tuple[Any, ...],
    master: Tensor,
    states: Mapping[str, Tensor],
    exchange: Tensor,
    step: int | SegmentSteps,
    num_threads: int | None,
) -> None:
    check_tensor("master", master, _FP32)
    check_tensor("exchange", exchange, _DTYPES)
    for name, state in states.items():
        check_tensor(name, state, _STATE_DTYPES)
    check_together(master=master, **states, exchange=exchange)
    dtypes = {state.dtype for state in states.values()} or {torch.float32}
    if len(dtypes) > 1:
        raise TypeError(
            f"{', '.join(f'`{name}`' for name in states)} must have one dtype,"
            f" got {', '.join(str(state.dtype) for state in states.values())}."
        )
    segments, keep_alive = _segments(step, len(master))
    pointers = [_pointer("void *", state) for state in states.values()]
    buffers = (
        len(master),
        _pointer("float *", master),
        pointers,
        *_typed(exchange),
        _DTYPES[dtypes.pop()],
    )
    getattr(_lib, f"zo_{optimizer}_step")(
        _ffi.new(f"struct zo_{optimizer} *", hyper),
        _ffi.new("struct zo_buffers *", buffers),
        _ffi.new("struct zo_segments *", segments),
        _threads(num_threads),
    )
    del keep_alive


def _segments(step: int | SegmentSteps, length: int) -> tuple[tuple[Any, ...], list[Any]]:
    """The C struct's fields, and what owns the memory that they point to."""
    if not isinstance(step, SegmentSteps):
        check_positive("step", step)
        arrays = [_ffi.new("int64_t[]", [value]) for value in (length, step, 0)]
        return (1, 0, *arrays), arrays
    seeds = torch.zeros_like(step.steps) if step.seeds is None else step.seeds
    tensors = {"ends": step.ends, "steps": step.steps, "seeds": seeds}
    for name, tensor in tensors.items():
        check_tensor(f"step.{name}", tensor, (torch.int64,))
        check_length(f"step.{name}", tensor, "step.ends", len(step.ends))
    if len(step.ends) and (
        int(step.ends[0]) < 0
        or int(step.ends[-1]) > length
        or bool((step.ends[1:] < step.ends[:-1]).any())
    ):
        raise ValueError(
            f"`step.ends` must ascend from 0 or more to {length} or less, the length of `master`."
        )
    if step.begin > 0:
        raise ValueError(f"`step.begin` must be 0 or less, got {step.begin}.")
    if bool((step.steps < 0).any()):
        raise ValueError(f"`step.steps` must be 0 or more, got {int(step.steps.min())}.")
    pointers = [_pointer("int64_t *", tensor) for tensor in tensors.values()]
    return (len(step.ends), step.begin, *pointers), list(tensors.values())


def _gradient(scale: float, clip_value: float, maximize: bool) -> tuple[float, float]:
    if not clip_value > 0.0:
        raise ValueError(f"`clip_value` must be more than 0, got {clip_value}.")
    return -scale if maximize else scale, clip_value


def _stats(function: str, status: int, sum_of_squares: float) -> tuple[float, bool]:
    if status != _lib.ZO_OK:
        raise MemoryError(f"`{function}` found no memory for its partial sums.")
    return sum_of_squares, not math.isfinite(sum_of_squares)


def _threads(num_threads: int | None) -> int:
    if num_threads is None:
        return torch.get_num_threads()
    check_positive("num_threads", num_threads)
    return num_threads


def _typed(tensor: Tensor) -> tuple[Any, int]:
    return _pointer("void *", tensor), _DTYPES[tensor.dtype]


def _pointer(c_type: str, tensor: Tensor) -> Any:
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
    """For tests and benchmarks: switches the instruction set of the whole process."""
    before = isa()
    _use_isa(name)
    try:
        yield
    finally:
        _use_isa(before)


if "ZOFFLOAD_ISA" in os.environ:
    _use_isa(os.environ["ZOFFLOAD_ISA"])
