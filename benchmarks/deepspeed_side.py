"""DeepSpeed's host passes, in an interpreter that has DeepSpeed: serves timings on request.

DeepSpeed wants a virtual environment of its own. The benchmarks start this file in it and ask for
one timing at a time, in turns with the other contestants; in between it sleeps.

Requests are lines of JSON. The first, ``{"numel": n}``, allocates; ``{"passes": [...]}`` runs the
named passes in order, and is answered by the seconds that they took together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HYPER = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


class DeepSpeedSide:
    """The asking side. Closing it frees the other side's memory."""

    def __init__(self, python: str, numel: int, threads: int) -> None:
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": str(threads),
            "THP_MEM_ALLOC_ENABLE": "1",  # torch's switch for huge pages, which all others have
            "PATH": os.pathsep.join([str(Path(python).absolute().parent), os.environ["PATH"]]),
        }
        self._process = subprocess.Popen(
            [python, __file__, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._ask({"numel": numel})

    def run(self, *passes: str) -> float:
        """Seconds of these passes, one after the other."""
        seconds: float = self._ask({"passes": passes})
        return seconds

    def close(self) -> None:
        """Ends the other process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("answer: "):  # DeepSpeed prints lines of its own
                return json.loads(line.removeprefix("answer: "))
        raise RuntimeError("The DeepSpeed side has ended. Run this file in its interpreter.")


def make_passes(numel: int) -> tuple[Callable[[], None], dict[str, Callable[[], Any]]]:
    """What resets the buffers, and the passes of DeepSpeed's ZeRO-2 offload step on one partition.

    As in ``runtime/zero/stage_1_and_2.py``: fp32 gradients on the host, multiplied by the inverse
    of scale and clip coefficient; DeepSpeedCPUAdam; fp32 parameters cast to 16 bit. The gradient's
    upcast and its norm are made on the device there.
    """
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.full((numel,), 0.1))
    half = torch.full((numel,), 1e-2, dtype=torch.bfloat16)
    gradient = torch.empty(numel)
    exp_avg, exp_avg_sq = torch.empty(numel), torch.empty(numel)
    optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True)

    def reset() -> None:
        with torch.no_grad():
            parameter.fill_(0.1)
        gradient.fill_(1e-2)
        exp_avg.fill_(1e-3)
        exp_avg_sq.fill_(1e-4)
        half.fill_(1e-2)

    def adam() -> None:
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id,
            10,
            *HYPER.values(),
            True,
            parameter.data,
            gradient,
            exp_avg,
            exp_avg_sq,
        )

    return reset, {
        "upcast": lambda: gradient.copy_(half),
        "norm": lambda: gradient.norm(2),
        "unscale": lambda: gradient.mul_(0.5),
        "adam": adam,
        "cast": lambda: half.copy_(parameter.data),
    }


def time_passes(passes: Sequence[Callable[[], Any]]) -> float:
    start = time.perf_counter()
    for one in passes:
        one()
    return time.perf_counter() - start


def serve() -> None:
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    reset, passes = make_passes(json.loads(sys.stdin.readline())["numel"])
    print("answer: 0.0", flush=True)
    for line in sys.stdin:
        reset()
        time.sleep(0.03)
        seconds = time_passes([passes[name] for name in json.loads(line)["passes"]])
        print(f"answer: {seconds}", flush=True)


if __name__ == "__main__":
    serve()
