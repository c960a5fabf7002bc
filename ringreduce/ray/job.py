"""Ranks of a job in processes that Ray has started, for Ray Train and `run` alike.

The program that has started them (Ray Train's controller, or the caller of `run`) calls `form`,
which sets each process's variables; then ``rr.init()`` works there as under ``ringreduce run``.
"""

import platform
import secrets
from collections import Counter
from collections.abc import Callable
from typing import Any

import ray

from ringreduce.commands.launch.local import default_threads
from ringreduce.communicator.hosted import Choices, enter, open_meeting
from ringreduce.vocabulary.config import Config


def form(size: int, submit: Callable[..., Any], choices: Choices, restart: int = 0) -> None:
    """Make `size` processes the ranks of a new job, with a new secret.

    ``submit(rank, function, *arguments)`` calls a function in that rank's process, and returns
    Ray's reference to the result. The ranks have been started again `restart` times.
    """
    hosts = ray.get([submit(rank, host_here) for rank in range(size)])
    meeting, descriptor = ray.get(submit(0, _meet_here, choices.ports, size))
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
        entered.append(submit(rank, _enter, config, Counter(hosts)[host], choices))
    ray.get(entered)


def host_here() -> str:
    """The name of this Ray node: several on one machine, such as pods, need not share memory."""
    return f"{platform.node()[:128]}-{ray.get_runtime_context().get_node_id()[:12]}"


def _meet_here(ports: str, size: int) -> tuple[str, int]:
    return open_meeting(ray.util.get_node_ip_address(), ports, size)


def _enter(config: Config, local_size: int, choices: Choices) -> None:
    enter(config, default_threads(local_size), choices)
