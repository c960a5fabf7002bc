"""Real rings whose calls are measured: one at a time, of any ranks on any hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from bench.collectives import COLLECTIVES
from bench.systems import WORKER, Host, ring_processes
from bench.turns import System, SystemFailed, Turns

ITEMSIZE = 4
# Limits on the calls before any is counted, and on those that are.
UNTIMED_S, UNTIMED_MAX = 0.2, 8
CALLS_MIN, CALLS_MAX = 3, 60


class FailedError(Exception):
    """A ring did not start, ended, or computed something wrong."""


class Ranks:
    """A running ring: `label` for errors, `size` ranks."""

    def __init__(self, turns: Turns, label: str, size: int, seconds: float) -> None:
        self._turns, self._label, self.size, self._seconds = turns, label, size, seconds

    def measure(self, collective: str, size_bytes: int) -> float:
        """Seconds of a call on an array of about `size_bytes`: median, of the ranks' mean.

        Raises:
            FailedError: a rank ended, or its result differs from numpy's.
        """
        count = COLLECTIVES[collective].count(size_bytes, ITEMSIZE, self.size)
        order = {"count": count, "collective": collective}
        try:
            wrong = self._turns.ask(self._label, {"do": "check", **order})
            if any(answer["wrong"] for answer in wrong):
                raise FailedError(f"{self._label}: wrong results in {collective}")
            once = float(self._time(order, 1, 1)[0])
            untimed = int(np.clip(UNTIMED_S / once, 1, UNTIMED_MAX))
            calls = int(np.clip(self._seconds / once, CALLS_MIN, CALLS_MAX))
            return float(np.median(self._time(order, untimed, calls)))
        except SystemFailed as failure:
            raise FailedError(str(failure)) from None

    def _time(self, order: dict[str, object], untimed: int, calls: int) -> np.ndarray:
        timed = {"do": "time", "untimed": untimed, "calls": calls}
        answers = self._turns.ask(self._label, order | timed)
        return np.mean([answer["seconds"] for answer in answers], axis=0)


@contextlib.contextmanager
def started(
    turns: Turns, label: str, hosts: Sequence[Host], transport: str, seconds: float
) -> Iterator[Ranks]:
    """A ring of a rank on each host (a host may be there several times), until the block ends.

    `seconds` is about how long each size is measured.

    Raises:
        FailedError: it did not start.
    """
    processes = ring_processes([*WORKER, "ringreduce"], hosts, transport)
    found = turns.start([System(label, processes, len(hosts))])[label]
    if isinstance(found, SystemFailed):
        raise FailedError(str(found))
    try:
        yield Ranks(turns, label, len(hosts), seconds)
    finally:
        with contextlib.suppress(KeyError):  # It has failed, and is gone.
            turns.drop(label)
