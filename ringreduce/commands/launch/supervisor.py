"""Runs a job, again after a failure if that is wanted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ringreduce.commands.launch.hosts import labels
from ringreduce.commands.launch.job import Job
from ringreduce.commands.launch.logs import Logs
from ringreduce.commands.launch.meeting import Node
from ringreduce.commands.launch.nodes import Nodes
from ringreduce.commands.launch.plan import Plan
from ringreduce.commands.launch.processes import Guard
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.signals import queued_signals
from ringreduce.commands.launch.spread import Spread

_WEEK_S = 7 * 24 * 3600.0


def run(arguments: Sequence[str], size: int, **options: Any) -> int:
    """Run Python with `arguments` as `size` workers; print what failed, return the exit code.

    0 when all workers ended with 0, 128 plus its number after a signal that ends the job, else
    the code of the first failure, as a shell shows it; after restarts, that of the last attempt.

    Args:
        options: as for `supervise`, which says the rest.
    """
    return supervise(arguments, size, **options).conclude()


def supervise(
    arguments: Sequence[str],
    size: int,
    *,
    inherited: Sequence[Sequence[int]] = (),
    threads: int | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    max_restarts: int = 0,
    output: str = "all",
    tracebacks: str = "cause",
    stdin_rank: int | None = None,
    variables: Mapping[str, str] | None = None,
    spread: Spread | None = None,
    node: Node | None = None,
    **choices: Any,
) -> Job:
    """Run Python with `arguments` as `size` workers of one job; return the last attempt.

    No worker is left then. In the main thread, signals are passed on to the workers.

    Args:
        arguments: a script, or ``-m`` and a module's name, and the program's own; for all alike.
        size: number of workers.
        inherited: as in `Plan`.
        threads: compute threads for each; by default its host's cores shared out.
        stdout, stderr: where lines go; the process's own by default.
        max_restarts: how often all workers are started again after a failure, with another job
            id and secret; ``RINGREDUCE_RESTART`` counts. A signal to the launcher ends the job.
        output: whose lines are shown as they come: of ``all``, of ``rank0``, or with ``failed``
            only the last ones of the rank that failed first. Of that one they are always shown.
        tracebacks: whose are shown after a failure: that of the ``cause``, or ``all``.
        stdin_rank: the rank that gets this process's standard input. If that is a terminal, the
            rank has it to itself, with Ctrl-C, until it ends. All ranks get time limits of a week
            unless `choices` has others, so that a debugger may wait.
        variables: added to the workers' environment.
        spread: the hosts on which the workers run; by default this one.
        node: which of a job's launchers this one is, if there are others; `size` counts the
            workers of this one alone.
        choices: fields of `Config` for the workers; None: as the environment has it. With
            `log_dir`, their lines are also written there, to ``rank-0.log`` and so on; what is
            kept of the k-th restart goes to its folder ``restart-k``.

    Raises:
        ConfigError: `log_dir` cannot be written to, a setting is out of range, or a host of
            `spread` or a launcher of `node` cannot be used; the text says which and why.
    """
    choices = {name: value for name, value in choices.items() if value is not None}
    if stdin_rank is not None:
        choices = {"timeout_s": _WEEK_S, "busy_timeout_s": _WEEK_S} | choices
    if "timeout_s" in choices:
        choices.setdefault("join_timeout_s", choices["timeout_s"])
    plan = Plan(
        arguments,
        size,
        threads,
        output,
        tracebacks,
        stdin_rank,
        choices,
        inherited,
        variables or {},
        spread,
    )

    def say(text: str) -> None:
        print(f"ringreduce: {text}", file=stderr or sys.stderr, flush=True)

    with contextlib.ExitStack() as whole:
        signals, guard = whole.enter_context(queued_signals()), whole.enter_context(Guard())
        nodes = None if node is None else whole.enter_context(Nodes(node, signals, say))
        attempt = 0
        while True:
            with contextlib.ExitStack() as stack:
                here, logs = plan, None
                if nodes is not None and (meeting := nodes.meet(attempt)) is not None:
                    stack.callback(meeting.close)
                    here, attempt = replace(here, meeting=meeting), meeting.placed.restart
                names = labels(spread.shares) if spread else list(map(str, range(here.size)))
                screen = Screen(names, stdout or sys.stdout, stderr or sys.stderr)
                if "log_dir" in choices:
                    folder = _folder_of(attempt, Path(choices["log_dir"]))
                    logs = stack.enter_context(Logs(folder, here.ranks))
                    here = replace(here, choices={**choices, "log_dir": str(folder.absolute())})
                job = Job(here, attempt, screen, logs, guard, signals)
                if nodes is not None and here.meeting is None:
                    job.give_up()
                else:
                    job.run()
            if attempt >= max_restarts or not job.may_start_again:
                return job
            job.conclude()
            attempt += 1
            screen.say(f"starting again, {attempt} of {max_restarts}")


def _folder_of(attempt: int, folder: Path) -> Path:
    """Where the records of an attempt are kept, apart from those of the others."""
    return folder / f"restart-{attempt}" if attempt else folder
