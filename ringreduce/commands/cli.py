"""The command line: ``ringreduce run -n 4 train.py``, also as ``python -m ringreduce``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ringreduce._version import __version__
from ringreduce.commands.launch import supervisor
from ringreduce.commands.launch.conclusion import TRACEBACKS
from ringreduce.commands.launch.display import OUTPUTS
from ringreduce.commands.launch.hosts import Host, parse_hosts, share_out
from ringreduce.commands.launch.meeting import Node
from ringreduce.commands.launch.nodes import node_of
from ringreduce.commands.launch.program import check_program
from ringreduce.commands.launch.spread import read_hostfile, spread_over
from ringreduce.vocabulary.config import SETTINGS, Config, log_dir_wanted
from ringreduce.vocabulary.errors import RingReduceError
from ringreduce.vocabulary.worker_environment import chosen_variables, forwarded_environment

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training over a ring of processes.",
)


_SEVERAL_HOSTS = "Several hosts"


def _number(
    metavar: str,
    least: int,
    help: str,
    *flags: str,
    default: str | None = None,
    panel: str | None = None,
) -> Any:
    """An option that is a whole number of at least `least`; `default` in words, if it has none."""
    # typer's own check would show as a wide column of the help.
    check = _checked(lambda value: value >= least, f"{least} or more")
    shown = True if default is None else default
    return typer.Option(
        *flags,
        help=help,
        metavar=metavar,
        callback=check,
        show_default=shown,
        rich_help_panel=panel,
    )


def _of_hosts(metavar: str, help: str, *flags: str, default: str = "none") -> Any:
    """An option for jobs of several hosts; `default` in words."""
    return typer.Option(
        *flags, help=help, metavar=metavar, show_default=default, rich_help_panel=_SEVERAL_HOSTS
    )


def _one_of(values: Sequence[str], help: str) -> Any:
    """An option that is one of `values`."""
    return typer.Option(
        help=help,
        metavar="|".join(values),
        callback=_checked(values.__contains__, ", ".join(values)),
        autocompletion=lambda: list(values),
    )


def _setting(name: str, *flags: str, metavar: str = "", help: str = "") -> Any:
    """The option for the setting `name`, by default with the help and values of `SETTINGS`."""
    setting, default = SETTINGS[name], getattr(Config, name)
    return typer.Option(
        *flags,
        help=help or f"{setting.help[0].upper()}{setting.help[1:]}.",
        metavar=metavar or "|".join(setting.values),
        callback=_checked(setting.accepts, setting.accepted),
        autocompletion=(lambda: list(setting.values)) if setting.values else None,
        show_default=f"{default:g}" if isinstance(default, float) else default or "none",
    )


def _checked(accepts: Callable[[Any], bool], accepted: str) -> Callable[[Any], Any]:
    """A callback that refuses what `accepts` does not hold for; `accepted` says what it does."""

    def check(value: Any) -> Any:
        if value is not None and not accepts(value):
            raise typer.BadParameter(f"{value}; accepted: {accepted}")
        return value

    return check


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ringreduce {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and leave.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


# Options after the script belong to the script. A paragraph is one line, which the help wraps.
@app.command(
    context_settings={"allow_interspersed_args": False},
    no_args_is_help=True,
    help="Run a script as N workers that form a ring, on this host or on several.\n\n"
    "Every line they print begins with the rank that wrote it. When one fails, all are stopped, "
    "and the first failure in time is shown and gives the exit code.",
)
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The program.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")
    ] = None,
    workers: Annotated[
        int | None,
        _number(
            "N", 1, "Workers to start.", "-n", "--workers", default="1, or all slots of the hosts"
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        _of_hosts(
            "HOST:SLOTS,...",
            "Hosts, and how many workers each has. They are reached by ssh, and have the same "
            "folder, Python and ringreduce.",
            "-H",
            "--hosts",
            default="this one",
        ),
    ] = None,
    hostfile: Annotated[
        Path | None,
        _of_hosts("FILE", "A file with a host on each line, as HOST slots=N or HOST:N."),
    ] = None,
    nnodes: Annotated[
        int | None,
        _number(
            "N",
            1,
            "Hosts, on each of which this command is run; -n counts one host's workers.",
            "--nnodes",
            default="1",
            panel=_SEVERAL_HOSTS,
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        _number(
            "I",
            0,
            "Which of the N hosts this one is; 0 is that of --rendezvous.",
            "--node-rank",
            default="none",
            panel=_SEVERAL_HOSTS,
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    threads_per_worker: Annotated[
        int | None, _number("K", 1, "Compute threads of each worker.", default="cores / N")
    ] = None,
    max_restarts: Annotated[
        int,
        _number(
            "K",
            0,
            "How often all workers are started again after a failure; RINGREDUCE_RESTART counts.",
        ),
    ] = 0,
    output: Annotated[
        str,
        _one_of(
            OUTPUTS,
            "Whose lines are shown: all ranks'; rank 0's; or, after a failure, the last ones of "
            "the rank that failed first. --log-dir keeps all.",
        ),
    ] = "all",
    tracebacks: Annotated[
        str,
        _one_of(TRACEBACKS, "Whose tracebacks are shown after a failure: its cause's, or all."),
    ] = "cause",
    stdin: Annotated[
        int | None,
        _number(
            "RANK",
            0,
            "The rank that gets the keyboard, Ctrl-C too, so that breakpoint() works there and is "
            "skipped elsewhere. Time limits then are a week.",
            default="none",
        ),
    ] = None,
    timeout: Annotated[float | None, _setting("timeout_s", "--timeout", metavar="SECONDS")] = None,
    busy_timeout: Annotated[
        float | None, _setting("busy_timeout_s", "--busy-timeout", metavar="SECONDS")
    ] = None,
    transport: Annotated[str | None, _setting("transport")] = None,
    log_dir: Annotated[
        Path | None,
        _setting(
            "log_dir",
            metavar="DIR",
            help="Folder for each worker's lines and, when the ring breaks, flight records "
            "(`ringreduce report`); made if needed.",
        ),
    ] = None,
    encryption: Annotated[str | None, _setting("encryption")] = None,
    env: Annotated[
        list[str] | None,
        _of_hosts(
            "NAME=VALUE",
            "A variable for the workers; NAME alone: as it is here. Other hosts get those of "
            "ringreduce, and PYTHONPATH, in any case.",
        ),
    ] = None,
    rendezvous: Annotated[
        str | None,
        _of_hosts(
            "HOST:PORT",
            "Where the ranks meet: an address of the first host that all hosts reach, and a port, "
            "which only -H and --hostfile can do without.",
            default="the first host's name, any free port",
        ),
    ] = None,
    ssh: Annotated[
        str | None,
        _of_hosts(
            "COMMAND",
            "The command that reaches hosts, with options: 'ssh -p 2222 -i key'.",
            default="ssh",
        ),
    ] = None,
    python: Annotated[
        str | None, _of_hosts("PROGRAM", "Python on the hosts.", default="this one's path")
    ] = None,
) -> None:
    """Start the workers, and leave with the job's exit code."""
    program = ["-m"] * module + [script, *(arguments or [])]
    spread = node = None
    if hosts is not None or hostfile is not None:
        _refuse("not with", ("--nnodes", nnodes), ("--node-rank", node_rank), ("--stdin", stdin))
        shares = share_out(_hosts(hosts, hostfile), workers)
        spread = spread_over(shares, ssh, python, rendezvous)
        size, variables = spread.size, forwarded_environment(env or ())
    else:
        _refuse("only with", ("--ssh", ssh), ("--python", python))
        check_program(program)
        size, variables = workers or 1, chosen_variables(env or ())
        node = _node(nnodes, node_rank, rendezvous, size, max_restarts, timeout)
    if stdin is not None and node is not None:
        raise typer.BadParameter("not with --nnodes", param_hint="--stdin")
    if stdin is not None and stdin >= size:
        raise typer.BadParameter(f"{stdin}; accepted: 0 to {size - 1}", param_hint="--stdin")
    code = supervisor.run(
        program,
        size,
        spread=spread,
        node=node,
        variables=variables,
        threads=threads_per_worker,
        max_restarts=max_restarts,
        output=output,
        tracebacks=tracebacks,
        stdin_rank=stdin,
        timeout_s=timeout,
        busy_timeout_s=busy_timeout,
        transport=transport,
        log_dir=str(log_dir or log_dir_wanted()) or None,
        encryption=encryption,
    )
    raise typer.Exit(code)


