"""The command that reaches an agent on another host, and what its failure means. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ringreduce.commands.launch.hosts import Host

_AGENT = "ringreduce.commands.launch.agent"
# Never a question that nobody can answer, and an error within seconds for a host that is off. What
# the user's own command sets stands before, and ssh takes the first value.
_OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3"),
)
_SSH_FAILED = 255


@dataclass(frozen=True)
class Reach:
    """How agents are started.

    Attributes:
        ssh: the user's command, with options.
        own_names: what this host is called; it is reached without ssh.
        directory: where agents and ranks run.
        python: the program there.
        path: variables that Python needs to find the agent.
    """

    ssh: Sequence[str]
    own_names: Collection[str]
    directory: str
    python: str
    path: Mapping[str, str]

    def command(self, host: Host) -> list[str]:
        """What to run here for an agent on `host`."""
        variables = [f"{name}={value}" for name, value in self.path.items()]
        words = [*(["env", *variables] if variables else []), self.python, "-m", _AGENT]
        # The login shell of the other end reads it; all take single quotes alike.
        text = f"cd {shlex.quote(self.directory)} && exec {' '.join(map(shlex.quote, words))}"
        if host.login in self.own_names:
            return ["sh", "-c", text]
        return [*self.ssh, *_OPTIONS, host.login, text]

    def explain(self, login: str, returncode: int, said: Sequence[str]) -> str:
        """Why no agent answered: an exit code, and what ssh or the other end wrote last."""
        last = next((line for line in reversed(said) if line.strip()), "it said nothing")
        text = "\n".join(said)
        if returncode == _SSH_FAILED:
            return (
                "ssh failed, as it says above. "
                f"`{shlex.join([*self.ssh, '-o', 'BatchMode=yes', login, 'true'])}` must work, "
                "and ask for nothing"
            )
        if "No module named" in text:
            return (
                f"{self.python} has no ringreduce there. Install the same version, or name another "
                "Python with --python"
            )
        if returncode in (126, 127):
            return (
                f"there is no program {self.python}. Install Python and ringreduce there, or name "
                "its Python with --python"
            )
        if "cd:" in text:
            return f"there is no folder {self.directory}. Start from a folder that all hosts have"
        return f"no agent started (exit code {returncode}): {last}"
