"""Runs a program whose Keras is changed as soon as the program has imported it.

Keras itself is not imported here: programs set its backend, and variables of TensorFlow, first.
All ranks begin with the same random numbers; a seed that the program sets comes later, and wins.
"""

import copy
import importlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Collection
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ringreduce.commands.launch.program import check_program
from ringreduce.commands.launch.start import run_program
from ringreduce.unchanged import packages, written
from ringreduce.unchanged.job import job
from ringreduce.vocabulary.worker_environment import choose_hash_seed

SEED = 1


def main(arguments: list[str]) -> None:
    """Run the program of these arguments: a path, or ``-m`` and a name, and its own."""
    if not arguments:
        sys.exit("usage: python -m ringreduce.unchanged [-m] PROGRAM [ARGUMENTS]")
    check_program(arguments)
    if job().size > 1:
        if choose_hash_seed():
            os.execv(sys.executable, sys.orig_argv)
        written.share_folders()
    random.seed(SEED)
    after = _After()
    after.call(("numpy",), _seed_numpy)
    after.call(("tensorflow",), lambda: sys.modules["tensorflow"].random.set_seed(SEED))
    after.call(("keras", "tensorflow"), _change_keras)
    # Keras with another backend may never import TensorFlow.
    after.call(("keras",), lambda: packages.require_tensorflow(sys.modules["keras"]))
    after.call(("tensorflow_datasets",), packages.download_once)
    for name in packages.PACKAGES:
        after.call((name,), partial(packages.replace_in, name))
    sys.meta_path.insert(0, after)
    run_program(arguments)


def _change_keras() -> None:
    importlib.import_module("ringreduce.unchanged.table").install()


def _seed_numpy() -> None:
    """Seed what numpy draws, also in generators that are made without a seed."""
    numpy = sys.modules["numpy"]
    numpy.random.seed(SEED)
    counter = itertools.count(1)
    # This draws the seeds of all generators made without one.
    numpy.random.bit_generator.randbits = lambda bits: next(counter) % (1 << bits)


class _After(MetaPathFinder):
    """Calls functions when modules have been imported."""

    def __init__(self) -> None:
        self._waiting: list[tuple[set[str], Callable[[], object]]] = []

    def call(self, names: Collection[str], function: Callable[[], object]) -> None:
        """Call `function` once all modules of these names are there."""
        self._waiting.append(({name for name in names if name not in sys.modules}, function))
        self._call_due()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec that others find, if something waits for that module."""
        if not any(name in missing for missing, _ in self._waiting):
            return None
        specs = (hook.find_spec(name, path, target) for hook in sys.meta_path if hook is not self)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            # Other modules may have the same one, as those of a zip file have.
            spec.loader = copy.copy(spec.loader)
            self._notice(name, spec.loader)
        return spec

    def _notice(self, name: str, loader: Any) -> None:
        """Have `loader` tell when it has run the module."""
        run = loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            del loader.exec_module  # From here on nobody sees that there was another.
            run(module)
            self._found(name)

        loader.exec_module = run_and_tell

    def _found(self, name: str) -> None:
        for missing, _ in self._waiting:
            missing.discard(name)
        self._call_due()

    def _call_due(self) -> None:
        due = [function for missing, function in self._waiting if not missing]
        self._waiting = [pair for pair in self._waiting if pair[0]]
        for function in due:
            function()
