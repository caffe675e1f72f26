"""The loss scale of fp16 training, with ``torch.amp.GradScaler``'s meaning and state format.

A fp16 gradient underflows below 6e-8, so the loss is multiplied by a scale before backward and
the gradients are divided by it in the host update. An update whose gradients overflowed is
skipped and the scale falls; after a run of good steps it grows.
"""

from __future__ import annotations

from typing import Any, Protocol

#: The largest power of two in fp32, in which ``GradScaler`` keeps its scale.
_LARGEST_SCALE = 2.0**127


class LossScale(Protocol):
    """What a step needs of a loss scale."""

    @property
    def scale(self) -> float:
        """Factor on the loss of the next backward."""

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with a non-finite gradient is skipped; if not, no one needs to look."""

    def settle(self, nonfinite: bool) -> bool:
        """Ends a step that used ``scale``: decides whether it is skipped, then moves the scale.

        The one place where the order matters: the step's own scale must have been read before.
        Returns ``True`` if the update must be skipped.
        """

    def state_dict(self) -> dict[str, Any]:
        """State in ``GradScaler``'s format; empty where there is none."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` (ours or ``GradScaler``'s) gave."""


class ConstantLossScale:
    """A fixed scale; without ``skips_nonfinite`` such gradients pass, as in plain torch."""

    def __init__(self, scale: float = 1.0, *, skips_nonfinite: bool = False) -> None:
        if not scale > 0.0:
            raise ValueError(f"`scale` must be positive, got {scale}.")
        self.scale = scale
        self.skips_nonfinite = skips_nonfinite

    def settle(self, nonfinite: bool) -> bool:
        """See :class:`LossScale`."""
        return nonfinite and self.skips_nonfinite

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LossScale`; a constant has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`LossScale`; the constant given at construction stands."""


class DynamicLossScale:
    """A scale that halves on overflow and doubles after ``growth_interval`` good steps in a row.

    Defaults and formula are ``torch.amp.GradScaler``'s.
    """

    skips_nonfinite = True

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        if not init_scale > 0.0:
            raise ValueError(f"`init_scale` must be positive, got {init_scale}.")
        if not growth_factor > 1.0:
            raise ValueError(f"`growth_factor` must be above 1, got {growth_factor}.")
        if not 0.0 < backoff_factor < 1.0:
            raise ValueError(f"`backoff_factor` must be between 0 and 1, got {backoff_factor}.")
        self.scale = init_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._growth_tracker = 0

    def settle(self, nonfinite: bool) -> bool:
        """See :class:`LossScale`."""
        if nonfinite:
            self.scale *= self.backoff_factor
            self._growth_tracker = 0
            return True
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self.scale = min(self.scale * self.growth_factor, _LARGEST_SCALE)
            self._growth_tracker = 0
        return False

    def state_dict(self) -> dict[str, Any]:
        """See :class:`LossScale`."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :class:`LossScale`. An empty state (a run without a scale) changes nothing."""
        if not state:
            return
        self.scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._growth_tracker = int(state["_growth_tracker"])
