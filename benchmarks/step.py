"""The whole training step on this machine, and the memory it takes: ours beside the others.

    python benchmarks/step.py --deepspeed-python OTHER_VENV/bin/python

An MLP of square layers in bf16, AdamW, clipping by norm to 1.0. Each contestant runs in a process
of its own, in turns, for some rounds. Memory is the process's peak beyond what it had before the
model was made, per parameter; where the device is the CPU it includes the device's parameters.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 1024
BATCH = 64
MAX_NORM = 1.0
#: The others' names in the table.
FORWARD_BACKWARD = "plain forward and backward"
LIGHTNING = "Lightning, bf16-mixed, fused AdamW"
DEEPSPEED = "DeepSpeed ZeRO-2 offload"
OURS = "ours"
OURS_EAGER = "ours, no clipping (eager)"
OURS_BF16 = "ours, bf16 moments"
CONTESTANTS = [FORWARD_BACKWARD, LIGHTNING, DEEPSPEED, OURS, OURS_EAGER, OURS_BF16]


def make_model(parameters: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(max(1, round(parameters / FEATURES**2))):
        layers += [nn.Linear(FEATURES, FEATURES), nn.ReLU()]
    return nn.Sequential(*layers)


def resident(key: str = "VmRSS") -> int:
    """Bytes, from the system: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def plain_steps(model: nn.Module, x: Tensor) -> Iterator[None]:
    model = model.bfloat16()
    while True:
        model(x.bfloat16()).float().square().mean().backward()
        for parameter in model.parameters():
            parameter.grad = None
        yield


def deepspeed_steps(model: nn.Module, x: Tensor) -> Iterator[None]:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, adamw_mode=True)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    while True:
        loss = engine(x.bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        yield


def lightning_times(model: nn.Module, x: Tensor, steps: int, **options: Any) -> list[float]:
    """Seconds from each step's end to the next one's, the Trainer's own work included."""
    import lightning as L

    times = [time.perf_counter()]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch).float().square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=is_plain)

        def on_train_batch_end(self, *args: Any) -> None:
            times.append(time.perf_counter())

    class ClippingModule(Module):
        """Lightning refuses to clip for a fused optimizer by itself."""

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)

    is_plain = options["strategy"] == "auto"
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(
        ClippingModule() if is_plain else Module(),
        torch.utils.data.DataLoader([x] * steps, batch_size=None),
    )
    return [after - before for before, after in itertools.pairwise(times)]


def measure(contestant: str, parameters: int, steps: int, threads: int) -> dict[str, Any]:
    """Runs in the contestant's own process."""
    torch.set_num_threads(threads)
    import_what_it_needs(contestant)
    base = resident()
    model = make_model(parameters)
    count = sum(p.numel() for p in model.parameters())
    x = torch.randn(BATCH, FEATURES)
    if contestant in (FORWARD_BACKWARD, DEEPSPEED):
        make_steps = plain_steps if contestant == FORWARD_BACKWARD else deepspeed_steps
        seconds = timed_steps(make_steps(model, x), steps)
    else:
        options: dict[str, Any] = {"strategy": "auto"}
        if contestant != LIGHTNING:
            from lightning_zoffload import ZeroOffloadStrategy

            dtype = "bfloat16" if contestant == OURS_BF16 else "float32"
            options["strategy"] = ZeroOffloadStrategy(moment_dtype=dtype)
            options["gradient_clip_val"] = None if contestant == OURS_EAGER else MAX_NORM
        seconds = lightning_times(model, x, steps, **options)
    return {
        "parameters": count,
        "seconds": seconds[2:],  # the first ones allocate and learn
        "bytes_per_parameter": (resident("VmHWM") - base) / count,
    }


def import_what_it_needs(contestant: str) -> None:
    if contestant == DEEPSPEED:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([nn.Parameter(torch.zeros(8))])  # compiles its kernel
        deepspeed.init_distributed()
    elif contestant != FORWARD_BACKWARD:
        import lightning

        import lightning_zoffload

        assert lightning is not None
        assert lightning_zoffload is not None
    layer = nn.Linear(8, 8, dtype=torch.bfloat16)  # torch's own first-use memory
    layer(torch.zeros(8, 8, dtype=torch.bfloat16)).sum().backward()


def timed_steps(steps: Iterator[None], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        next(steps)
        seconds.append(time.perf_counter() - start)
    return seconds


def run_apart(contestant: str, python: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Starts this file in another process and takes what it measured."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(python).absolute().parent), os.environ["PATH"]]),
        "OMP_NUM_THREADS": str(arguments.threads),
        "THP_MEM_ALLOC_ENABLE": "1",  # torch's switch for huge pages: the same for all
        "DS_ACCELERATOR": "cpu",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    if contestant != DEEPSPEED:  # Lightning would take them for a cluster
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name)
    options = ["--parameters", arguments.parameters, "--steps", arguments.steps]
    options += ["--threads", arguments.threads, "--apart", contestant]
    output = subprocess.run(
        [python, __file__, *map(str, options)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    (answer,) = (line for line in output.splitlines() if line.startswith("answer: "))
    result: dict[str, Any] = json.loads(answer.removeprefix("answer: "))
    return result


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    medians = {
        name: statistics.median(s for r in rounds for s in r["seconds"])
        for name, rounds in results.items()
    }
    lines = [
        "| contestant | ms per step (median) | time / ours | peak bytes per parameter |",
        "| --- | --- | --- | --- |",
    ]
    for name, rounds in results.items():
        memory = max(r["bytes_per_parameter"] for r in rounds)
        lines.append(format_row(name, medians[name], medians[name] / medians[OURS], memory))
    return "\n".join(lines) + "\n"


def format_row(name: str, seconds: float, ratio: float, memory: float) -> str:
    return f"| {name} | {seconds * 1e3:.0f} | {ratio:.2f} | {memory:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--deepspeed-python", help="an interpreter with DeepSpeed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step")
    parser.add_argument("--apart", choices=CONTESTANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.apart:
        answer = measure(arguments.apart, arguments.parameters, arguments.steps, arguments.threads)
        print("answer: " + json.dumps(answer), flush=True)
        return
    names = list(arguments.only)
    if DEEPSPEED in names and not arguments.deepspeed_python:
        print("DeepSpeed is left out: pass --deepspeed-python to measure it.")
        names.remove(DEEPSPEED)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            python = arguments.deepspeed_python if name == DEEPSPEED else sys.executable
            results[name].append(run_apart(name, python, arguments))
    text = table(results)
    print(text)
    from measure import describe_machine, write_report  # DeepSpeed's interpreter lacks our package

    count = next(iter(results.values()))[0]["parameters"]
    title = f"Training step, {count:,} parameters, batch {BATCH} x {FEATURES}"
    machine = describe_machine(arguments.threads)
    write_report(arguments.out, title, text, machine, {"results": results})


if __name__ == "__main__":
    main()
