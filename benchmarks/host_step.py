"""The whole host side of a step: 16-bit gradient -> norm, clip, update -> 16-bit parameter.

    python benchmarks/host_step.py --sizes 64Mi --deepspeed-python OTHER_VENV/bin/python

All sides: AdamW, bf16 gradients and parameters, loss scale 1, clipping by norm to 1.0. DeepSpeed's
norm and upcast of the gradient run on the device: a row without them, its host passes alone, and a
row with them, as they would cost here.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from adam import HYPER, adamw_on
from buffers import Buffers
from deepspeed_side import DeepSpeedSide
from measure import Contestant, Rows, describe_machine, markdown, parse_size, race, save, timed
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.host_memory import HostBuffer

MAX_NORM = 1.0
OURS = "ours"
#: statistics read 2; the fused pass reads and writes 2 of exchange, 4 of master, 8 of moments.
OUR_BYTES = 2 + 2 * (2 + 4 + 8)
OUR_BYTES_BF16 = 2 + 2 * (2 + 4 + 4)
#: upcast 2 + 4; norm 4; clip 8; fused step 28; cast 4 + 2.
TORCH_BYTES = 6 + 4 + 8 + 28 + 6
#: unscale 8; adam_update 28; cast 6.
DEEPSPEED_BYTES = 8 + 28 + 6


def ours(name: str, buffers: Buffers, moments: tuple[Tensor, Tensor], traffic: int) -> Contestant:
    """Statistics, then the fused pass with the clip coefficient as its gradient scale."""

    def work() -> None:
        square_sum, _ = kernels.grad_stats(buffers.exchange, num_threads=buffers.threads)
        coefficient = min(1.0, MAX_NORM / (math.sqrt(square_sum) + 1e-6))
        kernels.adam_step(
            buffers.master,
            *moments,
            buffers.exchange,
            **HYPER,
            step=10,
            grad_scale=coefficient,
            num_threads=buffers.threads,
        )

    def prepare() -> None:
        buffers.reset()
        for moment, value in zip(moments, (1e-3, 1e-4), strict=True):
            moment.fill_(value)

    return Contestant(name, traffic, timed(work), prepare)


def torch_step(
    name: str, buffers: Buffers, gradient: Tensor | None, traffic: int, **options: Any
) -> Contestant:
    """Upcast, ``clip_grad_norm_``, ``AdamW.step``, cast.

    The fp32 gradient is in memory that is kept, ``gradient``; without it a new one is made at each
    step, as after torch's own ``zero_grad()``.
    """
    parameter, optimizer = adamw_on(buffers, **options)

    def work() -> None:
        if gradient is None:
            parameter.grad = buffers.exchange.float()
        else:
            parameter.grad = gradient.copy_(buffers.exchange)
        torch.nn.utils.clip_grad_norm_([parameter], MAX_NORM)
        optimizer.step()
        buffers.exchange.copy_(buffers.master)
        optimizer.zero_grad()

    return Contestant(name, traffic, timed(work), buffers.reset)


def contestants(buffers: Buffers, side: DeepSpeedSide | None) -> list[Contestant]:
    def host(dtype: torch.dtype) -> Tensor:
        return HostBuffer(len(buffers.master), dtype, num_threads=buffers.threads).flat

    moments = (buffers.exp_avg, buffers.exp_avg_sq)
    gradient = host(torch.float32)
    runners = [
        ours(OURS, buffers, moments, OUR_BYTES),
        ours(
            "ours, bf16 moments",
            buffers,
            (host(torch.bfloat16), host(torch.bfloat16)),
            OUR_BYTES_BF16,
        ),
        torch_step("torch fused AdamW", buffers, gradient, TORCH_BYTES, fused=True),
        torch_step("torch fused AdamW, new gradients", buffers, None, TORCH_BYTES, fused=True),
        torch_step("torch foreach AdamW", buffers, gradient, TORCH_BYTES + 52, foreach=True),
    ]
    if side is not None:
        passes = ("unscale", "adam", "cast")
        runners += [
            Contestant("DeepSpeed, host passes", DEEPSPEED_BYTES, lambda: side.run(*passes)),
            Contestant(
                "DeepSpeed, with upcast and norm",
                DEEPSPEED_BYTES + 6 + 4,
                lambda: side.run("upcast", "norm", *passes),
            ),
        ]
    return runners


def ratios(rows: Rows) -> str:
    """The others' bytes and time as multiples of ours."""
    lines = [
        "| parameters | against | bytes | time | time, ours with bf16 moments |",
        "| --- | --- | --- | --- | --- |",
    ]
    for numel, runners in rows.items():
        exact, short = runners[:2]
        for c in runners[2:]:
            bytes_ratio = c.bytes_per_parameter / exact.bytes_per_parameter
            lines.append(
                f"| {numel // 2**20}Mi | {c.name} | {bytes_ratio:.2f} |"
                f" {c.median / exact.median:.2f} | {c.median / short.median:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[2**22, 2**26])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/host_step"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: Rows = {}
    for numel in options.sizes:
        side = None
        if options.deepspeed_python:
            side = DeepSpeedSide(options.deepspeed_python, numel, options.threads)
        rows[numel] = contestants(Buffers.of(numel, options.threads), side)
        race(rows[numel], options.repeats)
        if side is not None:
            side.close()
        print(
            markdown({numel: rows[numel]}, OURS), ratios({numel: rows[numel]}), sep="\n", flush=True
        )
    settings = __doc__.split("\n\n")[-1]
    text = f"{settings}\n{markdown(rows, OURS)}\n{ratios(rows)}"
    save(options.out, "Host side of a step", text, rows, describe_machine(options.threads))


if __name__ == "__main__":
    main()
