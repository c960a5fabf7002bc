"""Training speed of one process, MirroredStrategy and ringreduce, interleaved in one run.

All systems are started first and then take turns, a few steps each, so that a slow minute
of the machine hurts them alike. While one trains the others sleep.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report

SYSTEMS = ("single", "mirrored", "ringreduce")
CEILING = "unreduced"
GLOBAL_BATCH = 128
WARMUP_STEPS = 4
START_TIMEOUT_S = 180
TURN_TIMEOUT_S = 300


def run(
    model: str, workers: int, rounds: int, steps: int, json_file: str | None, ceiling: bool
) -> None:
    """Measure, print a table, and write rows.

    With `ceiling`, workers that reduce nothing take turns too: what this machine gives to so
    many processes, and so the most that any reduction could leave.
    """
    names = (*SYSTEMS, CEILING) if ceiling else SYSTEMS
    console = Console()
    rows = []
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    with (
        systems(names, model, workers) as lines,
        Progress(console=console, transient=True) as progress,
    ):
        for line in lines.values():
            ask(line, WARMUP_STEPS)
        for _ in progress.track(range(rounds), description=f"{model}, {workers} workers"):
            for name, line in lines.items():
                answer = ask(line, steps)
                seconds[name] += answer["seconds"]
                losses[name] = answer["loss"]
    for name in names:
        rows.append(
            {
                "system": name,
                "model": model,
                "workers": 1 if name == "single" else workers,
                "global_batch": GLOBAL_BATCH,
                "samples_per_s": GLOBAL_BATCH / float(np.median(seconds[name])),
                "step_ms": float(np.median(seconds[name])) * 1e3,
                "step_ms_p99": float(np.percentile(seconds[name], 99)) * 1e3,
                "steps": len(seconds[name]),
                "loss": losses[name],
            }
        )
    console.print(table(rows))
    report.write(json_file, rows)


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows for people, with each system's speed as a multiple of MirroredStrategy's."""
    mirrored = next(row["samples_per_s"] for row in rows if row["system"] == "mirrored")
    result = Table(title=f"{rows[0]['model']}, global batch {GLOBAL_BATCH}", title_justify="left")
    result.add_column("system")
    for column in ("workers", "samples/s", "step ms", "p99", "x mirrored", "loss"):
        result.add_column(column, justify="right")
    for row in rows:
        result.add_row(
            row["system"],
            str(row["workers"]),
            f"{row['samples_per_s']:,.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['step_ms_p99']:.1f}",
            f"{row['samples_per_s'] / mirrored:.2f}",
            f"{row['loss']:.4f}",
        )
    return result


@contextlib.contextmanager
def systems(names: Sequence[str], model: str, workers: int) -> Iterator[dict[str, TextIO]]:
    """Start all systems; yield a line to each; end them, whatever happened."""
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    # Ranks wait for the driver's word longer than a collective should ever take.
    environment = {**os.environ, **quiet, "RINGREDUCE_TIMEOUT_S": str(TURN_TIMEOUT_S)}
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        listener.settimeout(START_TIMEOUT_S)
        options = [
            *("--model", model, "--workers", str(workers)),
            *("--global-batch", str(GLOBAL_BATCH), "--port", str(listener.getsockname()[1])),
        ]
        for name in names:
            module = ["-m", "bench.train_worker", name, *options]
            if name in ("ringreduce", CEILING):
                module = ["-m", "ringreduce", "run", "-n", str(workers), *module]
            # TensorFlow greets at length; what it says matters only when something fails.
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            stack.push(show_on_failure(name, log))
            process = subprocess.Popen(
                [sys.executable, *module], env=environment, stdout=log, stderr=log
            )
            stack.callback(end, process)
        lines: dict[str, TextIO] = {}
        while len(lines) < len(names):
            connection, _ = listener.accept()
            connection.settimeout(TURN_TIMEOUT_S)
            line = stack.enter_context(connection.makefile("rw"))
            connection.close()  # The file keeps it open.
            lines[json.loads(line.readline())["system"]] = line
        yield {name: lines[name] for name in names}
        for line in lines.values():
            line.write('{"steps": 0}\n')
            line.flush()


def show_on_failure(name: str, log: TextIO) -> Callable[..., None]:
    """An exit callback that prints a system's output when the measurement failed."""

    def show(kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            log.seek(0)
            sys.stderr.write(f"--- {name}:\n{log.read()}")

    return show


def ask(line: TextIO, steps: int) -> dict[str, Any]:
    """Have one system train `steps` steps; its report."""
    line.write(json.dumps({"steps": steps}) + "\n")
    line.flush()
    answer = line.readline()
    if not answer:
        sys.exit("a system ended before its time; its own messages are above")
    return json.loads(answer)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a system that was told to end; stop it if it does not."""
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
