"""Training with tables: one process, MirroredStrategy, and ringreduce with the table whole or not.

    single            plain Keras in one process; -jit: compiled
    parallel          each rank has the table; rows of its gradients travel
    sharded           each rank has a part of the rows (`ShardedEmbedding`)
    ...-touched       with update_rows="touched"

All are started first and then alternate (`turns`), a few steps each. A system that fails is left
out: MirroredStrategy cannot hold every table.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench import report
from bench.facts import facts
from bench.systems import QUIET, Host, ring_processes
from bench.turns import Process, System, SystemFailed, Turns, ended_by_signals

SYSTEMS = (
    *("single", "single-jit", "single-touched", "mirrored"),
    *("parallel", "parallel-touched", "sharded", "sharded-touched"),
)
GLOBAL_BATCH = 256
WARMUP_STEPS = 4
COLUMNS = (
    f"{'tables':<12} {'ids':<8} {'opt.':<5} {'system':<17} {'samples/s':>9} {'x':>6} "
    f"{'step ms':>8} {'KiB sent':>9} {'MiB':>6}"
)


@dataclass
class _Measured:
    seconds: list[float] = field(default_factory=list)
    nbytes: float = 0.0
    memory_mib: float = 0.0


def run(
    tables: list[str],
    ids: list[str],
    optimizers: list[str],
    *,
    workers: int,
    rounds: int,
    steps: int,
    json_file: str | None,
) -> None:
    """Measure, print a table and write rows; see `bench.embedding_worker` for the names."""
    header = facts()
    report.describe(header, f"{workers} workers, global batch {GLOBAL_BATCH}")
    print("# x: times single; KiB that a rank sends in a step; MiB that its process has needed")
    print(COLUMNS)
    rows = []
    for name in tables:
        for drawn in ids:
            for optimizer in optimizers:
                case = {"tables": name, "ids": drawn, "optimizer": optimizer}
                rows += _measured(case, workers, rounds, steps)
    report.write(json_file, rows, header)


def _measured(case: dict[str, str], workers: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    measured: dict[str, _Measured] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        turns = stack.enter_context(Turns())
        systems = [_system(name, case, workers) for name in SYSTEMS]
        for name, answer in turns.start(systems).items():
            if isinstance(answer, SystemFailed):
                print(f"# {name}: left out, since it {answer.reason}", file=sys.stderr)
            else:
                measured[name] = _Measured()
        for number in range(-1, rounds):
            for name in list(measured):
                try:
                    answers = turns.ask(name, {"steps": steps if number >= 0 else WARMUP_STEPS})
                except SystemFailed as failure:
                    print(f"# {name}: left out, since it {failure.reason}", file=sys.stderr)
                    del measured[name]
                    continue
                if number >= 0:
                    one = measured[name]
                    one.seconds += np.mean([a["seconds"] for a in answers], axis=0).tolist()
                    one.nbytes = float(np.mean([a["bytes"] for a in answers]))
                    one.memory_mib = float(max(a["memory_mib"] for a in answers))
    return [_shown(case, name, one, measured["single"]) for name, one in measured.items()]


def _system(name: str, case: dict[str, str], workers: int) -> System:
    options = [f"--{key}={value}" for key, value in case.items()]
    options += [f"--workers={workers}", f"--global-batch={GLOBAL_BATCH}"]
    command = [sys.executable, "-m", "bench.embedding_worker", name, *options]
    if name.startswith(("parallel", "sharded")):
        processes = ring_processes(command, [Host()] * workers, "auto")
        return System(name, processes, lines=workers)
    return System(name, [Process(command, QUIET)], lines=1)


def _shown(
    case: dict[str, str], name: str, measured: _Measured, single: _Measured
) -> dict[str, Any]:
    step_s = float(np.median(measured.seconds))
    speed = GLOBAL_BATCH / step_s
    times = float(np.median(single.seconds)) / step_s
    print(
        f"{case['tables']:<12} {case['ids']:<8} {case['optimizer']:<5} {name:<17} {speed:>9,.0f} "
        f"{times:>6.2f} {step_s * 1e3:>8.2f} {measured.nbytes / 1024:>9,.1f} "
        f"{measured.memory_mib:>6,.0f}",
        flush=True,
    )
    return {
        **case,
        "system": name,
        "samples_per_s": speed,
        "times_single": times,
        "step_ms": step_s * 1e3,
        "bytes_sent": measured.nbytes,
        "memory_mib": measured.memory_mib,
        "steps": len(measured.seconds),
    }
