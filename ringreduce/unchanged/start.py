"""Runs a program whose Keras is changed as soon as the program has imported it.

Keras itself is not imported here: programs set its backend, and variables of TensorFlow, first.
All ranks begin with the same random numbers; a seed that the program sets comes later, and wins.
"""

import os
import sys
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from types import ModuleType, TracebackType

try:
    from wrapt import register_post_import_hook
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"--unchanged needs TensorFlow, and {error.name} is not installed: "
        'pip install "ringreduce[tensorflow]"',
        name=error.name,
    ) from error

from ringreduce.commands.launch import handover
from ringreduce.commands.launch.program import check_program
from ringreduce.commands.launch.start import run_program
from ringreduce.unchanged import draws, packages, written
from ringreduce.unchanged.job import job
from ringreduce.vocabulary.words import note_unchanged
from ringreduce.vocabulary.worker_environment import choose_hash_seed


def main(arguments: list[str]) -> None:
    """Run the program of these arguments: a path, or ``-m`` and a name, and its own."""
    if not arguments:
        sys.exit("usage: python -m ringreduce.unchanged [-m] PROGRAM [ARGUMENTS]")
    check_program(arguments)
    note_unchanged()
    if sys.excepthook is sys.__excepthook__:  # Else the launcher shows it.
        sys.excepthook = _show
    if job().size > 1:
        if choose_hash_seed():
            os.execv(sys.executable, sys.orig_argv)
        written.share_folders()
    draws.begin()
    _after(("numpy",), draws.begin_numpy)
    _after(("tensorflow",), draws.begin_tensorflow)
    _after(("keras", "tensorflow"), lambda: import_module("ringreduce.unchanged.table").install())
    # Keras with another backend may never import TensorFlow.
    _after(("keras",), lambda: packages.require_tensorflow(sys.modules["keras"]))
    _after(("tensorflow_datasets",), packages.download_once)
    for name in packages.PACKAGES:
        _after((name,), partial(packages.replace_in, name))
    run_program(arguments)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception, without the frames between two of the program's."""
    described = handover.described(error)
    if not described.whole:
        sys.__excepthook__(kind, error, trace)
        return
    hint = "(keras.config.disable_traceback_filtering() shows the frames that are left out)"
    print(*described.traceback, hint, sep="\n", file=sys.stderr)


def _after(names: Collection[str], function: Callable[[], object]) -> None:
    """Call `function` once all modules of these names have been imported."""
    missing = set(names)

    def found(name: str, _: ModuleType) -> None:
        missing.discard(name)
        if not missing:
            function()

    for name in names:
        register_post_import_hook(partial(found, name), name)
