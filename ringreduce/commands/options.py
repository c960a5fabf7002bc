"""The options of the command line: their names, help, checks and completions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import typer

from ringreduce._version import __version__
from ringreduce.commands.launch.display import OUTPUTS
from ringreduce.vocabulary.config import SETTINGS, TIMES, Config


def _option(
    metavar: str,
    help: str,
    *flags: str,
    default: Any = None,
    shown: str | None = None,
    accepts: Callable[[Any], bool] = lambda value: True,
    accepted: str = "",
    values: Sequence[str] = (),
    **more: Any,
) -> Any:
    """An option that `accepts` values: those `accepted`, in words, as is `shown`, its default."""

    # typer's own check would show as a wide column of the help.
    def check(value: Any) -> Any:
        if value is not None and not accepts(value):
            raise typer.BadParameter(f"{value}; accepted: {accepted}")
        return value

    return typer.Option(
        default,
        *flags,
        help=help,
        metavar=metavar,
        callback=check,
        autocompletion=(lambda: list(values)) if values else None,
        show_default=shown or ("none" if default is None else True),
        **more,
    )


def _number(metavar: str, help: str, *flags: str, least: int = 0, **more: Any) -> Any:
    """An option that is a number of at least `least`."""
    accepts, accepted = (lambda value: value >= least), f"{least} or more"
    return _option(metavar, help, *flags, accepts=accepts, accepted=accepted, **more)


def _setting(name: str, metavar: str = "", help: str = "", *flags: str) -> Any:
    """The option for the setting `name`, by default with its own help."""
    setting, default = SETTINGS[name], getattr(Config, name)
    return _option(
        metavar or "|".join(setting.values),
        help or f"{setting.help[0].upper()}{setting.help[1:]}.",
        *flags,
        shown=f"{default:g}" if isinstance(default, float) else default or "none",
        accepts=setting.accepts,
        accepted=setting.accepted,
        values=setting.values,
    )


def _worker_count(text: str) -> int:
    if text.startswith("p"):
        raise typer.BadParameter(
            f"-n{text} is read as -n with {text!r}; for 2 workers write `ringreduce run -n 2 ...`"
        )
    if not text.lstrip("-").isdecimal():
        raise typer.BadParameter(f"{text} is no whole number")
    return int(text)


def _worker_counts(text: str) -> list[int]:
    counts = [_worker_count(part) for part in text.split(",")]
    if min(counts) < 1 or len(counts) < 2:
        raise typer.BadParameter(f"{text}; accepted: two numbers or more, such as 1,2,4")
    return counts


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ringreduce {__version__}")
        raise typer.Exit


VERSION = typer.Option(
    False, "--version", help="Print the version and leave.", callback=_print_version, is_eager=True
)

# The program, and how many ranks run it.
SCRIPT = typer.Argument(metavar="SCRIPT", help="The program.")
ARGUMENTS = typer.Argument(None, metavar="ARGS", help="Its arguments.")
ARGUMENTS_OF_VERIFY = typer.Argument(
    None, metavar="ARGS", help="Its arguments; after a -- those that this command has too."
)
MODULE = typer.Option(False, "-m", "--module", help="SCRIPT is a module's name, as in python -m.")
UNCHANGED = typer.Option(
    False,
    "--unchanged",
    help="The program knows nothing of ringreduce: its Model.fit, evaluate and predict divide "
    "their data among the workers, and rank 0 writes and prints.",
)
_workers = partial(_number, "N", least=1, parser=_worker_count)
WORKERS = _workers("Workers to start.", "-n", "--workers", shown="1, or all slots of the hosts")
RANKS = _workers("Ranks to start.", "-n", "--workers", shown="2, or all slots of the hosts")
WORKER_COUNTS = typer.Option(
    "1,2",
    "-n",
    "--workers",
    metavar="N,N,...",
    help="Numbers of ranks; others are compared with the first.",
    parser=_worker_counts,
)
THREADS_PER_WORKER = _number("K", "Compute threads of each worker.", least=1, shown="cores / N")
BIND = typer.Option(
    None,
    "--bind/--no-bind",
    help="Give each worker of a host cores of its own, cores / N.",
    show_default="where the cores are alike and can be divided",
)

# How a job goes on after a failure, and ends.
MAX_RESTARTS = _number(
    "K",
    "How often all workers are started again after a failure; RINGREDUCE_RESTART counts.",
    default=0,
)
ELASTIC = _number(
    "MIN",
    "When ranks are lost, the others form a ring anew and rr.fit goes on, as long as MIN of "
    "them are left: 1 if no number is given.",
    least=1,
    shown="a lost rank ends the job",
)
NO_COMEBACK = typer.Option(
    False,
    "--no-comeback",
    help="With --elastic on one host: do not start a lost rank again.",
)
GRACE = _number(
    "SECONDS",
    "How long workers have to end, after Ctrl-C, SIGTERM or the failure of another, until they "
    "are killed. A second Ctrl-C kills them at once.",
    default=TIMES.grace_s,
    shown=f"{TIMES.grace_s:g}",
)

# What is shown and measured.
OUTPUT = _option(
    "|".join(OUTPUTS),
    "Whose lines are shown: all ranks'; rank 0's; or, after a failure, the last ones of the "
    "rank that failed first. --log-dir keeps all.",
    shown=f"{OUTPUTS[0]}; {OUTPUTS[1]} with --unchanged",
    accepts=OUTPUTS.__contains__,
    accepted=", ".join(OUTPUTS),
    values=OUTPUTS,
)
PROFILE = typer.Option(
    False,
    "--profile",
    help="Measure where the time of rr.fit goes, by rank and epoch; rank 0 says what would help.",
)
STDIN = _number(
    "RANK",
    "The rank that gets the keyboard, so that breakpoint() works there and is skipped "
    "elsewhere. Time limits then are a week.",
)
AS_JSON = typer.Option(False, "--json", help="Print all that was found as JSON.")
STEPS = _number("N", "Steps to compare.", least=1, default=20)

# Settings of the ring.
TIMEOUT = _setting("timeout_s", "SECONDS")
BUSY_TIMEOUT = _setting("busy_timeout_s", "SECONDS")
TRANSPORT = _setting("transport")
ENCRYPTION = _setting("encryption")
LOG_DIR = _setting(
    "log_dir",
    "DIR",
    "Folder for each worker's lines and, when the ring breaks, flight records (`ringreduce "
    "report`); made if needed.",
)
TRACE = _setting(
    "trace_dir",
    "DIR",
    "Folder for what each rank does when (`ringreduce trace`), a file for each rank on its own "
    "host; made if needed.",
    "--trace",
)

# Jobs of several hosts.
_of_hosts = partial(_option, rich_help_panel="Several hosts")
_number_of_hosts = partial(_number, rich_help_panel="Several hosts")
HOSTS = _of_hosts(
    "HOST:SLOTS,...",
    "Hosts, and how many workers each has. They are reached by ssh, and have the same folder, "
    "Python and ringreduce.",
    "-H",
    "--hosts",
    shown="this one",
)
HOSTFILE = _of_hosts("FILE", "A file with a host on each line, as HOST slots=N or HOST:N.")
NNODES = _number_of_hosts(
    "N",
    "Hosts, on each of which this command is run; -n counts one host's workers.",
    least=1,
    shown="1",
)
NODE_RANK = _number_of_hosts("I", "Which of the N hosts this one is; 0 is that of --rendezvous.")
ENV = _of_hosts(
    "NAME=VALUE",
    "A variable for the workers; NAME alone: as it is here. Other hosts get those of "
    "ringreduce, and PYTHONPATH, in any case.",
)
RENDEZVOUS = _of_hosts(
    "HOST:PORT",
    "Where the ranks meet: an address of the first host that all hosts reach, and a port, "
    "which only -H and --hostfile can do without.",
    shown="the first host's name, any free port",
)
SSH = _of_hosts(
    "COMMAND", "The command that reaches hosts, with options: 'ssh -p 2222 -i key'.", shown="ssh"
)
PYTHON = _of_hosts("PROGRAM", "Python on the hosts.", shown="this one's path")

# Folders that jobs have written.
LOGGED = typer.Argument(metavar="DIR", help="What --log-dir was.")
TRACED = typer.Argument(metavar="DIR", help="What --trace was.")
