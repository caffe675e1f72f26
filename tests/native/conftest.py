"""Runs a test once for each instruction set that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_zoffload import kernels


@pytest.fixture(params=kernels.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels._forced_isa(request.param):
        assert kernels.isa() == request.param
        yield request.param
