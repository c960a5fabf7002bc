"""The program that workers are to run: whether there is one."""

import re
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from ringreduce.vocabulary.errors import ConfigError

_UNCHANGED = ["-m", "ringreduce.unchanged"]


def is_unchanged(arguments: Sequence[str]) -> bool:
    """Whether workers with these arguments run a program that does not know ringreduce."""
    return list(arguments[:2]) == _UNCHANGED


def as_unchanged(arguments: Sequence[str], variables: MutableMapping[str, str]) -> list[str]:
    """Make the command for a program that does not know ringreduce; add to `variables`."""
    variables.setdefault("PYTHONHASHSEED", "0")
    return [*_UNCHANGED, *arguments]


def check_program(arguments: Sequence[str]) -> None:
    """Raise ConfigError unless `arguments` begin with a script that is there, or with ``-m``."""
    name, path = arguments[0], Path(arguments[0])
    if name == "-m" and len(arguments) > 1:
        return  # Python says in a line that there is no such module.
    if re.fullmatch(r"python[\d.]*", path.name):
        # As for mpirun and horovodrun.
        raise ConfigError(
            f"{name!r} is no script; ringreduce starts Python itself",
            remedy="Leave it out: give the script's path, or -m and the name of a module.",
        )
    if not path.exists():
        raise ConfigError(
            f"there is no script {name!r} in {Path.cwd()}",
            remedy="Give its path, or -m and the name of a module.",
        )
