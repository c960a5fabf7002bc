"""The command line: ``ringreduce run -n 4 train.py``, also as ``python -m ringreduce``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ringreduce._version import __version__
from ringreduce.commands.launch import supervisor
from ringreduce.commands.launch.conclusion import TRACEBACKS
from ringreduce.commands.launch.display import OUTPUTS
from ringreduce.commands.launch.program import worker_command
from ringreduce.vocabulary.config import SETTINGS, log_dir_wanted
from ringreduce.vocabulary.errors import RingReduceError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Data-parallel training over a ring of processes.",
)


def _checked(accepts: Callable[[Any], bool], accepted: str) -> Callable[[Any], Any]:
    """A callback that refuses what `accepts` does not hold for; `accepted` says what it does."""

    def check(value: Any) -> Any:
        if value is not None and not accepts(value):
            raise typer.BadParameter(f"{value}; accepted: {accepted}")
        return value

    return check


def _one_of(values: Sequence[str], help: str) -> Any:
    """An option that is one of `values`."""
    check = _checked(values.__contains__, ", ".join(values))
    return typer.Option(help=help, metavar="|".join(values), callback=check)


def _option(name: str, *flags: str) -> Any:
    """The option for the setting `name`, with the help and values that `SETTINGS` has."""
    setting = SETTINGS[name]
    return typer.Option(
        *flags,
        help=f"{setting.help[0].upper()}{setting.help[1:]}.",
        metavar="|".join(setting.values) or None,
        callback=_checked(setting.accepts, setting.accepted),
        show_default=False,
    )


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


# Options after the script belong to the script.
@app.command(context_settings={"allow_interspersed_args": False}, no_args_is_help=True)
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The program and its arguments.")
    ],
    workers: Annotated[int, typer.Option("-n", "--workers", min=1, help="Workers to start.")] = 1,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name, as in python -m.")
    ] = False,
    threads_per_worker: Annotated[
        int | None,
        typer.Option(
            min=1, help="Compute threads of each worker; by default the cores shared out."
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            help="How often all workers are started again after a failure; RINGREDUCE_RESTART "
            "counts.",
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
        str, _one_of(TRACEBACKS, "Whose tracebacks are shown after a failure.")
    ] = "cause",
    stdin: Annotated[
        int | None,
        typer.Option(
            metavar="RANK",
            min=0,
            help="The rank that gets the keyboard, Ctrl-C too, so that breakpoint() works there. "
            "Time limits then are a week.",
        ),
    ] = None,
    timeout: Annotated[float | None, _option("timeout_s", "--timeout")] = None,
    busy_timeout: Annotated[float | None, _option("busy_timeout_s", "--busy-timeout")] = None,
    transport: Annotated[str | None, _option("transport")] = None,
    log_dir: Annotated[Path | None, _option("log_dir")] = None,
    encryption: Annotated[str | None, _option("encryption")] = None,
) -> None:
    """Run a script as N workers on this host that form a ring.

    Every line they print begins with the rank that wrote it. When one fails, all are
    stopped, and the first failure in time is shown and gives the exit code.
    """
    if stdin is not None and stdin >= workers:
        raise typer.BadParameter(f"{stdin}; accepted: 0 to {workers - 1}", param_hint="--stdin")
    code = supervisor.run(
        worker_command(command, is_module=module),
        workers,
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


@app.command(no_args_is_help=True)
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What --log-dir was.")],
) -> None:
    """Print from all ranks' flight records what each was doing, and which rank is the culprit.

    Ranks write them into --log-dir when the ring breaks, and when the launcher gets SIGUSR1.
    """
    # Imported here, since `run` does not need it.
    from ringreduce.commands.report.records import read_records
    from ringreduce.commands.report.view import show

    show(read_records(folder))


def main() -> None:
    """Entry point of the ``ringreduce`` command."""
    try:
        app(prog_name="ringreduce")
    except RingReduceError as error:
        typer.echo(f"ringreduce: {error}", err=True)
        sys.exit(2)
