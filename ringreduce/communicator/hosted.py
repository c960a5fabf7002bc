"""Ranks of a job in processes that another system has started, such as Ray's or Spark's.

One of them listens where the ranks meet (`open_meeting`); each becomes a rank by `enter`, and then
``rr.init()`` works there as under ``ringreduce run``. It calls the user's function in `leaving`.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringreduce.communicator.process import default_communicator, is_initialized, shutdown
from ringreduce.transport.listening import Bind, listen
from ringreduce.vocabulary.config import SETTINGS, Config, check_names
from ringreduce.vocabulary.endpoints import address, port_range
from ringreduce.vocabulary.worker_environment import enter_job, forwarded_environment, leave_job

_OWN = ("secret", "host_id")  # what is decided for each job


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

    @property
    def ports(self) -> str:
        """The ports that ranks may listen on, as `Config` has them."""
        return str(self.settings.get("ports") or self.variables.get("RINGREDUCE_PORTS", ""))


def open_meeting(host: str, ports: str, size: int) -> tuple[str, int]:
    """Listen for the other ranks; return ``host:port``, and the descriptor, which `init` closes."""
    (listener,) = listen(Bind((host,), port_range(ports) if ports else None), rank=0, size=size)
    port = listener.getsockname()[1]
    return address(host, port), listener.detach()


def enter(config: Config, threads: int, choices: Choices) -> None:
    """Make this process the rank that `config` describes, with so many threads that compute."""
    decided = (*choices.settings, *_OWN)
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
