"""The ways to train that are compared, and the processes that each needs. No Keras here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.systems import QUIET, Host, ring_processes, tf_processes
from bench.turns import Process, System

# Steps for which a meeting that overlaps training takes.
OVERLAP = 5
RANK = 4


@dataclass(frozen=True)
class Way:
    """A way to train.

    Attributes:
        name: in tables and orders.
        group: the processes that it runs in. Those of one group serve all its ways, since they
            take turns anyway.
        strategy: of ringreduce's optimizer: every-step, local or diloco; None: it has none.
        compression: of what that sends.
        overlaps: whether meetings overlap training.
    """

    name: str
    group: str
    strategy: str | None = None
    compression: str = "none"
    overlaps: bool = False

    @property
    def meets(self) -> bool:
        """Whether ranks step alone, and meet every so many steps."""
        return self.strategy in ("local", "diloco")

    @property
    def is_alone(self) -> bool:
        """Whether it has one process, and no link."""
        return self.group in ("single", "mirrored")

    def overlap(self, every: int) -> int:
        """Steps that a meeting takes, where there is one every `every` steps."""
        return min(OVERLAP, every - 1) if self.overlaps else 0


NEVER, EVERY_STEP, SYNCHRONOUS = "unreduced", "every-step", "server-sync"
RING, MULTIWORKER, SERVER = "ring", "multiworker", "server"
WAYS = (
    Way("single", "single"),
    Way("mirrored", "mirrored"),
    Way(NEVER, RING),
    Way(EVERY_STEP, RING, "every-step"),
    Way("bf16", RING, "every-step", "bf16"),
    Way("int8", RING, "every-step", "int8"),
    Way("powersgd", RING, "every-step", "powersgd"),
    Way("local", RING, "local"),
    Way("diloco", RING, "diloco"),
    Way("diloco-overlap", RING, "diloco", overlaps=True),
    Way("diloco-int8", RING, "diloco", "int8", overlaps=True),
    Way("multiworker", MULTIWORKER),
    Way(SYNCHRONOUS, SERVER),
    Way("server-async", SERVER),
)
NAMED = {way.name: way for way in WAYS}
# Whose links are compared as workers are added.
RING_AND_SERVERS = (EVERY_STEP, SYNCHRONOUS, "server-async")
# Whose accuracy over time is drawn: as many as there are colours.
DRAWN = ("single", EVERY_STEP, "int8", "diloco", SYNCHRONOUS, "server-async")


def systems(ways: Sequence[Way], hosts: Sequence[Host], server: Host, every: int) -> list[System]:
    """The processes for `ways`: a rank or worker on each of `hosts`, and one server."""
    made = {}
    for way in ways:
        made.setdefault(way.group, _system(way.group, hosts, server, every))
    return list(made.values())


def _system(group: str, hosts: Sequence[Host], server: Host, every: int) -> System:
    workers = len(hosts)
    options = ["--workers", str(workers)]
    if group == MULTIWORKER:
        command = [sys.executable, "-m", "bench.multiworker", *options]
        return System(group, tf_processes(command, hosts), lines=workers)
    if group == SERVER:
        command = [sys.executable, "-m", "bench.strategies.server", *options]
        return System(group, tf_processes(command, hosts, server), lines=workers + 2)
    command = [sys.executable, "-m", "bench.strategies.worker", group, "--every", str(every)]
    command += options
    if group == RING:
        return System(group, ring_processes(command, hosts, "auto"), lines=workers)
    return System(group, [Process(command, QUIET)], lines=1)
