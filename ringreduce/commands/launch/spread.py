"""The hosts of a job that are reached through ssh, as the user's options name them."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringreduce.commands.launch.hosts import Host, Share, parse_hostfile
from ringreduce.commands.launch.ssh import Reach
from ringreduce.vocabulary.endpoints import host_and_port, is_local
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.worker_environment import import_path


@dataclass(frozen=True)
class Spread:
    """Which hosts have which ranks, how the hosts are reached, and where the ranks meet.

    Attributes:
        meeting_host, meeting_port: of the first host; port 0: any free one.
    """

    shares: Sequence[Share]
    reach: Reach
    meeting_host: str
    meeting_port: int

    @property
    def is_wide(self) -> bool:
        """Whether rank 0 must be reached from another host."""
        return not all(is_local(share.host.name) for share in self.shares[1:])


def spread_over(
    shares: Sequence[Share],
    ssh: str | None = None,
    python: str | None = None,
    rendezvous: str | None = None,
) -> Spread:
    """What the options say.

    Args:
        ssh: a command as in a shell; None: ``ssh``.
        python: the program on the hosts; None: that of this process.
        rendezvous: ``host``, ``host:port``, or None for the first host's name and any port.

    Raises:
        ConfigError: `ssh` or `rendezvous` cannot be read.
    """
    ssh = "ssh" if ssh is None else ssh
    try:
        command = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(f"--ssh {ssh[:80]!r} cannot be read: {error}") from None
    if not command:
        raise ConfigError("--ssh is empty", remedy="Name a program, such as ssh.")
    own_name = socket.gethostname()
    names = {"localhost", own_name, own_name.partition(".")[0]}
    host, port = _meeting(shares[0].host, rendezvous)
    program = sys.executable if python is None else python
    reach = Reach(command, names, os.getcwd(), program, import_path())
    return Spread(shares, reach, host, port)


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file. Raises ConfigError, which names the line that is wrong."""
    try:
        return parse_hostfile(path.read_text(errors="replace"), str(path))
    except OSError as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error.strerror}") from None


def _meeting(first: Host, rendezvous: str | None) -> tuple[str, int]:
    if rendezvous is None:
        return first.name, 0
    name = rendezvous.strip("[]")
    if (name == rendezvous and name.count(":") != 1) or rendezvous.endswith("]"):
        return name, 0
    return host_and_port(rendezvous)
