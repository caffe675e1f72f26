"""What a kernel shares with its process: environment, floating-point mode, threads, fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from adam_reference import Hyper, assert_same_bits

from lightning_zoffload import kernels

#: A step over several tiles, with subnormal numbers among its inputs and results. Torch itself runs
#: on one thread here: its OpenMP regions hang in a forked child.
STEP = """
import hashlib
import torch
from lightning_zoffload import kernels

def inputs(n=100_000):
    i = torch.arange(n)
    master, gradient = (i % 97 - 48) * 1e-3, (i % 89 - 44) * 1e-2
    exp_avg, exp_avg_sq = (i % 83 - 41) * 1e-3, (i % 79) * 1e-6
    for tensor, value in ((master, 0), (exp_avg, 3e-39), (exp_avg_sq, 1e-40), (gradient, 0)):
        tensor[::3] = value
    return master, exp_avg, exp_avg_sq, gradient.bfloat16()

def step(tensors, num_threads=2):
    kernels.adam_step(*tensors, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=2,
                      num_threads=num_threads)
    data = b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(data).hexdigest()
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", STEP + code],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def output(code: str, **environment: str) -> list[str]:
    result = run(code, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    """What STEP defines, in this process."""
    namespace: dict[str, Any] = {}
    exec(STEP, namespace)
    return namespace


@pytest.fixture(scope="module")
def expected(functions: dict[str, Any]) -> str:
    """The result of a step by the scalar kernel on one thread."""
    tensors = functions["inputs"]()
    assert 0 < float(tensors[1][0]) < 1.2e-38
    with kernels._forced_isa("scalar"):
        return functions["step"](tensors, num_threads=1)


@pytest.mark.parametrize("name", kernels.available_isas())
def test_environment_forces_the_isa(name: str, expected: str) -> None:
    assert output("print(kernels.isa(), step(inputs()))", ZOFFLOAD_ISA=name) == [name, expected]


def test_unknown_isa_is_an_error() -> None:
    result = run("", ZOFFLOAD_ISA="avx1024")
    assert result.returncode != 0
    assert "ValueError: ZOFFLOAD_ISA='avx1024'" in result.stderr
    assert ", ".join(kernels.available_isas()) in result.stderr


def test_flush_to_zero_of_the_caller_changes_nothing(expected: str) -> None:
    code = """
first, second, tiny = inputs(), inputs(), torch.tensor(1e-40)
assert torch.set_flush_denormal(True)
one = step(first)  # the first call: workers inherit the mode of the thread that makes them
assert float(tiny * 1) == 0.0, "the caller's own mode is left as it was"
torch.set_flush_denormal(False)
print(one, step(second))
"""
    assert output(code) == [expected] * 2


def test_forked_child_makes_threads_of_its_own(expected: str) -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")  # about forking a process that has threads: what this is about
print(step(inputs()), flush=True)
for leave in (os._exit, os._exit, sys.exit):
    child = os.fork()
    if child == 0:
        print(step(inputs()), step(inputs(), num_threads=3), flush=True)
        leave(0)
    assert os.waitpid(child, 0)[1] == 0
print(step(inputs()), flush=True)
"""
    assert output(code) == [expected] * 8


def test_calls_at_once_are_right(functions: dict[str, Any], expected: str) -> None:
    results = []

    def work(num_threads: int) -> None:
        for _ in range(20):
            results.append(functions["step"](functions["inputs"](), num_threads))

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


def test_process_with_busy_daemon_thread_ends() -> None:
    code = """
import threading, time
tensors = inputs()
def work():
    while True:
        kernels.grad_stats(tensors[3], num_threads=2)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
print("end")
"""
    assert output(code) == ["end"]


def test_interpreter_runs_while_a_kernel_does() -> None:
    n = 4_000_000
    tensors = (torch.zeros(n), torch.zeros(n), torch.zeros(n), torch.ones(n))
    running = threading.Event()
    done = threading.Event()

    def work() -> None:
        running.set()
        with kernels._forced_isa("scalar"):
            kernels.adam_step(*tensors, **vars(Hyper()), num_threads=1)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    ticks = 0
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 5, "the kernel held the interpreter lock"


def test_many_threads_are_no_error() -> None:
    n = 600_000
    tensors = (torch.ones(n), torch.zeros(n), torch.zeros(n), torch.ones(n))
    assert_same_bits(Hyper().apply(tensors, num_threads=10_000), Hyper().apply(tensors))
