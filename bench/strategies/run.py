"""``python -m bench strategies``: measures, prints tables, writes rows, and draws."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import chart, report
from bench.chart import Panel, Series
from bench.facts import facts
from bench.namespaces import require
from bench.strategies import accuracy, seeds, speed
from bench.strategies.fleet import started
from bench.strategies.ways import DRAWN, EVERY_STEP, RING_AND_SERVERS, WAYS, Way
from bench.train import GLOBAL_BATCH
from bench.turns import SystemFailed, ended_by_signals

LINKS = f"{'':<15} {'workers':>7} {'samples/s':>9} {'out':>5} {'in':>5} {'full':>5}"
LINKS_UNITS = f"{'':<15} {'':>7} {'':>9} {'(%)':>5} {'(%)':>5} {'(%)':>5}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all questions have in common.

    Attributes:
        names: of the ways that take part; None: all.
        workers: replicas, ranks and workers.
        rate: of the links between their hosts; None: they are on this one.
        rounds: turns of each way.
        every: steps between meetings, of the ways that have some.
        plot: a folder for drawings.
    """

    names: Sequence[str] | None
    workers: int
    rate: str | None
    rounds: int
    every: int
    plot: str | None
    json_file: str | None

    def ways(self, known: Sequence[Way] = WAYS) -> list[Way]:
        """Those of `known` that take part."""
        return [way for way in known if self.names is None or way.name in self.names]


def run(settings: Settings, *, model: str, steps: int, learns: bool, seed_count: int) -> None:
    """Measure speed, or, if any is asked for, time to an accuracy and final accuracies.

    Args:
        model: whose speed is measured.
        steps: of a turn; rounded up to whole rounds where ranks meet.
        learns: whether to measure the time to an accuracy.
        seed_count: pairs of final accuracies; 0: none.

    Raises:
        UnavailableError: there are no namespaces for the links here.
    """
    if settings.rate is not None:
        require()
    header = facts()
    report.describe(header, f"{settings.workers} workers")
    if settings.rate is None:
        print("# hosts are on this machine, by name: what is between hosts is between processes")
    else:
        print(f"# each worker and the server on its own host, links of {settings.rate}")
    rows = []
    with ended_by_signals():
        try:
            if learns:
                rows += _learn(settings)
            if seed_count:
                rows += _compare_seeds(settings, seed_count)
            if not rows:
                rows += _measure_speed(settings, model, steps)
        except SystemFailed as failure:
            sys.exit(f"bench: {failure}; its output is above")
    report.write(settings.json_file, rows, header)


def _measure_speed(settings: Settings, model: str, steps: int) -> list[dict[str, Any]]:
    rate, every = settings.rate, settings.every
    pace = {"model": model, "rounds": settings.rounds, "steps": steps, "every": every}
    print(f"# model {model}, global batch {GLOBAL_BATCH}, ranks that meet do every {every} steps")
    print(
        "# out, in: what the link that carries most carries in a step; full: how long of the time"
    )
    ways = settings.ways()
    rows = speed.measure(ways, workers=settings.workers, rate=rate, **pace)
    print(speed.COLUMNS, speed.UNITS, *map(speed.table_line, rows), sep="\n", flush=True)
    # Server and ring, as workers are added.
    compared = [way for way in ways if way.name in RING_AND_SERVERS]
    if rate is None or EVERY_STEP not in {way.name for way in compared} or len(compared) < 2:
        return rows
    for workers in range(2, settings.workers):
        rows += speed.measure(compared, workers=workers, rate=rate, **pace)
    names = [way.name for way in compared]
    shown = sorted(
        (row for row in rows if row["system"] in names),
        key=lambda row: (names.index(row["system"]), row["workers"]),
    )
    print("# the fullest link: of the ring's, and the server's")
    print(LINKS, LINKS_UNITS, *map(_link_line, shown), sep="\n", flush=True)
    if settings.plot is not None:
        panels = [
            Panel(
                "Time in which the fullest link is full", "workers", "of the time", _lines(shown)
            ),
            Panel(
                f"Speed, {model}, links of {rate}",
                "workers",
                "samples/s",
                _lines(shown, "samples_per_s"),
                is_log_y=True,
            ),
        ]
        _draw(settings.plot, "strategies-links.svg", panels)
    return rows


def _link_line(row: dict[str, Any]) -> str:
    return f"{row['system']:<15} {row['workers']:>7} {row['samples_per_s']:>9,.0f}" + "".join(
        f" {row[key] * 100:>5.0f}" for key in ("sending_share", "receiving_share", "full_share")
    )


def _lines(rows: Sequence[dict[str, Any]], key: str = "full_share") -> list[Series]:
    series = []
    for number, name in enumerate(dict.fromkeys(row["system"] for row in rows)):
        points = [(row["workers"], row[key]) for row in rows if row["system"] == name]
        series += [Series(name, points, colour=number)]
        series += [Series("", points, are_marks=True, colour=number)]
    return series


def _learn(settings: Settings) -> list[dict[str, Any]]:
    ways, rows = settings.ways(), []
    with started(ways, settings.workers, settings.rate, settings.every) as fleet:
        for task, goal in accuracy.GOALS.items():
            found = accuracy.measure(
                fleet, ways, task, rounds=settings.rounds, every=settings.every
            )
            print(f"# {task}: seconds of training until {goal.accuracy:.0%} of the test are right")
            print(accuracy.COLUMNS, accuracy.UNITS, sep="\n")
            base = next((row["seconds"] for row in found if row["system"] == EVERY_STEP), None)
            print(*(accuracy.table_line(row, base) for row in found), sep="\n", flush=True)
            rows += found
    if settings.plot is not None:
        panels = [curves([row for row in rows if row["task"] == task]) for task in accuracy.GOALS]
        _draw(settings.plot, "strategies-accuracy.svg", panels)
    return rows


def curves(rows: Sequence[dict[str, Any]]) -> Panel:
    """Accuracy over time, of the first training of each way that is drawn."""
    series, task = [], rows[0]["task"]
    low, high = accuracy.GOALS[task].shown
    for row in rows:
        points = [(at, found) for _, at, found in row["curves"][0] if found >= low]
        if points and row["system"] in DRAWN:
            series.append(Series(row["system"], points, colour=DRAWN.index(row["system"])))
    times = [at for each in series for at, _ in each.points]
    ticks = [
        round(digit * 10.0**power, 6)
        for power in range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))))
        for digit in (1, 2, 5)
    ]
    between = [tick for tick in ticks if min(times) <= tick <= max(times)]
    return Panel(
        f"{task}: accuracy on the test",
        "seconds of training",
        "right",
        series,
        shares=(low, high),
        x_ticks=between,
    )


def _compare_seeds(settings: Settings, count: int) -> list[dict[str, Any]]:
    ways = settings.ways(seeds.WAYS)
    with started(ways, settings.workers, settings.rate, settings.every) as fleet:
        rows = seeds.measure(fleet, ways, count)
    print(
        f"# {seeds.TASK}: accuracy after {accuracy.GOALS[seeds.TASK].steps} steps, {count} seeds,"
    )
    print(f"# and the difference to {EVERY_STEP} with the same seed")
    print(seeds.COLUMNS, seeds.UNITS, *map(seeds.table_line, rows), sep="\n", flush=True)
    return rows


def _draw(folder: str, name: str, panels: Sequence[Panel]) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, name).write_text(chart.draw(panels), encoding="utf-8")
    print(f"# drawn: {Path(folder, name)}")
