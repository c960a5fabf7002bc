"""Whether a program that nobody has changed knows of ranks, by the text of its own modules.

Such a program may divide what it computes by their number already.
"""

import ast
import re
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from ringreduce.vocabulary.launchers import LAUNCHERS

_OF_LAUNCHERS = {name for launcher in LAUNCHERS for name in launcher.place}
_OTHERS = {"TF_CONFIG", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"}
# A text that is one of their variables, or begins with what begins those.
_VARIABLES = re.compile("|".join([*_OF_LAUNCHERS, *_OTHERS, r"(RINGREDUCE|OMPI_COMM_WORLD)_\w*"]))
_PACKAGES = ("ringreduce", "mpi4py", "horovod", "torch.distributed")
_INSTALLED = {"site-packages", "dist-packages"}
_OURS = Path(__file__).parents[2]


def names_of_ranks() -> str:
    """Where and how the program learns which rank it is, or of how many; or ""."""
    for path in _files_of_program():
        try:
            with tokenize.open(path) as file:
                nodes = ast.walk(ast.parse(file.read()))
        except (OSError, SyntaxError, ValueError):
            return f"the text of {path.name} cannot be read"
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if _VARIABLES.fullmatch(node.value):
                    return f"{path.name}:{node.lineno} names {node.value}"
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in _imported(node):
                    if any(f"{name}.".startswith(f"{package}.") for package in _PACKAGES):
                        return f"{path.name}:{node.lineno} imports {name}"
    return ""


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.level:
        return []  # A module of the program, which is looked at by itself.
    return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]


def _files_of_program() -> Iterator[Path]:
    """The program's file, and those of modules beside and below it that are not installed."""
    main = sys.modules["__main__"]
    yield (first := Path(getattr(main, "__file__", None) or sys.argv[0]).resolve())
    package = getattr(main, "__package__", None)  # of ``-m package.module``
    folder = first.parents[len(package.split(".")) if package else 0]
    installed = [Path(sysconfig.get_path("stdlib")), _OURS]
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not name.endswith(".py"):
            continue
        path = Path(name).resolve()
        if path == first or not path.is_relative_to(folder):
            continue
        if not any(map(path.is_relative_to, installed)) and not _INSTALLED & {*path.parts}:
            yield path
