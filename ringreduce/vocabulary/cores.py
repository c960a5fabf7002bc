"""How many cores this process may use: those it is bound to, fewer where a cgroup limits its time.

Containers limit time, not cores: all of the host's are there, for a part of each period.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """The cores that this process can keep busy, at least 1; `root` is where /proc and /sys are."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas(root)])))


def are_crowded(ranks: int) -> bool:
    """Whether `ranks` of this host share the cores that this process may use."""
    return ranks > usable_cores()


def _quotas(root: Path) -> Iterator[float]:
    """The limits of this process's cgroups and those around them, in cores."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container may see the host's path, and its own cgroup where the host's root would be:
        # what is not there limits nothing.
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        cgroup = mount / path.lstrip("/")
        for folder in (cgroup, *cgroup.parents[: len(cgroup.parts) - len(mount.parts)]):
            if controllers:
                files = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
                words = [word for file in files for word in _lines(file)]
            else:
                words = " ".join(_lines(folder / "cpu.max")).split()
            if len(words) == 2 and words[0] not in ("max", "-1"):
                yield int(words[0]) / int(words[1])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
