"""The precision plugin: device dtypes, autocast, loss scaling, clipping intent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, cast, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_zoffload.engine import OffloadEngine
from lightning_zoffload.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from lightning_zoffload.takeover import Clipping

PrecisionName = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]

#: Where plain Lightning keeps the loss scale in a checkpoint; ours goes there, so that either run
#: resumes the other's.
_SCALE_KEY = MixedPrecision.__qualname__

_NORMALISATION = (
    nn.modules.batchnorm._NormBase,  # BatchNorm, SyncBatchNorm, InstanceNorm
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class ZeroOffloadPrecision(Precision):
    """Precision of a ``zero_offload`` run; ``Trainer(precision=...)`` makes it by itself.

    ==============================  =====================================  ==========  ==========
    ``precision``                   device parameters                      compute     loss scale
    ==============================  =====================================  ==========  ==========
    ``32-true``                     fp32                                   fp32        none
    ``bf16-mixed``, ``16-mixed``    16 bit, normalisation layers fp32      autocast    none, dynamic
    ``bf16-true``, ``16-true``      16 bit                                 as stored   none, dynamic
    ==============================  =====================================  ==========  ==========

    The masters are fp32 on the host in every row.

    Args:
        precision: A row of the table.
        loss_scale: A fixed loss scale instead of the dynamic one, for the fp16 rows only.

    Raises:
        ValueError: ``precision`` is not a row of the table, or has no loss scale.
    """

    def __init__(
        self, precision: PrecisionName = "32-true", loss_scale: float | None = None
    ) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(
                f"`ZeroOffloadPrecision` does not support `precision={precision!r}`."
                f" Choose one of: {', '.join(get_args(PrecisionName))}."
            )
        self.precision: Any = precision  # the base class types it by Lightning's own list
        self.loss_scale = _make_loss_scale(precision, loss_scale)
        self.engine: OffloadEngine | None = None
        self.device_type = "cpu"

    @classmethod
    def from_lightning(cls, plugin: Precision) -> ZeroOffloadPrecision:
        """The plugin of the same meaning as one that Lightning made from ``Trainer(precision=)``.

        Raises:
            ValueError: There is none.
        """
        if isinstance(plugin, cls):
            return plugin
        if type(plugin) is Precision:
            return cls("32-true")
        if type(plugin) is HalfPrecision:
            return cls(cast(PrecisionName, plugin.precision))
        if type(plugin) is MixedPrecision:
            ours = cls(cast(PrecisionName, plugin.precision))
            if plugin.scaler is not None:
                ours.loss_scale.load_state_dict(plugin.scaler.state_dict())
            return ours
        raise ValueError(
            f"The `zero_offload` strategy does not support `{type(plugin).__name__}`"
            f" (precision={plugin.precision!r})."
            f" Choose `Trainer(precision=...)` among: {', '.join(get_args(PrecisionName))}."
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the matrix products."""
        if self.precision == "32-true":
            return torch.float32
        return torch.bfloat16 if self.precision.startswith("bf16") else torch.float16

    @property
    def autocasts(self) -> bool:
        """Whether the precision is one of the mixed ones."""
        return bool(self.precision.endswith("-mixed"))

    def device_dtype(self, module: nn.Module) -> Callable[[Tensor], torch.dtype]:
        """The rule that gives each trained parameter of ``module`` its dtype on the device.

        A parameter that the user made 16-bit keeps its dtype; fp32 ones follow the table.
        """
        kept = _normalisation_parameters(module) if self.autocasts else set()

        def rule(parameter: Tensor) -> torch.dtype:
            if parameter.dtype is not torch.float32 or parameter in kept:
                return parameter.dtype
            return self.compute_dtype

        return rule

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Leaves the module as it is: the masters are taken from its fp32 parameters."""
        return module

    def convert_residents(self, module: nn.Module) -> set[str]:
        """Casts what is not offloaded (buffers, frozen parameters) as plain Lightning would.

        Returns:
            The names of the tensors that were fp32 and are 16-bit now.
        """
        if self.autocasts or self.precision == "32-true":
            return set()
        fp32 = {name: t for name, t in _named_tensors(module) if t.dtype is torch.float32}
        for tensor in fp32.values():
            tensor.data = tensor.data.to(self.compute_dtype)
        return set(fp32)

    def restore_residents(self, module: nn.Module, names: set[str]) -> None:
        """Makes what :meth:`convert_residents` cast fp32 again."""
        for name, tensor in _named_tensors(module):
            if name in names:
                tensor.data = tensor.data.float()

    @override
    def convert_input(self, data: Any) -> Any:
        if self.autocasts or self.precision == "32-true":
            return data
        return apply_to_collection(
            data, Tensor, lambda t: t.to(self.compute_dtype) if t.is_floating_point() else t
        )

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Modules are created in fp32, so that the masters are exact."""
        return nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.autocasts:
            # No cache of casted weights: there is next to nothing to cast.
            with torch.autocast(self.device_type, dtype=self.compute_dtype, cache_enabled=False):
                yield
            return
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.compute_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default_dtype)

    @override
    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        if self.engine is None:  # nothing would take the loss scale out again
            raise ValueError(
                "`ZeroOffloadPrecision` trains under `zero_offload` only."
                " Pass `Trainer(strategy='zero_offload')`, or `precision=` for another strategy."
            )
        if self.loss_scale.scale != 1.0:
            tensor = tensor * self.loss_scale.scale
        return super().pre_backward(tensor, module)

    @override
    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        """Lets hooks that can look at gradients see them unscaled, as plain Lightning does."""
        if self.engine is not None and gradient_watcher(model) is not None:
            self.engine.unscale_gradients(optimizer)
        super()._after_closure(model, optimizer)

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Asks the engine to clip in the passes it makes anyway; ``p.grad`` stays as it is."""
        if clip_val <= 0 or self.engine is None:
            return
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        by_value = gradient_clip_algorithm == GradClipAlgorithmType.VALUE
        self.engine.clip_next_step(
            optimizer,
            _clipping(float(clip_val), by_value),
        )

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if state := self.loss_scale.state_dict():
            checkpoint[_SCALE_KEY] = state

    @override
    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.loss_scale.load_state_dict(checkpoint.get(_SCALE_KEY, {}))


def _make_loss_scale(precision: str, loss_scale: float | None) -> LossScale:
    if precision.startswith("16"):
        if loss_scale is None:
            return DynamicLossScale()
        return ConstantLossScale(loss_scale, skips_nonfinite=True)
    if loss_scale is not None:
        raise ValueError(
            f"`precision={precision!r}` uses no loss scale, got `loss_scale={loss_scale}`."
            " Leave it out, or choose '16-mixed' or '16-true'."
        )
    return ConstantLossScale()


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _normalisation_parameters(module: nn.Module) -> set[Tensor]:
    return {
        parameter
        for layer in module.modules()
        if isinstance(layer, _NORMALISATION)
        for parameter in layer.parameters(recurse=False)
    }


def _clipping(clip_val: float, by_value: bool) -> Clipping:
    return Clipping(clip_value=clip_val) if by_value else Clipping(max_norm=clip_val)


def announced_clipping(module: pl.LightningModule) -> Clipping:
    """What the Trainer will ask :meth:`ZeroOffloadPrecision.clip_gradients` for."""
    trainer = module.trainer
    if not trainer.gradient_clip_val:
        return Clipping()
    by_value = trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    return _clipping(float(trainer.gradient_clip_val), by_value)


def gradient_watcher(module: pl.LightningModule) -> str | None:
    """The hook of the module or a callback, if any, that may look at gradients before the step."""
    for hook in ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"):
        if is_overridden(hook, module):
            return f"{type(module).__name__}.{hook}"
    for callback in cast(Any, module.trainer).callbacks:  # set late, so not in its type
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            if is_overridden(hook, callback, pl.Callback):
                return f"{type(callback).__name__}.{hook}"
    return None
