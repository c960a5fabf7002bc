"""The program that workers are to run: whether there is one, and how Python runs it."""

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ringreduce.commands.launch import start
from ringreduce.vocabulary.errors import ConfigError

_OPTION = re.compile(r"-([bBdEiIOPqsSuvx]+|[WX].*)")  # Python's own, before the program


def check_program(arguments: Sequence[str]) -> None:
    """Raise ConfigError unless Python can run `arguments`: a script, or ``-m`` and a module."""
    first, *more = arguments
    if first == "-m" and more:
        _check_module(more[0])
    # Python's own options may stand before the script.
    elif not first.startswith("-"):
        _check_script(first)


def command_of(arguments: Sequence[str], descriptor: int) -> list[str]:
    """Python's arguments for a worker that runs `arguments` and has a pipe to its launcher."""
    count = 0
    while count < len(arguments) and _OPTION.fullmatch(arguments[count]):
        count += 2 if arguments[count] in ("-W", "-X") else 1
    options, program = arguments[:count], arguments[count:]
    if not program or (program[0].startswith("-") and program[0] != "-m"):
        return list(arguments)  # Such as -c, whose failures no record describes.
    return [*options, start.__file__, str(descriptor), *program]


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
    # Python also runs a folder that has a __main__.py.
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ConfigError(f"{name!r} is a folder without a __main__.py, so it cannot be run")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {name!r} cannot be read")


def _check_module(name: str) -> None:
    spec = _find(name)
    if spec is None:
        raise ConfigError(
            f"there is no module {name!r} for python -m",
            remedy=f"Modules are searched from {Path.cwd()} and in what {sys.executable} has "
            "installed. A script is run without -m.",
        )
    if spec.submodule_search_locations is not None and _find(f"{name}.__main__") is None:
        raise ConfigError(f"{name!r} is a package without a __main__.py, so it cannot be run")


def _find(name: str) -> ModuleSpec | None:
    """Where a module is, without importing the packages around it."""
    top, *inner = name.split(".")
    # Python looks there first with -m; the launcher itself may not.
    sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    found = top
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return None
        found += f".{part}"
        spec = PathFinder.find_spec(found, list(spec.submodule_search_locations))
    return spec
