"""Ranks of a job in processes that Ray has started, for Ray Train and `run` alike.

The program that has started them (Ray Train's controller, or the caller of `run`) calls `form`,
which sets each process's variables; then ``rr.init()`` works there as under ``ringreduce run``.
"""

import contextlib
import platform
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from ringreduce.commands.launch.local import default_threads
from ringreduce.communicator.process import default_communicator, is_initialized, shutdown
from ringreduce.transport.listening import Bind, listen
from ringreduce.vocabulary.config import SETTINGS, Config, check_names
from ringreduce.vocabulary.endpoints import address, port_range
from ringreduce.vocabulary.worker_environment import enter_job, forwarded_environment, leave_job

_OWN = ("secret", "host_id")  # what `form` decides for each job


@dataclass(frozen=True)
class Choices:
    """The user's choices, where the program runs that starts the job; checked."""

    settings: Mapping[str, Any]  # of `Config`, by name
    # Variables of ringreduce in that program's environment.
    variables: Mapping[str, str] = field(default_factory=forwarded_environment)

    def __post_init__(self) -> None:
        choices = {name for name, setting in SETTINGS.items() if setting.is_choice}
        check_names(self.settings, choices - {*_OWN})
        Config(**self.settings)


def form(size: int, submit: Callable[..., Any], choices: Choices, restart: int = 0) -> None:
    """Make `size` processes the ranks of a new job, with a new secret.

    ``submit(rank, function, *arguments)`` calls a function in that rank's process, and returns
    Ray's reference to the result. The ranks have been started again `restart` times.
    """
    hosts = ray.get([submit(rank, host_here) for rank in range(size)])
    ports = str(choices.settings.get("ports") or choices.variables.get("RINGREDUCE_PORTS", ""))
    meeting, descriptor = ray.get(submit(0, open_meeting, ports, size))
    common = {
        **choices.settings,
        "size": size,
        "rendezvous": meeting,
        "job_id": f"ray-{secrets.token_hex(8)}",
        "restart": restart,
        "secret": secrets.token_hex(32),
    }
    entered = []
    for rank, host in enumerate(hosts):
        fd = descriptor if rank == 0 else None
        config = Config(rank=rank, host_id=host, rendezvous_fd=fd, **common)
        entered.append(submit(rank, enter, config, Counter(hosts)[host], choices))
    ray.get(entered)


def host_here() -> str:
    """The name of this Ray node: several on one machine, such as pods, need not share memory."""
    return f"{platform.node()[:128]}-{ray.get_runtime_context().get_node_id()[:12]}"


def open_meeting(ports: str, size: int) -> tuple[str, int]:
    """Listen for the other ranks; return ``host:port``, and the descriptor, which `init` closes."""
    host = ray.util.get_node_ip_address()
    (listener,) = listen(Bind((host,), port_range(ports) if ports else None), rank=0, size=size)
    port = listener.getsockname()[1]
    return address(host, port), listener.detach()


def enter(config: Config, local_size: int, choices: Choices) -> None:
    """Make this process the rank that `config` describes, one of `local_size` of its host."""
    decided, threads = (*choices.settings, *_OWN), default_threads(local_size)
    enter_job(config, threads, decided=decided, variables=choices.variables)


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Afterwards the process has left the job, and may become a rank of another one.

    An exception that ends the block goes to the other ranks, which fail at once and quote it.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(leave_job)
        stack.callback(shutdown)
        stack.push(_close)
        yield


def _close(*exception: Any) -> None:
    if is_initialized():
        default_communicator().__exit__(*exception)
