"""What this process may use of the machine: CPUs and memory, container limits counted.

Linux tells in ``/proc`` and ``/sys``; elsewhere only what Python itself knows counts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

#: Tests put trees of their own here.
_ROOT = Path("/")


def usable_cpus() -> int:
    """CPUs that this process may use.

    The fewest of its affinity mask, its control groups' quotas and ``OMP_NUM_THREADS``.
    """
    affinity = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    limits = [affinity, *(max(1, math.ceil(quota)) for quota in _cpu_quotas())]
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        limits.append(int(asked))
    return min(limits)


def default_host_threads(device: torch.device) -> int:
    """Threads of the host update: all usable CPUs, less one that feeds an accelerator."""
    return max(1, usable_cpus() - (device.type != "cpu"))


def available_memory() -> int:
    """Bytes that this process can still take without swapping or meeting a limit."""
    limits = list(_group_memory())
    for line in _lines("proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    return max(0, min(limits)) if limits else _physical_memory()


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return sys.maxsize


def _cpu_quotas() -> Iterator[float]:
    for folder in _groups("cpu"):
        quota, period = (_words(folder / "cpu.max") or ["max", "1"])[:2]  # version 2
        if quota == "max":
            quota = _word(folder / "cpu.cfs_quota_us", "-1")  # version 1
            period = _word(folder / "cpu.cfs_period_us", "1")
        if int(quota) > 0:
            yield int(quota) / int(period)


def _group_memory() -> Iterator[int]:
    """What each control group leaves. Its file cache can be dropped and does not count."""
    for folder in _groups("memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most = _word(folder / limit, "max")
            if most != "max":
                used = int(_word(folder / usage, "0"))
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                yield int(most) - used + int(stat.get(cache, 0))


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control group and all those around it, for one controller.

    A container may see the host's path in ``/proc`` but have its own group mounted at the top: the
    folders that don't exist are left out, the top is always there.
    """
    for line in _lines("proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount = _ROOT / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = _ROOT / "sys/fs/cgroup" / controller
        else:
            continue
        inner = mount / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(mount) and folder.is_dir():
                yield folder


def _lines(path: str | Path) -> list[str]:
    try:
        return (_ROOT / path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _word(path: Path, default: str) -> str:
    return (_words(path) or [default])[0]
