"""Compiled functions that load quickly, and are compiled anew when anything here has changed.

Before numba loads a function from its cache, it imports all that one could be compiled with, even
scipy.linalg: 0.3 s of processor time at the start of each rank. What is here leaves that to the
compiler. And numba compiles a function anew when the function's own file has changed; but it
contains constants, record layouts and functions of other files: after an update of one of these it
would read and write the wrong memory. Where numba finds no place for them, as in a container with
an unknown user, they are kept in a folder of our own, or not at all.
"""

import glob
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature
from numba.misc.appdirs import AppDirs

from ringreduce.vocabulary.own_folder import own_folder

_log = logging.getLogger(__name__)


def jit(function: Callable[..., Any]) -> Any:
    """Decorate a function to compile. Called by Python, it releases the GIL."""
    compiled = numba.njit(nogil=True)(function)
    compiled._cache = _cache_of(function)
    return compiled


def callback(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile `function`, which C calls at the result's ``address``; keep the result."""
    compiled: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
    compiled._cache = _cache_of(function)
    compiled.compile()
    return compiled


def _cache_of(function: Callable[..., Any]) -> Any:
    # Without a home numba would make a folder named ~.
    if numba.config.CACHE_DIR or os.path.isabs(AppDirs("numba", appauthor=False).user_cache_dir):
        with suppress(RuntimeError):
            return _Cache(function)
    numba.config.CACHE_DIR = _own_folder()
    return _Cache(function) if numba.config.CACHE_DIR else NullCache()


@cache
def _own_folder() -> str:
    """A folder that no other user can enter or exchange, since caches are pickles; empty: none."""
    try:
        return own_folder()
    except OSError as error:
        text = "each process compiles its functions, since the home cannot be written, and %s; "
        _log.warning(text + "NUMBA_CACHE_DIR names a folder to keep them", error)
        return ""


# Folders of compiled functions that lacked one, which was compiled anew.
incomplete: set[str] = set()


class _Cache(FunctionCache):  # type: ignore[misc]
    """Loads without `BaseContext.refresh`, and only what was compiled from the present sources."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        package = function.__module__.partition(".")[0]
        stamp = self._cache_file._source_stamp
        self._cache_file._source_stamp = stamp, _sources(package)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # Compiled code counts references to arrays.
        overload = self._load_overload(sig, target_context)
        if overload is None:
            incomplete.add(self.cache_path)
        return overload

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # A full disk, for example: the next process compiles it.
            super().save_overload(sig, data)


@cache
def _sources(package: str) -> str:
    """A digest of what there is of each file of a package: name, time of the last change, size."""
    files = []
    # Of an editable installation the first folder has what was built, and no sources.
    for folder in filter(os.path.isdir, sys.modules[package].__path__):
        # Leaves out hidden files, such as an editor's lock, a link to nowhere.
        for name in glob.iglob("**/*.py", root_dir=folder, recursive=True):
            facts = os.stat(os.path.join(folder, name))
            files.append((name, facts.st_mtime_ns, facts.st_size))
    return hashlib.blake2b(repr(sorted(files)).encode(), digest_size=16).hexdigest()
