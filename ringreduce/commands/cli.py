"""The command line: ``ringreduce run -n 4 train.py``, also as ``python -m ringreduce``."""

import io
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ringreduce._version import __version__
from ringreduce.commands.launch.display import OUTPUTS
from ringreduce.commands.launch.hosts import parse_hosts, share_out
from ringreduce.commands.launch.nodes import node_of
from ringreduce.commands.launch.plan import Plan
from ringreduce.commands.launch.program import as_unchanged, check_program
from ringreduce.commands.launch.spread import Spread, read_hostfile, spread_over
from ringreduce.commands.launch.supervisor import supervise
from ringreduce.vocabulary.config import SETTINGS, TIMES, Config, Setting, elastic_minimum
from ringreduce.vocabulary.errors import RingReduceError
from ringreduce.vocabulary.worker_environment import chosen_variables, forwarded_environment

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training over a ring of processes.",
)

# Options of launchers that say how many workers there are, and where.
_COUNTS = re.compile(r"-np?\d*|-H|--(np|nproc|workers|num-proc|nproc.per.node|hosts)(=.*)?")


def _option(
    setting: Setting,
    metavar: str = "",
    *flags: str,
    default: Any = None,
    shown: str | bool = True,
    **more: Any,
) -> Any:
    """An option; `shown` is its default in words."""

    # typer's own check would show as a wide column of the help.
    def check(value: Any) -> Any:
        if value is not None and not setting.accepts(value):
            raise typer.BadParameter(f"{value}; accepted: {setting.accepted}")
        return value

    return typer.Option(
        default,
        *flags,
        help=setting.help,
        metavar=metavar or "|".join(setting.values),
        callback=check,
        autocompletion=(lambda: list(setting.values)) if setting.values else None,
        show_default=shown,
        **more,
    )


def _number(metavar: str, help: str, *flags: str, least: int = 0, **more: Any) -> Any:
    """An option that is a number of at least `least`."""
    setting = Setting(help, accepts=lambda value: value >= least, accepted=f"{least} or more")
    return _option(setting, metavar, *flags, **more)


def _setting(name: str, metavar: str = "", help: str = "", *flags: str) -> Any:
    """The option for the setting `name`, by default with its own help."""
    setting, default = SETTINGS[name], getattr(Config, name)
    shown = f"{default:g}" if isinstance(default, float) else default or "none"
    help = help or f"{setting.help[0].upper()}{setting.help[1:]}."
    return _option(setting._replace(help=help), metavar, *flags, shown=shown)


# Options for jobs of several hosts.
_number_of_hosts = partial(_number, rich_help_panel="Several hosts", shown="none")


def _of_hosts(metavar: str, help: str, *flags: str, shown: str = "none") -> Any:
    """An option for jobs of several hosts that is any text."""
    return _option(Setting(help), metavar, *flags, rich_help_panel="Several hosts", shown=shown)


_HOSTS = _of_hosts(
    "HOST:SLOTS,...",
    "Hosts, and how many workers each has. They are reached by ssh, and have the same folder, "
    "Python and ringreduce.",
    "-H",
    "--hosts",
    shown="this one",
)
_HOSTFILE = _of_hosts("FILE", "A file with a host on each line, as HOST slots=N or HOST:N.")
_RENDEZVOUS = _of_hosts(
    "HOST:PORT",
    "Where the ranks meet: an address of the first host that all hosts reach, and a port, "
    "which only -H and --hostfile can do without.",
    shown="the first host's name, any free port",
)
_SSH = _of_hosts(
    "COMMAND", "The command that reaches hosts, with options: 'ssh -p 2222 -i key'.", shown="ssh"
)
_PYTHON = _of_hosts("PROGRAM", "Python on the hosts.", shown="this one's path")


_UNCHANGED = (
    "The program knows nothing of ringreduce: its Model.fit, evaluate and predict divide their "
    "data among the workers, and rank 0 writes and prints."
)
_MODULE = typer.Option(False, "-m", "--module", help="SCRIPT is a module's name, as in python -m.")


def _worker_count(text: str) -> int:
    if text.startswith("p"):
        raise typer.BadParameter(
            f"-n{text} is read as -n with {text!r}; for 2 workers write `ringreduce run -n 2 ...`"
        )
    if not text.lstrip("-").isdecimal():
        raise typer.BadParameter(f"{text} is no whole number")
    return int(text)


def _workers(help: str, shown: str) -> Any:
    return _number("N", help, "-n", "--workers", least=1, shown=shown, parser=_worker_count)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ringreduce {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and leave.",
        callback=_print_version,
        is_eager=True,
    ),
) -> None:
    pass


