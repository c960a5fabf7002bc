"""Training speed of one process, MirroredStrategy and ringreduce, alternating in one run.

Over links MultiWorkerMirroredStrategy takes part too, on hosts like ringreduce's.

All systems are started first and then alternate (`turns`), a few steps each. For ringreduce,
in ``model.fit`` and in `rr.fit`, two parts of a step are measured too: how long the ring was busy
with gradients, and how long the step was blocked by it. The difference was hidden behind the
computation.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from bench import report
from bench.facts import facts
from bench.namespaces import require, shaped
from bench.systems import QUIET, RINGS, Host, ring_processes, tf_processes
from bench.turns import Process, System, SystemFailed, Turns, ended_by_signals

SYSTEMS = ("single", "mirrored", *RINGS)
MULTIWORKER = "multiworker"
CEILING = "unreduced"
# Marks a system that XLA compiles. MirroredStrategy fails with InvalidArgumentError then.
JIT = "-jit"
# Stands before the compression of ringreduce's gradients, or SHARDED.
CODED = "+"
# With an update that is divided; of CEILING, with that part of it.
SHARDED = "sharded"
GLOBAL_BATCH = 128
WARMUP_STEPS = 4
COLUMNS = (
    f"{'system':<14} {'samples/s':>9} {'x':>10} {'step':>7} {'p99':>7} "
    f"{'compute':>7} {'waiting':>7} {'comm.':>7} {'hidden':>6} {'loss':>7}"
)
UNITS = f"{'':<35}" + f" {'(ms)':>7}" * 5 + f" {'(%)':>6}"


@dataclass
class Measured:
    """Measurements of one system; for each turn a mean over its ranks."""

    seconds: list[float] = field(default_factory=list)
    waiting_s: list[float] = field(default_factory=list)
    communication_s: list[float] = field(default_factory=list)
    loss: float = 0.0
    pss_mb: float = 0.0
    transport: str | None = None

    def add(self, answers: Sequence[dict[str, Any]]) -> None:
        """A turn's answers, one of each rank."""
        self.seconds += np.mean([answer["seconds"] for answer in answers], axis=0).tolist()
        self.loss = float(np.mean([answer["loss"] for answer in answers]))
        self.pss_mb = sum(answer.get("pss_mb", 0.0) for answer in answers)  # but MultiWorker's
        for times, name in (
            (self.waiting_s, "waiting_s"),
            (self.communication_s, "communication_s"),
        ):
            times.append(float(np.mean([answer[name] for answer in answers])))


def run(
    model: str,
    *,
    workers: int,
    rounds: int,
    steps: int,
    transport: str,
    link: str | None,
    latency_ms: float,
    ceiling: bool,
    jit: bool,
    compressions: Sequence[str],
    sharded: bool,
    optimizer: str,
    bucket_bytes: int,
    json_file: str | None,
) -> None:
    """Measure, print a table, and write rows.

    Args:
        model: one of `models.MODELS`.
        workers: replicas and ranks.
        rounds, steps: turns of each system, and steps in each.
        transport: of ringreduce's ranks.
        link: with a rate, each of ringreduce's and MultiWorkerMirroredStrategy's ranks runs on its
            own host (`namespaces`).
        latency_ms: of those links, each way.
        ceiling: whether workers that reduce nothing take part too: the highest speed of so
            many processes on this machine, with any reduction.
        jit: whether systems that XLA can compile take part in that form too.
        compressions: with which ringreduce takes part, besides without.
        sharded: whether it takes part with an update that is divided among the ranks too.
        optimizer: of all systems: sgd, with momentum, or adam.
        bucket_bytes: of ringreduce's optimizer.
        json_file: where rows go.

    Raises:
        UnavailableError: the namespaces for `link` cannot be made here.
    """
    names = (*SYSTEMS, CEILING) if ceiling else SYSTEMS
    names += tuple(f"ringreduce{CODED}{name}" for name in compressions)
    if sharded:
        names += tuple(f"{name}{CODED}{SHARDED}" for name in (*RINGS, *[CEILING][:ceiling]))
    if jit:
        names += tuple(name + JIT for name in names if name != "mirrored")
    if link is not None:
        names += (MULTIWORKER,)
    compared = "mirrored" if link is None else MULTIWORKER
    if link is not None:
        require()
    header = facts()
    what = f"{workers} workers, global batch {GLOBAL_BATCH}, model {model}, {optimizer}"
    report.describe(header, what)
    if link is not None:
        late = f" and {latency_ms:g} ms each way" if latency_ms else ""
        print(f"# ringreduce and {MULTIWORKER}: each worker on its own host, links of {link}{late}")
    measured = {name: Measured() for name in names}
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        hosts = [Host()] * workers
        if link is not None:
            hosts = stack.enter_context(shaped(workers, link, latency_ms))
        turns = stack.enter_context(Turns())
        try:
            how = ["--optimizer", optimizer, "--bucket-bytes", str(bucket_bytes)]
            systems = [system(name, model, hosts, transport, how) for name in names]
            start(turns, systems, measured)
            for name in names:
                turns.ask(name, {"model": model, "steps": WARMUP_STEPS})
            for _ in track(range(rounds), "turns", console=Console(stderr=True), transient=True):
                for name in names:
                    measured[name].add(turns.ask(name, {"model": model, "steps": steps}))
        except SystemFailed as failure:
            sys.exit(f"bench: {failure}; its output is above")
    rows = [row(name, model, workers, link, measured[name]) for name in names]
    other = next(row["samples_per_s"] for row in rows if row["system"] == compared)
    print(f"# x: times {compared}")
    print(COLUMNS, UNITS, *(table_line(row, other) for row in rows), sep="\n")
    known = (row for row in rows if row["pss_mb"])
    memory = ", ".join(f"{row['system']} {row['pss_mb']:.0f}" for row in known)
    print(*textwrap.wrap(f"# memory of all ranks together (PSS, MB): {memory}", 90), sep="\n# ")
    report.write(json_file, rows, header)


