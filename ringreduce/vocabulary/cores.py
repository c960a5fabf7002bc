"""How much of its host this process may use: cores, fewer where a cgroup limits its time; memory.

Containers limit time, not cores: all of the host's are there, for a part of each period.
"""

import os
from collections.abc import Iterator
from pathlib import Path


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
    """Whether `ranks` of this host share the cores that this process may use."""
    return ranks > usable_cores()


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
