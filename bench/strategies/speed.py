"""Samples per second of each way, its bytes on the wire, and how full its fullest link is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.strategies.fleet import Turn, started
from bench.strategies.ways import EVERY_STEP, NEVER, SERVER, Way
from bench.train import GLOBAL_BATCH

WARMUP_STEPS = 4
COLUMNS = (
    f"{'system':<15} {'samples/s':>9} {'x never':>8} {'x every':>8} {'step':>8} "
    f"{'out':>7} {'in':>7} {'full':>5}"
)
UNITS = f"{'':<15} {'':>9} {'':>8} {'':>8} {'(ms)':>8} {'(MB)':>7} {'(MB)':>7} {'(%)':>5}"


def measure(
    ways: Sequence[Way],
    *,
    model: str,
    workers: int,
    rate: str | None,
    rounds: int,
    steps: int,
    every: int,
) -> list[dict[str, Any]]:
    """A row for each of `ways`, measured in turns.

    Raises:
        UnavailableError, SystemFailed: as `started`.
    """
    with started(ways, workers, rate, every) as fleet:
        turns: dict[str, list[Turn]] = {way.name: [] for way in ways}
        for way in ways:
            fleet.speed(way, model, min(WARMUP_STEPS, steps_of(way, steps, every)))
        shown = f"turns of {workers} workers"
        for _ in track(range(rounds), shown, console=Console(stderr=True), transient=True):
            for way in ways:
                turns[way.name].append(fleet.speed(way, model, steps_of(way, steps, every)))
    rows = [row(way, model, workers, rate, turns[way.name]) for way in ways]
    speeds = {each["system"]: each["samples_per_s"] for each in rows}
    for each in rows:
        for key, other in (("x_never", NEVER), ("x_every", EVERY_STEP)):
            each[key] = each["samples_per_s"] / speeds[other] if other in speeds else None
    return rows


def steps_of(way: Way, steps: int, every: int) -> int:
    """Steps of a turn: whole rounds where ranks meet, and half as many with a slow server."""
    if way.meets:
        return -(-steps // every) * every
    return -(-steps // 2) if way.group == SERVER else steps


def row(
    way: Way, model: str, workers: int, rate: str | None, turns: Sequence[Turn]
) -> dict[str, Any]:
    """A way's figures: medians over its turns."""

    def middle(of: Callable[[Turn], float | None]) -> float | None:
        values = [value for turn in turns if (value := of(turn)) is not None]
        return float(np.median(values)) if values else None

    step_s = float(np.median([turn.step_s for turn in turns]))
    # Equal shares; one sample or two may be left over.
    batch = GLOBAL_BATCH if way.is_alone else GLOBAL_BATCH // workers * workers
    return {
        "system": way.name,
        "model": model,
        "workers": 1 if way.group == "single" else workers,
        "global_batch": batch,
        "link": None if way.is_alone else rate,
        "samples_per_s": batch / step_s,
        "step_ms": step_s * 1e3,
        "turns": len(turns),
        "step_ms_of_turns": [turn.step_s * 1e3 for turn in turns],
        "sent_bytes": middle(lambda turn: turn.sent),
        "received_bytes": middle(lambda turn: turn.received),
        "sending_share": middle(lambda turn: turn.sending),
        "receiving_share": middle(lambda turn: turn.receiving),
        "full_share": middle(lambda turn: turn.full),
    }


def table_line(row: dict[str, Any]) -> str:
    """A row as text."""

    def cell(value: float | None, width: int, digits: int, factor: float = 1) -> str:
        text = "-" if value is None else format(value * factor, f".{digits}f")
        return f"{text:>{width}}"

    return (
        f"{row['system']:<15} {row['samples_per_s']:>9,.0f} {cell(row['x_never'], 8, 2)} "
        f"{cell(row['x_every'], 8, 2)} {row['step_ms']:>8.1f} "
        f"{cell(row['sent_bytes'], 7, 2, 1e-6)} {cell(row['received_bytes'], 7, 2, 1e-6)} "
        f"{cell(row['full_share'], 5, 0, 100)}"
    )
