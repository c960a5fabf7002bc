"""One flipped bit on the way between two ranks: in a sealed frame never a wrong result.

The connection to one rank leads through a forwarder (`tests.forwarder`).
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringreduce import testing
from ringreduce.pure import wire
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from ringreduce.transport.zeromq import ZmqLink
from ringreduce.vocabulary.errors import CorruptionError, RingReduceError
from tests import naive
from tests.forwarder import Flip, stand_before
from tests.rings import Ring

ROOT = Path(__file__).parents[2]

PROGRAM = """
sys.path.insert(0, {root!r})
from ringreduce.pure import wire
from ringreduce.transport.frames import SEALED_OVERHEAD_BYTES
from ringreduce.transport.zeromq import ZmqLink
from tests.forwarder import Flip, stand_before

# Nothing but the payload of the call in question holds these.
mark = np.frombuffer(b"what was sent is what is received, or somebody says so!!", np.float64)
# Of a sealed frame only the header can be found, and in it the kind of the call.
start = wire.encode(wire.Header(wire.Kind[{name!r}], 0, 0, 0)).tobytes()[:6]
flip = Flip(start, SEALED_OVERHEAD_BYTES + {offset}, 5) if {sealed} else Flip(mark.tobytes(), 16, 5)
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


def program(call: str, *, sealed: bool) -> str:
    fields = {
        "root": str(ROOT),
        "call": CALLS[call],
        "name": call.split()[-1].upper(),
        "sealed": sealed,
        # Into the ciphertext; where that is a second part, its length comes first, in nine bytes.
        "offset": 13 if call == "large all_reduce" else 4,
    }
    return PROGRAM.format(**fields)


def ring(directory: Path, call: str, encryption: str) -> Ring:
    return Ring(
        *(directory, 3, program(call, sealed=encryption == "on")),
        secret=secrets.token_hex(32),
        encryption=encryption,
    )


@pytest.mark.parametrize("call", CALLS)
def test_a_flipped_bit_is_an_error_on_all_ranks_that_names_both(tmp_path: Path, call: str) -> None:
    with ring(tmp_path, call, "on") as members:
        facts = members.wait("result")
        assert [fact["kind"] for fact in facts] == ["CorruptionError"] * 3, facts
        again = members.wait("again")
        assert [fact["kind"] for fact in again] == ["CorruptionError"] * 3, again
        assert all(fact["equal"] for rank in range(3) for fact in members.said(rank, "finished"))
        assert not members.said(1, "finished")
        # In an exchange, as of lengths to gather, rank 2 sends to rank 1 too, and may be first.
        peer = facts[0]["peer"]
        assert peer in ({0, 2} if call.startswith("small") or call.endswith("gather") else {0})
        assert [fact["peer"] for fact in facts] == [peer] * 3
        for rank, fact in enumerate(facts):
            assert ("was told by rank 1" in fact["text"]) is (rank != 1)
            assert "rank 1 of 3 received" in fact["text"]
            assert f"received a frame from rank {peer} (tcp://127.0.0.1:" in fact["text"]
            assert "that does not open with the key of this connection" in fact["text"]
        assert re.search(rf", in {call.split()[-1]} #\d+, \S", facts[1]["text"])
        members.release()


@pytest.mark.parametrize(
    ("call", "encryption"),
    [("large all_reduce", "off"), ("small all_reduce", "auto"), ("large broadcast", "auto")],
)
def test_unsealed_the_same_bit_makes_a_wrong_result(
    tmp_path: Path, call: str, encryption: str
) -> None:
    """That the forwarder does what the test above relies on; on loopback auto is off."""
    with ring(tmp_path, call, encryption) as members:
        facts = members.wait("result")
        assert [fact["kind"] for fact in facts] == [""] * 3, facts
        assert not members.said(1, "finished")[0]["equal"]
        members.release()


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

        usual = {"transport": "zmq", "timeout_s": 3.0}
        testing.ring_of_threads(2, work, **(usual | settings))


@pytest.mark.parametrize(
    ("encryption", "offset"),
    [("off", offset) for offset in range(0, wire.HEADER_BYTES, 5)]
    + [("on", offset) for offset in range(0, SEALED_OVERHEAD_BYTES, 5)],
)
def test_a_flipped_bit_in_a_header_or_a_tag_is_an_error_too(
    monkeypatch: pytest.MonkeyPatch, encryption: str, offset: int
) -> None:
    start = wire.encode(wire.Header(wire.Kind.ALL_REDUCE, 0, 0, 0)).tobytes()[:6]
    flip = Flip(start, offset, offset % 8)
    work = _Work(monkeypatch, flip)
    work.run(40_000, encryption=encryption)
    assert flip.is_done
    for result in work.results:
        assert isinstance(result, RingReduceError), result
        assert "rank" in str(result)
        if encryption == "on":
            assert isinstance(result, CorruptionError)


def test_a_forwarder_that_changes_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    work = _Work(monkeypatch, Flip(b"never sent by anybody", 0))
    work.run(40_000)
    expected = naive.all_reduce(1, [np.arange(40_000.0), np.arange(40_000.0) * 2])
    for result in work.results:
        assert np.array_equal(result, expected)
