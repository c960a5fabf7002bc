"""What the programs of tests/programs say: a line of JSON for each case, from every rank."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

from ringreduce.testing import JobResult
from tests.jobs import run_job

__all__ = ["facts_in", "facts_of"]


def facts_of(program: str, size: int, transport: str = "auto") -> dict[str, dict[int, Any]]:
    """By case and rank, what ``programs/{program}.py`` said on a ring of `size`; run once."""
    result, said = _job(program, size, transport)
    assert result.exit_code == 0, result.errors
    return said


def facts_in(output: str) -> Iterator[dict[str, Any]]:
    """The facts in what the ranks printed; each line begins with its rank in brackets."""
    for line in output.splitlines():
        text = line.partition("] ")[2]
        if text.startswith("{"):
            yield json.loads(text)


@cache
def _job(program: str, size: int, transport: str) -> tuple[JobResult, dict[str, dict[int, Any]]]:
    """How it ended, well or not: hundreds of tests ask, and must not each run it again."""
    environment = {"RINGREDUCE_TRANSPORT": transport}
    result = run_job(size, [f"tests/programs/{program}.py"], timeout_s=60, environment=environment)
    said: dict[str, dict[int, Any]] = {}
    for fact in facts_in(result.output):
        said.setdefault(fact["case"], {})[fact["rank"]] = fact
    return result, said
