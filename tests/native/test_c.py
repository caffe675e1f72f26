"""The kernels without Python: under sanitizers, and for 64-bit ARM, with the bits of this CPU.

``native/tests/bits.c`` runs every kernel on every instruction set with one and more threads, fails
if any bit differs, and prints a hash for each case.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = 6 * 2 * (60 + 3)  # lengths, kinds of numbers, updates and passes
ARM_COMPILER = "aarch64-linux-gnu-gcc"
ARM_EMULATOR = "qemu-aarch64"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def build(folder: Path, **options: str) -> Path:
    cmake = str(Path(sysconfig.get_path("scripts")) / "cmake")
    defines = {"ZOFFLOAD_PYTHON": "OFF", "ZOFFLOAD_WERROR": "ON"} | options
    arguments = [f"-D{name}={value}" for name, value in defines.items()]
    run(cmake, "-S", str(ROOT / "native"), "-B", str(folder), *arguments)
    run(cmake, "--build", str(folder), "--target", "bits", "-j2")
    return folder / "bits"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def hashes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What this CPU computes."""
    result = run(str(build(tmp_path_factory.mktemp("host"))))
    lines = result.stdout.splitlines()
    assert len(lines) == CASES
    assert len({line.split()[-1] for line in lines if f"n={3 * 16384 + 1237}" in line}) > 100
    return lines


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, tmp_path: Path, hashes: list[str]) -> None:
    options = {"ZOFFLOAD_SANITIZE": sanitizers, "CMAKE_C_FLAGS_RELEASE": "-O1"}
    bits = str(build(tmp_path, **options))
    # Older versions of the thread sanitizer cannot cope with much address randomisation.
    command = ["setarch", "-R", bits] if shutil.which("setarch") else [bits]
    assert run(*command).stdout.splitlines() == hashes


def test_arm_has_the_bits_of_this_cpu(tmp_path: Path, hashes: list[str]) -> None:
    if platform.machine() == "aarch64":
        pytest.skip("this CPU is an ARM")
    missing = [tool for tool in (ARM_COMPILER, ARM_EMULATOR) if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: gcc-aarch64-linux-gnu, qemu-user)")
    bits = build(
        tmp_path,
        CMAKE_SYSTEM_NAME="Linux",
        CMAKE_SYSTEM_PROCESSOR="aarch64",
        CMAKE_C_COMPILER=ARM_COMPILER,
        CMAKE_EXE_LINKER_FLAGS="-static",
    )
    result = run(ARM_EMULATOR, str(bits))
    assert "instruction sets: scalar neon\n" in result.stderr
    assert result.stdout.splitlines() == hashes
