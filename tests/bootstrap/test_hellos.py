"""Hellos that nobody should send, from a rank with the key, at a ring that forms.

It refuses them, or ends with an error that names the rank. Nothing may crash, hang or take memory
beyond its limits.
"""

import functools
import os
import random
import secrets
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

import ringreduce as rr
from ringreduce._version import __version__
from ringreduce.bootstrap.admission import Members
from ringreduce.bootstrap.hello import Hello, read
from ringreduce.pure.wire import WIRE_VERSION
from ringreduce.testing import ring_of_threads
from ringreduce.transport.security import Security
from tests.bootstrap import hellos
from tests.bootstrap.test_rendezvous import Meeting, meeting_at
from tests.fuzzing import bounded_memory, mutate_bytes
from tests.processes import DEADLINE_S

RING = {"secret": secrets.token_hex(32), "transport": "zmq"}
# Of ranks that are told to use sockets.
hello = functools.partial(hellos.hello, settings=rr.Config(transport="zmq").agreed())


@pytest.fixture(scope="module", autouse=True)
def _calls_are_compiled():
    """Else the memory that this takes would count as what hellos have made us take."""
    ring_of_threads(2, lambda comm: comm.all_reduce(np.ones(1)), transport="zmq")


@contextmanager
def forming() -> Iterator[tuple[Meeting, Future[rr.Communicator], zmq.Socket[bytes]]]:
    """A meeting of two ranks, rank 0 at it, and a socket there that knows the secret."""
    with (
        meeting_at("127.0.0.1") as meeting,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as erring,
    ):
        erring.setsockopt(zmq.LINGER, 0)
        erring.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
        erring.setsockopt(zmq.SNDHWM, 0)
        Security.of(meeting.config(0, 2, **RING)).join_meeting(erring)
        erring.connect(f"tcp://{meeting.address}")
        yield meeting, meeting.join(0, 2, **RING), erring


# What a rank with the key says instead of its Hello, and the job goes on without it.
HELLOS: dict[str, list[bytes]] = {
    "nothing": [b""],
    "no msgpack": [b"\xc1"],
    "random bytes": [random.Random(3).randbytes(1000)],
    "another type": [msgspec.msgpack.encode({"type": "Table"})],
    "few fields": [msgspec.msgpack.encode({"type": "Hello"})],
    "great depth": [b"\x91" * 100_000],
    "great depth inside": [b"\x82\xa4type\xa5Hello\xa5extra" + b"\x91" * 100_000 + b"\xc0"],
    "a text of 2^32": [b"\xdb\xff\xff\xff\xff" + bytes(1000)],
    "a long list": [msgspec.msgpack.encode([1] * 100_000)],
    "a host of 1 MB": [hello(host="x" * 1_000_000, job_id="theirs")],
    "no UTF-8": [hello().replace(b"elsewhere", b"\xff\xfe\xfd\xfc\xff\xfe\xfd\xfc\xff")],
    "control characters": [hello(host="\x1b[2J\r\n" * 100, job_id="theirs")],
    **{f"rank {rank!r}": [hello(rank=rank)] for rank in (-1, 2, 1 << 31, 1 << 63, 0, "1", 1.5)},
    "no key at all": [hello(key=None)],
    "settings as text": [hello(settings="all")],
    "an address as network": [hello(networks=["10.0.0.4/24", "localhost/8"])],
    "a prefix of 33": [hello(networks=["10.0.0.4/33"])],
    "networks of 1 MB": [hello(networks=["1" * 100_000] * 9)],
    "ten thousand networks": [hello(networks=["10.0.0.4/24"] * 10_000)],
    "another job": [hello(job_id="theirs")],
    "a job of 1 MB": [hello(job_id="x" * 1_000_000)],
    "many parts": [b"a", b"", b"c"],
    "a thousand parts": [b"x"] * 1000,
}
# What some are told.
TOLD = {f"rank {rank}": "has no place in a ring of 2" for rank in (-1, 2, 1 << 31)}
TOLD["rank 0"] = "rank 0 came twice"


