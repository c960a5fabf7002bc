"""Runs a worker's program as Python itself would, and hands its failure to the launcher.

A script. Its arguments are the descriptor of the pipe to the launcher, and after a comma that of
the launcher's standings, if there are any; then Python's: a program's path, or ``-m`` and a
module's name, and the program's own. The program's exception goes on to
Python, which ends as ever; but its traceback is the launcher's to show.
"""

import io
import os
import pkgutil
import runpy
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

if __name__ == "__main__":
    # The package whose launcher has started this, wherever it is.
    sys.path.insert(0, os.path.abspath(f"{__file__}/../../../.."))

from ringreduce.commands.launch import handover, worker_records

_told: BaseException | None = None


class _KerasNotice(MetaPathFinder):
    """Tells the launcher, with the first import after that of Keras, that there was one."""

    def find_spec(self, *_: Any) -> None:
        keras = sys.modules.get("keras")
        is_imported = keras is not None and not getattr(keras.__spec__, "_initializing", False)
        if is_imported and self in sys.meta_path:
            sys.meta_path.remove(self)
            handover.tell(worker_records.ImportedKeras())


def main(program: list[str], descriptor: int, *standings: int) -> None:
    """Run `program`, which is `__main__` from now on."""
    handover.use_pipe(descriptor)
    if standings:
        handover.use_standings(*standings)
    notice = _KerasNotice()
    sys.meta_path.insert(0, notice)
    sys.excepthook = _show
    try:
        run_program(program)
    except SystemExit as error:
        place = handover.place_of(error)
        handover.exiting = f"SystemExit: {error.code or 0}{place and ' in '}{place}"
        if error.code:
            _tell(error)
        else:
            handover.tell(worker_records.Exits(place))
        raise
    except BaseException as error:
        _tell(error)
        raise
    finally:
        notice.find_spec()


def run_program(program: list[str]) -> None:
    """Run a path, or ``-m`` and a module's name, with its arguments, as Python would."""
    sys.argv = program
    module = sys.modules["__main__"] = ModuleType("__main__")
    first = program[0]
    if first == "-m":
        sys.argv = ["-m", *program[2:]]
        _search_first(os.getcwd())
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
    elif pkgutil.get_importer(first) is not None:  # A folder or an archive.
        sys.path.insert(0, os.path.abspath(first))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _search_first(os.path.dirname(os.path.realpath(first)))
        path = os.path.abspath(first)
        loader = SourceFileLoader("__main__", path)
        module.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)


def _search_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _tell(error: BaseException) -> None:
    global _told
    if handover.tell(handover.described(error)):
        _told = error


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception, unless the launcher has it."""
    if error is not _told:
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    # The folder inserted above, and that of this file, which Python has put there.
    del sys.path[: 1 if getattr(sys.flags, "safe_path", False) else 2]
    main(sys.argv[2:], *map(int, sys.argv[1].split(",")))
