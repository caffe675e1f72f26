from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zoffload.registration import NAMES, register

OURS, THEIRS = "import lightning_zoffload", "import pytorch_lightning as pl"

#: Prints the error of each misuse on a line of its own.
MISUSE = """
for strategy in ("zero_offload", "zero_offload_delayed", lightning_zoffload.ZeroOffloadStrategy()):
    try:
        pl.Trainer(strategy=strategy, accelerator="cpu")
    except Exception as error:
        print("ERROR", type(error).__name__, error)
"""


def output(*lines: str) -> str:
    """What a program prints; importing pytorch_lightning in this process would leak."""
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


def test_names_are_registered_and_again_is_no_error() -> None:
    register()
    assert set(NAMES) <= set(StrategyRegistry.available_strategies())


def test_pytorch_lightning_is_not_imported_by_us() -> None:
    assert output(OURS, "import sys; print('pytorch_lightning' in sys.modules)") == "False\n"


@pytest.mark.skipif(find_spec("pytorch_lightning") is None, reason="it is not installed")
@pytest.mark.parametrize("imports", [(OURS, THEIRS), (THEIRS, OURS)], ids=["first", "second"])
def test_a_pytorch_lightning_trainer_says_which_package_to_import(
    imports: tuple[str, str],
) -> None:
    printed = output(*imports, MISUSE).splitlines()
    errors = [line for line in printed if line.startswith("ERROR")]
    assert len(errors) == 3
    for error in errors[:2]:
        assert error.startswith("ERROR TypeError")
        assert "from `lightning.pytorch`" in error
    assert "a strategy of `lightning`, not of `pytorch_lightning`" in errors[2]
