"""The hosts of a job that are reached through ssh: how, as the user's options say it."""

import os
import shlex
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ringreduce.commands.launch.hosts import Host, Share, parse_hostfile
from ringreduce.vocabulary.endpoints import host_and_port, is_local
from ringreduce.vocabulary.errors import ConfigError
from ringreduce.vocabulary.worker_environment import import_path

_AGENT = "ringreduce.commands.launch.agent"
# Never a question that nobody can answer, and an error within seconds for a host that is off. What
# the user's own command sets stands before, and ssh takes the first value.
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
)
_SSH_FAILED = 255


class Spread(NamedTuple):
    """Which hosts have which ranks, where the ranks meet, and how agents are started."""

    shares: Sequence[Share]
    # meeting_host, meeting_port: of the first host; port 0: any free one.
    meeting_host: str
    meeting_port: int
    ssh: Sequence[str]  # the user's command, with options
    own_names: Collection[str]  # what this host is called; it is reached without ssh
    directory: str  # where agents and ranks run
    python: str  # the program there
    pythonpath: str  # with which Python finds the agent

    @property
    def size(self) -> int:
        """The number of ranks on all hosts."""
        return sum(share.count for share in self.shares)

    @property
    def is_wide(self) -> bool:
        """Whether rank 0 must be reached from another host."""
        return not all(is_local(share.host.name) for share in self.shares[1:])

    def command(self, host: Host) -> list[str]:
        """The command to run here for an agent on `host`."""
        path = ["env", f"PYTHONPATH={self.pythonpath}"] if self.pythonpath else []
        words = [*path, self.python, "-m", _AGENT]
        # The login shell of the other end reads it; all take single quotes alike.
        text = f"cd {shlex.quote(self.directory)} && exec {' '.join(map(shlex.quote, words))}"
        if host.login in self.own_names:
            return ["sh", "-c", text]
        return [*self.ssh, *_OPTIONS, host.login, text]

    def explain(self, login: str, returncode: int, said: Sequence[str]) -> str:
        """Why no agent answered: an exit code, and what ssh or the other end wrote last."""
        if returncode == _SSH_FAILED:
            return (
                "ssh failed, as it says above. "
                f"`{shlex.join([*self.ssh, '-o', 'BatchMode=yes', login, 'true'])}` must work, "
                "and ask for nothing"
            )
        last = next((line for line in reversed(said) if line.strip()), "it said nothing")
        return (
            f"no agent started (exit code {returncode}): {last}. It needs the folder "
            f"{self.directory}, and the same ringreduce in {self.python}, or in what --python names"
        )


def spread_over(
    shares: Sequence[Share],
    ssh: str | None = None,
    python: str | None = None,
    rendezvous: str | None = None,
) -> Spread:
    """Make a `Spread` of options: a command as in a shell, Python there, where ranks meet.

    They meet at ``host`` or ``host:port``, by default the first host's name and any port. Raises
    ConfigError if `ssh` or `rendezvous` cannot be read.
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
    program = sys.executable if python is None else python
    meeting = _meeting(shares[0].host, rendezvous)
    return Spread(shares, *meeting, command, names, os.getcwd(), program, import_path())


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
