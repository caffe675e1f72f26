"""The user's optimizer steps through the engine; it stays the same object.

Only public hooks of ``torch.optim.Optimizer`` are used:

- the step pre-hook makes the closure (or, without one, the hook itself) end by moving the
  gradients to the host;
- torch's own step code then finds no gradients, or the masters (see ``host_update.py``);
- the step post-hook runs the host update;
- the load hooks put loaded state where the engine keeps it, in fp32 on the host. (Torch itself
  would cast it to the dtype and device of the 16-bit parameters.)

``state_dict()`` needs no hook, since the state lies where torch keeps it, in ``optimizer.state``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_zoffload.engine import OffloadEngine
from lightning_zoffload.state_dict import split_state


class OffloadedStep:
    """Routes one optimizer's steps and state loading through the engine until :meth:`detach`."""

    def __init__(self, optimizer: Optimizer, engine: OffloadEngine) -> None:
        self._optimizer = optimizer
        self._engine = engine
        self._under_way = False
        self._parameters: list[Tensor] = []
        self._loaded: list[dict[str, Any] | None] = []
        after = optimizer.register_step_post_hook(self._after_step)
        # Hooks the user registered before must see the updated parameters: ours goes first.
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        self._handles = [
            after,
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def detach(self) -> None:
        """Removes the hooks; the optimizer is a plain one again."""
        for handle in self._handles:
            handle.remove()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # A subclass whose step() calls super().step() comes by twice in one step.
        if isinstance(closure, _ClosureThenBegin) or (
            closure is None and self._under_way and not self._has_gradients()
        ):
            return None
        if self._under_way:  # the step before this one raised
            self._engine.finish_step(optimizer, abandon=True)
            self._under_way = False
        if closure is None:
            self._begin()
            return None
        wrapped = _ClosureThenBegin(closure, self, type(optimizer).__name__)
        return (args[0], *args[2:]), {**kwargs, "closure": wrapped}

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """The user's closure, after which all gradients are on the host."""
        self._engine.open_step(self._optimizer)
        try:
            loss = closure()
        except BaseException:
            self._engine.finish_step(self._optimizer, abandon=True)
            raise
        self._begin()
        return loss

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def _begin(self) -> None:
        # Torch may find masters in their place during the step.
        self._parameters = [p for g in self._optimizer.param_groups for p in g["params"]]
        self._engine.begin_step(self._optimizer)
        self._under_way = True

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._under_way:
            self._engine.finish_step(optimizer)
            self._under_way = False

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        without_state, self._loaded = split_state(state_dict)
        return without_state

    def _after_load(self, optimizer: Optimizer) -> None:
        self._engine.adopt_states(optimizer, self._loaded)
        self._loaded = []


class _ClosureThenBegin:
    """The user's closure, run once."""

    def __init__(
        self, closure: Callable[[], Any], step: OffloadedStep, optimizer_name: str
    ) -> None:
        self._closure = closure
        self._step = step
        self._optimizer_name = optimizer_name
        self._evaluated = False

    def __call__(self) -> Any:
        if self._evaluated:
            raise RuntimeError(
                f"{self._optimizer_name} evaluated its closure a second time in one step, which"
                " zero_offload cannot follow: the gradients are on the host by then."
                " Use an optimizer that evaluates the closure once."
            )
        self._evaluated = True
        return self._step.run_closure(self._closure)
