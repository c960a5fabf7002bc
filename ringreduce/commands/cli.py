"""The command line: ``ringreduce run -n 4 train.py``, also as ``python -m ringreduce``."""

import io
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ringreduce.commands import options
from ringreduce.commands.launch.display import OUTPUTS
from ringreduce.commands.launch.hosts import parse_hosts, share_out
from ringreduce.commands.launch.nodes import node_of
from ringreduce.commands.launch.plan import JobPlan
from ringreduce.commands.launch.program import as_unchanged, check_program
from ringreduce.commands.launch.spread import Spread, read_hostfile, spread_over
from ringreduce.commands.launch.supervisor import supervise
from ringreduce.vocabulary.config import elastic_minimum
from ringreduce.vocabulary.errors import RingReduceError
from ringreduce.vocabulary.worker_environment import chosen_variables, forwarded_environment

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training over a ring of processes.",
)

# Options of launchers that say how many workers there are, and where.
_COUNTS = re.compile(r"-np?\d*|-H|--(np|nproc|workers|num-proc|nproc.per.node|hosts)(=.*)?")


@app.callback()
def _root(version: bool = options.VERSION) -> None:
    pass


class _Run(TyperCommand):
    """`run`, whose option --elastic needs no number."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with_value = {n for p in self.params if not getattr(p, "is_flag", 1) for n in p.opts}
        args, at = list(args), 0
        while at < len(args) and args[at].startswith("-"):  # Up to the script.
            if args[at] == "--elastic" and not "".join(args[at + 1 : at + 2]).isdecimal():
                args[at] = "--elastic=1"
            at += 2 if args[at] in with_value else 1
        return super().parse_args(ctx, args)


# Options after the script belong to the script. A paragraph is one line, which the help wraps.
@app.command(
    cls=_Run,
    context_settings={"allow_interspersed_args": False},
    no_args_is_help=True,
    help="Run a script as N workers that form a ring, on this host or on several.\n\n"
    "Every line they print begins with the rank that wrote it. When one fails, all are stopped, "
    "and the first failure in time is shown and gives the exit code.",
)
def run(
    script: str = options.SCRIPT,
    arguments: list[str] | None = options.ARGUMENTS,
    workers: int | None = options.WORKERS,
    hosts: str | None = options.HOSTS,
    hostfile: Path | None = options.HOSTFILE,
    nnodes: int | None = options.NNODES,
    node_rank: int | None = options.NODE_RANK,
    module: bool = options.MODULE,
    threads_per_worker: int | None = options.THREADS_PER_WORKER,
    bind: bool | None = options.BIND,
    max_restarts: int = options.MAX_RESTARTS,
    elastic: int | None = options.ELASTIC,
    no_comeback: bool = options.NO_COMEBACK,
    grace: float = options.GRACE,
    output: str | None = options.OUTPUT,
    profile: bool = options.PROFILE,
    unchanged: bool = options.UNCHANGED,
    stdin: int | None = options.STDIN,
    timeout: float | None = options.TIMEOUT,
    busy_timeout: float | None = options.BUSY_TIMEOUT,
    transport: str | None = options.TRANSPORT,
    log_dir: Path | None = options.LOG_DIR,
    trace: Path | None = options.TRACE,
    encryption: str | None = options.ENCRYPTION,
    env: list[str] | None = options.ENV,
    rendezvous: str | None = options.RENDEZVOUS,
    ssh: str | None = options.SSH,
    python: str | None = options.PYTHON,
) -> None:
    """Start the workers, and leave with the job's exit code."""
    program, chosen, node = _program(script, arguments, module), chosen_variables(env or ()), None
    elastic = elastic or elastic_minimum(chosen)
    spread = _spread(hosts, hostfile, workers, ssh, python, rendezvous)
    if spread is not None:
        no_others = {"--nnodes": nnodes, "--node-rank": node_rank, "--stdin": stdin}
        _refuse("not with -H or --hostfile", no_others)
        size, variables = spread.size, forwarded_environment() | chosen
    else:
        check_program(program)
        size, variables = workers or 1, chosen
        if workers is None:
            _hint_at_misplaced(script, arguments or ())
        node = node_of(nnodes, node_rank, rendezvous, size, max_restarts, timeout, elastic)
    if elastic:
        variables["RINGREDUCE_ELASTIC"] = str(elastic)
        _refuse("not with --elastic, which rr.fit alone has", {"--unchanged": unchanged or None})
    if node or elastic:
        _refuse("not with --nnodes or --elastic", {"--stdin": stdin})
    if stdin is not None and stdin >= size:
        _refuse(f"{stdin}; accepted: 0 to {size - 1}", {"--stdin": stdin})
    if profile:
        variables["RINGREDUCE_PROFILE"] = "1"
    if bind is not None:
        variables["RINGREDUCE_BIND"] = str(int(bind))
    if no_comeback:
        variables["RINGREDUCE_COMEBACK"] = "0"
    if unchanged:
        program = as_unchanged(program, variables)
    limits = {"timeout_s": timeout, "busy_timeout_s": busy_timeout}
    folders = {"log_dir": log_dir, "trace_dir": None if trace is None else str(trace.absolute())}
    plan = JobPlan(
        program,
        size,
        {**limits, **folders, "transport": transport, "encryption": encryption},
        threads=threads_per_worker,
        max_restarts=max_restarts,
        elastic=elastic,
        grace_s=grace,
        output=output or OUTPUTS[unchanged],
        stdin_rank=stdin,
        variables=variables,
        spread=spread,
    )
    code = supervise(plan, node=node).conclude()
    if trace is not None:
        typer.echo(f"ringreduce: `ringreduce trace {trace}` says who was late", err=True)
    raise typer.Exit(code)


