"""The cores and the memory that a process may use: limited by cgroups of both versions."""

import os

import pytest

from ringreduce.commands.launch.local import default_threads
from ringreduce.vocabulary import cores
from ringreduce.vocabulary.cores import are_crowded, kernel_kills, memory_limit, usable_cores

V1 = "5:memory:/job\n4:cpu,cpuacct:/outer/job\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)


def host(folder, cgroup, **limits):
    """A root directory where this process is in `cgroup`."""
    files = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{k}": v for k, v in limits.items()}
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def quota(cgroup, quota_us, period_us):
    """A limit of cores as version 1 has it."""
    times = {"quota": quota_us, "period": period_us}
    return {f"{cgroup}/cpu.cfs_{name}_us": f"{us}\n" for name, us in times.items()}


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, 8),
        ("0::/job\n", {"job/cpu.max": "300000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/job\n", {"job/cpu.max": "20000 100000\n"}, 1),
        ("0::/job\n", {"job/cpu.max": "1600000 100000\n"}, 8),
        # The smallest around it counts, whichever it is.
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "400000 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2),
        # Not another one's.
        ("0::/a\n", {"b/cpu.max": "200000 100000\n"}, 8),
        # A container that sees the host's path, and its own cgroup at the top.
        ("0::/kubepods/pod7/c1\n", {"cpu.max": "400000 100000\n"}, 4),
        (V1, quota("cpu/outer/job", 500_000, 100_000), 5),
        (V1, quota("cpu/outer/job", -1, 100_000) | quota("cpu/outer", 150_000, 50_000), 3),
    ],
)
def test_the_smallest_limit_counts(tmp_path, cgroup, limits, expected):
    assert usable_cores(host(tmp_path, cgroup, **limits)) == expected


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/job\n", {"job/memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/memory.max": "3000\n", "a/b/memory.max": "4000\n"}, 3000),
        (V1, {"memory/job/memory.limit_in_bytes": "5000\n"}, 5000),
    ],
)
def test_the_smallest_limit_of_memory_counts(tmp_path, cgroup, limits, expected):
    assert memory_limit(host(tmp_path, cgroup, **limits)) == expected


@pytest.mark.parametrize(
    ("cgroup", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.events": "oom_kill 2\n", "a/memory.events": "oom_kill 3\n"}, 2),
        ("0::/kubepods/pod7/c1\n", {"memory.events": "oom 9\noom_kill 4\noom_group_kill 0\n"}, 4),
        (V1, {"memory/job/memory.oom_control": "oom_kill_disable 0\noom_kill 5\n"}, 5),
        ("0::/\n", {"../../../proc/vmstat": "oom_kill 6\n"}, 6),
        ("0::/\n", {}, 0),
    ],
)
def test_what_the_kernel_has_killed_is_counted(tmp_path, cgroup, limits, expected):
    assert kernel_kills(host(tmp_path, cgroup, **limits)) == expected


def test_a_host_without_cgroups_has_its_cores(tmp_path, monkeypatch):
    assert usable_cores(tmp_path) == 8
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(tmp_path) == 6


def test_threads_and_waiting_follow_the_limit(tmp_path, monkeypatch):
    root = host(tmp_path, "0::/job\n", **{"job/cpu.max": "400000 100000\n"})
    monkeypatch.setattr(cores.usable_cores, "__defaults__", (root,))
    assert default_threads(2) == 2
    assert not are_crowded(4)
    assert are_crowded(5)
