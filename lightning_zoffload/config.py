"""The options of the offload engine, validated once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: By name, as a YAML file has them.
_MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Options of the offload engine; immutable.

    Attributes:
        bucket_size: Parameters per bucket. A parameter larger than this gets a bucket of its own.
        host_threads: Threads of the host update; ``None`` takes the CPUs that this process may use,
            less one where the device is an accelerator.
        moment_dtype: ``"float32"``, or ``"bfloat16"``, rounded stochastically: with Adam 10 instead
            of 14 bytes per parameter on the host. Of the optimizers that run natively.
        schedule: ``"auto"`` updates each bucket in backward, as soon as its gradients have landed,
            where that gives the same bits: no clipping by norm, no loss scale, no hook that looks
            at gradients, automatic optimization. ``"synchronous"`` always waits for the step.
        accumulate_on: Where gradients of several micro-batches are added up: ``"host"``, in fp32
            (4 bytes per parameter there, 2n + 2 bytes over the bus with n micro-batches), or
            ``"device"``, in ``p.grad`` (2 bytes per parameter there, 4 over the bus).
        keep_gradients: Whether gradients stay in ``p.grad`` on the device until the step, 2 bytes
            per parameter; ``None`` keeps them where a hook may look at them. If not kept they are
            brought back when looked at.
        delayed_update: Run the host update of a step during the next step's forward and backward
            (one-step delayed parameter update, arXiv 2101.06840 section 5.2). Not available yet.
        delayed_update_warmup: Synchronous steps before the delay sets in.

    Raises:
        ValueError: An option is out of its range.
        NotImplementedError: ``delayed_update=True``.
    """

    bucket_size: int = 2**25
    host_threads: int | None = None
    moment_dtype: str = "float32"
    schedule: str = "auto"
    accumulate_on: str = "host"
    keep_gradients: bool | None = None
    delayed_update: bool = False
    delayed_update_warmup: int = 40

    def __post_init__(self) -> None:
        _require_at_least("bucket_size", self.bucket_size, 1)
        _require_at_least("delayed_update_warmup", self.delayed_update_warmup, 0)
        if self.host_threads is not None:
            _require_at_least("host_threads", self.host_threads, 1)
        _require_one_of("moment_dtype", self.moment_dtype, *_MOMENT_DTYPES)
        _require_one_of("schedule", self.schedule, "auto", "synchronous")
        _require_one_of("accumulate_on", self.accumulate_on, "host", "device")
        if self.delayed_update:
            raise NotImplementedError(
                "The delayed parameter update is not available yet."
                " Use strategy='zero_offload', without delayed_update, for synchronous updates."
            )

    @property
    def torch_moment_dtype(self) -> torch.dtype:
        """``moment_dtype`` as torch has it."""
        return _MOMENT_DTYPES[self.moment_dtype]


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{name}` must be an integer, got {value!r}. Pass a whole number.")
    if value < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}, got {value}.")


def _require_one_of(name: str, value: str, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be {' or '.join(map(repr, choices))}, got {value!r}.")
