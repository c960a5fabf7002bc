"""What programs/tensors.py said, for the tests that look at it: run once for each size."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from ringreduce.testing import JobResult, ring_of_processes

SIZES = (1, 2, 3)


@cache
def _job(size: int) -> JobResult:
    """How it ended, well or not: hundreds of tests ask, and must not each run it again."""
    return ring_of_processes(size, ["tests/programs/tensors.py"], timeout_s=60)


def facts_of(size: int) -> dict[str, list[Any]]:
    """By case, what each rank of a ring of `size` said."""
    result = _job(size)
    assert result.exit_code == 0, result.errors
    said: dict[str, list[Any]] = {}
    for line in result.output.splitlines():
        fact = json.loads(line.partition("] ")[2])
        said.setdefault(fact["case"], [None] * size)[fact["rank"]] = fact
    return said


def of_every_rank(case: str, size: int, how: str) -> list[Any]:
    """What came out of `case` on each rank, ``"eager"`` or in a ``"graph"``."""
    return [fact[how] for fact in facts_of(size)[case]]
