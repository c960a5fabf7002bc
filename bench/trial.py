"""What the trial of a training's step costs: seconds from `fit` to the end of its first step.

Each turn starts processes anew, since the first trial of a process is what a user waits for.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench import report
from bench.facts import facts
from bench.namespaces import require, shaped
from bench.systems import QUIET, Host, ring_processes, without_ring
from bench.turns import Process, System, SystemFailed, Turns, ended_by_signals

MODELS = ("mlp", "cnn", "transformer", "resnet50")
GLOBAL_BATCH = 32
PEER, APART, WITHOUT, WITH = NAMES = "model.fit", "unreduced", "without", "with"
COLUMNS = (
    f"{'model':<12} " + " ".join(f"{name:>10}" for name in NAMES) + f" {'trial':>8} {'from':>7} "
    f"{'to':>7}"
)


def systems(model: str, hosts: list[Host]) -> list[System]:
    """One process of Keras, one on each of `hosts` by itself, and two rings with a rank on each."""
    command = [sys.executable, "-m", "bench.trial_worker"]
    options = [model, "--global-batch", str(GLOBAL_BATCH)]
    ring = [*command, "ring", *options]
    apart = without_ring(ring_processes(ring, hosts, "auto"), [*command, "unreduced", *options])
    return [
        System(PEER, [Process([*command, "keras", *options], QUIET)], lines=1),
        System(APART, apart, lines=len(hosts)),
        *(
            System(name, ring_processes(ring, hosts, "auto"), lines=len(hosts))
            for name in (WITHOUT, WITH)
        ),
    ]


def run(
    *, models: list[str], workers: int, rounds: int, link: str | None, json_file: str | None
) -> None:
    """Measure, print a table, and write rows: medians of `rounds` turns of each model.

    With a rate as `link` each rank is on its own host. UnavailableError: these cannot be made here.
    """
    if link is not None:
        require()
    header = facts()
    what = f"{workers} workers, Adam, global batch {GLOBAL_BATCH}, {rounds} turns"
    report.describe(header, what)
    if link is not None:
        print(f"# ringreduce: each worker on its own host, links of {link}")
    print("# s from fit to the end of its first step; trial: with less without, of each turn")
    print(COLUMNS, flush=True)
    rows: list[dict[str, Any]] = []
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        hosts = [Host()] * workers
        if link is not None:
            hosts = stack.enter_context(shaped(workers, link))
        try:
            for model in models:
                found: dict[str, list[float]] = {name: [] for name in NAMES}
                for _ in track(range(rounds), model, console=console, transient=True):
                    for name, seconds in _turn(model, hosts).items():
                        found[name].append(seconds)
                rows.append(row(model, found))
                print(table_line(rows[-1]), flush=True)
        except SystemFailed as failure:
            sys.exit(f"bench: {failure}; its output is above")
    report.write(json_file, rows, header)


def _turn(model: str, hosts: list[Host]) -> dict[str, float]:
    """Seconds of each system, of its slowest rank, in processes of their own."""
    with Turns() as turns:
        started = systems(model, hosts)
        for answer in turns.start(started).values():
            if isinstance(answer, SystemFailed):
                raise answer
        checks = {PEER: None, APART: "data", WITHOUT: "data", WITH: True}
        return {
            name: max(each["seconds"] for each in turns.ask(name, {"check": check}))
            for name, check in checks.items()
        }


def row(model: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """A model's figures."""
    trial = np.subtract(found[WITH], found[WITHOUT])
    medians = {name: float(np.median(seconds)) for name, seconds in found.items()}
    middle = np.percentile(trial, [50, 25, 75]).tolist()
    return {"model": model, **medians, "trial": middle[0], "from": middle[1], "to": middle[2]}


def table_line(row: dict[str, Any]) -> str:
    """A row as text."""
    medians = " ".join(f"{row[name]:>10.2f}" for name in NAMES)
    return (
        f"{row['model']:<12} {medians} {row['trial']:>8.2f} {row['from']:>7.2f} {row['to']:>7.2f}"
    )