class _Run(TyperCommand):
    """`run`, whose option --elastic needs no number."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with_value = {n for one in self.params if not getattr(one, "is_flag", 1) for n in one.opts}
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
    script: str = typer.Argument(metavar="SCRIPT", help="The program."),
    arguments: list[str] | None = typer.Argument(None, metavar="ARGS", help="Its arguments."),
    workers: int | None = _workers("Workers to start.", "1, or all slots of the hosts"),
    hosts: str | None = _HOSTS,
    hostfile: Path | None = _HOSTFILE,
    nnodes: int | None = _number_of_hosts(
        "N",
        "Hosts, on each of which this command is run; -n counts one host's workers.",
        least=1,
        shown="1",
    ),
    node_rank: int | None = _number_of_hosts(
        "I", "Which of the N hosts this one is; 0 is that of --rendezvous."
    ),
    module: bool = _MODULE,
    threads_per_worker: int | None = _number(
        "K", "Compute threads of each worker.", least=1, shown="cores / N"
    ),
    max_restarts: int = _number(
        "K",
        "How often all workers are started again after a failure; RINGREDUCE_RESTART counts.",
        default=0,
    ),
    elastic: int | None = _number(
        "MIN",
        "When ranks are lost, the others form a ring anew and rr.fit goes on, as long as MIN of "
        "them are left: 1 if no number is given.",
        least=1,
        shown="a lost rank ends the job",
    ),
    grace: float = _number(
        "SECONDS",
        "How long workers have to end, after Ctrl-C, SIGTERM or the failure of another, until they "
        "are killed. A second Ctrl-C kills them at once.",
        default=TIMES.grace_s,
        shown=f"{TIMES.grace_s:g}",
    ),
    output: str | None = _option(
        Setting(
            "Whose lines are shown: all ranks'; rank 0's; or, after a failure, the last ones of "
            "the rank that failed first. --log-dir keeps all.",
            accepts=OUTPUTS.__contains__,
            accepted=", ".join(OUTPUTS),
            values=OUTPUTS,
        ),
        shown=f"{OUTPUTS[0]}; {OUTPUTS[1]} with --unchanged",
    ),
    profile: bool = typer.Option(
        False,
        "--profile",
        help="Measure where the time of rr.fit goes, by rank and epoch; rank 0 says what would "
        "help.",
    ),
    unchanged: bool = typer.Option(False, "--unchanged", help=_UNCHANGED),
    stdin: int | None = _number(
        "RANK",
        "The rank that gets the keyboard, so that breakpoint() works there and is skipped "
        "elsewhere. Time limits then are a week.",
        shown="none",
    ),
    timeout: float | None = _setting("timeout_s", "SECONDS"),
    busy_timeout: float | None = _setting("busy_timeout_s", "SECONDS"),
    transport: str | None = _setting("transport"),
    log_dir: Path | None = _setting(
        "log_dir",
        "DIR",
        "Folder for each worker's lines and, when the ring breaks, flight records (`ringreduce "
        "report`); made if needed.",
    ),
    trace: Path | None = _setting(
        "trace_dir",
        "DIR",
        "Folder for what each rank does when (`ringreduce trace`), a file for each rank on its own "
        "host; made if needed.",
        "--trace",
    ),
    encryption: str | None = _setting("encryption"),
    env: list[str] | None = _of_hosts(
        "NAME=VALUE",
        "A variable for the workers; NAME alone: as it is here. Other hosts get those of "
        "ringreduce, and PYTHONPATH, in any case.",
    ),
    rendezvous: str | None = _RENDEZVOUS,
    ssh: str | None = _SSH,
    python: str | None = _PYTHON,
) -> None:
    """Start the workers, and leave with the job's exit code."""
    program = ["-m"] * module + [script, *(arguments or [])]
    spread = node = None
    elastic = elastic or elastic_minimum(chosen_variables(env or ()))
    if hosts is not None or hostfile is not None:
        _refuse("not with", ("--nnodes", nnodes), ("--node-rank", node_rank), ("--stdin", stdin))
        spread, size = _spread(hosts, hostfile, workers, ssh, python, rendezvous)
        variables = forwarded_environment(env or ())
    else:
        _refuse("only with", ("--ssh", ssh), ("--python", python))
        check_program(program)
        size, variables = workers or 1, chosen_variables(env or ())
        if workers is None:
            _hint_at_misplaced(script, arguments or ())
        node = node_of(nnodes, node_rank, rendezvous, size, max_restarts, timeout, elastic)
    if unchanged and elastic:
        raise typer.BadParameter(
            "not with --elastic, which rr.fit alone has", param_hint="--unchanged"
        )
    if stdin is not None and (node or elastic):
        raise typer.BadParameter("not with --nnodes or --elastic", param_hint="--stdin")
    if elastic:
        variables["RINGREDUCE_ELASTIC"] = str(elastic)
    if stdin is not None and stdin >= size:
        raise typer.BadParameter(f"{stdin}; accepted: 0 to {size - 1}", param_hint="--stdin")
    if profile:
        variables["RINGREDUCE_PROFILE"] = "1"
    if unchanged:
        program = as_unchanged(program, variables)
    plan = Plan(
        program,
        size,
        {
            "timeout_s": timeout,
            "busy_timeout_s": busy_timeout,
            "transport": transport,
            "log_dir": log_dir,
            "trace_dir": None if trace is None else str(trace.absolute()),
            "encryption": encryption,
        },
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


def _hint_at_misplaced(script: str, arguments: Sequence[str]) -> None:
    """Say so if the script gets an option that may have been meant for the launcher."""
    meant = next((each for each in arguments if _COUNTS.fullmatch(each)), None)
    if meant is not None:
        typer.echo(
            f"ringreduce: starts 1 worker, and {script} gets {meant}, which stands after it; for "
            f"2 workers write `ringreduce run -n 2 {script} ...`",
            err=True,
        )


def _refuse(when: str, *options: tuple[str, object]) -> None:
    for name, value in options:
        if value is not None:
            raise typer.BadParameter(f"{when} -H or --hostfile", param_hint=name)


def _spread(
    names: str | None, file: Path | None, workers: int | None, *how: str | None
) -> tuple[Spread, int]:
    """The hosts of -H or of --hostfile, with `spread_over`'s other arguments; number of ranks."""
    if names is not None and file is not None:
        raise typer.BadParameter("give it or --hostfile, not both", param_hint="-H")
    hosts = read_hostfile(file) if file is not None else parse_hosts(names or "")
    shares = share_out(hosts, workers)
    return spread_over(shares, *how), sum(share.count for share in shares)


@app.command(
    no_args_is_help=True,
    help="Print from all ranks' flight records what each was doing, and which rank is the culprit."
    "\n\nRanks write them into --log-dir when the ring breaks, and when the launcher gets SIGUSR1.",
)
def report(folder: Path = typer.Argument(metavar="DIR", help="What --log-dir was.")) -> None:
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
    workers: int | None = _workers("Ranks to start.", "2, or all slots of the hosts"),
    hosts: str | None = _HOSTS,
    hostfile: Path | None = _HOSTFILE,
    rendezvous: str | None = _RENDEZVOUS,
    ssh: str | None = _SSH,
    python: str | None = _PYTHON,
    as_json: bool = typer.Option(False, "--json", help="Print all that was found as JSON."),
) -> None:
    """Run the worker on each rank, and leave with the exit code of the report or the job."""
    from ringreduce.commands.doctor.view import show

    spread, size = None, workers or 2
    if hosts is not None or hostfile is not None:
        spread, size = _spread(hosts, hostfile, workers, ssh, python, rendezvous)
    else:
        options = ("--ssh", ssh), ("--python", python), ("--rendezvous", rendezvous)
        _refuse("only with", *options)
    program, printed = ["-m", "ringreduce.commands.doctor.worker"], io.StringIO()
    choices = {"join_timeout_s": 60.0}  # workers that import nothing else meet sooner than others
    plan = Plan(program, size, choices, variables=forwarded_environment(), spread=spread)
    code = supervise(plan, stdout=printed).conclude()
    raise typer.Exit(code or show(printed.getvalue(), as_json=as_json))