def _program(script: str, arguments: Sequence[str] | None, module: bool) -> list[str]:
    return ["-m"] * module + [script, *(arguments or ())]


def _hint_at_misplaced(script: str, arguments: Sequence[str]) -> None:
    """Say so if the script gets an option that may have been meant for the launcher."""
    meant = next((argument for argument in arguments if _COUNTS.fullmatch(argument)), None)
    if meant is not None:
        typer.echo(
            f"ringreduce: starts 1 worker, and {script} gets {meant}, which stands after it; for "
            f"2 workers write `ringreduce run -n 2 {script} ...`",
            err=True,
        )


def _refuse(why: str, values: Mapping[str, object]) -> None:
    """Refuse the first option that was given: that is not None."""
    for name, value in values.items():
        if value is not None:
            raise typer.BadParameter(why, param_hint=name)


def _spread(
    names: str | None,
    file: Path | None,
    workers: int | None,
    ssh: str | None,
    python: str | None,
    rendezvous: str | None,
) -> Spread | None:
    """The hosts of -H or of --hostfile, and how they are reached; None without either."""
    if names is None and file is None:
        _refuse("only with -H or --hostfile", {"--ssh": ssh, "--python": python})
        return None
    if names is not None and file is not None:
        raise typer.BadParameter("give it or --hostfile, not both", param_hint="-H")
    hosts = read_hostfile(file) if file is not None else parse_hosts(names or "")
    return spread_over(share_out(hosts, workers), ssh, python, rendezvous)


@app.command(
    no_args_is_help=True,
    help="Print from all ranks' flight records what each was doing, and which rank is the culprit."
    "\n\nRanks write them into --log-dir when the ring breaks, and when the launcher gets SIGUSR1.",
)
def report(folder: Path = options.LOGGED) -> None:
    """Read the records of a folder, and print the verdict."""
    # Imported here, since `run` does not need it.
    from ringreduce.commands.report.flight_records import read_records
    from ringreduce.commands.report.view import show

    show(read_records(folder))


@app.command(
    help="Form a ring, and say what would stop or slow a job here: versions, libraries, limits, "
    "and each link's speed beside that of the network or memory alone.\n\n"
    "The exit code is 0, or 1 if there is a problem; if no ring forms, that of the failure."
)
def doctor(
    workers: int | None = options.RANKS,
    hosts: str | None = options.HOSTS,
    hostfile: Path | None = options.HOSTFILE,
    rendezvous: str | None = options.RENDEZVOUS,
    ssh: str | None = options.SSH,
    python: str | None = options.PYTHON,
    as_json: bool = options.AS_JSON,
) -> None:
    """Run the worker on each rank, and leave with the exit code of the report or the job."""
    from ringreduce.commands.doctor.view import show

    spread = _spread(hosts, hostfile, workers, ssh, python, rendezvous)
    if spread is None:
        _refuse("only with -H or --hostfile", {"--rendezvous": rendezvous})
    size = workers or 2 if spread is None else spread.size
    program, printed = ["-m", "ringreduce.commands.doctor.worker"], io.StringIO()
    choices = {"join_timeout_s": 60.0}  # workers that import nothing else meet sooner than others
    plan = JobPlan(program, size, choices, variables=forwarded_environment(), spread=spread)
    code = supervise(plan, stdout=printed).conclude()
    raise typer.Exit(code or show(printed.getvalue(), as_json=as_json))


@app.command(
    no_args_is_help=True,
    help="Print from what all ranks have traced which of them were late, and for how long others "
    "waited.\n\nIt also writes DIR/trace.json, which https://ui.perfetto.dev draws.",
)
def trace(folder: Path = options.TRACED) -> None:
    """Join the ranks' files of a folder, and print what they say."""
    from ringreduce.commands.trace import describe

    for line in describe(folder):
        typer.echo(line)


@app.command(
    # So that options of the program need no --.
    context_settings={"ignore_unknown_options": True},
    no_args_is_help=True,
    help="Run the first steps of a program with each number of ranks, and say whether they train "
    "alike, if not why, and which number is fastest. It uses rr.fit, or averages gradients in a "
    "loop of its own, or with --unchanged uses Keras alone.\n\n"
    "The program ends after these steps, and callbacks that write files are left out. The exit "
    "code is 0 if the numbers agree, 1 if they differ, 3 if nothing differs but gradients were not "
    "seen or numbers are not finite, else that of the failure or 2.",
)
def verify(
    script: str = options.SCRIPT,
    arguments: list[str] | None = options.ARGUMENTS_OF_VERIFY,
    workers: Any = options.WORKER_COUNTS,
    steps: int = options.STEPS,
    module: bool = options.MODULE,
    unchanged: bool = options.UNCHANGED,
    as_json: bool = options.AS_JSON,
) -> None:
    """Run the jobs one after another, and leave with the exit code."""
    from ringreduce.commands.verify import verify as compare

    if script.startswith("-"):
        raise typer.BadParameter("no such option", param_hint=script)
    program = _program(script, arguments, module)
    check_program(program)
    raise typer.Exit(compare(program, workers, steps, as_json=as_json, unchanged=unchanged))


def main() -> None:
    """Entry point of the ``ringreduce`` command."""
    for stream in (sys.stdout, sys.stderr):
        # Letters that its encoding lacks, such as those of Keras's bar, must not end a job.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="ringreduce")
    except RingReduceError as error:
        typer.echo(f"ringreduce: {error}", err=True)
        sys.exit(2)
