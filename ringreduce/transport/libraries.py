"""The C libraries that pyzmq brings, for compiled functions.

pyzmq opens them privately. The same files are opened here for LLVM's linker, so that compiled
functions call them by name; names, unlike ctypes function pointers, can be cached on disk with the
compiled code. Addresses are passed as intp: the C ABI passes pointers and 64-bit integers alike on
every platform that has wheels.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Iterator
from typing import Any

import llvmlite.binding
import zmq
import zmq.backend
from numba import types


def declare(name: str, result: Any, *arguments: Any) -> Any:
    """The C function `name`, as compiled functions call it."""
    return types.ExternalFunction(name, result(*arguments))


def load(name: str, function: str) -> tuple[ctypes.CDLL | None, list[str]]:
    """Make the library `name`, such as ``libzmq``, known to compiled code.

    Returns it, or None and the files that do not have `function`, with reasons.
    """
    tried = []
    for path in _candidates(name):
        try:
            library = ctypes.CDLL(path)
            if hasattr(library, function):
                llvmlite.binding.load_library_permanently(path)
                return library, []
            tried.append(f"{path} (no {function} in it)")
        except (OSError, RuntimeError) as error:
            tried.append(f"{path} ({error})")
    return None, tried


def _candidates(name: str) -> Iterator[str]:
    """Files that may contain the library which pyzmq has already loaded, likeliest first."""
    if sys.platform == "linux":
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            # pyzmq's libraries are mapped by now, whether a wheel's, conda's or the system's.
            mapped = {line.split(maxsplit=5)[5].strip() for line in maps if name in line}
        yield from sorted(mapped)
    package = os.path.dirname(zmq.__file__)
    yield from sorted(glob.glob(os.path.join(package, ".dylibs", f"{name}*")))
    yield from sorted(glob.glob(os.path.join(os.path.dirname(package), "pyzmq.libs", f"{name}*")))
    # Some builds link them into the extension module itself.
    extension = sys.modules.get("zmq.backend.cython._zmq")
    if extension is not None and extension.__file__ is not None:
        yield extension.__file__
