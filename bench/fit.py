"""What `rr.fit`'s loop costs beside ``model.fit`` of one process, alternating in one run.

The network is so small that its step is all overhead: Python, callbacks, TensorFlow's calls and the
ring's. Epochs of two lengths tell the cost of a step from what an epoch costs besides its steps.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench import report
from bench.facts import facts
from bench.systems import QUIET, Host, ring_processes, without_ring
from bench.turns import Process, System, SystemFailed, Turns, ended_by_signals

GLOBAL_BATCH = 64
SHORT = 11  # steps of a short epoch
PEER = "model.fit, 1"
_EPOCHS = 3  # in a turn
COLUMNS = (
    f"{'data':<8} {'callback':<8} {'system':<15} {'ms/step':>8} {'x':>6} {'ms/epoch':>9} {'x':>6}"
)


def systems(workers: int) -> list[System]:
    """One process of Keras, one of ours, two rings, one elastic, and what never reduces."""
    options = ["--global-batch", str(GLOBAL_BATCH)]
    command = [sys.executable, "-m", "bench.fit_worker"]
    alone = [Process([*command, "ring", *options], QUIET)]
    ring = ring_processes([*command, "ring", *options], [Host()] * workers, "auto")
    elastic = ring_processes([*command, "ring", *options], [Host()] * workers, "auto")
    variable = {"RINGREDUCE_ELASTIC": "1"}
    elastic = [replace(each, environment={**each.environment, **variable}) for each in elastic]
    apart = without_ring(ring, [*command, "unreduced", *options])
    return [
        System(PEER, [Process([*command, "keras", *options], QUIET)], lines=1),
        System("rr.fit, 1", alone, lines=1),
        System(f"rr.fit, {workers}", ring, lines=workers),
        System(f"elastic, {workers}", elastic, lines=workers),
        System(f"unreduced, {workers}", apart, lines=workers),
    ]


def run(*, workers: int, rounds: int, steps: int, json_file: str | None) -> None:
    """Measure, print a table, and write rows.

    Args:
        workers: ranks of the rings.
        rounds: turns of each system with each kind of data, of three measured epochs.
        steps: of a long epoch; short ones have `SHORT`.
        json_file: where rows go.
    """
    header = facts()
    what = f"20-32-1, Adam, global batch {GLOBAL_BATCH}, epochs of {SHORT} and {steps} steps"
    report.describe(header, what)
    print(f"# x: times {PEER}; ms/epoch: what an epoch costs besides its steps")
    print(COLUMNS, flush=True)
    rows: list[dict[str, Any]] = []
    started = systems(workers)
    names = [system.name for system in started]
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        turns = stack.enter_context(Turns())
        try:
            for answer in turns.start(started).values():
                if isinstance(answer, SystemFailed):
                    raise answer
            for data, looks in itertools.product(("arrays", "dataset"), (False, True)):
                seconds = _measured(turns, names, {"data": data, "looks": looks}, rounds, steps)
                of_case = [
                    row(data, looks, name, seconds[name], seconds[PEER], steps) for name in names
                ]
                print(*map(table_line, of_case), sep="\n", flush=True)
                rows += of_case
        except SystemFailed as failure:
            sys.exit(f"bench: {failure}; its output is above")
    report.write(json_file, rows, header)


def _measured(
    turns: Turns, names: list[str], order: dict[str, Any], rounds: int, steps: int
) -> dict[str, dict[int, list[float]]]:
    """For each system seconds of epochs by their steps; those of the slowest rank."""
    found: dict[str, dict[int, list[float]]] = {name: {SHORT: [], steps: []} for name in names}
    console = Console(stderr=True)
    for _ in track(range(rounds), "turns", console=console, transient=True):
        for count, name in itertools.product((steps, SHORT), names):
            answers = turns.ask(name, {**order, "steps": count, "epochs": _EPOCHS})
            found[name][count] += np.max([each["seconds"] for each in answers], axis=0).tolist()
    return found


def costs(seconds: dict[int, list[float]], steps: int) -> tuple[float, float]:
    """Milliseconds of a step, and of an epoch besides its steps, from medians of both lengths."""
    short, long = (float(np.median(seconds[count])) * 1e3 for count in (SHORT, steps))
    step = (long - short) / (steps - SHORT)
    return step, short - SHORT * step


def row(
    data: str,
    looks: bool,
    name: str,
    own: dict[int, list[float]],
    peer: dict[int, list[float]],
    steps: int,
) -> dict[str, Any]:
    """One system's figures; `looks`: whether a callback looks at each batch."""
    (step, epoch), (peer_step, peer_epoch) = costs(own, steps), costs(peer, steps)
    return {
        "data": data,
        "batch_callback": looks,
        "system": name,
        "step_ms": step,
        "step_times": step / peer_step,
        "epoch_ms": epoch,
        "epoch_times": epoch / peer_epoch,
        "short_epoch_ms": float(np.median(own[SHORT])) * 1e3,
        "epochs": len(own[steps]),
    }


def table_line(row: dict[str, Any]) -> str:
    """A row as text."""
    looks = "batch" if row["batch_callback"] else "-"
    return (
        f"{row['data']:<8} {looks:<8} {row['system']:<15} {row['step_ms']:>8.3f} "
        f"{row['step_times']:>6.2f} {row['epoch_ms']:>9.2f} {row['epoch_times']:>6.2f}"
    )
