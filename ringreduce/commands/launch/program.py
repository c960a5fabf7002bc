"""The program that workers are to run: whether there is one."""

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ringreduce.vocabulary.errors import ConfigError


def check_program(arguments: Sequence[str]) -> None:
    """Raise ConfigError unless Python can run `arguments`: a script, or ``-m`` and a module."""
    first, *more = arguments
    if first == "-m" and more:
        _check_module(more[0])
    else:
        _check_script(first)


def _check_script(name: str) -> None:
    path = Path(name)
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


def _check_module(name: str) -> None:
    # Python looks there first with -m; the launcher itself may not.
    sys.path.insert(0, str(Path.cwd()))
    try:
        # Only the outermost package: to look into it would import it.
        is_there = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        is_there = False
    finally:
        sys.path.pop(0)
    if not is_there:
        raise ConfigError(
            f"there is no module {name!r} for python -m",
            remedy=f"Modules are searched from {Path.cwd()} and in what {sys.executable} has "
            "installed. A script is run without -m.",
        )
