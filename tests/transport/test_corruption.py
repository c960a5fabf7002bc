"""One flipped bit on the way between two ranks: with checksums never a wrong result.

The connection to one rank leads through a forwarder (`tests.forwarder`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringreduce import testing
from ringreduce.communicator import formation
from ringreduce.pure import wire
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.vocabulary.errors import CorruptionError, RingReduceError
from tests import naive
from tests.forwarder import Flip, stand_before
from tests.rings import Ring

ROOT = Path(__file__).parents[2]

PROGRAM = """
sys.path.insert(0, {root!r})
from ringreduce.transport.zeromq import ZmqLink
from tests.forwarder import Flip, stand_before

# Nothing but the payload of the call in question holds these.
mark = np.frombuffer(b"what was sent is what is received, or somebody says so!!", np.float64)
flip = Flip(mark.tobytes(), 16, 5)
listen = ZmqLink.__init__
def through_the_forwarder(link, **options):
    listen(link, **options)
    if RANK == 1:
        stand_before(link, flip)
ZmqLink.__init__ = through_the_forwarder

ring = join()
def filled(count):
    return np.resize(mark, count)

def call():
    {call}
    say("finished", equal=np.array_equal(array, expected))
    ring.barrier()  # In a short exchange a rank may have what it needs; then it learns of it here.
attempt("result", call)
if ring.failure is not None:
    attempt("again", ring.barrier)
hold()
"""

# What each rank does, and what it must find in its array then.
CALLS = {
    "large all_reduce": "array, expected = filled(1 << 18), SIZE * filled(1 << 18); "
    "ring.all_reduce(array)",
    "small all_reduce": "array, expected = filled(40), SIZE * filled(40); ring.all_reduce(array)",
    "large broadcast": "array, expected = (RANK == 0) * filled(50_000), filled(50_000); "
    "ring.broadcast(array)",
    "inline broadcast": "array, expected = (RANK == 0) * filled(1000), filled(1000); "
    "ring.broadcast(array)",
    "large all_gather": "expected = np.tile(filled(50_000), SIZE); "
    "array = ring.all_gather(filled(50_000))",
    "small all_gather": "expected = np.tile(filled(20), SIZE); array = ring.all_gather(filled(20))",
}


def program(call: str) -> str:
    return PROGRAM.format(root=str(ROOT), call=CALLS[call])


@pytest.mark.parametrize("call", CALLS)
def test_a_flipped_bit_is_an_error_on_all_ranks_that_names_both(tmp_path: Path, call: str) -> None:
    with Ring(tmp_path, 3, program(call), integrity="crc32") as ring:
        facts = ring.wait("result")
        assert [fact["kind"] for fact in facts] == ["CorruptionError"] * 3, facts
        again = ring.wait("again")
        assert [fact["kind"] for fact in again] == ["CorruptionError"] * 3, again
        assert all(fact["equal"] for rank in range(3) for fact in ring.said(rank, "finished"))
        assert not ring.said(1, "finished")
        # In an exchange rank 2 sends to rank 1 as well, and may be the first.
        peer = facts[0]["peer"]
        assert peer in ({0, 2} if call.startswith("small") else {0})
        assert [fact["peer"] for fact in facts] == [peer] * 3
        for rank, fact in enumerate(facts):
            assert ("was told by rank 1" in fact["text"]) is (rank != 1)
            assert "rank 1 of 3 received" in fact["text"]
            assert f"changed on the way from rank {peer} (tcp://127.0.0.1:" in fact["text"]
        assert re.search(rf", in {call.split()[-1]} #\d+, \S", facts[1]["text"])
        sums = rf"CRC-32C is 0x[0-9a-f]{{8}}, rank {peer} sent 0x[0-9a-f]{{8}};"
        assert re.search(sums, facts[1]["text"])
        ring.release()


@pytest.mark.parametrize(
    ("call", "integrity"),
    [("large all_reduce", "off"), ("small all_reduce", "auto"), ("large broadcast", "auto")],
)
def test_without_checksums_the_same_bit_makes_a_wrong_result(
    tmp_path: Path, call: str, integrity: str
) -> None:
    """That the forwarder does what the test above relies on; on loopback auto is off."""
    with Ring(tmp_path, 3, program(call), integrity=integrity) as ring:
        facts = ring.wait("result")
        assert [fact["kind"] for fact in facts] == [""] * 3, facts
        assert not ring.said(1, "finished")[0]["equal"]
        ring.release()


class _Work:
    """An all-reduce on two ranks, the second of which is reached through a forwarder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, flip: Flip) -> None:
        listen = ZmqLink.__init__

        def through_the_forwarder(link: ZmqLink, **options: Any) -> None:
            listen(link, **options)
            if options["security"].rank == 1:
                stand_before(link, flip)

        monkeypatch.setattr(ZmqLink, "__init__", through_the_forwarder)
        self.results: list[Any] = [None, None]

    def run(self, count: int, **settings: Any) -> None:
        def work(comm: Any) -> None:
            array = np.arange(count, dtype=np.float64) * (comm.rank + 1)
            try:
                self.results[comm.rank] = comm.all_reduce(array)
            except RingReduceError as error:
                self.results[comm.rank] = error

        usual = {"transport": "zmq", "integrity": "crc32", "timeout_s": 3.0}
        testing.ring_of_threads(2, work, **(usual | settings))


@pytest.mark.parametrize("offset", range(wire.HEADER_BYTES))
def test_a_flipped_bit_in_a_header_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    start = wire.encode(wire.Header(wire.Kind.ALL_REDUCE, 0, 0, 0)).tobytes()[:6]
    flip = Flip(start, offset, offset % 8)
    work = _Work(monkeypatch, flip)
    work.run(40_000)
    assert flip.is_done
    for result in work.results:
        assert isinstance(result, RingReduceError), result
        assert "rank" in str(result)
        if wire.HEADER_BYTES - 12 <= offset < wire.HEADER_BYTES - 8:
            assert isinstance(result, CorruptionError)


def test_between_hosts_checksums_are_made_without_being_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formation, "listens_on_loopback", lambda address: False)
    flip = Flip(np.arange(30_000.0, 30_010.0).tobytes(), 4)
    work = _Work(monkeypatch, flip)
    work.run(40_000, integrity="auto")
    assert flip.is_done
    assert [type(result) for result in work.results] == [CorruptionError] * 2


def test_a_forwarder_that_changes_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = _Work(monkeypatch, Flip(b"never sent by anybody", 0))
    work.run(40_000)
    expected = naive.all_reduce(1, [np.arange(40_000.0), np.arange(40_000.0) * 2])
    for result in work.results:
        assert np.array_equal(result, expected)
