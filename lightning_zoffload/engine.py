"""The offload engine: owns the slabs of every optimizer and carries a step through."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_zoffload import schedules
from lightning_zoffload.config import OffloadConfig
from lightning_zoffload.grad_hooks import GradientHooks
from lightning_zoffload.host_update import GradientScaling
from lightning_zoffload.host_worker import HostWorker, InlineWorker, ThreadWorker
from lightning_zoffload.loss_scale import LossScale
from lightning_zoffload.machine import default_host_threads
from lightning_zoffload.native_update import choose_update
from lightning_zoffload.state_dict import swapped_data
from lightning_zoffload.streams import AcceleratorStreams
from lightning_zoffload.takeover import Clipping, DeviceDtype, OptimizerShare, Takeover
from lightning_zoffload.transfer import InlineTransfer, StreamTransfer, Transfer

#: The engine that trains each parameter, and the optimizer.
_ENGINES: Any = WeakTensorKeyDictionary()


class OffloadEngine:
    """Masters, moments and optimizer on the host; 16-bit parameters on the device.

    Args:
        module: The module to train. Parameters that require a gradient and belong to an
            optimizer are taken over; all others are left alone.
        optimizers: The user's optimizers over them.
        device: Where forward and backward run.
        device_dtype: The dtype of each parameter there.
        loss_scale: The scale that the loss is multiplied by before backward.
        config: Options.
        transfer: How bytes cross the bus.
        worker: Where host work runs beside backward.

    Attributes:
        config: Options.
        transfer: How bytes cross the bus; counts them.

    Raises:
        ValueError: An optimizer cannot be offloaded, or two optimizers share a parameter.
        TypeError: A parameter is complex or fp64.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        device: torch.device,
        device_dtype: DeviceDtype,
        loss_scale: LossScale,
        config: OffloadConfig,
        transfer: Transfer | None = None,
        worker: HostWorker | None = None,
    ) -> None:
        on_host = device.type == "cpu"
        self.config = config
        num_threads = config.host_threads or default_host_threads(device)
        self.transfer = transfer or (
            InlineTransfer(num_threads)
            if on_host
            else StreamTransfer(AcceleratorStreams(device), device)
        )
        self._loss_scale = loss_scale
        self._worker = worker or (InlineWorker() if on_host else ThreadWorker())
        self._hooks = GradientHooks(self.transfer, self._worker, num_threads)
        self._shares = {
            optimizer: OptimizerShare(
                optimizer, choose_update(optimizer, config.torch_moment_dtype, num_threads)
            )
            for optimizer in optimizers
        }
        self._takeover = Takeover(
            names={parameter: name for name, parameter in module.named_parameters()},
            device=device,
            device_dtype=device_dtype,
            bucket_size=config.bucket_size,
            num_threads=num_threads,
            transfer=self.transfer,
            hooks=self._hooks,
        )
        self._watched = self._automatic = False
        self._backwards = 0
        self._takeover.validate(optimizers)
        try:
            self._take_over(self._shares.values(), lambda parameter: parameter.requires_grad)
        except BaseException:  # out of memory half-way: the module must stay usable
            self.release()
            raise

    @property
    def masters(self) -> dict[Tensor, Tensor]:
        """The fp32 master of every parameter taken over."""
        self._worker.drain()
        return {
            parameter: segment.master
            for share in self._shares.values()
            for parameter, segment in share.segments.items()
        }

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """A fp32 copy, on the host, of a gradient that no step has used yet, unscaled."""
        (share,) = (s for s in self._shares.values() if parameter in s.segments)
        segment = share.segments[parameter]
        if parameter.grad is None:
            return None
        if parameter.grad is share.intake.placeholders[segment]:
            gradient = self._hooks.read(share.intake, segment)
        else:
            gradient = parameter.grad.detach().to("cpu", torch.float32, copy=True)
        scale = 1.0 if share.unscaled else self._loss_scale.scale
        return None if gradient is None else gradient.div_(scale)

    @contextmanager
    def backward(
        self, *, watched: bool = False, automatic: bool = False, clipping: Clipping | None = None
    ) -> Iterator[None]:
        """Around a backward. Without it, less overlaps and all is right.

        Args:
            watched: Code between backward and step looks at gradients: they stay in ``p.grad``.
            automatic: The last backward before a step runs in the step's closure, no other does,
                and nothing but ``clipping`` comes between them.
            clipping: What :meth:`clip_next_step` will ask for.
        """
        self._backwards += 1
        self._watched, self._automatic = watched, automatic
        eager = automatic and not watched and self.config.schedule == "auto"
        for share in self._shares.values():
            self._arrange(share)
            share.intake.backward = self._backwards
            if clipping is not None:
                share.clipping = clipping
                share.intake.wants_norm |= math.isfinite(clipping.max_norm)
            if eager and share.in_step:
                self._hooks.send_staged(share.intake)  # of earlier micro-batches: not final yet
                schedules.start_eager(share, self._loss_scale, self.transfer)
        yield
        for share in self._shares.values():
            share.intake.backward = 0
            if not share.intake.leave:
                self._hooks.collect_held(share.intake)

    def clip_next_step(self, optimizer: Optimizer, clipping: Clipping) -> None:
        """Clips the gradients of ``optimizer`` at its next step, in the passes made anyway.

        Raises:
            RuntimeError: By norm, but parameters were updated in backward already.
        """
        share = self._shares[optimizer]
        share.clipping = clipping
        if share.intake.apply is not None and math.isfinite(clipping.max_norm):
            raise RuntimeError(
                "Clipping by norm was asked for after parameters had been updated in backward."
                " Pass `Trainer(gradient_clip_val=...)`, or `schedule='synchronous'` to"
                " zero_offload."
            )

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divides ``p.grad`` by the loss scale now, for code that looks at it before the step."""
        share = self._shares[optimizer]
        if share.unscaled or self._loss_scale.scale == 1.0:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(self._loss_scale.scale)
        share.unscaled = True

    def open_step(self, optimizer: Optimizer) -> None:
        """Tells that the closure of a step of ``optimizer`` is about to run."""
        share = self._shares[optimizer]
        share.in_step = True
        self._arrange(share)

    def begin_step(self, optimizer: Optimizer) -> None:
        """Sees that all gradients are on the host and decides what the step does with them."""
        share = self._shares[optimizer]
        self._take_over([share], lambda parameter: parameter.grad is not None)
        self._hooks.collect(share.intake)
        self._worker.drain()
        if share.intake.apply is not None:
            share.scaling = GradientScaling(clip_value=share.clipping.clip_value)
        else:
            share.scaling = schedules.settle(share, self._loss_scale, self._hooks)
        if share.scaling is not None:
            share.update.expose(share.intake.buckets, share.scaling)

    def finish_step(self, optimizer: Optimizer, *, abandon: bool = False) -> None:
        """Updates masters and moments from the gradients and sends the parameters up.

        Args:
            optimizer: Whose step.
            abandon: The optimizer, or its closure, raised: gradients not used yet are dropped.
        """
        share = self._shares[optimizer]
        share.update.withdraw()
        if abandon:
            with suppress(Exception):  # the one under way is the one to see
                self._worker.drain()
        elif share.scaling is not None:
            self.transfer.uploads_follow_compute()
            for bucket in share.intake.all_buckets():
                if bucket.on_host:
                    schedules.apply(share, share.scaling, self.transfer, bucket, bucket.on_host)
        self.transfer.finish_uploads()
        share.end_step()
        self._arrange(share)

    def adopt_states(
        self, optimizer: Optimizer, states: Iterable[Mapping[str, Any] | None]
    ) -> None:
        """Loads optimizer state, one entry per parameter in the order of the param groups.

        Raises:
            CheckpointMismatchError: A state does not fit its parameter.
        """
        share = self._shares[optimizer]
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        for parameter, state in zip(parameters, states, strict=True):
            if state is not None and parameter in share.segments:
                share.update.adopt_state(share.segments[parameter], state)
            elif state is not None:
                optimizer.state[parameter] = dict(state)

    @contextmanager
    def masters_in_module(self, *, write: bool = False) -> Iterator[None]:
        """While the context lasts the parameters hold their fp32 masters.

        Args:
            write: They are going to be written: the device follows at the end.
        """
        with swapped_data(self.masters):
            yield
        if write:
            for share in self._shares.values():
                for slab in share.slabs:
                    slab.upload_masters()

    def bind(self) -> None:
        """Makes every parameter a view of its slab again, whatever moved it."""
        for share in self._shares.values():
            for segment in share.segments.values():
                segment.bind()

    def release(self) -> None:
        """Gives the parameters back as fp32 tensors on the CPU. The engine is empty then."""
        self._hooks.detach()
        self._worker.close()
        for share in self._shares.values():
            share.update.withdraw()
            for slab in share.slabs:
                slab.release()
            for parameter, segment in share.segments.items():
                parameter.grad = None
                parameter.data = segment.master
                _ENGINES.pop(parameter, None)
        self._shares = {}

    def _take_over(
        self, shares: Collection[OptimizerShare], wanted: Callable[[Tensor], bool]
    ) -> None:
        for parameter, optimizer in self._takeover.run(shares, wanted):
            _ENGINES[parameter] = (weakref.ref(self), optimizer)
        for share in shares:
            self._arrange(share)

    def _arrange(self, share: OptimizerShare) -> None:
        """Tells the hooks what to do with the gradients that come next."""
        on_device = self.config.accumulate_on == "device" and not share.in_step
        share.intake.leave = self._watched or on_device
        share.intake.is_last = share.in_step or not self._automatic


def engine_of(parameter: Tensor) -> tuple[OffloadEngine, Optimizer]:
    """The engine that trains a parameter, and the optimizer.

    Raises:
        ValueError: There is none.
    """
    reference, optimizer = _ENGINES.get(parameter, (None, None))
    engine = reference() if reference is not None else None
    if engine is None:
        raise ValueError(
            f"This parameter of shape {tuple(parameter.shape)} is not trained by zero_offload."
            " Pass one that is, while `trainer.fit` runs; others can be read as they are."
        )
    return engine, optimizer
