"""The wheel: built once, it runs on any Python from 3.10 on, without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def call(*command: str | Path, **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = Path(__file__).resolve().parents[2]
    folder = tmp_path_factory.mktemp("wheel")
    call(
        *(sys.executable, "-m", "pip", "wheel", repository, "--no-deps", "--wheel-dir", folder),
        *("--config-settings", f"build-dir={folder / 'build'}"),
    )
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_is_for_the_stable_abi(wheel: Path) -> None:
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("lightning_zoffload", "cp310", "abi3")
    assert platform != "any"


def test_wheel_holds_the_package_and_nothing_else(wheel: Path, repository: Path) -> None:
    names = {
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if not name.split("/")[0].endswith("info")
    }
    sources = {f"lightning_zoffload/{p.name}" for p in repository.glob("lightning_zoffload/*.py")}
    compiled = {name for name in names if name.endswith(".so")}
    assert names == sources | compiled | {"lightning_zoffload/py.typed"}
    assert compiled == {"lightning_zoffload/_native.abi3.so"}


def test_wheel_runs_without_compiler_or_sources(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    (site,) = (home / "lib").glob("python*/site-packages")
    call(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", wheel),
    )
    # Torch and the like come from the environment of the tests. Not by a .pth file's own lines:
    # the editable install there has one too, which would bring the sources back.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    code = """
import torch
import lightning_zoffload
from lightning_zoffload import _native, kernels

tensors = [torch.zeros(100_000) for _ in range(3)] + [torch.ones(100_000, dtype=torch.bfloat16)]
kernels.adam_step(*tensors, lr=0.5, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0, step=1)
print(_native.__file__, *{float(x) for x in (tensors[0].min(), tensors[0].max())})
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    output = call(python, "-Ic", code, cwd=nothing, env=environment | {"PATH": str(nothing)})
    file, number = output.split()
    assert Path(file).is_relative_to(home)
    assert float(number) == -0.5  # the first step is lr long
