"""A ring of one rank, for tests of what needs no other."""

from collections.abc import Iterator

import pytest

import ringreduce
from ringreduce.communicator.communicator import Communicator


@pytest.fixture
def world_of_one() -> Iterator[Communicator]:
    """The default communicator, of one rank."""
    with ringreduce.init() as communicator:
        yield communicator
    ringreduce.shutdown()
