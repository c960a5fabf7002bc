"""A collective of ringreduce, Gloo, Open MPI and TensorFlow's own ring, compared in one run.

All are started first; for each size they then alternate, a few calls each, for several rounds.
A time means the same as in `worker`: single calls back to back, the mean over the ranks, the
median over the calls of all rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import report
from bench.collectives import COLLECTIVES
from bench.facts import facts
from bench.systems import ENTRIES, Entry, Host
from bench.turns import System, SystemFailed, Turns, ended_by_signals

ITEMSIZE = 4
# The length of a turn, within the limits on its calls.
TURN_S, CALLS_PER_TURN_MAX = 0.1, 1000
# Calls at the start of a turn that are not counted: other systems have used the caches since.
UNTIMED_S, UNTIMED_MIN, UNTIMED_MAX = 0.005, 2, 200
PEERS = ("gloo", "openmpi", "tf-ring")
# Wide enough for the longest label; the whole table has 100 columns.
COLUMNS = (
    f"{'size':>6} {'system':<25} {'time':>10} {'p99':>10} {'algbw':>7} {'#wrong':>6}"
    + "".join(f" {'x ' + peer:>9}" for peer in PEERS)
)
UNITS = f"{'':>6} {'':<25} {'(us)':>10} {'(us)':>10} {'(GB/s)':>7}"


@dataclass(frozen=True)
class Pace:
    """How many calls are made.

    Attributes:
        rounds: turns of each system at each size.
        calls_min: timed calls of each system at each size, at least.
        warmup: calls before the first turn is timed.
    """

    rounds: int = 5
    calls_min: int = 20
    warmup: int = 5

    def calls_per_turn_min(self) -> int:
        return -(-self.calls_min // self.rounds)


@dataclass
class Measured:
    """Measurements of one system at one size."""

    once_s: float = 0.0
    wrong: int = 0
    times: list[np.ndarray] = field(default_factory=list)


def run(
    *,
    workers: int,
    size_range: list[int],
    pace: Pace,
    labels: Sequence[str] | None,
    json_file: str | None,
    collective: str = "all_reduce",
) -> int:
    """Measure, print, write rows; 1 if any element was wrong or a system failed."""
    entries = [
        entry
        for entry in ENTRIES
        if collective in entry.collectives and (labels is None or entry.label in labels)
    ]
    header = facts()
    here = [entry for entry in entries if entry.missing() is None]
    header["systems"] = {entry.label: entry.version() or "" for entry in here}
    report.describe(header, f"{workers} ranks; {collective} of float32")
    for entry in entries:
        if entry not in here:
            print(f"# {entry.label}: not installed: {entry.missing()}")
    rows: list[dict[str, Any]] = []
    with ended_by_signals(), Turns() as turns:
        comparison = Comparison(turns, here, [Host()] * workers, pace, collective)
        print(COLUMNS, UNITS, sep="\n", flush=True)
        for size in size_range:
            count = COLLECTIVES[collective].count(size, ITEMSIZE, workers)
            measured = comparison.measure(count)
            rows += with_ratios(measured)
            print(*map(table_line, measured), sep="\n", flush=True)
    report.write(json_file, rows, header)
    return int(comparison.failed or any(row["wrong"] for row in rows))


class Comparison:
    """Running systems, with one rank on each host, that alternate.

    A system that fails, now or later, is reported and left out from then on.
    """

    def __init__(
        self,
        turns: Turns,
        entries: Sequence[Entry],
        hosts: Sequence[Host],
        pace: Pace,
        collective: str = "all_reduce",
    ) -> None:
        self._turns, self._pace, self._size = turns, pace, len(hosts)
        self._collective = collective
        self.failed = False
        systems = [System(entry.label, entry.processes(hosts), len(hosts)) for entry in entries]
        started = turns.start(systems)
        self._entries = []
        for entry in entries:
            answer = started[entry.label]
            if isinstance(answer, SystemFailed):
                self._leave_out(answer)
            elif (reason := _other_transport(entry, answer[0].get("transport"))) is not None:
                print(f"# {entry.label}: left out, since {reason}")
                turns.drop(entry.label)
            else:
                self._entries.append(entry)

    def measure(self, count: int) -> list[dict[str, Any]]:
        """A row for each system, for arrays of `count` elements."""
        found = {entry.label: Measured() for entry in self._entries}
        check = {"do": "check", "count": count, "collective": self._collective}
        self._each(found, lambda label: self._add_wrong(found[label], label, check))
        for _ in range(self._pace.rounds):
            self._each(found, lambda label: self._take_turn(found[label], label, count))
        # Once more, for errors that occur only under load.
        self._each(found, lambda label: self._add_wrong(found[label], label, check))
        return [
            row(entry, self._size, count, found[entry.label], self._collective)
            for entry in self._entries
        ]

    def _each(self, found: dict[str, Measured], act: Any) -> None:
        for entry in list(self._entries):
            try:
                act(entry.label)
            except SystemFailed as failure:
                self._entries.remove(entry)
                self._leave_out(failure)

    def _add_wrong(self, measured: Measured, label: str, order: dict[str, Any]) -> None:
        measured.wrong += sum(answer["wrong"] for answer in self._turns.ask(label, order))

    def _take_turn(self, measured: Measured, label: str, count: int) -> None:
        calls = untimed = 0
        if measured.times:
            once = measured.once_s
            least = self._pace.calls_per_turn_min()
            calls = int(np.clip(TURN_S / once, least, max(least, CALLS_PER_TURN_MAX)))
            untimed = int(np.clip(UNTIMED_S / once, UNTIMED_MIN, UNTIMED_MAX))
        else:
            calls, untimed = self._pace.calls_per_turn_min(), self._pace.warmup
        order = {"do": "time", "count": count, "collective": self._collective}
        answers = self._turns.ask(label, order | {"untimed": untimed, "calls": calls})
        measured.times.append(np.mean([answer["seconds"] for answer in answers], axis=0))
        measured.once_s = float(np.median(measured.times[-1]))

    def _leave_out(self, failure: SystemFailed) -> None:
        self.failed = True
        print(f"# {failure.name}: left out, since it {failure.reason}", file=sys.stderr)


def _other_transport(entry: Entry, used: str | None) -> str | None:
    """A reason to leave the entry out: its ring has chosen another transport."""
    wanted = (entry.transport or "").partition("-")[0]
    if used is None or used == wanted:
        return None
    return f"its ranks use the transport {used}"


def row(
    entry: Entry, world_size: int, count: int, measured: Measured, name: str = "all_reduce"
) -> dict[str, Any]:
    """One system at one size, with the keys of `bench all_reduce`."""
    times = np.concatenate(measured.times)
    time_s, nbytes = float(np.median(times)), count * ITEMSIZE
    algbw = nbytes / time_s / 1e9
    collective = COLLECTIVES[name]
    return {
        "system": entry.system,
        "transport": entry.transport,
        "collective": name,
        "world_size": world_size,
        "dtype": "float32",
        "op": "sum" if collective.reduces else "none",
        "size_bytes": nbytes,
        "time_us": time_s * 1e6,
        "time_us_p99": float(np.percentile(times, 99)) * 1e6,
        "algbw_gb_s": algbw,
        "busbw_gb_s": algbw * collective.bus_factor(world_size),
        "wrong": measured.wrong,
        "calls": len(times),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of one size; ringreduce's get their speed as a multiple of each peer's.

    For algbw and latency this is the same number at one size.
    """
    peers = {row["system"]: row["time_us"] for row in rows if row["system"] in PEERS}
    for row in rows:
        if row["system"] not in PEERS:
            row["ratio_to"] = {name: time / row["time_us"] for name, time in peers.items()}
    return rows


def table_line(row: dict[str, Any]) -> str:
    """A row as text; blank where there is nothing to compare with."""
    label = " ".join(filter(None, (row["system"], row["transport"])))
    ratios = row.get("ratio_to", {})
    return (
        f"{short_size(row['size_bytes']):>6} {label:<25} {row['time_us']:>10.1f} "
        f"{row['time_us_p99']:>10.1f} {row['algbw_gb_s']:>7.3f} {row['wrong']:>6}"
        + "".join(f" {ratios[peer]:>9.2f}" if peer in ratios else " " * 10 for peer in PEERS)
    ).rstrip()


def short_size(nbytes: int) -> str:
    """1024 as 1K; in bytes if it is no whole number of a unit."""
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor}{unit}"
    return str(nbytes)
