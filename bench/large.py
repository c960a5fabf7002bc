"""Training of what is large, a table or a layer: each system's speed, bytes and memory.

All systems are started first and then alternate (`turns`), a few steps each. A system that fails
is left out: MirroredStrategy cannot hold every table.

``bench embedding``, of tables (`bench.embedding_worker`):

    single            plain Keras in one process; -jit: compiled
    mirrored          MirroredStrategy
    parallel          each rank has the table; rows of its gradients travel
    sharded           each rank has a part of the rows (`ShardedEmbedding`)
    ...-touched       with update_rows="touched"

``bench parallel``, of dense layers (`bench.parallel_worker`): single, parallel, split (by columns
and rows), pipeline (in stages).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import report
from bench.facts import facts
from bench.systems import QUIET, Host, ring_processes
from bench.turns import Process, System, SystemFailed, Turns, ended_by_signals

EMBEDDING = (
    *("single", "single-jit", "single-touched", "mirrored"),
    *("parallel", "parallel-touched", "sharded", "sharded-touched"),
)
PARALLEL = ("single", "parallel", "split", "pipeline")
_IN_ONE_PROCESS = ("single", "mirrored")
WARMUP_STEPS = 4
COLUMNS = f"{'system':<17} {'samples/s':>9} {'x':>6} {'step ms':>8} {'KiB sent':>10} {'MiB':>6}"


@dataclass
class _Measured:
    seconds: list[float] = field(default_factory=list)
    nbytes: float = 0.0
    memory_mib: float = 0.0
    # Of a pipeline's steps: seconds if its slowest stage waited for the schedule alone.
    bounds: list[float] = field(default_factory=list)


def run(
    worker: str,
    systems: Sequence[str],
    cases: Sequence[dict[str, Any]],
    *,
    batch: int,
    workers: int,
    rounds: int,
    steps: int,
    json_file: str | None,
) -> None:
    """Measure each of `cases`, options of the module `worker`; print a table and write rows."""
    header = facts()
    report.describe(header, f"{workers} workers, global batch {batch}")
    print("# x: times single; KiB that a rank sends in a step; MiB that its process has needed")
    rows = []
    for case in cases:
        print("#", ", ".join(f"{key} {value}" for key, value in case.items()))
        print(COLUMNS)
        options = [f"--{key}={value}" for key, value in case.items()]
        options.append(f"--global-batch={batch}")
        measured = _measured(worker, systems, options, workers, rounds, steps)
        for name, one in measured.items():
            rows.append({**case, **_row(name, one, measured["single"], batch)})
            print(_line(rows[-1]), flush=True)
            if one.bounds:
                bound_s = float(np.median(one.bounds))
                times = float(np.median(one.seconds)) / bound_s
                print(f"# {name}: {times:.2f} times its schedule's bound, {bound_s * 1e3:.2f} ms")
    report.write(json_file, rows, header)


def _measured(
    worker: str,
    names: Sequence[str],
    options: Sequence[str],
    workers: int,
    rounds: int,
    steps: int,
) -> dict[str, _Measured]:
    measured: dict[str, _Measured] = {}

    def leave_out(failure: SystemFailed) -> None:
        print(f"# {failure.name}: left out, since it {failure.reason}", file=sys.stderr)
        measured.pop(failure.name, None)

    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        turns = stack.enter_context(Turns())
        systems = [_system(worker, name, options, workers) for name in names]
        for name, answer in turns.start(systems).items():
            measured[name] = _Measured()
            if isinstance(answer, SystemFailed):
                leave_out(answer)
        for number in range(-1, rounds):
            for name in list(measured):
                try:
                    answers = turns.ask(name, {"steps": steps if number >= 0 else WARMUP_STEPS})
                except SystemFailed as failure:
                    leave_out(failure)
                    continue
                if number >= 0:
                    one = measured[name]
                    one.seconds += np.mean([a["seconds"] for a in answers], axis=0).tolist()
                    one.nbytes = float(np.mean([a["bytes"] for a in answers]))
                    one.memory_mib = float(max(a["memory_mib"] for a in answers))
                    if answers[0].get("bounds"):
                        one.bounds += np.max([a["bounds"] for a in answers], axis=0).tolist()
    return {name: measured[name] for name in names if name in measured}


def _system(worker: str, name: str, options: Sequence[str], workers: int) -> System:
    command = [sys.executable, "-m", worker, name, *options]
    if name.startswith(_IN_ONE_PROCESS):
        return System(name, [Process(command, QUIET)], lines=1)
    return System(name, ring_processes(command, [Host()] * workers, "auto"), lines=workers)


def _row(name: str, measured: _Measured, single: _Measured, batch: int) -> dict[str, Any]:
    step_s = float(np.median(measured.seconds))
    return {
        "system": name,
        "samples_per_s": batch / step_s,
        "times_single": float(np.median(single.seconds)) / step_s,
        "step_ms": step_s * 1e3,
        "bytes_sent": measured.nbytes,
        "memory_mib": measured.memory_mib,
        "steps": len(measured.seconds),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['system']:<17} {row['samples_per_s']:>9,.0f} {row['times_single']:>6.2f} "
        f"{row['step_ms']:>8.2f} {row['bytes_sent'] / 1024:>10,.1f} {row['memory_mib']:>6,.0f}"
    )
