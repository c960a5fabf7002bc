"""Rings of threads over each transport."""

from collections.abc import Callable
from typing import Any

import pytest

from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads

# How the ranks reach each other.
WAYS: dict[str, dict[str, Any]] = {
    "shm": {},
    "zmq": {"transport": "zmq"},
    "sealed": {"transport": "zmq", "encryption": "on"},
    "hosts": {"hosts": ["a", "b", "a", "b", "a", "b"]},
}


@pytest.fixture(params=WAYS)
def on_ranks(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`ring_of_threads` over one of the transports."""
    way = dict(WAYS[request.param])

    def form(size: int, work: Callable[[Communicator], Any]) -> list[Any]:
        hosts = {"hosts": way["hosts"][:size]} if "hosts" in way else {}
        return ring_of_threads(size, work, **{**way, **hosts})

    return form
