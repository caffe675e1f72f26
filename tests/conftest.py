"""Shared fixtures. Each test must leave no thread, no environment variable and no file behind."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import lightning_zoffload  # noqa: F401 - registers the strategy names

# Time limits for single examples would make the suite depend on the machine's load.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def quiet_lightning() -> Iterator[None]:
    """Lightning's start-up lines and loader hints say nothing about us."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        # Raised by torch on behalf of Lightning, and again under pytest.warns' own name.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield


@pytest.fixture(autouse=True)
def no_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs each test in its own folder; fails it for leaked threads, variables or default dtype."""
    monkeypatch.chdir(tmp_path)
    threads = set(threading.enumerate())
    environment = dict(os.environ)
    yield
    leaked = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    assert not leaked, f"threads left running: {leaked}"
    changed = {
        key
        for key in {*environment, *os.environ}
        if environment.get(key) != os.environ.get(key) and not key.startswith("PYTEST_")
    }
    # Lightning itself records its seed there.
    assert changed <= {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}, f"environment changed: {changed}"
    assert torch.get_default_dtype() is torch.float32


@pytest.fixture
def repository() -> Path:
    """The checkout."""
    return REPOSITORY
