"""Compiled functions that load quickly.

Before numba loads a function from its cache, it imports all that one could be compiled with, even
scipy.linalg: 0.3 s of processor time at the start of each rank. Only the compiler needs that, and
imports it itself. What is here leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys
from numba.core.sigutils import normalize_signature


def entry(function: Callable[..., Any]) -> Any:
    """Decorate a function that Python calls, which releases the GIL.

    Those that compiled functions call are part of their callers; `numba.njit` is enough for them.
    """
    compiled = numba.njit(nogil=True, cache=True)(function)
    compiled._cache = _Cache(function)
    return compiled


def callback(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile `function`, which C calls at the result's ``address``; keep the result."""
    compiled: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
    compiled._cache = _Cache(function)
    compiled.compile()
    return compiled


class _Cache(FunctionCache):  # type: ignore[misc]
    """Loads without `BaseContext.refresh`."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        rtsys.initialize(target_context)  # Compiled code counts references to arrays.
        return self._load_overload(sig, target_context)
