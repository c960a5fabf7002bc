"""What programs/tensors.py said, for the tests that look at it: run once for each size."""

from __future__ import annotations

from typing import Any

import pytest

from ringreduce.effects import native
from tests import facts
from tests.scope import in_full

SIZES = (in_full(1), 2, in_full(3))
# XLA is given the ring by the native library.
needs_xla = pytest.mark.skipif(native.library() is None, reason="without the native library")
WAYS = ("eager", "graph", pytest.param("jit", marks=needs_xla))


def on_2_only(*ways: str) -> Any:
    """`size` and `how`: on 2 ranks those `ways`, and on 1 and 3, in `make test-full`, all."""
    marks = {"jit": (pytest.mark.full, needs_xla)}
    usual = [pytest.param(2, how, marks=needs_xla if how == "jit" else ()) for how in ways]
    others = [
        pytest.param(size, how, marks=marks.get(how, pytest.mark.full))
        for size in (1, 3)
        for how in ("eager", "graph", "jit")
    ]
    return pytest.mark.parametrize(("size", "how"), [*usual, *others])


def facts_of(size: int) -> dict[str, list[Any]]:
    """By case, what each rank of a ring of `size` said."""
    said = facts.facts_of("tensors", size)
    return {case: [by_rank.get(r) for r in range(size)] for case, by_rank in said.items()}


def of_every_rank(case: str, size: int, how: str) -> list[Any]:
    """What came out of `case` on each rank, ``"eager"``, in a ``"graph"`` or by ``"jit"``."""
    return [fact[how] for fact in facts_of(size)[case]]
