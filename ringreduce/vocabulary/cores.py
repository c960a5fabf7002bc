"""How much of its host this process may use: cores, fewer where a cgroup limits its time; memory.

Containers limit time, not cores: all of the host's are there, for a part of each period.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ringreduce.vocabulary.config import cores_of_ranks
from ringreduce.vocabulary.errors import ConfigError


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process can keep busy, at least 1; `root` is where /proc and /sys are."""
    return max(1, int(core_limit(root)))


def core_limit(root: Path = Path("/")) -> float:
    """The same, as a limit of time may be: 1.5 cores, or less than 1."""
    return min([len(bound_cores()), *_quotas(root)])


def bound_cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def shares_of_cores(
    count: int, *, wanted: bool | None = None, root: Path = Path("/")
) -> list[set[int]] | None:
    """For each of `count` processes its own of the cores that this one may use, equally many.

    Neighbours: of one NUMA node, package and die, and both threads of a core. None where they are
    not `wanted` or, if that is None, where it is not plain that they pay: cores that are not alike
    or cannot be divided, a limit of time, which others may use up on the same cores, or one
    process.

    Raises:
        ConfigError: they are `wanted`, and there are fewer cores or such a limit, or the system
            binds no processes.
    """
    if wanted is False:
        return None
    cores, quota, can_bind = bound_cores(), core_quota(root), hasattr(os, "sched_setaffinity")
    is_limited = quota is not None and quota < len(cores)
    if wanted is None and (
        count == 1 or not can_bind or is_limited or len(cores) % count or not _alike(cores, root)
    ):
        return None
    if not can_bind or is_limited or len(cores) < count:
        raise ConfigError(
            f"cannot bind {count} ranks to cores: "
            + (
                "this system has no call for that"
                if not can_bind
                else f"this process may use the time of {quota:g} of {len(cores)} cores"
                if is_limited
                else f"this process may use {len(cores)}"
            ),
            remedy="Leave out --bind, or RINGREDUCE_BIND.",
        )
    by_place = sorted(cores, key=lambda core: (*_place(core, root), core))
    each = len(cores) // count
    return [set(by_place[i * each : (i + 1) * each]) for i in range(count)]


def _alike(cores: Collection[int], root: Path) -> bool:
    """Whether they are equally fast, as far as the system says."""
    folder = root / "sys/devices/system/cpu"
    speeds = (
        "".join(_lines(folder / f"cpu{core}/cpu_capacity"))
        or "".join(_lines(folder / f"cpu{core}/cpufreq/cpuinfo_max_freq"))
        for core in cores
    )
    known = [int(speed) for speed in speeds if speed.isdecimal()]
    return not known or min(known) > 0.8 * max(known)


def _place(core: int, root: Path) -> tuple[int, ...]:
    """NUMA node, package, die and core of a logical one; 0 where the system does not say."""
    folder = root / f"sys/devices/system/cpu/cpu{core}"
    node = next((int(node.name.removeprefix("node")) for node in folder.glob("node[0-9]*")), 0)
    names = "physical_package_id", "die_id", "core_id"
    return node, *(int("".join(_lines(folder / "topology" / name)) or 0) for name in names)


def core_quota(root: Path = Path("/")) -> float | None:
    """How much time this process's cgroups may have, in cores; None for no limit."""
    return min(_quotas(root), default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """How many bytes this process's cgroups may have; None for no limit."""
    limits = [
        int(line)
        for folder, is_old in _cgroups(root, "memory")
        for line in _lines(folder / ("memory.limit_in_bytes" if is_old else "memory.max"))
        if line != "max"
    ]
    return min(limits, default=None)


def kernel_kills(root: Path = Path("/")) -> int:
    """How many processes of this one's cgroup the kernel has killed for lack of memory.

    Where there is no such cgroup: of the whole host.
    """
    files = [
        folder / ("memory.oom_control" if is_old else "memory.events")
        for folder, is_old in _cgroups(root, "memory")
    ]
    for file in (*files, root / "proc/vmstat"):
        for line in _lines(file):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def are_crowded(ranks: int) -> bool:
    """Whether `ranks` of this host share the cores that they may use: this process, or all."""
    return ranks > (cores_of_ranks() or usable_cores())


def _quotas(root: Path) -> Iterator[float]:
    """The limits of time of this process's cgroups, in cores."""
    for folder, is_old in _cgroups(root, "cpu"):
        if is_old:
            files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
            words = [word for file in files for word in _lines(file)]
        else:
            words = " ".join(_lines(folder / "cpu.max")).split()
        if len(words) == 2 and words[0] not in ("max", "-1"):
            yield int(words[0]) / int(words[1])


def _cgroups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's cgroups and those around them, and whether of version 1."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # A container may see the host's path, and its own cgroup where the host's root would be:
        # what is not there limits nothing.
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        cgroup = mount / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents[: len(cgroup.parts) - len(mount.parts)]):
            yield folder, bool(controllers)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
