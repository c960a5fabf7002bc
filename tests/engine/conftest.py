"""No test here may leave the thread of an engine."""

from collections.abc import Iterator

import pytest

from tests.engine.engines import DEADLINE_S, engine_threads
from tests.processes import wait_until


@pytest.fixture(autouse=True)
def _no_engine_is_left() -> Iterator[None]:
    """`conftest` looks at threads that are no daemons; engines are."""
    before = engine_threads()
    yield
    wait_until(lambda: engine_threads() <= before, "the engines' threads to end", DEADLINE_S)