def system(
    name: str, model: str, hosts: Sequence[Host], transport: str, how: Sequence[str]
) -> System:
    """How a system is started: as one process, or as a rank on each host."""
    workers = len(hosts)
    kind, _, compression = name.removesuffix(JIT).partition(CODED)
    compression = compression or "none"
    options = ["--model", model, "--workers", str(workers), "--global-batch", str(GLOBAL_BATCH)]
    if kind == MULTIWORKER:
        command = [sys.executable, "-m", "bench.multiworker", "--workers", str(workers)]
        return System(name, tf_processes(command, hosts), lines=workers)
    options += [*how, "--compression", compression if compression != SHARDED else "none"]
    command = [sys.executable, "-m", "bench.train_worker", kind, *options]
    if compression == SHARDED:
        command.append("--sharded")
    if name.endswith(JIT):
        command.append("--jit")
    if kind in (*RINGS, CEILING):
        return System(name, ring_processes(command, hosts, transport), lines=workers)
    return System(name, [Process(command, QUIET)], lines=1)


def start(turns: Turns, systems: Sequence[System], measured: dict[str, Measured]) -> None:
    """Start all systems. Raises SystemFailed if one fails: the comparison needs them all."""
    for name, answer in turns.start(systems).items():
        if isinstance(answer, SystemFailed):
            raise answer
        measured[name].transport = answer[0]["transport"]


def row(
    name: str, model: str, workers: int, link: str | None, measured: Measured
) -> dict[str, Any]:
    """One system's figures. Those about communication are None except for ringreduce."""
    step_ms = float(np.median(measured.seconds)) * 1e3
    kind = name.removesuffix(JIT).partition(CODED)[0]
    result = {
        "system": name,
        "model": model,
        "workers": 1 if kind == "single" else workers,
        "global_batch": GLOBAL_BATCH,
        "samples_per_s": GLOBAL_BATCH / step_ms * 1e3,
        "step_ms": step_ms,
        "step_ms_p99": float(np.percentile(measured.seconds, 99)) * 1e3,
        "steps": len(measured.seconds),
        "loss": measured.loss,
        "pss_mb": measured.pss_mb,
        "transport": measured.transport if kind in RINGS else None,
        "link": link if kind in (*RINGS, MULTIWORKER) else None,
        "compute_ms": None,
        "waiting_ms": None,
        "communication_ms": None,
        "hidden_share": None,
    }
    if kind in RINGS:
        waiting_ms = float(np.median(measured.waiting_s)) * 1e3
        communication_ms = float(np.median(measured.communication_s)) * 1e3
        result |= {
            "compute_ms": step_ms - waiting_ms,
            "waiting_ms": waiting_ms,
            "communication_ms": communication_ms,
            "hidden_share": hidden_share(waiting_ms, communication_ms),
        }
    return result


def hidden_share(waiting: float, communication: float) -> float | None:
    """Part of the communication that the step did not wait for, 0 to 1; None without any."""
    if communication <= 0:
        return None
    return min(1.0, max(0.0, 1 - waiting / communication))


def table_line(row: dict[str, Any], other: float) -> str:
    """A row as text, with its speed as a multiple of `other`."""

    def cell(value: float | None, width: int, digits: int = 1) -> str:
        return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"

    hidden = row["hidden_share"]
    return (
        f"{row['system']:<14} {row['samples_per_s']:>9,.0f} "
        f"{row['samples_per_s'] / other:>10.2f} {row['step_ms']:>7.1f} "
        f"{row['step_ms_p99']:>7.1f} {cell(row['compute_ms'], 7)} {cell(row['waiting_ms'], 7)} "
        f"{cell(row['communication_ms'], 7)} "
        f"{cell(None if hidden is None else hidden * 100, 6, 0)} {row['loss']:>7.4f}"
    )
