"""Names of the phases of a step, and the span that marks them in ``torch.profiler``.

Every phase of the engine runs inside one span, so a profile reads as the paper's algorithm and
no second instrumentation is needed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import Enum

from torch.profiler import record_function


class Phase(Enum):
    """The phases of one step, in their order."""

    GRADIENT_DOWN = "gradient down"
    STATISTICS = "statistics"
    HOST_UPDATE = "host update"
    PARAMETER_UP = "parameter up"


def span(phase: Phase) -> AbstractContextManager[object]:
    """Marks the enclosed work as ``phase`` for ``torch.profiler``; nearly free without one."""
    return record_function(f"zero_offload: {phase.value}")