def _refuse(when: str, *options: tuple[str, object]) -> None:
    for name, value in options:
        if value is not None:
            raise typer.BadParameter(f"{when} -H or --hostfile", param_hint=name)


def _node(
    nnodes: int | None,
    node_rank: int | None,
    rendezvous: str | None,
    count: int,
    max_restarts: int,
    timeout: float | None,
) -> Node | None:
    """Which of several launchers this is, if the options say that there are others."""
    if nnodes is None and node_rank is None and rendezvous is None:
        return None
    if nnodes is None or node_rank is None or rendezvous is None:
        raise typer.BadParameter(
            "--nnodes, --node-rank and --rendezvous HOST:PORT are given together; or hosts by -H",
            param_hint="--nnodes",
        )
    if node_rank >= nnodes:
        raise typer.BadParameter(
            f"{node_rank}; accepted: 0 to {nnodes - 1}", param_hint="--node-rank"
        )
    return node_of(nnodes, node_rank, count, rendezvous, max_restarts, timeout)


def _hosts(names: str | None, file: Path | None) -> list[Host]:
    """The hosts of -H or of --hostfile."""
    if names is not None and file is not None:
        raise typer.BadParameter("give it or --hostfile, not both", param_hint="-H")
    return read_hostfile(file) if file is not None else parse_hosts(names or "")


@app.command(
    no_args_is_help=True,
    help="Print from all ranks' flight records what each was doing, and which rank is the culprit."
    "\n\nRanks write them into --log-dir when the ring breaks, and when the launcher gets SIGUSR1.",
)
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What --log-dir was.")],
) -> None:
    """Read the records of a folder, and print the verdict."""
    # Imported here, since `run` does not need it.
    from ringreduce.commands.report.flight_records import read_records
    from ringreduce.commands.report.view import show

    show(read_records(folder))


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
