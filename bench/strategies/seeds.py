"""The accuracy that a way ends with, beside that of averaging in every step, seed by seed.

A pair has the same seed, hence the same first weights, the same data, and its order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench.strategies.accuracy import GOALS
from bench.strategies.fleet import Fleet
from bench.strategies.ways import EVERY_STEP, NAMED, Way

# With the way that they are compared with.
WAYS = tuple(
    NAMED[name] for name in (EVERY_STEP, "int8", "powersgd", "local", "diloco", "diloco-overlap")
)
TASK = "digits"
COLUMNS = f"{'system':<15} {'accuracy':>8} {'difference':>10} {'95 % interval':>16} {'worst':>7}"
UNITS = f"{'':<15} {'(%)':>8} {'(points)':>10} {'(points)':>16} {'':>7}"


def measure(fleet: Fleet, ways: Sequence[Way], seeds: int) -> list[dict[str, Any]]:
    """A row for each of `ways`.

    Raises:
        SystemFailed: a process ended.
    """
    found: dict[str, list[float]] = {way.name: [] for way in ways}
    for seed in track(range(seeds), "seeds", console=Console(stderr=True), transient=True):
        for way in ways:
            steps = GOALS[TASK].steps
            # No test before the end.
            order = {"task": TASK, "seed": seed + 1, "steps": steps, "every": steps + 1}
            found[way.name].append(fleet.learn(way, order)[0]["accuracy"])
    return [row(name, found[name], found[EVERY_STEP]) for name in found]


def row(name: str, accuracies: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """A way's accuracies beside those of the same seeds with another way."""
    differences = (np.array(accuracies) - np.array(others)) * 100
    low, high = interval(differences)
    return {
        "system": name,
        "task": TASK,
        "accuracies": list(accuracies),
        "accuracy": float(np.mean(accuracies)),
        "difference_points": float(np.mean(differences)),
        "interval_points": (low, high),
        "worst_points": float(np.min(differences)),
    }


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the mean, of a paired t test."""
    from scipy import stats

    count = len(differences)
    mean, spread = float(np.mean(differences)), float(np.std(differences, ddof=1))
    half = float(stats.t.ppf(0.975, count - 1)) * spread / math.sqrt(count)
    return mean - half, mean + half


def table_line(row: dict[str, Any]) -> str:
    """A row as text."""
    if row["system"] == EVERY_STEP:
        return f"{row['system']:<15} {row['accuracy'] * 100:>8.2f}"
    low, high = row["interval_points"]
    return (
        f"{row['system']:<15} {row['accuracy'] * 100:>8.2f} {row['difference_points']:>+10.2f} "
        f"{f'{low:+.2f} to {high:+.2f}':>16} {row['worst_points']:>+7.2f}"
    )
