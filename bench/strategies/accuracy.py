"""Seconds of training until an accuracy on unseen data is reached, for each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.strategies.fleet import Fleet
from bench.strategies.ways import Way

COLUMNS = f"{'system':<15} {'seconds':>8} {'x every':>8} {'steps':>6} {'step':>8} {'accuracy':>8}"
UNITS = f"{'':<15} {'':>8} {'':>8} {'':>6} {'(ms)':>8} {'(%)':>8}"


@dataclass(frozen=True)
class Goal:
    """What is to be reached: an accuracy, in so many steps; which range of it is drawn."""

    accuracy: float
    steps: int
    shown: tuple[float, float]


GOALS = {"digits": Goal(0.97, 400, (0.9, 1)), "text": Goal(0.45, 400, (0.2, 0.6))}
Curve = list[tuple[float, float, float]]


def measure(
    fleet: Fleet, ways: Sequence[Way], task: str, *, rounds: int, every: int
) -> list[dict[str, Any]]:
    """A row for each way: `rounds` trainings from the beginning, in turns, with other seeds.

    Raises:
        SystemFailed: a process ended.
    """
    goal = GOALS[task]
    # Twice a round of those that meet.
    tested = max(1, every // 2)
    curves: dict[str, list[Curve]] = {way.name: [] for way in ways}
    shown = f"{task}, trainings"
    for seed in track(range(rounds), shown, console=Console(stderr=True), transient=True):
        for way in ways:
            order = {"task": task, "seed": seed + 1, "steps": goal.steps, "every": tested}
            answers = fleet.learn(way, order)
            curves[way.name].append(joined([answer["curve"] for answer in answers]))
    return [row(way.name, task, curves[way.name]) for way in ways]


def joined(curves: Sequence[Sequence[Sequence[float]]]) -> Curve:
    """(step, seconds, accuracy): means over the ranks, which test their own weights."""
    return [tuple(point) for point in np.mean(np.array(curves, float), axis=0).tolist()]


def reached(curve: Curve, accuracy: float) -> tuple[float, float] | None:
    """Step and seconds of the first test that was so good; None if none was."""
    return next(((step, at) for step, at, found in curve if found >= accuracy), None)


def row(name: str, task: str, curves: Sequence[Curve]) -> dict[str, Any]:
    """A way's figures: medians over its trainings; None for what a training did not reach."""
    goal = GOALS[task]
    ends = [reached(curve, goal.accuracy) for curve in curves]
    steps, seconds = (
        np.median(np.array(ends, float), axis=0).tolist() if all(ends) else (None, None)
    )
    return {
        "system": name,
        "task": task,
        "goal": goal.accuracy,
        "seconds": seconds,
        "steps": steps,
        "step_ms": float(np.median([curve[-1][1] / (curve[-1][0] - 1) for curve in curves])) * 1e3,
        "accuracy": float(np.median([curve[-1][2] for curve in curves])),
        "curves": curves,
    }


def table_line(row: dict[str, Any], every_s: float | None) -> str:
    """A row as text, with its time as a multiple of that of averaging in every step."""
    seconds = row["seconds"]
    times = None if seconds is None or every_s is None else every_s / seconds

    def cell(value: float | None, width: int, digits: int) -> str:
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    return (
        f"{row['system']:<15} {cell(seconds, 8, 2)} {cell(times, 8, 2)} "
        f"{cell(row['steps'], 6, 0)} {row['step_ms']:>8.1f} {row['accuracy'] * 100:>8.1f}"
    )