def test_no_hello_that_is_wrong_hurts_a_ring_that_forms():
    with forming() as (meeting, first, erring), bounded_memory(os.getpid()):
        for name, parts in HELLOS.items():
            erring.send_multipart(parts)
            # The answer to what comes after it shows that it was read.
            erring.send(hello(job_id="theirs", host=f"after {name}"))
            texts = []
            while (told := msgspec.msgpack.decode(erring.recv()))["type"] == "Refusal":
                texts.append(told["text"])
                assert len(texts[-1]) < 2000
                assert texts[-1].isprintable()
                if f"(after {name})" in texts[-1]:
                    break
            assert any(TOLD.get(name, "") in text for text in texts), texts
        while erring.poll(0):
            erring.recv()
        assert meeting.all_reduce(first, meeting.join(1, 2, **RING)) == [2, 2]


def test_a_flood_of_hellos_is_answered_for_a_while_only():
    with forming() as (meeting, first, erring), bounded_memory(os.getpid()):
        for _ in range(5000):
            erring.send(hello(job_id="theirs"))
        assert meeting.all_reduce(first, meeting.join(1, 2, **RING)) == [2, 2]
        answers = [erring.recv() for _ in iter(lambda: erring.poll(100), 0)]
        assert len(answers) <= 260


def assert_ends(error: Any, *texts: str) -> None:
    """Rank 0 has raised an error of ours, of bounded length, with these texts."""
    assert isinstance(error, rr.RingReduceError)
    assert all(text in str(error) for text in texts), error
    assert len(str(error)) < 2000


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"size": 3}, "has size 3, rank 0 has 2"),
        ({"size": 1 << 40}, "has size 1099511627776, rank 0 has 2"),
        ({"version": "0.0.1"}, f"has ringreduce 0.0.1, rank 0 has {__version__}"),
        ({"version": "9" * 100_000}, "has ringreduce 999"),
        ({"wire_version": 99}, f"has wire version 99, rank 0 has {WIRE_VERSION}"),
        ({"settings": {str(i): i for i in range(10_000)}}, "has settings {'0': 0"),
        ({"key": "~" * 40}, "keys that are not one for each rank"),
        ({"key": ""}, "keys that are not one for each rank"),
    ],
)
def test_a_rightful_rank_with_another_opinion_ends_it_by_name(fields, text):
    with forming() as (_, first, erring):
        erring.send(hello(**fields))
        assert_ends(first.exception(DEADLINE_S), text)
        if "key" not in fields:
            told = msgspec.msgpack.decode(erring.recv())
            assert told["mismatch"]
            assert text in told["text"]


@pytest.mark.parametrize(
    "address",
    [
        *("", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "ipc:///tmp/x", "tcp://127.0.0.1:1,2,3"),
        *("\0" * 99, "x" * 10_000, "tcp://no-such-host.invalid:1", "tcp://127.0.0.1:99999"),
    ],
)
def test_a_rank_with_an_impossible_address_is_a_named_error(address):
    with forming() as (_, first, erring):
        erring.send(hello(address=address, key=zmq.curve_keypair()[0].decode()))
        assert_ends(first.exception(DEADLINE_S), "rank 1")


def test_mutated_hellos_admit_nobody_who_has_no_place(chance):
    own = read(hello(rank=0))
    assert isinstance(own, Hello)
    config = rr.Config(size=2, rendezvous="127.0.0.1:1", job_id="ours")
    longest = 0
    for _ in range(20_000):
        said = read(mutate_bytes(chance, hello(rank=chance.choice((0, 1, 2)))))
        if not isinstance(said, Hello):
            continue
        members = Members(config, own)
        try:
            refusal = members.admit(b"x", said)
        except rr.RingReduceError as error:
            longest = max(longest, len(str(error)))
            continue
        assert (not members.missing) == (refusal is None)
        assert members.identities == ({b"x": 1} if refusal is None else {})
        admitted = (said.rank, said.job_id, said.size, said.settings)
        assert refusal is not None or admitted == (1, "ours", 2, own.settings)
    assert longest < 2000
