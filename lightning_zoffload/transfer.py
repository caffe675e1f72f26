"""Copies between device and host. Every byte that crosses the bus goes through here."""

from __future__ import annotations

from typing import Protocol

import torch

from lightning_zoffload.trace import Phase, span


class Transfer(Protocol):
    """The two directions a step needs."""

    def download(self, gradient: torch.Tensor, exchange: torch.Tensor) -> None:
        """Copies a gradient on the device into its place in the exchange buffer."""

    def upload(self, exchange: torch.Tensor, parameter: torch.Tensor) -> None:
        """Copies parameters in the exchange buffer to their place on the device."""


class InlineTransfer:
    """Copies that are complete when the call returns."""

    def download(self, gradient: torch.Tensor, exchange: torch.Tensor) -> None:
        """See :class:`Transfer`."""
        with span(Phase.GRADIENT_DOWN):
            exchange.copy_(gradient)

    def upload(self, exchange: torch.Tensor, parameter: torch.Tensor) -> None:
        """See :class:`Transfer`."""
        with span(Phase.PARAMETER_UP):
            parameter.copy_(exchange)
