"""The Adam kernels alone, beside the machine's own bandwidth for the same access pattern.

    python benchmarks/adam.py --sizes 1Mi 64Mi --deepspeed-python OTHER_VENV/bin/python

Ours does more than the others in its pass: it reads the gradient in 16 bit, unscales it, clips it,
and writes the new parameter in 16 bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from buffers import Buffers
from deepspeed_side import DeepSpeedSide
from measure import Contestant, Rows, describe_machine, markdown, parse_size, race, save, timed
from torch import Tensor

from lightning_zoffload import kernels
from lightning_zoffload.host_memory import HostBuffer
from lightning_zoffload.kernels import SegmentSteps

HYPER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
#: Its temporaries are as large as the parameters.
FOREACH_MAX = 2**28
CEILING = "read-modify-write, 28 bytes"


def ours(
    name: str,
    buffers: Buffers,
    exchange: Tensor,
    moments: tuple[Tensor, Tensor],
    *,
    isa: str,
    step: int | SegmentSteps = 10,
) -> Contestant:
    """``adam_step`` on an instruction set. Everything is read and written."""

    def work() -> None:
        with kernels._forced_isa(isa):
            kernels.adam_step(
                buffers.master,
                *moments,
                exchange,
                **HYPER,
                step=step,
                num_threads=buffers.threads,
            )

    def prepare() -> None:
        buffers.reset()
        exchange.copy_(buffers.gradient)
        for moment, value in zip(moments, (1e-3, 1e-4), strict=True):
            moment.fill_(value)

    traffic = 2 * (4 + exchange.itemsize + sum(moment.itemsize for moment in moments))
    return Contestant(name, traffic, timed(work), prepare)


def segments(numel: int, count: int, steps: Callable[[int], Tensor]) -> SegmentSteps:
    """``count`` segments of about equal length, on multiples of 64 elements as in a bucket."""
    ends = torch.arange(1, count + 1) * numel // count // 64 * 64
    ends[-1] = numel
    return SegmentSteps(ends, steps(count))


def all_of_ours(buffers: Buffers) -> Iterator[Contestant]:
    numel = len(buffers.master)

    def host(dtype: torch.dtype) -> Tensor:
        return HostBuffer(numel, dtype, num_threads=buffers.threads).flat

    half, single = host(torch.float16), host(torch.float32)
    fp32 = (buffers.exp_avg, buffers.exp_avg_sq)
    bf16 = (host(torch.bfloat16), host(torch.bfloat16))
    for isa in kernels.available_isas()[1:]:
        yield ours(f"ours, bf16, {isa}", buffers, buffers.exchange, fp32, isa=isa)
        yield ours(f"ours, fp16, {isa}", buffers, half, fp32, isa=isa)
        yield ours(f"ours, fp32, {isa}", buffers, single, fp32, isa=isa)
        yield ours(f"ours, bf16, bf16 moments, {isa}", buffers, buffers.exchange, bf16, isa=isa)
    isa = kernels.available_isas()[-1]
    tables = {
        "of one step": segments(numel, 10_000, lambda count: torch.full((count,), 10)),
        "of 10 000 steps": segments(numel, 10_000, lambda count: torch.arange(count) + 10),
    }
    for name, table in tables.items():
        contestant = f"ours, bf16, 10 000 segments {name}"
        yield ours(contestant, buffers, buffers.exchange, fp32, isa=isa, step=table)


def adamw_on(buffers: Buffers, **options: Any) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
    """Torch's AdamW with our masters as its parameter and our moments as its state."""
    parameter = torch.nn.Parameter(buffers.master)
    optimizer = torch.optim.AdamW([parameter], **HYPER, **options)
    optimizer.state[parameter] = {
        "step": torch.tensor(10.0),
        "exp_avg": buffers.exp_avg,
        "exp_avg_sq": buffers.exp_avg_sq,
    }
    return parameter, optimizer


def torch_adamw(name: str, buffers: Buffers, gradient: Tensor, **options: Any) -> Contestant:
    """Torch's own, on our masters and moments; fp32 gradients."""
    parameter, optimizer = adamw_on(buffers, **options)
    parameter.grad = gradient

    def prepare() -> None:
        buffers.reset()
        gradient.fill_(1e-2)

    # fused: p, m, v read and written, g read. foreach makes many passes with temporaries.
    return Contestant(name, 28 if "fused" in options else 80, timed(optimizer.step), prepare)


def contestants(buffers: Buffers, side: DeepSpeedSide | None) -> list[Contestant]:
    ceiling = Contestant(CEILING, 28, timed(buffers.read_modify_write), buffers.reset)
    gradient = HostBuffer(len(buffers.master), torch.float32, num_threads=buffers.threads).flat
    others = [torch_adamw("torch fused AdamW", buffers, gradient, fused=True)]
    if len(gradient) <= FOREACH_MAX:
        others.append(torch_adamw("torch foreach AdamW", buffers, gradient, foreach=True))
    if side is not None:
        others.append(Contestant("DeepSpeed adam_update", 28, lambda: side.run("adam")))
    return [ceiling, *all_of_ours(buffers), *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, default=[2**20 * 4**i for i in range(5)]
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--deepspeed-max", type=parse_size, default=2**28, help="16 bytes each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/adam"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: Rows = {}
    for numel in options.sizes:
        side = None
        if options.deepspeed_python and numel <= options.deepspeed_max:
            side = DeepSpeedSide(options.deepspeed_python, numel, options.threads)
        runners = contestants(Buffers.of(numel, options.threads), side)
        race(runners, options.repeats)
        if side is not None:
            side.close()
        rows[numel] = [
            Contestant(c.name, c.bytes_per_parameter, float, seconds=c.seconds) for c in runners
        ]
        print(markdown({numel: rows[numel]}, CEILING), flush=True)
    text = markdown(rows, CEILING)
    save(options.out, "Adam kernels", text, rows, describe_machine(options.threads))


if __name__ == "__main__":
    main()
