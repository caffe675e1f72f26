"""CPUs and memory, in trees that look like /proc and /sys of a machine or a container."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_zoffload import machine

GIB = 2**30


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of 8 CPUs and nothing else. The test may change the environment."""
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    with patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)
        yield tmp_path


def write(tree: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def meminfo(available: int) -> dict[str, str]:
    return {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\nSwapFree: 0 kB\n"
    }


def test_without_limits_the_affinity_mask_counts(tree: Path) -> None:
    assert machine.usable_cpus() == 8


@pytest.mark.parametrize(("count", "expected"), [(6, 6), (None, 1)])
def test_without_affinity_the_machines_cpus_count(
    tree: Path, monkeypatch: pytest.MonkeyPatch, count: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert machine.usable_cpus() == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", 3),
        ("2,4", 2),
        (" 2 , 4", 2),
        ("x,4", 8),
        ("16", 8),
        ("0", 8),
        ("-1", 8),
        ("many", 8),
        ("", 8),
    ],
)
def test_omp_num_threads_is_a_limit(tree: Path, value: str, expected: int) -> None:
    os.environ["OMP_NUM_THREADS"] = value
    assert machine.usable_cpus() == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_quota_of_version_2(tree: Path, quota: str, expected: int) -> None:
    write(tree, {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": quota})
    assert machine.usable_cpus() == expected


def test_quota_of_an_outer_group_counts_too(tree: Path) -> None:
    write(
        tree,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            "sys/fs/cgroup/a/cpu.max": "200000 100000",
        },
    )
    assert machine.usable_cpus() == 2


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("400000", 4)])
def test_quota_of_version_1(tree: Path, quota: str, expected: int) -> None:
    group = "sys/fs/cgroup/cpu/docker/1"
    write(
        tree,
        {
            "proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n0::/\n",
            f"{group}/cpu.cfs_quota_us": quota + "\n",
            f"{group}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert machine.usable_cpus() == expected


def test_version_1_has_outer_groups_and_containers_too(tree: Path) -> None:
    write(
        tree,
        {
            **meminfo(64 * GIB),
            "proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/kube/pod/1\n",
            "sys/fs/cgroup/cpu/kube/pod/1/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/kube/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/kube/cpu.cfs_period_us": "50000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        },
    )
    assert machine.usable_cpus() == 3
    assert machine.available_memory() == GIB


def test_a_containers_group_is_at_the_top_of_its_mount(tree: Path) -> None:
    """The path is the host's, which the container cannot see."""
    write(
        tree,
        {
            "proc/self/cgroup": "0::/system.slice/docker-1.scope\n",
            "sys/fs/cgroup/cpu.max": "100000 100000",
            "sys/fs/cgroup/memory.max": str(4 * GIB),
            "sys/fs/cgroup/memory.current": str(3 * GIB),
            "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            **meminfo(64 * GIB),
        },
    )
    assert machine.usable_cpus() == 1
    assert machine.available_memory() == 2 * GIB


def test_an_accelerator_keeps_a_cpu_for_itself(tree: Path) -> None:
    assert machine.default_host_threads(torch.device("cpu")) == 8
    assert machine.default_host_threads(torch.device("cuda")) == 7
    os.environ["OMP_NUM_THREADS"] = "1"
    assert machine.default_host_threads(torch.device("cuda")) == 1


def test_memory_of_the_machine(tree: Path) -> None:
    write(tree, meminfo(5 * GIB))
    assert machine.available_memory() == 5 * GIB


def test_memory_of_the_tightest_group(tree: Path) -> None:
    write(
        tree,
        {
            **meminfo(64 * GIB),
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": str(GIB),
            "sys/fs/cgroup/job/memory.max": str(8 * GIB),
            "sys/fs/cgroup/job/memory.current": str(2 * GIB),
        },
    )
    assert machine.available_memory() == 6 * GIB


def test_memory_of_version_1(tree: Path) -> None:
    group = "sys/fs/cgroup/memory/slurm"
    write(
        tree,
        {
            **meminfo(64 * GIB),
            "proc/self/cgroup": "4:memory:/slurm\n",
            f"{group}/memory.limit_in_bytes": str(10 * GIB),
            f"{group}/memory.usage_in_bytes": str(9 * GIB),
            f"{group}/memory.stat": f"cache 7\ntotal_inactive_file {2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
        },
    )
    assert machine.available_memory() == 3 * GIB


def test_nothing_is_left_where_a_group_is_over_its_limit(tree: Path) -> None:
    write(
        tree,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "2000",
        },
    )
    assert machine.available_memory() == 0


def test_without_proc_the_physical_memory_counts(tree: Path) -> None:
    expected = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.available_memory() == expected


def test_where_nothing_is_known_nothing_is_refused(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert machine.available_memory() == sys.maxsize


def test_of_this_machine() -> None:
    assert 1 <= machine.usable_cpus() <= (os.cpu_count() or 1)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.available_memory() <= physical
