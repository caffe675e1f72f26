"""Times contestants in turns and reports medians: what all benchmarks of this folder share."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_zoffload import kernels


@dataclass
class Contestant:
    """Something that updates parameters.

    Attributes:
        name: For the table.
        bytes_per_parameter: Memory traffic of one run, by counting the passes.
        run: Does the work once and returns the seconds that it took.
        prepare: Puts the buffers in order before each run; not timed.
    """

    name: str
    bytes_per_parameter: float
    run: Callable[[], float]
    prepare: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the runs after the first, which warms up."""
        return statistics.median(self.seconds[1:])


def timed(work: Callable[[], Any]) -> Callable[[], float]:
    """``work`` as a function that returns its seconds."""

    def run() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return run


def race(contestants: Sequence[Contestant], repeats: int) -> None:
    """Runs all in turns, so that each meets the same moods of the machine."""
    for _ in range(repeats + 1):
        for contestant in contestants:
            contestant.prepare()
            time.sleep(0.03)  # idle OpenMP threads spin for a while
            contestant.seconds.append(contestant.run())


def parse_size(text: str) -> int:
    """``64Mi`` is 64 * 2**20."""
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    number, unit = (text[:-2], text[-2:]) if text[-2:] in units else (text, "")
    return int(number) * units.get(unit, 1)


def show_size(numel: int) -> str:
    """The inverse of :func:`parse_size`."""
    return f"{numel // 2**20}Mi" if numel % 2**20 == 0 else str(numel)


def describe_machine(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":")[1].strip() if names else cpu
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "threads": threads,
        "instruction_sets": kernels.available_isas(),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


Rows = dict[int, list[Contestant]]


def markdown(rows: Rows, unit: str) -> str:
    """A table of median seconds, bandwidth, and time relative to ``unit``, for each size."""
    lines = [
        f"| parameters | contestant | ms (median) | bytes/parameter | GB/s | time / {unit} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for numel, contestants in rows.items():
        base = next(c.median for c in contestants if c.name == unit)
        for c in contestants:
            speed = c.bytes_per_parameter * numel / c.median / 1e9
            lines.append(
                f"| {show_size(numel)} | {c.name} | {c.median * 1e3:.2f} |"
                f" {c.bytes_per_parameter:g} | {speed:.1f} | {c.median / base:.2f} |"
            )
    return "\n".join(lines) + "\n"


def save(out: Path, title: str, text: str, rows: Rows, machine: dict[str, Any]) -> None:
    """Writes ``out``.md, .json with every sample, and .png."""
    samples = {
        show_size(numel): {c.name: c.seconds for c in contestants}
        for numel, contestants in rows.items()
    }
    write_report(out, title, text, machine, {"seconds": samples})
    plot(out.with_suffix(".png"), title, rows)


def write_report(
    out: Path, title: str, text: str, machine: dict[str, Any], samples: dict[str, Any]
) -> None:
    """Writes ``out``.md and .json."""
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    out.with_suffix(".md").write_text(f"# {title}\n\n{facts}\n\n{text}")
    out.with_suffix(".json").write_text(
        json.dumps({"machine": machine, **samples}, indent=1) + "\n"
    )


def plot(path: Path, title: str, rows: Rows) -> None:
    """Parameters per second over parameters, a line for each contestant."""
    try:
        import matplotlib
    except ImportError:
        print("No plot without matplotlib: pip install matplotlib")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[tuple[int, float]]] = {}
    for numel, contestants in rows.items():
        for c in contestants:
            lines.setdefault(c.name, []).append((numel, numel / c.median / 1e9))
    figure, axes = plt.subplots(figsize=(9, 5))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel="parameters", ylabel="Gparameters / s")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