@app.command(
    no_args_is_help=True,
    help="Print from what all ranks have traced which of them were late, and for how long others "
    "waited.\n\nIt also writes DIR/trace.json, which https://ui.perfetto.dev draws.",
)
def trace(folder: Path = typer.Argument(metavar="DIR", help="What --trace was.")) -> None:
    """Join the ranks' files of a folder, and print what they say."""
    from ringreduce.commands.trace import describe

    for line in describe(folder):
        typer.echo(line)


def _worker_counts(text: str) -> list[int]:
    counts = [_worker_count(each) for each in text.split(",")]
    if min(counts) < 1 or len(counts) < 2:
        raise typer.BadParameter(f"{text}; accepted: two numbers or more, such as 1,2,4")
    return counts


@app.command(
    # So that options of the program need no --.
    context_settings={"ignore_unknown_options": True},
    no_args_is_help=True,
    help="Run the first steps of a program with each number of ranks, and say whether they train "
    "alike, if not why, and which number is fastest. It uses rr.fit, or with --unchanged Keras "
    "alone.\n\n"
    "The program ends after these steps, and callbacks that write files are left out. The exit "
    "code is 0 if the numbers agree, 1 if they differ, else that of the failure or 2.",
)
def verify(
    script: str = typer.Argument(metavar="SCRIPT", help="The program."),
    arguments: list[str] | None = typer.Argument(
        None, metavar="ARGS", help="Its arguments; after a -- those that this command has too."
    ),
    workers: Any = typer.Option(
        "1,2",
        "-n",
        "--workers",
        metavar="N,N,...",
        help="Numbers of ranks; others are compared with the first.",
        parser=_worker_counts,
    ),
    steps: int = _number("N", "Steps to compare.", least=1, default=20),
    module: bool = _MODULE,
    unchanged: bool = typer.Option(False, "--unchanged", help=_UNCHANGED),
    as_json: bool = typer.Option(False, "--json", help="Print all that was found as JSON."),
) -> None:
    """Run the jobs one after another, and leave with the exit code."""
    from ringreduce.commands.verify import verify as compare

    program = ["-m"] * module + [script, *(arguments or [])]
    if script.startswith("-"):
        raise typer.BadParameter("no such option", param_hint=script)
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
