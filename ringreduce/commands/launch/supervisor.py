"""Runs a job, again after a failure if that is wanted."""

import contextlib
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ringreduce.commands.launch.display import Logs
from ringreduce.commands.launch.hosts import labels
from ringreduce.commands.launch.job import Job
from ringreduce.commands.launch.meeting import Node
from ringreduce.commands.launch.nodes import Nodes
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.processes import Guard
from ringreduce.commands.launch.screen import Screen
from ringreduce.commands.launch.signals import queued_signals
from ringreduce.vocabulary.worker_environment import log_dir_wanted

# All limits where a rank has the keyboard, so that a debugger may wait.
_WEEK_S = 7 * 24 * 3600.0


def supervise(
    plan: JobPlan,
    *,
    node: Node | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
) -> Job:
    """Run a job; return the last attempt, whose `conclude` prints what failed.

    No worker is left then. In the main thread, signals are passed on to the workers. Of the plan's
    choices, those that are None count as absent. If the job has other launchers, `node` is this
    one, and the plan counts this one's workers alone. Raises ConfigError if `log_dir`, a setting, a
    host of the plan or a launcher of `node` cannot be used.
    """
    plan = replace(plan, choices=_completed(plan))

    def say(text: str) -> None:
        print(f"ringreduce: {text}", file=stderr or sys.stderr, flush=True)

    with contextlib.ExitStack() as whole:
        signals, guard = whole.enter_context(queued_signals()), whole.enter_context(Guard())
        nodes = None if node is None else whole.enter_context(closing(Nodes(node, signals, say)))
        attempt = 0
        while True:
            with contextlib.ExitStack() as stack:
                here, logs = plan, None
                if nodes is not None and (meeting := nodes.meet(attempt)) is not None:
                    stack.callback(meeting.close)
                    here, attempt = replace(here, meeting=meeting), meeting.placed.restart
                spread = plan.spread
                names = labels(spread.shares) if spread else list(map(str, range(here.size)))
                screen = Screen(names, stdout or sys.stdout, stderr or sys.stderr)
                if plan.log_dir is not None:
                    # The records of an attempt are kept apart from those of the others.
                    folder = Path(plan.log_dir, f"restart-{attempt}" if attempt else "")
                    logs = Logs(folder, here.ranks)
                    choices = {**plan.choices, "log_dir": str(folder.absolute())}
                    here = replace(here, choices=choices)
                job = Job(here, attempt, screen, logs, guard, signals)
                job.run()
            if attempt >= plan.max_restarts or not job.may_start_again:
                return job
            job.conclude()
            attempt += 1
            screen.say(f"starting again, {attempt} of {plan.max_restarts}")


def _completed(plan: JobPlan) -> dict[str, Any]:
    """The choices that were made, and what follows from them."""
    choices = {name: value for name, value in plan.choices.items() if value is not None}
    if folder := choices.pop("log_dir", None) or log_dir_wanted():
        choices["log_dir"] = str(folder)
    if plan.stdin_rank is not None:
        choices = {"timeout_s": _WEEK_S, "busy_timeout_s": _WEEK_S} | choices
    if "timeout_s" in choices:
        choices.setdefault("join_timeout_s", choices["timeout_s"])
    return choices
