"""The cores and the memory that a process may use: limited by cgroups of both versions."""

import os

import pytest

from ringreduce.commands.launch.local import default_threads
from ringreduce.vocabulary import cores
from ringreduce.vocabulary.config import binding_wanted
from ringreduce.vocabulary.cores import (
    are_crowded,
    kernel_kills,
    memory_limit,
    shares_of_cores,
    usable_cores,
)
from ringreduce.vocabulary.errors import ConfigError

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


def test_ranks_with_cores_of_their_own_are_as_crowded_as_all_together(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3})
    assert are_crowded(2)
    monkeypatch.setenv("RINGREDUCE_CORES", "8")
    assert not are_crowded(8)
    assert are_crowded(9)


def topology(folder, places, **speeds):
    """A root directory whose cores have those packages, dies and cores."""
    files = {}
    for cpu, place in enumerate(places):
        names = ("physical_package_id", "die_id", "core_id")
        files |= {f"cpu{cpu}/topology/{n}": f"{at}\n" for n, at in zip(names, place, strict=True)}
        files |= {f"cpu{cpu}/{n}": f"{each[cpu]}\n" for n, each in speeds.items()}
    for name, text in files.items():
        file = folder / "sys/devices/system/cpu" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_each_share_has_neighbours_and_both_threads_of_a_core(tmp_path):
    # Linux numbers the second threads after all first ones; packages here alternate.
    root = topology(tmp_path, [(cpu % 2, 0, cpu // 2 % 2) for cpu in range(8)])
    assert shares_of_cores(2, root=root) == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert shares_of_cores(4, root=root) == [{0, 4}, {2, 6}, {1, 5}, {3, 7}]


def test_cores_of_one_numa_node_stay_together(tmp_path):
    root = topology(tmp_path, [(0, 0, cpu) for cpu in range(8)])
    for cpu in range(8):
        (root / f"sys/devices/system/cpu/cpu{cpu}/node{cpu % 2}").mkdir()
    assert shares_of_cores(2, root=root) == [{0, 2, 4, 6}, {1, 3, 5, 7}]


def test_shares_are_equal_and_what_is_left_is_nobodys(tmp_path):
    assert shares_of_cores(8, root=tmp_path) == [{cpu} for cpu in range(8)]
    assert shares_of_cores(3, wanted=True, root=tmp_path) == [{0, 1}, {2, 3}, {4, 5}]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_nothing_is_bound_by_itself_that_cannot_be_divided(tmp_path, count):
    assert shares_of_cores(count, root=tmp_path) is None


def test_nothing_is_bound_by_itself_where_others_may_use_the_same_cores(tmp_path):
    root = host(tmp_path, "0::/job\n", **{"job/cpu.max": "400000 100000\n"})
    assert shares_of_cores(2, root=root) is None
    with pytest.raises(ConfigError, match=r"the time of 4 of 8 cores\. Leave out --bind"):
        shares_of_cores(2, wanted=True, root=root)


@pytest.mark.parametrize("name", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
def test_nothing_is_bound_by_itself_where_some_cores_are_slower(tmp_path, name):
    places = [(0, 0, cpu) for cpu in range(8)]
    alike = topology(tmp_path / "alike", places, **{name: [5700] * 4 + [5450] * 4})
    assert shares_of_cores(2, root=alike) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    unlike = topology(tmp_path / "unlike", places, **{name: [5700] * 4 + [3800] * 4})
    assert shares_of_cores(2, root=unlike) is None
    assert shares_of_cores(2, wanted=True, root=unlike) is not None


@pytest.mark.parametrize(
    ("text", "expected"), [(None, None), ("", None), ("0", False), ("1", True)]
)
def test_whether_ranks_are_to_be_bound_is_read(monkeypatch, text, expected):
    if text is not None:
        monkeypatch.setenv("RINGREDUCE_BIND", text)
    assert binding_wanted() is expected
    assert binding_wanted({"RINGREDUCE_BIND": "1"}) is True
    with pytest.raises(ConfigError, match="RINGREDUCE_BIND is 'off'; accepted: 0 or 1"):
        binding_wanted({"RINGREDUCE_BIND": "off"})


def test_who_wants_cores_that_are_not_there_is_told(tmp_path, monkeypatch):
    assert shares_of_cores(9, wanted=False, root=tmp_path) is None
    with pytest.raises(ConfigError, match="cannot bind 9 ranks to cores: this process may use 8"):
        shares_of_cores(9, wanted=True, root=tmp_path)
    monkeypatch.delattr(os, "sched_setaffinity")
    assert shares_of_cores(2, root=tmp_path) is None
    with pytest.raises(ConfigError, match="this system has no call for that"):
        shares_of_cores(2, wanted=True, root=tmp_path)
