"""What ranks are told of a link that is too long for one connection."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from ringreduce.communicator import formation
from ringreduce.communicator.communicator import Communicator
from ringreduce.testing import ring_of_threads
from ringreduce.transport import routes


@pytest.fixture
def warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, request: Any
) -> list[str]:
    """Of a ring of three hosts, where a round trip takes as long as the parameter says."""
    round_trip_s, streams = request.param
    networks = ("127.0.0.1/8", "127.0.0.2/8")
    monkeypatch.setattr(formation, "own_networks", lambda config: networks)
    monkeypatch.setattr(routes, "_round_trip_s", lambda connected: round_trip_s)

    def work(comm: Communicator) -> float:
        return float(comm.all_reduce(np.ones(1))[0])

    assert ring_of_threads(3, work, transport="zmq", streams=streams) == [3.0] * 3
    return sorted(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)


@pytest.mark.parametrize("warnings", [(0.0404, 1)], indirect=True)
def test_a_long_link_is_a_warning_of_each_rank_that_says_what_helps(warnings: list[str]) -> None:
    assert [each[: len("[0/3] a round trip")] for each in warnings] == [
        f"[{rank}/3] a round trip" for rank in range(3)
    ]
    for rank, each in enumerate(warnings):
        assert f"to rank {(rank + 1) % 3} takes 40 ms" in each
        assert "RINGREDUCE_STREAMS" in each


@pytest.mark.parametrize("warnings", [(0.0404, 2), (0.0049, 1), (None, 1)], indirect=True)
def test_who_chose_streams_or_has_a_short_link_is_told_nothing(warnings: list[str]) -> None:
    assert warnings == []
